"""Whole runs with the fake model: comparing, stopping, continuing, refusing."""

import dataclasses
import gc
import importlib
import json
import math
import re
import time
import types
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from evaluation_support import (
    BigramModel,
    ByteTokenizer,
    changed,
    documents,
    fake,
    records,
    slide_press,
    texts,
)
from matplotlib.figure import Figure

import lcjax.data
from lcjax.config import parse
from lcjax.data import TextConfig
from lcjax.errors import InputError
from lcjax.evaluation import EvalConfig, Method, Passkey, Perplexity, RunSection, measure, run
from lcjax.evaluation.command import main
from lcjax.parallel.sharding import Mesh
from lcjax.rope import Linear

pytestmark = pytest.mark.usefixtures("quick")

DRAW = Figure.savefig


def timeless(found):
    cost = ("seconds", "peak_bytes", "peak_bytes_at_most", "compile_seconds", "tokens_per_second")
    return [{k: v for k, v in entry.items() if k not in cost} for entry in found]


def test_a_run_compares_methods_at_all_lengths_and_equals_the_reference(config, capsys):
    report = run(config, load=fake())
    assert [(c["method"], c["length"]) for c in report.cells] == [
        ("base", 12), ("base", 24), ("linear", 12), ("linear", 24),
    ]  # fmt: skip
    docs = documents(1, minimum=24)
    for cell in report.cells[:2]:
        assert cell["value"] == pytest.approx(slide_press(docs, cell["length"], 4), rel=1e-12)
        assert (cell["protocol"], cell["stride"], cell["bos"]) == ("slide_press", 4, "document")
    assert report.cells[2]["value"] < report.cells[0]["value"]
    printed = capsys.readouterr().out
    assert "| linear |" in printed and all(str(path) in printed for path in report.files)


def test_a_model_is_set_up_for_the_length_of_windows_and_not_for_that_of_prompts(
    config, monkeypatch
):
    lengths = {"nll": set(), "generate": set()}
    for name, found in lengths.items():

        def noting(self, *args, found=found, method=getattr(BigramModel, name), **options):
            found.add(self.length)
            return method(self, *args, **options)

        monkeypatch.setattr(BigramModel, name, noting)
    Path(config.data.path, "long.txt").write_text("abc " * 125)
    first, last = (Passkey(name=name, depths=1) for name in ("first", "last"))
    run(dataclasses.replace(config, tasks=(first, Perplexity(), last), lengths=(448,)), load=fake())
    assert lengths == {"nll": {448}, "generate": {None}}


def test_records_contain_their_settings(config):
    run(config, load=fake())
    keys = {"protocol", "length", "stride", "bos", "method", "window", "digest", "trained"}
    keys |= {"source", "start", "size", "first", "weight", "nll", "scored", "nan", "bytes"}
    assert all(keys <= record.keys() for record in records(config))


def test_a_killed_run_continues_to_the_bytes_of_a_whole_one_and_scores_nothing_twice(config):
    def results(folder):
        files = [file for file in folder.rglob("*") if file.suffix in (".json", ".jsonl", ".csv")]
        files += folder.rglob("*.md")
        names = {file.relative_to(folder): file for file in files if file.parent.name != "costs"}
        return {name: file.read_bytes() for name, file in names.items()}

    folder, log = Path(config.run.folder), []
    num_windows = sum(cell["windows"] for cell in run(config, load=fake()).cells)
    whole = results(folder)
    assert {name.parts[0] for name in whole} == {"run.json", "summary.json", "records", "tables"}
    folder.rename(folder.with_name("whole"))
    with pytest.raises(KeyboardInterrupt, match="same command continues"):
        run(config, load=fake(log=log, fail_after=7))
    assert 0 < len(records(config)) < num_windows
    with (folder / "records" / "perplexity_slide_press.jsonl").open("a") as file:
        file.write('{"method": "base", "le')  # what a kill in the middle of a write leaves
    run(config, load=fake(log=log))
    assert results(folder) == whole
    assert {file.suffix for file in (folder / "costs").iterdir()} == {".jsonl", ".csv", ".md"}
    keys = [(r["method"], r["length"], r["window"]) for r in records(config)]
    assert len(keys) == len(set(keys)) == num_windows
    calls = len(log)
    run(config, load=fake(log=log))
    assert len(log) == calls


