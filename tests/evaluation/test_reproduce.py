"""Tables of papers run again: scales, published numbers beside those of a run, what is missing."""

import csv
import dataclasses
import itertools
import re

import numpy as np
import pytest

from lcjax import config as config_lib
from lcjax.errors import InputError
from lcjax.evaluation import cli, reproduce, study
from lcjax.evaluation.config import EvalConfig
from lcjax.evaluation.report import published
from lcjax.evaluation.report.published import Published, Row
from lcjax.evaluation.run import check, run

TABLES = [(name, scale) for name in reproduce.names() for scale in reproduce.SCALES]


@pytest.mark.parametrize("name, scale", TABLES)
def test_the_config_of_every_table_and_scale_is_valid(name, scale):
    config = reproduce.config_at(name, scale)
    missing = reproduce._missing_tasks(config, {})
    for reason in missing.values():
        assert re.search("is no file|is no folder|does not exist|is missing", reason)
    tasks = tuple(task for task in config.tasks if task.label not in missing)
    if tasks:
        check(dataclasses.replace(config, tasks=tasks, published=()))
    study.trainings(config)
    labels = {task.label for task in config.tasks}
    for index, table in enumerate(config.published):
        table.check(config.tasks, [method.name for method in config.methods], f"published.{index}")
    assert config.published and {table.task for table in config.published} <= labels
    lengths = {at for table in config.published for _, at in table.columns if at is not None}
    assert lengths & set(config.lengths)
    assert str(config.run.folder) == f"runs/reproduce/{name}/{scale}"


@pytest.mark.slow
@pytest.mark.parametrize("name", reproduce.names())
def test_a_table_runs_at_the_scale_tiny(name, tmp_path, capsys):
    words = [name, "--scale", "tiny", f"--run.folder={tmp_path / 'run'}"]
    assert cli.main(["reproduce", *words]) == 0
    with (tmp_path / "run/tables/published.csv").open() as file:
        lines = list(csv.DictReader(file))
    config = reproduce.config_at(name, "tiny")
    expected = {
        (table.task, row.method, length, value)
        for table in config.published
        for row in table.rows
        for length, value in zip(table.lengths, row.values)
        if value is not None
    }
    actual = {
        (x["task"], x["method"], int(x["published_length"]), float(x["published"])) for x in lines
    }
    assert actual == expected
    runs = [line for line in lines if line["length"]]
    assert runs and all(line["value"] for line in runs)
    for line in runs:
        difference = float(line["value"]) - float(line["published"])
        assert float(line["difference"]) == pytest.approx(difference)
    assert "→ this run" in capsys.readouterr().out
    assert "Published numbers" in (tmp_path / "run/report.html").read_text()


TABLE = Published(
    task="ppl",
    source="a paper",
    lengths=(4096, 8192),
    run_lengths=(64, None),
    rows=(Row("a", (5.0, 6.0)), Row("b", (4.0, None)), Row("c", (4.0, 7.0))),
)


def test_numbers_stand_beside_those_of_the_length_that_stands_for_theirs():
    cells = [
        {"task": "ppl", "method": "a", "length": 64, "value": 5.5},
        {"task": "ppl", "method": "b", "length": 64, "value": float("nan")},
        {"task": "ppl", "method": "c", "length": 4096, "value": 9.0},
    ]
    records = published.comparisons(TABLE, cells)
    values = {(r["method"], r["published_length"]): (r["value"], r["difference"]) for r in records}
    assert values.pop(("b", 4096))[1] is None
    assert values == {
        ("a", 4096): (5.5, 0.5), ("a", 8192): (None, None),
        ("c", 4096): (None, None), ("c", 8192): (None, None),
    }  # fmt: skip
    assert published.grid(TABLE, records) == [
        ["method", "4,096 → 64", "8,192 → –"],
        ["a", "5.0 → 5.5", "6.0 → –"],
        ["b", "4.0 → –", ""],
        ["c", "4.0 → –", "7.0 → –"],
    ]


def test_the_order_of_methods_is_compared_pair_by_pair():
    random = np.random.default_rng(0)
    records = [
        {"published_length": length, "published": float(p), "value": float(v)}
        for length in (1, 2)
        for p, v in random.integers(0, 4, (6, 2))
    ]
    agreed = count = 0
    for one, other in itertools.permutations(records, 2):
        if one["published_length"] == other["published_length"]:
            paper, run = one["published"] < other["published"], one["value"] < other["value"]
            if one["published"] != other["published"] and one["value"] != other["value"]:
                count, agreed = count + 0.5, agreed + 0.5 * (paper == run)
    assert published.same_order(records) == (agreed, count)


