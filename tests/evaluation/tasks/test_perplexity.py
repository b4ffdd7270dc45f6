"""Every protocol against a reference that looks at one token after another."""

import dataclasses
import math
import re
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from evaluation_support import (
    TABLE,
    BigramModel,
    ByteTokenizer,
    documents,
    score,
    slide_press,
    texts,
    token_loss,
)

from lcjax import data
from lcjax.attention import AttentionMetadata, Causal, Streaming
from lcjax.data import readers
from lcjax.errors import InputError
from lcjax.evaluation import Perplexity
from lcjax.evaluation.corpus import TokenizedCorpus, TokenizedDocument
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks import perplexity as perplexity_lib
from lcjax.evaluation.tasks.perplexity import (
    PROTOCOLS,
    WindowOptions,
    choose_windows,
    join_documents,
    lay_windows,
)

LENGTH, STRIDE = 12, 4


def slide_full(docs, length, stride):
    stream = [token for doc in docs for token in doc]
    starts, start = [], 0
    while start < len(stream) - length:
        starts.append(start)
        start += stride
    del starts[-1]
    means = []
    for start in starts:
        window = stream[start : start + length]
        means.append(np.mean([token_loss(window[:i], window[i]) for i in range(1, length)]))
    return 2.71828 ** np.mean(means)


def last_k(docs, length, stride, last, per_document):
    """CEPE's loop, and the one window of a document that is as long as a window."""
    means = []
    for doc in docs:
        starts = [*range(0, len(doc) - length, stride)] if len(doc) > length else [0]
        for start in starts[: per_document or None]:
            window = doc[start : start + length]
            scored = [token_loss(window[:i], window[i]) for i in range(length - last, length)]
            means.append(np.mean(scored))
    return math.exp(np.mean(means))


def slide_yarn(docs, length, stride, bos):
    means = []
    for doc in docs:
        text, before, start = doc[bos:], 0, 0
        while before < len(text):
            stop = min(start + length - bos, len(text))
            places = [place for place in range(before, stop) if place or bos]
            context = {place: [0] * bos + text[start:place] for place in places}
            means.append(np.mean([token_loss(context[p], text[p]) for p in places]))
            start, before = start + stride, stop
    return math.exp(np.mean(means))


def rolling_lmeval(named, length):
    """The loss of all tokens over all words; the prefix is not one of the text."""
    total = words = 0
    for _, text in named:
        ids, told = ByteTokenizer().encode(text), 0
        words += len(re.split(r"\s+", text))
        while told < len(ids):
            stop = min(told + length, len(ids))
            known = [0, *ids][max(stop - length, 0) : told + 1]
            for token in ids[told:stop]:
                total += token_loss(known, token)
                known = [*known, token]
            told = stop
    return math.exp(total / words)


def stream_sink(docs, length, last, pattern):
    """A cache that is cut back to its sinks and its last tokens before each step."""
    losses = []
    for doc in docs:
        text, cache, room = doc[:length], [], pattern.sinks + pattern.recent
        for place, token in enumerate(text[:-1]):
            if not room:
                cache = cache[: pattern.sinks] + cache[-pattern.recent :]
                room = pattern.stride
            cache, room = [*cache, token], room - 1
            if last is None or place + 1 >= len(text) - last:
                losses.append(token_loss(cache, text[place + 1]))
    return math.exp(np.mean(losses))


class Forgetful(BigramModel):
    """Looks back on as many tokens as the masks of its pattern show."""

    def __init__(self, pattern):
        super().__init__()
        self.config = self.config.replace(pattern=pattern)

    def seen(self, length):
        at = jnp.arange(length)
        masks = [
            step.mask for step in self.config.pattern.passes(AttentionMetadata(at[None], at[None]))
        ]
        shown = [np.broadcast_to(m.element(at[:, None], at[None]), (length,) * 2) for m in masks]
        return np.sum(shown, (0, 2))


def prefix_yarn(docs, length, bos):
    """`length` tokens; where a text begins with BOS, one of them is BOS."""
    means = []
    for doc in docs:
        text = [0] * bos + doc[bos:][: length - bos]
        means.append(np.mean([token_loss(text[:i], text[i]) for i in range(1, len(text))]))
    return math.exp(np.mean(means))


