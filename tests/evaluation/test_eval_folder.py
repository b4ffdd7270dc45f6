"""The folder of a run: what is gone on with, replaced or refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from evaluation_support import BigramModel, changed, fake, records

from lcjax.checkpoints.build import ModelSection
from lcjax.data import TextConfig
from lcjax.errors import InputError
from lcjax.evaluation import Method, Passkey, Perplexity, RunSection, run
from lcjax.evaluation import records as records_lib
from lcjax.evaluation.results import read
from lcjax.evaluation.retrieval import Knn, RetrievalMethod, RetrieverSection
from lcjax.evaluation.tasks.rag_lm import RagLm
from lcjax.generation.language_model import LanguageModel
from lcjax.parallel.run_lock import RunLock
from lcjax.retrieval import (
    BuildConfig,
    Datastore,
    Document,
    TokenConfig,
    build,
    build_tokens,
)
from lcjax.rope import Linear

pytestmark = pytest.mark.usefixtures("quick")


def test_a_folder_with_another_run_raises_input_error_and_names_the_difference(config):
    run(config, load=fake())
    with pytest.raises(InputError, match=r"stride was 4, is 2"):
        changed(config, stride=2)()
    with pytest.raises(InputError, match=r"methods\.linear\.rope\.factor was 2\.0, is 4\.0"):
        changed(config, methods=(Method("base"), Method("linear", rope=Linear(factor=4.0))))()
    with pytest.raises(InputError, match="run.existing to resume or overwrite"):
        changed(config, run=RunSection(config.run.folder, "refuse"))()
    (Path(config.run.folder) / "run.json").unlink()
    with pytest.raises(InputError, match="unknown run"):
        changed(config)()


def test_records_of_an_older_format_have_other_numbers_and_are_not_continued(config, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(records_lib, "FORMAT", 2)
        run(config, load=fake())
    with pytest.raises(InputError, match=r"record format 2, now 3.*run\.existing=overwrite"):
        run(config, load=fake())


def test_methods_and_tasks_come_and_go_and_only_what_is_new_is_scored(config, tmp_path):
    base, linear = config.methods
    first, last_k = config.tasks[0], Perplexity(protocol="last_k", last=8)
    config, log = dataclasses.replace(config, tasks=(first, last_k)), []
    run(dataclasses.replace(config, methods=(base,), tasks=(first,)), load=fake(log=log))
    alone, calls = records(config), len(log)
    assert {line["method"] for line in alone} == {"base"}
    run(dataclasses.replace(config, methods=(linear,), tasks=(first,)), load=fake(log=log))
    # What the last config left out keeps its records, but no report has them.
    report = read(config.run.folder)
    assert {r["method"] for rs in report.tasks.values() for r in rs} == {"linear"}
    with pytest.raises(InputError, match=r"tasks\.perplexity_slide_press\.last was 256, is 4"):
        changed(config, tasks=(dataclasses.replace(first, last=4),))()
    with pytest.raises(InputError, match=r"methods\.base\.rope\.factor was null, is 4\.0"):
        changed(config, methods=(Method("base", rope=Linear(factor=4.0)), linear))()
    again = []
    run(config, load=fake(log=again))
    assert len(log) > calls
    whole = dataclasses.replace(config, run=RunSection(str(tmp_path / "whole")))
    at_once = []
    run(whole, load=fake(log=at_once))
    assert len(log) + len(again) == len(at_once)
    for task in config.tasks:
        one, other = (sorted(map(str, records(c, task.label))) for c in (config, whole))
        assert one == other
    one, other = (Path(c.run.folder, "tables", f"{last_k.label}.csv") for c in (config, whole))
    assert one.read_text() == other.read_text()


def test_an_old_run_is_replaced_on_request_but_only_once_the_new_one_can_start(config):
    run(config, load=fake())
    other = dataclasses.replace(
        config, stride=2, run=RunSection(config.run.folder, existing="overwrite")
    )
    own = Path(config.run.folder) / "notes.txt"
    own.write_text("mine")
    exported = Path(config.run.folder) / "export" / "ruler"
    exported.mkdir(parents=True)

    def absent(section):
        raise InputError("model.path=absent: no such file or folder")

    before = records(config)
    with pytest.raises(InputError, match="absent"):
        run(other, load=absent)
    assert records(config) == before and exported.exists()
    report = run(other, load=fake())
    assert {record["stride"] for record in records(other)} == {2}
    assert report.cells[0]["windows"] > sum(r["length"] == 12 for r in before) / 2
    assert own.read_text() == "mine" and not exported.exists()


def test_a_run_with_files_of_other_origin_among_its_results_is_not_replaced(config):
    run(config, load=fake())
    folder = Path(config.run.folder)
    other = dataclasses.replace(config, stride=2, run=RunSection(str(folder), "overwrite"))
    for foreign in (
        "records/notes.txt", "tables/plan.docx", "figures/a/b.png", "export/thesis.txt", "tables/x/"
    ):  # fmt: skip
        path = folder / foreign
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if foreign.endswith("/") else path.write_text("mine")
        before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
        with pytest.raises(InputError, match=f"lcjax does not write {foreign} into"):
            run(other, load=lambda _: pytest.fail("a model was read"))
        assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before
        path.rmdir() if foreign.endswith("/") else path.unlink()
        if not any(path.parent.iterdir()):
            path.parent.rmdir()


@pytest.mark.parametrize("text", ["my own text", "{}", '{"name": "my job"}'])
@pytest.mark.parametrize("name", ["run.json", "config.yaml", "summary.json", "report.html"])
def test_a_file_of_a_user_with_the_name_of_one_of_a_run_is_not_replaced(config, name, text):
    folder = Path(config.run.folder)
    folder.mkdir()
    (folder / name).write_text(text)
    with pytest.raises(InputError, match=rf"\b{name}\b"):
        run(config, load=lambda _: pytest.fail("a model was read"))
    assert {path.name: path.read_text() for path in folder.glob("*.*")} == {name: text}


def test_the_folder_of_a_training_run_is_not_written_into(config):
    folder = Path(config.run.folder)
    folder.mkdir()
    (folder / "model.yaml").write_text("width: 8\n")
    with pytest.raises(InputError, match=r"holds a training run; name another, as .*eval"):
        run(config, load=fake())
    assert [path.name for path in folder.iterdir()] == ["model.yaml"]


def test_two_runs_at_once_raise_input_error(config):
    with RunLock(config.run.folder), pytest.raises(InputError, match="is in use by process"):
        run(config, load=fake())
    assert not Path(config.run.folder).exists()
    run(config, load=fake())


@pytest.mark.parametrize(
    "change", [lambda file: file.write_text(file.read_text()[::-1]), Path.unlink]
)
def test_changed_or_missing_text_raises_input_error_when_a_run_continues(config, change):
    run(config, load=fake())
    change(Path(config.data.path, "text3.txt"))
    with pytest.raises(InputError, match="the data has changed"):
        run(config, load=fake())


def test_other_weights_under_the_same_path_raise_input_error_when_a_run_continues(
    config, tmp_path, monkeypatch
):
    def save(seed):
        (tmp_path / "model.gguf").write_bytes(bytes([seed]) * 1000)

    monkeypatch.setattr(LanguageModel, "load", lambda section, mesh=None: BigramModel())
    section = ModelSection(path=str(tmp_path / "model.gguf"))
    config = dataclasses.replace(config, model=section, lengths=(12,))
    save(0)
    run(config)
    before = records(config)
    save(0)
    run(config)
    save(1)
    with pytest.raises(InputError) as error:
        run(config)
    assert "before a change of the weights of base, weights of linear" in str(error.value)
    assert "run.existing=overwrite" in str(error.value) and "\n" not in str(error.value)
    assert records(config) == before
    own = dataclasses.replace(config.run, existing="overwrite")
    run(dataclasses.replace(config, run=own))
    run(config)


@pytest.mark.slow
def test_a_changed_datastore_raises_input_error_when_a_run_continues(config, tmp_path):
    pytest.importorskip("bm25s")
    (tmp_path / "chunks.jsonl").write_text('{"text": "The harbour was quiet in the morning."}\n')
    text = TextConfig(path=str(tmp_path / "passages"))
    (tmp_path / "passages").mkdir()
    (tmp_path / "passages" / "a.txt").write_text(
        "The harbour was quiet. A horse came to the market."
    )
    stores = [str(tmp_path / name) for name in ("words", "tokens")]
    model = ModelSection(preset="tiny")

    def build_stores():
        build(BuildConfig(text, out=stores[0], workers=1))
        build_tokens(TokenConfig(text, model, window=24, overlap=8, out=stores[1]))

    build_stores()
    section = RetrieverSection(stores[0], k=1)
    methods = (
        Method("rag", retrieval=RetrievalMethod(section)),
        Method("knn", knn=Knn(stores[1], k=4)),
    )
    small = {"decoder": 32, "scored": 8, "chunk": 8}
    task = RagLm(path=str(tmp_path / "chunks.jsonl"), retriever=section, **small)
    changes = {"model": model, "methods": methods, "tasks": (task,), "lengths": (40,)}
    config = dataclasses.replace(config, **changes)
    run(config)
    before = records(config, task.label)
    run(config)
    store = Datastore(stores[0])
    store.append([Document("other", "Nothing of the kind")])
    with pytest.raises(InputError) as error:
        run(config)
    assert "a change of the datastore of method rag, datastore of task rag_lm;" in str(error.value)
    (name,) = (p.id for p in store.passages([store.num_rows - 1]))
    store.delete([name])
    with pytest.raises(InputError, match="datastore of method rag"):
        run(config)
    for folder in stores:
        shutil.rmtree(folder)
    build_stores()
    run(config)
    (tmp_path / "passages" / "a.txt").write_text(
        "The harbour was quiet. Nobody came to the market."
    )
    shutil.rmtree(stores[1])
    build_tokens(TokenConfig(text, model, window=24, overlap=8, out=stores[1]))
    with pytest.raises(InputError, match="before a change of the datastore of method knn;"):
        run(config)
    assert records(config, task.label) == before


def test_a_damaged_record_is_named_by_file_and_line(config):
    run(config, load=fake())
    path = f"{config.run.folder}/records/perplexity_slide_press.jsonl"
    with open(path) as file:
        lines = file.readlines()
    lines[1] = "{}\n"
    with open(path, "w") as file:
        file.writelines(lines)
    with pytest.raises(InputError, match=r"slide_press\.jsonl:2 is not a record"):
        run(config, load=fake())


def test_every_flipped_bit_of_the_lines_of_a_file_of_records_is_found():
    rows = [{"method": "a", "length": 9, "window": n, "nll": 0.25 * n} for n in range(2)]
    data = records_lib.record_lines(rows).encode()
    records, damaged = records_lib.parse(data, b"")
    assert not damaged and [record["nll"] for record in records.values()] == [0.0, 0.25]
    assert not any("crc" in record for record in records.values())
    old = records_lib.to_lines(rows).encode()  # of an older version, without checksums
    assert records_lib.parse(old, b"")[0] == records
    for place in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            kept, damaged = records_lib.parse(bytes(flipped), b"")
            assert damaged and all(kept[key] == records[key] for key in kept)
            assert records_lib.parse(data, bytes(flipped))[1], "costs are compared, too"


def test_a_line_of_costs_that_a_kill_has_cut_does_not_spoil_the_next(config):
    run(config, load=fake())
    name = "perplexity_slide_press"
    records, costs = (f"{config.run.folder}/{kind}/{name}.jsonl" for kind in ("records", "costs"))
    with open(records) as file:
        lines = file.readlines()
    with open(records, "w") as file:
        file.writelines(lines[:-1])
    with open(costs, "a") as file:
        file.write('{"method": "base", "le')
    run(config, load=fake())
    with open(costs, "rb") as costs, open(records, "rb") as records:
        assert not records_lib.parse(records.read(), costs.read())[1]


def test_changed_answers_raise_input_error_when_a_run_continues(config):
    task = Passkey(depths=2, trials=1, lengths=(500,))
    config = dataclasses.replace(config, tasks=(task,))
    run(config, load=fake())
    path = Path(config.run.folder) / "records" / "passkey.jsonl"
    lines = [json.loads(line) | {"references": ["1"]} for line in path.read_text().splitlines()]
    path.write_text(
        records_lib.to_lines({k: line[k] for k in line if k != "crc"} for line in lines)
    )
    with pytest.raises(InputError, match="the data has changed"):
        run(config, load=fake())


@pytest.mark.parametrize("name", ["a|b", "$x$", "a\nb"])
def test_method_names_that_break_tables_raise_input_error(name, config):
    methods = (dataclasses.replace(config.methods[0], name=name),)
    with pytest.raises(InputError, match="is a row of tables and figures"):
        run(dataclasses.replace(config, methods=methods), load=fake())
