"""Writes files and folders that are complete or absent, whenever the process is killed.

Both are written under another name and renamed when their content is on the disk, so a machine that
stops leaves no empty file under the final name either. A folder is replaced only where this library
wrote every file in it: `FolderFormat` says what one kind of writer puts into its folder.

At a URL (`lcjax.storage`) a file is complete or absent as well. A folder there is marked as partial
until its last file is written, and has its config file from then on.

SHA-256 sums beside files find bits that were flipped later: `write_sums` and `check_sums`.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import fnmatch
import glob
import hashlib
import importlib.util
import itertools
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import yaml

from lcjax.errors import InputError
from lcjax.storage import StorageError, URLPath, is_running, to_path

CHECKSUMS = "checksums.sha256"  # in a folder: the sums of its other files
PARTIAL = "lcjax.partial"  # in a folder at a URL that is not written to its end
_SUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")  # a line of `sha256sum`
_MAX_NAME = 255  # bytes of a file's name, on all usual file systems
_MAX_LISTED = 5  # unknown files that an error names
_MAX_COUNTED = 1_000  # unknown files after which counting ends: the folder may be a whole disk
# FUSE and network file systems, such as a mounted Google Drive, may not be able to sync.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_REPLACE = (*_NO_SYNC, errno.EEXIST, errno.ENOTEMPTY)  # to rename onto what exists


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike | URLPath, mode: str = "w") -> Iterator[IO]:
    """A file `<path>.tmp` to write to, which becomes `path` when the block ends without an error.

    Args:
      path: is replaced if it exists; its folder is created.
      mode: "w" (UTF-8) or "wb".
    """
    path = to_path(path)
    if isinstance(path, URLPath):
        with path.open(mode) as file:
            yield file
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    with open(draft, mode, encoding=None if "b" in mode else "utf-8") as file:
        yield file
        sync_file(file)
    _replace(draft, path)
    _sync(path.parent)


def _replace(draft: Path, path: Path) -> None:
    """Renames a file; where that cannot replace one, the old one is deleted before."""
    try:
        draft.replace(path)
    except OSError as error:
        if error.errno not in _NO_REPLACE or not path.is_file():
            raise
        path.unlink()
        draft.rename(path)


def sync_file(file: IO) -> None:
    """Returns when what was written to an open file is on the disk."""
    file.flush()
    _fsync(file.fileno())


def _sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def write_whole(path: str | os.PathLike, text: str) -> None:
    """Writes a text file, which others may be reading, whole or not at all."""
    with atomic_file(path) as file:
        file.write(text)


def write_sums(path: Path, files: Sequence[Path]) -> None:
    """Writes the SHA-256 sums of `files`, which lie below the folder of `path`, to `path`.

    In that folder `sha256sum -c` compares them as `check_sums` does.
    """
    sums = zip(_sha256_sums(files), files, strict=True)
    lines = (f"{sum}  {file.relative_to(path.parent).as_posix()}\n" for sum, file in sums)
    write_whole(path, "".join(lines))


def check_sums(paths: Sequence[Path], *, part: int = 0, num_parts: int = 1) -> None:
    """Raises an InputError for the first file that is not as it was written.

    Args:
      paths: the files that `write_sums` wrote; if there are none, nothing is compared.
      part: number of the part of the entries that is compared here; other processes compare others.
      num_parts: number of these parts.
    """
    entries = [entry for path in paths for entry in _read_sums(path)]
    if paths and not entries:
        raise InputError(f"{paths[0].name} is empty")
    entries = entries[part::num_parts]
    for _, file, name in entries:
        if not file.is_file():
            raise InputError(f"{name} is missing")
    sums = _sha256_sums([file for _, file, _ in entries])
    for (expected, _, name), actual in zip(entries, sums, strict=True):
        if actual != expected:
            raise InputError(f"{name} is not as it was written: another SHA-256 sum")


def _read_sums(path: Path) -> Iterator[tuple[str, Path, str]]:
    """Yields (sum, file, name) for each line."""
    for line in path.read_bytes().decode(errors="replace").splitlines():
        entry = _SUM.fullmatch(line)
        if entry is None or Path(entry[2]).is_absolute() or ".." in Path(entry[2]).parts:
            raise InputError(f"{path.name} is damaged: {line!r:.90} is no sum of a file below it")
        yield entry[1], path.parent / entry[2], entry[2]


def sha256(path: Path) -> str:
    """Returns the SHA-256 sum of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_sums(files: Sequence[Path]) -> list[str]:
    with concurrent.futures.ThreadPoolExecutor() as executor:
        return list(executor.map(sha256, files))


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, whose only error is ValueError: nesting that is too deep is one too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path, default: Any = None) -> Any:
    """Returns the dictionary in a JSON file; `default` if the file is absent."""
    if not path.is_file() and default is not None:
        return default
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except InputError:  # of a store
        raise
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; is this a Hugging Face model folder?") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON, truncated or nested too deeply ({error})") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold a JSON object, not a {type(values).__name__}")
    return values


