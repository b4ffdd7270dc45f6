"""Many-shot classification, from TREC's own lines and from LongBench's format."""

import json

import numpy as np
import pytest
from benchmark_support import TOKENIZER, plan, scored
from evaluation_support import BigramModel, losses_behind, only_the_run

from lcjax.errors import InputError
from lcjax.evaluation.report.tables import format_aggregates
from lcjax.evaluation.task import Limits
from lcjax.evaluation.tasks.many_shot import CLASSES, ManyShot

ASKED = [f"{code} What is thing {i} of {code[:3]} ?" for i in range(3) for code in CLASSES]


@pytest.fixture
def trec(tmp_path):
    (tmp_path / "train_5500.label").write_text("\n".join(ASKED), encoding="latin-1")
    test = ["NUM:date When was caf\xe9 made ?", "bad line", "LOC:city Where is it ?"]
    (tmp_path / "TREC_10.label").write_text("\n".join(test), encoding="latin-1")
    return str(tmp_path)


def test_no_class_is_named_within_another():
    assert len(CLASSES) == len(set(CLASSES.values())) == 50
    names = list(CLASSES.values())
    assert not [(a, b) for a in names for b in names if a != b and a in b]


@pytest.mark.filterwarnings("ignore:.*bad.*")
def test_demonstrations_are_drawn_for_each_question_from_the_seed(trec):
    task = ManyShot(path=trec, tasks=("trec_5shots", "trec_50shots"))
    units = plan(task, 6000)
    texts = [TOKENIZER.decode(unit.tokens) for unit in units]
    assert [text.count("\nType: ") for text in texts] == [5, 5, 50, 50]
    assert all(text.endswith("?\nType:") for text in texts)
    assert {unit.fields["references"][0] for unit in units} == {"Date", "City"}
    assert [text == other for text, other in zip(texts, [TOKENIZER.decode(u.tokens)
            for u in plan(task, 6000)])] == [True] * 4  # fmt: skip
    others = plan(ManyShot(path=trec, tasks=task.tasks, seed=1), 6000)
    assert texts[2] not in [TOKENIZER.decode(unit.tokens) for unit in others]
    balanced = plan(ManyShot(path=trec, tasks=("trec_50shots",), balanced=True), 6000)
    for unit in balanced:
        text = TOKENIZER.decode(unit.tokens)
        assert all(f"\nType: {name}\n" in text for name in CLASSES.values())


def test_a_line_of_another_form_is_named(trec):
    with pytest.warns(UserWarning, match=r"TREC_10\.label:2 begins with 'bad'"):
        plan(ManyShot(path=trec, tasks=("trec_1shots",)))


@pytest.mark.filterwarnings("ignore:.*bad.*")
def test_numbers_that_do_not_fit_a_length_are_left_out_there(trec):
    task = ManyShot(path=trec, tasks=("trec_1shots", "trec_100shots"))
    units = plan(task, 600)
    assert {unit.fields["dataset"] for unit in units} == {"trec_1shots"}
    assert [unit.index for unit in units] == [0, 1]
    assert len(plan(task, 9000)) == 4
    with pytest.raises(InputError, match="600 is too short for many_shot with trec_100shots"):
        plan(ManyShot(path=trec, tasks=("trec_100shots",)), 600)


@pytest.mark.filterwarnings("ignore:.*bad.*")
def test_the_first_line_is_scored_and_the_curve_is_drawn(trec, tmp_path):
    task = ManyShot(path=trec, tasks=("trec_1shots", "trec_5shots"))
    units = plan(task)
    records = scored(task, units, lambda text: "\nDate\nCity")
    assert sorted(record["correct"] for record in records) == [0, 0, 1, 1]
    cell = {"method": "m", "length": 4000, "trained": 4000, **task.summarise(records)}
    assert cell["trec_1shots"] == cell["value"] == 0.5
    with only_the_run():
        files = task.figures([cell], records, tmp_path / "figures")
    assert [file.name for file in files] == ["many_shot.png", "many_shot_by_shots.png"]
    assert all(file.exists() for file in files)


