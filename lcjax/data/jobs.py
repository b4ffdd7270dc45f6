"""Jobs: divide long work on the files of sources among any number of processes.

The jobs depend only on the text and the settings. Each writes one shard of a folder atomically.
After a kill, the same command does the missing jobs, and the folder equals that of an uninterrupted
run. `lcjax.data.prepare` (token ids) and `lcjax.retrieval.build_store` (passages) use jobs.
"""

import collections
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from lcjax.data.files import FileCache, FileList
from lcjax.data.readers import Reader, SourceFiles
from lcjax.errors import InputError
from lcjax.files import read_json, write_json

# Minimum and maximum bytes of a job, and the target number of jobs within these limits
_MIN_JOB_BYTES, _MAX_JOB_BYTES, _NUM_JOBS = 1 << 20, 1 << 26, 64

# order(count, source) returns the permutation int [count] in which `count` files of a source are
# read, and order(count, source, file) that of the records of a file.
Order = Callable[..., np.ndarray]


WHY_LOCAL = "copy the folder when it is complete; it can be read from there"


class Job(NamedTuple):
    """Part `part` of `parts` of some files of a source.

    `files` are indices of files in reading order. A job of several files has a single part.
    """

    number: int
    source: int
    files: tuple[int, ...]
    part: int
    parts: int
    size: int  # bytes on disk, for the progress bar


def begin(
    out: Path,
    identity: dict[str, Any],
    index: str,
    plan: str,
    *,
    free: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Creates a folder of shards, or checks that an existing one has the same identity.

    Several processes may begin the same folder at once.

    Args:
      out: the folder.
      identity: everything that determines its content.
      index: name of the file that completes the folder.
      plan: name of the file of an incomplete folder.
      free: settings that may change in an incomplete folder, each if it had this value: finished
        shards are then those of any other value, too.

    Returns:
      The index of a complete folder, None for an incomplete one.

    Raises:
      InputError: the folder has another identity, or holds other files.
    """
    free = free or {}
    # Listed before the test for the plan, because another process may write it at any moment.
    drafts = f"{plan}."
    others = [f for f in out.iterdir() if not f.name.startswith(drafts)] if out.is_dir() else []
    for file in (index, plan):
        if (out / file).is_file():
            content = read_json(out / file)
            saved = content.get("identity", {})
            changed = [key for key, value in identity.items() if saved.get(key) != value]
            if (
                file == plan
                and changed
                and all(k in free and saved.get(k) == free[k] for k in changed)
            ):
                _write_plan(out, identity, plan)
                return None
            if changed:
                key = changed[0]
                raise InputError(
                    f"out={out} was made with {key} {saved.get(key)}, which is {identity[key]}"
                    " now: name another folder, or delete this one"
                )
            return content if file == index else None
    if others or (out.exists() and not out.is_dir()):
        raise InputError(f"out={out} exists and is not empty: name another folder")
    _write_plan(out, identity, plan)
    return None


def _write_plan(out: Path, identity: dict[str, Any], plan: str) -> None:
    try:
        draft = out / f"{plan}.{uuid.uuid4().hex}"
        write_json(draft, {"identity": identity})
        draft.replace(out / plan)
    except OSError as error:
        raise InputError(f"out={out} cannot be written: {error}; name another folder") from None


def parse_part(part: str) -> tuple[int, int]:
    """Returns (i, n) of `i/n`: the shards i, i + n, ..., counted from 0."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", part)
    if not match or not int(match[1]) < int(match[2]):
        raise InputError(f"part={part} must be i/n with i in 0 ... n - 1, such as 0/4")
    return int(match[1]), int(match[2])


