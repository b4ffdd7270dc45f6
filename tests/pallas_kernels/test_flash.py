"""Blockwise attention against a float64 NumPy oracle, values and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal, everything, flash, window
from pallas_kernels.masks import Mask


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of shapes, mask and places."""

    batch: int = 2
    t: int = 67
    s: int = 67
    heads: int = 6
    kv_heads: int = 2
    size: int = 32
    v_size: int = 32
    mask: Mask | None = causal()
    scale: float | None = None
    offset: int = 0
    segments: int = 0  # number of documents a row is cut in; some padding at its end
    dtype: str = "float32"

    def arrays(self, seed=0):
        rng = np.random.default_rng(seed)
        q = rng.normal(size=(self.batch, self.t, self.heads, self.size))
        k = rng.normal(size=(self.batch, self.s, self.kv_heads, self.size))
        v = rng.normal(size=(self.batch, self.s, self.kv_heads, self.v_size))
        d_out = rng.normal(size=(self.batch, self.t, self.heads, self.v_size))
        d_lse = rng.normal(size=(self.batch, self.t, self.heads))
        # Rounded first, so that the oracle sees what the kernel sees.
        q, k, v, d_out = (
            np.asarray(jnp.asarray(x, self.dtype), np.float64) for x in (q, k, v, d_out)
        )
        return q, k, v, d_out, d_lse

    def places(self, seed=1):
        rng = np.random.default_rng(seed)

        def cut(length):
            ids = np.sort(rng.integers(1, self.segments + 1, (self.batch, length)), 1)
            ids[0, length - length // 8 :] = 0
            return ids.astype(np.int32)

        q_index = None
        if self.offset:
            q_index = self.offset + np.arange(self.t, dtype=np.int32)
        if not self.segments:
            return q_index, None, None
        q_segments = cut(self.t)
        return q_index, q_segments, q_segments if self.t == self.s else cut(self.s)


CASES = {
    "causal, odd size, three queries per key": Case(),
    "one head per key head": Case(heads=3, kv_heads=3, size=80, v_size=80),
    "eight queries per key": Case(heads=8, kv_heads=1, size=64, v_size=64),
    "several blocks": Case(batch=1, t=611, s=611, heads=3, kv_heads=1),
    "window over several blocks": Case(
        batch=1, t=701, s=701, heads=2, kv_heads=1, mask=causal() & window(90)
    ),
    "more keys than queries, from an offset": Case(t=131, s=300, offset=150, v_size=24),
    "few queries at the end of a cache": Case(t=5, s=1090, offset=1060),
    "one query": Case(t=1, s=129, offset=77),
    "queries before every key": Case(t=40, s=70, offset=-25),
    "no mask, own scale": Case(t=33, s=50, mask=None, scale=0.7),
    "documents with padding": Case(batch=2, t=530, s=530, heads=2, kv_heads=1, segments=5),
    "documents of a memory": Case(t=90, s=301, segments=3, mask=everything()),
    "far keys only": Case(t=290, s=290, heads=2, mask=causal() & ~window(40)),
    "bfloat16": Case(t=300, s=300, heads=3, kv_heads=1, dtype="bfloat16"),
    "float16": Case(dtype="float16"),
}


def oracle(case, q, k, v, d_out, d_lse, q_index, q_segments, k_segments):
    """out, lse, dq, dk, dv by dense float64 formulas."""
    group = case.heads // case.kv_heads
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scale = case.size**-0.5 if case.scale is None else case.scale
    q_index = np.arange(case.t) if q_index is None else q_index
    mask = everything() if case.mask is None else case.mask
    seen = np.broadcast_to(
        mask.element(q_index[:, None], np.arange(case.s)[None]), (case.batch, case.t, case.s)
    )
    if q_segments is not None:
        q_ids, k_ids = q_segments[:, :, None], k_segments[:, None, :]
        seen = seen & (q_ids == k_ids) & (k_ids != 0)
    seen = seen[:, None]
    logits = np.where(seen, scale * np.einsum("btnh,bsnh->bnts", q, k), -np.inf)
    top = np.where(seen.any(-1), logits.max(-1), 0.0)
    p = np.exp(logits - top[..., None])
    total = p.sum(-1)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    p = p / np.where(total > 0, total, 1.0)[..., None]
    out = np.einsum("bnts,bsnh->btnh", p, v)
    dp = np.einsum("btnh,bsnh->bnts", d_out, v)
    di = np.einsum("btnh,btnh->bnt", out, d_out) - d_lse.transpose(0, 2, 1)
    ds = p * (dp - di[..., None]) * scale

    def grouped(x):
        return x.reshape(case.batch, case.s, case.kv_heads, group, -1).sum(3)

    dq = np.einsum("bnts,bsnh->btnh", ds, k)
    dk = grouped(np.einsum("bnts,btnh->bsnh", ds, q))
    dv = grouped(np.einsum("bnts,btnh->bsnh", p, d_out))
    return out, lse.transpose(0, 2, 1), dq, dk, dv


def run(case, q, k, v, d_out, d_lse, q_index, q_segments, k_segments, implementation):
    q, k, v, d_out = (jnp.asarray(x, case.dtype) for x in (q, k, v, d_out))
    d_lse = jnp.asarray(d_lse, jnp.float32)

    @jax.jit
    def both(q, k, v, q_index, q_segments, k_segments):
        def attention(q, k, v):
            return flash(
                q, k, v, case.mask, scale=case.scale, q_index=q_index, q_segments=q_segments,
                k_segments=k_segments, implementation=implementation,
            )  # fmt: skip

        results, pull = jax.vjp(attention, q, k, v)
        return *results, *pull((d_out, d_lse))

    return both(q, k, v, q_index, q_segments, k_segments)


def relative_error(actual, expected):
    actual = np.asarray(actual, np.float64)
    empty = np.isneginf(expected)
    np.testing.assert_array_equal(np.isneginf(actual), empty)
    actual, expected = np.where(empty, 0.0, actual), np.where(empty, 0.0, expected)
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)


