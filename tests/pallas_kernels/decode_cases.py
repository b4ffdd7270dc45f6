"""Few queries over a cache: inputs, and what the dense reference says of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Alibi, Scaled, causal, everything, reference, window
from pallas_kernels.masks import Mask


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, places and options."""

    batch: int = 2
    t: int = 1
    s: int = 301
    heads: int = 6
    kv_heads: int = 2
    size: int = 32
    v_size: int = 32
    mask: Mask = causal()
    offset: int | None = 250  # place of the first query; None: every row's queries at its own
    filled: int | None = None  # keys that are there
    padding: bool = False  # the first keys of the rows are padding, and the last query
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    dtype: str = "float32"
    codes: str | None = None  # the dtype of keys and values as codes


CASES = {
    "one query, three heads a key head, odd cache": Case(),
    "window": Case(mask=causal() & window(60), offset=290),
    "a cache that is hardly filled": Case(filled=70, offset=69, s=700),
    "padding before the text, several queries": Case(t=5, padding=True, offset=220),
    "rows at places of their own, linear biases": Case(t=3, offset=None, alibi=True, mask=causal()),
    "sinks and soft cap, key and value heads of two sizes": Case(
        sinks=True, soft_cap=2.0, size=48, v_size=80
    ),
    "whole lanes": Case(size=128, v_size=128, s=1111, batch=1, heads=2, offset=1000),
    "queries before every key": Case(offset=-2, t=4, sinks=False),
    "queries before every key, with sinks": Case(offset=-2, t=4, sinks=True),
    "one key head, far keys": Case(kv_heads=1, batch=1, mask=causal() & ~window(40)),
    "everything, bfloat16": Case(mask=everything(), dtype="bfloat16", size=128, t=2),
    "int8, odd heads, padding": Case(codes="int8", t=3, size=48, padding=True, offset=250),
    "int8, whole lanes, soft cap, biases": Case(
        codes="int8", size=128, soft_cap=3.0, alibi=True, sinks=True, dtype="bfloat16"
    ),
    "float8, window": Case(codes="float8_e4m3fn", mask=causal() & window(60), offset=290),
    "bfloat16, window and biases": Case(
        mask=causal() & window(100), dtype="bfloat16", alibi=True, soft_cap=3.0
    ),
}
TOLERANCE = {"float32": 2e-6, "bfloat16": 5e-3}


def build(case: Case, seed: int = 0):
    """q, keys and values in the cache's order, and the options of `decode` that are arrays."""
    rng = np.random.default_rng(seed)
    b, t, s = case.batch, case.t, case.s
    kept = b, case.kv_heads, s
    shapes = (b, t, case.heads, case.size), (*kept, case.size), (*kept, case.v_size)
    q, keys, values = (np.asarray(rng.normal(size=shape), np.float32) for shape in shapes)
    options = {}
    if case.offset is None:
        options["q_index"] = rng.integers(0, s, (b, t)).astype(np.int32)
        options["k_index"] = rng.permuted([range(s)] * b, axis=1).astype(np.int32)
    else:
        options["q_index"] = case.offset + np.arange(t, dtype=np.int32)
    if case.padding:
        there = np.arange(s) >= rng.integers(1, s // 3, b)[:, None]
        options["k_segments"] = there.astype(np.int32)
        options["q_segments"] = np.repeat([[1] * (t - 1) + [0]], b, 0).astype(np.int32)
    if case.filled is not None:
        options["k_lengths"] = np.full(b, case.filled, np.int32)
    if case.alibi:
        options["bias"] = Alibi(rng.uniform(0.01, 0.1, case.heads).astype(np.float32))
    if case.sinks:
        options["sinks"] = rng.normal(size=case.heads).astype(np.float32)
    arrays = (x.astype(jnp.dtype(case.dtype)) for x in (q, keys, values))
    if case.codes is not None:
        arrays = (q.astype(case.dtype), *(scaled(x, case.codes) for x in (keys, values)))
    return tuple(arrays), options


def scaled(x, codes: str):
    """Codes of the largest range that the dtype has, with a scale for each slot and head."""
    scale = np.abs(x).max(-1, keepdims=True) / float(jnp.finfo(codes).max if "f" in codes else 127)
    x = x / scale if "f" in codes else np.round(x / scale)
    return Scaled(jnp.asarray(x).astype(codes), jnp.asarray(scale))


def as_floats(x):
    """Keys or values in float32, as the kernel reads them."""
    is_array = not isinstance(x, Scaled)
    return x.astype(np.float32) if is_array else x.codes.astype(np.float32) * x.scale


def slots_first(x):
    """[B, K, S, H] -> [B, S, K, H], also of codes."""
    return jax.tree.map(lambda part: part.swapaxes(1, 2), x)


def places(arrays, options):
    """q_index, k_index, q_segments, k_segments with the lengths of the keys in them."""
    q, keys, _ = arrays
    names = ("q_index", "k_index", "q_segments", "k_segments")
    q_index, k_index, q_segments, k_segments = (options.get(name) for name in names)
    if "k_lengths" in options:
        q_segments = np.ones(q.shape[:2], np.int32)
        k_segments = (np.arange(keys.shape[2]) < options["k_lengths"][:, None]).astype(np.int32)
    return q_index, k_index, q_segments, k_segments


def expected(case: Case, arrays, options):
    """(out, lse) of the dense reference in float32."""
    q, keys, values = map(as_floats, arrays)
    some = {name: options.get(name) for name in ("bias", "sinks")}
    return _dense(
        q, keys.swapaxes(1, 2), values.swapaxes(1, 2), *places(arrays, options), **some,
        mask=case.mask, scale=case.size**-0.5, soft_cap=case.soft_cap,
    )  # fmt: skip


_dense = jax.jit(reference.attention, static_argnames=("mask", "scale", "soft_cap"))


def assert_close(found, wanted, dtype="float32"):
    for x, y in zip(found, wanted, strict=True):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.array_equal(np.isfinite(x), np.isfinite(y))
        x, y = (np.where(np.isfinite(a), a, 0) for a in (x, y))
        assert np.linalg.norm(x - y) <= TOLERANCE[dtype] * np.linalg.norm(y) + 1e-30