def check_path(key: str, path: str | os.PathLike) -> None:
    """Raises an InputError for a path that no file system can hold, or a URL of unknown scheme."""
    try:
        parts = [os.fsencode(part) for part in Path(str(to_path(path))).parts]
        holds = all(len(part) <= _MAX_NAME and b"\0" not in part for part in parts)
    except (TypeError, UnicodeEncodeError):  # not a path; lone surrogates
        holds = False
    if not holds:
        raise InputError(
            f"{key}={path!r:.60} must be a path, with names of at most {_MAX_NAME} bytes and"
            " without NUL"
        )


def package_path(name: str) -> Path:
    """Returns the file or folder that `package:NAME[/path]` names, without running its code.

    Raises:
      InputError: no such package is installed.
    """
    package, _, inner = name.removeprefix("package:").partition("/")
    module = package.replace("-", "_")
    # find_spec of a dotted name would import the parent package.
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not (spec.submodule_search_locations or spec.has_location):
        raise InputError(
            f"{name}: no package {package!r} is installed here; try `pip install {package}`"
        )
    root = Path(next(iter(spec.submodule_search_locations or [spec.origin])))
    return root / inner if inner else root


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    with atomic_file(path) as file:
        json.dump(value, file, indent=1)


def write_hf_json(path: Path, values: dict[str, Any]) -> None:
    """Writes a JSON file as transformers does, into a folder that is written as a whole."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class FolderFormat:
    """The files of one kind of output folder, by which such a folder is recognised.

    A user's own download may have files of the same names, so the config counts as well.
    """

    name: str  # of such a folder, in errors
    files: tuple[str, ...]  # patterns of relative paths; `**` matches everything below a folder
    config: str  # JSON or YAML file that every such folder has
    keys: frozenset[str]  # keys that this library always writes into it
    foreign_keys: frozenset[str] = frozenset()  # keys that other libraries always write into it

    def unknown(self, folder: Path, names: Collection[str] | None = None) -> list[str]:
        """Lists relative paths of files, links and empty folders that are not of this format.

        Ends after `_MAX_COUNTED` + 1 paths. `names` are the entries of `folder` to look at.
        """
        return list(itertools.islice(self._unknown(folder, (), names), _MAX_COUNTED + 1))

    def _unknown(
        self, folder: Path, parents: tuple[str, ...], names: Collection[str] | None = None
    ) -> Iterator[str]:
        if isinstance(folder, URLPath):
            for file in folder.files():
                path = file.relative_to(folder).parts
                is_named = names is None or path[0] in names
                if is_named and path != (PARTIAL,) and not self._is_known(path, is_file=True):
                    yield _printable("/".join(path))
            return

        def is_folder(entry: os.DirEntry) -> bool:
            return entry.is_dir(follow_symlinks=False)

        try:
            with os.scandir(folder.joinpath(*parents)) as scan:
                entries = sorted(scan, key=lambda entry: (is_folder(entry), entry.name))
        except PermissionError:
            yield _printable("/".join(parents) + "/")
            return
        if not entries and parents and not self._is_parent(parents):
            yield _printable("/".join(parents) + "/")
        for entry in entries:
            path = (*parents, entry.name)
            if names is not None and entry.name not in names:
                continue
            if is_folder(entry):
                yield from self._unknown(folder, path)
            elif not self._is_known(path, entry.is_file(follow_symlinks=False)):
                yield _printable("/".join(path))

    def _is_known(self, path: tuple[str, ...], is_file: bool) -> bool:
        """Whether a file is of this format; links, sockets and so on only below a `**`."""
        patterns = [pattern for pattern in self._patterns if is_file or pattern[-1] == "**"]
        return any(_matches(path, pattern) for pattern in patterns)

    def _is_parent(self, path: tuple[str, ...]) -> bool:
        """Whether a folder may hold files of this format."""
        return any(
            _matches(path, pattern[: len(path)])
            for pattern in self._patterns
            if len(path) < len(pattern) or pattern[-1] == "**"
        )

    @property
    def _patterns(self) -> list[tuple[str, ...]]:
        return [tuple(pattern.split("/")) for pattern in self.files]

    def has_config(self, folder: Path) -> bool:
        """Whether the config exists as this library writes it, or will when a folder is whole."""
        if isinstance(folder, URLPath) and (folder / PARTIAL).is_file():
            return True
        file = folder / self.config
        if file.is_symlink() or not file.is_file():
            return False
        try:
            text = file.read_text(encoding="utf-8")
            values = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
        except StorageError:
            raise
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return False
        if not isinstance(values, dict):
            return False
        return self.keys <= values.keys() and self.foreign_keys.isdisjoint(values)


def _matches(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Compares part by part; a `**` at the end matches one part or more."""
    if pattern and pattern[-1] == "**" and len(path) >= len(pattern):
        path, pattern = path[: len(pattern) - 1], pattern[:-1]
    return len(path) == len(pattern) and all(map(fnmatch.fnmatchcase, path, pattern))


def _printable(name: str) -> str:
    return name if name.isprintable() else ascii(name)


