"""Landmark attention: training form, retrieval from a cache, and what a cache must not change."""

import functools

import attention_golden as golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.attention import AttentionMetadata
from lcjax.attention.landmark.pattern import SELECT, CachedBlocks, Landmark
from lcjax.errors import InputError
from lcjax.models import cache as cache_lib
from lcjax.models import preset
from lcjax.models.layers import LayerInputs
from lcjax.rope import Rotation

ROTATION = Rotation(jnp.asarray(10_000.0 ** -np.linspace(0, 1, 8, endpoint=False), jnp.float32))
BLOCK = 4


@functools.partial(jax.jit, static_argnames="pattern")
def run(q, k, v, pattern, rotation=ROTATION, segments=None):
    """The last q.shape[1] queries of a text of k.shape[1] tokens."""
    first, there = k.shape[1] - q.shape[1], segments
    order = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
    if segments is not None:
        order = jnp.cumsum(segments, 1) - 1
    return pattern.attend(
        q,
        k,
        v,
        AttentionMetadata(
            order[:, first:],
            order,
            rotation=rotation,
            q_index=order[:, first:],
            k_index=order,
            q_segments=None if there is None else there[:, first:],
            k_segments=there,
        ),
    )


def test_training_equals_the_code_of_the_authors():
    case = "landmark.train_f7_t43"
    x = golden.arrays(case)
    out = run(*(x[name] for name in "qkv"), Landmark(block=8), golden.rotation(case))
    np.testing.assert_allclose(out, x["out"], **golden.TOLERANCE)


def test_retrieval_equals_the_code_of_the_authors():
    case = "landmark.infer_p48_n16_k2"
    x = golden.arrays(case)
    k = np.concatenate([x["past_k_prerope"], x["k"]], 1)
    v = np.concatenate([x["past_v"], x["v"]], 1)
    pattern = Landmark(block=8, top_k=2, train_length=64)
    out = run(x["q"], k, v, pattern, golden.rotation(case))
    np.testing.assert_allclose(out, x["out"], **golden.TOLERANCE)


