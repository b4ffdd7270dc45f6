"""Continuations by models that read the beginning of a prompt beside their decoder."""

import numpy as np
import pytest
from tiny_lm import ids, sharper

from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError
from lcjax.evaluation import ContextSplit, ReplugSplit
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.replug import Replug
from lcjax.memory import CepeSection

PROMPTS = [ids(1, 60), ids(2, 20)]
OPTIONS = [[ids(3, 4), ids(4, 1)], [ids(5, 4), ids(6, 2)]]


@pytest.fixture(scope="module")
def lm():
    section = ModelSection(
        preset="tiny", memory=CepeSection(encoder="tiny-encoder", output_share=1.0)
    )
    return sharper(LanguageModel.load(section))


def assert_same(found, wanted):
    for row, other in zip(found, wanted, strict=True):
        for one, two in zip(row, other, strict=True):
            np.testing.assert_allclose(one.nll, two.nll, atol=2e-5)
            assert one.greedy == two.greedy


@pytest.mark.slow
def test_of_a_prompt_too_long_for_the_decoder_the_beginning_is_read_beside_it(lm):
    split = ContextSplit(decoder=32, chunk=16)
    # 32 tokens less four new ones are left: BOS stays, and so does what is not movable.
    split = split.reader(lm, 128).with_movable([[(1, 59)], [(1, 19)]])
    found = split.continuations(PROMPTS, OPTIONS)
    beside, read = PROMPTS[0][1:33], [PROMPTS[0][:1] + PROMPTS[0][33:], PROMPTS[1]]
    context = lm.encode_contexts([[beside[:16], beside[16:]], []], chunk=16)
    assert_same(found, lm.with_method(length=32).continuations(read, OPTIONS, context=context))


@pytest.mark.slow
def test_replug_reads_the_same_prompt_once_behind_every_chunk(lm):
    split = ReplugSplit(decoder=32, chunk=16).reader(lm, 128).with_movable([[(1, 59)], [(1, 19)]])
    found = split.continuations(PROMPTS, OPTIONS)
    bos, rest, beside = PROMPTS[0][:1], PROMPTS[0][33:], PROMPTS[0][1:33]
    replug = Replug(lm.with_method(length=48))
    context = [[bos + beside[:16], bos + beside[16:]], []]
    assert_same(found, replug.continuations([rest, PROMPTS[1]], OPTIONS, context=context))


def test_continuations_that_leave_the_decoder_no_prompt_raise_input_error(lm):
    split = ContextSplit(decoder=8, chunk=16).reader(lm, 128)
    with pytest.raises(InputError, match="8 leaves no room for a prompt beside 8 new tokens"):
        split.continuations(PROMPTS[:1], [[ids(3, 8)]])
