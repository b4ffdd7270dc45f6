"""`python -m lcjax.data prepare`: text becomes token ids on disk, once.

The work is cut into jobs that depend on nothing but the text and the settings; each makes one shard
(`lcjax.data.token_files`), whole or not at all. So any number of processes writes the same folder,
and after a kill the same command goes on with the shards that are missing.
"""

import collections
import dataclasses
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from lcjax.checkpoints import load_tokenizer
from lcjax.data import report
from lcjax.data.opening import source_files
from lcjax.data.prepare_job import Job, Settings, finished, plan, scan, start, tokenise, write_json
from lcjax.data.sources import INDEX, PLAN, Source, TextSource
from lcjax.data.token_files import FORMAT
from lcjax.data.upsample import Selection
from lcjax.errors import InputError

TOKENIZER = "tokenizer"  # folder beside the shards


@dataclass(frozen=True)
class PrepareConfig:
    """What to tokenise, and where to."""

    path: str = ""  # one source in short, as data.path; for labels or up-sampling use sources
    sources: list[Source] = field(default_factory=list)  # of type text; weights have no meaning
    tokenizer: str = ""  # of the model that will read it: what model.path may name
    out: str = ""  # folder to write
    shuffle: bool = True  # files, and the documents of each, lie in random order
    seed: int = 0  # of that order; data.seed of a training run that up-samples the same text
    min_document_tokens: int = 1  # documents with fewer tokens are left out
    on_bad_text: str = "error"  # bytes that are not UTF-8: error, skip the document, or replace
    dtype: str = "auto"  # of the ids: uint16 where the vocabulary fits it, else uint32
    workers: int = 0  # processes; 0: one for each core

    def __post_init__(self):
        if self.dtype not in ("auto", "uint16", "uint32"):
            raise InputError(f"dtype={self.dtype} is not one of auto, uint16, uint32")
        if self.on_bad_text not in ("error", "skip", "replace"):
            raise InputError(f"on_bad_text={self.on_bad_text} is not one of error, skip, replace")
        if self.min_document_tokens < 1 or self.workers < 0:
            raise InputError("min_document_tokens must be 1 or more, workers 0 or more")
        if bool(self.path) == bool(self.sources):
            raise InputError("give --path= or sources (one of them, not both): what to tokenise")
        for key in ("tokenizer", "out"):
            if not getattr(self, key):
                raise InputError(f"{key} is empty: give --{key}=")
        for i, source in enumerate(self.sources):
            if not isinstance(source, TextSource) or not source.path:
                raise InputError(f"sources.{i} must be of type text and have a path")

    def text_sources(self) -> list[TextSource]:
        return self.sources or [TextSource(self.path)]


def prepare(config: PrepareConfig) -> dict[str, Any]:
    """Writes what is missing of the folder; returns its index."""
    out = Path(config.out).expanduser()
    tokenizer = _tokenizer(config.tokenizer)
    settings = Settings(
        sources=tuple(config.text_sources()),
        seed=config.seed if config.shuffle else None,
        least=config.min_document_tokens,
        on_bad_text=config.on_bad_text,
        dtype=_dtype(config.dtype, tokenizer),
        out=out,
    )
    found = [source_files(s, config.on_bad_text).found for s in settings.sources]
    asked = _asked(config, settings, tokenizer.fingerprint, [f.fingerprint for f in found])
    if (index := begin(out, asked)) is None:
        jobs = plan(found, settings)
        _run(config, settings, tokenizer, jobs)
        index = _finish(config, settings, tokenizer, asked, len(jobs))
        (out / PLAN).unlink()
    print(report.table(index))
    print(f"{out}: train on it with --data.path={config.out}")
    return index


def _tokenizer(name: str) -> Any:
    try:
        return load_tokenizer(name)
    except InputError as error:
        raise InputError(f"tokenizer={name}: {str(error).removeprefix(f'{name}: ')}") from error


def _dtype(asked: str, tokenizer: Any) -> str:
    fits = tokenizer.vocab_size <= 1 << 16
    if asked == "uint16" and not fits:
        raise InputError(
            f"dtype=uint16 holds 65536 ids, and the tokenizer has {tokenizer.vocab_size}: set"
            " dtype=uint32 or auto"
        )
    return ("uint16" if fits else "uint32") if asked == "auto" else asked


def _asked(
    config: PrepareConfig, settings: Settings, tokenizer: str, text: list[str]
) -> dict[str, Any]:
    """What the shards depend on."""
    fields = {
        "sources": [
            {k: v for k, v in dataclasses.asdict(s).items() if k not in ("path", "weight")}
            for s in settings.sources
        ],
        "shuffle": config.shuffle,
        "seed": config.seed,
        "min_document_tokens": config.min_document_tokens,
        "on_bad_text": config.on_bad_text,
        "dtype": settings.dtype,
        "tokenizer": tokenizer,
        "text of the corpus": text,
    }
    return json.loads(json.dumps(fields))