def oracle(q, k, v, past, pattern):
    """Query by query, head by head, as the specification says it, in float64."""
    block, (length, heads, size) = pattern.block, k.shape

    def turn(x, position):
        a, b = np.split(x.astype(np.float64), 2)
        angle = position * 10_000.0 ** -(np.arange(0, size, 2) / size)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin])

    blocks = past // block
    taken = min(pattern.top_k, blocks)
    first = (blocks - taken - 1) * block

    def score(i, n):
        """Of every block of the past."""
        query = turn(q[i - past, n], i)
        place = [max(0, b - (blocks - taken) + 1) for b in range(blocks)]
        ends = [first + m * block + block - 1 for m in place]
        keys = [turn(k[b * block + block - 1, n], end) for b, end in enumerate(ends)]
        return np.array([query @ key for key in keys]) / np.sqrt(size)

    out = np.zeros((length - past, heads, size))
    for n in range(heads):
        scores = np.array([score(i, n) for i in range(past, length)])
        if pattern.select == "per_head_and_chunk" and blocks:
            p = np.exp(scores - scores.max(1, keepdims=True))
            scores[:] = (p / p.sum(1, keepdims=True)).max(0)
        for i in range(past, length):
            query, groups = turn(q[i - past, n], i), []
            for slot, b in enumerate(np.sort(np.argsort(-scores[i - past])[:taken])):
                start = first + slot * block + (block if b >= blocks - taken else 0)
                groups.append((b, start - b * block))
            groups += [(b, 0) for b in range(blocks, i // block)]
            own = [j for j in range(i // block * block, i + 1) if j % block != block - 1]
            logits = [query @ turn(k[j, n], j) / np.sqrt(size) for j in own]
            values = [v[j, n] for j in own]
            for b, shift in groups:
                x = [
                    query @ turn(k[j, n], j + shift) / np.sqrt(size)
                    for j in range(b * block, (b + 1) * block)
                ]
                p = np.exp(np.array(x[:-1]) - max(x[:-1]))
                logits.append(x[-1])
                values.append(p / p.sum() @ v[b * block : (b + 1) * block - 1, n])
            a = np.exp(np.array(logits) - max(logits))
            out[i - past, n] = a / a.sum() @ np.array(values)
    return out


@pytest.mark.parametrize(
    ("past", "new", "top_k", "select"),
    [
        (26, 1, 2, "per_token_and_head"),
        (23, 7, 4, "per_head_and_chunk"),
        pytest.param(5, 12, 3, "per_head_and_chunk", marks=pytest.mark.slow),
    ],
)
def test_retrieval_equals_the_specification(past, new, top_k, select):
    rng = np.random.default_rng(past)
    k, v = rng.normal(size=(2, past + new, 2, 16)).astype(np.float32)
    q = 2 * rng.normal(size=(new, 4, 16)).astype(np.float32)
    pattern = Landmark(block=BLOCK, top_k=top_k, train_length=64, select=select)
    got = run(*(x[None] for x in (q, k, v)), pattern)[0]
    want = oracle(q, *(np.repeat(x, 2, 1) for x in (k, v)), past, pattern)
    np.testing.assert_allclose(got, want, **golden.TOLERANCE)


@pytest.mark.parametrize("select", SELECT)
def test_a_query_reads_the_blocks_whose_landmarks_fit_it_and_of_equal_ones_the_later(select):
    """Without rotation; values of a block are its number, and keys beside landmarks are 0."""
    blocks = 6
    q = np.random.default_rng(0).normal(size=(1, 1, 2, 16)).astype(np.float32)
    landmark = np.arange(blocks * BLOCK + 2) % BLOCK == BLOCK - 1
    number = np.arange(blocks * BLOCK + 2) // BLOCK
    cases = [({2}, [2]), ({0, 3}, [0, 3]), ({1, 2, 4}, [2, 4]), (set(range(blocks)), [4, 5])]
    fits = np.array([landmark & np.isin(number, list(planted)) for planted, _ in cases])
    k = np.where(fits[..., None, None], 20 * q, 0).astype(np.float32)
    v = np.broadcast_to(np.float32(number)[:, None, None], k.shape)
    pattern = Landmark(block=BLOCK, top_k=2, train_length=64, select=select)
    still = ROTATION._replace(inv_freq=np.zeros(8, np.float32))
    out = run(np.repeat(q, len(cases), 0), k, v, pattern, still)
    wanted = [np.mean(chosen) for _, chosen in cases]
    np.testing.assert_allclose(
        out[:, 0], np.broadcast_to(np.reshape(wanted, (-1, 1, 1)), (4, 2, 16)), atol=1e-4
    )


@pytest.mark.parametrize("top_k", [5, 7])
def test_as_many_blocks_as_there_are_is_attention_to_all(top_k):
    rng = np.random.default_rng(4)
    k, v = rng.normal(size=(2, 1, 22, 2, 16)).astype(np.float32)
    q = rng.normal(size=(1, 1, 4, 16)).astype(np.float32)
    chosen = run(q, k, v, Landmark(block=BLOCK, top_k=top_k, train_length=64))
    everything = run(q, k, v, Landmark(block=BLOCK, top_k=None))
    np.testing.assert_allclose(chosen, everything, **golden.TOLERANCE)
    keys = (np.repeat(x[0], 2, 1) for x in (k, v))
    fewer = oracle(q[0], *keys, 21, Landmark(block=BLOCK, top_k=4, train_length=64))
    assert np.abs(fewer - everything[0]).max() > 1e-3


@pytest.mark.slow
def test_rows_of_a_batch_have_pasts_of_their_own():
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 1, 40, 2, 16)).astype(np.float32)
    q = rng.normal(size=(1, 6, 4, 16)).astype(np.float32)
    pattern = Landmark(block=BLOCK, top_k=2, train_length=64)
    alone = run(*(jnp.asarray(x) for x in (q, k[:, 7:], v[:, 7:])), pattern)
    segments = np.ones((2, 40), np.int32)
    segments[1, :7] = 0
    q, k, v = (jnp.asarray(np.repeat(x, 2, 0)) for x in (q, k, v))
    both = run(q, k, v, pattern, segments=jnp.asarray(segments))
    np.testing.assert_allclose(both[1:], alone, rtol=1e-5, atol=2e-6)
    # A query that is padding sees nothing.
    segments[1, 34] = 0
    out = run(q, k, v, pattern, segments=jnp.asarray(segments))
    assert not np.asarray(out)[1, 0].any() and np.isfinite(out).all()


@pytest.mark.slow
def test_few_queries_at_a_time_give_the_same(monkeypatch):
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.normal(size=(2, 50, 2, 16)), jnp.float32) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(2, 11, 4, 16)), jnp.float32)
    pattern = Landmark(block=BLOCK, top_k=3, train_length=64)
    want = run(q, k, v, pattern)
    monkeypatch.setattr("pallas_kernels.gather.BUDGET", 2 * 4 * 3 * BLOCK * 32 * 3)
    got = jax.jit(run.__wrapped__, static_argnames="pattern")(
        q, k, v, pattern=pattern
    )  # three at a time, then two
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_cache_read_in_chunks_gives_every_chunk_its_past():
    pattern = Landmark(block=BLOCK, top_k=2, train_length=32)
    assert pattern.chunk == 20
    config = preset("tiny").replace(num_layers=1, scan_layers=False, pattern=pattern)
    cache = cache_lib.create(config, 1, 64, chunk=pattern.chunk)
    rng = np.random.default_rng(2)
    q = jnp.asarray(rng.normal(size=(1, 34, 4, 16)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(1, 34, 2, 16)), jnp.float32) for _ in range(2))

    @jax.jit
    def read(q, k, v, layer, positions, view):
        context = LayerInputs(positions, None, ROTATION, view=view)
        metadata = context.attention_metadata()
        return view.kind.attend(layer, q, k, v, pattern, view, metadata)

    for start, stop in ((0, 20), (20, 33), (33, 34)):
        new = slice(start, stop)
        positions = jnp.arange(start, stop)[None]
        cache, (view,) = cache_lib.extend(cache, None, positions)
        out, layer = read(q[:, new], k[:, new], v[:, new], cache.layers[0], positions, view)
        cache = cache_lib.replace_layers(cache, (layer,))
        want = run(q[:, new], k[:, :stop], v[:, :stop], pattern)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=2e-6)


