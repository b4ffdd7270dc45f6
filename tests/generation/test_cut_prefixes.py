"""Cache policies over several texts: conversations, and prefixes that prompts continue."""

import dataclasses

import jax
import numpy as np
import pytest
from cache_policy_support import (
    DUO,
    KVZIP,
    LAZY,
    SIX,
    THIN,
    Requests,
    held_tokens,
    named,
    order_of,
    read_session,
    small_model,
    text,
)
from kv_cache_golden import filter_file
from small_norm import SmallNorm

from lcjax.attention import Merging, Sliding, Threshold
from lcjax.attention.budgets import LayerRatios
from lcjax.attention.policies import (
    Compactor,
    Finch,
    KeyDiff,
    Knorm,
    KVCompose,
    KVzip,
    Phases,
    QFilter,
    SnapKV,
)
from lcjax.errors import InputError
from lcjax.generation.conversation import Conversation
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.generation.session import read_prompts
from lcjax.generation.shared_prefix import QueryAgnostic, QueryAware, read_prefix
from lcjax.models import Decoder, LayerKind


@pytest.fixture(scope="module")
def lm():
    return small_model()


def test_a_repeated_text_is_the_one_since_the_last_cut(lm):
    """What was cut before keeps its scores, and a window in other layers is left alone."""
    layers = (LayerKind(1, Sliding(window=16)), LayerKind(1))
    policy = KVzip(tokens=30, repeat_size=16, heads=None, **KVZIP)
    texts = text(1, 40), text(2, 24)
    tokenizer = Requests({"F": [1, 2], "N": [3], "S": [4]})
    mixed = LanguageModel(
        Decoder(lm.config.replace(layers=layers, cache=policy)), lm.params, lm.tokenizer
    )
    ends = []
    for chunk in (40, 8):  # with the smaller one, the window is a ring
        session = read_session(mixed, [texts[0]], 40, tokenizer=tokenizer, chunk=chunk)
        before = scores_by_token(session)
        places = np.arange(40, 64)[None]
        session.read(np.array([texts[1]]), None, places, sizes=(8, 8, 8))
        session.end_prompt(8, chunk, [texts[1]], tokenizer, start=40)
        ends.append(scores_by_token(session))
        assert len(ends[-1][0]) == 30 and all(max(head) >= 40 for head in ends[-1])
        for old, new in zip(before, ends[-1], strict=True):
            assert all(old[token] == score for token, score in new.items() if token < 40)
    for one, other in zip(*ends, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def scores_by_token(session):
    """The scores of the tokens that each head of the last layer keeps, by order index."""
    order, received = (
        np.asarray(session.cache.layers[1][x])[0, ..., 0] for x in ("order", "received")
    )
    return [
        {int(i) - 1: float(score) for i, score in zip(*head) if i}
        for head in zip(order, received, strict=True)
    ]


def order_indices_of(layer):
    """Order indices of the tokens that each head of a layer keeps in row 0."""
    order = np.asarray(order_of(layer))[0, :, :, 0]
    return [(head[head > 0] - 1).tolist() for head in order]


@pytest.mark.parametrize(
    "method",
    [
        SmallNorm(tokens=24, every=8),
        *(
            pytest.param(method, marks=pytest.mark.slow)
            for method in (
                SmallNorm(tokens=24, chunk=16, every=8),
                Knorm(threshold=Threshold(-6.0, window=8)),
                Phases(Knorm(tokens=24, every=4)),
                Phases(Knorm(tokens=24, every=4), KeyDiff(ratio=0.5)),
                KVzip(ratio=0.5, repeat_size=32),
                KVCompose(ratio=0.5),
                DUO,
                THIN,
                KeyDiff(tokens=24, every=8, merge=Merging()),
                dataclasses.replace(LAZY, lazy_threshold=0.0),
            )
        ),
    ],
    ids=named,
)
def test_a_conversation_goes_on_after_its_prompts_are_cut(lm, method, tmp_path):
    talk = Conversation(lm.with_method(cache=method), length=256)
    talk.read(text(0, 40))
    assert len(talk.write(SIX).ids) == 6
    talk.save(tmp_path / "talk")
    copy = talk.copy()  # the way back, behind what the next turn evicts
    talk.read(text(1, 40))
    assert len(talk.write(SIX).ids) == 6
    for again in (copy, Conversation.open(talk.lm, tmp_path / "talk")):
        again.read(text(1, 40))
        again.write(SIX)
        assert again.tokens == talk.tokens
        jax.tree.map(np.testing.assert_array_equal, again._session.cache, talk._session.cache)
    kinds = [getattr(kind, "stream", kind) for kind in talk._session.cache.kinds]
    assert {kind.is_prompt for kind in kinds} == {False}
    # The last token that was read is there, and others were evicted.
    last = len(talk.tokens) - 2
    for head in order_indices(talk._session.cache):
        assert head[-1] == last and len(head) < last


@pytest.mark.parametrize(
    "method",
    [
        SnapKV(tokens=24, window=8, every=4),
        *(
            pytest.param(method, marks=pytest.mark.slow)
            for method in (
                KeyDiff(ratio=0.5, every=4),
                Phases(Knorm(tokens=24, every=4), KeyDiff(ratio=0.5)),
                KVzip(ratio=0.5, repeat_size=32),
                dataclasses.replace(DUO, every=4),
                THIN,
                LAZY,
                KeyDiff(tokens=24, every=8, merge=Merging()),
            )
        ),
    ],
    ids=named,
)
def test_a_turn_is_read_whole_in_chunks_of_any_size(lm, method):
    """It sees what stayed of the turns before it, and nothing is evicted before its end."""
    lm, turn, ends = lm.with_method(cache=method), text(1, 80), []
    for chunk in (16, 80):
        talk = Conversation(lm, length=400, prefill_chunk=chunk)
        talk.read(turn)
        talk.write(Sampling(max_new_tokens=3, min_new_tokens=3))
        talk.read(text(2, 79))  # the last generated token is read with it
        ends.append((talk._read_text(), held_tokens(talk._session.cache)))
    # As a prompt that continues a prefix, which is read whole
    options = {"num_new": 1, "chunk": 80, "prefix": read_prefix(lm, turn)}
    expected, _ = read_prompts(lm, [talk.tokens], lm.rotation(400), **options)
    for logits, held in ends:
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        assert held == ends[0][1]


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (SnapKV(tokens=24, window=8, every=4), "values"),
        pytest.param(DUO, "streaming.values", marks=pytest.mark.slow),
    ],
    ids=["snapkv", "duo"],
)
def test_a_conversation_has_slots_for_what_stays_and_a_turn_while_it_is_read(lm, method, name):
    talk = Conversation(lm.with_method(cache=method), length=4000, prefill_chunk=64)

    def slots():
        return {layer[name].shape[2] for layer in talk._session.cache.layers}

    assert slots() == {64}
    talk.read(text(1, 1))  # the first turn, also of one token
    for length in (191, 63, 0):
        talk.write(Sampling(max_new_tokens=70, min_new_tokens=70))
        assert slots() == {64}
        assert all(len(head) < 32 for head in held_tokens(talk._session.cache).values())
        talk.read(text(length, length))


