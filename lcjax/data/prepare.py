"""`python -m lcjax.data prepare`: tokenises text once, for many trainings.

Each job (`lcjax.data.jobs`) writes one shard (`lcjax.data.token_files`). So the folder does not
depend on the number of processes, and after a kill the same command writes the missing shards.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from lcjax.checkpoints import load_tokenizer
from lcjax.checkpoints.long_text import encode_long
from lcjax.data.corpus import check_outside_data, derived_seed, source_files
from lcjax.data.data_config import NOT_CONTENT, ON_BAD_TEXT, TOKENS, Source, TextConfig, TextSource
from lcjax.data.jobs import (
    WHY_LOCAL,
    Job,
    JobReader,
    Progress,
    begin,
    make_jobs,
    map_ahead,
    read_shard,
    worker_pool,
)
from lcjax.data.readers import Document, SourceFiles
from lcjax.data.streams import order
from lcjax.data.token_files import DOCUMENT, DTYPES, FORMAT
from lcjax.data.upsample import Selection
from lcjax.errors import (
    InputError,
    NonEmpty,
    NonNegativeInt,
    OneOf,
    PositiveInt,
    Seed,
    check_fields,
)
from lcjax.files import atomic_file, check_path, sums_of, write_index, write_json
from lcjax.parallel.run_lock import RunLock
from lcjax.storage import local_path

TOKENIZER = "tokenizer"  # folder beside the shards


@dataclass(frozen=True)
class PrepareConfig:
    """Settings of `python -m lcjax.data prepare`."""

    path: str = ""  # one source, as data.path; use `sources` for labels or up-sampling
    sources: list[Source] = field(default_factory=list)  # of type text; weights are ignored
    # Tokenizer of the model, as model.path
    tokenizer: Annotated[str, NonEmpty("give --tokenizer=")] = ""
    out: Annotated[str, NonEmpty("give --out=FOLDER")] = ""  # folder to write
    shuffle: bool = True  # write files, and the documents of each, in random order
    seed: Seed = 0  # seed of that order, which equals that of a stream with this data.seed
    min_document_tokens: PositiveInt = 1  # shorter documents are left out
    # Invalid UTF-8: error, skip the document, or replace the bytes
    on_bad_text: Annotated[str, OneOf(ON_BAD_TEXT)] = "error"
    # Dtype of the ids; auto: uint16 if the vocabulary fits, else uint32
    dtype: Annotated[str, OneOf(("auto", *DTYPES))] = "auto"
    workers: NonNegativeInt = 0  # number of processes; 0: one for each core

    def __post_init__(self):
        if bool(self.path) == bool(self.sources):
            raise InputError("give --path= or sources (one of them, not both): what to tokenise")
        check_fields("", self)
        for i, source in enumerate(self.sources):
            if not isinstance(source, TextSource) or not source.path:
                raise InputError(f"sources.{i} must be of type text and have a path")

    def text_sources(self) -> list[TextSource]:
        return self.sources or [TextSource(self.path)]

    def open_sources(self) -> list[SourceFiles]:
        text = TextConfig(on_bad_text=self.on_bad_text)
        return [source_files(source, text) for source in self.text_sources()]

    @property
    def folder(self) -> Path:
        return local_path("out", self.out, WHY_LOCAL)


def prepare(config: PrepareConfig) -> dict[str, Any]:
    """Writes the missing shards of a token folder.

    Returns:
      The index of the folder, which is the content of `index.json`.

    Raises:
      InputError: the folder was written from other text or settings, another process writes it,
        or no document remains.
    """
    tokenizer, out = open_tokenizer(config.tokenizer), config.folder
    config = dataclasses.replace(config, dtype=_dtype(config.dtype, tokenizer))
    check_path("out", out)
    check_outside_data("out", out, TextConfig(sources=tuple(config.text_sources())))
    files = [source.paths for source in config.open_sources()]
    identity = _identity(config, tokenizer.fingerprint, [paths.fingerprint for paths in files])
    # Shards that were written with on_bad_text=error have no bad text.
    free = {"on_bad_text": "error"}
    if (index := begin(out, identity, TOKENS.index, TOKENS.plan, free=free)) is None:
        jobs = make_jobs(files, functools.partial(_order, config))
        with RunLock(out, "out"):
            try:
                _run(config, tokenizer, jobs)
                index = _finish(config, tokenizer, identity, len(jobs))
            except InputError:
                _remove_without_tokens(out, len(jobs))
                raise
            (out / TOKENS.plan).unlink(missing_ok=True)
    print(length_table(index))
    print(f"{out}: train on it with --data.path={config.out}")
    return index


def _remove_without_tokens(out: Path, num_jobs: int) -> None:
    """Empties an incomplete folder that holds no token, which other settings may fill."""
    if any((read_shard(out, i) or {"tokens": 0})["tokens"] for i in range(num_jobs)):
        return
    for number in range(num_jobs):
        for ending in ("json", "npy", "bin"):
            (out / f"{number:06d}.{ending}").unlink(missing_ok=True)
    (out / TOKENS.plan).unlink(missing_ok=True)


def open_tokenizer(name: str) -> Any:
    """Loads the tokenizer of the setting `tokenizer`."""
    try:
        return load_tokenizer(name)
    except InputError as error:
        raise InputError(f"tokenizer={name}: {str(error).removeprefix(f'{name}: ')}") from error


def _dtype(dtype: str, tokenizer: Any) -> str:
    fits_uint16 = tokenizer.vocab_size <= 1 << 16
    if dtype == "uint16" and not fits_uint16:
        raise InputError(
            f"dtype=uint16 holds 65536 ids, and the tokenizer has {tokenizer.vocab_size}: set"
            " dtype=uint32 or auto"
        )
    return ("uint16" if fits_uint16 else "uint32") if dtype == "auto" else dtype


def _identity(config: PrepareConfig, tokenizer: str, text: list[str]) -> dict[str, Any]:
    """Returns all settings and fingerprints that determine the shards."""
    fields = dataclasses.asdict(config)
    sources = [dataclasses.asdict(source) for source in config.text_sources()]
    names = ("shuffle", "seed", "min_document_tokens", "on_bad_text", "dtype")
    identity = {
        "sources": [{k: v for k, v in s.items() if k not in NOT_CONTENT} for s in sources],
        **{name: fields[name] for name in names},
        "tokenizer": tokenizer,
        "text of the corpus": text,
    }
    return json.loads(json.dumps(identity))


def _order(config: PrepareConfig, count: int, source: int, *tags: int) -> np.ndarray:
    """Returns the order of the first epoch of a stream with the same seed."""
    if not config.shuffle:
        return np.arange(count)
    return order(count, derived_seed(config.seed, source), 0, *tags)


def _run(config: PrepareConfig, tokenizer: Any, jobs: list[Job]) -> None:
    num_workers, tokens = config.workers or os.cpu_count() or 1, 0
    pool = worker_pool(min(num_workers, len(jobs)), _start_worker, config, tokenizer)
    progress = Progress(jobs, "tokenise", config.folder)
    with progress.run(pool):
        tasks = _select_documents(pool, config, jobs)
        for job, shard in map_ahead(pool, _tokenise, tasks, 2 * num_workers):
            tokens += shard["tokens"]
            progress.update(job, f"{tokens:,} tokens")


def _select_documents(
    pool: Executor, config: PrepareConfig, jobs: list[Job]
) -> Iterator[tuple[Job, np.ndarray | None]]:
    """Yields each job with the mask of its selected documents; None selects all.

    The jobs of a source end when its up-sampled epoch is full.
    """
    for number, source in enumerate(config.text_sources()):
        source_jobs = [job for job in jobs if job.source == number]
        if source.upsample is None:
            yield from ((job, None) for job in source_jobs)
            continue
        selection = Selection(source.upsample)
        tasks = ((job, None) for job in source_jobs)
        for job, (characters, labels) in map_ahead(pool, _scan, tasks, 8):
            is_selected = np.zeros(len(characters), bool)
            for i, length in enumerate(characters.tolist()):
                is_selected[i] = selection.keep(length, labels[i], source.path)
                if is_selected[i] and selection.full:
                    break
            yield job, is_selected
            if selection.full:
                break


_worker: "Worker"


def _start_worker(config: PrepareConfig, tokenizer: Any) -> None:
    """Initialises every process of the pool."""
    global _worker
    _worker = Worker(config, tokenizer)


def _scan(job: Job, _: None) -> tuple[np.ndarray, list[str]]:
    """Returns the lengths in characters, int64 [n], and labels of a job's documents."""
    documents = [(d.characters, d.label) for d, _ in _worker.documents(job)]
    return np.array([c for c, _ in documents], np.int64), [label for _, label in documents]


