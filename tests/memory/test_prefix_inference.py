"""A language model behind a memory: contexts of any length, prompts, conversations."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from memory_support import TOLERANCE, assert_close, assert_most_probable, assert_reads
from tiny_lm import generated, ids, sharp_lm

from lcjax.errors import InputError
from lcjax.evaluation.split import ContextSplit
from lcjax.generation.conversation import Conversation
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.memory import AutoCompressorSection, BeaconSection
from lcjax.parallel.sharding import Mesh
from lcjax.rope import Linear

pytestmark = pytest.mark.usefixtures("exact_products")

SECTIONS = {
    "beacon": BeaconSection(chunk=16, ratio=4, ratios=(2, 4)),
    "auto_compressor": AutoCompressorSection(chunk=16, summary=3),
}
GREEDY = Sampling(max_new_tokens=4, min_new_tokens=4)
TOKENS = np.array([ids(1, 12), ids(2, 12), ids(3, 12)])
CONTEXT = [[ids(4, 39), ids(5, 6)], [], [ids(6, 16)]]
CHUNKS = [  # of 16 tokens, the odd one first
    [ids(4, 39)[:7], ids(4, 39)[7:23], ids(4, 39)[23:], ids(5, 6)],
    [],
    [ids(6, 16)],
]
OTHER = Linear(factor=2.0)  # than the one that the model was made with


@functools.cache
def loaded(name):
    return sharp_lm(memory=SECTIONS[name]).with_method(rope=OTHER)


@pytest.fixture(params=["beacon", pytest.param("auto_compressor", marks=pytest.mark.slow)])
def lm(request):
    return loaded(request.param)


@pytest.mark.slow
def test_contexts_of_any_length_are_read_window_by_window_under_the_ropes_own_rotation(lm):
    assert_reads(lm, TOKENS, CONTEXT, CHUNKS, tolerance=5e-4)


@pytest.mark.slow
def test_text_is_written_with_a_cache_as_without_for_unequal_prompts(lm):
    prompts = [ids(1, 30), ids(2, 5), ids(3, 18)]
    result = generated(lm, prompts, GREEDY, context=CONTEXT, prefill_chunk=16)
    assert_most_probable(lm, prompts, result, CHUNKS)


@pytest.mark.slow
def test_windows_may_come_later_and_a_few_rows_at_a_time(lm, encoded):
    whole = lm.encode_contexts(CONTEXT)
    first = lm.encode_contexts([CONTEXT[0][:1], [], []])
    calls = len(encoded)
    later = lm.encode_contexts([CONTEXT[0][1:], [], CONTEXT[2]], after=first, batch_tokens=16)
    assert later.chunks == whole.chunks and later.tokens == whole.tokens
    assert [mask.shape[0] for mask, *_ in encoded[calls:]] == [1, 1]
    room = lm.config.memory.num_slots
    assert whole.encoded.mask.sum(1).tolist() == [
        sum(room(len(chunk)) for chunk in row) for row in CHUNKS
    ]
    for context in (later, whole.repeated(3)):
        assert_close(lm.nll(TOKENS, context=context), lm.nll(TOKENS, context=whole), 5e-4)


@pytest.mark.slow
def test_on_a_mesh_it_reads_the_same(lm):
    name = "beacon" if hasattr(lm.config.memory, "ratio") else "auto_compressor"
    other = sharp_lm(memory=SECTIONS[name], mesh=Mesh(data=2, fsdp=2, tensor=2))
    found = other.with_method(rope=OTHER).nll(TOKENS, context=CONTEXT)
    np.testing.assert_allclose(found, lm.nll(TOKENS, context=CONTEXT), atol=1e-3)


@pytest.mark.slow
def test_a_conversation_reads_its_text_again_behind_a_context_that_has_grown(lm):
    talk = Conversation(lm, context=[ids(4, 20)])
    talk.read(ids(1, 9))
    talk.write(GREEDY)
    talk.add_context([ids(5, 16)])
    talk.read(ids(2, 3))
    so_far = talk.tokens
    talk.write(GREEDY)
    expected = generated(lm, [so_far], GREEDY, context=[[ids(4, 20), ids(5, 16)]])[0]
    assert talk.tokens[len(so_far) :][: len(expected)] == expected


def test_a_ratio_is_chosen_when_a_text_is_read():
    lm = loaded("beacon")
    subject = ContextSplit(decoder=8, ratio=8).reader(lm, 40)
    assert subject.config.memory == dataclasses.replace(lm.config.memory, ratio=8)
    assert ContextSplit().tokens(lm, 100) == 16, "a window like those before it"
    with pytest.raises(InputError, match="chunk=16 must be a multiple of 3.*nearest: 15, 18"):
        ContextSplit(ratio=3).reader(lm, 40)
    with pytest.raises(InputError, match="context.ratio=8 is a setting of Beacon"):
        ContextSplit(ratio=8).reader(loaded("auto_compressor"), 40)
    with pytest.raises(InputError, match="chunk=10 must be a multiple of 4.*nearest: 8, 12"):
        lm.encode_contexts([ids(4, 39)], chunk=10)


@pytest.mark.slow
def test_bos_precedes_the_context_and_not_the_text(lm):
    bos, words = lm.tokenizer.bos_id, "some words of a text"
    texts = [[words, "others"], [], [ids(4, 20), words], ["", words]]
    known = [
        [[bos, *words.encode()], [*b"others"]],
        [],
        [ids(4, 20), [*words.encode()]],  # token ids stay as they are
        [[bos, *words.encode()]],
    ]
    found = lm.encode_contexts(texts)
    assert found.tokens == (27, 0, 40, 21)
    assert_alike(found, lm.encode_contexts(known))
    expected = generated(lm, [[*b"so"], [bos, *b"so"], [*b"so"], ids(5, 3)], GREEDY, context=known)
    for context in (texts, found):
        assert generated(lm, ["so", "so", "so", ids(5, 3)], GREEDY, context=context) == expected
    # What comes later has its beginning already.
    first = lm.encode_contexts([[words], [], [], []])
    later = lm.encode_contexts([["others"], [], *texts[2:]], after=first)
    assert_alike(later, found, 5 * TOLERANCE)  # summaries of summaries, computed in other shapes


def assert_alike(found, wanted, tolerance=TOLERANCE):
    """`tolerance` is of the largest number."""
    assert found.tokens == wanted.tokens and found.chunks == wanted.chunks
    for one, other in zip(*map(jax.tree.leaves, (found.encoded, wanted.encoded)), strict=True):
        assert_close(one, other, tolerance * max(1.0, abs(other).max(initial=0.0)))


class Templated:
    """A tokenizer whose chats begin with BOS."""

    def __init__(self, tokenizer):
        self._own = tokenizer

    def __getattr__(self, name):
        return getattr(self._own, name)

    def encode_chat(self, messages, *, allow_special):
        chat = self._own.encode_chat(messages)
        ids, spans = (
            [self._own.bos_id, *chat.ids],
            [(0, 3), *((a + 3, b + 3) for a, b in chat.spans)],
        )
        return chat._replace(text="<s>" + chat.text, ids=ids, spans=spans)


@pytest.mark.slow
def test_chats_and_conversations_behind_a_context_have_their_bos_before_it(lm, monkeypatch):
    bos, words = lm.tokenizer.bos_id, "some words of a text"
    talk = Conversation(lm)
    talk.read("so")
    assert talk.tokens == [bos, *b"so"]
    talk.add_context(words)
    assert talk.tokens == [*b"so"] and talk.context.tokens == (21,)
    other = Conversation(lm, context=words)
    other.read("so")
    assert other.tokens == [*b"so"]
    text = lm.tokenizer.render_chat([{"role": "user", "content": "so"}])
    wanted = lm.generate([[*text.encode()]], GREEDY, context=[[bos, *words.encode()]])
    monkeypatch.setattr(lm, "tokenizer", Templated(lm.tokenizer))
    for context in (words, lm.encode_contexts([words])):
        assert lm.chat("so", GREEDY, context=context) == wanted[0]
    assert Conversation(lm, context=words).say("so", GREEDY) == wanted[0]


def test_a_split_prompt_has_its_bos_before_the_documents_that_go_beside(lm, monkeypatch):
    bos, prompt = lm.tokenizer.bos_id, [lm.tokenizer.bos_id, *ids(1, 4), *ids(2, 20), *ids(3, 6)]
    subject, read = ContextSplit(decoder=20).reader(lm, 35), []
    monkeypatch.setattr(
        LanguageModel, "encode_contexts", lambda self, rows, chunk: read.append(rows)
    )
    for name in ("generate", "continuations"):
        monkeypatch.setattr(LanguageModel, name, lambda self, rows, *_, context: read.append(rows))
    spans, moved = [[(5, 25)], [(5, 7)]], 31 + 4 - 20
    subject = subject.with_movable(spans)
    subject.generate([prompt, prompt[:9]], GREEDY)
    subject.continuations([prompt, prompt[:9]], [[ids(7, 4)]] * 2)
    text = [*ids(1, 4), *ids(2, 20)[moved:], *ids(3, 6)]
    for passages, texts in (read[:2], read[2:]):
        assert [[part.tolist() for part in row] for row in passages] == [
            [[bos, *ids(2, 20)[:moved]]],
            [],
        ]
        assert texts == [text, prompt[:9]]


@pytest.mark.slow
def test_contexts_read_under_another_rope_raise_input_error(lm):
    words = "context was read with rope Linear.*read with rope Linear.*use encode_contexts"
    context, other = lm.encode_contexts(CONTEXT), lm.with_method(rope=Linear(factor=4.0))
    for use in (
        lambda: other.nll(TOKENS, context=context),
        lambda: other.generate([ids(1, 3)] * 3, context=context),
        lambda: other.encode_contexts([[], [], [ids(7, 3)]], after=context),
        lambda: other.search_contexts(context, ["a"] * 3),
    ):
        with pytest.raises(InputError, match=words):
            use()
    np.testing.assert_array_equal(
        lm.with_method(rope=OTHER).nll(TOKENS, context=context), lm.nll(TOKENS, context=context)
    )
