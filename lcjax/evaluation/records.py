"""Records on disk: one JSON line per scored unit, appended after every batch.

Tables and figures are made from records alone, and a stopped run continues from them. Measured time
and memory are in files of their own, so records and tables do not depend on when a run was stopped.

The last key of a line, `crc`, is a checksum of the others, so that a line which was damaged later
is found; lines of older versions have none. A run that ends also writes the SHA-256 sums of all
files of its folder (`lcjax.files.CHECKSUMS`).
"""

import contextlib
import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lcjax.checkpoints.run_folder import MODEL_CONFIG
from lcjax.config import ERROR, dump
from lcjax.errors import INT32_MAX, InputError, one_line
from lcjax.evaluation.statistics import group_by
from lcjax.evaluation.task import Record, Records
from lcjax.files import (
    CHECKSUMS,
    FolderFormat,
    atomic_file,
    check_replaceable,
    parse_json,
    read_sealed,
    seal,
    sums_of,
    write_sums,
    write_whole,
)
from lcjax.parallel import distributed
from lcjax.parallel.run_lock import GUARD, LOCK
from lcjax.storage import AppendedFile, close_all, remove, to_path
from lcjax.tree import flatten

if TYPE_CHECKING:
    from lcjax.evaluation.eval_config import EvalConfig

FORMAT = 3  # incremented when numbers change although the settings are the same
MARKER = "run.json"  # settings of the records
INPUTS = "inputs"  # key of the marker: identities of checkpoints and datastores
LABELS = "labels"  # key of the marker: the names of the tasks
# Key of the marker: settings of methods and tasks that have records and are not in the last config.
EARLIER = "earlier"
REPORT = "report.html"
CONFIG = "config.yaml"
COSTS = "costs"  # folder
# Fields of a record on time and memory: measured ones, and the bytes of a row's KV cache.
COST = ("seconds", "compile_seconds", "peak_bytes", "peak_bytes_at_most", "cache_bytes")
_NO_COST = {**dict.fromkeys(COST), "seconds": 0.0, "compile_seconds": 0.0}
_FILES = (MARKER, CONFIG, "summary.json", REPORT, ERROR, CHECKSUMS)
_FOLDERS = ("records", COSTS, "tables", "figures", "export")
RUN_FOLDER = FolderFormat(
    name="the folder of an evaluation",
    files=(
        *(*_FILES, LOCK, GUARD, "records/*.jsonl", "tables/*.md", "tables/*.csv", "tables/*.tex"),
        *("figures/*.png", "figures/*.svg"),
        *(f"{COSTS}/*.jsonl", f"{COSTS}/*.csv", f"{COSTS}/*.md"),
        # Official scorers write their results next to the answers.
        *("export/lm_eval/**", "export/longbench/**", "export/ruler/**"),
    ),
    config=MARKER,
    keys=frozenset({"format", "hash", "config"}),
)
_CRC = ', "crc": "{:08x}"}}'  # end of a line of records
# Fields that are read as float32 arrays; lists take eight times the memory.
COMPACT = frozenset({"position_nll"})
# Keys that may change when a run is continued.
_FREE = ("run", "batch_size", "readings_gb", "mesh", "distributed", "published")
# Keys whose entries have names; records refer to their method and task by name.
_NAMED = ("methods", "tasks", "trainings")

Key = tuple[str, int, int]  # method, length, index of the unit


def check_origin(folder: Path) -> None:
    """Raises an InputError if a folder without a run holds files that a run would replace."""
    has_records = any((folder / "records").glob("*.jsonl"))
    if RUN_FOLDER.has_config(folder) or (has_records and (folder / MARKER).exists()):
        return  # `read_marker` names a damaged marker
    files = [name for name in _FILES if name != ERROR and (folder / name).exists()]
    folders = [name for name in _FOLDERS if any((folder / name).glob("*"))]
    if others := files + folders:
        raise InputError(
            f"run.folder={folder} is not the folder of an evaluation, and its {', '.join(others)}"
            " would be replaced; name a new folder"
        )


