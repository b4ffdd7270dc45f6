"""Open-domain questions with passages, from miniature files in the format of CEPE's."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from benchmark_support import TOKENIZER, plan, plan_at, scored
from evaluation_support import only_the_run

from lcjax.errors import InputError
from lcjax.evaluation.retrieval import RetrieverSection
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks import local_files
from lcjax.evaluation.tasks.open_qa import OpenQa


def row(index, answers, count=12):
    passages = [{"title": f"T{rank}", "text": f"text {index} {rank}.", "score": str(9 - rank)}
                for rank in range(count)]  # fmt: skip
    return {"question": f"who is number {index}?", "answer": answers, "ctxs": passages}


def write(folder: Path, name="nq-open", test="test.jsonl") -> str:
    (folder / name).mkdir(parents=True)
    rows = [row(index, [f"man {index}", "The Man"]) for index in range(3)]
    (folder / name / test).write_text("\n".join(map(json.dumps, rows)))
    train = [row(index, [f"man {index}"]) for index in range(2, 8)]
    if name != "popqa":
        (folder / name / "train.jsonl").write_text("\n".join(map(json.dumps, train)))
    return str(folder)


def test_demonstrations_come_first_then_as_many_passages_as_named(tmp_path):
    task = OpenQa(path=write(tmp_path), tasks=("nq_1", "nq_5"))
    units = plan(task)
    assert [unit.fields["passages"] for unit in units] == [1] * 3 + [5] * 3
    text = TOKENIZER.decode(units[3].tokens)
    blocks = text.split("\n\n")
    assert [block.split(" ")[0] for block in blocks] == [
        *["Passage", "Question:"] * 2, *["Passage"] * 5, "Question:",
    ]  # fmt: skip
    assert blocks[-1] == "Question: who is number 0?\nAnswer:"
    assert blocks[4:9] == [f"Passage (T{rank}): text 0 {rank}." for rank in range(5)]
    shown = [block for block in blocks[:4] if block.startswith("Question")]
    # Number 2 stands in both files: what is asked is no demonstration.
    assert all("number 2?" not in block and " man " in block for block in shown)
    assert len(units[3].prompt.movable) == 7
    again = plan(OpenQa(path=task.path, tasks=task.tasks))
    assert [u.digest for u in units] == [u.digest for u in again]
    assert [u.digest for u in units] != [u.digest for u in plan(OpenQa(path=task.path,
            tasks=task.tasks, seed=1))]  # fmt: skip


def test_passages_keep_their_place_and_score_and_demonstrations_are_none(tmp_path):
    path = Path(write(tmp_path)) / "nq-open" / "test.jsonl"
    odd = row(9, ["x"])
    odd["ctxs"][3]["score"] = "high"
    path.write_text(path.read_text() + "\n" + json.dumps(odd))
    with pytest.warns(UserWarning, match=r"test\.jsonl:4 .*high"):
        units = plan(OpenQa(path=str(tmp_path), tasks=("nq_5",)))
    assert len(units) == 3
    for unit in units:
        texts = [TOKENIZER.decode(unit.tokens[p.start : p.stop]) for p in unit.prompt.passages]
        index = unit.fields["line"] - 1
        assert texts == [f"Passage (T{rank}): text {index} {rank}.\n\n" for rank in range(5)]
        assert [(p.rank, p.score) for p in unit.prompt.passages] == [(n, 9 - n) for n in range(5)]


class Store:
    """Finds as many passages as there may be, and notes the questions."""

    asked: ClassVar[list] = []

    @classmethod
    def open(cls, folder, **options):
        assert (folder, options["kind"]) == (".", "hybrid")
        return cls()

    def search(self, queries, k):
        self.asked.append((len(queries), k))
        return [
            [
                SimpleNamespace(
                    passage=SimpleNamespace(text=f"about {q} {n}.", title="", id=str(n)),
                    score=float(-n),
                )
                for n in range(k)
            ]
            for q in queries
        ]


def test_a_retriever_finds_the_passages_of_questions_and_of_chosen_demonstrations(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("lcjax.retrieval.retriever.Retriever", Store)
    path = write(tmp_path, "own")
    for name in ("test", "train"):
        file = Path(path, "own", f"{name}.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("\n".join(json.dumps({**row, "ctxs": None}) for row in rows))
    section = RetrieverSection(".", kind="hybrid")
    task = OpenQa(path=path, tasks=("own_0", "own_5"), retriever=section, demonstrations=1)
    units = plan(task)
    closed, opened = units[:3], units[3:]
    (demos, one), (questions, most) = Store.asked
    assert (questions, most, one) == (3, 5, 1) and demos <= 3
    for unit in closed:
        assert not unit.prompt.passages and "about" not in TOKENIZER.decode(unit.tokens)
    for unit in opened:
        text, asked = TOKENIZER.decode(unit.tokens), unit.fields["question"]
        demo = text.split("Question: ")[1].split("\n")[0]
        assert text.startswith(f"Passage: about {demo} 0.\n\nQuestion: ")
        passages = [f"Passage: about {asked} {n}.\n\n" for n in range(6)]
        assert [passage in text for passage in passages] == [True] * 5 + [False]
        assert [p.score for p in unit.prompt.passages] == [0, -1, -2, -3, -4]
    assert [data.name for data in OpenQa().selection()][:2] == ["nq_1", "nq_5"]
    with pytest.raises(InputError, match=r"tasks\.0\.retriever\.folder='none' is no folder"):
        OpenQa(path=path, tasks=("own_5",), retriever=RetrieverSection("none")).check(
            Limits((1000,)), "tasks.0"
        )


def test_a_file_is_read_once_for_all_lengths_and_numbers_of_passages(tmp_path, monkeypatch):
    read, rows = [], local_files.rows
    monkeypatch.setattr(local_files, "rows", lambda *a: read.append(a[0].name) or rows(*a))
    plans = plan_at(OpenQa(path=write(tmp_path), tasks=("nq_1", "nq_5")), (2000, 3000))
    assert [len(units) for units in plans] == [6, 6] and read == ["test.jsonl", "train.jsonl"]


def test_popqas_demonstrations_are_its_other_questions(tmp_path):
    for unit in plan(OpenQa(path=write(tmp_path, "popqa"), tasks=("popqa_1",))):
        text = TOKENIZER.decode(unit.tokens)
        assert text.count(unit.fields["question"]) == 1 and text.count("\nAnswer: man") == 2


def test_any_alias_counts_and_other_scores_stand_beside(tmp_path):
    task = OpenQa(path=write(tmp_path), tasks=("nq_1",), demonstrations=0)
    units = plan(task)
    assert all(TOKENIZER.decode(unit.tokens).count("Question:") == 1 for unit in units)
    records = scored(task, units, ["the man", " Man 1.", "man 2 or so"])
    assert [record["correct"] for record in records] == [1, 1, 0]
    assert records[2]["scores"]["substring_match"] == 1
    assert 0 < records[2]["scores"]["f1"] < 1
    cell = task.summarise(records)
    assert (cell["value"], cell["nq_1"]) == pytest.approx((2 / 3, 2 / 3))
    assert cell["nq_1:substring_match"] == 1 and 2 / 3 < cell["all:f1"] < 1
    row = task.aggregates([cell | {"method": "m", "length": 4000}], records)["m"]
    assert (row["nq_1"], row["all:substring_match"]) == (66.67, 100)


def test_the_heading_has_the_name_of_the_task_and_own_sets_two_or_three_passages(
    tmp_path,
):
    task = OpenQa(path=write(tmp_path, "own"), tasks=("own_3",), name="words")
    assert task.heading == "words: Open-domain QA, own_3"
    assert dataclasses.replace(task, name="").heading == "Open-domain QA, own_3"
    assert [len(unit.prompt.passages) for unit in plan(task)] == [3] * 3
    assert "nq_3" not in OpenQa.datasets


def test_passages_are_cut_before_the_question(tmp_path):
    task = OpenQa(path=write(tmp_path), tasks=("nq_10",))
    for unit in plan(task, 350):
        assert unit.fields["size"] <= 350 and unit.fields["truncated"] > 0
        text = TOKENIZER.decode(unit.tokens)
        assert text.endswith(f"{unit.fields['question']}\nAnswer:") and text.startswith(
            "Passage (T0)"
        )
        assert "\n\n... [The other passages are left out]\n\nQuestion: " in text
    assert all("left out" not in TOKENIZER.decode(unit.tokens) for unit in plan(task))


@pytest.mark.filterwarnings("ignore:.*left out")
def test_fewer_examples_are_drawn_and_odd_lines_left_out(tmp_path):
    path = Path(write(tmp_path)) / "nq-open" / "test.jsonl"
    good = row(7, ["x"])
    bad = [{**good, "ctxs": [{"title": "no text"}]}, {**good, "answer": None}]
    bad += [{**good, "answer": [7]}, {**good, "question": 7}, {**good, "ctxs": None}]
    path.write_text("\n".join([path.read_text(), *map(json.dumps, bad)]))
    task = OpenQa(path=str(tmp_path), tasks=("nq_1",), max_examples=2)
    with pytest.warns(UserWarning, match=r"test\.jsonl:4 has a passage without a text") as warned:
        units = plan(task)
    assert len(units) == 2
    said = " ".join(str(warning.message) for warning in warned)
    assert all(f"test.jsonl:{line} has" in said for line in range(4, 9))


def test_missing_files_are_named(tmp_path):
    task = OpenQa(path=write(tmp_path), tasks=("nq_1",))
    (tmp_path / "nq-open" / "train.jsonl").unlink()
    with pytest.raises(InputError, match=r"train\.jsonl is missing.*CEPE"):
        task.check(Limits((1000,)), "tasks.0")
    with pytest.raises(InputError, match=r"popqa.test\.jsonl is missing"):
        OpenQa(path=task.path, tasks=("popqa",)).check(Limits((1000,)), "tasks.0")


def test_the_curve_over_passages_has_a_panel_for_each_set(tmp_path):
    task = OpenQa(path="", tasks=("nq_1", "nq_5", "popqa_5"))
    cell = {"method": "m", "length": 4000, "trained": 4000, "value": 0.5}
    cells = [cell | {"nq_1": 0.25, "nq_5": 0.75, "popqa_5": 0.5}, cell | {"length": 10}]
    with only_the_run():
        files = task.figures(cells, [], tmp_path)
        assert [file.name for file in files] == ["open_qa.png", "open_qa_by_passages.png"]
        single = [cell | {"nq_5": 0.75}]
        assert [file.name for file in task.figures(single, [], tmp_path)] == ["open_qa.png"]
