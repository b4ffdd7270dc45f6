"""A conversation reads every turn once, and equals reading all of it at once where it can."""

import datetime
import types

import jax
import numpy as np
import pytest
from tiny_lm import sharp_lm

from lcjax.attention import Landmark, Quest, Streaming
from lcjax.attention.policies import DuoAttention
from lcjax.checkpoints import ByteTokenizer
from lcjax.errors import InputError
from lcjax.generation import contexts as contexts_lib
from lcjax.generation import session
from lcjax.generation.conversation import Conversation
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.memory import CepeSection
from lcjax.parallel.sharding import Mesh
from lcjax.rope import DynamicNTK

GREEDY = Sampling(max_new_tokens=5, min_new_tokens=5)
PASSAGES = ["The harbour was quiet that morning.", "A gull walked along the wall."]


class Letters(ByteTokenizer):
    """Whatever a model writes is a text, and reads as that text."""

    def decode(self, ids, *, skip_special=True):
        return "".join(chr(i) if 32 <= i < 127 else "~" for i in ids)


def load(layers=None, mesh=None):
    section = CepeSection(encoder="tiny-encoder", output_share=1.0, layers=layers)
    lm = sharp_lm(memory=section, mesh=mesh)
    lm.tokenizer = Letters()
    return lm


@pytest.fixture(scope="module")
def lm():
    """Only the last layer reads the context, so what a cache keeps does not depend on it."""
    return load(layers=1)


def picked(lm, prompt, context):
    pieces = lm.stream([prompt], GREEDY, context=context)
    return [token for piece in pieces for token in piece.ids]


@pytest.mark.slow
def test_turns_with_a_cache_equal_the_whole_text_read_at_once(lm):
    talk, rest = Conversation(lm, context=PASSAGES), [PASSAGES]
    text = []
    for turn in (list(range(40, 57)), [70], [80]):
        talk.read(turn)
        text += turn
        talk.write(GREEDY)
        text += picked(lm, text, rest)
        assert talk.tokens == text
    assert picked(lm, text[:17], rest) != picked(lm, text[:17], None), "it does listen"


@pytest.mark.slow
def test_streaming_holds_a_conversation_of_any_length_in_a_cache_of_one_size(lm):
    lm = lm.with_method(pattern=Streaming(sinks=2, recent=12))
    talk, text = Conversation(lm, length=1_000_000, prefill_chunk=16), []
    assert talk._session.cache.capacity == 64
    for turn in range(3):  # of more tokens than the window and the cache hold
        text += np.random.default_rng(turn).integers(32, 127, 40).tolist()
        talk.read(text[len(talk.tokens) :])
        talk.write(GREEDY)
        text += picked(lm, text, None)
        assert talk.tokens == text


@pytest.mark.slow
def test_a_context_that_comes_later_counts_from_the_next_turn_on(lm, monkeypatch):
    talk = Conversation(lm, context=PASSAGES[:1])
    talk.read(list(range(40, 57)))
    talk.write(GREEDY)
    assert talk.tokens[17:] == picked(lm, talk.tokens[:17], [PASSAGES[:1]])
    encoded, encode = [], contexts_lib.encode

    def noted(lm, rows, **options):
        encoded.extend(len(chunk) for row in rows for number in row for chunk in number)
        return encode(lm, rows, **options)

    monkeypatch.setattr("lcjax.generation.language_model.encode", noted)
    talk.add_context(PASSAGES[1:])
    assert encoded == [len(PASSAGES[1])], "the old chunks are not encoded again"
    talk.read([70])
    talk.write(GREEDY)
    assert talk.tokens[23:] == picked(lm, talk.tokens[:23], [PASSAGES])


@pytest.mark.slow
def test_a_chat_continues_without_reading_anything_twice(lm, monkeypatch):
    read, read_tokens = [], session._step_in_place

    def noted(model, params, cache, tokens, *rest, **options):
        read.extend(tokens[0].tolist())
        return read_tokens(model, params, cache, tokens, *rest, **options)

    monkeypatch.setattr(session, "_step_in_place", noted)
    talk = Conversation(lm, context=PASSAGES)
    answers = [talk.say(message, GREEDY) for message in ("Who?", "When?")]
    assert talk.messages[1::2] == [{"role": "assistant", "content": a} for a in answers]
    text = f"user: Who?\nassistant: {answers[0]}\nuser: When?\nassistant: "
    assert Letters().decode(talk.tokens).replace("~", "\n") == (text + answers[1]).replace(
        "~", "\n"
    )
    assert read == talk.tokens[:-1]


