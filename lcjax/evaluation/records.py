"""Records on disk: one JSON line per scored unit, written at once, continued after a stop.

They are the source of truth of a run; tables and figures are made from them alone.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from lcjax.errors import InputError
from lcjax.evaluation.task import Record

FORMAT = 2
_FREE = ("out", "resume", "batch", "mesh")  # keys that may change when a run is continued

Key = tuple[str, int, int]  # method, length, index of the unit


def fingerprint(settings: Mapping) -> str:
    """Hash of everything that decides what a run computes."""
    text = json.dumps({"format": FORMAT, **_binding(settings)}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """The folder of one run."""

    def __init__(self, folder: str | Path, settings: Mapping, *, resume: bool = True):
        self.folder = Path(folder)
        self.hash = fingerprint(settings)
        marker = self.folder / "run.json"
        used = any((self.folder / "records").glob("*.jsonl"))
        # Without a record there is nothing to lose: a mistake that was put right may start again.
        if used and not marker.exists():
            raise InputError(f"out={self.folder} holds records of an unknown run; choose another")
        if used:
            self._compare(json.loads(marker.read_text()), settings)
        if used and not resume:
            raise InputError(
                f"out={self.folder} holds records of this run; set resume=true to continue it, or "
                "choose another folder"
            )
        (self.folder / "records").mkdir(parents=True, exist_ok=True)
        entry = {"format": FORMAT, "hash": self.hash, "config": settings}
        _replace(marker, json.dumps(entry, indent=1, default=str) + "\n")

    def _compare(self, before: Record, settings: Mapping) -> None:
        if before["hash"] == self.hash:
            return
        old, new = _flat(_binding(before["config"])), _flat(_plain(_binding(settings)))
        changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
        shown = ", ".join(
            f"{key} was {json.dumps(old.get(key))}, is {json.dumps(new.get(key))}"
            for key in changed[:3]
        )
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        what = shown + more if changed else f"record format {before['format']}, now {FORMAT}"
        raise InputError(
            f"out={self.folder} holds another run ({what}); choose another folder, or undo that"
        )

    def path(self, task: str) -> Path:
        return self.folder / "records" / f"{task}.jsonl"

    def read(self, task: str) -> dict[Key, Record]:
        """All finished records; a line that a killed process left half written is cut off."""
        path = self.path(task)
        if not path.exists():
            return {}
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with path.open("r+b") as file:
                file.truncate(whole)
        records = {}
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                record = json.loads(line)
                key = record["method"], record["length"], record["window"]
            except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
                raise InputError(
                    f"{path}:{number} is not a record; delete that line, it will be computed again"
                ) from None
            records[key] = record
        return records

    def append(self, task: str, records: Sequence[Record]) -> None:
        """Adds finished records; they are in the file when this returns."""
        with self.path(task).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(clean(record)) + "\n" for record in records))


def clean(value):
    """`value` for strict JSON: numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {key: clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _binding(settings: Mapping) -> dict:
    return {key: value for key, value in settings.items() if key not in _FREE}


def _plain(settings: Mapping) -> dict:
    return json.loads(json.dumps(settings, default=str))


def _flat(tree, prefix: str = "") -> dict:
    """`{"methods.0.name": ...}` of nested dicts and lists."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    flat = {}
    for key, value in pairs:
        name = f"{prefix}{key}"
        flat.update(_flat(value, name + ".") if isinstance(value, dict | list) else {name: value})
    return flat


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
