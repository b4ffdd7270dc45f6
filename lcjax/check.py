"""`python -m lcjax.check FOLDER ...` compares files with their checksums of when they were written.

It finds flipped bits, cut files and exchanged files in all folders that lcjax writes, and in those
below: prepared tokens and stored rows, datastores, records of evaluations, run folders with their
checkpoints, exported models and adapters. Exit status: 0 if nothing is damaged, 1 if something is,
2 for an error. --write takes the files of an exported folder as they are, after you changed them.
"""

import argparse
import concurrent.futures
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from tqdm.auto import tqdm

from lcjax.data.data_config import RETRIEVED, TEACHER, TOKENS
from lcjax.errors import InputError, one_line
from lcjax.evaluation import records
from lcjax.files import CHECKSUMS, FileSum, check_path, read_sealed, read_sums, sums_of, write_sums
from lcjax.parallel.run_lock import GUARD, LOCK
from lcjax.retrieval.datastore import Datastore
from lcjax.storage import URLPath, to_path

_SUMS = re.compile(rf"{re.escape(CHECKSUMS)}|checksums\.\d+")  # the second: of a checkpoint
_MAX_LISTED = 5  # files without a sum that are named
# What to do about a damaged file, by a file beside it: the first that is there.
_WAYS_OUT = {
    **{
        name: f"copy the folder again, or delete it and run `{command}` again"
        for name, command in (
            (TEACHER.index, TEACHER.command),
            (RETRIEVED.index, RETRIEVED.command),
            ("keys.bin", "python -m lcjax.retrieval build-tokens"),
            (TOKENS.index, TOKENS.command),
        )
    },
    "run.json": "restore it; tables and figures are written again by `eval.py report {folder}`",
    "checksums.0": "delete this checkpoint, and the run continues from the one before",
    "base.json": "restore it from a copy, or train again",
}
_WAY_OUT = (
    "copy the folder again, or write it again; if you changed the file yourself, accept it with"
    " python -m lcjax.check {folder} --write"
)


def main(arguments: list[str] | None = None) -> int:
    try:
        args = _parser().parse_args(arguments)
        is_sound = [(_write if args.write else _check)(_open(name)) for name in args.folder]
    except (InputError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0 if all(is_sound) else 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m lcjax.check", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", nargs="+", help="path or URL of a folder")
    parser.add_argument(
        "--write", action="store_true", help=f"write the sums of the files to FOLDER/{CHECKSUMS}"
    )
    return parser


def _open(name: str) -> Path:
    check_path("FOLDER", name)
    if not (folder := to_path(name)).is_dir():
        raise InputError(f"{name} is no folder; name one that lcjax has written")
    return folder


def _check(folder: Path) -> bool:
    """Prints what is damaged and which files have no sums; returns whether nothing is damaged."""
    files = _files(folder)
    sums, damages = [], []
    for parent, names in files.items():
        try:
            sums += _sums(parent, names)
            damages += _damaged_lines(parent, names)
        except InputError as error:
            damages.append(str(error))
    num_bytes = sum(entry.num_bytes for entry in sums)
    options = {"desc": "comparing", "unit": "B", "unit_scale": True, "delay": 1}
    with (
        tqdm(total=num_bytes, **options) as bar,
        concurrent.futures.ThreadPoolExecutor() as executor,
    ):
        for entry, damage in zip(sums, executor.map(lambda e: e.damage(bar.update), sums)):
            if damage is not None:
                damages.append(f"{damage}; {_way_out(entry.file)}")
    print("".join(f"{damage}\n" for damage in damages), end="")
    summed = {entry.file for entry in sums}
    others = [
        (parent / name).relative_to(folder).as_posix()
        for parent, names in files.items()
        for name in names
        if parent / name not in summed and not _has_own_sum(parent, names, name)
    ]
    verdict = f"damaged: {len(damages)}" if damages else "nothing is damaged"
    print(f"{folder}: {verdict}; files with checksums: {len(summed)} ({num_bytes:,} bytes)")
    if others:
        rest = f" and {len(others) - _MAX_LISTED} more" if len(others) > _MAX_LISTED else ""
        listed = ", ".join(others[:_MAX_LISTED])
        print(f"{folder}: files without checksums: {len(others)} ({listed}{rest})")
    return not damages


def _files(folder: Path) -> dict[Path, list[str]]:
    """Returns the names of the files in each folder below, without locks."""
    paths = folder.files() if isinstance(folder, URLPath) else sorted(folder.rglob("*"))
    names = defaultdict(list)
    for file in paths:
        if file.is_file() and file.name not in (LOCK, GUARD):
            names[file.parent].append(file.name)
    return names


def _sums(folder: Path, names: list[str]) -> Iterator[FileSum]:
    """Yields the sums in files of a folder; raises an InputError if one of these is damaged."""
    for name in filter(_SUMS.fullmatch, names):
        try:
            sums = read_sums(folder / name)
        except InputError as error:
            raise InputError(f"{folder}/{error}; {_way_out(folder / name)}") from None
        yield from (FileSum(folder / file, sum) for file, sum in sums.items())
    for name in ("base.json", "run.json"):
        if name in names:
            read_sealed(folder / name, _way_out(folder / name))
    if _is_datastore(folder, names):
        yield from Datastore(folder).file_sums()


def _has_own_sum(folder: Path, names: list[str], name: str) -> bool:
    """Whether a file holds its sum, or sums of others."""
    sealed = {"base.json", "run.json"}
    sealed |= {"index.json", "deleted.npy"} if _is_datastore(folder, names) else set()
    return name in sealed or bool(_SUMS.fullmatch(name))


def _is_datastore(folder: Path, names: list[str]) -> bool:
    """Whether a folder has passages; tested by names, as the index may be damaged."""
    return "index.json" in names and any(name.endswith(".parquet") for name in names)


def _damaged_lines(folder: Path, names: list[str]) -> list[str]:
    """Returns errors about the lines of records that differ from their checksums."""
    if folder.name not in ("records", records.COSTS) or not (folder.parent / "run.json").is_file():
        return []
    way_out = "delete the line, and run the same eval.py command again"
    return [
        f"{folder / name}:{number} is not as it was written; {way_out}"
        for name in names
        for _, number in records.parse((folder / name).read_bytes(), b"").damaged
        if name.endswith(".jsonl")
    ]


def _way_out(file: Path) -> str:
    for folder in (file.parent, file.parent.parent):
        for name, way_out in _WAYS_OUT.items():
            if (folder / name).is_file():
                return way_out.format(folder=folder)
    return _WAY_OUT.format(folder=file.parent)


def _write(folder: Path) -> bool:
    """Writes the sums of all files that have none in a folder of their own."""
    files = _files(folder)
    for parent, names in files.items():
        if _is_datastore(parent, names) or parent.name == "checkpoints" or "base.json" in names:
            raise InputError(
                f"{parent} is a datastore or run folder, which lcjax keeps the checksums of itself;"
                " name the folder of a model or adapter"
            )
    paths = [
        parent / name
        for parent, names in files.items()
        for name in names
        if parent == folder or CHECKSUMS not in names
        if not _SUMS.fullmatch(name)
    ]
    if not paths:
        raise InputError(f"{folder} holds no file; name the folder of a model or adapter")
    write_sums(folder / CHECKSUMS, sums_of(paths, folder))
    print(f"{folder / CHECKSUMS}: the checksums of {len(paths)} files")
    return True


if __name__ == "__main__":
    sys.exit(main())
