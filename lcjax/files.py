"""Atomic writes: files and folders are complete or absent, even if the process is killed.

Both are written under another name and renamed when their content is on the disk, so that a machine
that crashes leaves no empty file under the final name either. A folder is replaced only if this
library wrote every file in it: `FolderFormat` lists the files of one kind of output folder.

At a URL (`lcjax.storage`) a file is complete or absent as well. A folder there contains a file
`PARTIAL` until it is complete, and its config file is written last.

`write_sums` and `check_sums` detect files that were damaged later, by their SHA-256 sums.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import yaml

from lcjax.errors import InputError, check_flags
from lcjax.storage import (
    StorageError,
    URLPath,
    check_regular,
    is_running,
    read_range,
    to_path,
)

CHECKSUMS = "checksums.sha256"  # file of a folder with the sums of its other files
PARTIAL = "lcjax.partial"  # file that marks an incomplete folder at a URL
_SUM = re.compile(r"(?P<sum>[0-9a-f]{64}) [ *](?P<path>.+)")  # a line of `sha256sum`
_SEAL = "sha256"  # key of a JSON object that `seal` adds
_BLOCK = 1 << 24  # bytes of a file that are hashed at once
SMALL = 1 << 24  # bytes of the largest file that is compared with its sum whenever it is opened
_CHANGED = "is not as it was written: another SHA-256 sum"
_MAX_NAME = 255  # bytes of a file's name, on all usual file systems
_MAX_LISTED = 5  # unknown files that an error names
_MAX_COUNTED = 1_000  # unknown files after which counting ends: the folder may be a whole disk
# FUSE and network file systems, such as a mounted Google Drive, may not be able to sync.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_REPLACE = (*_NO_SYNC, errno.EEXIST, errno.ENOTEMPTY)  # of a rename onto an existing path


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike | URLPath, mode: str = "w") -> Iterator[IO]:
    """Yields a file `<path>.tmp` that becomes `path` when the block ends without an error.

    If the block raises, the draft is deleted; an OSError then names `path`.

    Args:
      path: the file to write. It is replaced if it exists; its folder is created.
      mode: "w" (UTF-8) or "wb".
    """
    path = to_path(path)
    if isinstance(path, URLPath):
        with path.open(mode) as file:
            yield file
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    try:
        with open(draft, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            sync_file(file)
        _replace(draft, path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and not error.filename:  # of a full disk
            error.filename = str(path)
        raise
    _sync(path.parent)


def _replace(draft: Path, path: Path) -> None:
    """Renames a file; deletes the old one first where a rename cannot replace it."""
    try:
        draft.replace(path)
    except OSError as error:
        if error.errno not in _NO_REPLACE or not path.is_file():
            raise
        path.unlink()
        draft.rename(path)


def sync_file(file: IO) -> None:
    """Flushes an open file; returns when its content is on the disk."""
    file.flush()
    _fsync(file.fileno())


def _sync(path: Path) -> None:
    """Returns when the content of a file, or the names in a folder, are on the disk."""
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
    """Writes a text file atomically, so that no reader sees a part of it."""
    with atomic_file(path) as file:
        file.write(text)


class FileSum(NamedTuple):
    """The SHA-256 sum that a file, or a part of it, had when it was written."""

    file: Path
    sum: str
    start: int = 0
    size: int | None = None  # bytes of the part; None: to the end

    @property
    def num_bytes(self) -> int:
        """Number of bytes that are compared; 0 for a missing file."""
        end = self.file.stat().st_size if self.file.is_file() else 0
        return max(end - self.start, 0) if self.size is None else self.size

    def damage(self, progress: Callable[[int], Any] = lambda _: None) -> str | None:
        """Returns what is wrong with the file, or None; calls `progress` with numbers of bytes."""
        if not self.file.is_file():
            return f"{self.file} is missing"
        digest, end = hashlib.sha256(), self.start + self.num_bytes
        for start in range(self.start, end, _BLOCK):
            block = read_range(self.file, start, min(_BLOCK, end - start))
            digest.update(block)
            progress(len(block))
        if digest.hexdigest() == self.sum:
            return None
        part = "" if self.size is None else f" (bytes {self.start:,} to {end:,})"
        return f"{self.file}{part} {_CHANGED}"


def write_sums(path: Path, sums: Mapping[str, str]) -> None:
    """Writes SHA-256 sums {name of a file, relative to the folder of `path`: sum} to `path`.

    `sha256sum -c` in that folder compares them as `check_sums` does.
    """
    write_whole(path, "".join(f"{sum}  {name}\n" for name, sum in sums.items()))


def sums_of(files: Sequence[Path], folder: Path) -> dict[str, str]:
    """Returns the SHA-256 sums of files by their names relative to `folder`."""
    with concurrent.futures.ThreadPoolExecutor() as executor:
        sums = list(executor.map(sha256, files))
    return {file.relative_to(folder).as_posix(): sum for file, sum in zip(files, sums)}


def write_index(path: Path, value: Any, sums: Mapping[str, str]) -> None:
    """Writes the JSON file that completes a folder, after `CHECKSUMS` with its sum and `sums`."""
    text = json.dumps(value, indent=1)
    index_sum = hashlib.sha256(text.encode()).hexdigest()
    write_sums(path.with_name(CHECKSUMS), {**sums, path.name: index_sum})
    write_whole(path, text)


def check_sums(paths: Sequence[Path], *, part: int = 0, num_parts: int = 1) -> None:
    """Raises an InputError for the first file that is missing or has another SHA-256 sum.

    Args:
      paths: the files that `write_sums` wrote; if there are none, nothing is compared.
      part: index of the part of the entries to compare; other processes compare the other parts.
      num_parts: number of parts.
    """
    entries = [(path.parent, *entry) for path in paths for entry in read_sums(path).items()]
    entries = entries[part::num_parts]
    for folder, name, _ in entries:
        if not (folder / name).is_file():
            raise InputError(f"{name} is missing")
    with concurrent.futures.ThreadPoolExecutor() as executor:
        sums = executor.map(sha256, [folder / name for folder, name, _ in entries])
        for (_, name, expected), actual in zip(entries, sums, strict=True):
            if actual != expected:
                raise InputError(f"{name} {_CHANGED}")


def read_sums(path: Path) -> dict[str, str]:
    """Returns the sums in a file of `write_sums` by the names of their files.

    Raises:
      InputError: the file is damaged, or empty.
    """
    sums = {}
    check_regular(path)
    text = path.read_bytes().decode(errors="replace")
    if text and not text.endswith("\n"):
        raise InputError(f"{path.name} is damaged: its last line is cut")
    for line in text.splitlines():
        entry = _SUM.fullmatch(line)
        file = None if entry is None else Path(entry["path"])
        if file is None or file.is_absolute() or ".." in file.parts:
            raise InputError(f"{path.name} is damaged: {line!r:.90} is no sum of a file below it")
        sums[entry["path"]] = entry["sum"]
    if not sums:
        raise InputError(f"{path.name} is empty")
    return sums


def update_sums(folder: Path, files: Sequence[Path], keep: Collection[str] = ("",)) -> None:
    """Writes the sums of files into `CHECKSUMS` of a folder, beside those of other files.

    Args:
      folder: the folder.
      files: files of the folder; those that do not exist are left out.
      keep: beginnings of the names whose earlier sums stay.
    """
    path = folder / CHECKSUMS
    try:
        sums = read_sums(path) if path.is_file() else {}
    except InputError:  # damaged: `check` has named it
        sums = {}
    sums = {name: sum for name, sum in sums.items() if name.startswith(tuple(keep))}
    write_sums(path, sums | sums_of([file for file in files if file.is_file()], folder))


class FolderSums:
    """The sums in `CHECKSUMS` of a folder, with which its files are compared when they are read.

    Folders of older versions have no sums, and their files are not compared.
    """

    def __init__(self, folder: Path, way_out: str):
        """Reads the sums; `way_out` ends the errors: what to do if a file is damaged."""
        self._folder, self._way_out = folder, way_out
        file = folder / CHECKSUMS
        try:
            self._sums = read_sums(file) if file.is_file() else {}
        except InputError as error:
            raise InputError(f"{folder}: {error}; {way_out}") from None

    def check(self, name: str, data: bytes | None = None) -> None:
        """Raises an InputError if a file differs from its sum; `data`: its content, if read."""
        if (expected := self._sums.get(name)) is None:
            return
        if data is None:
            damage = FileSum(self._folder / name, expected).damage()
        else:
            is_equal = hashlib.sha256(data).hexdigest() == expected
            damage = None if is_equal else f"{self._folder / name} {_CHANGED}"
        if damage is not None:
            raise InputError(f"{damage}; {self._way_out}")

    def check_small(self, *beginnings: str) -> None:
        """Compares all files of at most `SMALL` bytes, or those with such beginnings of names.

        Larger ones are compared by `python -m lcjax.check`: it would take a third of the time in
        which they are loaded.
        """
        for name, sum in self._sums.items():
            if (
                name.startswith(beginnings or "")
                and FileSum(self._folder / name, sum).num_bytes <= SMALL
            ):
                self.check(name)


def seal(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object for a JSON file with the SHA-256 sum of its keys and values as last key."""
    values = json.loads(json.dumps(values, default=str))
    values.pop(_SEAL, None)  # of the object before it was changed
    return values | {_SEAL: _sum_of(values)}


