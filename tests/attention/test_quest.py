"""Quest: the pages that a token reads, and their bounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_golden
from kv_cache_golden import golden
from tiny_lm import ids, sharp_lm, text

from lcjax.attention import AttentionMetadata, Causal, KeepAll, Quest
from lcjax.attention.cache import LayerShape, Tokens
from lcjax.attention.pages import PagedCache, PageTokens
from lcjax.errors import InputError
from lcjax.generation.sampling import Sampling
from lcjax.generation.session import Session
from lcjax.generation.shared_prefix import read_prefix
from lcjax.models import cache as cache_lib
from lcjax.models import preset
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.rope.rotation import no_rotation


@functools.partial(jax.jit, static_argnums=0)
def _attend(kind, state, segments, q, k, v, rotation):
    arrays, slots, filled, read = state
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    places = read[:, None] + jnp.cumsum(segments, axis=1, dtype=jnp.int32) - 1
    view = kind.reserve(slots, Tokens(segments, places, places), filled)
    metadata = view.update_metadata(AttentionMetadata(places, places, rotation=rotation))
    out, arrays = kind.attend(arrays, q, k, v, Causal(), view, metadata)
    return out, (arrays, view.slots, filled + q.shape[1], read + segments.sum(1))


def read(quest, q, k, v, sizes, rotation=no_rotation(), padding=None):
    """The outputs [B, T, N, H] of calls of `sizes` tokens; rows begin with some of padding."""
    rows, heads, length, size = q.shape
    kind, slots = PagedCache(quest).fit(-(-length // 64) * 64, None)
    shape = LayerShape(heads, k.shape[1], size, jnp.dtype("float32"))
    zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
    arrays = jax.tree.map(lambda x: jnp.stack([x] * rows), zeros(kind.arrays(shape, slots)))
    state = arrays, zeros(kind.shared(rows, slots)), jnp.int32(0), jnp.zeros(rows, jnp.int32)
    padding = np.zeros(rows, int) if padding is None else padding
    segments = (np.arange(length) >= np.asarray(padding)[:, None]).astype(np.int32)
    outs, start = [], 0
    for count in sizes:
        part = slice(start, start + count)
        pieces = (x[:, :, part] for x in (q, k, v))
        out, state = _attend(kind, state, segments[:, part], *pieces, rotation)
        outs.append(np.asarray(out))
        start += count
    return np.concatenate(outs, 1)


def random_qkv(rows, length, heads=4, kv_heads=2, size=8):
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=(rows, n, length, size)).astype("f") for n in (heads, kv_heads, kv_heads)
    ]


def expected(quest, q, k, v):
    """Attention of the last of the tokens [heads, T, H] in float64, page by page."""
    q, k, v = (x.astype(np.float64) for x in (q[:, -1], k, v))
    group, size = len(q) // len(k), quest.page
    starts = range(0, k.shape[1], size)
    bounds = np.array(
        [
            [np.maximum(x * page.min(0), x * page.max(0)).sum() for page in pages]
            for x, head in zip(q, k.repeat(group, 0))
            for pages in [[head[i : i + size] for i in starts]]
        ]
    )
    if quest.share != "none":
        shared = getattr(bounds.reshape(len(k), group, -1), quest.share)(1)
        bounds = shared.repeat(group, 0)
    if quest.keep_last:
        bounds[:, -1] = np.inf
    out = []
    for head, row in enumerate(bounds):
        chosen = np.sort(np.argsort(-row, kind="stable")[: quest.num_pages])
        tokens = np.concatenate([np.arange(i, min(i + size, k.shape[1])) for i in chosen * size])
        logits = k[head // group, tokens] @ q[head] / np.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max())
        out.append(weights @ v[head // group, tokens] / weights.sum())
    return np.array(out)


def test_pages_and_outputs_are_those_of_the_released_code():
    params, arrays = golden()[0]["cases"]["quest.page16"]["params"], golden()[1]
    q, k, v = (arrays[f"quest.page16.{name}"] for name in "qkv")
    quest = Quest(tokens=params["budget"], page=params["page"], share="none", keep_last=False)
    length, size = k.shape[2], quest.page
    pages = [k[:, :, i : i + size] for i in range(0, length, size)]
    low, high = (np.stack([bound(2) for bound in each], 2) for each in zip(
        *[(page.min, page.max) for page in pages], strict=True
    ))  # fmt: skip
    bounds = quest.bounds(jnp.asarray(q), low, high)
    np.testing.assert_allclose(bounds, arrays["quest.page16.page_scores"], rtol=2e-3, atol=2e-5)
    chosen, is_page = quest.choose(bounds, jnp.full(len(q), length - 1))
    assert is_page.all()
    is_read = (np.arange(length) // size == np.asarray(chosen)[..., None]).any(2)
    np.testing.assert_array_equal(is_read, arrays["quest.page16.kept"])
    queries = np.zeros((*q.shape[:2], length, q.shape[2]), "f")
    queries[:, :, -1] = q
    out = read(quest, queries, k, v, [length - 1, 1])[:, -1]
    np.testing.assert_allclose(out, arrays["quest.page16.out"], atol=2e-5)


@pytest.mark.parametrize("share", ["max", "sum", "none"])
def test_a_token_reads_its_best_pages_wherever_its_row_begins(share):
    quest = Quest(tokens=24, page=8, share=share, keep_last=share != "sum")
    q, k, v = random_qkv(2, 70)
    rotation = preset("tiny").replace(num_heads=4, head_dim=8).rotation(70)
    calls = [29, 20, *[1] * 10, 3, *[1] * 8]
    alone = read(quest, q[:1], k[:1], v[:1], calls, rotation)
    shifted = [np.concatenate([x[:1], np.roll(x[:1], 13, axis=2)]) for x in (q, k, v)]
    both = read(quest, *shifted, calls, rotation, padding=[0, 13])
    np.testing.assert_allclose(both[:1], alone, atol=1e-6)
    places = jnp.arange(70)[None]
    q, k = (rotation.rotate(x[:1].swapaxes(1, 2), places).swapaxes(1, 2) for x in (q, k))
    for last in (50, 69):  # single tokens, the second one in another page and after a longer call
        parts = (np.asarray(x)[0, :, : last + 1] for x in (q, k, v))
        np.testing.assert_allclose(alone[0, last], expected(quest, *parts), atol=1e-5)
    parts = (np.asarray(x)[0, :, :57] for x in (q, k, v))
    np.testing.assert_allclose(both[1, 69], expected(quest, *parts), atol=1e-5)


def test_a_text_of_few_pages_has_a_full_cache_and_nothing_to_choose():
    kind, slots = PagedCache(Quest(tokens=64, page=16)).fit(64, None)
    assert (type(kind).__name__, slots) == ("FullCache", 64)
    with pytest.raises(InputError, match=r"exact=True rotates them .* leave one of the two out"):
        PagedCache(Quest(), rotated=False).fit(4096, None)


# Whole models


SIX = Sampling(max_new_tokens=6, min_new_tokens=6)
QUEST = Quest(tokens=24, page=8, exact_layers=1)


@pytest.fixture(scope="module")
def lm():
    return sharp_lm(cache=QUEST)


def steps(lm, prompt, rest):
    """-log p of `rest`, each token read in a call of its own."""
    cache = cache_lib.create(lm.model.config, 1, len(prompt) + len(rest), chunk=len(prompt))
    session = Session(lm.model, lm.params, cache, lm.rotation(len(prompt) + len(rest)))
    logits = session.read(np.array([prompt], np.int32), None, np.arange(len(prompt))[None])
    nll = []
    for place, token in enumerate(rest, len(prompt)):
        nll.append(-jax.nn.log_softmax(logits)[0, token])
        logits = session.read(np.array([[token]], np.int32), None, np.array([[place]]))
    return nll


def test_rows_prefixes_and_single_steps_agree(lm):
    context, questions = ids(1, 60), [ids(2, 30), ids(3, 3)]
    prompts = [context + question for question in questions]
    together = lm.generate(prompts, SIX)
    assert together == [lm.generate([prompt], SIX)[0] for prompt in prompts]
    assert together != lm.with_method(cache=KeepAll()).generate(prompts, SIX)
    rest = [[ids(4, 6)]] * 2
    scores = lm.continuations(prompts, rest)
    np.testing.assert_allclose(scores[0][0].nll, steps(lm, prompts[0], rest[0][0]), atol=1e-4)
    shared = lm.continuations(prompts, rest, prefix=read_prefix(lm, context))
    for one, other in zip(scores, shared, strict=True):
        np.testing.assert_allclose(one[0].nll, other[0].nll, atol=1e-4)


def test_a_text_is_scored_token_by_token(lm):
    rows = np.array([text(1, 60), text(2, 60)])
    scores = lm.nll(rows, lengths=np.array([60, 37]))
    np.testing.assert_allclose(scores[0, 1:], steps(lm, [rows[0, 0]], rows[0, 1:]), atol=1e-4)
    np.testing.assert_allclose(scores[1, :37], lm.nll(rows[1:, :37])[0], atol=1e-4)
    exact = lm.with_method(cache=KeepAll()).nll(rows)
    np.testing.assert_allclose(scores[0, :24], exact[0, :24], atol=1e-4)
    assert np.abs(scores[0] - exact[0]).max() > 1e-3


def test_a_rewound_answer_leaves_no_trace(lm):
    cache = cache_lib.create(lm.model.config, 1, 128, chunk=61)
    session = Session(lm.model, lm.params, cache, lm.rotation(128))
    session.read(np.array([ids(1, 61)], np.int32), None, np.arange(61)[None])

    def answer(seed):
        places = 61 + np.arange(6)[None]
        columns = zip(np.array([ids(seed, 6)], np.int32).T, places.T)
        return [session.read(token[None], None, place[None]) for token, place in columns]

    first = answer(2)
    answer_of_others = answer(3)
    assert not np.array_equal(first[-1], answer_of_others[-1])
    session.cache = cache_lib.branch(session.cache, np.int32(61), np.zeros(1, np.int32), 128)
    np.testing.assert_allclose(answer(2), first, atol=1e-4)


@pytest.mark.slow
def test_a_mesh_gives_the_numbers_of_one_device(lm):
    mesh = make_mesh(Mesh(fsdp=2, tensor=2), jax.devices()[:4])
    sharded = sharp_lm(cache=QUEST, mesh=mesh)
    prompts, rest = [ids(1, 70), ids(2, 33), ids(3, 50)], [[ids(4, 5)]] * 3
    for one, other in zip(lm.continuations(prompts, rest), sharded.continuations(prompts, rest)):
        np.testing.assert_allclose(other[0].nll, one[0].nll, atol=1e-4)


def test_all_layers_have_the_slots_of_those_that_devices_share():
    """Five blocks of 1,024 slots are eight on four devices."""
    mesh = make_mesh(Mesh(context=4), jax.devices()[:4])
    config = preset("tiny").replace(cache=Quest(tokens=64, exact_layers=1))
    cache = cache_lib.abstract_cache(config, 1, 5120, mesh=mesh)
    assert [kind.parts for kind in cache.kinds] == [4, 1]
    assert [layer["keys"].shape[2] for layer in cache.layers] == [8192] * 2


@pytest.mark.parametrize("keep_last", [False, True])
def test_bounds_and_pages_of_a_step_are_those_of_the_authors(keep_last):
    params, x = sparse_golden.params("quest.step"), sparse_golden.arrays("quest.step")
    size, length = params["page"], x["k"].shape[1]
    quest = Quest(page=size, tokens=params["budget"], share="none", keep_last=keep_last)
    keys = np.pad(x["k"].swapaxes(1, 2), [(0, 0), (0, 0), (0, -length % size), (0, 0)])
    keys = keys.reshape(*keys.shape[:2], -1, size, keys.shape[-1])
    is_token = (np.arange(keys.shape[2] * size) < length).reshape(1, 1, -1, size, 1)
    keys = jnp.asarray(keys)
    pages = quest.summarise(PageTokens(keys, keys, jnp.asarray(is_token), None, None))
    bounds = quest.bounds(jnp.asarray(x["q"][:, 0]), pages["low"], pages["high"])
    np.testing.assert_allclose(bounds, x["bounds"], rtol=1e-5, atol=1e-5)
    ids, is_page = quest.choose(bounds, jnp.asarray([length - 1]))
    chosen = np.zeros(bounds.shape, bool)
    np.put_along_axis(chosen, np.asarray(ids), np.asarray(is_page), -1)
    np.testing.assert_array_equal(chosen, x["chosen_last" if keep_last else "chosen"])