def _tokenise(job: Job, is_selected: np.ndarray | None) -> dict[str, Any]:
    """Writes the shard of a job if it is missing, and returns its description."""
    return read_shard(_worker.config.folder, job.number) or _worker.write(job, is_selected)


class Worker:
    """The tokenizer and open files that a worker process keeps between jobs."""

    def __init__(self, config: PrepareConfig, tokenizer: Any):
        self.config, self._tokenizer = config, tokenizer
        self._reader = JobReader(config.open_sources(), functools.partial(_order, config))

    def documents(self, job: Job) -> Iterator[tuple[Document, float]]:
        """Yields pairs (document, hash of its name) in reading order."""
        for files, reader, index in self._reader.records(job):
            yield files.document(reader, index), reader.split_hash(index)

    def write(self, job: Job, is_selected: np.ndarray | None) -> dict[str, Any]:
        """Writes the ids, the table of documents, and the description that completes the shard."""
        out, name = self.config.folder, f"{job.number:06d}"
        dtype, labels, rows, lengths = DTYPES[self.config.dtype], {}, [], []
        start = 0
        with atomic_file(out / f"{name}.bin", "wb") as file:
            for i, (document, split_hash) in enumerate(self.documents(job)):
                ids = self._ids(document) if is_selected is None or is_selected[i] else ()
                if len(ids) < self.config.min_document_tokens:
                    continue
                file.write(np.asarray(ids, dtype).data)
                label = labels.setdefault(document.label, len(labels))
                rows.append((start, document.characters, split_hash, label))
                lengths.append(len(ids))
                start += len(ids)
        table = np.array(rows, DOCUMENT)
        with atomic_file(out / f"{name}.npy", "wb") as file:
            np.save(file, table)
        shard = {"name": name, "documents": len(rows), "tokens": start, "labels": list(labels)}
        shard["lengths"] = lengths_by_label(np.array(lengths, np.int64), table["label"], labels)
        shard["sums"] = sums_of([out / f"{name}.bin", out / f"{name}.npy"], out)
        write_json(out / f"{name}.json", shard)
        return shard

    def _ids(self, document: Document) -> np.ndarray:
        if not document.value or document.value.isspace():
            return np.zeros(0, np.int32)
        return encode_long(self._tokenizer, document.value, name=document.name)