def unseal(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object that was given to `seal`; one of an older version has no sum.

    Raises:
      ValueError: its sum is another.
    """
    key, last = next(reversed(values.items()), (None, None))
    if key != _SEAL and not (isinstance(last, str) and re.fullmatch("[0-9a-f]{64}", last)):
        return dict(values)
    values = {name: value for name, value in values.items() if name != key}
    if key != _SEAL or last != _sum_of(values):
        raise ValueError("another SHA-256 sum")
    return values


def _sum_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Returns the SHA-256 sum of a file, in hexadecimal digits."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(text: str | bytes) -> Any:
    """Calls `json.loads`, and raises a ValueError also for nesting that is too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_input(key: str, name: str | None) -> str:
    """Returns the text of the file that the value `name` of a config key names."""
    if name is None:
        raise InputError(f"{key}=null: give --{key}=FILE, a text file")
    path = to_path(name)
    if not path.is_file():
        raise InputError(f"{key}={path} is no file")
    return read_text(path)


def read_text(path: Path) -> str:
    """Returns the text of a file; raises an InputError if it is not UTF-8."""
    check_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from None


def read_sealed(path: Path, way_out: str) -> dict[str, Any]:
    """Returns the object in a JSON file that `seal` made; raises an InputError if it differs."""
    values = read_json(path)
    try:
        return unseal(values)
    except ValueError:
        raise InputError(f"{path} {_CHANGED}; {way_out}") from None


def read_json(path: Path, default: Any = None) -> Any:
    """Returns the dictionary in a JSON file; `default` if the file is absent."""
    if not path.is_file() and default is not None:
        return default
    check_regular(path)
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except InputError:  # a StorageError, which is a ValueError, too
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
    """Returns the path that `package:NAME[/path]` names, without importing the package.

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


def check_outputs(files: Sequence[Path], mark: str) -> None:
    """Raises an InputError if a command would replace files that it did not write before.

    Args:
      files: the files that the command writes.
      mark: a text that it writes into the first one of them.
    """
    existing = [file for file in files if file.exists()]
    if not existing or (
        files[0].is_file() and mark in files[0].read_text(encoding="utf-8", errors="replace")
    ):
        return
    raise InputError(
        f"{existing[0]} would be replaced, and this command did not write it; name another folder"
    )


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    with atomic_file(path) as file:
        json.dump(value, file, indent=1)


def write_hf_json(path: Path, values: dict[str, Any]) -> None:
    """Writes a JSON file in the form of transformers; not atomic: use it in an `atomic_folder`."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class FolderFormat:
    """The files of one kind of output folder, by which such a folder is recognised.

    A download of the user may have files of the same names, so the config's keys are tested, too.
    """

    name: str  # of this kind of folder, in errors
    files: tuple[str, ...]  # patterns of relative paths; `**` matches everything below a folder
    config: str  # JSON or YAML file that every such folder has
    keys: frozenset[str]  # keys that this library always writes into it
    foreign_keys: frozenset[str] = frozenset()  # keys that other libraries always write into it

    def unknown(self, folder: Path, names: Collection[str] | None = None) -> list[str]:
        """Returns the relative paths of files, links and empty folders not of this format.

        Stops after `_MAX_COUNTED` + 1 paths. `names`: entries of `folder` to test; None: all.
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
        """Whether a path is of this format; links, sockets and so on are only below a `**`."""
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
        """Whether the config has this library's keys; also True for a partial folder at a URL."""
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
    """Whether each part matches; a `**` at the end of `pattern` matches one part or more."""
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
      folder: the existing folder; symbolic links in it are not followed.
      contents: the format of the folder.
      names: entries of `folder` that are to be replaced; None: all.
      label: path of the folder in the error; None: `folder`.
    """
    if unknown := contents.unknown(folder, names):
        num_unlisted = len(unknown) - _MAX_LISTED
        listed = ", ".join(unknown[:_MAX_LISTED])
        if num_unlisted > 0:
            at_least = "at least " if len(unknown) > _MAX_COUNTED else ""
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
    """Raises an InputError unless a destination is absent, empty or may be replaced.

    Args:
      folder: the destination.
      contents: the format of the folder that will be written.
      overwrite: whether an existing folder of this format may be replaced.
      way_out: the user's option for `overwrite`, for the error.
    """
    check_flags(overwrite=overwrite)
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
    """Yields a hidden folder, which becomes `folder` when the block ends without an error.

    `check_destination` is called again when the new folder is complete, so that files which were
    added to `folder` in the meantime are not deleted. With `checksums` the sums of all files are
    written to `CHECKSUMS`, which `contents` must list.

    At a URL the block writes into `folder` itself, whose earlier files are deleted first. The block
    must write the config of `contents` last: without it the folder is not of this format.
    """
    check_flags(overwrite=overwrite, checksums=checksums)
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
            files = sorted(filter(Path.is_file, partial.rglob("*")))
            write_sums(partial / CHECKSUMS, sums_of(files, partial))
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
        files = [file for file in folder.files() if file.name != PARTIAL]
        write_sums(folder / CHECKSUMS, sums_of(files, folder))
    (folder / PARTIAL).unlink()


def _sweep(folder: Path, contents: FolderFormat) -> None:
    """Removes the hidden folders that killed processes left behind."""
    kinds = ["partial"]
    if folder.exists():  # otherwise the old folder may be the only copy
        kinds.append("old")
    for kind in kinds:
        for leftover in folder.parent.glob(f"{glob.escape(f'.{folder.name}')}.{kind}-*"):
            pid = leftover.name.rpartition("-")[2]
            if not pid.isdigit() or _is_another_running(int(pid)):
                continue
            # A half-removed old output may lack its config, so only its files are tested.
            if kind == "partial" or not contents.unknown(leftover):
                shutil.rmtree(leftover, ignore_errors=True)


def _is_another_running(pid: int) -> bool:
    """Whether another process with the id `pid` runs; an earlier one may have had this one's."""
    return pid != os.getpid() and is_running(pid)


def _publish(partial: Path, folder: Path, contents: FolderFormat, overwrite: bool) -> None:
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    replaces = overwrite and folder.exists()
    if replaces:
        folder.rename(old)
    try:
        if replaces and any(old.iterdir()):  # no other program adds files under this name
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