@pytest.mark.parametrize(
    "prompt",
    [None, pytest.param(Knorm(threshold=Threshold(-1e9)), marks=pytest.mark.slow)],
    ids=named,
)
def test_a_conversation_keeps_a_prompt_that_loses_nothing(lm, prompt):
    """Also if its length is no whole number of blocks of slots."""
    method = Phases(Knorm(tokens=24, every=4), prompt)
    talk = Conversation(lm.with_method(cache=method), length=200, prefill_chunk=32)
    talk.read(text(1, 150))
    talk.write(Sampling(max_new_tokens=1))
    for head in order_indices(talk._session.cache):
        assert head == list(range(150))


@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(tokens=40, window=8, every=4),
        pytest.param(KeyDiff(ratio=0.5, every=4), marks=pytest.mark.slow),
        pytest.param(Compactor(ratio=0.5, block=16, every=4), marks=pytest.mark.slow),
        pytest.param(KVzip(ratio=0.5, repeat_size=48), marks=pytest.mark.slow, id="kvzip"),
        pytest.param(DUO, marks=pytest.mark.slow),
        pytest.param(Phases(Knorm(tokens=40, every=2), KeyDiff(ratio=0.3)), marks=pytest.mark.slow),
        pytest.param(THIN, marks=pytest.mark.slow),
        pytest.param(LAZY, marks=pytest.mark.slow),
        pytest.param(KVCompose(ratio=0.5), marks=pytest.mark.slow),
    ],
    ids=named,
)
def test_prompts_continue_a_prefix_that_was_cut_before_it_saw_them(lm, policy):
    lm = lm.with_method(cache=policy)
    context, questions = text(1, 90), [text(2, 3), text(3, 17), text(4, 9)]
    prefix = read_prefix(lm, context)
    before = order_indices(prefix.cache)
    prompts = [context + question for question in questions]
    rest = [[text(5, 6)]] * 3
    together = lm.continuations(prompts, rest, prefix=prefix)
    ((alone,),) = lm.continuations(prompts[:1], rest[:1], prefix=prefix)
    np.testing.assert_allclose(together[0][0].nll, alone.nll, atol=1e-4)
    unseen = QueryAgnostic(lm).with_movable([[(2, 40), (40, 90)]] * 3).continuations(prompts, rest)
    for one, other in zip(together, unseen, strict=True):
        np.testing.assert_array_equal(one[0].nll, other[0].nll)
    # What stays does not depend on the question, unlike at the end of a prompt.
    assert order_indices(prefix.cache) == before
    inside = order_indices(read_session(lm, [prompts[1]], 8).cache)
    assert [set(a) - set(range(90, 107)) for a in inside] != [set(a) for a in before]
    # By hand: read, cut, read on.
    session = read_session(lm, [context], 32)
    places = 90 + np.arange(17)[None]
    logits = session.read(np.array([questions[1]], np.int32), None, places)
    nll = -jax.nn.log_softmax(logits)[0, rest[0][0][0]]
    np.testing.assert_allclose(together[1][0].nll[0], nll, atol=1e-4)


