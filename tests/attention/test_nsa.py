"""NSA: its three branches, the blocks that it chooses, and decoding from a cache."""

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

from lcjax.attention import NSA, AttentionMetadata, Causal
from lcjax.attention.base import Features
from lcjax.attention.cache import LayerShape
from lcjax.attention.chosen_blocks import complete_blocks
from lcjax.attention.nsa import BranchCache
from lcjax.attention.on_devices import DocumentTokens
from lcjax.cost import resources
from lcjax.errors import InputError
from lcjax.models import Decoder, preset
from lcjax.models import cache as cache_lib
from lcjax.tree import flatten, nest
from pallas_kernels import gather

SMALL = NSA(block=8, top_k=4, window=12)


@pytest.fixture
def no_ties(monkeypatch):
    """The authors' code chooses among scores that are nearly equal, too."""
    monkeypatch.setattr(gather, "TIE", 2.0**-22)


def with_gates(metadata, gates):
    return metadata.replace(features=Features({"gates": jnp.asarray(gates)}, {}, {}))


@functools.partial(jax.jit, static_argnames="pattern")
def attend(q, k, v, gates, pattern):
    places = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    return pattern.attend(q, k, v, with_gates(AttentionMetadata(places, places), gates))


def only(branch, q):
    """Gates that show one branch: 0 is of compressed blocks, 1 of chosen ones, 2 the window."""
    return jnp.broadcast_to(jnp.eye(3)[branch], (*q.shape[:3], 3))


