"""Requests of the harness as token ids; nothing here needs the harness."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
from evaluation_support import ByteTokenizer

from lcjax.errors import InputError
from lcjax.evaluation.lm_eval.requests import (
    Encoder,
    GenerateUntil,
    Loglikelihood,
    LoglikelihoodRolling,
    check,
    render_chat,
    sampling_of,
)

ENCODER = Encoder(ByteTokenizer(), 16)


def ids(text):
    return [byte + 1 for byte in text.encode()]


def test_blanks_between_a_context_and_its_continuation_belong_to_the_latter():
    assert ENCODER.pair("ab ", "cd") == ([0, *ids("ab")], ids(" cd"))
    assert ENCODER.pair("ab", " cd") == ([0, *ids("ab")], ids(" cd"))


@pytest.mark.parametrize("context", ["", " "])
def test_what_has_nothing_before_it_follows_bos(context):
    assert ENCODER.pair(context, "cd") == ([0], ids(context + "cd"))


def test_bos_occurs_once_also_with_a_template_that_writes_it():
    assert ENCODER.ids("<s>ab") == ENCODER.ids("ab") == [0, *ids("ab")]
    without = dataclasses.replace(ENCODER, tokenizer=ByteTokenizer(add_bos=False))
    assert without.ids("ab") == ids("ab")
    ended = ByteTokenizer(bos_id=None, add_bos=False, eos_ids=(7,))
    assert dataclasses.replace(ENCODER, tokenizer=ended).pair("", "a") == ([7], ids("a"))


def test_a_prompt_too_long_loses_its_beginning_and_the_last_token_is_not_read():
    found = ENCODER.request("loglikelihood", ["x" * 30, "yz"])
    assert found == Loglikelihood(tuple(ids("x" * 15)), tuple(ids("yz"))) and found.cut == 16
    with pytest.raises(InputError, match="too short for a continuation of 17 tokens"):
        ENCODER.request("loglikelihood", ["x", "y" * 17])


@pytest.mark.parametrize("size", [1, 9, 15, 16, 31, 32, 40])
def test_blocks_score_every_token_once_and_read_as_much_as_fits(size):
    text = bytes(97 + n % 20 for n in range(size)).decode()
    whole = [0, *ids(text)]
    windows = ENCODER.request("loglikelihood_rolling", [text]).windows
    assert [token for window in windows for token in window.continuation] == whole
    assert windows[0].prompt == (0,)
    place = 0
    for window in windows:
        place += len(window.continuation)
        assert window.size <= 17
        if window is not windows[0]:
            assert [*window.prompt, *window.continuation] == whole[place - 17 : place]


def test_an_empty_text_without_bos_has_no_windows():
    without = dataclasses.replace(ENCODER, tokenizer=ByteTokenizer(add_bos=False))
    assert without.request("loglikelihood_rolling", [""]) == LoglikelihoodRolling(())


def test_prompts_leave_space_for_new_tokens():
    found = ENCODER.request("generate_until", ["x" * 30, {"until": "\n", "max_gen_toks": 6}])
    assert isinstance(found, GenerateUntil) and (len(found.prompt), found.cut) == (10, 21)
    assert found.sampling.stop == ("\n",) and found.sampling.max_new_tokens == 6
    with pytest.raises(InputError, match="16 leaves no prompt beside 16 new tokens"):
        ENCODER.request("generate_until", ["x", {"max_gen_toks": 16}])


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0.7, "do_sample": False}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": "0.5", "top_p": 0.9, "num_beams": 1}, 0.5),
    ],
)
def test_generation_settings_come_from_the_harness(settings, temperature):
    found = sampling_of(settings, 256, 3)
    assert math.isclose(found.temperature, temperature) and found.max_new_tokens == 256
    assert found.seed == (3 if temperature else 0)  # greedy requests run together


def test_repetitions_of_a_drawn_answer_differ_and_unknown_settings_raise_input_error():
    both = [
        ENCODER.request("generate_until", ["x", {"max_gen_toks": 2, "temperature": 1.0}], repeat)
        for repeat in range(2)
    ]
    assert both[0].sampling != both[1].sampling
    with pytest.raises(InputError, match="num_beams=4 is not supported"):
        sampling_of({"num_beams": 4}, 256, 0)
    with pytest.raises(InputError, match="kind loglikelihoods are unknown|kind loglikelihoods"):
        ENCODER.request("loglikelihoods", ["", ""])


def test_an_open_conversation_ends_with_its_last_message():
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer is "}]
    assert render_chat(ByteTokenizer(), turns[:1]) == "<s>[user]Hi[end][assistant]"
    assert render_chat(ByteTokenizer(), turns, False) == (
        "<s>[user]Hi[end][assistant]The answer is"
    )


def test_models_that_must_know_the_documents_of_a_prompt_are_refused():
    with pytest.raises(InputError, match="question: tasks of lm-evaluation-harness do not say"):
        check(SimpleNamespace(needs_documents=True), [])
