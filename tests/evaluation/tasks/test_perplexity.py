"""Every protocol against a reference that looks at one token after another."""

import math

import numpy as np
import pytest
from evaluation_support import (
    TABLE,
    BigramModel,
    ByteTokenizer,
    documents,
    slide_press,
    texts,
    token_loss,
)

from lcjax.errors import InputError
from lcjax.evaluation import Perplexity
from lcjax.evaluation.corpus import Corpus, Document
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks.perplexity import bin_edges
from lcjax.evaluation.tasks.windows import PROTOCOLS, Options, choose, join, lay

LENGTH, STRIDE = 12, 4


def score(task, limits, length=LENGTH, tokenizer=None, batch=3, corpus_texts=None, model=None):
    """What the runner does for one method and length, without its files."""
    tokenizer = tokenizer or ByteTokenizer()
    model = model or BigramModel(tokenizer)
    task.check(limits, "tasks.0")
    units = task.plan(Corpus(corpus_texts or texts(), tokenizer), length, limits)
    records = []
    for shape in dict.fromkeys(unit.shape for unit in units):
        group = [unit for unit in units if unit.shape == shape]
        for start in range(0, len(group), batch):
            chunk = group[start : start + batch]
            scores = task.score(model, chunk, batch)
            for unit, found in zip(chunk, scores, strict=True):
                facts = {"method": "fake", "trained": 32, "window": unit.index}
                records.append({**facts, **unit.facts, **found})
    return records


def slide_full(docs, length, stride, drop):
    stream = [token for doc in docs for token in doc]
    starts, start = [], 0
    while start < len(stream) - length if drop else start <= len(stream) - length:
        starts.append(start)
        start += stride
    if drop:
        del starts[-1]
    means = []
    for start in starts:
        window = stream[start : start + length]
        means.append(np.mean([token_loss(window[:i], window[i]) for i in range(1, length)]))
    return 2.71828 ** np.mean(means)


def last_k(docs, length, stride, last, per_document):
    means = []
    for doc in docs:
        start, count = 0, 0
        while start + length <= len(doc) and (not per_document or count < per_document):
            window = doc[start : start + length]
            scored = [token_loss(window[:i], window[i]) for i in range(length - last, length)]
            means.append(np.mean(scored))
            start, count = start + stride, count + 1
    return math.exp(np.mean(means))


def prefix_yarn(docs, length, bos):
    means = []
    for doc in docs:
        text = doc[:length] if bos else doc[: length - 1]
        means.append(np.mean([token_loss(text[:i], text[i]) for i in range(1, len(text))]))
    return math.exp(np.mean(means))


@pytest.mark.parametrize("bos", ["auto", "never"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"protocol": "slide_press"}, lambda d, b: slide_press(d, LENGTH, STRIDE)),
        ({"protocol": "slide_full"}, lambda d, b: slide_full(d, LENGTH, STRIDE, True)),
        (
            {"protocol": "slide_full", "drop_last_window": False},
            lambda d, b: slide_full(d, LENGTH, STRIDE, False),
        ),
        (
            {"protocol": "slide_full", "first_documents": 2},
            lambda d, b: slide_full(d[:2], LENGTH, STRIDE, True),
        ),
        ({"protocol": "last_k", "last": 5}, lambda d, b: last_k(d, LENGTH, STRIDE, 5, 0)),
        (
            {"protocol": "last_k", "last": 3, "windows_per_document": 1},
            lambda d, b: last_k(d, LENGTH, STRIDE, 3, 1),
        ),
        ({"protocol": "prefix_yarn"}, lambda d, b: prefix_yarn(d, LENGTH, b)),
    ],
)
def test_a_protocol_equals_its_reference_token_by_token(options, reference, bos, batch):
    task = Perplexity(bos=bos, **options)
    records = score(task, Limits((LENGTH,), stride=STRIDE), batch=batch)
    expected = reference(documents(bos == "auto", minimum=LENGTH), bos == "auto")
    assert task.summarise(records)["value"] == pytest.approx(expected, rel=1e-12)


def test_protocols_give_different_numbers_on_the_same_losses():
    values = set()
    for protocol in PROTOCOLS:
        task = Perplexity(protocol=protocol, last=4)
        records = score(task, Limits((LENGTH,), stride=STRIDE))
        values.add(round(task.summarise(records)["value"], 3))
    assert len(values) == len(PROTOCOLS)


@pytest.mark.parametrize("size", [2, 7, 11, 12, 13, 15, 16, 17, 50])
@pytest.mark.parametrize("stride", [1, 3, 4, 6])
def test_slide_press_scores_every_token_but_the_first_exactly_once(size, stride):
    windows = lay(
        PROTOCOLS["slide_press"], [Document("d", np.zeros(size))], 12, Options(stride=stride)
    )
    seen = [w.start + place for w in windows for place in range(w.first, w.size)]
    assert sorted(seen) == list(range(1, size))
    assert all(w.start + w.size <= size and w.size <= 12 for w in windows)


@pytest.mark.parametrize(("total", "count"), [(12, 0), (13, 0), (20, 1), (21, 2), (100, 21)])
def test_slide_full_lays_as_many_windows_as_the_published_loop(total, count):
    windows = lay(PROTOCOLS["slide_full"], [Document("s", np.zeros(total))], 12, Options(stride=4))
    assert len(windows) == max(0, math.ceil((total - 12) / 4) - 1) == count