@functools.partial(jax.jit, static_argnames="pattern")
def chosen(q, k, pattern, segments=None):
    """The blocks of its document that each token of a row reads, bool [K, T, blocks]."""
    params = {"cu_seqlens": [0, q.shape[1]]} if segments is None else {"cu_seqlens": segments}
    metadata = sparse_golden.metadata(params)
    places = jnp.broadcast_to(metadata.q_order, q.shape[:2])
    tokens = DocumentTokens(places, places, metadata.q_segments)
    blocks = complete_blocks(tokens, pattern.block)
    ids = pattern.choose(q, k, tokens, tokens, blocks, metadata)[0]
    count = blocks.numbers.shape[1]
    of_ids = jnp.where(ids < count, blocks.numbers[0, jnp.minimum(ids, count - 1)], -1)
    numbers = jnp.arange(-(-q.shape[1] // pattern.block))
    is_read = (of_ids[..., None] == numbers).any(2)
    current = places[0, :, None] // pattern.block
    return is_read | ((numbers <= current) & (numbers >= current - pattern.local))


def random_qkv(length, heads=4, kv_heads=2, size=8, rows=1, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((rows, length, n, size) for n in (heads, kv_heads, kv_heads))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("name", ["nsa.one", "nsa.packed"])
def test_values_choices_and_gradients_are_those_of_the_authors(name, no_ties):
    params, x = sparse_golden.params(name), sparse_golden.arrays(name)
    pattern = NSA(block=params["block"], top_k=params["count"], window=params["window"])
    metadata = sparse_golden.metadata(params)
    q, k, v = (jnp.asarray(x[n]) for n in "qkv")
    packed = None if len(params["cu_seqlens"]) == 2 else tuple(params["cu_seqlens"])
    is_read = chosen.__wrapped__(q, k, pattern, packed)
    width = x["chosen"].shape[-1]
    np.testing.assert_array_equal(is_read[..., :width], x["chosen"][0])
    assert not is_read[..., width:].any()
    names = ["g_cmp", "g_slc", "g_swa"]
    gates = jnp.stack([jnp.asarray(x[n]).swapaxes(1, 2) for n in names], -1)

    def run(q, k, v, gates):
        return pattern.attend(q, k, v, with_gates(metadata, gates))

    out, backward = jax.vjp(jax.jit(run), q, k, v, gates)
    np.testing.assert_allclose(out, x["out"], rtol=1e-5, atol=5e-6)
    for branch, part in enumerate(("o_cmp", "o_slc", "o_swa")):
        want = x[part] if x[part].shape == q.shape else x[part].swapaxes(1, 2)
        np.testing.assert_allclose(run(q, k, v, only(branch, q)), want, rtol=1e-5, atol=5e-6)
    *slopes, of_gates = backward(jnp.asarray(x["cotangent"]))
    for slope, n in zip(slopes, "qkv", strict=True):
        np.testing.assert_allclose(slope, x[f"d{n}"], rtol=1e-4, atol=5e-5)
    for branch, n in enumerate(names):
        want = x[f"d{n}"].swapaxes(1, 2)
        np.testing.assert_allclose(of_gates[..., branch], want, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("length", [5, 8, 31, 32])
def test_the_branch_of_chosen_blocks_is_full_attention_in_short_texts(length):
    q, k, v = random_qkv(length)
    out = attend(q, k, v, only(1, q), SMALL)
    places = jnp.arange(length)[None]
    want = Causal().attend(q, k, v, AttentionMetadata(places, places))
    np.testing.assert_allclose(out, want, atol=2e-6)
    # One more block would not be read by all tokens.
    q, k, v = random_qkv(41)
    places = jnp.arange(41)[None]
    want = Causal().attend(q, k, v, AttentionMetadata(places, places))
    assert abs(attend(q, k, v, only(1, q), SMALL) - want)[0, -1].max() > 1e-3


def test_tokens_before_the_first_complete_block_have_no_compressed_keys():
    q, k, v = random_qkv(50)

    def loss(*arrays):
        return (attend(*arrays, only(0, q), SMALL) ** 2).sum()

    out = attend(q, k, v, only(0, q), SMALL)
    assert not out[:, :7].any() and (abs(out[:, 7:]).max((0, 2, 3)) > 0).all()
    # Token 7 sees one mean; the unfinished last block is not read.
    mean = np.repeat(np.asarray(v[0, :8]).mean(0), 2, axis=0)
    np.testing.assert_allclose(out[0, 7], mean, atol=1e-6)
    for slope in jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v):
        assert np.isfinite(slope).all() and slope.any()
    _, dk, dv = jax.grad(loss, (0, 1, 2))(q, k, v)
    assert dk[:, :48].any() and dv[:, :48].any() and not dk[:, 48:].any() and not dv[:, 48:].any()


def test_every_branch_is_causal():
    q, k, v = random_qkv(60)
    for branch in range(3):
        before = np.asarray(attend(q, k, v, only(branch, q), SMALL))
        for at in (30, 31, 32):
            moved = (x.at[:, at].add(1.0) for x in (q, k, v))
            after = np.asarray(attend(*moved, only(branch, q), SMALL))
            np.testing.assert_array_equal(before[:, :at], after[:, :at])
            changes = branch != 0 or at == 31  # an unfinished block is no compressed key
            assert np.any(before[:, at] != after[:, at]) or not changes


@functools.cache
def decoder_params(pattern=SMALL, random=True):
    """With random gates, or those of the start."""
    init = jax.jit(Decoder(CONFIG.replace(pattern=pattern)).init)
    params = init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    if not random:
        return params
    flat, rng = flatten(params), np.random.default_rng(7)
    for path, x in flat.items():
        if "branch_gate" in path:
            flat[path] = jnp.asarray(rng.normal(size=x.shape) * 0.3, jnp.float32)
        elif "branch_scale" in path:
            flat[path] = jnp.asarray(rng.uniform(0.3, 1.5, x.shape), jnp.float32)
    return nest(flat)


def hidden(config, params, tokens):
    model = Decoder(config)
    return jax.jit(lambda params: model.apply({"params": params}, tokens).hidden)(params)


def test_a_dense_model_is_unchanged_at_the_start():
    params = decoder_params(random=False)
    dense = nest({p: x for p, x in flatten(params).items() if "/pattern/" not in p})
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 256, (2, 32)))
    want = hidden(CONFIG, dense, tokens)
    got = hidden(CONFIG.replace(pattern=SMALL), params, tokens)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_the_loss_of_the_model_trains_gates_from_the_start():
    params, config = decoder_params(random=False), CONFIG.replace(pattern=SMALL)
    model, tokens = Decoder(config), jnp.asarray(np.random.default_rng(3).integers(0, 256, (2, 60)))

    @jax.jit
    def slopes(params):
        return jax.grad(lambda p: jnp.sin(model.apply({"params": p}, tokens).hidden).sum())(params)

    gradients = flatten(slopes(params))
    scales = [x for path, x in gradients.items() if "branch_scale" in path]
    gates = [x for path, x in gradients.items() if "branch_gate" in path]
    assert scales and all((abs(x) > 0).all() for x in scales)
    assert gates and all(abs(x[..., 1]).max() > 0 for x in gates)
    gradients = flatten(slopes(decoder_params()))
    assert all(
        (abs(x).max((-3, -2)) > 0).all() for path, x in gradients.items() if "branch_gate" in path
    )


# The keys that are chosen are fewer than those in the cache, or more; the window is longer, too.
@pytest.mark.parametrize(
    ("top_k", "window"),
    [(4, 12), (3, 100), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((8, 12), (3, 1)))],
)
def test_tokens_read_one_by_one_equal_a_text_read_at_once(top_k, window):
    """From a cache, over borders of blocks, in rows that begin after padding."""
    config = CONFIG.replace(pattern=NSA(block=8, top_k=top_k, window=window))
    check_steps(config, decoder_params(), BranchCache, [[5], [21, 30]])


