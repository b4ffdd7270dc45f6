"""A float64 oracle of grouped softmax that holds all scores, and the cases to compare with it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.landmark import landmark_attention


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
        """As arguments of `landmark_attention`."""
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
            lambda q, k, v: landmark_attention(
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
