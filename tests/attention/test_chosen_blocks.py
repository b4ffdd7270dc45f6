"""Attention to blocks that a token chooses for one head, for a group of heads, or for all heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chosen_support import largest_array

from lcjax.attention import InfLLMV2, MoBA, chosen_blocks
from lcjax.attention.chosen_blocks import DocumentTokens, attend_to_chosen, complete_blocks
from lcjax.models import Decoder, preset
from lcjax.models import cache as cache_lib

HEADS, KV_HEADS, COUNT, BLOCK = 4, 2, 7, 8


def inputs(length=45, choices=KV_HEADS, copies=5, size=8, value_size=12):
    """q, keys and values of 7 blocks, and different blocks of each token; 7 for none."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, length, HEADS, size))
    k = rng.normal(size=(2, COUNT * BLOCK, KV_HEADS, size))
    v = rng.normal(size=(2, COUNT * BLOCK, KV_HEADS, value_size))
    order = rng.permuted(np.broadcast_to(np.arange(COUNT), (2, choices, length, COUNT)), axis=-1)
    chosen = np.where(rng.random(order.shape) < 0.8, order, COUNT)[..., :copies]
    chosen[:, :, 3] = COUNT  # a token that reads nothing
    return *(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(chosen, jnp.int32)


def dense(q, k, v, chosen):
    """The same attention with a mask of T x S elements."""
    is_read = (chosen[..., None] == jnp.arange(COUNT)).any(-2)  # [B, h, T, C]
    is_read = jnp.repeat(is_read, HEADS // chosen.shape[1], axis=1)
    visible = jnp.repeat(is_read, BLOCK, axis=-1)
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    logits = jnp.einsum("BTNH,BSNH->BNTS", q, k) * q.shape[-1] ** -0.5
    logits = jnp.where(visible, logits, -1e30)
    weights = jnp.where(visible, jax.nn.softmax(logits, -1), 0)
    lse = jnp.where(visible.any(-1), jax.nn.logsumexp(logits, -1), -jnp.inf)
    return jnp.einsum("BNTS,BSNH->BTNH", weights, v), lse.swapaxes(1, 2)


def with_gradients(attend, q, k, v, chosen):
    """Output and lse, and gradients of q, k and v through both."""
    rng = np.random.default_rng(1)
    of_out = jnp.asarray(rng.normal(size=(*q.shape[:3], v.shape[-1])), jnp.float32)
    of_lse = jnp.asarray(rng.normal(size=q.shape[:3]), jnp.float32)

    def loss(q, k, v):
        out, lse = attend(q, k, v, chosen)
        finite = jnp.where(lse > -jnp.inf, lse, 0)
        return (out * of_out).sum() + (finite * of_lse).sum(), (out, lse)

    gradients, results = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return *results, *gradients


@pytest.mark.parametrize("choices", [1, KV_HEADS, HEADS])
@pytest.mark.parametrize("tiles", [1, 3])
def test_attention_to_chosen_blocks_equals_masked_attention(choices, tiles, monkeypatch):
    if tiles > 1:  # 45 tokens with 5 blocks each: three tiles
        monkeypatch.setattr(chosen_blocks.gather, "BUDGET", 1)
        monkeypatch.setattr(chosen_blocks, "_MAX_COPIES", 2)
    arrays = inputs(length=44, choices=choices)
    got = with_gradients(functools.partial(attend_to_chosen, block=BLOCK), *arrays)
    want = with_gradients(dense, *arrays)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_copies_of_queries_are_made_for_a_tile_of_tokens():
    length, copies, heads, size = 32_768, 64, 4, 64

    def run(q, k, v, chosen):
        return attend_to_chosen(q, k, v, chosen, 64, implementation="xla")[0].sum()

    q = jax.ShapeDtypeStruct((1, length, heads, size), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, length, 1, size), jnp.bfloat16)
    chosen = jax.ShapeDtypeStruct((1, 1, length, copies), jnp.int32)
    traced = jax.make_jaxpr(jax.grad(run, (0, 1, 2)))(q, k, k, chosen)
    # Rows of 8 copies, with those that fill the blocks of rows
    assert largest_array(traced.jaxpr) <= 10 * length * heads * size


def test_blocks_count_from_the_first_token_of_each_document():
    segments = jnp.asarray([[0, 1, 1, 1, 1, 0, 1, 2, 2, 2, 3, 3, 3, 3]])
    index = jnp.asarray([[0, 0, 1, 2, 3, 0, 4, 0, 1, 2, 0, 1, 2, 3]])
    blocks = complete_blocks(DocumentTokens(index, index, segments), 2)
    assert blocks.segments.tolist() == [[1, 1, 2, 3, 3, -1, -1]]
    assert blocks.numbers[0, :5].tolist() == [0, 1, 0, 0, 1]
    assert blocks.slots[0, :5].tolist() == [[1, 2], [3, 4], [7, 8], [10, 11], [12, 13]]


class ForAllHeads(MoBA):
    """MoBA whose query heads choose together."""

    chooses_by_query_head = False

    def _best(self, q, summaries, is_past):
        total = q.reshape(*q.shape[:1], summaries.shape[2], -1, q.shape[2]).sum(2)
        together = total.reshape(len(q), 1, -1), summaries.reshape(*summaries.shape[:2], 1, -1)
        return super()._best(*together, is_past)


# Of 9 blocks: keys are copied, or read where they are; or only the near blocks are read.
@pytest.mark.parametrize(
    "pattern",
    [
        ForAllHeads(block=8, top_k=3),
        ForAllHeads(block=8, top_k=8),
        MoBA(block=8, top_k=1),
        InfLLMV2(block=8, top_k=2, kernel=4, stride=2, first=0, local=1, dense_len=20),
    ],
    ids=lambda pattern: f"{type(pattern).__name__}-{pattern.top_k}",
)
def test_generated_tokens_read_what_a_text_reads(pattern):
    config = preset("tiny").replace(num_layers=1, num_heads=4, num_kv_heads=2, pattern=pattern)
    model, length, prompt = Decoder(config), 70, 63
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 256, (2, length)))
    params = jax.jit(model.init)(jax.random.key(0), tokens[:, :2])["params"]

    @jax.jit
    def read(tokens, cache):
        output = model.apply({"params": params}, tokens, cache=cache)
        return output.hidden, output.cache

    want, outs = read(tokens, None)[0], []
    cache = cache_lib.create(config, 2, length, chunk=prompt)
    for start, end in [(0, prompt), *((at, at + 1) for at in range(prompt, length))]:
        out, cache = read(tokens[:, start:end], cache)
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, 1), want, rtol=0, atol=5e-5)