@pytest.mark.slow
def test_a_chat_whose_turns_are_written_anew_or_cut_is_read_again(lm):
    talk = Conversation(lm)
    first = talk.say("Who?", GREEDY)
    talk.messages[1]["content"] = "Somebody."
    talk.say("When?", GREEDY)
    assert "Somebody." in Letters().decode(talk.tokens) and first not in Letters().decode(
        talk.tokens
    )
    other = Conversation(lm)
    cut = other.say("Who?", Sampling(max_new_tokens=5, min_new_tokens=5, stop=(first[1:3],)))
    assert cut == first[:1]
    other.say("When?", GREEDY)
    assert f"assistant: {cut}~user" in Letters().decode(other.tokens)


class Store:
    """Finds one of the passages for a question, and both for another."""

    def search(self, queries, k):
        passages = [
            types.SimpleNamespace(text=x, title="", id=str(n)) for n, x in enumerate(PASSAGES)
        ]
        hits = [types.SimpleNamespace(passage=passage, score=1.0) for passage in passages]
        return [hits[: 1 + (query == "When?")][:k] for query in queries]


@pytest.mark.slow
def test_every_turn_searches_and_a_memory_reads_new_passages(lm):
    talk, plain = Conversation(lm, retriever=Store()), Conversation(lm)
    for message, new in (("Who?", PASSAGES[:1]), ("When?", PASSAGES[1:]), ("Who?", [])):
        answer = talk.say(message, GREEDY)
        if new:
            plain.add_context(new)
        assert answer == plain.say(message, GREEDY) and answer.ids == tuple(talk.tokens[-5:])
        (search,) = answer.passages
        read = [hit.passage.text for hit in search.hits]
        assert search.query == message and read == PASSAGES[: 1 + (message == "When?")]
    assert talk.context.chunks == (2,) and talk.tokens == plain.tokens
    bare = Conversation(lm, retriever=Store(), k=0)
    assert bare.say("Who?", GREEDY).passages[0].hits == () and bare.context.chunks == (0,)


@pytest.mark.slow
def test_a_model_without_a_memory_reads_passages_before_the_message():
    lm = sharp_lm()
    lm.tokenizer = Letters()
    talk = Conversation(lm, retriever=Store(), length=256)
    talk.say("Who?", GREEDY)
    answer = talk.say("When?", GREEDY)
    talk.add_context([])  # nothing to encode
    found = [message["content"] for message in talk.messages if message["role"] == "user"]
    first, second = PASSAGES
    assert found == [f"{first}\n\nWho?", f"{second}\n\n{first}\n\nWhen?"]
    assert len(answer.passages[0].hits) == 2
    text = Letters().decode(talk.tokens)
    assert text.index(second) < text.rindex(first) < text.index("When?")


@pytest.mark.slow
def test_a_conversation_on_a_mesh_equals_that_of_one_device():
    found = []
    for model in (load(), load(mesh=Mesh(2, 2, 2, 1))):
        talk = Conversation(model, context=PASSAGES, projected=True)
        found.append([talk.say("Who?", GREEDY), talk.say("When?", GREEDY)])
    assert found[0] == found[1]


