"""Attention by dense float64 formulas, values and gradients, and cases to compare with it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    Alibi,
    RelativeBias,
    alibi_slopes,
    by_heads,
    causal,
    chunks,
    everything,
    flash,
    key_bits,
    per_head,
    prefix,
    window,
)
from pallas_kernels.masks import Mask
from pallas_kernels.tables import from_block_mask


@dataclasses.dataclass(frozen=True)
class Blocked:
    """A random block table: rows 1 or B, heads 1, K or N; traced or known when compiling."""

    rows: int = 1
    heads: int = 1
    q_block: int = 32
    k_block: int = 16
    traced: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of shapes, mask, places and options."""

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
    own_places: bool = False  # every row at places of its own, with gaps between the keys
    segments: int = 0  # number of documents a row is cut in; some padding at its end
    k_lengths: tuple[int, ...] | None = None
    soft_cap: float | None = None
    bias: str | None = None  # "alibi", "relative", "both ways"
    sinks: bool = False
    table: Blocked | None = None
    chosen: float | None = None  # the share of keys that each query chooses by itself
    dtype: str = "float32"
    seed: int = 0  # of q, k, v and the cotangents
    of_lse: bool = True  # the log-sum-exp has a cotangent

    def arrays(self):
        """q, k, v, d_out as the dtype holds them and d_lse, float64."""
        rng = np.random.default_rng(self.seed)
        q = rng.normal(size=(self.batch, self.t, self.heads, self.size))
        k = rng.normal(size=(self.batch, self.s, self.kv_heads, self.size))
        v = rng.normal(size=(self.batch, self.s, self.kv_heads, self.v_size))
        d_out = rng.normal(size=(self.batch, self.t, self.heads, self.v_size))
        d_lse = self.of_lse * rng.normal(size=(self.batch, self.t, self.heads))
        if self.bias == "alibi":
            # The gradient of a slope is one sum over all queries and keys. Without this its terms
            # cancel, and the error in bfloat16 says nothing about the kernel.
            v[..., 0] += np.linspace(2, -2, self.s)[:, None]
            d_out[..., 0] += 2
            d_lse += 2 * self.of_lse
        # Rounded first, so that the oracle sees what the kernel sees.
        dtype = jnp.dtype(self.dtype)
        q, k, v, d_out = (x.astype(dtype).astype(np.float64) for x in (q, k, v, d_out))
        return q, k, v, d_out, d_lse

    def places(self, seed=1):
        """Keyword arguments of `flash`."""
        rng, places = np.random.default_rng(seed), {}

        def cut(length):
            ids = np.sort(rng.integers(1, self.segments + 1, (self.batch, length)), 1)
            ids[0, length - length // 8 :] = 0
            return ids.astype(np.int32)

        if self.offset:
            places["q_index"] = self.offset + np.arange(self.t, dtype=np.int32)
        if self.own_places:
            draw = [rng.integers(1, 4, (self.batch, n)) for n in (self.t, self.s)]
            places["q_index"], places["k_index"] = (np.cumsum(x, 1, dtype=np.int32) for x in draw)
        if self.segments:
            places["q_segments"] = cut(self.t)
            same = self.t == self.s
            places["k_segments"] = places["q_segments"] if same else cut(self.s)
        if self.k_lengths is not None:
            places["k_lengths"] = np.array(self.k_lengths, np.int32)
        if self.chosen is not None:
            places["key_bits"] = key_bits.pack(self.chosen_keys())
        return places

    def chosen_keys(self):
        """bool [B, T, S]; some blocks have none."""
        shape = self.batch, self.t, self.s
        keys = np.random.default_rng(4).random(shape) < self.chosen
        keys[:, : self.t // 3, : self.s // 2] = False
        return keys

    def parameters(self, seed=2):
        """Parameters that get a gradient, as keyword arguments of `flash`."""
        rng, parameters = np.random.default_rng(seed), {}
        if self.bias == "alibi":
            parameters["bias"] = Alibi(jax.device_put(alibi_slopes(self.heads)))
        elif self.bias is not None:
            both = self.bias == "both ways"
            table = rng.normal(size=(16, self.heads)).astype(np.float32)
            parameters["bias"] = RelativeBias(table, max_distance=40, bidirectional=both)
        if self.sinks:
            parameters["sinks"] = (rng.normal(size=self.heads) + 2).astype(np.float32)
        return parameters

    def block_table(self, seed=3):
        """(table, what it lists as bool [rows, N or 1, T, S])."""
        if self.table is None:
            return None, True
        rng, spec = np.random.default_rng(seed), self.table
        nq, nk = -(-self.t // spec.q_block), -(-self.s // spec.k_block)
        listed = rng.random((spec.rows, spec.heads, nq, nk)) < 0.6
        # Half of the blocks that the mask shows whole are called full.
        q, k = (np.arange(n * b) for n, b in ((nq, spec.q_block), (nk, spec.k_block)))
        mask = everything() if self.mask is None else self.mask
        parts = [part.element(q[:, None], k[None]) for part, _ in by_heads(mask, self.heads)]
        whole = np.all(parts, 0).reshape(nq, spec.q_block, nk, spec.k_block).all((1, 3))
        whole[:, -1] &= self.s % spec.k_block == 0
        full = listed & whole & (rng.random(listed.shape) < 0.5)
        table = from_block_mask(listed, full=full, q_block=spec.q_block, k_block=spec.k_block)
        tokens = listed.repeat(spec.q_block, 2).repeat(spec.k_block, 3)[:, :, : self.t, : self.s]
        return table, tokens.repeat(self.heads // spec.heads if spec.heads > 1 else 1, 1)


HEADS_APART = per_head((causal() & window(20), 1), (causal() & chunks(25), 3))
CASES = {
    "causal, odd size, three queries per key": Case(),
    "one head per key head": Case(heads=3, kv_heads=3, size=80, v_size=80),
    "eight queries per key": Case(heads=8, kv_heads=1, size=64, v_size=64),
    "large heads": Case(t=41, s=41, heads=2, kv_heads=2, size=256, v_size=128),
    "several blocks": Case(batch=1, t=611, s=611, heads=3, kv_heads=1),
    "window over several blocks": Case(
        batch=1, t=701, s=701, heads=2, kv_heads=1, mask=causal() & (window(90) | prefix(4))
    ),
    "more keys than queries, from an offset": Case(t=131, s=300, offset=150, v_size=24),
    "few queries at the end of a cache": Case(t=5, s=1090, offset=1060),
    "queries before every key": Case(t=40, s=70, offset=-25, sinks=True),
    "no mask, own scale": Case(t=33, s=50, mask=None, scale=0.7),
    "documents with padding, soft cap, linear biases": Case(
        t=530, s=530, heads=2, kv_heads=1, segments=5, soft_cap=1.5, bias="alibi"
    ),
    "documents of a memory": Case(t=90, s=301, segments=3, mask=everything()),
    "far keys only": Case(t=290, s=290, heads=2, mask=causal() & ~window(40)),
    "bucketed bias, sinks, lengths": Case(
        batch=3, t=40, bias="relative", sinks=True, k_lengths=(50, 0, 7)
    ),
    "bucketed bias of both ways, rows at places of their own, documents": Case(
        t=280, s=261, heads=2, kv_heads=1, mask=None, bias="both ways", own_places=True, segments=3
    ),
    "rows at places of their own": Case(t=80, s=99, heads=2, own_places=True),
    "a table": Case(batch=2, t=131, s=77, mask=None, table=Blocked()),
    "a table per row and key head, traced, with documents": Case(
        t=131, s=131, segments=3, table=Blocked(2, 2, 8, 32, traced=True)
    ),
    "a table per query head with linear biases": Case(
        t=131, s=131, bias="alibi", soft_cap=3.0, table=Blocked(1, 6)
    ),
    "a lone full block of fewer keys than a tile": Case(
        t=80, s=24, heads=4, mask=None, table=Blocked(2, 4, 80, 24)
    ),
    "masks and tables per head": Case(
        heads=4, mask=HEADS_APART, bias="alibi", table=Blocked(2, 4, traced=True)
    ),
    "masks per head, tables per key head": Case(heads=4, mask=HEADS_APART, table=Blocked(1, 2)),
    "bfloat16": Case(t=300, s=300, heads=3, kv_heads=1, dtype="bfloat16"),
    "bfloat16, odd head sizes, soft cap": Case(
        t=131, s=131, size=80, v_size=40, soft_cap=3.0, dtype="bfloat16"
    ),
    "bfloat16, sinks, few queries": Case(t=5, s=190, offset=160, sinks=True, dtype="bfloat16"),
    "bfloat16, sharp": Case(t=300, s=300, heads=4, scale=1.0, dtype="bfloat16"),
    "float16": Case(dtype="float16"),
    "keys of each query": Case(t=70, s=300, chosen=0.1, mask=None, soft_cap=3.0),
    "keys of each query, documents": Case(
        t=131, s=131, heads=4, chosen=0.5, segments=3, sinks=True, dtype="bfloat16"
    ),
}


def bucket(distance, buckets, max_distance, bidirectional):
    """T5's bucket of k - q, in the order of its published code."""
    found, away = 0, np.maximum(-distance, 0)
    if bidirectional:
        buckets //= 2
        found, away = (distance > 0) * buckets, np.abs(distance)
    exact = buckets // 2
    ratio = np.log(np.maximum(away, 1).astype(np.float32) / exact) / np.log(max_distance / exact)
    far = exact + (ratio * np.float32(buckets - exact)).astype(int)
    return found + np.where(away < exact, away, np.minimum(far, buckets - 1))


def bias_of(bias, distance):
    """(logits [B, N, T, S], gradient of the parameters from d_logits) for distances [B, T, S]."""
    if bias is None:
        return 0.0, lambda d: None
    if isinstance(bias, Alibi):
        away = np.abs(distance)[:, None]
        slopes = np.asarray(bias.slopes, np.float64)[:, None, None]
        return -slopes * away, lambda d: (-d * away).sum((0, 2, 3))
    table = np.asarray(bias.table, np.float64)
    places = bucket(distance, len(table), bias.max_distance, bias.bidirectional)

    def gradient(d_logits):
        found = np.zeros_like(table)
        b, t, s = np.indices(d_logits[:, 0].shape)
        np.add.at(found, np.broadcast_to(places, b.shape), d_logits[b, :, t, s])
        return found

    return np.moveaxis(table[places], -1, 1), gradient


def seen_by(
    case, q_index, k_index, q_segments=None, k_segments=None, k_lengths=None, key_bits=None
):
    """bool [B, N, T, S] of mask, segments and lengths; index [1 or B, ...]."""
    mask = everything() if case.mask is None else case.mask
    shape = (case.batch, case.t, case.s)
    parts = [
        np.repeat(
            np.broadcast_to(part.element(q_index[:, :, None], k_index[:, None]), shape)[:, None],
            count,
            1,
        )
        for part, count in by_heads(mask, case.heads)
    ]
    seen = np.concatenate(parts, 1)
    if q_segments is not None:
        q_ids, k_ids = q_segments[:, None, :, None], k_segments[:, None, None, :]
        seen = seen & (q_ids == k_ids) & (k_ids != 0)
    if k_lengths is not None:
        seen = seen & (np.arange(case.s) < k_lengths[:, None])[:, None, None]
    return seen if key_bits is None else seen & case.chosen_keys()[:, None]


def oracle(case):
    """out, lse, dq, dk, dv and the gradients of the bias and the sinks where there are some."""
    (q, k, v, d_out, d_lse), places = case.arrays(), dict(case.places())
    group = case.heads // case.kv_heads
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scale = case.size**-0.5 if case.scale is None else case.scale
    q_index = np.atleast_2d(places.pop("q_index", np.arange(case.t)))
    k_index = np.atleast_2d(places.pop("k_index", np.arange(case.s)))
    seen = seen_by(case, q_index, k_index, **places) & case.block_table()[1]
    parameters = case.parameters()
    bias, bias_gradient = bias_of(parameters.get("bias"), k_index[:, None] - q_index[:, :, None])
    logits, slope = scale * np.einsum("btnh,bsnh->bnts", q, k), 1.0
    if case.soft_cap is not None:
        bent = np.tanh(logits / case.soft_cap)
        logits, slope = case.soft_cap * bent, 1 - bent**2
    logits = np.where(seen, logits + bias, -np.inf)
    sinks = np.asarray(parameters.get("sinks", -np.inf), np.float64)
    with np.errstate(divide="ignore"):
        lse = np.logaddexp(np.logaddexp.reduce(logits, -1), np.reshape(sinks, (-1, 1)))
    safe = np.where(np.isfinite(lse), lse, 0.0)
    p = np.exp(logits - safe[..., None])
    out = np.einsum("bnts,bsnh->btnh", p, v)
    dp = np.einsum("btnh,bsnh->bnts", d_out, v)
    di = np.einsum("btnh,btnh->bnt", out, d_out) - d_lse.transpose(0, 2, 1)
    d_logits = p * (dp - di[..., None])
    ds = d_logits * slope * scale

    def grouped(x):
        return x.reshape(case.batch, case.s, case.kv_heads, group, -1).sum(3)

    found = dict(out=out, lse=lse.transpose(0, 2, 1), dq=np.einsum("bnts,bsnh->btnh", ds, k))
    found["dk"] = grouped(np.einsum("bnts,btnh->bsnh", ds, q))
    found["dv"] = grouped(np.einsum("bnts,btnh->bsnh", p, d_out))
    if "bias" in parameters:
        found["d_bias"] = bias_gradient(d_logits)
    if "sinks" in parameters:
        found["d_sinks"] = -(np.exp(sinks[:, None] - safe) * di).sum((0, 2))
    return found


def inputs(case):
    """Arguments of `program(case, ...)`; a static table is none of them."""
    # `jnp.asarray` would compile a program for every shape.
    arrays = [jax.device_put(x.astype(jnp.dtype(case.dtype))) for x in case.arrays()[:3]]
    traced = case.table is not None and case.table.traced
    table = jax.device_put(case.block_table()[0]) if traced else None
    return arrays, case.parameters(), case.places(), table


def program(case, implementation):
    """What `flash` gives for the case, under the names of `oracle`, as a function of `inputs`."""
    *_, d_out, d_lse = case.arrays()
    cotangents = d_out.astype(jnp.dtype(case.dtype)), d_lse.astype(np.float32)
    table, _ = case.block_table()

    def both(arrays, parameters, places, given):
        def attention(arrays, parameters):
            return flash(
                *arrays, case.mask, scale=case.scale, soft_cap=case.soft_cap, **parameters,
                table=table if given is None else given, **places, implementation=implementation,
            )  # fmt: skip

        if case.of_lse:
            (out, lse), pull = jax.vjp(attention, arrays, parameters)
            (dq, dk, dv), d_parameters = pull(cotangents)
        else:
            out, pull, lse = jax.vjp(attention, arrays, parameters, has_aux=True)
            (dq, dk, dv), d_parameters = pull(cotangents[0])
        found = dict(out=out, lse=lse, dq=dq, dk=dk, dv=dv)
        if "bias" in d_parameters:
            (found["d_bias"],) = jax.tree.leaves(d_parameters["bias"])
        if "sinks" in d_parameters:
            found["d_sinks"] = d_parameters["sinks"]
        return found

    return both


def run(case, implementation):
    """What `flash` gives for the case, in one jitted program, under the names of `oracle`."""
    return jax.jit(program(case, implementation))(*inputs(case))


def relative_error(actual, expected):
    """Relative norm of the difference; rows that are -inf must be so in both."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    empty = np.isneginf(expected)
    np.testing.assert_array_equal(np.isneginf(actual), empty)
    actual, expected = np.where(empty, 0.0, actual), np.where(empty, 0.0, expected)
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30)


# What rounding to bfloat16 costs "bfloat16", in 1e-3: out 1.6 from itself and 1.1 from p; dq 1.7
# from itself, 1.7 from the cotangent of the logits and 0.7 from `out` in di; dv 1.6 from itself and
# 1.6 from p. Together 2.0, 2.6 and 2.4. Only `out` in di grows with the logits: 3.5 if "sharp".
VALUES, GRADIENTS = (
    {"float32": 2e-6, "bfloat16": 5e-3, "float16": 8e-4},
    {"float32": 5e-6, "bfloat16": 5e-3, "float16": 8e-4},
)


def above_limit(case, actual, expected):
    """Which results are too far from the oracle's, or not a number: {name: relative error}."""
    assert actual.keys() == expected.keys()
    found = {name: relative_error(x, expected[name]) for name, x in actual.items()}
    limits = {x: (VALUES if x in ("out", "lse") else GRADIENTS)[case.dtype] for x in found}
    return {name: f"{error:.1e}" for name, error in found.items() if not error < limits[name]}
