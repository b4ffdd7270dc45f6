"""A folder is replaced only where the library wrote every file in it."""

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from convert_support import adapters, edit_json, random_params, saved, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from lcjax.checkpoints import ByteTokenizer, load_config, save_hf
from lcjax.checkpoints.adapters import save_peft
from lcjax.checkpoints.hf_save import HF_FOLDER
from lcjax.convert import main
from lcjax.errors import InputError
from lcjax.files import FolderFormat, atomic_folder, check_replaceable


def write_model(folder):
    config = tiny_config("phi")
    save_hf(folder, random_params(config), config, ByteTokenizer(), overwrite=True)


def write_adapters(folder):
    save_peft(folder, *adapters(rank=3), base="org/new", overwrite=True)


def convert(folder, family="phi"):
    with tempfile.TemporaryDirectory() as place:
        saved(Path(place) / "src", family)
        if main([f"{place}/src", str(folder), "--force"]):
            raise InputError("one line was printed")


WRITERS = {"save_hf": write_model, "save_peft": write_adapters, "command": convert}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each writer left earlier."""
    folder = tmp_path_factory.mktemp("outputs")
    saved(folder / "save_hf")
    convert(folder / "command", "llama")
    save_peft(folder / "save_peft", *adapters(rank=2), base="org/old")
    return folder


def snapshot(folder):
    """Every entry below `folder` with its content; links are not followed, pipes not opened."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            content = os.readlink(path)
        else:
            content = path.read_bytes() if path.is_file() else path.is_fifo()
        entries[path.relative_to(folder).as_posix()] = content
    return entries


def add(folder, name, kind="file"):
    """Adds an entry where there is room for one; a link leads to a folder beside `folder`."""
    path = folder / name
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to(folder.absolute().parent / "outside")
        else:
            with path.open("x") as file:
                file.write("mine")


@pytest.mark.parametrize("writer", WRITERS)
def test_what_the_library_wrote_is_replaced(tmp_path, outputs, writer):
    folder = shutil.copytree(outputs / writer, tmp_path / "m")
    before = snapshot(folder)
    WRITERS[writer](folder)
    after = snapshot(folder)
    assert after.keys() == before.keys() and after != before
    assert os.listdir(tmp_path) == ["m"]


def test_shards_and_a_sentencepiece_model_are_replaced(tmp_path):
    config = tiny_config()
    save_hf(tmp_path / "m", random_params(config), config, max_shard_bytes=60_000)
    (tmp_path / "m" / "tokenizer.model").write_bytes(b"pieces")
    write_model(tmp_path / "m")
    assert load_config(tmp_path / "m").norm == "layer"
    assert not list((tmp_path / "m").glob("model-*")) + list((tmp_path / "m").glob("*.index.json"))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("thesis.txt", "file"),
        (".hidden", "file"),
        ("model.safetensors.bak", "file"),
        ("sub/thesis.txt", "file"),
        (".git/a/empty", "folder"),
        ("tokenizer.model", "link"),
        ("tokenizer.model", "pipe"),
    ],
)
def test_a_folder_with_anything_else_is_refused(tmp_path, outputs, writer, name, kind, capsys):
    folder = shutil.copytree(outputs / writer, tmp_path / "m")
    add(folder, name, kind)
    before = snapshot(tmp_path)
    with pytest.raises(InputError) as error:
        WRITERS[writer](folder)
    said = capsys.readouterr().err or str(error.value)
    listed = f"{name}/" if kind == "folder" else name
    assert f"does not write {listed} into a" in said
    assert snapshot(tmp_path) == before


