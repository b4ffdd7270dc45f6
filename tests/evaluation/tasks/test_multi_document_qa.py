"""Multi-document questions by the position of the gold document, from miniature files."""

import csv
import gzip
import io
import json
from pathlib import Path

import numpy as np
import pytest
from benchmark_support import TOKENIZER, plan, scored
from evaluation_support import only_the_run

from lcjax.errors import InputError
from lcjax.evaluation import plots
from lcjax.evaluation.report.tables import to_csv
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks.open_qa import MultiDocumentQa

WORDING = "lcjax:wording/lost_in_the_middle"


def row(index: int, others: int = 9) -> dict:
    gold = {"title": f"G{index}", "text": f"Gold {index}.", "isgold": True}
    ctxs = [{"title": f"T{n}", "text": f"Other {index} {n}.", "isgold": False, "score": "1.5"}
            for n in range(others)]  # fmt: skip
    return {"question": f"who is {index}?", "answers": [f"man {index}"], "ctxs": [gold, *ctxs]}


def write(folder: Path, rows=None, name="nq-open-10_total_documents_gold_at_0.jsonl") -> str:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(map(json.dumps, rows or [row(index) for index in range(3)]))
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return str(folder)


def texts(unit) -> list[str]:
    """The documents of a prompt."""
    return [TOKENIZER.decode(unit.tokens[p.start : p.stop]) for p in unit.prompt.passages]


def test_the_prompts_are_those_of_the_paper(tmp_path):
    path, tasks = write(tmp_path), ("2_at_1", "closed_book")
    options = {"path": path, "total_documents": (2,), "positions": (1,), "tasks": tasks}
    instruction = (
        "Write a high-quality answer for the given question using only the provided search results"
        " (some of which might be irrelevant).\n\n"
    )
    documents = "Document [1](Title: T0) Other 0 0.\nDocument [2](Title: G0) Gold 0.\n\n"
    question = "Question: who is 0?\nAnswer:"
    system = (
        "A chat between a curious user and an artificial intelligence assistant."
        " The assistant gives helpful, detailed, and polite answers to the user's questions. USER: "
    )
    for name, start, first_question, end in (
        ("", "", "", ""),
        ("_query_aware", "", "Question: who is 0?\n\n", ""),
        ("_vicuna", system, "", " ASSISTANT:"),
    ):
        units = plan(MultiDocumentQa(wording=WORDING + name, **options))
        closed, opened = (TOKENIZER.decode(units[i].tokens).removeprefix("\0") for i in (0, 3))
        assert closed == start + question + end
        assert opened == start + instruction + first_question + documents + question + end


def test_the_gold_document_moves_among_others_that_keep_their_order(tmp_path):
    units = plan(MultiDocumentQa(path=write(tmp_path), total_documents=(10, 5), wording=WORDING))
    names = [f"{total}_at_{at}" for total in (10, 5) for at in (0, 4, 9) if at < total]
    assert [unit.fields["dataset"] for unit in units[::3]] == ["oracle", "closed_book", *names]
    for unit in units[6:]:
        total, position, index = (unit.fields[k] for k in ("documents", "position", "line"))
        expected = [f"(Title: T{n}) Other {index - 1} {n}.\n" for n in range(total - 1)]
        expected.insert(position, f"(Title: G{index - 1}) Gold {index - 1}.\n")
        assert texts(unit) == [f"Document [{n}]{text}" for n, text in enumerate(expected, 1)]
        # Each is a passage of its own for memories and REPLUG, which weights all alike.
        assert [p.rank for p in unit.prompt.passages] == list(range(total))
        assert {p.score for p in unit.prompt.passages} == {None}
        assert unit.fields["padded"] == 0
    oracle, closed = units[0], units[3]
    assert texts(oracle) == ["Document [1](Title: G0) Gold 0.\n"] and texts(closed) == []
    assert (closed.fields["documents"], closed.fields["position"]) == (0, None)