def test_distances_stay_within_the_trained_length():
    pattern = Landmark(block=BLOCK, top_k=3, train_length=40)
    slots = jnp.zeros((1, 100, BLOCK), jnp.int32)
    cached = CachedBlocks(slots, jnp.array([100]), jnp.array([3]), BLOCK)
    ids = jnp.asarray([[[0, 1, 2], [0, 50, 99], [97, 98, 99], [96, 97, 99]]])
    starts = np.asarray(ids * BLOCK + cached.selection_shift(ids))[0]
    want = [[384, 388, 392], [384, 388, 396], [388, 392, 396], [384, 392, 396]]
    np.testing.assert_array_equal(starts, want)
    last = 400 + pattern.chunk - 1
    assert last - starts.min() == pattern.train_length - 1
    scored = np.asarray(jnp.arange(100) * BLOCK + cached.scoring_shift())[0]
    np.testing.assert_array_equal(scored, [384] * 97 + [388, 392, 396])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block": 1}, "pattern.block=1 must be a whole number of at least 2"),
        ({"top_k": 0}, "pattern.top_k=0"),
        ({"select": "all"}, "per_token_and_head, per_head_and_chunk"),
        ({"top_k": 7}, "at most 6"),
        ({"train_length": 32}, "pattern.train_length=32 must be a whole number of at least 64"),
        ({"token": -1}, "pattern.token=-1"),
        ({"loss": "none"}, "predict, skip, drop"),
    ],
)
def test_fields_that_cannot_work_raise_input_error(fields, message):
    with pytest.raises(InputError, match=message):
        Landmark(**fields)


def test_the_released_model_is_read_128_tokens_at_a_time():
    assert Landmark().chunk == 128
    assert Landmark(top_k=6, train_length=512).chunk == 64
    assert Landmark(top_k=None).chunk is None