def check_replaceable(
    folder: Path,
    contents: FolderFormat,
    names: Collection[str] | None = None,
    *,
    label: Path | None = None,
) -> None:
    """Raises an InputError unless this library wrote everything in an existing folder.

    Args:
      folder: is walked without following symbolic links.
      contents: what this library writes into such a folder.
      names: entries of `folder` that are to be replaced; None: all.
      label: path of the folder in the error; None: `folder`.
    """
    if unknown := contents.unknown(folder, names):
        num_unlisted = len(unknown) - _MAX_LISTED
        listed = ", ".join(unknown[:_MAX_LISTED])
        if num_unlisted > 0:
            at_least = "at least " * (len(unknown) > _MAX_COUNTED)
            listed += f" and {at_least}{num_unlisted} more"
        reason = f"lcjax does not write {listed} into {contents.name}"
    elif not contents.has_config(folder):
        reason = f"it has no {contents.config} of {contents.name} that lcjax wrote"
    else:
        return
    raise InputError(
        f"{label or folder} cannot be replaced: {reason}; choose another folder, or move what you"
        " need elsewhere and delete this one"
    )


def check_destination(
    folder: Path, contents: FolderFormat, overwrite: bool, way_out: str = "overwrite=True"
) -> None:
    """Refuses a destination that is not absent, empty, or an output that may be replaced.

    Args:
      folder: where a folder is to be written.
      contents: what will be written; with `overwrite` a folder of this format is replaced.
      way_out: how the user allows that.
    """
    if folder.is_symlink():
        raise InputError(f"{folder} is a symbolic link; name the folder itself")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file, which is never replaced; name a folder")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise InputError(
            f"{folder} exists and is not empty; choose another folder, or replace it with {way_out}"
        )
    check_replaceable(folder, contents)


@contextlib.contextmanager
def atomic_folder(
    folder: Path, contents: FolderFormat, overwrite: bool, *, checksums: bool = False
) -> Iterator[Path]:
    """A hidden folder to write into, which becomes `folder` when the block ends without an error.

    `check_destination` is applied again when the new folder is complete, so that files that were
    added to `folder` meanwhile survive as well. With `checksums` the sums of its files are written
    to `CHECKSUMS`, which `contents` must list.

    At a URL the block writes into `folder` itself, and must write the config of `contents` last: a
    folder without it is no folder of this format. What was there before is deleted first.
    """
    if isinstance(folder, URLPath):
        yield from _folder_at_url(folder, contents, overwrite, checksums)
        return
    folder = folder.absolute()
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder, contents)
        partial.mkdir()
        yield partial
        if checksums:
            write_sums(partial / CHECKSUMS, sorted(filter(Path.is_file, partial.rglob("*"))))
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        check_destination(folder, contents, overwrite)
        _publish(partial, folder, contents, overwrite)
    except OSError as error:
        raise InputError(
            f"{folder}: could not be written ({error}); nothing was left behind, make room and try "
            "again"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _folder_at_url(
    folder: URLPath, contents: FolderFormat, overwrite: bool, checksums: bool
) -> Iterator[URLPath]:
    check_destination(folder, contents, overwrite)
    (folder / PARTIAL).write_text("This folder is being written, or its writer was killed.\n")
    (folder / contents.config).unlink(missing_ok=True)
    for file in folder.files():
        if file.name != PARTIAL:
            file.unlink(missing_ok=True)
    yield folder
    if checksums:
        write_sums(folder / CHECKSUMS, [f for f in folder.files() if f.name != PARTIAL])
    (folder / PARTIAL).unlink()


def _sweep(folder: Path, contents: FolderFormat) -> None:
    """Removes the hidden folders of killed processes, not those of running ones."""
    kinds = ["partial"]
    if folder.exists():  # else what was set aside may be the only copy
        kinds.append("old")
    for kind in kinds:
        for leftover in folder.parent.glob(f"{glob.escape(f'.{folder.name}')}.{kind}-*"):
            pid = leftover.name.rpartition("-")[2]
            if not pid.isdigit() or _is_another_running(int(pid)):
                continue
            # An old output that is half removed may lack its config: its other files are enough.
            if kind == "partial" or not contents.unknown(leftover):
                shutil.rmtree(leftover, ignore_errors=True)


def _is_another_running(pid: int) -> bool:
    """Whether `pid` runs and is not this process, whose number an earlier one may have had."""
    return pid != os.getpid() and is_running(pid)


def _publish(partial: Path, folder: Path, contents: FolderFormat, overwrite: bool) -> None:
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    replaces = overwrite and folder.exists()
    if replaces:
        folder.rename(old)
    try:
        if replaces and any(old.iterdir()):  # under this name no other program adds files
            check_replaceable(old, contents, label=folder)
        try:
            partial.rename(folder)  # also onto an empty folder
        except OSError as error:
            if error.errno not in _NO_REPLACE or not folder.is_dir():
                raise
            folder.rmdir()
            partial.rename(folder)
        _sync(folder.parent)
    except BaseException:
        if replaces:
            old.rename(folder)
        raise
    if replaces:
        shutil.rmtree(old)
