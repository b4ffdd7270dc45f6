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
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from lcjax.checkpoints import load_tokenizer
from lcjax.data.config import INDEX, PLAN, Source, TextSource
from lcjax.data.corpus import derived_seed, order, source_files
from lcjax.data.files import FileCache, FileList
from lcjax.data.readers import Document
from lcjax.data.token_files import DOCUMENT, DTYPES, FORMAT
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
    found = [source_files(s, config.on_bad_text).paths for s in settings.sources]
    asked = _asked(config, settings, tokenizer.fingerprint, [f.fingerprint for f in found])
    if (index := begin(out, asked)) is None:
        jobs = plan(found, settings)
        _run(config, settings, tokenizer, jobs)
        index = _finish(config, settings, tokenizer, asked, len(jobs))
        (out / PLAN).unlink()
    print(length_table(index))
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
        "lengths": total_lengths(shards),
        "shards": [{k: s[k] for k in ("name", "documents", "tokens", "labels")} for s in shards],
        "asked": asked,
    }
    if not index["tokens"]:
        raise InputError(
            f"no document is left (empty, below min_document_tokens={settings.least}, or not taken"
            " by upsample): nothing was prepared"
        )
    tokenizer.save(settings.out / TOKENIZER)
    plot_lengths(index, settings.out / "lengths.png")
    (settings.out / "report.md").write_text(length_table(index) + "\n", encoding="utf-8")
    write_json(settings.out / INDEX, index)
    for i in range(jobs):
        (settings.out / f"{i:06d}.json").unlink(missing_ok=True)
    return index


_SMALLEST, _LARGEST, _JOBS = 1 << 20, 1 << 26, 64  # bytes of a job, and how many if that allows it


def plan(found: list[FileList], settings: Settings) -> list[Job]:
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
                self._opened = (job.source, file), files.open(file, FileCache())
            reader = self._opened[1]
            count = len(reader)
            indices = _order(count, self.settings, job.source, file)
            first, last = (count * part // job.parts for part in (job.part, job.part + 1))
            for index in indices[first:last].tolist():
                yield files.document(reader, index), reader.split_hash(index)

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


_BINS = 40  # bin b holds documents of 2**b ... 2**(b + 1) - 1 tokens
_LONG = (4096, 32768)  # lengths that the long-context studies look at
_LABELS = 12  # of the most tokens that stand for themselves in a report
_BAR = 30  # characters of the longest bar


def lengths_by_label(
    lengths: np.ndarray, labels: np.ndarray, names: Iterable[str]
) -> dict[str, dict[str, list[int]]]:
    """Documents and tokens by label and by bin of length."""
    bins = np.log2(np.maximum(lengths, 1)).astype(int)
    found = {}
    for number, name in enumerate(names):
        own = labels == number
        documents = np.bincount(bins[own], minlength=_BINS)
        tokens = np.zeros(_BINS, np.int64)
        np.add.at(tokens, bins[own], lengths[own])
        found[name] = {"documents": documents.tolist(), "tokens": tokens.tolist()}
    return found


def total_lengths(shards: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """The sum over shards."""
    sums: dict[str, dict[str, list[int]]] = {}
    for shard in shards:
        for label, counts in shard["lengths"].items():
            into = sums.setdefault(label, {key: [0] * _BINS for key in counts})
            for key, values in counts.items():
                into[key] = [a + b for a, b in zip(into[key], values, strict=True)]
    return dict(sorted(sums.items()))


def length_table(index: dict[str, Any]) -> str:
    """Tokens of every label, then the histogram over all of them, as Markdown."""
    rows = [(name, *_sums(counts)) for name, counts in _largest(index["lengths"]).items()]
    if len(rows) > 1:
        rows.append(("all", *_sums(_all(index))))
    everything = max(1, index["tokens"])
    lines = [
        "| source | documents | tokens | share | mean | "
        + " | ".join(f"in documents >= {length:,}" for length in _LONG)
        + " |",
        "|---|" + "---:|" * (4 + len(_LONG)),
    ]
    for name, documents, tokens, *long in rows:
        parts = " | ".join(f"{part / max(1, tokens):.1%}" for part in long)
        lines.append(
            f"| {name} | {documents:,} | {tokens:,} | {tokens / everything:.2%}"
            f" | {tokens / max(1, documents):,.0f} | {parts} |"
        )
    return "\n".join([*lines, "", *_histogram(_all(index)["tokens"])])


def _largest(lengths: dict[str, dict]) -> dict[str, dict]:
    """The labels with the most tokens, and all others together."""
    names = sorted(lengths, key=lambda name: -sum(lengths[name]["tokens"]))
    if len(names) <= _LABELS + 1:
        return lengths
    rest = names[_LABELS:]
    found = {name: lengths[name] for name in names[:_LABELS]}
    return found | {f"{len(rest)} others": _all({"lengths": {n: lengths[n] for n in rest}})}


def _all(index: dict[str, Any]) -> dict[str, list[int]]:
    return {
        key: np.sum([counts[key] for counts in index["lengths"].values()], axis=0).tolist()
        for key in ("documents", "tokens")
    }


def _sums(counts: dict[str, list[int]]) -> tuple[int, ...]:
    """Documents, tokens, and the tokens in documents of at least so many."""
    long = [sum(counts["tokens"][int(np.log2(length)) :]) for length in _LONG]
    return sum(counts["documents"]), sum(counts["tokens"]), *long


def _histogram(tokens: Sequence[int]) -> list[str]:
    """Share of the tokens by the length of their document."""
    used = [b for b, count in enumerate(tokens) if count]
    whole, most = max(1, sum(tokens)), max([1, *tokens])
    lines = ["| tokens of a document | share of all tokens | |", "|---:|---:|---|"]
    for b in range(used[0], used[-1] + 1) if used else ():
        bar = "█" * round(_BAR * tokens[b] / most)
        lines.append(f"| {2**b:,} - {2 ** (b + 1) - 1:,} | {tokens[b] / whole:.1%} | {bar} |")
    return lines


def plot_lengths(index: dict[str, Any], path: Path) -> None:
    """The histogram by label, stacked, as PNG."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    used = [b for b, count in enumerate(_all(index)["tokens"]) if count]
    bins = np.arange(used[0], used[-1] + 1)
    below = np.zeros(len(bins))
    for number, (name, counts) in enumerate(_largest(index["lengths"]).items()):
        share = np.array(counts["tokens"])[bins] / index["tokens"]
        axes.bar(bins, share, bottom=below, width=0.9, label=name, color=colormaps["tab20"](number))
        below += share
    axes.set_xticks(bins, [f"{2**b:,}" for b in bins], rotation=45)
    axes.set_xlabel("tokens of a document, from")
    axes.set_ylabel("share of all tokens")
    axes.set_title(f"{index['tokens']:,} tokens in {index['documents']:,} documents")
    axes.legend()
    figure.savefig(path, dpi=120)
