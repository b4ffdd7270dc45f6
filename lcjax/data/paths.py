"""Which files a source means: a file, a folder, a glob, the standard library, a package."""

import glob
import importlib.util
import json
import os
import sysconfig
from pathlib import Path

from lcjax.errors import InputError

TEXT = (".txt", ".md", ".py")  # one document per file
LINES = (".jsonl",)  # many documents per file
BINARY = (".parquet", ".arrow", ".array_record")  # the same, and never packed again
PACKED = (".gz", ".zst")
READABLE = ", ".join(TEXT + LINES + BINARY) + " (also .gz, .zst behind the text ones)"

# Tests hold files that are broken on purpose; site-packages is not the standard library.
_NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


def kind(path: Path) -> str | None:
    """The suffix that decides how a file is read, compression taken off; None: not readable."""
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower() if suffix in PACKED else suffix
    if inner in TEXT + LINES or (suffix not in PACKED and inner in BINARY):
        return inner
    if suffix == ".arrayrecord":
        return ".array_record"
    return None


def find_files(path: str) -> list[tuple[str, Path]]:
    """Name and place of every file of a source, in the order of the names.

    Names are relative to the source, so that they, and with them the validation split, are the
    same on every machine.
    """
    if path == "python:stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in _walk(root, skip=_NOT_STDLIB) if f.suffix == ".py"]
        return _named(files, root, path)
    if path.startswith("python:"):
        raise InputError(f"data.path={path} is not known: only python:stdlib is")
    if path.startswith("package:"):
        return _package_files(path)
    return _plain_files(path, Path(path).expanduser())


def _plain_files(given: str, path: Path) -> list[tuple[str, Path]]:
    if path.is_dir():
        return _named(_datasets_files(given, path, _walk(path)), path, given)
    if path.is_file():
        return _named([path], path.parent, given)
    if not glob.has_magic(str(path)):
        raise InputError(f"data.path={given} does not exist: give a file, a folder or a glob")
    fixed = []
    for part in path.parts:
        if glob.has_magic(part):
            break
        fixed.append(part)
    found = [Path(f) for f in glob.glob(str(path), recursive=True)]
    return _named([f for f in found if f.is_file()], Path(*fixed), given)


def _datasets_files(given: str, root: Path, files: list[Path]) -> list[Path]:
    """The files without those that Hugging Face `datasets` keeps beside the data of its folders."""
    if (root / "dataset_dict.json").is_file():
        splits = json.loads((root / "dataset_dict.json").read_text()).get("splits", [])
        raise InputError(
            f"data.path={given} holds the splits {', '.join(splits)} of a dataset: name one of"
            f" them, as {Path(given, *splits[:1])}"
        )
    saved = {}
    for folder in {file.parent for file in files if file.suffix == ".arrow"}:
        state = folder / "state.json"
        if state.is_file():
            listed = json.loads(state.read_text()).get("_data_files", [])
            saved[folder] = {entry["filename"] for entry in listed}
    return [f for f in files if f.suffix != ".arrow" or f.name in saved.get(f.parent, {f.name})]


def _package_files(given: str) -> list[tuple[str, Path]]:
    """Files in an installed package; finding it does not run any of its code."""
    name, _, inside = given.removeprefix("package:").partition("/")
    module = name.replace("-", "_")
    # find_spec of a dotted name would import the parent package.
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not (spec.submodule_search_locations or spec.has_location):
        raise InputError(
            f"data.path={given}: no package {name!r} is installed here; try `pip install {name}`"
        )
    roots = spec.submodule_search_locations or [spec.origin]
    root = Path(next(iter(roots)))
    return _plain_files(given, root / inside if inside else root)


def _walk(root: Path, skip: set[str] = frozenset()) -> list[Path]:
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            s for s in subfolders if s not in skip and s != "__pycache__" and s[0] != "."
        ]
        files += [Path(folder, name) for name in names if name[0] != "."]
    return files


def _named(files: list[Path], root: Path, given: str) -> list[tuple[str, Path]]:
    found = sorted((f.relative_to(root).as_posix(), f) for f in files if kind(f))
    if not found:
        raise InputError(f"data.path={given} has no file that can be read; these can: {READABLE}")
    return found