def test_the_batch_and_the_mesh_may_change_when_a_run_continues(config):
    with pytest.raises(KeyboardInterrupt):
        run(config, load=fake(fail_after=3))
    run(dataclasses.replace(config, batch_size=5, mesh=Mesh(tensor=2)), load=fake())


@pytest.mark.parametrize(
    ("counts", "most", "rows"), [((1,), 16, 1), ((17,), 16, 9), ((3, 5), 4, 3), ((32,), 16, 16)]
)
def test_a_batch_has_no_more_rows_than_the_units_of_a_shape_fill(counts, most, rows):
    units = [types.SimpleNamespace(shape=i) for i, count in enumerate(counts) for _ in range(count)]
    assert importlib.import_module("lcjax.evaluation.run")._num_rows(units, most) == rows


def test_a_large_batch_size_computes_no_filler_rows(config, monkeypatch):
    nll, seen = BigramModel.nll, []

    def count_rows(self, rows, **options):
        seen.append(len(rows))
        return nll(self, rows, **options)

    monkeypatch.setattr(BigramModel, "nll", count_rows)
    run(dataclasses.replace(config, batch_size=16, max_windows=1), load=fake())
    assert set(seen) == {1}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_records_and_the_same_figure_bytes(config, monkeypatch):
    monkeypatch.setattr(Figure, "savefig", DRAW)
    found = []
    for name in ("a", "b"):
        own = dataclasses.replace(
            config,
            run=RunSection(f"{config.run.folder}_{name}"),
            lengths=(500, 1000),
            tasks=(
                Perplexity(protocol="last_k", last=4),
                Passkey(depths=3),
            ),
            data=TextConfig(path=_long(config)),
            stride=4,
            max_windows=3,
            seed=5,
        )
        report = run(own, load=fake())
        drawn = [f for f in report.files if f.suffix == ".png" and f.stem != "cost"]  # of time
        figures = [
            file.with_suffix(kind).read_bytes() for file in drawn for kind in (".png", ".svg")
        ]
        lines = timeless(records(own, "perplexity_last_k") + records(own, "passkey"))
        found.append((figures, lines, timeless(report.cells)))
        assert len(figures) == 6
    assert found[0] == found[1]


def _long(config):
    path = config.data.path + "/long.txt"
    with open(path, "w") as file:
        file.write(texts((1500,))[0][1])
    return path


def test_the_summary_is_strict_json_with_config_versions_and_seed(config):
    model = BigramModel()
    model.broken = ByteTokenizer().encode("h")[0]
    report = run(config, load=lambda section: model)
    text = (report.files[0]).read_text()
    summary = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert summary["seed"] == 0 and summary["config"]["stride"] == 4
    assert {"jax", "numpy", "python"} <= summary["versions"].keys()
    (task,) = summary["tasks"]
    assert task["cells"][0]["value"] is None and task["cells"][0]["nan_tokens"] > 0
    assert math.isnan(report.cells[0]["value"])
    assert "without the windows that gave NaN" in report.text


