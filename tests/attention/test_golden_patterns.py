"""Patterns equal the authors' code on stored arrays, values and gradients."""

import functools

import attention_golden as golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.attention import (
    AttentionMetadata,
    DualChunk,
    LMInfinite,
    ReRoPE,
    SelfExtend,
    ShiftedSparse,
    Streaming,
)
from lcjax.attention.base import partial_attention
from lcjax.attention.cache import RingCache
from lcjax.models import cache as cache_lib
from lcjax.models import preset
from lcjax.models.layers import LayerInputs
from lcjax.rope import rotate

# case, pattern, the array that holds its output
CASES = [
    ("self_extend.g4_w16", SelfExtend(window=16, group=4), "out"),
    ("self_extend.exact_w", SelfExtend(window=16, group=4), "out"),
    ("lm_infinite.long_t64", LMInfinite(window=16, sinks=4), "out"),
    ("lm_infinite.long_t64", LMInfinite(window=16, sinks=4, distance=16), "out"),
    ("lm_infinite.decode_n64", LMInfinite(window=16, sinks=4), "out"),
    ("s2_attn.t64_g16", ShiftedSparse(group=16), "out_flash_no_wrap"),
    ("s2_attn.t64_g16", ShiftedSparse(), "out_flash_no_wrap"),
    ("s2_attn.t64_g16", ShiftedSparse(group=16, wrap=True), "out_noflash_wrap"),
    ("streaming_llm.stride16_s4_r12_t64", Streaming(sinks=4, recent=12, stride=16), "out"),
    ("dca.c12_w4_t40", DualChunk(chunk=12, local=4), "out"),
]


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(case, pattern, q, k, v):
    """The last q.shape[1] queries of a text of k.shape[1] tokens."""
    places = jnp.arange(k.shape[1])[None]
    first = k.shape[1] - q.shape[1]
    return pattern.attend(
        q,
        k,
        v,
        AttentionMetadata(
            places[:, first:],
            places,
            rotation=golden.rotation(case),
            q_index=places[0, first:] if first else None,
        ),
    )


@pytest.mark.parametrize(("case", "pattern", "out"), CASES, ids=str)
def test_a_pattern_equals_the_code_of_its_authors(case, pattern, out):
    x = golden.arrays(case)
    got = run(case, pattern, x["q"], x["k"], x["v"])
    np.testing.assert_allclose(got, x[out], **golden.TOLERANCE)


@pytest.mark.parametrize(
    ("case", "pattern"),
    [(case, pattern) for case, pattern, out in CASES[:6] if "dq" in golden.arrays(case)],
    ids=str,
)
def test_gradients_equal_those_of_the_authors_code(case, pattern):
    x = golden.arrays(case)

    def loss(q, k, v):
        return jnp.sum(run(case, pattern, q, k, v) * x["cotangent"])

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(x["q"], x["k"], x["v"])
    for got, name in zip(gradients, ("q", "k", "v"), strict=True):
        np.testing.assert_allclose(got, x[f"d{name}"], **golden.GRADIENTS, err_msg=name)


@pytest.mark.parametrize("case", ["self_extend.g4_w16", "self_extend.exact_w"])
def test_both_passes_of_self_extend_and_its_last_step_equal_the_reference(case):
    x, pattern = golden.arrays(case), SelfExtend(window=16, group=4)
    q, k, v = (x[name] for name in ("q", "k", "v"))
    last = run(case, pattern, q[:, -1:], k, v)
    np.testing.assert_allclose(last, x["out_decode_last"], **golden.TOLERANCE)
    where = np.arange(k.shape[1])[None]
    metadata = AttentionMetadata(where, where, rotation=golden.rotation(case))

    @jax.jit
    def parts(q, k, v):
        return [partial_attention(q, k, v, x, metadata) for x in pattern.passes(metadata)]

    for (out, lse), name in zip(parts(q, k, v), ("neighbor", "group"), strict=True):
        np.testing.assert_allclose(out, x[f"{name}_out"], **golden.TOLERANCE)
        np.testing.assert_allclose(lse, x[f"{name}_lse"], **golden.TOLERANCE)


def test_a_rolling_cache_read_in_strides_equals_the_streaming_loop_of_the_authors():
    case, pattern = "streaming_llm.stride16_s4_r12_t64", Streaming(sinks=4, recent=12, stride=16)
    x, rotation = golden.arrays(case), golden.rotation("streaming_llm.stride16_s4_r12_t64")
    config = preset("tiny").replace(
        num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, pattern=pattern, scan_layers=False
    )
    cache = jax.jit(lambda: cache_lib.create(config, 1, 10_000, chunk=16, rotated=False))()
    (ring,) = cache.kinds
    assert ring == RingCache(sinks=4, recent=28, rotated=False)

    @jax.jit
    def read(cache, positions, q, k, v):
        cache, (view,) = cache_lib.extend(cache, None, positions)
        context = LayerInputs(positions, None, rotation, view=view)
        metadata = context.attention_metadata()
        out, layer = ring.attend(cache.layers[0], q, k, v, pattern, view, metadata)
        return cache_lib.replace_layers(cache, (layer,)), out

    outs = []
    for start in range(0, 64, 16):
        positions = start + np.arange(16)[None]
        cache, out = read(cache, positions, *(x[n][:, start : start + 16] for n in "qkv"))
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, 1), x["out"], **golden.TOLERANCE)
    cached = np.concatenate([np.arange(4), np.arange(52, 64)])  # what the authors' cache ends with
    slots = jax.jit(ring.slot, static_argnums=1)(cached, cache.capacity)
    for kept, name in (("keys", "k_prerope"), ("values", "v")):
        actual = np.asarray(cache.layers[0][kept]).swapaxes(1, 2)[:, slots]
        np.testing.assert_array_equal(actual, x[f"final_cache_{name}"])


def test_rerope_equals_attention_with_every_distance_cut_off():
    rng, window = np.random.default_rng(3), 6
    q, k, v = (rng.normal(size=(1, 23, 2, 16)).astype(np.float32) for _ in range(3))
    rotation = golden.rotation("self_extend.g4_w16")
    got = run("self_extend.g4_w16", ReRoPE(window=window), q, k, v)
    # Every query at its cut-off distance from every key, which stands at 0.
    distance = np.minimum(np.subtract.outer(np.arange(23), np.arange(23)), window)
    copies = np.broadcast_to(q[0, :, None], (23, 23, 2, 16))
    turned = jax.jit(rotate)(copies, distance, *rotation[:2])
    logits = np.einsum("tsnh,snh->nts", np.asarray(turned, np.float64), k[0]) / 4
    p = np.exp(np.where(distance >= 0, logits, -np.inf))
    want = np.einsum("nts,snh->tnh", p / p.sum(-1, keepdims=True), v[0])
    np.testing.assert_allclose(got[0], want, **golden.TOLERANCE)