def test_a_question_with_too_few_documents_gets_those_of_others_without_its_answer(tmp_path):
    rows = [row(0, 2), row(1, 3), row(2, 4)]
    rows[2]["ctxs"][1]["text"] = "Here is man 0, too."
    path = write(tmp_path, rows)
    options = {"path": path, "positions": (1,), "wording": WORDING}
    unit, *_ = plan(MultiDocumentQa(total_documents=(6,), tasks=("6_documents",), **options))
    # The first document of each following question, then the second, but none with the answer.
    titles = [text.split(") ")[1].strip() for text in texts(unit)]
    added = ["Gold 1.", "Gold 2.", "Other 1 0."]
    assert titles == ["Other 0 0.", "Gold 0.", "Other 0 1.", *added]
    assert unit.fields["padded"] == 3
    with pytest.raises(InputError, match=r"total_documents=12: question 1 lacks 1"):
        plan(MultiDocumentQa(total_documents=(12,), **options))


def test_the_published_files_are_read_as_they_are(tmp_path):
    name = "20_total_documents/nq-open-20_total_documents_gold_at_4.jsonl.gz"
    path = write(tmp_path / "whole", [row(index, 19) for index in range(2)], name)
    assert len(plan(MultiDocumentQa(path=path, total_documents=(20, 10)))) == 2 * (2 + 5 + 3)
    path = write(tmp_path / "oracle", [row(0, 0)], "nq-open-oracle.jsonl.gz")
    assert len(plan(MultiDocumentQa(path=path, tasks=("oracle", "closed_book")))) == 2
    with pytest.raises(InputError, match=r"nq-open-10_total_documents_gold_at_0\.jsonl is missing"):
        plan(MultiDocumentQa(path=path))
    (tmp_path / "whole" / name).write_bytes(b"\x1f\x8b no gzip")
    with pytest.raises(InputError, match="is damaged or cut short"):
        plan(MultiDocumentQa(path=str(tmp_path / "whole"), total_documents=(20,)))


def test_a_question_needs_one_gold_document(tmp_path):
    none, two, empty = row(3), row(4), row(5)
    none["ctxs"][0]["isgold"] = False
    two["ctxs"][1]["isgold"] = True
    empty["answers"] = []
    path = write(tmp_path, [none, row(0), two, empty])
    with pytest.warns(UserWarning) as warned:
        units = plan(MultiDocumentQa(path=path, tasks=("oracle",)))
    assert [unit.fields["line"] for unit in units] == [2]
    said = " ".join(str(warning.message) for warning in warned)
    assert ":1 has 0 passages with isgold" in said and ":3 has 2 passages with isgold" in said
    assert ":4 has a question or an answer that is no text" in said


def test_an_answer_is_right_if_its_first_line_contains_an_alias(tmp_path):
    rows = [{**row(0), "answers": ["nobody", "The Man, 0!"]}] * 4
    task = MultiDocumentQa(path=write(tmp_path, rows), tasks=("oracle",))
    units = plan(task)
    answers = [" It is a man 0 of Leth.\nno", "someone\nman 0", "\nman 0", "  \n The woman 0"]
    records = scored(task, units, answers)
    assert [record["correct"] for record in records] == [1, 0, 0, 0]
    stripped = [record["scores"]["best_subspan_em_stripped"] for record in records]
    assert stripped == [1, 0, 1, 1]  # also inside a word
    assert units[0].fields["max_new_tokens"] == 100


@pytest.fixture
def results(tmp_path):
    """The task, and records of 12 documents: right at the ends, in one of three in the middle."""
    task = MultiDocumentQa(path=write(tmp_path), total_documents=(12,), positions=(0, 5, 11))
    units = plan(task)
    rights = {"oracle": 3, "closed_book": 0, "12_at_0": 3, "12_at_5": 1, "12_at_11": 3}
    answers = [
        f"man {unit.fields['line'] - 1}"
        if unit.fields["line"] <= rights[unit.fields["dataset"]]
        else ""
        for unit in units
    ]
    return task, scored(task, units, answers)