def test_the_summary_names_the_commit_of_the_code(config, monkeypatch):
    module = importlib.import_module("lcjax.evaluation.report.report")
    summary = run(config, load=fake()).summary
    if (Path(module.__file__).parents[3] / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", summary["commit"])

    def absent(*words, **settings):
        raise FileNotFoundError("git")

    monkeypatch.setattr(module.subprocess, "run", absent)
    assert run(config, load=fake()).summary["commit"] is None


def test_cells_name_the_parts_that_a_budget_counts(config):
    own = dataclasses.replace(config, tasks=(Perplexity(), Passkey(depths=2)), lengths=(500,))
    Path(config.data.path, "long.txt").write_text(texts((1500,))[0][1])
    text, *_, asked = run(own, load=fake(trained=1000)).cells
    assert asked["budget"] == "bos+template+prompt+answer_prefix+new"
    assert "budget" not in text and "decoder" not in text and "decoder" not in asked


def test_a_checkpoint_with_another_tokenizer_gets_its_own_windows(config):
    other = ByteTokenizer(bos_id=None, add_bos=False, fingerprint="bytes without bos")
    sections = []

    def load(section):
        sections.append(section)
        return BigramModel() if section.path is None else BigramModel(other, trained=64)

    methods = (*config.methods, Method("trained", path="runs/1"))
    report = run(dataclasses.replace(config, methods=methods), load=load)
    assert [section.path for section in sections] == [None, "runs/1"]
    cells = {cell["method"]: cell for cell in report.cells if cell["length"] == 24}
    assert cells["trained"]["trained"] == 64 and cells["trained"]["bos"] == "none"
    assert cells["trained"]["tokens_scored"] == cells["base"]["tokens_scored"] - 3
    assert "compare bits per byte" in report.text


def test_a_checkpoint_is_read_once_and_given_up_before_the_next_one(config):
    alive, sections = [], []

    def load(section):
        gc.collect()
        assert [model() for model in alive if model() is not None] == []
        model = BigramModel()
        alive.append(weakref.ref(model))
        sections.append(section.path)
        return model

    methods = (
        Method("a", path="runs/1"),
        Method("base"),
        Method("a2", path="runs/1", rope=Linear(factor=2.0)),
        Method("b", path="runs/2"),
        Method("base2", rope=Linear(factor=2.0)),
    )
    report = run(dataclasses.replace(config, methods=methods, lengths=(12,)), load=load)
    assert sections == ["runs/1", None, "runs/2"]
    assert [cell["method"] for cell in report.cells] == [method.name for method in methods]


def test_the_checkpoint_of_the_model_section_is_not_read_for_methods_with_their_own(config):
    def load(section):
        assert section.path == "runs/1"
        return BigramModel()

    methods = (Method("trained", path="runs/1"),)
    run(dataclasses.replace(config, methods=methods, lengths=(12,)), load=load)


def test_a_run_without_text_fails_before_the_model_is_read_and_passkey_needs_none(config):
    def load(section):
        raise AssertionError("a model was read")

    for data in (TextConfig(), TextConfig(path=config.data.path + "/absent")):
        with pytest.raises(InputError, match=r"data\.path"):
            run(dataclasses.replace(config, data=data), load=load)
    tasks = (Passkey(depths=2),)
    own = dataclasses.replace(config, data=TextConfig(), tasks=tasks, lengths=(500,))
    assert run(own, load=fake(trained=1000)).cells[0]["value"] == 1.0


def test_held_out_documents_are_the_ones_that_are_scored(config):
    data = dataclasses.replace(config.data, holdout=0.4)
    run(dataclasses.replace(config, data=data, lengths=(12,)), load=fake())
    held = {name for name, _ in lcjax.data.documents(data, "validation")}
    assert {record["source"] for record in records(config)} == held
    assert held == {"text0.txt", "text3.txt"}


def test_a_peak_of_the_device_belongs_to_the_cell_in_which_it_rose(config, monkeypatch):
    peaks = {12: 5_000, 24: 9_000}
    model, seen = BigramModel(), [1_000]

    def nll(self, tokens, first=1, lengths=None, score=BigramModel.nll):
        seen.append(max(seen[-1], peaks[tokens.shape[1]]))
        return score(self, tokens, first, lengths)

    monkeypatch.setattr(BigramModel, "nll", nll)
    monkeypatch.setattr(measure, "_device_peak", lambda: seen[-1])
    report = run(config, load=lambda section: model)
    # The longest come first, and of the others a bound is known: the table says that it is one.
    assert [cell["peak_bytes"] for cell in report.cells] == [None, 9_000, None, None]
    assert [cell["peak_bytes_at_most"] for cell in report.cells] == [9_000] * 4
    assert report.text.count(" / ≤ 0.00 |") == 3
    assert "one peak per process" in report.text and "so this is a bound" in report.text
    header, *_, last = (Path(config.run.folder) / "costs/perplexity_slide_press.csv").open()
    cell = dict(zip(header.strip().split(","), last.strip().split(","), strict=True))
    assert (cell["peak_bytes"], cell["peak_bytes_at_most"]) == ("", "9000")


def test_a_table_of_peaks_that_are_all_known_does_not_speak_of_bounds(config, monkeypatch):
    seen = iter(range(1_000, 10**9, 1_000))
    monkeypatch.setattr(measure, "_device_peak", lambda: next(seen))
    assert "≤" not in run(config, load=fake()).text


def test_the_bytes_of_a_cache_are_in_costs_and_absent_where_they_are_unknown(config, monkeypatch):
    folder, name = Path(config.run.folder), "perplexity_slide_press"
    assert {cell["cache_bytes"] for cell in run(config, load=fake()).cells} == {None}
    assert "KV cache" not in (folder / "report.html").read_text()
    monkeypatch.setattr(BigramModel, "cache_bytes", lambda self, length: 1e5 * length / self.bonus)
    config = dataclasses.replace(config, run=RunSection(str(folder), existing="overwrite"))
    report = run(config, load=fake())
    cells = {(cell["method"], cell["length"]): cell["cache_bytes"] for cell in report.cells}
    assert cells == {
        ("base", 12): 6e5,
        ("base", 24): 12e5,
        ("linear", 12): 12e5,
        ("linear", 24): 24e5,
    }
    assert f"{name}_by_cost.png" in [path.name for path in report.files]
    assert "end of its prompt, MB:" in report.text and "| linear | 1.2 | 2.4 |" in report.text
    assert "KV cache, MB" in (folder / "report.html").read_text()
    header, *lines = (folder / f"costs/{name}.csv").open()
    place = header.strip().split(",").index("cache_bytes")
    assert [float(line.split(",")[place]) for line in lines] == list(cells.values())
    assert "cache_bytes" not in (folder / f"records/{name}.jsonl").read_text()
    assert "cache_bytes" not in (folder / f"tables/{name}.csv").read_text()


def test_costs_of_older_runs_have_no_bytes_of_a_cache(config):
    run(config, load=fake())
    folder = Path(config.run.folder)
    file = folder / "costs/perplexity_slide_press.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    old = [{k: v for k, v in line.items() if k not in ("cache_bytes", "crc")} for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in old))
    assert main(["report", str(folder)]) == 0
    again = (folder / "costs/perplexity_slide_press.csv").read_text()
    assert "cache_bytes" in again and "KV cache" not in (folder / "report.html").read_text()


def test_compilation_is_not_counted_as_speed(config, monkeypatch):
    def nll(self, tokens, first=1, lengths=None, score=BigramModel.nll):
        jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) * i, x))(tokens * 1.0)
        return score(self, tokens, first, lengths)

    monkeypatch.setattr(BigramModel, "nll", nll)
    began = time.perf_counter()
    report = run(dataclasses.replace(config, lengths=(12,), max_windows=2), load=fake())
    whole = time.perf_counter() - began
    spent, compiling = (
        sum(cell[key] for cell in report.cells) for key in ("seconds", "compile_seconds")
    )
    assert 0 < spent < compiling < whole