def test_conversations_that_cannot_go_on_raise_input_error(lm):
    for call, words in (
        (lambda: Conversation(lm).write(), "empty"),
        (lambda: Conversation(lm, length=20).say("Who is it?", GREEDY), "length=20: .* or more"),
        (lambda: Conversation(lm, length=0), "length=0"),
        (lambda: Conversation(lm.with_method(pattern=Landmark(token=258))), "landmark"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
    talk = Conversation(lm, length=60)
    talk.read(np.arange(40, 57))
    talk.write(GREEDY)
    with pytest.raises(InputError, match="length=60"):
        talk.write(Sampling(max_new_tokens=39))
    assert len(talk.tokens) == 22


def test_a_turn_after_an_error_does_not_repeat_the_failed_message():
    talk = Conversation(sharp_lm(), length=400)
    assert talk.say("FIRST", GREEDY).finish == "length"
    with pytest.raises(InputError):
        talk.say("SECOND", Sampling(max_new_tokens=5, seed=(1, 2)))
    talk.say("THIRD", GREEDY)
    text = talk.lm.tokenizer.decode(talk.tokens)
    assert "SECOND" not in text and text.count("FIRST") == text.count("THIRD") == 1


def test_a_saved_chat_goes_on_as_if_it_had_not_ended(lm, tmp_path):
    file, methods = (
        tmp_path / "talk",
        ({"pattern": Streaming(sinks=2, recent=12)}, {"cache": Quest()}),
    )
    for method in ({}, *methods):
        talk = Conversation(sharp_lm().with_method(**method), length=400, prefill_chunk=16)
        first = talk.say("FIRST", GREEDY)
        assert talk.copy().say("another way", GREEDY) and talk.messages[-1]["content"] == first
        talk.save(file)
        opened = Conversation.open(talk.lm, file)
        assert opened.say("SECOND", GREEDY) == talk.say("SECOND", GREEDY)
        assert opened.messages == talk.messages and opened.tokens == talk.tokens
    plain, whole = sharp_lm(), file.read_bytes()
    halves = jax.tree.map(lambda x: x / 2, plain.params)
    others = LanguageModel(plain.model, halves, plain.tokenizer).with_method(cache=Quest())
    for other, words in (
        (plain, "written with another model.cache; open it with the same model"),
        (others, "another weights"),
    ):
        with pytest.raises(InputError, match=words):
            Conversation.open(other, file)
    for damaged in (
        b"",
        b"text",
        whole[: len(whole) // 2],
        whole[:-300] + bytes(100) + whole[-200:],
    ):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match="no file of a conversation, or damaged") as caught:
            Conversation.open(talk.lm, file)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="none: cannot be read .No such file"):
        Conversation.open(talk.lm, tmp_path / "none")
    with pytest.raises(InputError, match="encoded context is not saved"):
        Conversation(lm, context=PASSAGES).save(file)


def test_a_file_is_opened_with_the_rotation_and_the_files_of_its_method(tmp_path, monkeypatch):
    """Nothing was read yet, so nothing is compiled."""
    file, heads = tmp_path / "talk", tmp_path / "heads.json"
    dynamic = sharp_lm(rope=DynamicNTK(factor=2.0, original_length=64))
    Conversation(dynamic, length=200).save(file)
    assert Conversation.open(dynamic, file).length == 200
    with pytest.raises(InputError, match="written with another rope; open it with the same"):
        Conversation.open(dynamic.with_method(length=4096), file)
    heads.write_text("[[0.9, 0.1], [0.2, 0.8]]")
    duo = sharp_lm().with_method(cache=DuoAttention(str(heads), sinks=3, recent=17))
    Conversation(duo, length=200, projected=True).save(file)
    assert Conversation.open(duo, file)._projected
    moved = tmp_path / "elsewhere.json"
    moved.write_text(heads.read_text())
    Conversation.open(duo.with_method(cache=DuoAttention(str(moved), sinks=3, recent=17)), file)
    heads.write_text("[[0.1, 0.9], [0.8, 0.2]]")
    with pytest.raises(InputError, match="written with another model.cache"):
        Conversation.open(duo, file)
    monkeypatch.setattr("lcjax.generation.conversation._FORMAT", 3)
    Conversation(dynamic, length=200).save(file)
    monkeypatch.undo()
    with pytest.raises(InputError, match="has format 3, and this version reads 2"):
        Conversation.open(dynamic, file)
    np.save(tmp_path / "array.npy", np.zeros(3))
    for path, words in (("array.npy", "no file of a conversation"), (".", "cannot be read")):
        with pytest.raises(InputError, match=words):
            Conversation.open(dynamic, tmp_path / path)
    today = Conversation(dynamic, chat_template_kwargs={"date": datetime.date(2026, 1, 1)})
    with pytest.raises(InputError, match="chat_template_kwargs=.* cannot be written"):
        today.save(file)


def test_turns_have_draws_of_their_own_and_the_first_those_of_generate():
    lm, hot = sharp_lm(), Sampling(8, 8, temperature=1e6, seed=7)
    talk = Conversation(lm, length=400)
    talk.read("a text")
    turns = []
    for _ in range(2):
        before = len(talk.tokens)
        talk.write(hot)
        turns.append(talk.tokens[before:])
    assert turns[0] != turns[1]
    (alone,) = lm.generate([lm.encode("a text")], hot)
    assert turns[0] == list(alone.ids)