@pytest.mark.parametrize("bos", ["auto", "never"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"protocol": "slide_press"}, lambda d, b: slide_press(d, LENGTH, STRIDE)),
        ({"protocol": "slide_full"}, lambda d, b: slide_full(d, LENGTH, STRIDE)),
        (
            {"protocol": "slide_full", "first_documents": 2},
            lambda d, b: slide_full(d[:2], LENGTH, STRIDE),
        ),
        ({"protocol": "last_k", "last": 5}, lambda d, b: last_k(d, LENGTH, STRIDE, 5, 0)),
        (
            {"protocol": "last_k", "last": 3, "windows_per_document": 1},
            lambda d, b: last_k(d, LENGTH, STRIDE, 3, 1),
        ),
        ({"protocol": "prefix_yarn"}, lambda d, b: prefix_yarn(d, LENGTH, b)),
        ({"protocol": "slide_yarn"}, lambda d, b: slide_yarn(d, LENGTH, STRIDE, b)),
        ({"protocol": "last_k_n100", "last": 5}, lambda d, b: last_k(d, LENGTH, STRIDE, 5, 0)),
    ],
)
def test_a_protocol_equals_its_reference_token_by_token(options, reference, bos, batch):
    task = Perplexity(bos=bos, **options)
    records = score(task, Limits((LENGTH,), stride=STRIDE), batch=batch)
    expected = reference(documents(bos == "auto", minimum=LENGTH), bos == "auto")
    assert task.summarise(records)["value"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("last", [None, 4])
def test_a_stream_is_read_by_a_cache_that_forgets_all_but_sinks_and_recent_tokens(last, stride):
    pattern = Streaming(sinks=2, recent=4, stride=stride)
    task, limits = Perplexity(protocol="stream_sink", last=last), Limits((24,))
    records = score(task, limits, length=24, model=Forgetful(pattern))
    expected = stream_sink(documents(1, minimum=24), 24, last, pattern)
    assert task.summarise(records)["value"] == pytest.approx(expected, rel=1e-12)
    assert {record["stride"] for record in records} == {None}


def test_a_stream_needs_a_method_that_forgets():
    task = Perplexity(protocol="stream_sink")
    task.check_model(Forgetful(Streaming()), [])
    for model in (Forgetful(Causal()), BigramModel()):
        with pytest.raises(InputError, match="keeps every key; give it a pattern"):
            task.check_model(model, [])


@pytest.mark.parametrize("bos", ["auto", "never"])
@pytest.mark.parametrize("ends", [(), (9,)])
def test_rolling_blocks_equal_their_reference_by_words_bytes_and_with_any_prefix(bos, ends):
    tokenizer = ByteTokenizer(eos_ids=ends, add_bos=not ends)  # auto does not ask for it
    task, limits = Perplexity(protocol="rolling_lmeval", bos=bos), Limits((LENGTH,))
    records = score(task, limits, tokenizer=tokenizer)
    found, size = task.summarise(records), sum(len(text) for _, text in texts())
    assert {record["bos"] for record in records} == {"none" if bos == "never" else "prefix"}
    if bos == "never":  # the first token of a text is then not predicted
        assert found["tokens_scored"] == size - len(texts())
        return
    expected = rolling_lmeval(texts(), LENGTH)
    assert found["value"] == pytest.approx(expected, rel=1e-12)
    words = sum(len(re.split(r"\s+", text)) for _, text in texts())
    assert found["tokens_scored"] == size
    assert found["byte_perplexity"] == pytest.approx(expected ** (words / size), rel=1e-12)
    assert found["byte_perplexity"] == pytest.approx(2 ** found["bits_per_byte"], rel=1e-12)
    low, high = task.interval(records)
    assert low < found["value"] < high


def test_rolling_blocks_begin_with_the_end_of_a_text_where_there_is_no_bos():
    tokenizer = ByteTokenizer(bos_id=None, add_bos=False, eos_ids=(9,))
    units = Perplexity(protocol="rolling_lmeval").plan(
        TokenizedCorpus(texts(), tokenizer), LENGTH, Limits((LENGTH,))
    )
    assert [unit.tokens[0] for unit in units if not unit.fields["start"]] == [9] * len(texts())


def test_of_many_windows_a_hundred_are_taken_and_at_128k_one_of_each_of_ten_documents(monkeypatch):
    many, limits = texts((60,) * 12, seed=2), Limits((LENGTH,), stride=STRIDE)
    task, docs = Perplexity(protocol="last_k_n100", last=4), documents(1, many)
    records = score(task, limits, corpus_texts=many)
    every = Perplexity(protocol="last_k", last=4)
    windows = score(every, limits, corpus_texts=many)
    assert len(windows) > 100 == len(records)
    first = [record for record in windows if record["window"] < 100]
    assert task.summarise(records)["value"] == every.summarise(first)["value"]
    few = score(task, dataclasses.replace(limits, max_windows=7), corpus_texts=many)
    assert [r["window"] for r in few] == [0, 14, 28, 42, 57, 71, 85]
    monkeypatch.setattr(perplexity_lib, "_LONG", LENGTH)
    records = score(task, limits, corpus_texts=many)
    assert [(r["document"], r["start"]) for r in records] == [(n, 0) for n in range(10)]
    expected = last_k(docs[:10], LENGTH, STRIDE, 4, 1)
    assert task.summarise(records)["value"] == pytest.approx(expected, rel=1e-12)


def test_protocols_give_different_numbers_on_the_same_losses():
    values = set()
    alike = {"last_k_n100", "stream_sink"}  # of few windows, by a model that forgets nothing
    for protocol in PROTOCOLS.keys() - alike:
        task = Perplexity(protocol=protocol, last=4)
        records = score(task, Limits((LENGTH,), stride=STRIDE))
        values.add(round(task.summarise(records)["value"], 3))
    assert len(values) == len(PROTOCOLS) - len(alike)


@pytest.mark.parametrize("size", [2, 7, 11, 12, 13, 15, 16, 17, 50])
@pytest.mark.parametrize("stride", [1, 3, 4, 6])
def test_slide_press_scores_every_token_but_the_first_exactly_once(size, stride):
    windows = lay_windows(
        PROTOCOLS["slide_press"],
        [TokenizedDocument("d", np.zeros(size))],
        12,
        WindowOptions(stride=stride),
    )
    seen = [w.start + place for w in windows for place in range(w.first, w.size)]
    assert sorted(seen) == list(range(1, size))
    assert all(w.start + w.size <= size and w.size <= 12 for w in windows)


@pytest.mark.parametrize(("total", "count"), [(12, 0), (13, 0), (20, 1), (21, 2), (100, 21)])
def test_slide_full_lays_as_many_windows_as_the_published_loop(total, count):
    windows = lay_windows(
        PROTOCOLS["slide_full"],
        [TokenizedDocument("s", np.zeros(total))],
        12,
        WindowOptions(stride=4),
    )
    assert len(windows) == max(0, math.ceil((total - 12) / 4) - 1) == count


def test_all_lengths_score_documents_that_reach_the_longest():
    limits = Limits((8, 40), stride=4)
    records = score(Perplexity(), limits, length=8)
    assert {record["source"] for record in records} == {"text3"}
    records = score(Perplexity(min_tokens=8), limits, length=8)
    assert {record["source"] for record in records} == {"text0", "text1", "text2", "text3"}


def test_documents_are_truncated_and_counted_by_settings():
    limits = Limits((LENGTH,), stride=STRIDE, max_documents=2)
    records = score(Perplexity(max_tokens=20), limits)
    assert {record["source"] for record in records} == {"text0", "text1"}
    assert sum(record["scored"] for record in records) == 2 * 19


def test_a_batch_always_has_the_compiled_shape():
    model = BigramModel()
    score(Perplexity(), Limits((LENGTH,), stride=STRIDE), model=model, batch=4)
    assert {shape for shape, _ in model.log} == {(4, LENGTH)}
    assert {first for _, first in model.log} == {1, LENGTH - STRIDE}


def test_windows_with_scored_ends_stop_before_the_end_of_their_document_unless_they_are_all_of_it():
    def starts(size):
        options, document = WindowOptions(stride=4, last=2), TokenizedDocument("d", np.zeros(size))
        return [w.start for w in lay_windows(PROTOCOLS["last_k"], [document], 12, options)]

    found = {size: starts(size) for size in (11, 12, 13, 16, 17, 24, 25)}
    assert found == {
        11: [], 12: [0], 13: [0], 16: [0], 17: [0, 4], 24: [0, 4, 8], 25: [0, 4, 8, 12]
    }  # fmt: skip
    for size in (13, 16, 17, 24, 25):
        assert found[size] == [*range(0, size - 12, 4)], "the published loop"


def test_fewer_windows_are_spread_over_the_corpus_and_do_not_depend_on_chance():
    windows = lay_windows(
        PROTOCOLS["last_k"],
        [TokenizedDocument("d", np.zeros(101))],
        10,
        WindowOptions(stride=2, last=2),
    )
    spread = choose_windows(windows, 4)
    assert [w.index for w in spread] == [0, 11, 23, 34]
    assert choose_windows(windows, None) == windows


def test_joined_documents_keep_their_byte_counts():
    parts = [
        TokenizedDocument("a", np.array([1, 2]), np.array([1.0, 4.0])),
        TokenizedDocument("b", np.array([3]), np.array([2.0])),
    ]
    assert join_documents(parts).byte_ends.tolist() == [1.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("task", "lengths", "parts"),
    [
        (Perplexity(protocol="slide"), (12,), ["protocol='slide'", "slide_press, slide_yarn"]),
        (Perplexity(protocol="last_k", last=None), (12,), ["last=null", "protocol=stream_sink"]),
        (Perplexity(protocol="stream_sink", last=12), (12,), ["last=12", "12"]),
        (Perplexity(protocol="last_k", last=12), (12,), ["last=12", "12"]),
        (Perplexity(max_tokens=10), (12,), ["max_tokens=10", "12"]),
        (Perplexity(), (14,), ["14 must be a multiple of stride=4", "nearest: 12, 16"]),
        (Perplexity(), (4,), ["4 must be a multiple of stride=4", "nearest: 8, 12"]),
    ],
)
def test_settings_that_cannot_work_raise_input_error_with_the_way_out(task, lengths, parts):
    with pytest.raises(InputError) as error:
        task.check(Limits(lengths, stride=4), "tasks.2")
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_the_fake_has_the_losses_that_the_references_use():
    model = BigramModel()
    tokens = np.array([[0, 5, 9, 2]])
    losses = model.nll(tokens, first=1, lengths=[4])
    assert losses[0, 2] == TABLE[5, 9] + 2.0 / 2 == token_loss([0, 5], 9)


def test_the_interval_is_unknown_for_one_document_and_infinite_where_the_loss_is():
    def records(*losses):
        fixed = {"nan": 0, "scored": 1, "weight": 1.0}
        return [{**fixed, "nll": loss, "document": n} for n, loss in enumerate(losses)]

    task = Perplexity(protocol="slide_press")
    assert all(math.isnan(end) for end in task.interval(records(2.0)))
    assert task.interval(records(800.0, 800.0)) == (math.inf, math.inf)
    assert task.interval(records(2.0, 2.0)) == pytest.approx((math.e**2, math.e**2))


@pytest.mark.parametrize(
    ("protocol", "field"),
    [("slide_press", "windows_per_document"), ("slide_full", "min_tokens")],
)
def test_settings_that_a_protocol_does_not_use_raise_input_error(protocol, field):
    task = Perplexity(protocol=protocol, **{field: 2})
    with pytest.raises(InputError, match=f"tasks.0.{field}=2 has no effect on {protocol}"):
        task.check(Limits((1024,)), "tasks.0")
    task = dataclasses.replace(task, protocol="last_k")
    task.check(Limits((1024,)), "tasks.0")


def test_a_text_is_released_before_the_bytes_of_its_tokens_are_counted(tmp_path, monkeypatch):
    class Text(str):  # can be referred to weakly
        pass

    decode, seen, alive = readers.decode, [], []

    def decoded(*args, **options):
        text = Text(decode(*args, **options))
        seen.append(weakref.ref(text))
        return text

    def byte_ends(*_):
        alive.append([ref() is not None for ref in seen])

    monkeypatch.setattr(readers, "decode", decoded)
    monkeypatch.setattr(TokenizedCorpus, "_byte_ends", byte_ends)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"the text of {name}")
    corpus = TokenizedCorpus(data.documents(str(tmp_path)), ByteTokenizer())
    assert [document.name for document in corpus.documents()] == ["a.txt", "b.txt", "c.txt"]
    assert alive == [[False], [False] * 2, [False] * 3]