TOLERANCE = {"float32": 2e-6, "bfloat16": 6e-3, "float16": 8e-4}


RUNS = [(name, "xla") for name in CASES] + [
    ("causal, odd size, three queries per key", "reference"),
    ("queries before every key", "reference"),
    ("documents of a memory", "reference"),
    ("bfloat16", "reference"),
]


@pytest.mark.parametrize(("name", "implementation"), RUNS)
def test_values_and_gradients_equal_the_dense_float64_formulas(name, implementation):
    case = CASES[name]
    arrays, places = case.arrays(), case.places()
    expected = oracle(case, *arrays, *places)
    actual = run(case, *arrays, *places, implementation)
    assert actual[0].dtype == actual[2].dtype == case.dtype
    assert actual[1].dtype == jnp.float32
    for what, x, y in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        error = relative_error(x, y)
        assert error < TOLERANCE[case.dtype], f"{what}: relative error {error:.1e}"


def test_queries_without_a_key_give_zeros_minus_infinity_and_no_gradient():
    case = Case(batch=1, t=30, s=30, offset=-20)
    arrays = case.arrays()
    q_index, *_ = case.places()
    out, lse, dq, dk, dv = run(case, *arrays, q_index, None, None, "xla")
    assert np.all(np.isneginf(lse[:, :20])) and np.all(np.isfinite(lse[:, 20:]))
    assert not np.any(out[:, :20]) and not np.any(dq[:, :20])
    assert not np.any(dk[:, 10:]) and not np.any(dv[:, 10:])
    assert all(np.all(np.isfinite(x)) for x in (out, dq, dk, dv))


def test_a_whole_batch_of_padding_gives_zeros():
    q = jnp.ones((2, 9, 2, 8))
    nobody = jnp.zeros((2, 9), jnp.int32)
    out, lse = flash(q, q, q, causal(), q_segments=nobody, k_segments=nobody)
    assert not np.any(out) and np.all(np.isneginf(lse))


def test_large_logits_do_not_overflow():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 300, 1, 16)), jnp.float32) for _ in range(3))

    def run(implementation):
        def attention(*x):
            return flash(*x, causal(), scale=100.0, implementation=implementation)

        results, pull = jax.vjp(attention, q, k, v)
        return *results, *pull((v, jnp.ones((1, 300, 1))))

    results = jax.jit(lambda: run("xla"))()
    assert np.max(results[1]) > 1000  # exp would overflow at 89
    for x, y in zip(results, jax.jit(lambda: run("reference"))()):
        assert np.linalg.norm(x - y) < 1e-3 * np.linalg.norm(y)


def test_unknown_implementations_are_named_with_the_choices():
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=r"'cuda'.*xla, reference"):
        flash(q, q, q, implementation="cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=jnp.ones((4, 2, 8))), "must be \\[batch, length, heads, size\\]"),
        (dict(q=jnp.ones((1, 4, 3, 8))), "3 query heads must be a multiple of 2"),
        (dict(q=jnp.ones((1, 4, 2, 4))), "share q's batch and head size"),
        (dict(v=jnp.ones((1, 5, 2, 8))), "share k's batch, length and heads"),
        (dict(q_segments=jnp.ones((1, 4), jnp.int32)), "both q_segments and k_segments"),
        (dict(q_index=jnp.arange(3)), "q_index has shape \\(3,\\), must be \\(4,\\)"),
    ],
)
def test_wrong_shapes_are_refused_in_one_line(change, message):
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=message):
        flash(**(dict(q=x, k=x, v=x) | change))
