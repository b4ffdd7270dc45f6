"""The golden cases of attention chosen by the data: `tests/golden/sparse_attention.md`."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from attention_golden import FOLDER

from lcjax.attention import AttentionMetadata, order_indices
from lcjax.attention.prompt_blocks import PromptHead
from lcjax.rope.rotation import no_rotation

FILE = FOLDER / "sparse_attention.json"
_BY_HEAD = {"q", "k", "v", "cotangent", "dq", "dk", "dv"}


@functools.cache
def params(case):
    return json.loads(FILE.read_text())["cases"][case]["params"]


@functools.cache
def arrays(case):
    """The arrays of a case; q, k, v, outputs and gradients as [batch, time, heads, size]."""
    with np.load(FILE.with_suffix(".npz")) as data:
        names = [name for name in data.files if name.startswith(f"{case}.")]
        loaded = {name.removeprefix(f"{case}."): data[name] for name in names}
    return {
        name: x.swapaxes(1, 2) if name in _BY_HEAD or name.startswith("out") else x
        for name, x in loaded.items()
    }


def metadata(params: dict) -> AttentionMetadata:
    """Returns the metadata of a case, whose positions are not rotated."""
    ends = params["cu_seqlens"]
    lengths = np.diff(ends)
    segments = jnp.asarray(np.repeat(np.arange(1, len(ends)), lengths)[None], jnp.int32)
    index = order_indices(segments)
    if len(lengths) == 1:
        return AttentionMetadata(index, index)
    documents = {"q_segments": segments, "k_segments": segments}
    return AttentionMetadata(index, index, q_index=index, k_index=index, **documents)


@functools.partial(jax.jit, static_argnames=("pattern", "row_indices"))
def attend(pattern, q, k, v, segments=None, row_indices=True):
    """Attention of the last queries over all keys, with order indices of the `segments`."""
    at = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
    first = k.shape[1] - q.shape[1]
    index = at if segments is None else order_indices(segments)
    metadata = AttentionMetadata(
        index[:, first:],
        index,
        rotation=no_rotation(),
        q_index=index[:, first:],
        k_index=index,
        q_segments=None if segments is None else segments[:, first:],
        k_segments=segments,
        row_indices=(at[0, first:], at[0]) if row_indices else None,
    )
    return pattern.attend(q, k, v, metadata)


def prompt_head(q, k, block=1):
    """What a head with these rotated queries and keys [T, H] chooses by, in whole blocks."""
    length = len(q)
    size = -(-length // block) * block
    q, k = (np.pad(x, [(0, size - length), (0, 0)]).astype(np.float32) for x in (q, k))
    is_token = np.arange(size) < length
    return PromptHead(*map(jnp.asarray, (q, k, is_token, is_token, np.int32(0))))


def heads(case, block):
    """What each query head of a case chooses by."""
    x = arrays(case)
    q, k = x["q"][0], x["k"][0]
    group = q.shape[1] // k.shape[1]
    return [prompt_head(q[:, n], k[:, n // group], block) for n in range(q.shape[1])]


NEEDLES = {"token": slice(300, 301), "block": slice(256, 320)}


def needle(seed, kind):
    """Queries and keys [1024, 64] that attend to the first key, and to a needle from 512 on."""
    rng = np.random.default_rng(seed)
    k, q = rng.normal(size=(1024, 64)), 0.5 * rng.normal(size=(1024, 64))
    sink, unit = (x / np.linalg.norm(x) for x in rng.normal(size=(2, 64)))
    k[0] += 24 * sink
    q += 2 * sink
    q[512:] += {"token": 5, "block": 10}[kind] * unit
    k[NEEDLES[kind]] += {"token": 16, "block": 4}[kind] * unit
    return q, k


def recall(q, k, chosen, kind, block, rows=None):
    """Means over queries from 512 on of a choice of blocks, by blocks of `rows` queries.

    They are the attention to visible keys, how much of the needle is visible, and the share of past
    keys that are visible.
    """
    past = np.tril(np.ones((len(q), len(k)), bool))
    visible = (
        np.kron(chosen, np.ones((block if rows is None else rows, block), bool)).astype(bool) & past
    )
    logits = np.where(past, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mass, hit = (weights * visible).sum(-1), visible[:, NEEDLES[kind]].mean(-1)
    density = visible.sum(-1) / past.sum(-1)
    return [x[512:].mean() for x in (mass, hit, density)]


def check_needles(pattern, kind, mass, density):
    """Checks the means of two seeds, which may miss values of other seeds by 0.04."""
    choose, recalls = jax.jit(pattern.choose), []
    for seed in (0, 1):
        q, k = needle(seed, kind)
        chosen = np.asarray(choose(prompt_head(q, k)))
        recalls.append(recall(q, k, chosen, kind, pattern.block))
    mean_mass, hit, mean_density = np.mean(recalls, 0)
    assert mean_mass > mass - 0.04 and hit == 1 and mean_density < density + 0.04
