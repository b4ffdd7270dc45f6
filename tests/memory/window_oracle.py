"""Activation Beacon and AutoCompressor in NumPy: every window by itself, every mask written out.

Made from the formulas of the papers, in float64 and without padding; no line is shared with lcjax.
"""

import numpy as np


class Llama:
    """A Llama of the weights of one of ours, stacked or not; rotations of base `theta`."""

    def __init__(self, params, config):
        self.tree, self.config = params, config
        self.layers = [self._layer(index) for index in range(config.num_layers)]
        self.table = np.float64(params["embed"]["embedding"])
        self.own = np.float64(params["encoder"]["embedding"]) if "encoder" in params else None

    def _layer(self, index):
        def leaves(tree):
            if isinstance(tree, dict):
                return {name: leaves(child) for name, child in tree.items()}
            return np.float64(tree[index] if "layers" in self.tree else tree)

        return leaves(self.tree.get("layers") or self.tree[f"layers_{index}"])

    def norm(self, x, weights):
        mean = np.square(x).mean(-1, keepdims=True) + self.config.norm_epsilon
        return x / np.sqrt(mean) * weights["scale"]

    def turn(self, x, positions):
        """x [T, heads, H] rotated to `positions`, halves of channels in pairs."""
        half = x.shape[-1] // 2
        inv = self.config.rope.theta ** (-np.arange(half) / half)
        angle = (np.asarray(positions)[:, None] * inv)[:, None]
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def __call__(self, x, positions, sees, memory=None, beacons=0):
        """Last hidden states of x [T, D] and what layers project, keys before their rotation.

        `memory`: (keys, values) [M, K, H] of each layer, standing at 0 ... M-1; sees bool
        [T, M + T]; the last `beacons` rows have their own projections.
        """
        c, projected, text = self.config, [], len(x) - beacons
        for index, layer in enumerate(self.layers):
            own = layer["attention"].get("memory")
            h = self.norm(x, layer["attention_norm"])

            def by_kind(name, h, axes, layer=layer, own=own):
                first = np.tensordot(h[:text], layer["attention"][name]["kernel"], axes)
                if not beacons:
                    return first
                return np.concatenate([first, np.tensordot(h[text:], own[name]["kernel"], axes)])

            q, k, v = (by_kind(name, h, 1) for name in ("query", "key", "value"))
            projected.append((k, v))
            before = memory[index] if memory else (k[:0], v[:0])
            places = np.concatenate([np.arange(len(before[0])), positions])
            keys = self.turn(np.concatenate([before[0], k]), places)
            values = np.concatenate([before[1], v])
            group = c.num_heads // c.num_kv_heads
            keys, values = (np.repeat(part, group, 1) for part in (keys, values))
            logits = np.einsum("tnh,snh->nts", self.turn(q, positions), keys) / np.sqrt(c.head_dim)
            logits = np.where(sees, logits, -np.inf)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            x = x + by_kind("out", np.einsum("nts,snh->tnh", weights, values), 2)
            h, mlp = self.norm(x, layer["mlp_norm"]), layer["mlp"]
            gate = h @ mlp["gate"]["kernel"]
            x = x + (gate / (1 + np.exp(-gate)) * (h @ mlp["up"]["kernel"])) @ mlp["down"]["kernel"]
        return self.norm(x, {"scale": np.float64(self.tree["final_norm"]["scale"])}), projected

    def logits(self, hidden):
        if self.config.tie_embeddings:
            return hidden @ self.table.T
        return hidden @ np.float64(self.tree["head"]["kernel"])


def causal(count, before=0):
    return np.tril(np.ones((count, before + count), bool), before)


def with_beacons(model, windows, text, ratios):
    """Logits [T, V] of `text` behind windows of tokens, each condensed by its ratio; 0: not at all.

    And how many keys each window has left.
    """
    memory = [(np.zeros((0, *_heads(model))),) * 2 for _ in model.layers]
    left = []
    for tokens, ratio in zip(windows, ratios, strict=True):
        m, size = len(memory[0][0]), len(tokens)
        ends = [min(end, size) for end in range(ratio, size + ratio, ratio)] if ratio else []
        k = len(ends)
        sees = np.zeros((size + k, m + size + k), bool)
        sees[:, :m] = True
        sees[:size, m : m + size] = causal(size)
        for i, end in enumerate(ends):
            sees[size + i, m : m + end] = True
            sees[size + i, m + size + i] = True
        x = np.concatenate([model.table[tokens], np.repeat(model.own, k, 0)])
        positions = m + np.array([*range(size), *ends])
        _, projected = model(x, positions, sees, memory, k)
        kept = slice(size, None) if ratio else slice(None)
        memory = [
            tuple(np.concatenate([old, new[kept]]) for old, new in zip(*pair, strict=True))
            for pair in zip(memory, projected, strict=True)
        ]
        left.append(len(memory[0][0]) - m)
    m = len(memory[0][0])
    hidden, _ = model(model.table[text], m + np.arange(len(text)), causal(len(text), m), memory)
    return model.logits(hidden), left


def _heads(model):
    return model.config.num_kv_heads, model.config.head_dim


def with_summaries(model, segments, text):
    """Logits [T, V] of `text` behind the summaries of segments: one causal row of vectors each."""
    prompt = np.zeros((0, model.table.shape[1]))

    def read(rest):
        x = np.concatenate([prompt, rest])
        return model(x, np.arange(len(x)), causal(len(x)))[0]

    for tokens in segments:
        summary = read(np.concatenate([model.table[tokens], model.own]))[-len(model.own) :]
        prompt = np.concatenate([prompt, summary])
    return model.logits(read(model.table[text])[len(prompt) :])