def test_the_number_is_the_mean_over_positions_without_oracle_and_closed_book(results):
    task, records = results
    cell = task.summarise(records)
    assert (cell["oracle"], cell["closed_book"], cell["12_at_5"]) == pytest.approx((1, 0, 1 / 3))
    assert cell["value"] == cell["category:12_documents"] == pytest.approx(7 / 9)
    stripped = [cell[f"{name}:best_subspan_em_stripped"] for name in task._places]
    assert cell["all:best_subspan_em_stripped"] == pytest.approx(np.mean(stripped))
    assert task.metric.title == "Multi-document QA, mean of 3"
    assert cell["12_documents:range"] == pytest.approx(2 / 3)
    assert cell["12_documents:middle_to_ends"] == pytest.approx(1 / 3)
    aggregates = task.aggregates([{**cell, "method": "m", "length": 4000}], records)["m"]
    assert (aggregates["12_at_5"], aggregates["12_documents:range"]) == (33.33, 66.67)
    assert aggregates["12_documents:middle_to_ends"] == 0.33
    weights = task.weights(records)
    values = task.values(records)
    mean = sum(w * v for w, v in zip(weights, values)) / sum(weights)
    assert mean == pytest.approx(cell["value"])
    low, high = task.interval(records)
    assert low <= cell["value"] <= high and high - low > 0.1
    alone = [record for record in records if record["dataset"] == "oracle"]
    assert task.summarise(alone)["value"] == 1 and set(task.weights(alone)) == {1 / 3}


def test_curves_have_a_table_and_a_figure(results, tmp_path):
    task, records = results
    (name, rows), *_ = task.tables(records).items()
    assert name == "by_gold_position" and [row["position"] for row in rows] == [0, None, 0, 5, 11]
    lines = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert [line["documents"] for line in lines] == ["1", "0", "12", "12", "12"]
    assert float(lines[3]["value"]) == pytest.approx(1 / 3)
    # Wilson's interval of 1 of 3.
    assert float(lines[3]["ci_low"]) == pytest.approx(0.0615, abs=1e-4)
    assert float(lines[3]["ci_high"]) == pytest.approx(0.7923, abs=1e-4)
    cell = {"method": "m", "length": 4000, "trained": 4000, **task.summarise(records)}
    with only_the_run():
        files = task.figures([cell], records, tmp_path)
        assert [file.stem for file in files] == [
            "multi_document_qa", "multi_document_qa_by_gold_position"
        ]  # fmt: skip
        one = {k: v for k, v in cell.items() if k not in ("12_at_0", "12_at_11")}
        assert len(task.figures([one], records, tmp_path)) == 1


def test_a_curve_over_positions_is_linear_and_has_a_level_for_each_reference(tmp_path):
    cell = {"method": "yarn", "oracle": 0.75, "10_at_0": 0.5, "10_at_4": 0.25, "10_at_9": 0.5}
    panels = {"10 documents": {f"10_at_{at}": at for at in (0, 4, 9)}}
    levels = {"oracle": "only the gold document", "closed_book": "closed book"}
    path = tmp_path / "a.png"
    plots.over_counts([cell], panels, ("position", "score"), path, scale="linear", levels=levels)
    figure = path.with_suffix(".svg").read_text()
    assert all(f">{text}<" in figure for text in ("yarn", "only the gold document", "0", "4", "9"))
    assert "closed book" not in figure  # the cell has no such score


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"total_documents": ()}, r"total_documents=\(\) must be different whole numbers of at"),
        ({"total_documents": (10, 1)}, "must be different whole numbers of at least 2"),
        ({"positions": (3, 3)}, r"positions=\(3, 3\) must be different whole numbers of at least"),
        ({"positions": (-1,)}, "must be different whole numbers of at least 0"),
        ({"positions": (10,)}, r"has no position of 10 documents, which are counted from 0"),
        ({"tasks": ("10_at_3",)}, r"tasks='10_at_3' must be one of .*10_documents, .*10_at_4"),
    ],
)
def test_settings_that_cannot_be_are_one_line(tmp_path, fields, match):
    task = MultiDocumentQa(path=write(tmp_path), **fields)
    with pytest.raises(InputError, match=match) as error:
        task.check(Limits((4000,)), "tasks.0")
    assert "\n" not in str(error.value)