@pytest.mark.parametrize("bins", ["linear", "log"])
@pytest.mark.parametrize("protocol", ["slide_full", "prefix_yarn"])
def test_sums_by_position_add_up_to_the_totals_and_the_curve_is_right(protocol, bins):
    task = Perplexity(protocol=protocol, position_bins=bins)
    long = texts((700, 650), seed=3)
    records = score(task, Limits((300,), stride=200), length=300, corpus_texts=long)
    for record in records:
        assert math.fsum(record["position_nll"]) == pytest.approx(record["nll"], rel=1e-12)
        assert sum(record["position_count"]) == record["scored"]
    (curve,) = task.curves(records)
    docs = documents(1, long)
    edges = bin_edges(300, bins)
    starts = [r["start"] for r in records]
    sources = docs if protocol == "prefix_yarn" else [docs[0] + docs[1]]
    for low, high, nll in zip(edges[:-1], edges[1:], curve["nll"], strict=True):
        losses = [
            token_loss(
                sources[r["document"]][start : start + place],
                sources[r["document"]][start + place],
            )
            for r, start in zip(records, starts, strict=True)
            for place in range(max(low, 1), high)
        ]
        assert nll == pytest.approx(np.mean(losses), rel=1e-12)


def test_bits_per_byte_count_the_bytes_of_scored_tokens_even_inside_characters():
    text = "naïve café, 東京 — " * 6
    task = Perplexity(protocol="slide_press", bos="always")
    records = score(task, Limits((LENGTH,), stride=STRIDE), corpus_texts=[("d", text)])
    found = task.summarise(records)
    assert math.fsum(r["bytes"] for r in records) == pytest.approx(len(text.encode()))
    ids = [0, *ByteTokenizer().encode(text)]
    total = math.log(slide_press([ids], LENGTH, STRIDE)) * (len(ids) - 1)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / len(text.encode()))


def test_bits_per_byte_are_absent_when_the_tokenizer_rewrites_the_text():
    class Shortening(ByteTokenizer):
        def encode(self, text, *, allow_special=False):
            return super().encode(text.replace("b", ""))

    long, limits = texts((200, 180)), Limits((LENGTH,), stride=STRIDE)
    records = score(Perplexity(), limits, tokenizer=Shortening(), corpus_texts=long)
    assert records and all(record["bytes"] is None for record in records)
    assert math.isnan(Perplexity().summarise(records)["bits_per_byte"])


def test_losses_that_are_not_numbers_are_counted_and_the_rest_is_shown_apart():
    limits, task = Limits((LENGTH,), stride=STRIDE), Perplexity(protocol="last_k", last=2)
    model = BigramModel()
    model.broken = ByteTokenizer().encode("h")[0]
    records = score(task, limits, model=model)
    whole = [record for record in score(task, limits) if not records[record["window"]]["nan"]]
    found = task.summarise(records)
    assert math.isnan(found["value"])
    assert found["value_without_nan"] == pytest.approx(task.summarise(whole)["value"])
    assert found["nan_windows"] == len(records) - len(whole) > 0
    assert found["nan_tokens"] == sum(record["nan"] for record in records)


def test_all_lengths_score_documents_that_reach_the_longest():
    limits = Limits((8, 40), stride=4)
    records = score(Perplexity(), limits, length=8)
    assert {record["source"] for record in records} == {"text3"}
    records = score(Perplexity(min_tokens=8), limits, length=8)
    assert {record["source"] for record in records} == {"text0", "text1", "text2", "text3"}


def test_documents_are_cut_and_counted_as_asked():
    limits = Limits((LENGTH,), stride=STRIDE, max_documents=2)
    records = score(Perplexity(max_tokens=20), limits)
    assert {record["source"] for record in records} == {"text0", "text1"}
    assert sum(record["scored"] for record in records) == 2 * 19


def test_a_batch_always_has_the_compiled_shape():
    model = BigramModel()
    score(Perplexity(), Limits((LENGTH,), stride=STRIDE), model=model, batch=4)
    assert {shape for shape, _ in model.log} == {(4, LENGTH)}
    assert {first for _, first in model.log} == {1, LENGTH - STRIDE}


def test_fewer_windows_are_spread_over_the_corpus_and_do_not_depend_on_chance():
    windows = lay(
        PROTOCOLS["last_k"], [Document("d", np.zeros(100))], 10, Options(stride=2, last=2)
    )
    spread = choose(windows, 4, "spread", 0)
    assert [w.index for w in spread] == [0, 11, 23, 34]
    assert [w.index for w in choose(windows, 3, "first", 0)] == [0, 1, 2]
    assert choose(windows, 5, "random", 7) == choose(windows, 5, "random", 7)
    assert choose(windows, 5, "random", 7) != choose(windows, 5, "random", 8)
    assert choose(windows, None, "first", 0) == windows


def test_joined_documents_keep_their_byte_counts():
    parts = [
        Document("a", np.array([1, 2]), np.array([1.0, 4.0])),
        Document("b", np.array([3]), np.array([2.0])),
    ]
    assert join(parts).byte_ends.tolist() == [1.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("task", "lengths", "parts"),
    [
        (Perplexity(protocol="slide"), (12,), ["protocol='slide'", "slide_press, slide_full"]),
        (Perplexity(select="best"), (12,), ["select='best'", "spread, first, random"]),
        (Perplexity(protocol="last_k", last=12), (12,), ["last=12", "12"]),
        (Perplexity(max_tokens=10), (12,), ["max_tokens=10", "12"]),
        (Perplexity(), (14,), ["14 must be a multiple of stride=4", "nearest: 12, 16"]),
        (Perplexity(), (4,), ["4 must be a multiple of stride=4", "nearest: 8, 12"]),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_way_out(task, lengths, parts):
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
