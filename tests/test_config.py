"""Configs: what the file says, what the command line changes, and what a mistake looks like."""

import re
import sys
import types
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import draccus
import pytest

from lcjax import config
from lcjax.attention import KeepAll, Pattern, SnapKV
from lcjax.config.decode import section
from lcjax.errors import InputError
from lcjax.evaluation.eval_config import Method as EvalMethod
from lcjax.models import preset
from lcjax.training.train_config import TrainConfig


@dataclass(frozen=True)
class Rope(draccus.ChoiceRegistry):
    theta: float | None = None


@Rope.register_subclass("linear")
@dataclass(frozen=True)
class Linear(Rope):
    scale: float = 2.0


@Rope.register_subclass("yarn")
@dataclass(frozen=True)
class Yarn(Rope):
    factor: float = 4.0  # target over trained length, 100 % of it
    original_length: int | None = None

    def __post_init__(self):
        if self.factor < 1:
            raise InputError(f"factor={self.factor} must be at least 1")


@dataclass(frozen=True)
class Model:
    path: str = "base"
    rope: Rope | None = None  # how far it reads
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclass(frozen=True)
class Method:
    name: str
    rope: Rope | None = None


@dataclass(frozen=True)
class Ropes:
    ropes: tuple[Rope, ...] = ()


@dataclass(frozen=True)
class Best:
    loss: float


@dataclass(frozen=True)
class Train:
    lr: float = 1e-3
    steps: int = 10  # optimiser updates
    resume: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    best: Best | None = None  # the score to beat


@dataclass(frozen=True)
class Job:
    """Trains a model."""

    model: Model = field(default_factory=Model)
    train: Train = field(default_factory=Train)
    methods: tuple[Method, ...] = ()
    lengths: tuple[int, ...] = (1024,)