def test_the_question_of_a_prompt_is_the_window_that_chooses(lm):
    """Finch with a question of n tokens is Finch with a window of n tokens."""
    finch = Finch(ratio=0.5, window=24)
    prompt, rest = text(1, 69), [[text(5, 6)]]
    few = lm.with_method(cache=dataclasses.replace(finch, window=8))  # all but the last token
    ((expected,),) = few.continuations([prompt], rest, prefix=read_prefix(few, prompt[:-1]))
    lm = lm.with_method(cache=finch)
    ((score,),) = QueryAware(lm).with_movable([[(0, 60)]]).continuations([prompt], rest)
    np.testing.assert_allclose(score.nll, expected.nll, atol=1e-5)
    with pytest.raises(InputError, match="question has 25 tokens, and model.cache.window=24"):
        read_prefix(lm, prompt, question=25)
    for method, kind in (
        (KeyDiff(ratio=0.5), "keydiff"),
        (Phases(Knorm(tokens=24)), "phases"),
        (Phases(SnapKV(tokens=24, window=8), KeyDiff(ratio=0.5)), "keydiff"),
        (DUO, "duo_attention"),
    ):
        with pytest.raises(InputError, match=f"type={kind} does not choose by the last tokens"):
            read_prefix(lm.with_method(cache=method), prompt, question=5)