def fingerprint(settings: Mapping) -> str:
    """Returns a hash of the settings that determine what a run computes."""
    text = json.dumps({"format": FORMAT, **hashed_settings(settings)}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """The folder of one run: its records, their costs, and the marker with their settings."""

    def __init__(self, config: "EvalConfig", settings: Mapping):
        """Checks the folder and changes nothing.

        Raises:
          InputError: The folder holds another run, or `config.run.existing` forbids continuing it.
        """
        self.folder, self._config, self._settings = to_path(config.run.folder), config, settings
        self._files: dict[Path, AppendedFile] = {}
        self.hash, self._marker = fingerprint(settings), self.folder / MARKER
        if (self.folder / MODEL_CONFIG).exists():
            raise InputError(
                f"run.folder={self.folder} holds a training run; name another, as"
                f" {self.folder / 'eval'}"
            )
        # A folder without a record may be reused, as after a corrected mistake.
        used = any((self.folder / "records").glob("*.jsonl"))
        if used and not self._marker.exists():
            raise InputError(
                f"run.folder={self.folder} holds records of an unknown run; name another"
            )
        check_origin(self.folder)
        if used and config.run.existing == "refuse":
            raise InputError(
                f"run.folder={self.folder} holds a run; name another folder, or set run.existing to"
                " resume or overwrite"
            )
        self._replaces = used and config.run.existing == "overwrite"
        if self._replaces:
            self._check_overwrite()
        self._inputs: dict[str, str] = {}
        self._earlier: dict[str, dict] = {}
        if used and not self._replaces:
            before = read_marker(self.folder)
            self._earlier = self._compare(before, settings)
            self._inputs = before.get(INPUTS, {})

    def check_kept(self) -> None:
        """Raises an InputError if the folder was removed during the run."""
        if not self._marker.exists():
            raise InputError(
                f"run.folder={self.folder} was removed during the run, and its records are lost;"
                " start the command again"
            )

    def check_inputs(self, inputs: Mapping[str, str]) -> None:
        """Raises InputError if the records come from other checkpoints or datastores.

        `inputs` maps the name of each input to its identity. Texts and prompts are not among them:
        the digest of each unit covers them.
        """
        if not distributed.equal_on_all_processes(str(sorted(inputs.items()))):
            raise InputError(
                f"the processes of this job read different files ({', '.join(inputs)}); name"
                " folders on storage that all machines share"
            )
        before = self._inputs
        changed = [name for name in inputs if before.get(name, inputs[name]) != inputs[name]]
        if changed:
            raise InputError(
                f"run.folder={self.folder} holds records from before a change of the"
                f" {', '.join(changed)}; undo the change, name another folder, or set"
                " run.existing=overwrite"
            )
        self._inputs = before | dict(inputs)

    def begin(self) -> None:
        """Deletes an old run for existing=overwrite, and writes the settings of this one."""
        if not distributed.is_main_process():
            return
        if self._replaces:
            self._check_overwrite()
            for name in (*_FOLDERS, *reversed(_FILES)):  # the marker last, for a killed process
                remove(self.folder / name)
        self._replaces = False
        for name in ("records", COSTS):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        fields = {INPUTS: self._inputs} if self._inputs else {}
        fields |= {EARLIER: self._earlier} if self._earlier else {}
        describe(self.folder, self._config, self._settings, **fields)

    def _check_overwrite(self) -> None:
        """Raises InputError if the folder has files that no run wrote."""
        check_replaceable(self.folder, RUN_FOLDER, {*_FILES, *_FOLDERS})

    def _compare(self, before: Record, settings: Mapping) -> dict[str, dict]:
        """Compares settings with those of the records; methods and tasks may be added or removed.

        Returns:
          The settings of methods, tasks and trainings that have records and are not in `settings`.

        Raises:
          InputError: A setting differs that the records depend on.
        """
        old = _by_name(before["config"], before[LABELS])
        new = _by_name(settings, [task.label for task in self._config.tasks])
        earlier = _leave_shared(old, new, before.get(EARLIER, {}))
        old, new = (flatten(tree, separator=".", lists=True) for tree in (old, new))
        changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
        if before["hash"] != self.hash and (changed or before["format"] != FORMAT):
            listed = ", ".join(
                f"{key} was {json.dumps(old.get(key))}, is {json.dumps(new.get(key))}"
                for key in changed[:3]
            )
            listed += f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            what = listed if changed else f"record format {before['format']}, now {FORMAT}"
            raise InputError(
                f"run.folder={self.folder} holds another run ({what}); name another folder, undo"
                " that, or set run.existing=overwrite"
            )
        return earlier

    def path(self, task: str) -> Path:
        return records_file(self.folder, task)

    def read(self, task: str) -> dict[Key, Record]:
        """Reads all records of a task, and truncates a line that a killed process left incomplete.

        All processes read before one of them writes, and must find the same records.

        Raises:
          InputError: A line is no record, or the processes read different records.
        """
        records = self._read(task)
        if not distributed.equal_on_all_processes(str(sorted(records))):
            raise InputError(
                f"run.folder={self.folder} holds other records for this process ({len(records)} of"
                f" {task}) than for others of the job; name one on storage that all machines share"
            )
        return records

    def _read(self, task: str) -> dict[Key, Record]:
        path, costs = self.path(task), costs_file(self.folder, task)
        if self._replaces or not path.exists():
            return {}
        records, damaged = parse(_complete_lines(path), _complete_lines(costs))
        if damaged:
            kind, number = damaged[0]
            raise InputError(
                f"{costs if kind == COSTS else path}:{number} is not a record, or was damaged;"
                " delete that line, what it lacks will be computed again"
            )
        return records

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        close_all(self._files.values(), error)  # in order: costs before their records
        self._files.clear()

    def append(self, task: str, records: Records) -> None:
        """Appends records to the files of a task; only the first process writes."""
        if not distributed.is_main_process():
            return
        results, costs = split_costs(records)
        # A process that is killed in between leaves costs without a record, which are not read.
        for path, rows in ((costs_file(self.folder, task), costs), (self.path(task), results)):
            if path not in self._files:
                self._files[path] = AppendedFile(path)
            self._files[path].write(record_lines(rows))


def records_file(folder: Path, task: str) -> Path:
    """Returns the file with the records of a task."""
    return folder / "records" / f"{task}.jsonl"


def costs_file(folder: Path, task: str) -> Path:
    """Returns the file with the measured time and memory of the records of a task."""
    return folder / COSTS / f"{task}.jsonl"


def split_costs(records: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """Returns the records without measured fields, and these fields under the same keys."""
    results, costs = [], []
    for record in records:
        results.append({key: value for key, value in record.items() if key not in COST})
        names = ("method", "length", "window", *COST)
        costs.append({key: record[key] for key in names if key in record})
    return results, costs


def to_lines(records: Iterable[Mapping], *, ascii: bool = True) -> str:
    """Formats records as strict JSON, one line each."""
    lines = (json.dumps(clean(record), ensure_ascii=ascii) + "\n" for record in records)
    return "".join(lines)


def record_lines(records: Iterable[Mapping]) -> str:
    """Formats the lines of a file of records or costs, each with its checksum."""
    lines = to_lines(records).splitlines()
    return "".join(f"{line[:-1]}{_CRC.format(zlib.crc32(line.encode()))}\n" for line in lines)


def _without_checksum(line: bytes) -> bytes:
    """Returns a line of `record_lines` as `to_lines` wrote it; raises a ValueError if it differs.

    A line of an older version has no checksum. A damaged key is still recognised: two of the twelve
    characters around the checksum may be wrong.
    """
    end = _CRC.format(0).encode()
    body, tail = line[: -len(end)], line[-len(end) :]
    num_equal = sum(a == b for a, b in zip(tail, end) if b != ord("0"))
    if len(tail) < len(end) or num_equal < len(end) - 8 - 2:
        return line
    body += b"}"
    if tail != _CRC.format(zlib.crc32(body)).encode():
        raise ValueError("another checksum")
    return body


def _complete_lines(path: Path) -> bytes:
    """Returns the complete lines of a file, and removes one that a killed process has begun."""
    data = path.read_bytes() if path.exists() else b""
    end = data.rfind(b"\n") + 1
    if end < len(data) and distributed.is_main_process():
        with atomic_file(path, "wb") as file:
            file.write(data[:end])
    return data[:end]


class ParsedRecords(NamedTuple):
    """Records of a file, and its invalid lines as ("records" or `COSTS`, number of the line)."""

    records: dict[Key, Record]
    damaged: list[tuple[str, int]]


def parse(data: bytes, costs: bytes) -> ParsedRecords:
    """Returns the last record of each unit with its costs, and the places of invalid lines."""
    records, damaged = _parse(data)
    measured, damaged_costs = _parse(costs)
    places = [("records", number) for number in damaged]
    places += [(COSTS, number) for number in damaged_costs]
    costly = {key: {**_NO_COST, **measured.get(key, {}), **x} for key, x in records.items()}
    return ParsedRecords(costly, places)


def _parse(data: bytes) -> tuple[dict[Key, Record], list[int]]:
    records: dict[Key, Record] = {}
    damaged = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            record = parse_json(_without_checksum(line))
            unit: Key = record["method"], record["length"], record["window"]
            if not isinstance(unit[0], str) or type(unit[1]) is not int or unit[1] > INT32_MAX:
                raise ValueError("not a method and a length")
            arrays = {key: np.asarray(record[key], np.float32) for key in COMPACT & record.keys()}
            records[unit] = record | arrays
        except (ValueError, KeyError, TypeError):
            damaged.append(number)
    return records, damaged


@contextlib.contextmanager
def named_records(*folders: str | Path) -> Iterator[None]:
    """Names the records as the cause of an error if one of them may not be what eval.py wrote.

    A line with its checksum is as it was written, so an error is one of the program, or of a task
    that a user has defined. Other lines were changed by hand, or are of an older version.

    Args:
      *folders: the run folders whose records are read in the context.

    Raises:
      InputError: there was an error, and a line has no checksum.
    """
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        for folder in map(to_path, folders):
            for path in sorted([*folder.glob("records/*.jsonl"), *folder.glob(f"{COSTS}/*.jsonl")]):
                lines = path.read_bytes().splitlines()
                for number, line in enumerate(lines, 1):
                    if _without_checksum(line) == line:
                        raise InputError(
                            f"{path}:{number} has no checksum, and the records cannot be read"
                            f" ({type(error).__name__}: {one_line(error):.80}): a field is missing"
                            " or of another type; restore the file, or run the evaluation again"
                        ) from error
        raise


def by_cell(
    records: Iterable[Record], methods: Sequence[str] | None = None
) -> dict[tuple[str, int], list[Record]]:
    """Groups records by method and length, sorted by unit.

    `methods` is the order of the methods; None is the order of the records.
    """
    records = list(records)
    order = list(methods or dict.fromkeys(record["method"] for record in records))
    records.sort(key=lambda r: (order.index(r["method"]), r["length"], r["window"]))
    return group_by(records, itemgetter("method", "length"))


def read_marker(folder: Path) -> Record:
    """Reads the marker that `describe` wrote; raises an InputError if it is damaged."""
    way_out = "restore the file, or run the evaluation in another folder"
    marker = read_sealed(folder / MARKER, way_out)
    for key, kind, default in (
        ("hash", str, None), ("config", dict, None), (LABELS, list, None), (INPUTS, dict, {}),
        (EARLIER, dict, {}),
    ):  # fmt: skip
        if not isinstance(marker.get(key, default), kind):
            raise InputError(
                f"{folder / MARKER}: {key}={marker.get(key)!r:.40} is not what eval.py writes;"
                f" {way_out}"
            )
    return marker


def describe(folder: Path, config: "EvalConfig", settings: Mapping, **fields: Any) -> None:
    """Writes the settings of a run, and other `fields`, to its folder."""
    labels = [task.label for task in config.tasks]
    entry = {"format": FORMAT, "hash": fingerprint(settings), "config": settings, LABELS: labels}
    (folder / CHECKSUMS).unlink(missing_ok=True)  # of the files before
    write_whole(folder / MARKER, json.dumps(seal(entry | fields), indent=1) + "\n")
    dump(config, folder / CONFIG)


def write_folder_sums(folder: Path) -> None:
    """Writes the sums of all files of a complete run, for `python -m lcjax.check`."""
    names = [name for name in RUN_FOLDER.files if name not in (LOCK, GUARD, ERROR, CHECKSUMS)]
    patterns = [f"{name}/*" if name.endswith("**") else name for name in names]
    paths = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    files = [path for path in paths if path.is_file()]
    write_sums(folder / CHECKSUMS, sums_of(files, folder))


def folder_name(name: str) -> str:
    """Returns the folder name for the name of a method or run."""
    return re.sub(r"[^\w.+-]+", "_", name).strip("_.") or "_"


def clean(value):
    """Converts `value` for strict JSON: numbers that are not finite become null, arrays lists."""
    if isinstance(value, np.ndarray):  # the shortest text of each float32
        return [clean(float(str(item))) for item in value]
    if isinstance(value, Mapping):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def hashed_settings(settings: Mapping) -> dict:
    """Returns the settings that determine what a run computes."""
    return {key: value for key, value in settings.items() if key not in _FREE}


def _by_name(settings: Mapping, labels: Sequence[str]) -> dict:
    """Returns the hashed settings as JSON values, with methods and tasks by name."""
    tree = json.loads(json.dumps(hashed_settings(settings), default=str))
    if "methods" in tree:
        tree["methods"] = {method["name"]: method for method in tree["methods"]}
    if "tasks" in tree:
        tree["tasks"] = dict(zip(labels, tree["tasks"], strict=True))
    return tree


def _leave_shared(old: dict, new: dict, earlier: Mapping[str, dict]) -> dict[str, dict]:
    """Reduces `old` and `new` to the methods, tasks and trainings that both have, in place.

    Args:
      old: Settings of the records.
      new: Settings of the run.
      earlier: Entries with records that the config of `old` no longer had.

    Returns:
      The entries of `old` and `earlier` that are not in `new`, by kind and name.
    """
    removed = {}
    for kind in _NAMED:
        before, after = old.get(kind, {}), new.get(kind, {})
        before = earlier.get(kind, {}) | before
        if missing := {name: before[name] for name in before if name not in after}:
            removed[kind] = missing
        shared = before.keys() & after.keys()
        old[kind], new[kind] = ({name: x[name] for name in shared} for x in (before, after))
    return removed
