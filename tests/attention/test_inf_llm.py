"""InfLLM against its definition, token by token in float64, however a text is cut into calls."""

import dataclasses
import functools
import math

import attention_golden as golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax import cost
from lcjax.attention import AttentionMetadata, InfLLM, order_indices
from lcjax.attention.base import partial_attention
from lcjax.errors import InputError
from lcjax.models import Decoder, preset
from lcjax.models import cache as cache_lib
from lcjax.models.layers import LayerInputs
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.rope import Rotation
from pallas_kernels import gather, merge

slow = pytest.mark.slow
T, HEADS, KV_HEADS, SIZE = 61, 4, 2, 16
TURNS = 50.0 ** -np.linspace(0, 1, 6)  # of 12 of the 16 channels
ROTATION = Rotation(jnp.asarray(TURNS, jnp.float32), 1.1, 0.9)
BASE = InfLLM(window=10, sinks=3, block=4, top_k=2, representatives=2, chunk=1)


def qkv(length=T, seed=0):
    rng = np.random.default_rng(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [rng.normal(size=(length, n, SIZE)).astype(np.float32) for n in heads]


def turned(x, position, extra=1.0):
    """One vector at one position, by complex numbers: channels j and j + 6 are a plane."""
    x = np.asarray(x, np.float64)
    plane = (x[:6] + 1j * x[6:12]) * np.exp(1j * position * TURNS) * 1.1
    return extra * np.concatenate([plane.real, plane.imag, x[12:]])


def naive(p, q, k, v, cuts=()):
    """(out [T, N, H], received [N, T]) in float64; calls begin at 0 and at `cuts`."""
    length, heads = q.shape[:2]
    k, v = (np.repeat(x.astype(np.float64), heads // x.shape[1], axis=1) for x in (k, v))
    out, received = np.zeros(q.shape), np.zeros((heads, length))
    chosen = first = None
    for i in range(length):
        if i % p.chunk == 0 or i in cuts:
            end = min([x for x in (*cuts, length) if x > i] + [i - i % p.chunk + p.chunk])
            chosen, first = _choice(p, q, k, received, i, end), i
        for h in range(heads):
            logits, keys = [], []
            complete = max((first - p.window + 1 - p.sinks) // p.block, 0) * p.block + p.sinks
            for j in range(i + 1):
                if i - j < p.window:
                    at = turned(q[i, h], i, 0.9), turned(k[j, h], j)
                elif j < p.sinks or j >= complete or (j - p.sinks) // p.block in chosen[h]:
                    at = turned(q[i, h], p.window - 1, 0.9), turned(k[j, h], 0)
                else:
                    continue
                logits.append(at[0] @ at[1] / math.sqrt(SIZE))
                keys.append(j)
            weights = np.exp(np.array(logits) - max(logits))
            weights /= weights.sum()
            out[i, h] = weights @ v[keys, h]
            for j, weight in zip(keys, weights, strict=True):
                received[h, j] += weight if i - j < p.window else 0
    return out, received


def _choice(p, q, k, received, first, end):
    """The chosen blocks of every head, for the queries from `first` to `end`."""
    heads, scores, bounds, number = q.shape[1], [], [], 0
    while p.sinks + (number + 1) * p.block - 1 <= first - p.window:
        tokens = np.arange(p.block) + p.sinks + number * p.block
        of_heads = []
        for h in range(heads):
            best = tokens[np.argsort(-received[h, tokens])[: p.representatives]]
            mean = np.mean([turned(q[i, h], p.window - 1) for i in range(first, end)], 0)
            summary = k[best, h].mean(0)
            of_heads.append((mean @ summary, np.linalg.norm(mean) * np.linalg.norm(summary)))
        scores.append([score for score, _ in of_heads])
        bounds.append([bound for _, bound in of_heads])
        number += 1
    if number <= p.top_k:
        return [set(range(number))] * heads
    scores, margin = np.array(scores), gather.TIE * np.max(bounds, 0)
    if not p.per_head:
        scores = np.repeat(scores.sum(1, keepdims=True), heads, axis=1)
        margin = np.repeat(margin.sum(), heads)
    return [_best(scores[:, h], margin[h], p.top_k) for h in range(heads)]


def _best(scores, margin, count):
    """The best blocks; of those whose scores equal the least by `margin`, the later ones."""
    least = np.sort(scores)[-count]
    above = np.flatnonzero(scores > least + margin)
    equal = np.flatnonzero(np.abs(scores - least) <= margin)
    return {*above, *equal[len(above) - count :]}


@functools.partial(jax.jit, static_argnames="pattern")
def run(pattern, q, k, v, segments=None):
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    index = jnp.arange(q.shape[1])[None].repeat(len(q), 0)
    index = index if segments is None else order_indices(segments)
    return pattern.attend(
        q,
        k,
        v,
        AttentionMetadata(
            index,
            index,
            rotation=ROTATION,
            q_index=index,
            k_index=index,
            q_segments=segments,
            k_segments=segments,
            row_indices=(None, None),
        ),
    )


def alone(pattern, *arrays):
    return np.asarray(run(pattern, *(x[None] for x in arrays)))[0]


VARIANTS = [
    {},
    {"per_head": True},
    {"chunk": 4},
    {"chunk": 7, "per_head": True},
    {"chunk": 16, "top_k": 1},
    {"sinks": 0, "block": 1, "representatives": 1, "top_k": 5},
    {"sinks": 7, "block": 5, "representatives": 5, "chunk": 3},
    {"window": 1, "sinks": 1, "block": 3, "representatives": 1},
    {"window": 25, "sinks": 10, "block": 30},
    {"window": 70},
    {"chunk": 100},
]


@slow
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_attention_equals_its_definition_token_by_token(fields):
    pattern, arrays = dataclasses.replace(BASE, **fields), qkv()
    np.testing.assert_allclose(
        alone(pattern, *arrays), naive(pattern, *arrays)[0], **golden.TOLERANCE
    )


@slow
def test_representatives_determine_selected_blocks():
    arrays = qkv()
    usual = alone(BASE, *arrays)
    for fields in ({"per_head": True}, {"representatives": 4}, {"top_k": 3}, {"chunk": 4}):
        other = alone(dataclasses.replace(BASE, **fields), *arrays)
        np.testing.assert_allclose(other[:13], usual[:13], rtol=1e-5, atol=2e-6)  # no block yet
        assert np.abs(other - usual).max() > 1e-2


@slow
@pytest.mark.parametrize("fields", [{}, {"chunk": 6}, {"per_head": True, "chunk": 5}], ids=str)
def test_with_every_block_chosen_nothing_is_left_out(fields):
    pattern = dataclasses.replace(BASE, **fields, top_k=100)
    q, k, v = (jnp.asarray(x)[None] for x in qkv())
    at = jnp.arange(T)[None]
    partials = [
        partial_attention(q, k, v, step, AttentionMetadata(at, at, rotation=ROTATION))
        for step in pattern.passes(AttentionMetadata(at, at))
    ]
    seen = [
        np.tri(T, dtype=bool) & s.mask.element(at.T, at)
        for s in pattern.passes(AttentionMetadata(at, at))
    ]
    np.testing.assert_array_equal(np.sum(seen, 0), np.tri(T))  # each key once
    np.testing.assert_allclose(run(pattern, q, k, v), merge(partials)[0], rtol=1e-5, atol=2e-6)


@slow
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_what_is_listed_for_costs_is_as_much_as_is_read(chunk):
    pattern = dataclasses.replace(BASE, chunk=chunk)
    q, k, v = qkv()
    # All weights of a query of zeros are equal, and one of them tells how many there are: that of
    # key 0, a sink, which is always seen and the only one with a value.
    first = np.zeros_like(v)
    first[0] = 1
    read = 1 / alone(pattern, np.zeros_like(q), k, first)[:, 0, 0]
    at = np.arange(T)
    places = AttentionMetadata(at[None], at[None], q_index=at, k_index=at)
    listed = sum(s.mask.element(at[:, None], at[None]).sum(1) for s in pattern.passes(places))
    np.testing.assert_allclose(read, listed, rtol=1e-5)
    for step in pattern.passes(places):  # and of a block no less is said than of its elements
        for low, high in ((0, 7), (20, 31), (40, 60)):
            some, whole = step.mask.bounds(low, high, 8, 15)
            tile = step.mask.element(at[low : high + 1, None], at[None, 8:16])
            assert some >= tile.any() and whole <= tile.all()


SEGMENTS = np.array(
    [
        [1] * 9 + [2] * 31 + [3] * 4 + [4] * 1 + [5] * 3 + [6] * 26,
        [0] * 5 + [1] * 60 + [0] * 9,
        [7] * 1 + [0] * 3 + [8] * 70,
    ],
    np.int32,
)


@slow
@pytest.mark.parametrize("fields", [{"chunk": 4}, {"chunk": 30, "per_head": True}], ids=str)
def test_documents_read_alike_packed_padded_and_alone(fields):
    pattern = dataclasses.replace(BASE, **fields)
    length = SEGMENTS.shape[1]
    q, k, v = (np.stack([x] * 3) for x in qkv(length, 2))
    out = np.asarray(run(pattern, q, k, v, SEGMENTS))
    for row, segments in enumerate(SEGMENTS):
        for document in set(segments) - {0}:
            here = segments == document
            want = naive(pattern, *(x[row, here] for x in (q, k, v)))[0]
            np.testing.assert_allclose(out[row, here], want, **golden.TOLERANCE)
    assert not out[SEGMENTS == 0].any()


def in_calls(pattern, arrays, cuts, padding=0):
    """(out [T, N, H], received [N, T], the cache's layer) of a text read in several calls."""
    q, k, v = (np.pad(x, [(padding, 0), (0, 0), (0, 0)])[None] for x in arrays)
    length = q.shape[1]
    config = preset("tiny").replace(
        num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=SIZE, pattern=pattern,
        scan_layers=False,
    )  # fmt: skip
    cache = cache_lib.create(config, 1, 80)
    edges, outs = [0, *(padding + x for x in cuts), length], []
    for start, end in zip(edges, edges[1:], strict=False):
        segments = jnp.asarray(np.arange(start, end)[None] >= padding, jnp.int32)
        positions = jnp.maximum(jnp.arange(start, end)[None] - padding, 0)
        cache, (view,) = cache_lib.extend(cache, segments, positions)
        context = LayerInputs(positions, segments, ROTATION, view=view)
        out, layer = _attend_cached(*(x[:, start:end] for x in (q, k, v)), cache, pattern, context)
        cache = cache_lib.replace_layers(cache, (layer,))
        outs.append(out)
    out = np.concatenate(outs, 1)[0, padding:]
    return out, np.asarray(layer["received"])[0, :, 0, padding:length], layer


@functools.partial(jax.jit, static_argnames="pattern")
def _attend_cached(q, k, v, cache, pattern, context):
    view, metadata = context.view, context.attention_metadata()
    return view.kind.attend(cache.layers[0], q, k, v, pattern, view, metadata)


# chunk, where calls are cut, padding before the text, one choice per head
CALLS = {
    "at once": (1, (), 0, False),
    "token by token": (1, range(1, T), 0, True),
    "between chunks": (8, (8, 24, 40), 7, True),
    "a prompt, then token by token": (8, range(32, T), 5, False),
    "inside chunks": (6, (10, 40, 41), 0, True),
}


@slow
@pytest.mark.parametrize("calls", CALLS)
def test_cache_state_equals_its_definition(calls):
    chunk, cuts, padding, per_head = CALLS[calls]
    pattern, arrays = dataclasses.replace(BASE, chunk=chunk, per_head=per_head), qkv()
    out, received, (_, _, _, summaries) = in_calls(pattern, arrays, cuts, padding)
    want, noted = naive(pattern, *arrays, cuts=cuts)
    np.testing.assert_allclose(out, want, **golden.TOLERANCE)
    np.testing.assert_allclose(received, noted, **golden.TOLERANCE)
    # The first block is made of the tokens 3 to 6.
    for head in range(HEADS):
        best = 3 + np.argsort(-noted[head, 3:7])[:2]
        mean = arrays[1][best, head // 2].mean(0)
        np.testing.assert_allclose(summaries[0, head, 0], mean, **golden.TOLERANCE)


@slow
def test_calls_cut_between_chunks_equal_one_call():
    pattern, arrays = dataclasses.replace(BASE, chunk=8), qkv(seed=4)
    want, wanted, _ = in_calls(pattern, arrays, ())
    got, noted, _ = in_calls(pattern, arrays, (16, 24, 48))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(noted, wanted, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(got, alone(pattern, *arrays), rtol=1e-5, atol=2e-6)
    other, *_ = in_calls(pattern, arrays, (44,))
    assert np.abs(other - want).max() > 1e-2  # another cut is another choice


CONFIG = preset("tiny").replace(
    num_layers=2, num_heads=4, num_kv_heads=2, pattern=dataclasses.replace(BASE, chunk=4)
)


@functools.partial(jax.jit, static_argnums=0)
def _read(model, params, tokens, cache):
    output = model.apply({"params": params}, tokens, cache=cache)
    hidden, cache = output.hidden, output.cache
    return hidden, cache_lib.keep_layout(cache, model.mesh)


@slow
@pytest.mark.parametrize("scan", [True, False], ids=["scanned layers", "separate layers"])
def test_a_decoder_on_a_mesh_reads_on_from_its_notes(scan):
    config = CONFIG.replace(scan_layers=scan)
    mesh, tokens = (
        make_mesh(Mesh(data=2, fsdp=2, tensor=2)),
        jnp.arange(4 * 48).reshape(4, 48) % 251,
    )
    params = jax.jit(Decoder(config).init)(jax.random.key(0), tokens[:, :2])["params"]
    want = jax.jit(Decoder(config).apply)({"params": params}, tokens).hidden
    cache, outs = cache_lib.create(config, 4, 64, mesh=mesh), []
    before = jax.tree.map(lambda x: x.sharding, cache)
    for start in (0, 24):
        out, cache = _read(Decoder(config, mesh), params, tokens[:, start : start + 24], cache)
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, 1), want, rtol=0, atol=5e-5)
    received, summaries = cache.layers[2:] if scan else cache.layers[1][2:]
    stack = (2,) if scan else ()
    assert received.shape == (*stack, 4, 4, 1, 64)
    assert summaries.shape == (*stack, 4, 4, 12, 16)
    assert received.addressable_shards[0].data.shape == (*stack, 1, 2, 1, 64)
    after = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y, x.ndim), cache, before)
    assert jax.tree.all(after)


@pytest.mark.slow
def test_memory_grows_with_the_length_not_with_its_square():
    pattern = InfLLM(window=64, sinks=4, block=16, top_k=2, chunk=32)

    def needed(length):
        at = jnp.arange(length)[None]
        shapes = [jax.ShapeDtypeStruct((1, length, n, SIZE), jnp.float32) for n in (4, 2, 2)]

        def read(q, k, v):
            return pattern.attend(q, k, v, AttentionMetadata(at, at, rotation=ROTATION))

        memory = jax.jit(read).lower(*shapes).compile().memory_analysis()
        return memory.temp_size_in_bytes

    short, long = needed(4096), needed(16384)
    assert long < 5 * short and long < 16384**2 / 8


def test_the_cost_of_a_cache_counts_its_state():
    config = CONFIG.replace(dtype="bfloat16")
    shape = Mesh(data=2, fsdp=1, tensor=2)
    found = cost.generation_memory(config, 256, 4, shape).cache
    mesh = make_mesh(shape, devices=jax.devices()[:4])
    leaves = jax.tree.leaves(cache_lib.create(config, 4, 256, mesh=mesh).layers)
    assert found == sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    whole = jax.tree.leaves(cache_lib.create(config, 1, 256).layers)
    assert cost.estimate(config, 256).kv_cache_bytes == sum(leaf.nbytes for leaf in whole)
    llama = preset("llama2-7b").replace(dtype="bfloat16")
    plain, noting = (
        cost.estimate(llama.replace(pattern=p), 32_768).kv_cache_bytes
        for p in (llama.pattern, InfLLM())
    )
    assert 1.01 < noting / plain < 1.02


def test_a_text_within_the_window_has_no_notes():
    assert BASE.state_shapes(16, 8) == {}
    assert BASE.state_shapes(17, 8) == {"received": (1, 17), "summaries": (1, 8)}
    q, k, v = (x[None] for x in qkv(12))
    at = jnp.arange(12)[None]
    last = jax.jit(
        lambda *x: BASE.attend(
            *x, AttentionMetadata(at[:, 9:], at, rotation=ROTATION, q_index=at[:, 9:], k_index=at)
        )
    )(q[:, 9:], k, v)
    np.testing.assert_allclose(last[0], alone(BASE, *qkv(12))[9:], rtol=1e-5, atol=2e-6)


REFUSED = [
    ({"block": 3, "representatives": 4}, "representatives=4 must be at most pattern.block=3"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=str)
def test_a_field_out_of_range_raises_input_error(fields, message):
    with pytest.raises(InputError, match=message) as error:
        InfLLM(**fields)
    assert "\n" not in str(error.value)


def test_keys_whose_queries_are_unknown_raise_input_error():
    q, k, v = (jnp.zeros((1, n, 2, 16)) for n in (3, 40, 40))
    at = jnp.arange(40)[None]
    metadata = AttentionMetadata(at[:, 37:], at, rotation=ROTATION)
    with pytest.raises(InputError, match="3 queries are fewer than the 40 keys.* use a cache"):
        BASE.attend(q, k, v, metadata)
    with pytest.raises(InputError, match="must keep unrotated keys"):
        BASE.attend(k, k, v, metadata.replace(q_positions=at, keys_rotated=True))
