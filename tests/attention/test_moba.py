"""MoBA: the blocks that a query reads, their attention, and decoding from a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_golden
from chosen_support import (
    CONFIG,
    MESHES,
    check_devices,
    check_generation,
    check_steps,
    largest_array,
)
from tiny_lm import sharp_lm

from lcjax.attention import AttentionMetadata, Causal, MoBA, VerticalSlash, chosen_blocks
from lcjax.attention.cache import LayerShape
from lcjax.attention.pages import PagedCache
from lcjax.cost import resources
from lcjax.errors import InputError
from lcjax.models import Decoder, preset
from lcjax.models import cache as cache_lib
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.rope.rotation import Rotation, stack_rotations
from pallas_kernels import Layout
from pallas_kernels.rows import group_rows

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}


@functools.partial(jax.jit, static_argnames="pattern")
def attend(q, k, v, pattern):
    places = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    return pattern.attend(q, k, v, AttentionMetadata(places, places))


def random_qkv(length, heads=4, kv_heads=2, size=8, rows=1, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((rows, length, n, size) for n in (heads, kv_heads, kv_heads))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def expected(q, k, v, block, top_k, soft_cap=None):
    """Attention of one row in float64, one query after the other."""
    q, k, v = (np.asarray(x[0], np.float64) for x in (q, k, v))
    length, heads, size = q.shape
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    out = np.zeros((length, heads, v.shape[2]))
    for t in range(length):
        current = t // block
        for h in range(heads):
            scores = [q[t, h] @ k[j * block : (j + 1) * block, h].mean(0) for j in range(current)]
            best = np.argsort(scores)[::-1][: top_k - 1]
            seen = [s for j in sorted(best) for s in range(j * block, (j + 1) * block)]
            seen += range(current * block, t + 1)
            logits = k[seen, h] @ q[t, h] / np.sqrt(size)
            if soft_cap is not None:
                logits = soft_cap * np.tanh(logits / soft_cap)
            weights = np.exp(logits - logits.max())
            out[t, h] = weights @ v[seen, h] / weights.sum()
    return out


@pytest.mark.parametrize("name", ["moba.one", "moba.packed"])
def test_values_and_gradients_equal_the_authors_code(name):
    params, x = sparse_golden.params(name), sparse_golden.arrays(name)
    pattern = MoBA(block=params["block"], top_k=params["topk"])
    metadata = sparse_golden.metadata(params)

    def run(q, k, v):
        return pattern.attend(q, k, v, metadata)

    out, backward = jax.vjp(jax.jit(run), *(jnp.asarray(x[name]) for name in "qkv"))
    np.testing.assert_allclose(out, x["out"], **TOLERANCE)
    for gradient, name in zip(backward(jnp.asarray(x["cotangent"])), "qkv", strict=True):
        np.testing.assert_allclose(gradient, x[f"d{name}"], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("length", "block", "top_k", "heads", "kv_heads"),
    [(75, 16, 3, 4, 2), (65, 8, 2, 3, 3), (64, 8, 5, 8, 1), (9, 1, 3, 2, 2), (300, 64, 2, 2, 1)],
)
def test_a_query_reads_its_best_blocks(length, block, top_k, heads, kv_heads):
    q, k, v = random_qkv(length, heads, kv_heads)
    out = attend(q, k, v, MoBA(block=block, top_k=top_k))[0]
    np.testing.assert_allclose(out, expected(q, k, v, block, top_k), atol=2e-6)


@pytest.mark.parametrize(("length", "block", "top_k"), [(48, 16, 3), (47, 16, 3), (10, 64, 1)])
def test_a_text_of_as_many_blocks_as_are_read_has_full_attention(length, block, top_k):
    arrays = random_qkv(length)
    pattern = MoBA(block=block, top_k=top_k)
    np.testing.assert_array_equal(attend(*arrays, pattern), attend(*arrays, Causal()))


def test_logits_are_capped_and_values_may_have_another_size():
    q, k, _ = random_qkv(60, heads=2, kv_heads=1)
    v = random_qkv(60, heads=2, kv_heads=1, size=12, seed=1)[2]
    q = 4 * q
    want = expected(q, k, v, 8, 3, soft_cap=1.5)
    places = jnp.arange(60)[None]
    metadata = AttentionMetadata(places, places, soft_cap=1.5)
    out = jax.jit(functools.partial(MoBA(block=8, top_k=3).attend, metadata=metadata))(q, k, v)
    np.testing.assert_allclose(out[0], want, atol=2e-6)
    with pytest.raises(InputError, match="does not cap logits"):
        VerticalSlash().attend(*random_qkv(80), metadata)


def test_blocks_with_equal_scores_are_read_from_the_last_one():
    q, _, v = random_qkv(40)
    k = jnp.ones((1, 40, 2, 8))
    out = attend(q, k, v, MoBA(block=8, top_k=3))[0]
    mean = np.asarray(v[0, 16:36]).mean(0)  # of query 35: blocks 2, 3 and its own
    np.testing.assert_allclose(out[35], np.repeat(mean, 2, axis=0), atol=1e-6)


def test_equal_blocks_are_read_whatever_documents_precede():
    """Pages begin at a document's first token, wherever its row and its document begin."""
    q, k, v = random_qkv(70, seed=3)
    alone = attend(q, k, v, MoBA(block=8, top_k=3))
    for before in (5, 8):
        noise = random_qkv(before, seed=4)
        row = [jnp.concatenate(pair, 1) for pair in zip(noise, (q, k, v), strict=True)]
        metadata = sparse_golden.metadata({"cu_seqlens": [0, before, before + 70]})
        out = jax.jit(functools.partial(MoBA(block=8, top_k=3).attend, metadata=metadata))(*row)
        np.testing.assert_allclose(out[:, before:], alone, atol=2e-6)


