"""Grouped softmax against a float64 oracle that holds all scores."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal, flash
from pallas_kernels.grouped import grouped, older_blocks

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent.parent / "golden"


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of shapes and places."""

    t: int = 67
    block: int = 8
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    v_size: int = 16
    last: int | None = None  # only so many last tokens ask
    documents: int = 0  # in every row, some padding at both ends; 0: nobody says anything
    scale: float | None = None
    sharp: float = 1.0  # of the logits
    loose: float = 1.0  # factor of the tolerances: float32 logits of 400 are 3e-5 off

    def arrays(self):
        rng = np.random.default_rng(0)
        first = self.t - (self.last or self.t)
        q = rng.normal(size=(self.batch, self.t, self.heads, self.size))[:, first:] * self.sharp
        k = rng.normal(size=(self.batch, self.t, self.kv_heads, self.size))
        v = rng.normal(size=(self.batch, self.t, self.kv_heads, self.v_size))
        d_out = rng.normal(size=(*q.shape[:3], self.v_size))
        return [x.astype(np.float32) for x in (q, k, v, d_out, rng.normal(size=q.shape[:3]))]

    def rows(self):
        """Order indices and segments of keys, int32 [B, T]."""
        segments = np.ones((self.batch, self.t), np.int32)
        if self.documents:
            rng = np.random.default_rng(1)
            segments = np.sort(rng.integers(1, self.documents + 1, segments.shape), 1)
            segments[0, : self.t // 9], segments[-1, -self.t // 7 :] = 0, 0
        index = np.zeros_like(segments)
        for i in range(1, self.t):
            index[:, i] = np.where(segments[:, i] == segments[:, i - 1], index[:, i - 1] + 1, 0)
        return index.astype(np.int32), segments.astype(np.int32)

    def places(self):
        """As arguments of `grouped`."""
        index, segments = self.rows()
        first = self.t - (self.last or self.t)
        if not self.documents:
            return {"q_index": jnp.asarray(index[0, first:])} if self.last else {}
        names = ("q_index", "k_index", "q_segments", "k_segments")
        arrays = (index[:, first:], index, segments[:, first:], segments)
        return dict(zip(names, map(jnp.asarray, arrays), strict=True))


CASES = {
    "shorter than a block": Case(t=5),
    "many steps, packed": Case(t=601, block=64, heads=3, kv_heads=1, documents=3),
    "tiny documents, blocks of two": Case(t=41, documents=9, block=2, heads=2, size=32),
    "last queries of packed texts": Case(t=130, last=40, documents=5, v_size=24),
    "last queries of one text": Case(t=64, last=19, sharp=30.0, scale=0.7, loose=40.0),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def attention_of(case: Case, q, k, v, index, segments):
    """out, lse and weights [B, N, T, S] from all scores, in the dtype of q."""
    scale = case.size**-0.5 if case.scale is None else case.scale
    first, group = case.t - q.shape[1], case.heads // case.kv_heads
    number, closes = index // case.block, index % case.block == case.block - 1
    asked, at = number[:, first:, None], np.arange(case.t)
    same = segments[:, first:, None] == segments[:, None]
    same &= (segments != 0)[:, None] & (at[first:, None] >= at)
    own = (same & (asked == number[:, None]) & ~closes[:, None])[:, None]
    older = (same & (number[:, None] < asked) & closes[:, None])[:, None]
    s = scale * jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, group, 2))
    lse = jax.nn.logsumexp(jnp.where(own | older, s, -jnp.inf), -1, keepdims=True)
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
    weights = jnp.where(own, jnp.exp(jnp.where(own, s - lse, 0.0)), 0.0)
    ends = np.flatnonzero(closes.any(0))
    here, x = older[..., ends], s[..., ends]
    a = jnp.where(here, jnp.exp(jnp.where(here, x - lse, 0.0)), 0.0)
    tokens = ends[:, None] + np.arange(1 - case.block, 0)
    p = jax.nn.softmax(s[..., tokens], -1)  # [B, N, T, ends, block - 1]
    weights = weights.at[..., tokens].add(a[..., None] * p)
    out = jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(v, group, 2))
    return out, lse[..., 0].swapaxes(1, 2), weights


@functools.cache
def oracle(case: Case):
    """out, lse, gradients and weights in float64."""
    with jax.enable_x64(True):
        *arrays, d_out, d_lse = (jnp.asarray(x, jnp.float64) for x in case.arrays())

        def loss(q, k, v):
            out, lse, weights = attention_of(case, q, k, v, *case.rows())
            seen = weights.sum(-1).swapaxes(1, 2) > 0.5
            total = jnp.sum(out * d_out) + jnp.sum(jnp.where(seen, lse * d_lse, 0.0))
            return total, (out, jnp.where(seen, lse, -jnp.inf), weights)

        gradients, (out, lse, weights) = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
        return jax.tree.map(np.asarray, (out, lse, gradients, weights))


@functools.cache
def run(case: Case, implementation=None):
    q, k, v, d_out, d_lse = case.arrays()

    @jax.jit
    def attention(*arrays):
        (out, lse), pull = jax.vjp(
            lambda q, k, v: grouped(
                q, k, v, case.block, scale=case.scale, implementation=implementation,
                **case.places(),
            ),
            *arrays,
        )  # fmt: skip
        return out, lse, pull((jnp.asarray(d_out), jnp.where(lse > -jnp.inf, d_lse, 0.0)))

    return attention(*map(jnp.asarray, (q, k, v)))


