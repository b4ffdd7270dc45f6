"""The commands of eval.py on runs of the fake model: pages, scores, exports, data."""

import dataclasses
import json
import shutil
import sys
import types
from pathlib import Path

import pytest
from evaluation_support import TASKS, ByteTokenizer, check_page, fake, run_of_three, with_path

from lcjax.config import dump
from lcjax.errors import InputError
from lcjax.evaluation import Method, Ruler, results, run
from lcjax.evaluation.command import main
from lcjax.evaluation.export import export, make_data
from lcjax.evaluation.records import named_records
from lcjax.evaluation.results import score
from lcjax.files import write_whole


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A finished run of three methods, with its figures drawn."""
    return run_of_three(tmp_path_factory.mktemp("run"), TASKS)


def test_the_report_is_self_contained_and_links_wrong_answers(config):
    page = check_page(Path(config.run.folder) / "report.html")
    text = Path(config.run.folder, "report.html").read_text()
    assert "a &lt;b&gt; &amp; c" in text and "a <b>" not in text
    assert text.count("<svg") == 5  # two tasks over lengths, by depth, cost, the scatter
    assert "examples-passkey-base-1000" in page.links
    summary = json.loads(Path(config.run.folder, "summary.json").read_text())
    said = " ".join(page.said.split())
    for word in ("last_k", "passkey_first_integer", summary["hash"], "seed", "stride: 100"):
        assert word in said
    assert summary["versions"]["jax"] in said
    (wrong,) = [
        cell["value"]
        for cell in summary["tasks"][1]["cells"]
        if (cell["method"], cell["length"]) == ("base", 1000)
    ]
    assert wrong < 1
    assert "prefers-color-scheme: dark" in text


def test_every_cell_has_an_interval_around_its_number(config):
    cells = [
        cell
        for task in json.loads(Path(config.run.folder, "summary.json").read_text())["tasks"]
        for cell in task["cells"]
    ]
    assert len(cells) == 12
    for cell in cells:
        assert cell["ci_low"] <= cell["value"] <= cell["ci_high"]
        assert cell["ci_low"] < cell["ci_high"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, text) for name in ("run.json", "summary.json") for text in ('{"a": ', "", "[]")),
        ("run.json", "[" * 100_000),
        ("run.json", "{}"),
        ("run.json", '{"hash": "a", "config": 5}'),
    ],
)
def test_a_damaged_file_of_a_run_is_named_in_one_line(config, tmp_path, capsys, name, text):
    copied = Path(shutil.copytree(config.run.folder, tmp_path / "out"))
    (copied / name).write_text(text)
    assert main(["report", str(copied)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and f"{copied / name}: " in said[0]


def test_report_makes_the_same_files_from_records_alone(config, tmp_path, capsys):
    copied = Path(shutil.copytree(config.run.folder, tmp_path / "out"))
    before = {f: f.read_bytes() for f in sorted(copied.rglob("*")) if f.is_file()}
    for name in ("tables", "report.html"):
        path = copied / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert main(["report", str(copied)]) == 0
    assert str(copied / "report.html") in capsys.readouterr().out
    assert {f: f.read_bytes() for f in sorted(copied.rglob("*")) if f.is_file()} == before


def test_a_damaged_line_is_named_and_the_others_count(copied, capsys, undrawn):
    path = copied / "records" / "passkey.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], "{broken\n", *lines[1:]]))
    assert main(["report", str(copied)]) == 0
    assert f"{path}:2 is not a record" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "key", "value"),
    [
        ("report", "nll", "x"), ("report", "trained", {}), ("report", "length", "x"),
        ("report", "read", []), ("compare", "nll", None), ("compare", "length", "x"),
    ],
)  # fmt: skip
def test_records_with_fields_of_other_types_are_one_line_unless_they_have_checksums(
    copied, command, key, value, capsys, undrawn
):
    file = copied / "records/perplexity_last_k.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        del line["crc"]
    lines[0][key] = value
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [command, str(copied), *([f"--out={copied}_out"] if command != "report" else [])]
    code, error = main(words), capsys.readouterr().err
    if key == "length":
        assert code == 0 and f"warning: {file}:1 is not a record" in error
    else:
        assert code == 2 and error.splitlines()[-1].startswith(f"error: {file}:1 has no checksum")


def test_errors_of_the_program_do_not_pass_for_damaged_records(config):
    with pytest.raises(KeyError), named_records(config.run.folder):
        raise KeyError("answer")


def test_score_judges_answers_by_another_rule_and_keeps_the_first_records(
    copied, undrawn, monkeypatch
):
    path = copied / "records" / "passkey.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        del record["crc"]
        record["answer"] = f" 0{record['key']}"  # the number is right, its digits are not
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    before = path.read_bytes()
    monkeypatch.setattr("lcjax.evaluation.eval_config.load_tokenizer", lambda _: ByteTokenizer())
    words = ["--model.path=somewhere", "--tasks.1.match=first_digits"]
    with pytest.raises(InputError, match="model affects the prompts"):
        score(copied, None, words)
    with_path(copied)
    for rule, value in (("first_digits", 0.0), ("first_integer", 1.0)):
        out = copied.parent / rule
        report = score(copied, out, [f"--tasks.1.match={rule}"])
        assert {c["value"] for c in report.cells if c["task"] == "passkey"} == {value}
        again = results.read(out)
        (task, lines) = list(again.tasks.items())[1]
        assert task.match == rule and len(lines) == len(records)
        assert {line["protocol"] for line in lines} == {f"passkey_{rule}"}
    assert path.read_bytes() == before
    with pytest.raises(InputError, match="holds records already"):
        score(copied, out, [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks.1.depths=3"], "tasks.1.depths affects.*for passkey, `score` can"),
        (["--tasks.0.last=4"], "tasks.0.last affects.*perplexity_last_k, `score` can"),
        (["--tasks=[{type: passkey}]"], "score keeps the tasks of the run"),
        (["--tasks=[{type: niah}, {type: passkey}]"], "tasks.0.type affects"),
        (["--lengths=[500]"], "lengths affects"),
    ],
)
def test_score_raises_input_error_for_settings_that_affect_prompts(copied, words, message):
    with pytest.raises(InputError, match=message):
        score(copied, None, words)
    assert not (copied.parent / "first_scored").exists()


def test_score_finds_the_records_of_a_task_that_gets_another_name(copied, undrawn, monkeypatch):
    monkeypatch.setattr("lcjax.evaluation.eval_config.load_tokenizer", lambda _: ByteTokenizer())
    with_path(copied)
    report = score(copied, None, ["--tasks.1.name=again"])
    assert {cell["task"] for cell in report.cells} == {"perplexity_last_k", "again"}
    out = copied.parent / "first_scored"
    lines = [(f / "records" / n).read_text().count("\n") for f, n in (
        (copied, "passkey.jsonl"), (out, "again.jsonl"))]  # fmt: skip
    assert lines[0] == lines[1] > 0


def test_exports_have_the_keys_that_official_scorers_read(copied, undrawn, capsys):
    out = copied / "export"
    file = out / "longbench" / "passkey" / "500" / "pred" / "base" / "result.json"
    write_whole(file, "{}")
    words = ["report", str(copied), "--export=lm_eval,longbench,ruler"]
    assert main(words) == 2 and file.read_text() == "{}"
    assert "result.json would be replaced, and is not of this run" in capsys.readouterr().err
    file.unlink()
    assert main(words) == 0
    file.write_text("{}")
    assert main(words) == 0 and file.read_text() != "{}"  # which the first export wrote
    saved = json.loads((out / "lm_eval" / "base" / "results.json").read_text())
    value = saved["results"]["passkey_500"]
    assert 0 <= value["accuracy,none"] <= 1 and saved["n-samples"]["passkey_500"]["original"] == 4
    assert saved["higher_is_better"]["perplexity_last_k_500"] == {"perplexity": False}
    assert len(list((out / "lm_eval" / "base").glob("samples_*.jsonl"))) == 4
    folder = out / "longbench" / "passkey" / "500" / "pred" / "a_b_c"
    (first, *_) = map(json.loads, (folder / "passkey.jsonl").read_text().splitlines())
    assert first.keys() == {"pred", "answers", "all_classes", "length"}
    assert json.loads((folder / "result.json").read_text()).keys() == {"passkey"}
    folder = out / "ruler" / "passkey" / "base" / "500"
    header, names, scores, nulls = (folder / "summary.csv").read_text().splitlines()
    assert (header, names, nulls) == ("0,1", "Tasks,passkey", "Nulls,0/4")
    assert scores == f"Score,{100 * value['accuracy,none']}"
    (first, *_) = map(json.loads, (folder / "passkey.jsonl").read_text().splitlines())
    assert {"index", "pred", "input", "outputs", "others"} <= first.keys()
    run = results.read(copied)
    with pytest.raises(
        InputError, match=r"--export='csv' must be one of lm_eval, longbench, ruler"
    ):
        export(run, ["csv"], out)


def test_data_sets_of_one_name_stay_apart(config, tmp_path, undrawn, monkeypatch):
    """LongBench and ZeroSCROLLS both have a qasper; RULER's two tasks share all names."""
    tasks = tuple(Ruler(name=name, tasks=("vt",), samples=2) for name in ("few", "more"))
    config = dataclasses.replace(
        config, tasks=(tasks[0], dataclasses.replace(tasks[1], samples=3)), methods=(Method("a"),),
        lengths=(4000,), model=dataclasses.replace(config.model, path="somewhere"),
        run=dataclasses.replace(config.run, folder=str(tmp_path / "run")),
    )  # fmt: skip
    monkeypatch.setattr("lcjax.evaluation.eval_config.load_tokenizer", lambda _: ByteTokenizer())
    files = make_data(config, tmp_path / "data")
    run(config, load=fake(trained=600))
    exported = export(results.read(tmp_path / "run"), ["longbench", "ruler"], tmp_path / "export")
    for own in (
        files,
        *([f for f in exported if kind in f.parts] for kind in ("longbench", "ruler")),
    ):
        counts = [f.read_text().count("\n") for f in own if f.name == "vt.jsonl"]
        assert counts == [2, 3]