NAMES = [
    *("thesis.txt", ".hidden", "README.md", "pytorch_model.bin", "model.safetensors.bak", "notes"),
    *("model-1-of-2.safetensors", "model-00001-of-00002.safetensors", "config.json", "Config.json"),
    *("tokenizer.json", "tokenizer.model", ".git", "*", "[a]", "line\nbreak"),
]
KINDS = ["file", "file", "folder", "pipe", "link"]
PATHS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
ENTRIES = st.lists(st.tuples(PATHS, st.sampled_from(KINDS)), max_size=8)
WRITTEN = {"config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"}
WRITTEN |= {"tokenizer.model", "model.safetensors", "model-00001-of-00002.safetensors"}


def foreign_entries(folder):
    """Paths of all files but those that `save_hf` writes, and of empty folders."""
    names = set()
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or path.is_fifo() or (path.is_file() and name not in WRITTEN):
            names.add(name)
        elif path.is_dir() and not any(path.iterdir()):
            names.add(f"{name}/")
    return names


@settings(max_examples=80, deadline=None)
@given(ENTRIES)
def test_any_foreign_file_anywhere_survives_and_is_listed(outputs, entries):
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(outputs / "save_hf", Path(place) / "m")
        add(folder.parent, "outside/thesis.txt")
        for name, kind in entries:
            add(folder, name, kind)
        outside = snapshot(folder.parent / "outside")
        before, foreign = snapshot(folder), foreign_entries(folder)
        try:
            with atomic_folder(folder, HF_FOLDER, overwrite=True) as partial:
                (partial / "config.json").write_text("{}")
        except InputError as error:
            listed = (
                str(error)
                .split("does not write ")[1]
                .split(" into a model folder; choose")[0]
                .split(", ")
            )
            listed, (last, _, remainder) = listed[:-1], listed[-1].partition(" and ")
            listed.append(last)
            shown = {ascii(name) if "\n" in name else name for name in foreign}
            assert set(listed) <= shown and len(set(listed)) == min(5, len(foreign))
            assert remainder == (f"{len(foreign) - 5} more" if len(foreign) > 5 else "")
            assert foreign and snapshot(folder) == before and "\n" not in str(error)
        else:
            assert not foreign and snapshot(folder) == {"config.json": b"{}"}
        assert snapshot(folder.parent / "outside") == outside
        assert sorted(os.listdir(place)) == ["m", "outside"]


def test_thousands_of_files_are_not_all_counted(tmp_path):
    saved(tmp_path / "m")
    for i in range(1_200):
        (tmp_path / "m" / f"{i:04}.txt").touch()
    with pytest.raises(
        InputError, match=r"write 0000.txt, .* 0004.txt and at least 996 more into a model"
    ):
        write_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("writer", "config", "changes"),
    [
        ("save_hf", "config.json", {"transformers_version": "4.51.0"}),
        ("save_hf", "config.json", {"torch_dtype": None}),
        ("save_hf", "config.json", {"architectures": None}),
        ("command", "config.json", {"transformers_version": "4.51.0"}),
        ("save_peft", "adapter_config.json", {"modules_to_save": ["lm_head"]}),
    ],
)
def test_files_of_the_same_names_by_another_program_are_not_replaced(
    tmp_path, outputs, writer, config, changes, capsys
):
    folder = shutil.copytree(outputs / writer, tmp_path / "m")
    edit_json(folder / config, **changes)
    before = snapshot(tmp_path)
    with pytest.raises(InputError) as error:
        WRITERS[writer](folder)
    said = capsys.readouterr().err or str(error.value)
    assert f"it has no {config} of a" in said
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("text", ["", "[]", "{", "\udcff", "[" * 100_000, None])
def test_a_damaged_or_absent_config_shows_nothing(tmp_path, text):
    saved(tmp_path / "m")
    (tmp_path / "m" / "config.json").unlink()
    if text is not None:
        (tmp_path / "m" / "config.json").write_text(text, errors="surrogateescape")
    before = snapshot(tmp_path)
    with pytest.raises(
        InputError, match=r"no config\.json of a model folder that lcjax wrote; choose"
    ):
        write_model(tmp_path / "m")
    assert snapshot(tmp_path) == before