def make_jobs(sources: Sequence[FileList], order: Order) -> list[Job]:
    """Divides the files into jobs of similar size.

    The jobs depend on the files and the order, not on the number of processes.
    """
    total = sum(files.size for files in sources)
    limit = min(max(total // _NUM_JOBS, _MIN_JOB_BYTES), _MAX_JOB_BYTES)
    jobs: list[tuple] = []  # without their numbers
    for source, files in enumerate(sources):
        group, size = [], 0
        for file in order(len(files), source).tolist():
            num_bytes, path = files.sizes[file], files[file][1]
            if group and size + num_bytes > limit:
                jobs.append((source, tuple(group), 0, 1, size))
                group, size = [], 0
            # A .gz has no random access: each part would unpack all of it.
            parts = 1 if path.suffix.lower() == ".gz" else -(-num_bytes // (2 * limit))
            if parts > 1:
                share = num_bytes // parts
                jobs += [(source, (file,), part, parts, share) for part in range(parts)]
            else:
                group, size = [*group, file], size + num_bytes
        if group:
            jobs.append((source, tuple(group), 0, 1, size))
    return [Job(number, *job) for number, job in enumerate(jobs)]


class JobReader:
    """Reads the records of jobs; the parts of a file share its index."""

    def __init__(self, sources: Sequence[SourceFiles], order: Order):
        self._sources, self._order = sources, order
        self._file: tuple[int, int] | None = None
        self._reader: Reader | None = None

    def records(self, job: Job) -> Iterator[tuple[SourceFiles, Reader, int]]:
        """Yields (files of the source, reader of the file, number of the record) in order."""
        files = self._sources[job.source]
        source = files.source
        for file in job.files:
            if self._file != (job.source, file):
                self._file, self._reader = (job.source, file), files.open(file, FileCache())
            reader = self._reader
            count = len(reader)
            indices = self._order(count, job.source, file)
            first, last = (count * part // job.parts for part in (job.part, job.part + 1))
            for index in indices[first:last].tolist():
                if source.hashes is None or source.selects(reader.split_hash(index)):
                    yield files, reader, index


def read_shard(out: Path, number: int) -> dict[str, Any] | None:
    """Reads the description of a shard; returns None if the shard is incomplete."""
    file = out / f"{number:06d}.json"
    return read_json(file) if file.is_file() else None


def worker_pool(num_workers: int, start: Callable[..., None], *args: Any) -> Executor:
    """Returns a process pool whose processes call `start(*args)` first.

    For a single worker it calls `start(*args)` itself, and returns a pool of one thread.
    """
    if num_workers == 1:
        start(*args)
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(
        num_workers,
        # Forking a process with threads, such as those of jax, may hang it.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(start, args),
    )


def _start_worker(start: Callable[..., None], args: tuple) -> None:
    """Initialises every process of the pool."""
    start(*args)
    if (parent := multiprocessing.parent_process()) is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends the workers
        # A killed parent cannot end its workers, which would wait for work forever.
        watch = threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True)
        watch.start()


def map_ahead(
    pool: Executor, function: Callable, tasks: Iterable[tuple[Job, Any]], depth: int
) -> Iterator[tuple[Job, Any]]:
    """Yields results in the order of the tasks, and runs up to `depth` tasks ahead.

    Unlike `Executor.map`, it draws the tasks lazily.
    """
    queue: collections.deque = collections.deque()
    for job, argument in tasks:
        queue.append((job, pool.submit(function, job, argument)))
        if len(queue) >= depth:
            job, future = queue.popleft()
            yield job, future.result()
    while queue:
        job, future = queue.popleft()
        yield job, future.result()


class Progress:
    """A progress bar over jobs, and the error message of an interrupted or broken run."""

    def __init__(self, jobs: Sequence[Job], label: str, out: Path):
        # In a log file one line a minute is enough.
        interval = 0.1 if sys.stderr.isatty() else 60.0
        size = sum(job.size for job in jobs)
        self._bar = tqdm(total=size, unit="B", unit_scale=True, desc=label, mininterval=interval)
        self._num_jobs, self._num_done, self._out = len(jobs), 0, out

    def update(self, job: Job, note: str) -> None:
        """Counts a finished job, and shows `note` after the bar."""
        self._num_done += 1
        self._bar.update(job.size)
        self._bar.set_postfix_str(note, refresh=False)

    @contextlib.contextmanager
    def run(self, pool: Executor | None) -> Iterator[None]:
        """Shuts the pool down at the end of the block.

        Errors of an interrupted block state how many shards are written. Pass None for an executor
        that belongs to the caller, which is not shut down.
        """
        done = f"of {self._num_jobs} shards are"
        try:
            with self._bar:
                yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"{self._num_done} {done} in {self._out}; the same command resumes"
            ) from None
        except BrokenProcessPool:
            raise InputError(
                f"a process ended early, perhaps for lack of memory; {self._num_done} {done}"
                " written: run the same command again, with fewer workers"
            ) from None
        finally:
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
