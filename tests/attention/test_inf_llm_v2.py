"""InfLLM-V2: the blocks that a group of heads reads, their attention, and decoding from a cache."""

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
from tiny_lm import generated, ids, sharp_lm

from lcjax.attention import AttentionMetadata, Causal, InfLLMV2, chosen_blocks
from lcjax.attention.cache import LayerShape
from lcjax.attention.chosen_blocks import DocumentTokens, complete_blocks
from lcjax.attention.pages import PagedCache
from lcjax.cost import resources
from lcjax.errors import InputError
from lcjax.generation.sampling import Sampling
from lcjax.generation.session import Session
from lcjax.models import Decoder, preset
from lcjax.models import cache as cache_lib
from lcjax.parallel.sharding import Mesh, make_mesh
from pallas_kernels import gather

SMALL = InfLLMV2(block=8, top_k=4, kernel=4, stride=2, local=1, dense_len=0)


@functools.partial(jax.jit, static_argnames="pattern")
def attend(q, k, v, pattern):
    places = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    return pattern.attend(q, k, v, AttentionMetadata(places, places))


@functools.partial(jax.jit, static_argnames="pattern")
def chosen(q, k, pattern):
    """The blocks that one row of tokens reads, bool [K, T, blocks]."""
    places = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    tokens = DocumentTokens.of(places, None, None)
    blocks = complete_blocks(tokens, pattern.block)
    ids = pattern.choose(q, k, tokens, tokens, blocks, AttentionMetadata(places, places))[0]
    numbers = jnp.arange(-(-q.shape[1] // pattern.block))
    count = blocks.numbers.shape[1]
    is_read = ((ids[..., None] == numbers) & (ids < count)[..., None]).any(2)
    current = places[0, :, None] // pattern.block
    return is_read | ((numbers <= current) & (numbers >= current - pattern.local))


def random_qkv(length, heads=4, kv_heads=2, size=8, rows=1, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((rows, length, n, size) for n in (heads, kv_heads, kv_heads))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def expected_choice(q, k, pattern):
    """The blocks of each key head and token of a row in float64, and where the choice is clear."""
    q, k = (np.asarray(x[0], np.float64) for x in (q, k))
    length, kv_heads, size = len(q), k.shape[1], q.shape[2]
    block, stride, kernel = pattern.block, pattern.stride, pattern.kernel
    chosen = np.zeros((kv_heads, length, -(-length // block)), bool)
    clear = np.ones((kv_heads, length), bool)
    starts = np.arange(0, max(length - kernel + 1, 0), stride)
    means = [k[start : start + kernel].mean(0) for start in starts]
    for t in range(length):
        near = max(0, t // block - pattern.local)
        for head in range(kv_heads):
            chosen[head, t, near : t // block + 1] = True
            windows = starts[starts + kernel <= t + 1]
            keys = np.asarray(means)[: len(windows), head].reshape(-1, size)
            group = q[t].reshape(kv_heads, -1, size)[head]
            weights = np.exp(group @ keys.T / np.sqrt(size))
            p = (weights / weights.sum(1, keepdims=True)).sum(0)
            score = []
            for j in range(near):
                overlaps = (windows < (j + 1) * block) & (windows + kernel > j * block)
                score.append(np.inf if j < pattern.first else p[overlaps].max(initial=-1))
            best = sorted(range(near), key=lambda j: (score[j], j), reverse=True)
            count = pattern.num_chosen
            chosen[head, t, best[:count]] = True
            if len(best) > count:
                last, next_best = score[best[count - 1]], score[best[count]]
                clear[head, t] = last == next_best or last > 1.01 * next_best
    return chosen, clear


def attention_to(q, k, v, is_read, block):
    """Attention of one row to its blocks [K, T, blocks], with a mask of T x T elements."""
    heads, length = q.shape[2], q.shape[1]
    is_read = jnp.repeat(jnp.asarray(is_read), heads // is_read.shape[0], axis=0)
    visible = jnp.repeat(is_read, block, axis=2)[..., :length] & np.tri(length, dtype=bool)
    k, v = (jnp.repeat(x[0], heads // x.shape[2], axis=1) for x in (k, v))
    logits = jnp.einsum("TNH,SNH->NTS", q[0], k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), -1)
    return jnp.einsum("NTS,SNH->TNH", weights, v)


def golden():
    """The pattern and the arrays of the golden case, and whether the choice of a token is clear."""
    params, x = sparse_golden.params("infllm_v2.one"), sparse_golden.arrays("infllm_v2.one")
    fields = {name: params[name] for name in ("block", "kernel", "stride", "local")}
    pattern = InfLLMV2(top_k=params["topk"], first=params["init"], dense_len=0, **fields)
    return pattern, x, x["clear"][0]


def test_values_and_choices_equal_the_authors_code():
    pattern, x, clear = golden()
    q, k, v = (jnp.asarray(x[name]) for name in "qkv")
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(chosen(q, k, pattern)[clear], x["chosen"][0][clear])
    out = np.asarray(attend(q, k, v, pattern))[0]
    group = q.shape[2] // k.shape[2]
    of_heads = np.repeat(clear.T, group, axis=1)
    np.testing.assert_allclose(out[of_heads], x["out"][0][of_heads], rtol=1e-5, atol=2e-5)


def test_gradients_are_those_of_attention_to_the_chosen_blocks():
    """None flows through the choice."""
    pattern, x, _ = golden()
    arrays = [jnp.asarray(x[name]) for name in "qkv"]
    is_read = chosen(*arrays[:2], pattern)
    cotangent = jnp.asarray(np.random.default_rng(0).normal(size=arrays[0].shape), jnp.float32)
    out, backward = jax.vjp(jax.jit(lambda *x: attend(*x, pattern)[0]), *arrays)
    want, expected = jax.vjp(jax.jit(lambda *x: attention_to(*x, is_read, pattern.block)), *arrays)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=2e-5)
    for got, gradient in zip(backward(cotangent[0]), expected(cotangent[0]), strict=True):
        np.testing.assert_allclose(got, gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("length", "fields", "heads", "kv_heads"),
    [
        (75, {}, 4, 2),
        (64, {"first": 0, "local": 0, "top_k": 2}, 3, 3),
        (79, {"kernel": 6, "stride": 2, "first": 2, "top_k": 5}, 8, 1),
        (61, {"block": 6, "kernel": 3, "stride": 3, "top_k": 3}, 2, 2),
        (90, {"kernel": 16, "stride": 4, "local": 0}, 4, 2),
    ],
)
def test_a_group_of_heads_reads_the_blocks_with_the_most_attention(length, fields, heads, kv_heads):
    pattern = InfLLMV2(
        **({"block": 8, "top_k": 4, "kernel": 4, "stride": 2, "local": 1, "dense_len": 0} | fields)
    )
    q, k, v = random_qkv(length, heads, kv_heads)
    want, clear = expected_choice(q, k, pattern)
    got = np.asarray(chosen(q, k, pattern))
    assert clear.mean() > 0.8
    np.testing.assert_array_equal(got[clear], want[clear])
    out = attend(q, k, v, pattern)[0]
    np.testing.assert_allclose(out, attention_to(q, k, v, got, pattern.block), atol=2e-6)


@pytest.mark.parametrize("fields", [{"dense_len": 75}, {"dense_len": 0, "top_k": 10}])
def test_short_texts_have_full_attention(fields):
    arrays, pattern = random_qkv(75), InfLLMV2(block=8, kernel=4, stride=2, local=1, **fields)
    np.testing.assert_array_equal(attend(*arrays, pattern), attend(*arrays, Causal()))


def test_the_first_tokens_of_a_long_text_have_full_attention():
    """Those before `dense_len`, and those that may choose all their blocks."""
    arrays = random_qkv(100)
    want = np.asarray(attend(*arrays, Causal()))[0]
    for dense_len, end in ((50, 50), (7, 32), (0, 32)):  # 32 tokens have 4 blocks
        pattern = InfLLMV2(block=8, top_k=4, kernel=4, stride=2, local=1, dense_len=dense_len)
        out = np.asarray(attend(*arrays, pattern))[0]
        np.testing.assert_allclose(out[:end], want[:end], atol=2e-6)
        assert (abs(out[end + 1 :] - want[end + 1 :]).max((1, 2)) > 1e-3).mean() > 0.9
        sparse = np.asarray(attend(*arrays, SMALL))[0]
        np.testing.assert_allclose(out[max(end, 50) :], sparse[max(end, 50) :], atol=2e-6)


def test_of_neighbours_with_one_best_window_the_later_block_is_read():
    """The window of keys 22 to 25 is the best one of blocks 2 and 3, and two blocks are chosen."""
    q, k, _ = random_qkv(64, heads=2, kv_heads=1)
    k = k.at[:, 26:].set(-100.0).at[:, 24:26].set(100.0)
    q = jnp.abs(q)
    pattern = InfLLMV2(block=8, top_k=3, kernel=4, stride=2, local=0, first=1, dense_len=0)
    is_read = np.asarray(chosen(q, k, pattern))[0, 60]
    assert np.flatnonzero(is_read).tolist() == [0, 3, 7]


def test_tiles_of_tokens_change_nothing(monkeypatch):
    arrays, pattern = (
        random_qkv(90),
        InfLLMV2(block=8, top_k=8, kernel=4, stride=2, local=1, dense_len=0),
    )

    def run():
        def loss(*arrays):
            return jnp.sin(pattern.attend(*arrays, AttentionMetadata(places, places))).sum()

        places = jnp.arange(90)[None]
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays)

    want = run()
    monkeypatch.setattr(gather, "BUDGET", 1000)
    monkeypatch.setattr(chosen_blocks, "_MAX_COPIES", 2)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), run(), want)


def test_equal_blocks_are_read_whatever_documents_precede():
    """Windows and blocks begin at a document's first token; documents of one token may precede."""
    q, k, v = random_qkv(70, seed=3)
    pattern = InfLLMV2(block=8, top_k=4, kernel=4, stride=2, local=1, dense_len=40)
    for each in (SMALL, pattern):
        alone = attend(q, k, v, each)
        for before in (1, 5, 9):
            noise = random_qkv(before + 9, seed=4)
            row = [
                jnp.concatenate([x[:, :before], y, x[:, before:]], 1)
                for x, y in zip(noise, (q, k, v), strict=True)
            ]
            metadata = sparse_golden.metadata({"cu_seqlens": [0, before, before + 70, before + 79]})
            out = jax.jit(functools.partial(each.attend, metadata=metadata))(*row)
            np.testing.assert_allclose(out[:, before : before + 70], alone, atol=2e-6)


@functools.cache
def decoder_params():
    init = jax.jit(Decoder(CONFIG).init)
    return init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


# The keys that are chosen are fewer than those in the cache, or more; a text is dense at first.
@pytest.mark.parametrize(
    ("top_k", "dense_len"), [(4, 45), *(pytest.param(x, 0, marks=pytest.mark.slow) for x in (4, 8))]
)
def test_tokens_read_one_by_one_equal_a_text_read_at_once(top_k, dense_len):
    """From a cache, over borders of windows and blocks, in rows that begin after padding."""
    pattern = InfLLMV2(block=8, top_k=top_k, kernel=4, stride=2, local=1, dense_len=dense_len)
    config = CONFIG.replace(pattern=pattern)
    check_steps(config, decoder_params(), PagedCache, [[21, 30]])


def test_generation_equals_reading_the_text_again():
    check_generation(sharp_lm(pattern=SMALL))


# Dense for the first 64 tokens, and while any row has fewer
LATE = InfLLMV2(block=8, top_k=4, kernel=4, stride=2, local=1, dense_len=64)


def test_a_rewound_answer_leaves_no_trace():
    """The answers cross a block, and the cache gets more slots in between."""
    lm = sharp_lm(pattern=LATE)
    cache = cache_lib.create(lm.model.config, 1, 128, chunk=61)
    session = Session(lm.model, lm.params, cache, lm.rotation(256))
    session.read(np.array([ids(1, 61)], np.int32), None, np.arange(61)[None])

    def answer(seed):
        places = 61 + np.arange(14)[None]
        columns = zip(np.array([ids(seed, 14)], np.int32).T, places.T)
        return [session.read(token[None], None, place[None]) for token, place in columns]

    first = answer(2)
    assert not np.array_equal(first[-1], answer(3)[-1])
    session.cache = cache_lib.branch(session.cache, np.int32(61), np.zeros(1, np.int32), 256)
    np.testing.assert_allclose(answer(2), first, atol=1e-4)


@pytest.mark.slow
def test_a_mesh_gives_the_answers_of_one_device():
    mesh = make_mesh(Mesh(fsdp=2, tensor=2), jax.devices()[:4])
    prompts, rest = [ids(1, 70), ids(2, 33), ids(3, 58)], [[ids(4, 9)]] * 3
    one, many = (sharp_lm(pattern=LATE, mesh=x).continuations(prompts, rest) for x in (None, mesh))
    for score, other in zip(one, many, strict=True):
        np.testing.assert_allclose(other[0].nll, score[0].nll, atol=1e-4)
    sampling = Sampling(max_new_tokens=9, min_new_tokens=9)
    one, many = (generated(sharp_lm(pattern=LATE, mesh=x), prompts, sampling) for x in (None, mesh))
    assert one == many


@MESHES
def test_eight_devices_have_the_values_and_gradients_of_one(mesh):
    check_devices(CONFIG.replace(pattern=SMALL), decoder_params(), mesh, first=17)


@pytest.mark.parametrize(("kind", "mass", "hit"), [("token", 0.75, 0.76), ("block", 0.96, 1.0)])
def test_a_needle_is_found_as_often_as_in_the_specification(kind, mass, hit):
    pattern = InfLLMV2(block=64, top_k=5, local=1, dense_len=0)
    means = []
    for seed in (0, 1):
        q, k = sparse_golden.needle(seed, kind)
        arrays = (jnp.asarray(x, jnp.float32)[None, :, None] for x in (q, k))
        is_read = np.asarray(chosen(*arrays, pattern))[0]
        means.append(sparse_golden.recall(q, k, is_read, kind, pattern.block, rows=1))
    got = np.mean(means, 0)
    assert got[0] > mass - 0.04 and got[1] > hit - 0.04 and got[2] < 0.38 + 0.04


def test_no_array_grows_with_the_square_of_the_text():
    length, pattern = 65_536, InfLLMV2(top_k=16, local=7)

    def run(q, k, v):
        places = jnp.arange(length)[None]
        metadata = AttentionMetadata(places, places, implementation="xla")
        return pattern.attend(q, k, v, metadata).sum()

    shapes = (jax.ShapeDtypeStruct((1, length, n, 64), jnp.bfloat16) for n in (4, 1, 1))
    traced = jax.make_jaxpr(jax.grad(run, (0, 1, 2)))(*shapes)
    # Copies of queries; T x T is 256 times as many numbers as the queries, its windows 16 times.
    assert largest_array(traced.jaxpr) <= 12 * length * 4 * 64


def test_bytes_of_the_cache_are_counted():
    config = preset("tiny").replace(
        num_layers=1,
        pattern=InfLLMV2(block=16, top_k=2, local=0, kernel=8, stride=4, dense_len=64),
    )
    shape = LayerShape(config.num_heads, config.num_kv_heads, config.head_dim, jnp.dtype("float32"))
    kind, slots = cache_lib.layer_caches(config)[0].fit(100, None)
    arrays = kind.arrays(shape, slots)
    assert arrays["means"].shape == (config.num_kv_heads, 28, config.head_dim)
    assert not isinstance(cache_lib.layer_caches(config)[0].fit(64, None)[0], PagedCache)
    plain = resources.cache_bytes(config.replace(pattern=Causal()), 100)
    means = 4 * config.num_kv_heads * 28 * config.head_dim
    assert resources.cache_bytes(config, 100) == plain + means
    # A generated token reads two blocks of the keys, and all means; at first the whole text.
    read = resources.read_cache_bytes(config, 96)
    assert read == 4 * config.num_kv_heads * config.head_dim * (2 * 32 + 24)
    assert resources.read_cache_bytes(config, 64) == 4 * config.num_kv_heads * config.head_dim * 128


def test_wrong_fields_name_the_rule():
    with pytest.raises(InputError, match=r"pattern\.kernel=24 must be a multiple of .*stride=16"):
        InfLLMV2(kernel=24)
    with pytest.raises(InputError, match=r"pattern\.block=40 must be a multiple of .*stride=16"):
        InfLLMV2(block=40)
    with pytest.raises(InputError, match=r"pattern\.top_k=33 must be at least 34"):
        InfLLMV2(top_k=33)
    q, k, v = random_qkv(40)
    places = jnp.arange(40)[None]
    metadata = AttentionMetadata(places, places, extra_partials=[(q, q[..., 0])])
    with pytest.raises(InputError, match=r"model\.pattern\.type=causal"):
        SMALL.attend(q, k, v, metadata)
    with pytest.raises(InputError, match="exact=True"):
        PagedCache(SMALL, rotated=False).fit(64, None)