def test_a_folder_of_transformers_is_not_replaced(tmp_path):
    pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))
    model.save_pretrained(tmp_path / "m")
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match="cannot be replaced"):
        write_model(tmp_path / "m")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("writer", WRITERS)
def test_an_empty_folder_is_filled(tmp_path, writer):
    (tmp_path / "m").mkdir()
    WRITERS[writer](tmp_path / "m")
    assert any((tmp_path / "m").iterdir())


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("target", ["output", "empty", "absent"])
def test_a_symbolic_link_is_neither_followed_nor_replaced(tmp_path, outputs, writer, target):
    shutil.copytree(outputs / writer, tmp_path / "output")
    (tmp_path / "empty").mkdir()
    (tmp_path / "m").symlink_to(tmp_path / target)
    before = snapshot(tmp_path)
    with pytest.raises(InputError):
        WRITERS[writer](tmp_path / "m")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_is_not_replaced(tmp_path, writer):
    (tmp_path / "m").write_text("mine")
    with pytest.raises(InputError):
        WRITERS[writer](tmp_path / "m")
    assert snapshot(tmp_path) == {"m": b"mine"}


def test_a_file_that_comes_while_the_new_folder_is_written_survives(tmp_path, outputs):
    folder = shutil.copytree(outputs / "save_hf", tmp_path / "m")
    with (
        pytest.raises(InputError, match=r"does not write thesis\.txt into"),
        atomic_folder(folder, HF_FOLDER, overwrite=True),
    ):
        add(folder, "thesis.txt")
        before = snapshot(folder)
    assert snapshot(folder) == before and os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_comes_meanwhile_survives(tmp_path, overwrite):
    with pytest.raises(InputError), atomic_folder(tmp_path / "m", HF_FOLDER, overwrite):
        add(tmp_path / "m", "thesis.txt")
    assert snapshot(tmp_path) == {"m": False, "m/thesis.txt": b"mine"}


def test_a_file_that_comes_at_the_last_moment_survives(tmp_path, outputs, monkeypatch):
    folder = shutil.copytree(outputs / "save_hf", tmp_path / "m")
    rename = Path.rename

    def late(self, target):
        if self == folder:
            add(folder, "thesis.txt")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(
        InputError, match=r"m cannot be replaced: .* does not write thesis\.txt into"
    ):
        write_model(folder)
    assert snapshot(folder).keys() == snapshot(outputs / "save_hf").keys() | {"thesis.txt"}
    assert os.listdir(tmp_path) == ["m"]


def test_patterns_name_folders_and_what_lies_below_them(tmp_path):
    contents = FolderFormat(
        name="a test",
        files=("note.json", "a/*.txt", "deep/[0-9]*/**"),
        config="note.json",
        keys=frozenset({"ours"}),
    )
    (tmp_path / "note.json").write_text(json.dumps({"ours": 1}))
    for name in ("a/x.txt", "deep/1/x/y", "deep/2.old/z", "mine/x.txt"):
        add(tmp_path, name)
    add(tmp_path, "deep/1/link", "link")
    add(tmp_path, "deep/3", "folder")
    assert contents.unknown(tmp_path) == ["mine/x.txt"]
    check_replaceable(tmp_path, contents, ["note.json", "a", "deep"])
    for name in ("a/x.md", "a/b/x.txt", "deep/x", "deep/y/1"):
        add(tmp_path, name)
    add(tmp_path, "a/c.txt", "folder")
    add(tmp_path, "deep/4", "link")
    wrong = ["a/x.md", "a/b/x.txt", "a/c.txt/", "deep/4", "deep/x", "deep/y/1"]
    assert contents.unknown(tmp_path, ["note.json", "a", "deep"]) == wrong
    with pytest.raises(InputError, match=r"a/x.md, a/b/x.txt, a/c.txt/, deep/4, deep/x and 1 more"):
        check_replaceable(tmp_path, contents, ["a", "deep"])
