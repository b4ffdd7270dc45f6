"""Continuations of a prompt that is read once, beside the scores of whole texts."""

import types

import numpy as np
import pytest
from tiny_lm import ids, sharp_lm

from lcjax.attention import Causal, Landmark, SelfExtend, Sliding, Streaming
from lcjax.errors import InputError
from lcjax.generation import scoring as module
from lcjax.generation.replug import Replug
from lcjax.generation.sampling import Sampling
from lcjax.parallel.sharding import Mesh
from lcjax.rope import DynamicNTK

PROMPTS = [ids(1, 70), ids(2, 9), ids(3, 130)]
OPTIONS = [[ids(4, 1), ids(5, 12)], [ids(6, 30)], [ids(7, 3), ids(8, 1), ids(9, 17)]]


@pytest.fixture(scope="module")
def lm():
    return sharp_lm(rope=DynamicNTK(factor=2.0))


def by_whole_texts(lm, prompts, options):
    """The same by `nll` of all texts at once."""
    texts = [(prompt, option) for prompt, row in zip(prompts, options) for option in row]
    tokens = np.zeros((len(texts), 288), np.int32)
    for row, (prompt, option) in enumerate(texts):
        tokens[row, : len(prompt) + len(option)] = prompt + option
    scored = zip(texts, lm.nll(tokens), strict=True)
    losses = [row[len(a) : len(a) + len(b)] for (a, b), row in scored]
    return [[losses.pop(0) for _ in row] for row in options]


def assert_same(found, wanted, atol=2e-4):
    assert [len(row) for row in found] == [len(row) for row in wanted]
    for row, losses in zip(found, wanted, strict=True):
        for one, loss in zip(row, losses, strict=True):
            np.testing.assert_allclose(one.nll, loss, atol=atol)


@pytest.mark.slow
def test_each_continuation_has_the_losses_that_the_whole_text_has(lm):
    lm = lm.with_method(length=512)
    assert_same(lm.continuations(PROMPTS, OPTIONS), by_whole_texts(lm, PROMPTS, OPTIONS))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [Causal(), Sliding(window=40)], ids=["causal", "sliding"])
def test_one_continuation_of_each_prompt_is_read_with_it_as_by_a_cache(pattern, monkeypatch):
    lm = sharp_lm(pattern=pattern)
    options = [row[:1] for row in OPTIONS]
    greedy = next(lm.stream(PROMPTS[1:2], Sampling(max_new_tokens=1))).ids
    options[1] = [[*greedy]]
    with monkeypatch.context() as patched:
        patched.setattr(module, "score_at_once", None)  # not called
        patched.setattr(module, "prefill_chunk_size", lambda wanted: 64)
        by_cache = lm.continuations(PROMPTS, options)
    monkeypatch.setattr(module, "score_by_cache", None)
    at_once = lm.continuations(PROMPTS, options)
    assert_same(at_once, by_whole_texts(lm, PROMPTS, options))
    assert_same(at_once, [[one.nll for one in row] for row in by_cache])
    assert [[one.greedy for one in row] for row in at_once] == [[False], [True], [False]]


def test_long_prompts_and_continuations_are_read_in_chunks(lm, monkeypatch):
    monkeypatch.setattr("lcjax.generation.scoring.prefill_chunk_size", lambda by_cache: 64)
    lm = lm.with_method(length=512)
    options = [[ids(5, 150)], [ids(6, 70)], [ids(7, 2)]]
    assert_same(lm.continuations(PROMPTS, options), by_whole_texts(lm, PROMPTS, options))


def test_what_the_model_itself_writes_is_greedy_and_nothing_else_is(lm):
    lm = lm.with_method(length=512)
    written = [[] for _ in PROMPTS]
    for piece in lm.stream(PROMPTS, Sampling(max_new_tokens=6, min_new_tokens=6)):
        written[piece.row] += piece.ids
    options = [[own, own[:1], [*own[:5], own[5] ^ 1], [own[0] ^ 1]] for own in written]
    for row in lm.continuations(PROMPTS, options):
        assert [one.greedy for one in row] == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern",
    [
        Streaming(sinks=4, recent=40),
        SelfExtend(group=4, window=32),
        Landmark(block=8, top_k=62, train_length=512, token=258),
    ],
    ids=["ring", "group", "landmarks"],
)
def test_patterns_score_continuations_as_they_read_prompts(lm, pattern):
    lm = lm.with_method(pattern=pattern, length=512)
    assert_same(lm.continuations(PROMPTS, OPTIONS), by_whole_texts(lm, PROMPTS, OPTIONS))


@pytest.mark.slow
def test_on_a_mesh_every_device_has_rows_and_nothing_changes(lm):
    spread = sharp_lm(rope=DynamicNTK(factor=2.0), mesh=Mesh(data=2, fsdp=2, tensor=2))
    found, wanted = (
        one.with_method(length=512).continuations(PROMPTS, OPTIONS) for one in (spread, lm)
    )
    assert_same(found, [[one.nll for one in row] for row in wanted])


@pytest.mark.slow
def test_replug_mixes_continuation_scores_of_all_passages(lm):
    lm = lm.with_method(length=512)
    passages = [[ids(11, 20), ids(12, 7)], [ids(13, 5)], []]
    found = Replug(lm).continuations(PROMPTS, OPTIONS, context=passages)
    for prompt, row, own, scored in zip(PROMPTS, OPTIONS, passages, found, strict=True):
        for option, one in zip(row, scored, strict=True):
            text = np.array([prompt + option])
            wanted = Replug(lm).nll(text, context=[own], first=len(prompt))[0, len(prompt) :]
            np.testing.assert_allclose(one.nll, wanted, atol=2e-4)


def test_a_position_table_must_hold_the_longest_row():
    def lengths(prompts, options):
        asked = []
        config = types.SimpleNamespace(
            check_length=lambda n: (asked.append(n), 1 / 0), vocab_size=9
        )
        lm = types.SimpleNamespace(model=types.SimpleNamespace(config=config, mesh=None))
        with pytest.raises(ZeroDivisionError):
            module.score_continuations(lm, prompts, options)
        return asked

    # The last token is only predicted.
    assert lengths([[1] * 9, [1] * 2], [[[1]], [[1] * 3, [1] * 5]]) == [9]


def test_a_prompt_or_a_continuation_without_a_token_raises_input_error(lm):
    for prompts, options, said in (
        ([[]], [[[1]]], "begin it with BOS"),
        ([[1]], [[[]]], "each a token"),
        ([[1], [2]], [[[1]]], "1 lists for 2 prompts"),
    ):
        with pytest.raises(InputError, match=said):
            lm.continuations(prompts, options)
