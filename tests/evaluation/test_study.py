"""Studies: what is compared is trained first, once, and nothing of another training is mixed in."""

import dataclasses
import json
import random
from pathlib import Path

import draccus
import pytest
from evaluation_support import ByteTokenizer, fake, only_the_run

from lcjax.checkpoints.build import ModelSection
from lcjax.config import dump, parse
from lcjax.errors import InputError
from lcjax.evaluation import EvalConfig, Passkey, RunSection, run, study
from lcjax.evaluation.eval_config import sections
from lcjax.evaluation.export import export, make_data
from lcjax.evaluation.records import FORMAT, Store
from lcjax.evaluation.results import read as read_run
from lcjax.evaluation.results import score
from lcjax.training import TrainConfig

BASE = """
model: {preset: tiny, remat: none}
data: {path: TEXTS, length: 32, threads: 0, prefetch: 0}
train: {steps: 3, batch_size: 8, lr: 3e-3, warmup_steps: 1, log_every: 1, export: false}
"""
STUDY = """
study: {base: FOLDER/base.yaml, extend: FOLDER/extend.yaml}
methods:
  - {name: base}
  - {name: PI, train: [model.rope.type=linear, model.rope.factor=2]}
  - name: PI, bf16
    train: [model.rope.type=linear, model.rope.factor=2, train.positions.type=bf16]
tasks: [{type: perplexity}]
lengths: [32, 64]
stride: 16
max_documents: 1
data: {path: FOLDER/texts}
run: {folder: FOLDER/out}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "texts").mkdir()
    pick = random.Random(0)
    for index in range(8):
        words = (pick.choice(["the", "cat", "sat", "on", "a", "mat"]) for _ in range(40))
        (tmp_path / "texts" / f"{index}.txt").write_text(" ".join(words))
    base = BASE.replace("TEXTS", str(tmp_path / "texts"))
    extend = base.replace("preset: tiny, ", "").replace("length: 32", "length: 64")
    (tmp_path / "base.yaml").write_text(base)
    (tmp_path / "extend.yaml").write_text(extend.replace("steps: 3", "steps: 2"))
    (tmp_path / "study.yaml").write_text(STUDY.replace("FOLDER", str(tmp_path)))
    return tmp_path


def read(folder, *overrides, old="", new=""):
    file = folder / "study.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1) if old else text)
    return parse(EvalConfig, ["--config", str(file), *overrides])


def stub(monkeypatch, stop_at=None):
    """Stands in for training: notes who was trained and leaves what a finished run leaves."""
    done = []

    def train(config: TrainConfig):
        done.append(Path(config.run.folder).name)
        if done[-1] == stop_at:
            return {"stopped": "SIGTERM"}
        path = Path(config.run.folder, "checkpoints", str(config.train.steps))
        path.mkdir(parents=True, exist_ok=True)
        dump(config, Path(config.run.folder, "config.yaml"))
        return {"stopped": None}

    monkeypatch.setattr(study, "train", train)
    return done


@pytest.mark.slow
def test_one_command_trains_the_base_and_the_methods_and_writes_the_table(folder, capsys):
    report = run(read(folder))
    cells = {(cell["method"], cell["length"]): cell["value"] for cell in report.cells}
    assert {method for method, _ in cells} == {"base", "PI", "PI, bf16"}
    assert all(1 < value < 260 for value in cells.values())
    # Rows of 64 have whole positions in bfloat16, but not all frequencies.
    assert len({cells[method, 64] for method in ("base", "PI", "PI, bf16")}) == 3
    text = (folder / "out" / "tables" / "training.md").read_text()
    assert "| base " in text and "| PI " in text and "8 x 64 x 2 " in text
    assert text in capsys.readouterr().out
    times = {file: file.stat().st_mtime_ns for file in (folder / "out").glob("**/checkpoints/*")}
    assert len(times) == 3
    again = run(read(folder))
    assert [cell["value"] for cell in again.cells] == [cell["value"] for cell in report.cells]
    assert times == {file: file.stat().st_mtime_ns for file in times}, "trained once only"


def test_the_table_of_trainings_reads_logs_with_validation_and_of_queries(folder):
    trainings = study.trainings(read(folder))
    for training in trainings.values():
        log = Path(training.run.folder) / "metrics.jsonl"
        log.parent.mkdir(parents=True)
        rows = [
            {"step": 1, "loss": 2.0, "queries": 8},
            {"step": 3, "loss": 1.5, "queries": 8, "queries_per_second": 0.1},
            {"step": 3, "validation_loss": 1.7, "validation_tokens": 64},
        ]
        log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    rows = [line.split() for line in study.table(trainings).splitlines()[-2:]]
    assert [row[-4:-1] for row in rows] == [["2.7", "|", "1.500"]] * 2  # minutes, last loss


def test_stages_come_first_in_their_order_and_stay_in_their_own_folders(folder, monkeypatch):
    for name, source in (("encoder", "preset: tiny"), ("main", f"path: {folder}/encoder_run")):
        text = BASE.replace("TEXTS", f"{folder}/texts").replace("preset: tiny", source)
        (folder / f"{name}.yaml").write_text(f"{text}run: {{folder: {folder}/{name}_run}}\n")
    stages = f"study: {{stages: [{folder}/encoder.yaml, {folder}/main.yaml]}}"
    config = read(folder, f"--model.path={folder}/main_run", old=STUDY.splitlines()[1].replace(
        "FOLDER", str(folder)), new=stages)  # fmt: skip
    config = dataclasses.replace(config, methods=config.methods[:1])
    found = study.trainings(config)
    assert list(found) == ["stage encoder", "stage main"]
    for path in ("main_run", "main_run/model"):  # will be there
        model = dataclasses.replace(config.model, path=f"{folder}/{path}")
        study.check_paths(dataclasses.replace(config, model=model), found)
    main = found["stage main"]
    without_text = main.replace(data=dataclasses.replace(main.data, path=f"{folder}/no_text"))
    with pytest.raises(InputError, match="no_text"):  # before the first stage is trained
        study.check_paths(config, found | {"stage main": without_text})
    done = stub(monkeypatch)
    assert study.run(config, found) and done == ["encoder_run", "main_run"]
    ready = study.with_trained(config)
    assert ready.model.path == f"{folder}/main_run" and ready.methods == config.methods


def test_stages_of_one_file_name_are_both_trained(folder):
    files = [folder / part / "encoder.yaml" for part in "ab"]
    for file in files:
        file.parent.mkdir()
        text = BASE.replace("TEXTS", f"{folder}/texts")
        file.write_text(f"{text}run: {{folder: {file.parent}/run}}\n")
    config = read(folder)

    def found(*stages):
        own = dataclasses.replace(config.study, stages=tuple(map(str, stages)))
        return study.trainings(dataclasses.replace(config, study=own))

    assert [name for name in found(*files) if "stage" in name] == [f"stage {f}" for f in files]
    with pytest.raises(InputError, match=r"study.stages.1=.*encoder.yaml is the name of another"):
        found(files[0], files[0])


@pytest.mark.parametrize("name", ["base", "stage one"])
def test_a_method_does_not_take_the_place_of_another_training(folder, name):
    (folder / "one.yaml").write_text((folder / "base.yaml").read_text() + "run: {folder: one}")
    config = read(folder, old="study: {", new=f"study: {{stages: [{folder}/one.yaml], ")
    methods = (dataclasses.replace(config.methods[1], name=name),)
    with pytest.raises(InputError, match=f"methods.0.name={name} is the name of another training"):
        study.trainings(dataclasses.replace(config, methods=methods))


def test_a_stopped_study_resumes_its_unfinished_trainings(folder, monkeypatch):
    config = read(folder)
    found = study.trainings(config)
    done = stub(monkeypatch, stop_at="PI")
    assert not study.run(config, found)
    assert done == ["base", "PI"], "nothing starts after what was stopped"
    done = stub(monkeypatch)
    assert study.run(config, found)
    assert done == ["PI", "PI_bf16"]
    assert study.run(config, found) and len(done) == 2
    assert study.run(read(folder, "--run.existing=overwrite"), found)
    assert done == ["PI", "PI_bf16", "base", "PI", "PI_bf16"]


def test_overwriting_an_evaluation_keeps_the_trainings_of_stages(folder, monkeypatch):
    stage = (folder / "base.yaml").read_text() + f"run: {{folder: {folder}/one}}"
    (folder / "one.yaml").write_text(stage)
    config = read(folder, old="study: {", new=f"study: {{stages: [{folder}/one.yaml], ")
    done = stub(monkeypatch)
    assert study.run(config, study.trainings(config))
    assert done[0] == "one"
    done.clear()
    again = dataclasses.replace(config, run=dataclasses.replace(config.run, existing="overwrite"))
    trainings = study.trainings(again)
    assert study.run(again, trainings)
    assert "one" not in done and done

    stage = trainings["stage one"]
    changed = stage.replace(data=dataclasses.replace(stage.data, length=stage.data.length + 8))
    with pytest.raises(InputError, match=r"replaces no training outside of its run\.folder"):
        study.check_paths(again, trainings | {"stage one": changed})


def test_evaluations_with_one_folder_share_the_trainings_of_methods(folder, monkeypatch):
    shared = folder / "shared"
    first = read(folder, old="study: {", new=f"study: {{folder: {shared}, ")
    done = stub(monkeypatch)
    assert study.run(first, study.trainings(first))
    assert done == ["base", "PI", "PI_bf16"]
    assert [m.path for m in study.with_trained(first).methods[1:]] == [
        str(shared / "PI"), str(shared / "PI_bf16"),
    ]  # fmt: skip

    done.clear()  # the base model is at the same place
    again = read(folder, "--lengths=[32]", "--run.existing=overwrite")
    assert study.run(again, study.trainings(again))
    assert done == ["base"], "overwriting a run leaves what others read"

    done.clear()
    other = read(folder, "--methods.1.train=[model.rope.type=linear,model.rope.factor=4]")
    with pytest.raises(InputError, match=r"shared/PI.*rope\.factor"):
        study.check_paths(other, study.trainings(other))


def test_every_method_begins_with_the_base_and_differs_in_its_own_keys_only(folder):
    trainings = study.trainings(read(folder))
    assert list(trainings) == ["base", "PI", "PI, bf16"]
    plain, rounded = trainings["PI"], trainings["PI, bf16"]
    assert plain.model.path == rounded.model.path == trainings["base"].run.folder
    assert Path(plain.run.folder).parent == folder / "out" / "trained"
    settings = study.settings(trainings)
    differing = {
        key
        for key in settings["PI"].keys() | settings["PI, bf16"].keys()
        if settings["PI"].get(key) != settings["PI, bf16"].get(key)
    }
    assert differing == {f"train.positions.{name}" for name in ("type", "bits", "frequencies")}
    assert "run.folder" not in settings["PI"]


def test_without_a_base_a_training_begins_with_the_model_of_its_own_config(folder):
    extend = (folder / "extend.yaml").read_text().replace("model: {", "model: {path: warm_up, ")
    (folder / "extend.yaml").write_text(extend)
    config = read(folder, "--model.path=original", old=f"base: {folder}/base.yaml, ")
    config = dataclasses.replace(
        config,
        methods=(
            *config.methods[:2],
            dataclasses.replace(config.methods[2], train=("model.path=other",)),
        ),
    )
    paths = {name: training.model.path for name, training in study.trainings(config).items()}
    assert paths == {"PI": "warm_up", "PI, bf16": "other"}


def test_keys_may_follow_the_config_of_a_stage(folder):
    stage = f"{folder}/base.yaml --train.steps=7 --run.folder={folder}/seven"
    config = read(folder, old="study: {base", new=f"study: {{stages: ['{stage}'], base")
    trainings = study.trainings(config)
    assert list(trainings) == ["stage base", "base", "PI", "PI, bf16"]
    training = trainings["stage base"]
    assert (training.train.steps, training.run.folder) == (7, f"{folder}/seven")
    assert trainings["base"].train.steps == 3


def test_keys_may_follow_the_config_of_the_methods_trainings(folder):
    config = read(folder)
    before = study.trainings(config)["PI"]
    extend = f"{config.study.extend} --train.steps=7 --data.length=96"
    section = dataclasses.replace(config.study, extend=extend)
    after = study.trainings(dataclasses.replace(config, study=section))["PI"]
    assert (after.train.steps, after.data.length) == (7, 96) != (before.train.steps, 96)
    assert after.model == before.model and after.run.folder == before.run.folder


def test_a_method_may_have_a_memory_of_its_own():
    memory = {"type": "shared_llm", "layers": 2}
    tree = {
        "model": {"path": "a", "memory": {"type": "cepe"}, "dtype": "bfloat16"},
        "methods": [
            {"name": "usual"},
            {"name": "two", "memory": memory},
            {"name": "other", "path": "b", "memory": memory},
            {"name": "its own", "path": "b"},
        ],
    }
    found = sections(parse(EvalConfig, [], tree=tree))
    assert [section.path for section in found] == ["a", "a", "b", "b"]
    names = [section.memory and type(section.memory).__name__ for section in found]
    assert names == ["CepeSection", "SharedLlmSection", "SharedLlmSection", None]
    assert found[1].memory.layers == 2 and {section.dtype for section in found} == {"bfloat16"}


def test_records_of_models_that_were_trained_otherwise_are_not_continued(folder, monkeypatch):
    stub(monkeypatch)
    (folder / "out" / "records").mkdir(parents=True)
    config = read(folder)
    settings = draccus.encode(config) | {"trainings": study.settings(study.trainings(config))}
    settings["trainings"]["PI"]["train.lr"] = 1e-5
    labels = [task.label for task in config.tasks]
    entry = {"config": settings, "hash": "", "format": FORMAT, "labels": labels}
    (folder / "out" / "run.json").write_text(json.dumps(entry, default=str))
    (folder / "out" / "records" / "perplexity_slide_press.jsonl").write_text("")
    with pytest.raises(InputError, match=r"another run \(trainings\.PI\.train\.lr was 1e-05, is"):
        run(config)
    assert not (folder / "out" / "base").exists(), "refused before anything is trained"


def test_trained_methods_may_be_added_to_untrained_ones_and_left_out(folder, monkeypatch):
    stub(monkeypatch)
    config = read(folder)
    settings = draccus.encode(config) | {"trainings": study.settings(study.trainings(config))}
    plain = {key: settings[key] for key in settings if key != "trainings"}
    (folder / "out" / "records").mkdir(parents=True)
    (folder / "out" / "records" / "perplexity_slide_press.jsonl").write_text("")
    for first, second, left in ((plain, settings, {}), (settings, plain, settings["trainings"])):
        labels = [task.label for task in config.tasks]
        entry = {"config": first, "hash": "", "format": FORMAT, "labels": labels}
        (folder / "out" / "run.json").write_text(json.dumps(entry, default=str))
        assert Store(config, second)._earlier.get("trainings", {}).keys() == left.keys()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("base: FOLDER/base.yaml, ", "", "model.path=null: give a checkpoint"),
        ("base.yaml", "bse.yaml", r"study.base: .*bse.yaml does not exist; did you mean base.yaml"),
        ("extend.yaml", "none.yaml", r"methods.1.train: .*none.yaml does not exist"),
        (
            "type=linear, model.rope.factor=2]",
            "type=linaer, model.rope.factor=2]",
            r"methods.1.train: model.rope.type='linaer' is unknown; did you mean linear",
        ),
        (
            "model.rope.factor=2]",
            "model.rope.fator=2]",
            r"methods.1.train: model.rope.fator=.*no key",
        ),
        (", extend: FOLDER/extend.yaml", "", r"methods.1.train=\[.* set study.extend"),
        ("extend: FOLDER", "extend: it's/FOLDER", r"study.extend=.* must be a file, and keys"),
        ("extend: FOLDER/extend.yaml", "extend: ''", r"study.extend='' must be a file, and keys"),
        ("base: FOLDER/base", "base: its own/base", r"study.base: .*its own/base.yaml does not"),
        ("study:", "model: {preset: tiny}\nstudy:", "study.base=.* leave model.path"),
        ("name: PI,", "name: PI, path: x,", "methods.1.train: PI has path=x, too"),
        ("factor=2]", "factor=2, model.path=x]", "the study sets the base model"),
    ],
)
def test_invalid_studies_raise_input_error(folder, old, new, message):
    old, new = (text.replace("FOLDER", str(folder)) for text in (old, new))
    with pytest.raises(InputError, match=message) as error:
        run(read(folder, old=old, new=new))
    assert "\n" not in str(error.value)
    assert not (folder / "out").exists()


def test_names_that_make_one_folder_raise_input_error(folder):
    with pytest.raises(InputError, match="'PI bf16' and 'PI, bf16' would both be trained in"):
        run(read(folder, old="name: PI,", new="name: PI bf16,"))


def test_methods_with_the_same_keys_share_one_training(folder):
    config = read(
        folder,
        old="tasks:",
        new="  - {name: PI 4, rope: {type: linear, factor: 4},"
        " train: [model.rope.type=linear, model.rope.factor=2]}\ntasks:",
    )
    assert list(study.trainings(config)) == ["base", "PI", "PI, bf16"]
    _, one, _, other = study.with_trained(config).methods
    assert one.path == other.path and other.rope.factor == 4


def test_a_method_that_is_trained_may_be_read_with_another_pattern(folder):
    ready = study.with_trained(
        read(folder, old="name: PI,", new="name: PI, pattern: {type: sliding, window: 16},")
    )
    method = ready.methods[1]
    assert method.pattern.window == 16 and method.train is None
    assert method.path == str(folder / "out" / "trained" / "PI")
    assert ready.model.path == str(folder / "out" / "base") and ready.study is None


@pytest.mark.slow
def test_a_study_is_scored_again_with_the_tokenizers_of_its_models_and_keeps_its_trainings(
    folder, monkeypatch
):
    stub(monkeypatch)
    tasks = "[{type: passkey, depths: 2, max_new_tokens: 8}]"
    config = read(folder, "--tasks", tasks, "--lengths", "[900]")
    with only_the_run():
        run(config, load=fake(trained=1000))
        moved, opened = folder / "moved", []
        (folder / "out").rename(moved)

        def tokenizer(path):
            opened.append(path)
            return ByteTokenizer()

        monkeypatch.setattr("lcjax.evaluation.eval_config.load_tokenizer", tokenizer)
        report = score(moved, None, ["--tasks.0.match=token_ids"])
    own = [f"{moved}/trained/PI", f"{moved}/trained/PI_bf16"]
    assert opened == [f"{moved}/base", *own]
    exported = export(read_run(moved), ["lm_eval"], folder / "exported")
    scored = report.files[0].parent
    with only_the_run():  # once more, from what was scored: the models lie where they did
        opened.clear()
        score(scored, None)
    assert opened == [f"{moved}/base", *own]
    exported += export(read_run(scored), ["lm_eval"], folder / "exported_again")
    models = {
        json.loads(file.read_text())["config"]["model_args"]
        for file in exported if file.name == "results.json"
    }  # fmt: skip
    named = zip(("base", "trained/PI", "trained/PI_bf16"), ("base", "PI", "PI, bf16"))
    assert models == {f"path={moved}/{where},method={name}" for where, name in named}
    before, after = (
        json.loads((f / "run.json").read_text()) for f in (moved, report.files[0].parent)
    )
    assert after["config"]["trainings"] == before["config"]["trainings"] != {}
    notes = [(f / "tables" / "training.md").read_text() for f in (moved, report.files[0].parent)]
    assert notes[0] == notes[1] and "Trained first" in report.text


def test_another_tokenizer_of_the_config_is_the_one_that_answers_are_read_by(folder, monkeypatch):
    config = EvalConfig(
        model=ModelSection(path="somewhere", tokenizer="elsewhere"),
        tasks=(Passkey(depths=2),), lengths=(900,), run=RunSection(str(folder / "out")),
    )  # fmt: skip
    opened = []

    def tokenizer(path):
        opened.append(path)
        return ByteTokenizer()

    monkeypatch.setattr("lcjax.evaluation.eval_config.load_tokenizer", tokenizer)
    with only_the_run():
        run(config, load=fake(trained=1000))
        score(folder / "out")
        make_data(config, folder / "data")
    assert opened == ["elsewhere"] * 2