def test_a_prefix_that_stays_whole_is_read_with_its_prompts(lm):
    assert read_prefix(lm.with_method(cache=KeyDiff(tokens=200)), text(1, 64)) is None
    assert read_prefix(lm.with_method(cache=KeyDiff(tokens=20, chunk=16)), text(1, 64)) is None


MIXED = (LayerKind(1, Sliding(16)), LayerKind(1))


@pytest.mark.parametrize(
    ("layers", "policy"),
    [
        (MIXED, KeyDiff(ratio=0.5)),
        pytest.param(
            *(MIXED, QFilter(ratio=0.5, file=filter_file(np.ones((1, 2, 16))))),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            None, Knorm(ratio=0.5, layers=LayerRatios((0.0, 0.5))), marks=pytest.mark.slow
        ),
    ],
    ids=["window", "window-file", "ratios"],
)
def test_a_prefix_is_cut_where_some_layers_keep_all_of_it(lm, layers, policy):
    config = lm.config.replace(cache=policy, **({"layers": layers} if layers else {}))
    mixed = LanguageModel(Decoder(config), lm.params, lm.tokenizer)
    context, questions = text(1, 60), [text(2, 3), text(3, 70)]
    prefix = read_prefix(mixed, context)
    prompts, rest = [context + question for question in questions], [[text(5, 6)]] * 2
    together = mixed.continuations(prompts, rest, prefix=prefix)
    session = read_session(mixed, [context], 80)
    for prompt, (score,) in zip(prompts, together, strict=True):
        ((alone,),) = mixed.continuations([prompt], rest[:1], prefix=prefix)
        np.testing.assert_allclose(score.nll, alone.nll, atol=1e-4)
    places = 60 + np.arange(9)[None]
    logits = session.read(np.array([[*questions[0], *rest[0][0]]], np.int32), None, places)
    nll = -jax.nn.log_softmax(logits)[0]
    longer = mixed.continuations(prompts[:1], [[[*rest[0][0], 7]]], prefix=prefix)
    np.testing.assert_allclose(longer[0][0].nll[-1], nll[7], atol=1e-4)


def test_a_window_beside_a_chunk_policy_counts_no_padding(lm):
    prompts, rest = [text(1, 20)], [[text(5, 4)]]  # with what follows, fewer than are kept
    config = lm.config.replace(layers=MIXED)
    plain, chunks = (
        LanguageModel(Decoder(config.replace(cache=cache)), lm.params, lm.tokenizer)
        for cache in (None, KeyDiff(tokens=24, chunk=16))
    )
    expected, actual = (m.continuations(prompts, rest)[0][0].nll for m in (plain, chunks))
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_a_question_after_a_prefix_does_not_move_the_cuts_of_other_rows(lm):
    # Without pooling, by which a large weight would give its neighbours scores that are equal but
    # for rounding.
    lm = lm.with_method(cache=SnapKV(tokens=40, window=8, pool=1, every=70))
    context, questions = text(1, 90), [text(2, 3), text(3, 100)]
    prefix, prompts = read_prefix(lm, context), [context + question for question in questions]
    held = []
    for rows in (prompts, prompts[:1]):
        options = {"num_new": 80, "chunk": 128, "prefix": prefix}
        _, session = read_prompts(lm, rows, lm.rotation(300), **options)
        for step, token in enumerate(text(4, 72)):
            tokens = np.full(len(rows), token, np.int32)
            places = np.array([[len(row) + step] for row in rows])
            session.read(tokens, None, places)
            if step in (8, 69, 71):
                held.append(order_indices(session.cache))
    assert held[:3] == held[3:]
    assert [len(layer[0]) for layer in held] == [52, 113, 42] * 2


def order_indices(cache):
    """Order indices of the tokens that each head of each layer keeps in row 0."""
    return [head for layer in cache.layers for head in order_indices_of(layer)]