@functools.cache
def decoder_params():
    init = jax.jit(Decoder(CONFIG).init)
    return init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


# The keys that two query heads choose are fewer than those in the cache, or more.
@pytest.mark.parametrize("top_k", [3, 5])
def test_tokens_read_one_by_one_equal_a_text_read_at_once(top_k):
    """From a cache, over borders of blocks, in rows that begin after padding."""
    config = CONFIG.replace(pattern=MoBA(block=8, top_k=top_k))
    check_steps(config, decoder_params(), PagedCache, [[21, 30]])


def test_generation_equals_reading_the_text_again():
    check_generation(sharp_lm(pattern=MoBA(block=8, top_k=3)))


@MESHES
def test_eight_devices_have_the_values_and_gradients_of_one(mesh):
    check_devices(CONFIG.replace(pattern=MoBA(block=8, top_k=3)), decoder_params(), mesh, first=27)


def test_every_row_visits_the_keys_of_its_block_and_no_others():
    """Counted: visited pairs are those that the rule allows, but for the padding of groups."""
    rng, count, block = np.random.default_rng(0), 9, 128
    chosen = jnp.asarray(rng.integers(0, count + 1, (1, 2, 500, 3)))  # 9: none
    groups = jax.vmap(jax.vmap(lambda x: group_rows(x, count, 16)))(chosen)
    table = chosen_blocks._table(groups, count, block)
    flat = np.asarray(chosen).reshape(1, 2, -1)
    for head in range(2):
        visited = 0
        for number, seen in enumerate(np.asarray(table.seen)[0, head]):
            part = slice(16 * number, 16 * (number + 1))
            pairs = np.asarray(groups.pair)[0, head, part]
            blocks = flat[0, head][pairs[pairs < flat.shape[2]]]
            assert len(set(blocks)) <= 1 and bool(seen) == bool(len(blocks))
            if seen:
                keys = np.asarray(table.index)[0, head, number, :seen] * table.k_block
                assert keys[0] == blocks[0] * block and seen * table.k_block == block
            visited += len(blocks)
        assert visited == (flat[0, head] < count).sum()


def test_no_array_grows_with_the_square_of_the_text():
    length, pattern = 131_072, MoBA(block=2048, top_k=3)

    def run(q, k, v):
        places = jnp.arange(length)[None]
        metadata = AttentionMetadata(places, places, implementation="xla")
        return pattern.attend(q, k, v, metadata).sum()

    shapes = (jax.ShapeDtypeStruct((1, length, n, 8), jnp.bfloat16) for n in (2, 1, 1))
    traced = jax.make_jaxpr(jax.grad(run, (0, 1, 2)))(*shapes)
    # Ten times the queries; T x T is 8,192 times as many numbers.
    assert largest_array(traced.jaxpr) <= 10 * length * 2 * 8


def test_bytes_of_the_cache_are_counted():
    config = preset("tiny").replace(num_layers=1, pattern=MoBA(block=16, top_k=2))
    shape = LayerShape(config.num_heads, config.num_kv_heads, config.head_dim, jnp.dtype("float32"))
    kind, slots = cache_lib.layer_caches(config)[0].fit(100, None)
    arrays = kind.arrays(shape, slots)
    assert arrays["means"].shape == (config.num_kv_heads, 7, config.head_dim)
    plain = resources.cache_bytes(config.replace(pattern=Causal()), 100)
    means = 4 * config.num_kv_heads * 7 * config.head_dim
    assert resources.cache_bytes(config, 100) == plain + means
    # A generated token reads two blocks of the keys, and all means.
    read = resources.read_cache_bytes(config, 96)
    choices = config.num_heads // config.num_kv_heads
    both = 2 * 4 * config.num_kv_heads * config.head_dim * min(96, choices * 32)
    assert read == both + 4 * config.num_kv_heads * 6 * config.head_dim


def test_wrong_input_names_the_way_out():
    with pytest.raises(InputError, match="top_k"):
        MoBA(block=8, top_k=0)
    q, k, v = random_qkv(40)
    places = jnp.arange(40)[None]
    metadata = AttentionMetadata(places, places, extra_partials=[(q, q[..., 0])])
    with pytest.raises(InputError, match=r"model\.pattern\.type=causal"):
        MoBA(block=8, top_k=2).attend(q, k, v, metadata)
    with pytest.raises(InputError, match="exact=True"):
        PagedCache(MoBA(block=8, top_k=2), rotated=False).fit(64, None)


def test_a_layout_that_heads_do_not_divide_keeps_them_whole():
    q, k, v = random_qkv(48, heads=3, kv_heads=3, rows=2)
    mesh = make_mesh(Mesh(2, 2, 2, 1))
    places = jnp.broadcast_to(jnp.arange(48), (2, 48))
    layout = Layout(mesh, ("data", "fsdp"), "tensor", "context")
    rotation = Rotation(jnp.asarray([1.0, 0.1]))
    for each in (rotation, stack_rotations([rotation, Rotation(jnp.asarray([0.5, 0.2]))])):
        plain = AttentionMetadata(places, places, rotation=each)
        want, got = (
            jax.jit(lambda q, k, v, m=m: MoBA(block=8, top_k=2).attend(q, k, v, m))(q, k, v)
            for m in (plain, plain.replace(layout=layout))
        )
        np.testing.assert_allclose(got, want, atol=2e-6)