def test_make_data_writes_the_prompts_of_a_run(config, tmp_path, monkeypatch):
    monkeypatch.setattr("lcjax.evaluation.eval_config.load_tokenizer", lambda _: ByteTokenizer())
    path = dataclasses.replace(config.model, path="somewhere")
    with_path = dataclasses.replace(config, model=path)
    files = make_data(with_path, tmp_path)
    assert [file.relative_to(tmp_path).as_posix() for file in files] == [
        "passkey/500/passkey.jsonl",
        "passkey/1000/passkey.jsonl",
    ]
    lines = [json.loads(line) for line in files[1].read_text().splitlines()]
    records = [r for r in results.read(config.run.folder).tasks[TASKS[1]] if r["length"] == 1000]
    asked = {r["window"]: r["digest"] for r in records}
    assert {line["index"]: line["others"]["digest"] for line in lines} == asked
    for line in lines:
        assert line.keys() >= {"index", "input", "outputs", "length"}
        assert line["outputs"][0] in line["input"] and line["length"] == 1000
    with pytest.raises(InputError, match=r"model\.path is not set"):
        make_data(config, tmp_path)
    assert make_data(with_path, tmp_path) == files
    files[1].write_text("own text")
    with pytest.raises(InputError, match=r"passkey\.jsonl would be replaced"):
        make_data(with_path, tmp_path)
    only = dataclasses.replace(config, model=path, tasks=TASKS[:1])
    with pytest.raises(InputError, match="none of them generates answers"):
        make_data(only, tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reprot", "x"], "reprot is no command; did you mean report?"),
        (["report"], "report: name the folder of a run"),
        (["report", "absent"], "absent holds no run of eval.py"),
        (["report", "absent", "--batch_size=2"], "--batch_size=2: report takes no such option"),
        (["score", "a", "b"], "score takes one run, not 2"),
        (["compare"], "compare: name the folder of a run"),
        (["compare", "a"], "a holds no run of eval.py"),
        (["compare", "a", "b", "--out"], "--out has no value"),
        (["make-data", "a"], "a is not understood"),
        (["run", "--batch=1"], "--batch=1 is unknown; did you mean batch_size?"),
        (["--batch=1"], "--batch=1 is unknown; did you mean batch_size?"),
        (["--tasks=a", "--tasks.0.type=perplexity"], "no key of perplexity, but of lm_eval"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_without_a_word_and_with_run_the_config_is_run(config, tmp_path, monkeypatch, undrawn):
    seen = []
    monkeypatch.setattr("lcjax.evaluation.command.run", seen.append)
    dump(config, tmp_path / "a.yaml")
    words = ["--config", str(tmp_path / "a.yaml"), "--stride=50"]
    assert main(words) == main(["run", *words]) == 0
    assert seen[0] == seen[1] == dataclasses.replace(config, stride=50)


def test_help_without_a_command_names_all_commands_and_then_the_keys(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    monkeypatch.setattr(sys, "argv", ["lcjax-eval"])
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and text.startswith("lcjax-eval [run] --config FILE")
    assert 0 < text.index("lcjax-eval reproduce TABLE") < text.index("--lengths  ")
    assert "lcjax-eval retrieval" in text


def test_help_names_every_command_as_it_was_started(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    for script, start in (("here/eval.py", "python eval.py"), ("bin/lcjax-eval", "lcjax-eval")):
        monkeypatch.setattr(sys, "argv", [script])
        assert main(["report", "--help"]) == 0
        text = capsys.readouterr().out
        assert all(f"{start} {word}" in text for word in ("report", "score", "compare"))