FILE = """
title: a table
needs: {books: the books of a paper}
model: {preset: tiny}
methods:
  - {name: base}
  - {name: long, path: runs/yarn_7b_32k/model, rope: {type: yarn, factor: 8}}
tasks:
  - {type: perplexity, name: books, corpus: books}
  - {type: perplexity, name: code, corpus: "python:stdlib"}
lengths: [4096]
published:
  - {task: books, source: it, lengths: [4096], rows: [{method: long, values: [5.0]}]}
  - {task: code, source: it, lengths: [4096], rows: [{method: base, values: [4.0]}]}
scales:
  paper:
  tiny:
    columns: {4096: 64}
    methods: {long: {path: null, rope: {type: ntk, alpha: 2}}}
    tasks: {books: null}
"""


@pytest.fixture
def table(tmp_path):
    (tmp_path / "mine.yaml").write_text(FILE)
    return str(tmp_path / "mine.yaml")


def test_a_scale_changes_entries_by_name(table):
    config = reproduce.config_at(table, "tiny", ["--stride=8"])
    assert [task.label for task in config.tasks] == ["code"] and config.stride == 8
    assert config.lengths == (64,) and config.methods[1].path is None
    assert config.methods[1].rope.type == "ntk"  # the other type has other fields
    assert [table.task for table in config.published] == ["code"]
    assert config.published[0].columns == [(4096, 64)]
    paper = reproduce.config_at(table, "paper")
    assert paper.lengths == (4096,) and paper.methods[1].rope.type == "yarn"


def test_what_is_missing_is_named_with_the_way_to_get_it_or_left_out(table, capsys):
    with pytest.raises(InputError, match=r"method long: .*--config configs/yarn_7b_32k.yaml"):
        reproduce.parse([table, "--scale", "paper"])
    config = reproduce.parse([table, "--scale=paper", "--skip_missing"])
    assert [method.name for method in config.methods] == ["base"]
    assert [task.label for task in config.tasks] == ["code"]
    assert [[row.method for row in table.rows] for table in config.published] == [["base"]]
    assert "it needs the books of a paper" in capsys.readouterr().err
    with pytest.raises(InputError, match="all of them are left out"):
        reproduce.parse([table, "--scale=paper", "--skip_missing", "--tasks.1.corpus=nowhere"])


@pytest.mark.parametrize(
    "words, match",
    [
        (["--scale=tiny"], "name a table"),
        (["lceg/table2"], "add --scale paper, smollm2 or tiny"),
        (["lceg/table2", "--scale"], "none of paper"),
        (["lceg/table2", "--scale=7b"], "none of paper"),
        (["lceg/tabel2", "--scale=tiny"], "did you mean lceg/table2"),
        (["lceg/table2", "lceg/table2", "--scale=tiny"], "takes one table"),
        (["lceg/table2", "--scale=tiny", "--lenght=3"], "unknown"),
        (["lceg/table2", "--scale=tiny", "--config=x.yaml"], "came before"),
        (["{table}", "--scale=smollm2"], "has no scale smollm2; it has paper, tiny"),
    ],
)
def test_bad_words_are_one_line(words, match, table):
    with pytest.raises(InputError, match=match) as error:
        reproduce.parse([word.format(table=table) for word in words])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"task": "other"}, "published.0.task=other is none of the tasks perplexity_slide_press"),
        ({"rows": [{"method": "x", "values": [1.0]}]}, "published.0.rows: x is none"),
        ({"rows": [{"method": "base", "values": []}]}, "0 values for 1 lengths"),
        ({"run_lengths": [1, 2]}, "must name one length for each"),
    ],
)
def test_published_numbers_name_tasks_methods_and_lengths_of_the_config(change, match):
    entry = {"task": "perplexity_slide_press", "source": "it", "lengths": [64], "rows": []} | change
    with pytest.raises(InputError, match=match):
        check(config_lib.parse(EvalConfig, [], tree={"published": [entry]}))


def test_without_a_table_all_are_listed(capsys):
    assert cli.main(["reproduce"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in reproduce.names())


def test_a_task_reads_its_own_corpus_as_data_says(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"{name} " * 200)
    tasks = [
        {"type": "perplexity", "name": name, "corpus": str(tmp_path / name)}
        for name in ("one", "two")
    ]
    tree = {
        "model": {"preset": "tiny"}, "lengths": [64], "stride": 32, "max_windows": 1,
        "tasks": tasks,
        "data": {"path": str(tmp_path / "none")}, "run": {"folder": str(tmp_path / "run")},
    }  # fmt: skip
    config = config_lib.parse(EvalConfig, [], tree=tree)
    report = run(config)
    assert [cell["task"] for cell in report.cells] == ["one", "two"]
    assert report.cells[0]["value"] != report.cells[1]["value"]
    alone = dict(tree, tasks=[{"type": "perplexity"}], data={"path": str(tmp_path / "two")})
    alone["run"] = {"folder": str(tmp_path / "alone")}
    again = run(config_lib.parse(EvalConfig, [], tree=alone))
    assert again.cells[0]["value"] == report.cells[1]["value"]
    tree["tasks"] = [{"type": "passkey", "corpus": str(tmp_path / "one")}]
    with pytest.raises(InputError, match="reads no text; leave it out"):
        check(config_lib.parse(EvalConfig, [], tree=tree))