def _finish(
    config: PrepareConfig, tokenizer: Any, identity: dict[str, Any], num_jobs: int
) -> dict[str, Any]:
    """Writes the report, and at last the index of all shards."""
    out = config.folder
    shards = [shard for i in range(num_jobs) if (shard := read_shard(out, i))]
    index = {
        "format": FORMAT,
        "dtype": config.dtype,
        "tokenizer": tokenizer.fingerprint,
        "tokenizer_name": config.tokenizer,
        "vocab_size": tokenizer.vocab_size,
        "documents": sum(shard["documents"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "lengths": total_lengths(shards),
        "shards": [{k: s[k] for k in ("name", "documents", "tokens", "labels")} for s in shards],
        "identity": identity,
    }
    if not index["tokens"]:
        raise InputError(
            "no document is left (empty, below"
            f" min_document_tokens={config.min_document_tokens}, or not selected by upsample):"
            " nothing was prepared"
        )
    tokenizer.save(out / TOKENIZER)
    (out / "report.md").write_text(length_table(index) + "\n", encoding="utf-8")
    sums = {name: sum for shard in shards for name, sum in shard.get("sums", {}).items()}
    sums |= sums_of([out / "report.md", *sorted((out / TOKENIZER).iterdir())], out)
    write_index(out / TOKENS.index, index, sums)
    for i in range(num_jobs):
        (out / f"{i:06d}.json").unlink(missing_ok=True)
    return index


_BINS = 40  # length bin b holds documents of 2**b ... 2**(b + 1) - 1 tokens
_LONG = (4096, 32768)  # document lengths in the reports of long-context studies
_MAX_LABELS = 12  # labels with a separate line in a report, those with the most tokens
_BAR_WIDTH = 30  # characters of the longest bar


def lengths_by_label(
    lengths: np.ndarray, labels: np.ndarray, names: Iterable[str]
) -> dict[str, dict[str, list[int]]]:
    """Counts documents and tokens of a shard by label and by length bin."""
    counts = {}
    for number, name in enumerate(names):
        tokens = lengths[labels == number]
        bins = np.log2(np.maximum(tokens, 1)).astype(int)
        counts[name] = {
            "documents": np.bincount(bins, minlength=_BINS).tolist(),
            "tokens": np.bincount(bins, tokens, minlength=_BINS).astype(int).tolist(),
        }
    return counts


def total_lengths(shards: list[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Sums the counts of all shards by label."""
    lengths = [shard["lengths"] for shard in shards]
    labels = sorted({label for counts in lengths for label in counts})
    return {label: _sum(counts[label] for counts in lengths if label in counts) for label in labels}


def _sum(counts: Iterable[dict[str, list[int]]]) -> dict[str, list[int]]:
    counts = list(counts)
    return {
        key: np.sum([count[key] for count in counts], axis=0).tolist()
        for key in ("documents", "tokens")
    }


def length_table(index: dict[str, Any]) -> str:
    """Returns Markdown tables of the tokens of every label and of the document lengths."""
    rows = [(name, *_sums(counts)) for name, counts in _largest(index["lengths"]).items()]
    everything = _sum(index["lengths"].values())
    if len(rows) > 1:
        rows.append(("all", *_sums(everything)))
    total = max(1, index["tokens"])
    lines = [
        "| source | documents | tokens | share | mean | "
        + " | ".join(f"in documents >= {length:,}" for length in _LONG)
        + " |",
        "|---|" + "---:|" * (4 + len(_LONG)),
    ]
    for name, documents, tokens, *long in rows:
        parts = " | ".join(f"{part / max(1, tokens):.1%}" for part in long)
        name = name.encode(errors="replace").decode()  # that of a folder need not be UTF-8
        lines.append(
            f"| {name} | {documents:,} | {tokens:,} | {tokens / total:.2%}"
            f" | {tokens / max(1, documents):,.0f} | {parts} |"
        )
    return "\n".join([*lines, "", *_histogram(everything["tokens"])])


def _largest(lengths: dict[str, dict]) -> dict[str, dict]:
    """Returns the counts of the labels with the most tokens, and the sum of all others."""
    names = sorted(lengths, key=lambda name: -sum(lengths[name]["tokens"]))
    if len(names) <= _MAX_LABELS + 1:
        return lengths
    rest = names[_MAX_LABELS:]
    largest = {name: lengths[name] for name in names[:_MAX_LABELS]}
    return largest | {f"{len(rest)} others": _sum(lengths[name] for name in rest)}


def _sums(counts: dict[str, list[int]]) -> tuple[int, ...]:
    """Returns documents, tokens, and tokens in documents of at least each length of `_LONG`."""
    long = [sum(counts["tokens"][int(np.log2(length)) :]) for length in _LONG]
    return sum(counts["documents"]), sum(counts["tokens"]), *long


def _histogram(tokens: Sequence[int]) -> list[str]:
    """Returns the lines of a table of the share of tokens by document length."""
    bins = [b for b, count in enumerate(tokens) if count]
    total, largest = max(1, sum(tokens)), max([1, *tokens])
    lines = ["| tokens of a document | share of all tokens | |", "|---:|---:|---|"]
    for b in range(bins[0], bins[-1] + 1) if bins else ():
        bar = "█" * round(_BAR_WIDTH * tokens[b] / largest)
        lines.append(f"| {2**b:,} - {2 ** (b + 1) - 1:,} | {tokens[b] / total:.1%} | {bar} |")
    return lines
