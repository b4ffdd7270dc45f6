"""One job of `prepare`: a few files, or a part of a large one, become one shard."""

import json
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lcjax.data.corpus import Document, FoundFiles
from lcjax.data.files import Files
from lcjax.data.opening import source_files
from lcjax.data.report import lengths_by_label
from lcjax.data.sources import TextSource
from lcjax.data.stream import derived_seed, order
from lcjax.data.token_files import DOCUMENT, DTYPES

_SMALLEST, _LARGEST, _JOBS = 1 << 20, 1 << 26, 64  # bytes of a job, and how many if that allows it


class Job(NamedTuple):
    """Part `part` of `parts` of some files of a source, by their places in the order of reading."""

    number: int
    source: int
    files: tuple[int, ...]
    part: int
    parts: int
    size: int  # bytes on disk, for the progress


@dataclass(frozen=True)
class Settings:
    """What all jobs have in common."""

    sources: tuple[TextSource, ...]
    seed: int | None  # None: files and documents stay in order
    least: int
    on_bad_text: str
    dtype: str
    out: Path


def plan(found: list[FoundFiles], settings: Settings) -> list[Job]:
    """Jobs of about equal size; they depend on the files alone, not on how many processes run."""
    total = sum(files.size for files in found)
    limit = min(max(total // _JOBS, _SMALLEST), _LARGEST)
    jobs: list[Job] = []
    for source, files in enumerate(found):
        group, size = [], 0

        def close():
            nonlocal group, size
            if group:
                jobs.append(Job(len(jobs), source, tuple(group), 0, 1, size))  # noqa: B023
            group, size = [], 0

        for file in _order(len(files), settings, source):
            bytes_, path = files.sizes[file], files[file][1]
            if size + bytes_ > limit:
                close()
            # A .gz has no random access: each part would unpack all of it.
            parts = 1 if path.suffix.lower() == ".gz" else -(-bytes_ // (2 * limit))
            if parts > 1:
                share = bytes_ // parts
                jobs += [
                    Job(len(jobs) + part, source, (int(file),), part, parts, share)
                    for part in range(parts)
                ]
                continue
            group, size = [*group, int(file)], size + bytes_
        close()
    return jobs


_worker: "Worker"


def start(settings: Settings, tokenizer: Any) -> None:
    """Runs once in every process."""
    global _worker
    _worker = Worker(settings, tokenizer)
    if (parent := multiprocessing.parent_process()) is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
        # Killed, it cannot: processes that wait for work would wait for ever.
        watch = threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True)
        watch.start()


def scan(job: Job, _: None) -> tuple[np.ndarray, list[str]]:
    """Characters and labels of the documents of a job, in order: what `upsample` looks at."""
    documents = [(d.characters, d.label) for d, _ in _worker.documents(job)]
    return np.array([c for c, _ in documents], np.int64), [label for _, label in documents]


def tokenise(job: Job, taken: np.ndarray | None) -> dict[str, Any]:
    """Writes the shard of a job, unless it is there; what it holds."""
    return finished(_worker.settings.out, job.number) or _worker.write(job, taken)


def finished(out: Path, number: int) -> dict[str, Any] | None:
    """What a shard holds, if it is complete."""
    file = out / f"{number:06d}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


class Worker:
    """What a process keeps between jobs."""

    def __init__(self, settings: Settings, tokenizer: Any):
        self.settings, self._tokenizer = settings, tokenizer
        bad = settings.on_bad_text
        self._sources = [source_files(source, bad) for source in settings.sources]
        self._opened: tuple[tuple[int, int] | None, Any] = (None, None)

    def documents(self, job: Job):
        """(document, hash of its name) in the order of reading."""
        files = self._sources[job.source]
        for file in job.files:
            if self._opened[0] != (job.source, file):  # parts of a file need its index only once
                self._opened = (job.source, file), files.open(file, Files())
            reader = self._opened[1]
            count = len(reader)
            indices = _order(count, self.settings, job.source, file)
            first, last = (count * part // job.parts for part in (job.part, job.part + 1))
            for index in indices[first:last].tolist():
                yield files.document(reader, index), reader.unit(index)

    def write(self, job: Job, taken: np.ndarray | None) -> dict[str, Any]:
        """The shard: ids, then a line per document, then the file that says it is complete."""
        out, name = self.settings.out, f"{job.number:06d}"
        dtype, labels, lines, lengths = DTYPES[self.settings.dtype], {}, [], []
        start = 0
        draft = out / f"{name}.bin.tmp"
        with open(draft, "wb") as file:
            for i, (document, unit) in enumerate(self.documents(job)):
                ids = self._ids(document) if taken is None or taken[i] else ()
                if len(ids) < self.settings.least:
                    continue
                file.write(np.asarray(ids, dtype).tobytes())
                label = labels.setdefault(document.label, len(labels))
                lines.append((start, document.characters, unit, label))
                lengths.append(len(ids))
                start += len(ids)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(out / f"{name}.bin")
        table = np.array(lines, DOCUMENT)
        with open(out / f"{name}.npy.tmp", "wb") as file:
            np.save(file, table)
        (out / f"{name}.npy.tmp").replace(out / f"{name}.npy")
        made = {"name": name, "documents": len(lines), "tokens": start, "labels": list(labels)}
        made["lengths"] = lengths_by_label(np.array(lengths, np.int64), table["label"], labels)
        write_json(out / f"{name}.json", made)
        return made

    def _ids(self, document: Document) -> list[int]:
        return self._tokenizer.encode(document.value) if document.value.strip() else []


def write_json(path: Path, value: Any) -> None:
    """Writes a file whole or not at all."""
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _order(count: int, settings: Settings, source: int, *more: int) -> np.ndarray:
    """The order in which a stream of the same seed reads them in its first epoch."""
    if settings.seed is None:
        return np.arange(count)
    return order(count, derived_seed(settings.seed, source), 0, *more)