def begin(
    out: Path, asked: dict[str, Any], index: str = INDEX, plan: str = PLAN
) -> dict[str, Any] | None:
    """The index of a folder that is finished; else makes it, or checks that it is the same.

    `index` and `plan` are files in it; `asked` is what its content depends on.
    """
    for file in (index, plan):
        if (out / file).is_file():
            there = json.loads((out / file).read_text(encoding="utf-8"))
            before = there.get("asked", {})
            for key, value in asked.items():
                if before.get(key) != value:
                    raise InputError(
                        f"out={out} was made with {key} {before.get(key)}, which is {value} now:"
                        " name another folder, or delete this one"
                    )
            return there if file == index else None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"out={out} exists and is not empty: name another folder")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / plan, {"asked": asked})
    return None


def _run(config: PrepareConfig, settings: Settings, tokenizer: Any, jobs: list[Job]) -> None:
    workers = config.workers or os.cpu_count() or 1
    done = tokens = 0
    # Forking a process with threads, such as those of jax, may hang it.
    context = multiprocessing.get_context("spawn")
    arguments = {"initializer": start, "initargs": (settings, tokenizer), "mp_context": context}
    if workers == 1:
        pool = _Here(settings, tokenizer)
    else:
        pool = ProcessPoolExecutor(min(workers, len(jobs)), **arguments)
    size = sum(job.size for job in jobs)
    try:
        # In a log file a line a minute will do.
        every = 0.1 if sys.stderr.isatty() else 60.0
        shown = {"unit": "B", "unit_scale": True, "desc": "tokenise", "mininterval": every}
        with tqdm(total=size, **shown) as bar:
            for job, made in _ahead(pool, tokenise, _chosen(pool, settings, jobs), 2 * workers):
                done, tokens = done + 1, tokens + made["tokens"]
                bar.update(job.size)
                bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
    except KeyboardInterrupt:
        message = f"{done} of {len(jobs)} shards are in {config.out}; the same command goes on"
        raise KeyboardInterrupt(message) from None
    except BrokenProcessPool:
        raise InputError(
            f"a process ended early, perhaps for want of memory; {done} of {len(jobs)} shards are"
            " there: run the same command again, with fewer workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Here(Executor):
    """Runs everything at once in this process: `workers: 1`."""

    def __init__(self, settings: Settings, tokenizer: Any):
        start(settings, tokenizer)

    def submit(self, function: Callable, *arguments: Any) -> Future:
        future: Future = Future()
        future.set_result(function(*arguments))
        return future


def _chosen(
    pool: Executor, settings: Settings, jobs: list[Job]
) -> Iterator[tuple[Job, np.ndarray | None]]:
    """The jobs with the documents that each takes (None: all), in order; none once it is full."""
    for number, source in enumerate(settings.sources):
        own = [job for job in jobs if job.source == number]
        if source.upsample is None:
            yield from ((job, None) for job in own)
            continue
        selection = Selection(source.upsample)
        for job, (characters, labels) in _ahead(pool, scan, ((job, None) for job in own), 8):
            taken = np.zeros(len(characters), bool)
            for i, length in enumerate(characters.tolist()):
                taken[i] = selection.keep(length, labels[i], source.path)
                if taken[i] and selection.full:
                    break
            yield job, taken
            if selection.full:
                break


def _ahead(
    pool: Executor, function: Callable, tasks: Iterable[tuple[Job, Any]], depth: int
) -> Iterator[tuple[Job, Any]]:
    """The results in the order of the tasks, of which `depth` are under way."""
    waiting: collections.deque = collections.deque()
    for job, more in tasks:
        waiting.append((job, pool.submit(function, job, more)))
        if len(waiting) >= depth:
            job, future = waiting.popleft()
            yield job, future.result()
    while waiting:
        job, future = waiting.popleft()
        yield job, future.result()


def _finish(
    config: PrepareConfig, settings: Settings, tokenizer: Any, asked: dict[str, Any], jobs: int
) -> dict[str, Any]:
    """The index over all shards, and the report; the index is the last that is written."""
    shards = [shard for i in range(jobs) if (shard := finished(settings.out, i))]
    index = {
        "format": FORMAT,
        "dtype": settings.dtype,
        "tokenizer": tokenizer.fingerprint,
        "tokenizer_name": config.tokenizer,
        "vocab_size": tokenizer.vocab_size,
        "documents": sum(shard["documents"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "lengths": report.total(shards),
        "shards": [{k: s[k] for k in ("name", "documents", "tokens", "labels")} for s in shards],
        "asked": asked,
    }
    if not index["tokens"]:
        raise InputError(
            f"no document is left (empty, below min_document_tokens={settings.least}, or not taken"
            " by upsample): nothing was prepared"
        )
    tokenizer.save(settings.out / TOKENIZER)
    report.plot(index, settings.out / "lengths.png")
    (settings.out / "report.md").write_text(report.table(index) + "\n", encoding="utf-8")
    write_json(settings.out / INDEX, index)
    for i in range(jobs):
        (settings.out / f"{i:06d}.json").unlink(missing_ok=True)
    return index