def test_a_checkpoint_that_expects_no_bos_gets_its_own_windows(config):
    def load(section):
        tokenizer = ByteTokenizer()
        if section.path is not None:
            object.__setattr__(tokenizer, "add_bos", False)
        return BigramModel(tokenizer)

    methods = (Method("base"), Method("other", path="runs/1"))
    report = run(dataclasses.replace(config, methods=methods, lengths=(12,)), load=load)
    assert [cell["bos"] for cell in report.cells] == ["document", "none"]


def test_a_checkpoint_with_another_chat_template_gets_its_own_prompts(config):
    class Other(ByteTokenizer):
        def render_chat(self, messages, add_generation_prompt=True):
            return super().render_chat(messages, add_generation_prompt).replace("[user]", "[you]")

    def load(section):
        return BigramModel(ByteTokenizer() if section.path is None else Other(), trained=1000)

    own = dataclasses.replace(
        config,
        methods=(Method("base"), Method("other", path="runs/1")),
        tasks=(Passkey(depths=1, template="chat"),),
        lengths=(600,),
    )
    run(own, load=load)
    digests = {record["method"]: record["digest"] for record in records(own, "passkey")}
    assert digests["base"] != digests["other"]


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        (
            {"lengths": (12, 52, 60)},
            ["lengths: 60 got no window", "longest of 4 documents has 51 tokens"],
        ),
        ({"lengths": (1,)}, ["lengths: 1", "at least 2"]),
        ({"lengths": (12, 12)}, ["lengths: duplicate length 12"]),
        ({"lengths": ()}, ["lengths is empty"]),
        ({"lengths": (13,)}, ["13", "multiple of stride=4", "12, 16"]),
        ({"methods": (Method("a"), Method("a"))}, ["methods: duplicate name a"]),
        ({"tasks": (Perplexity(), Perplexity(last=2))}, ["duplicate name perplexity_slide_press"]),
        (
            {"tasks": (Perplexity(), Perplexity(protocol="press"))},
            ["tasks.1.protocol='press'", "slide_press"],
        ),
        ({"tasks": (Perplexity(name="a/b"),)}, ["tasks.0.name='a/b'"]),
        ({"tasks": (Perplexity(name="cost"),)}, ["tasks.0.name=cost", "every report"]),
        ({"tasks": (Perplexity(last=0),)}, ["tasks.0.last=0 must be a whole number of at least 1"]),
        (
            {"tasks": (Perplexity(windows_per_document=-1),)},
            ["tasks.0.windows_per_document=-1 must be a whole number of at least 1"],
        ),
        (
            {"tasks": (Passkey(depths=0),)},
            ["tasks.0.depths=0 must be a whole number of at least 1"],
        ),
        ({"batch_size": 0}, ["batch_size=0"]),
        ({"max_windows": 0}, ["max_windows=0", "at least 1; null leaves it open"]),
        ({"stride": 0}, ["stride=0"]),
        (
            {"tasks": (Perplexity(protocol="slide_full"),), "lengths": (400,)},
            ["lengths: 400 got no window", "the 4 documents, joined"],
        ),
    ],
)
def test_bad_settings_raise_input_error(config, fields, parts):
    with pytest.raises(InputError) as error:
        changed(config, **fields)()
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert "\n" not in str(error.value)


def test_keys_of_training_rows_are_no_keys_of_an_evaluation():
    with pytest.raises(InputError, match=r"data\.pack='best_fit' is no key of TextConfig"):
        parse(EvalConfig, ["--data.path=x", "--data.pack=best_fit"])


def test_the_config_is_read_from_yaml_and_the_command_line(tmp_path, config):
    file = tmp_path / "eval.yaml"
    file.write_text(
        "model: {path: somewhere}\nlengths: [1024, 2048]\n"
        "tasks:\n- {type: perplexity, protocol: prefix_yarn}\n- {type: passkey, trials: 2}\n"
        "methods:\n- name: base\n- {name: pi, rope: {type: linear, factor: 4}}\n"
    )
    parsed = parse(EvalConfig, [f"--config={file}", "--tasks.1.trials=3", "--lengths=8,16"])
    assert parsed.tasks == (Perplexity(protocol="prefix_yarn"), Passkey(trials=3))
    assert parsed.methods == (Method("base"), Method("pi", rope=Linear(factor=4.0)))
    assert parsed.lengths == (8, 16)
    run(config, load=fake())
    assert parse(EvalConfig, [f"--config={config.run.folder}/config.yaml"]) == config
