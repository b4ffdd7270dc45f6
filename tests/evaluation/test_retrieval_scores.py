"""Scores of ranked passages by hand, and the tables of `eval.py retrieval`."""

import csv
import json
import math
import sys
import types

import pytest

from lcjax.evaluation.command import main
from lcjax.evaluation.retriever_scores import hit, ndcg, recall, reciprocal_rank
from lcjax.retrieval.negatives import has_answer

RANKED = [0.0, 2.0, 0.0, 1.0]


def test_scores_equal_those_computed_by_hand():
    assert [hit(RANKED, k) for k in (1, 2, 9)] == [0, 1, 1]
    assert [recall(RANKED, k, 3) for k in (1, 2, 4)] == pytest.approx([0, 1 / 3, 2 / 3])
    assert reciprocal_rank(RANKED) == 0.5
    assert reciprocal_rank([]) == 0
    # Gains 2, 1 and 3 are relevant; the last one was not found.
    best = 3 + 2 / math.log2(3) + 1 / 2
    assert ndcg(RANKED, 10, [2, 1, 3]) == pytest.approx(
        (2 / math.log2(3) + 1 / math.log2(5)) / best
    )
    assert ndcg(RANKED, 2, [2, 1, 3]) == pytest.approx((2 / math.log2(3)) / (3 + 2 / math.log2(3)))
    assert ndcg([3.0, 2.0, 1.0], 10, [1, 2, 3]) == 1
    assert ndcg([1.0, 1.0, 0.0], 1, [1, 1]) == 1, "of as many as are read"


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("The Eiffel-Tower, Paris", "eiffel tower", False),  # the hyphen is a word
        ("The Eiffel - Tower, Paris", "Eiffel-Tower", True),
        ("a category", "cat", False),
        ("It was 3.5 m", "3.5", True),
        ("in N\u00eemes", "NI\u0302MES", True),  # both are decomposed
        ("in Nimes", "N\u00eemes", False),
        ("the U.S. army", "u.s.", True),
        ("\u6771\u4eac\u90fd", "\u4eac", False),  # a run of letters is one word
        ("zero\u200bwidth", "zero", True),  # controls separate words
        ("anything", "", False),
        ("anything", "\u200b ", False),
    ],
)
def test_answers_are_whole_words_after_the_normalisation_of_dpr(text, answer, expected):
    assert has_answer(text, ["nothing", answer]) is expected


PASSAGES = {"a": "The sea is blue.", "b": "A ship, red.", "c": "Grey stones."}


class Store:
    """Ranks passages in one order, or in the other."""

    def __init__(self, kind):
        self.order = sorted(PASSAGES, reverse=kind == "dense")

    @classmethod
    def open(cls, folder, *, kind, encoder, index):
        return cls(kind)

    def search(self, queries, k):
        hits = [types.SimpleNamespace(passage=types.SimpleNamespace(id=n, text=PASSAGES[n]))
                for n in self.order]  # fmt: skip
        return [hits[:k] for _ in queries]


@pytest.fixture
def words(tmp_path, monkeypatch):
    module = types.SimpleNamespace(Retriever=Store)
    monkeypatch.setitem(sys.modules, "lcjax.retrieval.retriever", module)
    rows = [
        {"question": "What is red?", "answer": [["Red"], "crimson"], "relevant": ["b"]},
        {"question": "What is blue?", "answers": ["blue"]},
        {"question": "What is grey?", "relevant": {"c": 2, "a": 1}},
        {"question": "Neither?"},
        {"question": "An empty answer?", "answer": " "},
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    folder = tmp_path.as_posix()
    rows = f"[{{folder: {folder}, kind: sparse}}, {{folder: {folder}, kind: dense, name: far}}]"
    return ["retrieval", f"--path={tmp_path / 'questions.jsonl'}", f"--retrievers={rows}"]


@pytest.mark.filterwarnings("ignore:.*left out")
def test_the_command_shows_how_many_answers_each_retriever_finds(words, tmp_path, capsys):
    assert main([*words, "--k=[1,2,3]", f"--out={tmp_path / 'out'}"]) == 0
    shown = capsys.readouterr().out
    records = json.loads((tmp_path / "out" / "retrieval.json").read_text())
    first, far = records
    assert [record["method"] for record in records] == ["sparse", "far"]
    assert first["questions"] == 3
    assert [first[f"answer_recall@{k}"] for k in (1, 2, 3)] == [0.5, 1, 1]
    assert [far[f"answer_recall@{k}"] for k in (1, 2, 3)] == [0, 0.5, 1]
    assert first["answer_mrr"] == pytest.approx((1 / 2 + 1) / 2)
    assert [first[f"recall@{k}"] for k in (1, 2, 3)] == [0.25, 0.75, 1]
    assert [first[f"hit@{k}"] for k in (1, 2, 3)] == [0.5, 1, 1]
    assert first["mrr"] == pytest.approx((1 / 2 + 1) / 2)
    graded = (1 + 2 / 2) / (2 + 1 / math.log2(3))
    assert first["ndcg@10"] == pytest.approx((1 / math.log2(3) + graded) / 2)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()]
    table = lines.index(["answer recall", "1", "2", "3"])
    assert lines[table + 3] == ["far", "0.0000", "0.5000", "1.0000"]
    assert ["sparse", "0.7500", "0.7500", f"{first['ndcg@10']:.4f}"] in lines
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        f"retrieval.{ending}" for ending in ("md", "json", "csv", "png", "svg")
    }
    rows = list(csv.DictReader((tmp_path / "out" / "retrieval.csv").open()))
    assert float(rows[1]["recall@2"]) == far["recall@2"]


@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--k=[0]"], "k.0=0 must"),
        (["--k=[]"], "k is empty"),
        (["--path=nowhere"], "path='nowhere' is no file"),
        (["--retrievers=[]"], "retrievers is empty"),
        (["--retrievers=[{folder: nowhere}]"], "retrievers.0.folder='nowhere' is no folder"),
        (
            ["--retrievers=[{folder: 'memory://store'}]"],
            "retrievers.0.folder=memory://store must be a local path: its files are mapped",
        ),
        (["--retrievers=[{folder: .}, {folder: .}]"], "duplicate name"),
        (["--max_examples=0"], "max_examples=0"),
        ([f"--out={__file__}"], "cannot be a folder"),
    ],
)
def test_mistakes_are_one_line(words, options, message, capsys):
    assert main([*words, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
