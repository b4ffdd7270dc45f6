"""Trees as lists, and a lower model in NumPy's float64 that reads one node after the other."""

import numpy as np


def by_hand(text, tree, path, drawn=None):
    """(kept, all) tokens of each node of one chunk, leaves first: lists, one level at a time."""
    found, rest = [], list(text)
    for level in range(1, tree.depth):
        half = len(rest) // 2
        away = 0
        if drawn is not None:
            away = int(np.float32(drawn[level - 1]) * np.float32(half) / np.float32(tree.noise))
            most = min(int(1024 * 3 / tree.noise) * half // 1024, max(half - 1, 0))
            away = max(-most, min(most, away))
        middle = len(rest) - half - away
        halves = rest[:middle], rest[middle:]
        rest, node = (halves[1], halves[0]) if path[level - 1] else halves
        found.append((node, level))
    middle = len(rest) - len(rest) // 2
    found += [(rest[middle:], tree.depth), (rest[:middle], tree.depth)]
    found.reverse()
    return [(node[:: tree.ratios[level - 1]], node) for node, level in found]


def turned(x, positions, theta):
    """x [T, heads, H] rotated to `positions` [T]."""
    half = x.shape[-1] // 2
    angle = np.asarray(positions, np.float64)[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def norm(x, scale, epsilon):
    return scale * x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def layer_of(layers, index):
    """The weights of one layer of stacked ones, float64."""
    if isinstance(layers, dict):
        return {name: layer_of(child, index) for name, child in layers.items()}
    return np.asarray(layers[index], np.float64)


def lower_model(encoder, config, tokens):
    """(keys, values) [T, K, H] of each layer for one node by itself, and its last states [T, D].

    Keys are rotated to the places 0, 1, ... of the node; `encoder` is the branch of parameters.
    """
    x = np.asarray(encoder["embed"]["embedding"], np.float64)[list(tokens)]
    places, theta, found = np.arange(len(tokens)), config.rope.theta, []
    group = config.num_heads // config.num_kv_heads
    seen = np.tril(np.ones((len(tokens),) * 2, bool))
    for index in range(config.num_layers):
        w = layer_of(encoder["layers"], index)
        y = norm(x, w["attention_norm"]["scale"], config.norm_epsilon)
        q, k, v = (
            np.einsum("td,dnh->tnh", y, w["attention"][name]["kernel"])
            for name in ("query", "key", "value")
        )
        q, k = turned(q, places, theta), turned(k, places, theta)
        found.append((k, v))
        logits = np.einsum("tnh,snh->nts", q, k.repeat(group, 1)) / np.sqrt(config.head_dim)
        share = softmax(np.where(seen, logits, -np.inf))
        out = np.einsum("nts,snh->tnh", share, v.repeat(group, 1))
        x = x + np.einsum("tnh,nhd->td", out, w["attention"]["out"]["kernel"])
        y = norm(x, w["mlp_norm"]["scale"], config.norm_epsilon)
        gate, up = (y @ w["mlp"][name]["kernel"] for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["mlp"]["down"]["kernel"]
    scale = np.asarray(encoder["final_norm"]["scale"], np.float64)
    return found, norm(x, scale, config.norm_epsilon)


def tree_keys(encoder, config, nodes, number, positions="paper"):
    """(keys, values) [M, K, H] of each layer: what is kept of the nodes of chunk `number`.

    `nodes` as `by_hand` gives them. Keys are rotated to `number` on top of their places in nodes,
    with `chunk_index` to `number` alone (equation 6).
    """
    theta = config.rope.theta
    parts = []
    for kept, node in nodes:
        if node:
            at = [node.index(token) for token in kept]
            layers, _ = lower_model(encoder, config, node_tokens(node))
            back = -np.array(at) if positions == "chunk_index" else np.zeros(len(at))
            parts.append([(turned(k[at], back, theta), v[at]) for k, v in layers])
    together = [tuple(map(np.concatenate, zip(*layer, strict=True))) for layer in zip(*parts)]
    return [(turned(k, np.full(len(k), number), theta), v) for k, v in together]


def node_tokens(node):
    """The ids of (place, id) pairs."""
    return [token for _, token in node]


def searched(encoder, config, tree, tokens, query):
    """The path of one chunk by cosines with `query` [D]."""
    lower, path, rest = _first(encoder, config), [], list(tokens)
    for _ in range(tree.depth - 1):
        middle = len(rest) - len(rest) // 2
        halves = rest[:middle], rest[middle:]
        likes = []
        for half in halves:
            state = lower_model(*lower, half)[1][-1]
            likes.append(state @ query / (np.linalg.norm(state) * np.linalg.norm(query)))
        path.append(bool(likes[1] > likes[0]))
        rest = halves[path[-1]]
    return path


def _first(encoder, config):
    return encoder, config.replace(num_layers=1)