def test_generation_equals_reading_the_text_again():
    check_generation(sharp_lm(pattern=NSA(block=8, top_k=3, window=6)))


@MESHES
def test_eight_devices_have_the_values_and_gradients_of_one(mesh):
    check_devices(CONFIG.replace(pattern=SMALL), decoder_params(), mesh, first=17)


@pytest.mark.parametrize(("kind", "mass", "hit"), [("token", 0.75, 0.77), ("block", 0.96, 1.0)])
def test_a_needle_is_found_as_often_as_in_the_specification(kind, mass, hit):
    pattern, means = NSA(block=64, top_k=5), []
    for seed in (0, 1):
        q, k = sparse_golden.needle(seed, kind)
        arrays = (jnp.asarray(x, jnp.float32)[None, :, None] for x in (q, k))
        is_read = np.asarray(chosen(*arrays, pattern))[0]
        means.append(sparse_golden.recall(q, k, is_read, kind, pattern.block, rows=1))
    got = np.mean(means, 0)
    assert got[0] > mass - 0.04 and got[1] > hit - 0.04 and got[2] < 0.38 + 0.04


def test_no_array_grows_with_the_square_of_the_text():
    length, pattern = 65_536, NSA()

    def run(q, k, v, gates):
        places = jnp.arange(length)[None]
        metadata = AttentionMetadata(places, places, implementation="xla")
        return pattern.attend(q, k, v, with_gates(metadata, gates)).sum()

    shapes = [jax.ShapeDtypeStruct((1, length, n, 64), jnp.bfloat16) for n in (4, 1, 1)]
    shapes.append(jax.ShapeDtypeStruct((1, length, 4, 3), jnp.float32))
    traced = jax.make_jaxpr(jax.grad(run, (0, 1, 2, 3)))(*shapes)
    # Copies of queries; T x T is 256 times as many numbers as the queries, T x T / block 4 times.
    assert largest_array(traced.jaxpr) <= 16 * length * 4 * 64


def test_bytes_of_the_cache_are_counted():
    pattern = NSA(block=16, top_k=3, window=4)
    config = preset("tiny").replace(num_layers=1, pattern=pattern)
    shape = LayerShape(config.num_heads, config.num_kv_heads, config.head_dim, jnp.dtype("float32"))
    kind, slots = cache_lib.layer_caches(config)[0].fit(100, None)
    arrays = kind.arrays(shape, slots)
    assert arrays["means"].shape == (config.num_kv_heads, 7, config.head_dim)
    assert arrays["value_means"].shape == arrays["means"].shape
    assert not isinstance(cache_lib.layer_caches(config)[0].fit(48, None)[0], BranchCache)
    plain = resources.cache_bytes(config.replace(pattern=Causal()), 100)
    each = 4 * config.num_kv_heads * config.head_dim
    assert resources.cache_bytes(config, 100) == plain + each * 2 * 7
    # A generated token reads three blocks of the keys, four keys, and all means.
    assert resources.read_cache_bytes(config, 96) == each * 2 * (48 + 4 + 6)


def test_wrong_input_names_the_way_out():
    with pytest.raises(InputError, match=r"pattern\.top_k=2 .*at least 3"):
        NSA(top_k=2)
    lm = sharp_lm()
    with pytest.raises(InputError, match=r"parameters of its own.*train.trainable=\[pattern\]"):
        lm.with_method(pattern=SMALL)
    with pytest.raises(InputError, match="exact=True"):
        BranchCache(SMALL, rotated=False).fit(64, None)