def off(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def assert_same(got, want, loose=1.0):
    (out, lse, gradients), (want_out, want_lse, want_gradients) = got, want
    asked = np.isfinite(want_lse)
    assert off(out, want_out) < 2e-6 * loose
    assert off(lse[asked], want_lse[asked]) < 2e-6
    assert np.all(np.isneginf(lse[~asked])) and not np.asarray(out)[~asked].any()
    for x, y in zip(gradients, want_gradients, strict=True):
        assert np.isfinite(x).all() and off(x, y) < 5e-6 * loose


@EVERY
def test_values_and_gradients_equal_the_oracle(case):
    *want, weights = oracle(case)
    np.testing.assert_allclose(weights.sum(-1).swapaxes(1, 2), np.isfinite(want[1]), rtol=1e-9)
    assert_same(run(case), want, case.loose)


@pytest.mark.parametrize("name", ["last queries of packed texts", "tiny documents, blocks of two"])
def test_the_dense_form_equals_the_oracle(name):
    assert_same(run(CASES[name], "reference"), oracle(CASES[name])[:3])


def test_values_and_gradients_equal_the_code_of_the_authors():
    name = "landmark.train_f7_t43"
    with np.load(GOLDEN / "attention.npz") as data:
        x = {key.split(".")[-1]: data[key] for key in data.files if key.startswith(name)}
    params = json.loads((GOLDEN / "attention.json").read_text())["cases"][name]["params"]
    block, size, length = params["block_size"], params["head_dim"], params["T"]
    landmarks = np.arange(length) % block == block - 1
    np.testing.assert_array_equal(x["is_landmark"][0], landmarks)
    angle = np.arange(length)[:, None] * params["rope_base"] ** -(np.arange(0, size, 2) / size)
    cos, sin = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))

    def turn(y):  # [B, N, T, H]
        a, b = jnp.split(y, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(q, k, v):
        arrays = (y.swapaxes(1, 2) for y in (turn(q), turn(k), v))
        return grouped(*arrays, block)[0].swapaxes(1, 2)

    out, pull = jax.vjp(attention, *(jnp.asarray(x[n]) for n in ("q", "k", "v")))
    np.testing.assert_allclose(out, x["out"], rtol=1e-5, atol=2e-5)
    for got, n in zip(pull(jnp.asarray(x["cotangent"])), ("dq", "dk", "dv"), strict=True):
        np.testing.assert_allclose(got, x[n], rtol=1e-5, atol=1e-4)


def test_landmark_values_are_never_used_and_their_keys_are():
    case = Case()
    q, k, v = map(jnp.asarray, case.arrays()[:3])
    landmarks = jnp.arange(7, 64, 8)
    out, _ = grouped(q, k, v, 8)
    other, _ = grouped(q, k, v.at[:, landmarks].set(1e6), 8)
    np.testing.assert_array_equal(out, other)
    other, _ = grouped(q, k.at[:, 7].add(1.0), v, 8)
    np.testing.assert_array_equal(out[:, :8], other[:, :8])
    assert np.all(np.any(out[:, 8:] != other[:, 8:], -1))


def test_a_text_of_one_block_is_ordinary_attention():
    q, k, v = map(jnp.asarray, Case(t=7).arrays()[:3])
    for x, y in zip(grouped(q, k, v, 8), flash(q, k, v, causal()), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_sixteen_bits_stay_close_to_float32():
    case = Case(t=100, block=16)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in case.arrays()[:3])
    wide = tuple(x.astype(jnp.float32) for x in (q, k, v))

    @jax.jit
    def run(q, k, v):
        def loss(q, k, v):
            out, lse = grouped(q, k, v, 16)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), (out, lse)

        return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

    gradients, (out, lse) = run(q, k, v)
    wanted, (want, want_lse) = run(*wide)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert off(out.astype(jnp.float32), want) < 5e-3 and off(lse, want_lse) < 5e-3
    for x, y in zip(gradients, wanted, strict=True):
        assert x.dtype == jnp.bfloat16 and off(x.astype(jnp.float32), y) < 1e-2


def test_only_older_blocks_that_are_given_are_seen():
    case = Case(t=64)
    q, k, v = map(jnp.asarray, case.arrays()[:3])
    numbers = jnp.broadcast_to(jnp.arange(64) // 8, (2, 64))
    out, lse = older_blocks(
        q, k[:, 16:40], v[:, 16:40], 8, scale=0.25, q_numbers=numbers,
        k_numbers=jnp.broadcast_to(jnp.arange(2, 5), (2, 3)),
    )  # fmt: skip
    assert np.all(np.isneginf(lse[:, :24])) and not np.asarray(out[:, :24]).any()
    # The third block is the only older one of the fourth: one softmax over its seven tokens.
    for i in (24, 31):
        x = jnp.einsum("bnh,bsnh->bns", q[:, i], jnp.repeat(k[:, 16:24], 2, 2)) * 0.25
        want = jnp.einsum(
            "bns,bsnh->bnh", jax.nn.softmax(x[..., :7]), jnp.repeat(v[:, 16:23], 2, 2)
        )
        np.testing.assert_allclose(out[:, i], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse[:, i], x[..., 7], rtol=1e-5, atol=1e-5)


def test_no_array_of_queries_times_keys_is_made():
    q = jax.ShapeDtypeStruct((1, 65_536, 2, 64), jnp.float32)

    def loss(q, k, v):
        return jnp.sum(grouped(q, k, v, 64)[0])

    memory = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, q, q).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 16 * 65_536 * 2 * 64 * 4


def test_a_block_without_an_ordinary_token_is_refused():
    q = jnp.ones((1, 4, 1, 8))
    with pytest.raises(ValueError, match="block=1 must be at least 2"):
        grouped(q, q, q, 1)
