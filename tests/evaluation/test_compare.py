"""What differs between methods and runs: in the report of one, and side by side."""

import csv
import dataclasses
import json
import shutil
import types
from pathlib import Path

import pytest
from evaluation_support import TASKS, ByteTokenizer, Page, check_page, run_of_three, with_path

from lcjax.errors import InputError
from lcjax.evaluation import LmEval, LongBench, Passkey, Perplexity, RagLm, Ruler, results
from lcjax.evaluation.command import main
from lcjax.evaluation.compare import _by_task, compare
from lcjax.evaluation.records import Store
from lcjax.evaluation.report import differences
from lcjax.evaluation.results import score
from lcjax.files import seal


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A finished run of three methods."""
    return run_of_three(tmp_path_factory.mktemp("run"), TASKS, drawn=False)


def test_compare_finds_a_difference_that_is_there_and_none_that_is_not(config, copied, undrawn):
    path = copied / "records" / "passkey.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = compare([config.run.folder, copied])
    assert {d["mean"] for d in found.differences if d["row"].startswith("first: ")} == {0.0}
    path = copied / "records" / "perplexity_last_k.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        del record["crc"]
        record["nll"] -= 0.5 * record["scored"]
        record["digest"] = record["digest"] if record["window"] else "another"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    out = copied.parent / "both"
    assert main(["compare", config.run.folder, str(copied), f"--out={out}"]) == 0
    with (out / "differences.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["task"] == "perplexity_last_k"]
    own = [row for row in rows if row["row"] == "first: base"]
    assert {row["against"] for row in own} == {"out: base"}
    assert all(float(row["mean"]) == pytest.approx(-0.5) for row in own)
    windows = {r["window"] for r in records if (r["method"], r["length"]) == ("base", 500)}
    assert int(own[0]["count"]) == len(windows - {0})  # only where both read the same tokens
    page = check_page(out / "compare.html")
    assert "All settings that decide a number are the same" in page.said


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        (LmEval(tasks=("a", "b")), {"metric": "acc", "lower": [], "by_size": True}),
        (LongBench(), {}),
        (Ruler(), {}),
        (RagLm(), {"nan": 0, "scored": 1}),
    ],
)
def test_a_paired_difference_is_that_of_the_shown_means(task, fields):
    """Of two data sets the larger one gains 1, the other nothing; numbers of documents repeat."""
    rows = [("hotpotqa", n) for n in range(3)] + [("trec", 0)]

    def records(gain):
        return [
            {
                **fields, "window": i, "digest": str(i), "protocol": "p", "document": n,
                "dataset": name, "task": name, "domain": name,
                "correct": value, "nll": value,
            }
            for i, (name, n) in enumerate(rows)
            for value in [gain * (name == "hotpotqa")]
        ]  # fmt: skip

    found = differences.of_records(task, records(0.0), records(1.0))
    assert found.mean == pytest.approx(0.5) and found.count == 4
    drawn = len({task.cluster(record) for record in records(0.0)} - {None})
    assert drawn == (4 if isinstance(task, LmEval) else 3)


def test_methods_of_one_run_are_compared_with_the_first_or_a_named_one(copied, undrawn, capsys):
    cells = {
        (cell["method"], cell["length"]): cell["value"]
        for cell in compare([copied]).cells
        if cell["task"] == "passkey"
    }
    for words, base in ((["--against=linear"], "linear"), ([], "base")):
        assert main(["compare", str(copied), *words]) == 0
        with (copied.parent / "compare_first" / "differences.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["task"] == "passkey"]
        others = {"base", "linear", "a <b> & c"} - {base}
        assert {(row["row"], row["against"]) for row in rows} == {(name, base) for name in others}
        for row in rows:
            length = int(row["length"])
            gap = cells[row["row"], length] - cells[base, length]
            assert float(row["mean"]) == pytest.approx(gap) and row["count"] == "4"
    page = check_page(copied.parent / "compare_first" / "compare.html")
    assert "Paired differences" in page.said and "All settings" not in page.said
    capsys.readouterr()
    assert main(["compare", str(copied), "--against=bas"]) == 2
    assert "--against=bas is no row; did you mean base?" in capsys.readouterr().err


def test_a_run_of_one_method_has_nothing_to_compare(copied, undrawn):
    file = copied / "config.yaml"
    text = file.read_text()
    start, end = text.index("methods:"), text.index("tasks:")
    file.write_text(f"{text[:start]}methods: [{{name: base}}]\n{text[end:]}")
    for path in (copied / "records").iterdir():
        kept = [line for line in path.read_text().splitlines() if '"method": "base"' in line]
        path.write_text("".join(f"{line}\n" for line in kept))
    with pytest.raises(InputError, match="first has one method, base; name a second run"):
        compare([copied])
    report = results.rebuild(results.read(copied))
    assert "paired" not in report.text
    assert "Paired differences" not in (copied / "report.html").read_text()


def test_the_report_compares_methods_with_the_first_example_by_example(config):
    folder = Path(config.run.folder)
    with (folder / "tables" / "differences.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["task"] for row in rows} == {"perplexity_last_k", "passkey"}
    assert {row["against"] for row in rows} == {"base"}
    assert {row["row"] for row in rows} == {"linear", "a <b> & c"}
    cells = {
        (cell["method"], cell["length"]): cell["loss"]
        for cell in json.loads((folder / "summary.json").read_text())["tasks"][0]["cells"]
    }
    (own,) = [
        r for r in rows if (r["task"][:4], r["row"], r["length"]) == ("perp", "linear", "500")
    ]
    gap = cells["linear", 500] - cells["base", 500]
    assert float(own["mean"]) == pytest.approx(gap) and float(own["low"]) <= gap <= float(
        own["high"]
    )
    text = (folder / "tables" / "perplexity_last_k.md").read_text()
    assert f"linear against base | {gap:+.3f}" in " ".join(text.split())
    page = check_page(folder / "report.html")
    assert (
        page.said.count("Paired differences") == 2 and f"{gap:+.3f}".replace("-", "−") in page.said
    )


def test_tasks_of_the_harness_are_also_compared_one_by_one():
    task = LmEval(tasks=("a", "b"))

    def records(gains):
        fixed = {"protocol": "p", "metric": "acc", "lower": [], "by_size": True, "digest": ""}
        return [
            {**fixed, "window": i, "document": i, "dataset": name, "task": name, "correct": value}
            for i, (name, value) in enumerate(
                (name, value) for name in gains for value in gains[name]
            )
        ]

    groups = {
        "base": {8: records({"a": [0, 0, 0, 0], "b": [1, 1]})},
        "ntk": {8: records({"a": [1, 0, 0, 0], "b": [0, 1]})},
    }
    gaps = differences.paired_differences(task, groups, {"ntk": "base"})
    means = {gap.part: (gap.difference.mean, gap.difference.count) for gap in gaps}
    assert means == {"": (-0.125, 6), "a": (0.25, 4), "b": (-0.5, 2)}
    (_, table) = differences.text(task, gaps)
    assert "ntk against base, b" in table and "-0.5000 [" in table
    (line,) = [line for line in differences.lines(task, gaps) if line["part"] == "a"]
    assert (line["row"], line["against"], line["count"]) == ("ntk", "base", 4)
    alone = {name: {8: own[8][:4]} for name, own in groups.items()}
    assert [gap.part for gap in differences.paired_differences(task, alone, {"ntk": "base"})] == [
        ""
    ]


def test_what_is_judged_by_two_rules_is_compared_in_two_tables(copied, undrawn, monkeypatch):
    monkeypatch.setattr("lcjax.evaluation.eval_config.load_tokenizer", lambda _: ByteTokenizer())
    with_path(copied)
    out = copied.parent / "by_tokens"
    score(copied, out, ["--tasks.1.match=token_ids"])
    found = compare([copied, out])
    assert all(
        f"passkey accuracy ({rule})" in found.text for rule in ("first_integer", "token_ids")
    )
    across = [d for d in found.differences if d["row"][:5] != d["against"][:5]]
    assert {d["task"] for d in across} == {"perplexity_last_k"}
    assert {cell["task"] for cell in found.cells} == {
        "perplexity_last_k", "passkey_first_integer", "passkey_token_ids",
    }  # fmt: skip


def test_other_rules_of_prompts_and_scores_are_in_tables_of_their_own(copied, undrawn, monkeypatch):
    monkeypatch.setattr(Passkey, "table_settings", ("trials",))
    twin = shutil.copytree(copied, copied.parent / "twin")
    text = (twin / "config.yaml").read_text()
    assert text.count("trials: 2\n") == 1
    (twin / "config.yaml").write_text(text.replace("trials: 2\n", "trials: 3\n"))
    found = compare([copied, twin])
    across = [d for d in found.differences if d["row"][:5] != d["against"][:5]]
    assert {d["task"] for d in across} == {"perplexity_last_k"}
    assert len({cell["task"] for cell in found.cells}) == 3
    with pytest.raises(InputError, match=r"tasks\.1\.trials affects the prompts"):
        score(copied, twin.parent / "out", ["--tasks.1.trials=3"])


def test_runs_in_folders_of_one_name_are_compared_in_a_folder_beside_the_first(copied, undrawn):
    twin = shutil.copytree(copied, copied.parent / "other" / "first")
    settings = (twin / "run.json").read_text()
    changes = (('"stride": 100', '"stride": 99'), ('"batch_size": 2', '"batch_size": 7'))
    for before, after in changes:
        assert before in settings
        settings = settings.replace(before, after)
    (twin / "run.json").write_text(json.dumps(seal(json.loads(settings))))
    found = compare([copied, twin])
    said = Page(found.files[0].read_text(encoding="utf-8")).said
    assert "stride" in said and "batch_size" not in said
    assert {file.parent for file in found.files} == {
        copied.parent / f"compare_{copied.parent.name}_first_other_first"
    }


def test_protocols_and_selections_of_tasks_are_in_tables_of_their_own():
    def labels(*tasks):
        runs = {str(n): types.SimpleNamespace(tasks={task: []}) for n, task in enumerate(tasks)}
        return [task.label for task, _ in _by_task(runs)]

    ppl = Perplexity(name="ppl", protocol="slide_full")
    other = dataclasses.replace(ppl, protocol="last_k")
    assert labels(ppl, other) == ["ppl_slide_full", "ppl_last_k"]
    assert labels(other, dataclasses.replace(other, last=64)) == ["ppl_256", "ppl_64"]
    assert labels(ppl, dataclasses.replace(ppl, max_tokens=100)) == ["ppl"]
    for task in (Ruler(name="x", tasks=("vt", "cwe")), LongBench(name="x", tasks=("trec",))):
        assert labels(task, dataclasses.replace(task, tasks=())) == [
            f"x_{'_'.join(task.tasks)}", "x_all",
        ]  # fmt: skip


def in_folder(config, folder):
    return dataclasses.replace(config, run=dataclasses.replace(config.run, folder=str(folder)))


def test_outputs_of_other_origin_are_not_replaced(config, copied, undrawn, tmp_path):
    for name in ("compare.md", "compare.html", "figures/passkey.png"):
        out = tmp_path / name.replace("/", "_")
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text("mine")
        with pytest.raises(InputError, match="did not write it; name another folder"):
            compare([config.run.folder, copied], out=out)
        assert [f.read_text() for f in out.rglob("*") if f.is_file()] == ["mine"]
    for name in ("summary.json", "tables/mine.md"):
        out = tmp_path / name.replace("/", "_")
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text("mine")
        with pytest.raises(InputError, match="is not the folder of an evaluation"):
            score(copied, out)
        with pytest.raises(InputError, match="is not the folder of an evaluation"):
            Store(in_folder(config, out), {})
    with pytest.raises(InputError, match="was removed during the run"):
        Store(in_folder(config, tmp_path / "new"), {}).check_kept()