FILE = """
model:
  path: small
  rope: {type: yarn, factor: 8, original_length: 4096}
train: {lr: 1e-4}
lengths: [4096, 8192]
methods:
  - name: plain
  - name: stretched
    rope: {type: linear, scale: 2}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(FILE)
    return path


def fails(*argv) -> str:
    with pytest.raises(InputError) as error:
        config.parse(Job, [str(word) for word in argv])
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_file_becomes_typed_dataclasses(file):
    job = config.parse(Job, ["--config", str(file)])
    assert job == Job(
        Model("small", Yarn(factor=8.0, original_length=4096)),
        Train(lr=1e-4),
        (Method("plain"), Method("stretched", Linear(scale=2.0))),
        (4096, 8192),
    )
    assert type(job.model.rope.factor) is float


def test_the_command_line_overrides_the_file_in_either_spelling(file):
    argv = [f"--config={file}", "--train.lr=3e-5", "--train.steps", "7", "--train.resume=true"]
    assert config.parse(Job, argv).train == Train(3e-5, 7, True)


def test_a_list_can_be_given_with_or_without_brackets():
    assert config.parse(Job, ["--lengths=[1,2]"]).lengths == (1, 2)
    assert config.parse(Job, ["--lengths=1,2"]).lengths == (1, 2)
    assert config.parse(Job, ["--lengths=5"]).lengths == (5,)


def test_a_tuple_of_fixed_length_can_be_given_with_or_without_brackets(file):
    assert config.parse(Job, ["--train.betas=0.9,0.95"]).train.betas == (0.9, 0.95)
    assert config.parse(Job, ["--train.betas=[0.5, 1]"]).train.betas == (0.5, 1.0)
    file.write_text("train: {betas: [0.8, 0.9]}\n")
    assert config.parse(Job, ["--config", str(file)]).train.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    "options",
    [{"cls": 3}, {"argv": 5}, {"argv": "--lengths=5"}, {"tree": [1]}, {"is_stored": "no"}],
)
def test_an_argument_of_another_type_is_named(options):
    with pytest.raises(InputError, match=f"^{next(iter(options))}(=| is of type )"):
        config.parse(**{"cls": Job, "argv": []} | options)


def test_one_item_of_a_list_can_be_changed(file):
    job = config.parse(Job, [f"--config={file}", "--methods.1.rope.scale=16"])
    assert job.methods == (Method("plain"), Method("stretched", Linear(scale=16.0)))
    assert "2 items" in fails("--config", file, "--methods.2.name=x")


def test_another_type_on_the_command_line_drops_the_fields_of_the_old_one(file):
    argv = [f"--config={file}", "--model.rope.scale=16", "--model.rope.type=linear"]
    assert config.parse(Job, argv).model.rope == Linear(scale=16.0)


def test_the_same_type_on_the_command_line_keeps_the_fields_of_the_file(file):
    argv = [f"--config={file}", "--model.rope.type=yarn", "--model.rope.factor=2"]
    assert config.parse(Job, argv).model.rope == Yarn(factor=2.0, original_length=4096)


def test_an_optional_section_can_be_given_whole_or_taken_away(file):
    given = config.parse(Job, ["--model.rope={type: yarn, factor: 3}", "--model.rope.theta=5"])
    assert given.model.rope == Yarn(theta=5.0, factor=3.0)
    assert config.parse(Job, [f"--config={file}", "--model.rope=null"]).model.rope is None


def test_text_fields_keep_what_was_typed():
    assert config.parse(Job, ["--model.path=007"]).model.path == "007"
    assert config.parse(Job, ["--model.path=a: b, {c"]).model.path == "a: b, {c"
    assert config.parse(Job, ["--model.path="]).model.path == ""


def test_sections_are_included_relative_to_the_including_file(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "rope.yaml").write_text("type: linear\nscale: 4\n")
    (tmp_path / "parts" / "model.yaml").write_text("path: big\nrope: !include rope.yaml\n")
    (tmp_path / "job.yaml").write_text("model: {<<: !include parts/model.yaml, path: bigger}\n")
    job = config.parse(Job, [f"--config={tmp_path / 'job.yaml'}"])
    assert job.model == Model("bigger", Linear(scale=4.0))


def test_the_recipes_are_listed_with_the_first_lines_of_their_comments(capsys):
    with pytest.raises(SystemExit) as end:
        config.parse(Job, ["--config", "lcjax:"])
    *lines, parts = capsys.readouterr().out.splitlines()
    names = [name for name in config.recipes() if "/" not in name]
    assert end.value.code == 0 and len(lines) == len(names)
    for name, line in zip(names, lines):
        recipe, _, comment = line.partition("  # ")
        assert recipe == f"lcjax:{name}" and config.recipes()[name].read_text()[2:].startswith(
            comment
        )
    assert "lcjax:model/" in parts


@pytest.mark.parametrize("name", ["quickstart_train", "data/cepe_sources"])
def test_a_recipe_of_the_library_is_read_by_its_name_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = Path(__file__).parents[1] / "configs" / f"{name}.yaml"
    assert config.read_yaml(f"lcjax:{name}") == config.read_yaml(recipe)
    Path("mine.yaml").write_text(f"<<: !include lcjax:{name}\nmine: !include lcjax:{name}\n")
    tree = config.read_yaml(recipe)
    assert config.read_yaml("mine.yaml") == tree | {"mine": tree}


@pytest.mark.parametrize(
    "name, line",
    [
        ("lcjax:quickstart_trian", "no recipe of lcjax; did you mean quickstart_train? or quick"),
        ("lcjax:smollm2_135m", "no recipe of lcjax; did you mean model/smollm2_135m? "),
        ("lcjax:quickstart_train.yaml", "no recipe of lcjax; did you mean quickstart_train? "),
        ("lcjax:../pyproject", "no recipe of lcjax; known: "),
        ("configs/model/phi2.yaml", "does not exist; the recipe of lcjax is lcjax:model/phi2"),
    ],
)
def test_another_name_of_a_recipe_is_one_line_with_near_ones(name, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(f"model: !include {name}\n")
    for file in (name, "mine.yaml"):
        message = fails("--config", file)
        assert name in message and line in message and "\n" not in message
    assert "(included from mine.yaml)" in message


def test_a_section_that_would_replace_an_included_one_is_rejected(tmp_path):
    (tmp_path / "base.yaml").write_text("train: {steps: 5}\nlengths: [1]\n")
    (tmp_path / "job.yaml").write_text("<<: !include base.yaml\ntrain: {lr: 1}\n")
    message = fails("--config", tmp_path / "job.yaml")
    assert "job.yaml" in message and "duplicate key `train`" in message and "!include" in message
    (tmp_path / "job.yaml").write_text("<<: !include base.yaml\nlengths: [2]\n")
    assert config.parse(Job, [f"--config={tmp_path / 'job.yaml'}"]) == Job(
        train=Train(steps=5), lengths=(2,)
    )


def test_a_key_written_twice_is_rejected(tmp_path):
    (tmp_path / "job.yaml").write_text("train:\n  lr: 1\n  lr: 2\n")
    assert "duplicate key `lr`" in fails("--config", tmp_path / "job.yaml")


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("--trian.lr=1", ["--trian.lr=1 is unknown", "did you mean train?", "lengths, methods"]),
        ("--confg=x.yaml", ["--confg=x.yaml is unknown; did you mean config?"]),
        ("--x.y=1", ["--x.y=1 is unknown; known: config, lengths"]),
        (
            "--train.stpes=1",
            ["train.stpes='1'", "did you mean steps?", "known: best, betas, lr, resume, steps"],
        ),
        ("--train.steps=abc", ["train.steps='abc'", "needs: int, such as 10"]),
        ("--train.steps=1.5", ["train.steps=1.5", "int"]),
        ("--train.steps=true", ["train.steps=True", "int"]),
        ("--train.steps=", ["train.steps=None", "int"]),
        ("--train.lr=inf", ["train.lr='inf'", "a finite number"]),
        ("--train.lr=.nan", ["train.lr=nan", "a finite number"]),
        (
            "--train.betas=0.9",
            ["train.betas=[0.9] is a list of 1; needs 2 values, such as [0.9, 0.999]"],
        ),
        ("--train.betas=0.9,x", ["train.betas.1='x'", "float"]),
        ("--train.betas=null", ["train.betas=None must be a list"]),
        ("--train.resume=maybe", ["train.resume='maybe'", "bool"]),
        ("--train=5", ["train=5", "section"]),
        ("--lengths=1,x", ["lengths.1='x'", "int"]),
        ("--methods={name: base}", ["must be a list, as in [{'name': 'base'}]"]),
        ("--methods=[{rope: null}]", ["methods.0.name is missing", "--methods.0.name="]),
        ("--model.dtype=bf16", ["model.dtype='bf16'", "did you mean bfloat16?", "float32"]),
        (
            "--model.rope.type=yran",
            ["model.rope.type='yran'", "did you mean yarn?", "linear"],
        ),
        ("--model.rope.factor=2", ["model.rope.type", "missing", "linear, yarn"]),
        ("--model.rope={type: linear, factor: 2}", ["but of yarn: --model.rope.type=yarn"]),
        ("--methods.0.rope.type=yarn", ["methods.0.name is missing"]),
        ("--model.rope=yarn", ["section", "write {type: yarn}, or --model.rope.type=yarn"]),
        ("--model.rope=yran", ["section", "write {type: ...}; did you mean yarn?", "linear"]),
        ("--model.rope=5", ["section", "write {type: ...}; known: linear, yarn"]),
        ("--methods=[{name: a, rope: yarn}]", ["write {type: yarn}, or --methods.0.rope.type="]),
        ("--model.rope={type: yarn, facter: 2}", ["model.rope.facter=2", "yarn", "factor"]),
        ("--model.rope={type: yarn, factor: 0}", ["model.rope: factor=0.0 must be at least 1"]),
        ("--train.lr", ["--train.lr has no value"]),
        ("train.lr=1", ["train.lr", "--section.key=value"]),
    ],
)
def test_a_mistake_is_one_line_with_key_value_and_way_out(argument, parts):
    message = fails(argument)
    assert all(part in message for part in parts), message


def test_the_name_of_a_type_in_the_place_of_a_section_raises_input_error_that_names_the_section():
    classes = draccus.ChoiceRegistry.__subclasses__()
    registries = [base for base in classes if base.__module__.startswith("lcjax.")]
    assert {"CacheMethod", "Storage", "Task"} <= {base.__name__ for base in registries}
    for base in registries:
        for name in base.get_known_choices():
            with pytest.raises(InputError, match=rf"a\.b='{name}' .*; write {{type: {name}[,}}]"):
                section(base, name, "a.b")
    message = fails("--model.rope=yarn", "--model.rope.factor=2")
    assert message.endswith("sets a key of it; if yarn is a type, write {type: yarn}")


def test_the_name_of_a_type_in_the_place_of_an_instance_raises_input_error_that_names_the_call():
    for make, key, call in (
        (lambda: KeepAll("int8"), "model.cache.storage='int8'", "attention.Int8()"),
        (lambda: SnapKV(ratio=0.5, heads="adaptive"), "heads='adaptive'", "AdaptiveHeads()"),
        (lambda: preset("tiny").replace(rope="yarn"), "model.rope='yarn'", "Yarn(factor=...)"),
        (lambda: EvalMethod("a", cache="snapkv"), "methods.cache='snapkv'", "SnapKV()"),
        (lambda: EvalMethod("a", pattern={"type": "causal"}), "methods.pattern=", "Causal()"),
    ):
        with pytest.raises(InputError, match=f"{key}.*; pass lcjax.*{re.escape(call)}$"):
            make()


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("rope.factor=0 is low", "model.rope.factor=0 is low"),
        ("model.rope.factor=0 is low", "model.rope.factor=0 is low"),
        ("factor=0 is low", "model.rope: factor=0 is low"),
    ],
)
def test_what_a_dataclass_complains_of_gets_its_whole_key(said, shown, monkeypatch):
    def refuse(self):
        raise InputError(said)

    monkeypatch.setattr(Yarn, "__post_init__", refuse)
    assert fails("--model.rope.type=yarn") == shown


def test_a_mistake_in_the_file_is_named_like_one_on_the_command_line(file):
    file.write_text(FILE.replace("scale: 2", "scael: 2"))
    assert "methods.1.rope.scael=2 is no key of linear; did you mean scale?" in fails(
        "--config", file
    )


@pytest.mark.parametrize("value", ["hello", "5", "true", "''", "2024-01-01", "[1, 2]"])
@pytest.mark.parametrize("key", ["model", "model.rope", "methods.0"])
def test_a_value_in_the_place_of_a_section_raises_input_error_when_flags_set_its_keys(
    tmp_path, key, value
):
    text = {
        "model": f"model: {value}\n",
        "model.rope": f"model: {{rope: {value}}}\n",
        "methods.0": f"methods: [{value}]\n",
    }[key]
    (tmp_path / "run.yaml").write_text(text)
    flags = [f"--{key}.{name}=a" for name in ("path", "type", "name")]
    for flag in flags:
        with pytest.raises(InputError, match=rf"{key}=.* must be a section|whole list") as error:
            config.parse(Job, ["--config", str(tmp_path / "run.yaml"), flag])
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("folder", ["a" * 300, "runs/" + "é" * 128, "a\0b", "a\ud800"])
def test_a_run_folder_that_no_file_system_can_hold_raises_input_error(folder):
    with pytest.raises(InputError, match=r"run\.folder=.* must be a path") as error:
        config.RunFolder(folder)
    assert "\n" not in str(error.value) and "\0" not in str(error.value)


@pytest.mark.parametrize("flag", ["--train.batch_size=100000000", "--data.length=300000000"])
def test_a_batch_that_cannot_be_counted_raises_input_error(flag):
    with pytest.raises(InputError, match=r"train\.batch_size=.* x data\.length=.* tokens"):
        config.parse(TrainConfig, ["--run.folder=r", "--data.path=d", flag])


def test_an_empty_section_takes_the_keys_of_flags(tmp_path):
    (tmp_path / "run.yaml").write_text("model:\n")
    assert config.parse(Job, ["--config", str(tmp_path / "run.yaml"), "--model.path=a"]).model.path
    assert config.parse(Job, ["--model=null", "--model.path=a"]).model.path == "a"


def test_a_mapping_in_a_text_field_is_rejected(file):
    file.write_text("model: {path: {a: 1}}\n")
    assert "model.path={'a': 1} is not valid; needs: str" in fails("--config", file)


def test_unreadable_files_are_named(file, tmp_path):
    assert "did you mean job.yaml?" in fails("--config", tmp_path / "jbo.yaml")
    (tmp_path / "longrope_7b.yaml").touch()  # what all names end in makes none of them close
    assert "nope.yaml does not exist; known: job" in fails("--config", tmp_path / "nope.yaml")
    assert f"{tmp_path} is a folder; give a file: it has job.yaml" in fails("--config", tmp_path)
    file.write_text("model: !include absent.yaml\n")
    message = fails("--config", file)
    assert "absent.yaml" in message and f"included from {file}" in message
    file.write_text("model: {path: [\n")
    assert "cannot be read as YAML" in fails("--config", file)
    file.write_bytes(b"model: {path: \xff\xfe}\n")
    assert "cannot be read as YAML" in fails("--config", file)
    file.write_text("model: !include job.yaml\n")
    assert "includes itself" in fails("--config", file)
    file.write_text("just words\n")
    assert "`key: value`" in fails("--config", file)


def test_a_second_file_is_rejected(file):
    assert "came before; give one file" in fails("--config", file, f"--config={file}")


def test_what_dump_writes_parse_reads_back_equal(file, tmp_path):
    job = config.parse(Job, [f"--config={file}"])
    config.dump(job, tmp_path / "run" / "config.yaml")
    assert config.parse(Job, [f"--config={tmp_path / 'run' / 'config.yaml'}"]) == job
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_every_choice_of_a_tuple_keeps_its_type_when_it_is_dumped(tmp_path):
    job = Ropes((Linear(scale=1.0), Linear(scale=3.0), Yarn(theta=3.0)))
    config.dump(job, tmp_path / "config.yaml")
    assert config.parse(Ropes, [f"--config={tmp_path / 'config.yaml'}"]) == job


def help_of(cls, capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        config.parse(cls, ["--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_names_every_key_with_choices_defaults_and_comments(capsys):
    text = help_of(Job, capsys)
    assert "--train.steps  int = 10  # optimiser updates" in text
    assert "--model.rope.type  linear | yarn (or --model.rope=null)  # how far it reads" in text
    assert "--train.best=null (default), or with:  # the score to beat" in text
    assert "--train.best.loss  float (required)" in text
    assert "--methods.0.name  str (required)" in text


def test_help_groups_the_keys_of_a_choice_by_entry_and_says_them_once(capsys):
    lines = help_of(Job, capsys).splitlines()
    start = next(i for i, line in enumerate(lines) if "--model.rope.type" in line)
    assert lines[start + 1 : start + 7] == [
        "  --model.rope.theta  float | null = null",
        "    [linear]",
        "    --model.rope.scale  float = 2.0",
        "    [yarn]",
        "    --model.rope.factor  float = 4.0  # target over trained length, 100 % of it",
        "    --model.rope.original_length  int | null = null",
    ]
    again = next(i for i, line in enumerate(lines) if "--methods.0.rope.type" in line)
    assert lines[again + 1] == "    keys as those of --model.rope.type"


def test_help_begins_with_what_the_script_is_for_and_how_it_is_called(capsys, monkeypatch):
    script = types.ModuleType("__main__", "Trains: python job.py --train.lr=1\n")
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setattr(sys, "argv", ["here/job.py"])
    text = help_of(Job, capsys)
    assert text.startswith("Trains: python job.py --train.lr=1\n\nusage: python job.py [--config ")
    assert "`model: !include other.yaml`" in text
    script.__spec__ = types.SimpleNamespace(parent="jobs")
    assert "usage: python -m jobs [--config " in help_of(Job, capsys)
    script.__spec__ = script.__doc__ = None  # a console script
    monkeypatch.setattr(sys, "argv", ["bin/lcjax-train"])
    assert help_of(Job, capsys).startswith("Trains a model.\n\nusage: lcjax-train [--config ")


def test_without_words_those_behind_the_name_of_the_process_are_read(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["job.py", "--train.steps=3"])
    assert config.parse(Job) == Job(train=Train(steps=3))


def test_main_returns_zero_and_hands_the_config_to_the_run():
    seen = []
    assert config.main(Job, seen.append, ["--train.steps=3"]) == 0
    assert seen == [Job(train=Train(steps=3))]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("data.path=x\nis empty"), 2, "error: data.path=x is empty\n"),
        (KeyboardInterrupt("saved step 12 in out"), 130, "interrupted: saved step 12 in out\n"),
    ],
)
def test_main_turns_what_the_user_can_put_right_into_one_line(error, code, line, capsys):
    def run(_):
        raise error

    assert config.main(Job, run, []) == code
    assert capsys.readouterr().err == line


@dataclass(frozen=True)
class Script:
    run: config.RunFolder = field(default_factory=lambda: config.RunFolder("nowhere"))


def full_disk(_):
    raise OSError(28, "No space left on device")


def test_a_disk_that_fails_is_one_line_and_its_traceback_lies_in_the_run_folder(tmp_path, capsys):
    assert config.main(Script, full_disk, [f"--run.folder={tmp_path}"]) == 1
    file = tmp_path / "error.txt"
    note = f"; make room, then run the same command again (where it happened: {file})"
    said = f"error: [Errno 28] No space left on device{note}\n"
    assert capsys.readouterr().err == said
    assert "in full_disk" in file.read_text()


def test_a_full_disk_on_which_numpy_wrote_a_part_of_an_array_is_named(capsys):
    def run(_):
        raise OSError("19453 requested and 6112 written")  # as `tofile` does

    assert config.main(Job, run, []) == 1
    said = "error: No space left on device: 19453 requested and 6112 written; make room, then run"
    assert capsys.readouterr().err.startswith(said)


def test_warnings_of_a_script_are_one_line_without_a_place_in_the_source(capsys):
    def run(_):
        # As without pytest, which collects warnings.
        print(warnings.formatwarning("a row\nis left out", UserWarning, "file.py", 7), end="")
        assert "file.py:7" in warnings.formatwarning("old", DeprecationWarning, "file.py", 7)

    assert config.main(Job, run, []) == 0
    assert capsys.readouterr().out == "warning: a row is left out\n"
    assert "file.py:7" in warnings.formatwarning("x", UserWarning, "file.py", 7)


def broken_disk(_):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("script", [Script, Job])
def test_the_traceback_is_shown_where_there_is_no_run_folder(script, capsys):
    assert config.main(script, broken_disk, []) == 1
    *trace, last = capsys.readouterr().err.splitlines()
    assert last == "error: [Errno 5] Input/output error"
    assert any("in broken_disk" in line for line in trace)
    assert config.main(script, full_disk, []) == 1  # needs no traceback
    assert capsys.readouterr().err.count("\n") == 1


def test_a_config_that_cannot_be_opened_is_the_users_to_put_right(tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "job.yaml")

    monkeypatch.setattr(Path, "open", refuse)
    assert config.main(Job, full_disk, ["--config=job.yaml"]) == 2
    assert capsys.readouterr().err == "error: [Errno 13] Permission denied: 'job.yaml'\n"


def test_main_lets_a_fault_of_the_program_through():
    def run(_):
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        config.main(Job, run, [])


@pytest.mark.parametrize(
    ("text", "length", "path"),
    [
        ("010", 10, "010"),
        ("0x40", 64, "0x40"),
        ("0o100", 64, "0o100"),
        ("1_000", 1000, "1_000"),
        ("+7", 7, "+7"),
        ("'12'", 12, "12"),
        ("1:30", None, "1:30"),
        ("2024-01-01", None, "2024-01-01"),
        ("1.10", None, "1.10"),
        ("1e5", None, "1e5"),
        ("no", None, "no"),
        ("off", None, "off"),
        (".5", None, ".5"),
    ],
)
def test_plain_scalars_are_those_of_yaml_1_2_and_text_fields_keep_them(file, text, length, path):
    file.write_text(f"model: {{path: {text}}}\n")
    assert config.parse(Job, [f"--config={file}"]).model.path == path
    file.write_text(f"lengths: [{text}]\n")
    for words in ([f"--config={file}"], [f"--lengths=[{text}]"], [f"--lengths={text}"]):
        if length is None:
            assert "lengths.0=" in fails(*words)
        else:
            assert config.parse(Job, words).lengths == (length,)


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "+1.0e-4", "0.0001", ".0001", "1.e-4"])
def test_numbers_have_the_exponents_of_yaml_1_2(file, text):
    file.write_text(f"train: {{lr: {text}}}\n")
    for words in ([f"--config={file}"], [f"--train.lr={text}"]):
        assert config.parse(Job, words).train.lr == 1e-4


@pytest.mark.parametrize(
    "text",
    [
        *("train: {lr: 1:30}", "train: {lr: .INF}", "train: {lr: .nan}", "train: {lr: 1e999}"),
        *("train: {resume: yes}", "train: {resume: on}", "train: {resume: !!bool x}"),
        *(
            "model: {path: !!float x}",
            "model: !!timestamp x",
            "model: !!set {a}",
            "model: !!null x",
        ),
        *(f"train: {{steps: {'9' * 5000}}}", f"train: {{steps: !!int {'9' * 5000}}}", "a: \0"),
        *("model: !!python/object:os.system x", "1: 2", "~: 2", "? [a]\n: 1", "? {a: 1}\n: 1"),
        *("model: &x {path: *x}", "<<: &a {<<: *a}", "<<: 3", "model: *x", "a: 1\n---\nb: 1"),
        *('model: !include "a\\0b"', "model: !include [a]", "[" * 500, "model: |\n  a", "- a: 1"),
        *("import: 5", "import: [1]", "import: ''", "import: {a: 1}", "import: [absent.py]"),
        *("model: {import: [a.py]}", "import: [absent_module]", "import: [.relative]"),
        # 9**8 values: an error that prints them would fill the memory.
        "a: &a1 [1]\n" + "".join(f"a{i}: &a{i + 1} [{f'*a{i},' * 9}]\n" for i in range(1, 9)),
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_a_file_that_is_no_config_is_an_error_of_one_line(file, text):
    file.write_text(text)
    assert len(fails("--config", file)) < 600


def write_pattern(file, name):
    file.write_text(
        "import dataclasses\nfrom lcjax.attention import Pattern\n\n"
        f"@Pattern.register_subclass('{name}')\n@dataclasses.dataclass(frozen=True)\n"
        "class Mine(Pattern):\n    def passes(self, metadata):\n        return []\n"
    )


@pytest.fixture
def own_modules(monkeypatch):
    """Forgets the modules and patterns that a test imports."""
    monkeypatch.setattr(Pattern, "_choice_registry", Pattern.get_known_choices().copy())
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "pattern" in name:
            del sys.modules[name]


def test_modules_of_a_user_are_imported_before_the_config_is_read(
    tmp_path, monkeypatch, own_modules
):
    write_pattern(tmp_path / "first_pattern.py", "first")
    write_pattern(tmp_path / "second_pattern.py", "second")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"type='first' is unknown; .*add --import FILE.py"):
        config.parse(TrainConfig, ["--model.pattern.type=first"])
    for words in (
        ["--import", str(tmp_path / "first_pattern.py"), "--model.pattern.type=first"],
        ["--model.pattern.type=second", "--import=second_pattern"],
        ["--model.pattern.type=first", f"--import={tmp_path / 'first_pattern.py'},second_pattern"],
    ):
        assert type(config.parse(TrainConfig, words).model.pattern).__name__ == "Mine"


def test_a_config_names_the_files_of_its_methods_and_a_run_folder_runs_none_unasked(
    tmp_path, own_modules
):
    write_pattern(tmp_path / "third_pattern.py", "third")
    write_pattern(tmp_path / "fourth_pattern.py", "fourth")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "model.yaml").write_text(
        "import: [../fourth_pattern.py]\npattern: {type: third}\n"
    )
    (tmp_path / "run.yaml").write_text("import: third_pattern.py\nmodel: !include parts/model.yaml")
    stored = tmp_path / "stored.yaml"
    config.dump(config.parse(TrainConfig, [f"--config={tmp_path / 'run.yaml'}"]), stored)
    assert {"third", "fourth"} <= Pattern.get_known_choices().keys()
    code = [str(tmp_path / "third_pattern.py")]
    assert config.read_yaml(stored)["import"] == code  # the one that its values need

    Pattern.get_known_choices().pop("third")
    del sys.modules["third_pattern"]
    with pytest.raises(config.UnknownTypeError, match=rf"add --import={re.escape(code[0])}"):
        config.parse(TrainConfig, [f"--config={stored}"], is_stored=True)
    words = [f"--config={stored}"]
    assert config.parse(TrainConfig, words) == config.parse(TrainConfig, words, is_stored=True)


@pytest.mark.parametrize(
    "text",
    [
        *("def :", "1 / 0", "raise SystemExit(3)", "absent", "import absent_module", "\0", "\xff"),
        "class A(1): pass",
    ],
)
def test_code_that_cannot_be_imported_is_an_error_of_one_line(tmp_path, text):
    file = tmp_path / "wrong_code.py"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=rf"--import={re.escape(str(file))} cannot be imported"):
        config.parse(TrainConfig, ["--import", str(file)])
    assert "wrong_code" not in sys.modules


def test_modules_that_cannot_be_imported_are_an_error_of_one_line(tmp_path):
    (tmp_path / "yaml.py").touch()  # the name of a module that is loaded
    names = ("no_such_module", ".relative", "", str(tmp_path / "absent.py"))
    for name in (*names, str(tmp_path / "yaml.py")):
        with pytest.raises(InputError, match=rf"--import={re.escape(name)} cannot be imported .*"):
            config.parse(TrainConfig, ["--import", name])