@pytest.mark.filterwarnings("ignore:.*bad.*")
def test_the_prompt_is_the_official_one_where_it_lies_beside_the_files(trec, tmp_path):
    task = ManyShot(path=trec, tasks=("trec_1shots",))
    assert {unit.fields["wording"] for unit in plan(task)} == {"lcjax-2"}
    prompts = {"trec": "Types!\n{context}\n{input} Now:"}
    (tmp_path / "dataset2prompt.json").write_text(json.dumps(prompts))
    for unit in plan(task):
        assert unit.fields["wording"] == "official (dataset2prompt.json)"
        text = TOKENIZER.decode(unit.tokens)
        assert text.startswith("Types!\nQuestion: What is thing") and text.endswith("Type: Now:")
    row = {"input": "Question: Who?\nType:", "context": "Question: When?\nType: Date",
           "answers": ["Individual"], "all_classes": ["Date", "Individual"]}  # fmt: skip
    (tmp_path / "trec_1shots.jsonl").write_text(json.dumps(row))
    (unit,) = plan(task)
    expected = f"Types!\n{row['context']}\n{row['input']} Now:"
    assert TOKENIZER.decode(unit.tokens) == expected
    with pytest.raises(InputError, match=r"tasks\.0\.wording"):
        ManyShot(path=trec, wording="best").check(Limits((4000,)), "tasks.0")


@pytest.mark.filterwarnings("ignore:.*bad.*")
def test_classes_are_also_ranked_by_their_likelihood(trec, tmp_path):
    task = ManyShot(path=trec, tasks=("trec_1shots", "trec_5shots"), options=True)
    units, model = plan(task), BigramModel(trained=9000)
    records = [task.score(model, [unit], 2)[0] for unit in units]
    names = list(CLASSES.values())
    options = [TOKENIZER.encode(f" {name}") for name in names]
    for unit, record in zip(units, records):
        losses = np.array([sum(losses_behind(unit.tokens.tolist(), ids)) for ids in options])
        assert record["option_nll"] == pytest.approx(losses.tolist())
        for score, values in (("options", losses), ("options_norm", losses / [*map(len, options)])):
            right = names[int(np.argmin(values))] == unit.fields["references"][0]
            assert record["scores"][score] == right
        assert record["read"] > 2 * len(unit.tokens) and "answer" in record
        whole = {"window": 0, **unit.fields, **record}
        assert task.rescore(whole, TOKENIZER)["scores"] == record["scores"]
    records = [{**u.fields, **r} for u, r in zip(units, records)]
    records[0]["scores"]["options"] = 1.0
    records[1]["scores"]["options"] = 0.0
    cell = {"method": "m", "length": 4000, "trained": 4000, **task.summarise(records)}
    assert cell["trec_1shots:options"] == 0.5 and "all:options_norm" in cell
    with only_the_run():
        assert len(task.figures([cell], records, tmp_path / "figures")) == 2
    assert not ManyShot(path=trec).ranks_options and task.ranks_options


def test_numbers_that_only_some_lengths_or_methods_have_stand_in_the_table(trec, tmp_path):
    task = ManyShot(path=trec, tasks=("trec_1shots", "trec_100shots"))

    def cell(method, length, scores):
        records = [
            {"dataset": name, "correct": score, "answer": "x", "truncated": 0}
            for name, score in scores.items()
        ]
        return {"method": method, "length": length, "trained": 10, **task.summarise(records)}

    cells = [
        cell("a", 600, {"trec_1shots": 1.0}),
        cell("a", 9000, {"trec_1shots": 0.5, "trec_100shots": 1.0}),
        cell("b", 9000, {"trec_1shots": 0.25}),  # another tokenizer: 100 do not fit
    ]
    found = task.aggregates(cells, [])
    assert found["a"]["trec_100shots"] == 100 and found["a"]["flat"] == 75
    assert found["b"]["trec_100shots"] is None and found["b"]["trec_1shots"] == 25
    heads, rows = format_aggregates(found)
    assert rows["b"][heads.index("trec_100shots")] == ""
    with only_the_run():
        assert task.figures(cells, [], tmp_path)[1].exists()


def test_files_in_longbenchs_format_are_read_as_they_are(tmp_path):
    row = {
        "input": "Question: Who?\nType:", "context": "Question: When?\nType: Date",
        "answers": ["Individual"], "all_classes": ["Date", "Individual"],
    }  # fmt: skip
    bad = {**row, "all_classes": None}
    (tmp_path / "trec_10shots.jsonl").write_text("\n".join(map(json.dumps, (bad, row))))
    task = ManyShot(path=str(tmp_path), tasks=("trec_10shots",))
    with pytest.warns(UserWarning, match=r"trec_10shots\.jsonl:1 has all_classes=None"):
        (unit,) = plan(task)
    assert TOKENIZER.decode(unit.tokens).endswith("Type: Date\nQuestion: Who?\nType:")
    assert scored(task, [unit], ["Individual"])[0]["correct"] == 1
    with pytest.raises(InputError, match=r"trec_1shots\.jsonl is missing.*TREC_10\.label"):
        ManyShot(path=str(tmp_path)).check(Limits((4000,)), "tasks.0")
