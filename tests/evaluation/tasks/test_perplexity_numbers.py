"""What the scores of perplexity windows become: curves over positions, bits per byte, NaN."""

import math

import numpy as np
import pytest
from evaluation_support import (
    BigramModel,
    ByteTokenizer,
    documents,
    score,
    slide_press,
    texts,
    token_loss,
)

from lcjax.evaluation import Perplexity
from lcjax.evaluation.records import parse, split_costs, to_lines
from lcjax.evaluation.report import differences
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks.perplexity import bin_edges

LENGTH, STRIDE = 12, 4


@pytest.mark.parametrize("bins", ["linear", "log"])
@pytest.mark.parametrize("protocol", ["slide_full", "prefix_yarn"])
def test_sums_by_position_add_up_to_the_totals_and_the_curve_is_right(protocol, bins):
    task = Perplexity(protocol=protocol, position_bins=bins)
    long = texts((700, 650), seed=3)
    records = score(task, Limits((300,), stride=200), length=300, corpus_texts=long)
    for record in records:
        assert math.fsum(record["position_nll"]) == pytest.approx(record["nll"], rel=1e-6)
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
        assert nll == pytest.approx(np.mean(losses), rel=1e-6)


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
    broken = task.summarise([record for record in records if record["nan"]])
    assert math.isnan(broken["value"]) and math.isnan(broken["value_without_nan"])


def test_the_standard_error_of_the_loss_is_that_of_a_ratio_over_documents():
    """Documents of 1 and 2 windows: sums 2 and 10 of weights 1 and 4, so a mean of 12 / 5."""
    task = Perplexity()
    (record, *_) = score(task, Limits((LENGTH,), stride=STRIDE))
    windows = [(0, 1.0, 6.0), (1, 3.0, 9.0), (1, 1.0, 3.0)]  # document, weight, nll of 3 tokens
    records = [
        record | {"document": document, "weight": weight, "nll": nll, "scored": 3, "nan": 0}
        for document, weight, nll in windows
    ]
    found = task.summarise(records)
    assert found["loss"] == pytest.approx((2 + 9 + 1) / 5)
    squares = (2 - 1 * 12 / 5) ** 2 + (10 - 4 * 12 / 5) ** 2
    assert found["loss_standard_error"] == pytest.approx(math.sqrt(2 / 1 * squares) / 5)
    assert math.isnan(task.summarise(records[1:])["loss_standard_error"])


def test_the_standard_error_of_a_position_is_that_of_a_ratio_over_its_windows():
    """Means of 2, 4 and 6 nats in windows of 1, 1 and 2 tokens; a second bin of one window."""
    task, record = Perplexity(protocol="prefix_yarn"), {"method": "a", "length": 129, "trained": 1}
    windows = [((2.0, 0.0), (1, 0)), ((4.0, 0.0), (1, 0)), ((12.0, 5.0), (2, 1))]
    records = [
        record | {"document": n, "position_nll": np.float32(sums), "position_count": list(counts)}
        for n, (sums, counts) in enumerate(windows)
    ]
    (curve,) = task.curves(records)
    mean = (2 + 4 + 12) / 4
    squares = (2 - mean) ** 2 + (4 - mean) ** 2 + (12 - 2 * mean) ** 2
    wanted = [math.sqrt(3 / 2 * squares) / 4, math.nan]
    np.testing.assert_allclose(curve["nll"], [mean, 5.0])
    np.testing.assert_allclose(curve["standard_error"], wanted)


def test_sums_by_position_take_four_bytes_each_and_stay_the_same_in_the_file():
    task, limits = Perplexity(protocol="slide_full"), Limits((300,), stride=200)
    records = score(task, limits, length=300, corpus_texts=texts((700, 650), seed=3))
    lines = to_lines(records)
    read, damaged = parse(lines.encode(), b"")
    assert not damaged and len(read) == len(records)
    for record in read.values():
        assert record["position_nll"].nbytes == 4 * (len(bin_edges(300, "linear")) - 1)
        assert "position_count" not in record
    (before,), (after,) = task.curves(records), task.curves(list(read.values()))
    np.testing.assert_array_equal(before["nll"], after["nll"])
    assert to_lines(split_costs(list(read.values()))[0]) == lines


def test_a_curve_skips_nan():
    model = BigramModel()
    model.broken = ByteTokenizer().encode("h")[0]
    task, limits = Perplexity(protocol="prefix_yarn"), Limits((300,))
    settings = {"length": 300, "corpus_texts": texts((700, 650), seed=3)}
    records, whole = (score(task, limits, model=m, **settings) for m in (model, BigramModel()))
    for record in records:
        assert 0 < sum(record["position_count"]) == record["scored"] - record["nan"]
    assert sum(r["nan"] for r in records) > 0
    (broken,), (curve,) = task.curves(records), task.curves(whole)
    np.testing.assert_allclose(broken["nll"], curve["nll"], rtol=0.05)  # a tenth is missing
    lines = b'{"method": "a", "length": 1, "window": 0, "position_nll": "x"}\n[]\n'
    _, damaged = parse(lines, b"")
    assert damaged == [("records", 1), ("records", 2)]


def test_the_unit_of_an_example_is_that_of_its_loss():
    units = {"rolling_lmeval": "nats a word", "slide_press": "nats a token"}
    for protocol, unit in units.items():
        task = Perplexity(protocol=protocol)
        assert task.metric.example_unit == unit
        assert differences.unit(task) == f"Difference in {unit}"
