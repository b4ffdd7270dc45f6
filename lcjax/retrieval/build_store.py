"""`python -m lcjax.retrieval build`: cuts text into passages and encodes them, shard by shard.

Each job (`lcjax.data.jobs`) writes the passages of some files and their vectors. The last step
joins the vectors, builds the index of words, and writes `index.json` (`lcjax.retrieval.datastore`).
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from lcjax.data.corpus import check_outside_data, open_corpus
from lcjax.data.data_config import SeqioSource, Source, StoredSource, TextConfig
from lcjax.data.files import FileList, import_pyarrow
from lcjax.data.jobs import (
    Job,
    JobReader,
    Progress,
    begin,
    make_jobs,
    map_ahead,
    parse_part,
    read_shard,
    worker_pool,
)
from lcjax.errors import (
    InputError,
    NonEmpty,
    NonNegativeInt,
    OneOf,
    check_arguments,
    check_fields,
    check_one_of,
)
from lcjax.files import atomic_file, check_path, read_json, seal, write_json
from lcjax.parallel.run_lock import RunLock
from lcjax.parallel.sharding import Mesh
from lcjax.retrieval.datastore import (
    DTYPES,
    FORMAT,
    INDEX,
    PLAN,
    WHY_MAPPED,
    EncoderSection,
    encode_passages,
    encoder_entry,
    encoder_fields,
    read_texts,
    vector_file,
    vector_header,
    write_faiss,
    write_passages,
    write_sparse,
)
from lcjax.retrieval.encoder import Encoder
from lcjax.retrieval.faiss_index import KINDS as FAISS_KINDS
from lcjax.retrieval.faiss_index import faiss_module
from lcjax.retrieval.passages import (
    Chunking,
    Document,
    document_text,
    open_files,
    read_document,
    tokenizer,
)
from lcjax.retrieval.sparse import Sparse, SparseIndex
from lcjax.storage import local_path

_TASKS_AHEAD = 256  # shards that are submitted ahead to an executor of the caller


@dataclasses.dataclass(frozen=True)
class BuildConfig:
    """Settings of `python -m lcjax.retrieval build`."""

    data: TextConfig = dataclasses.field(default_factory=TextConfig)  # text of the passages
    chunking: Chunking = dataclasses.field(default_factory=Chunking)
    # Search by words; null: only by vectors
    sparse: Sparse | None = dataclasses.field(default_factory=Sparse)
    encoder: EncoderSection = dataclasses.field(default_factory=EncoderSection)
    mesh: Mesh | None = None  # devices that encode; null: one device
    # Dtype of the stored vectors: float32 or bfloat16
    dtype: Annotated[str, OneOf(DTYPES)] = "float32"
    # An approximate index beside the vectors, built with FAISS; null: none
    faiss: Annotated[str, OneOf(FAISS_KINDS)] | None = None
    out: Annotated[str, NonEmpty("give --out=FOLDER")] = ""  # folder to write
    # Number of processes; 0: one for each core, or a single one with an encoder
    workers: NonNegativeInt = 0

    def __post_init__(self):
        check_fields("", self)
        check_documents(self.data.sources)

    @property
    def folder(self) -> Path:
        return local_path("out", self.out, WHY_MAPPED)


def check_documents(sources: Sequence[Source]) -> None:
    """Raises an InputError for sources whose records are not documents, or that are up-sampled.

    Configs check `data.sources`. Whether `data.path` names rows is known only when it is resolved.
    """
    for i, source in enumerate(sources):
        if isinstance(source, StoredSource):
            raise InputError(
                f"data: {source.path} has rows of type {source.kind.name}, which are no documents;"
                " name their text"
            )
        if isinstance(source, SeqioSource) and source.converter:
            raise InputError(f"data.sources.{i}.converter makes rows, no documents: set null")
        if source.upsample:
            raise InputError(f"data.sources.{i}.upsample is for trainings: leave it out")


@check_arguments
def build(
    config: BuildConfig,
    *,
    executor: Executor | None = None,
    part: str | None = None,
    encoder: Encoder | None = None,
) -> dict[str, Any] | None:
    """Writes the missing shards of a datastore, and then its indices.

    Args:
      config: settings.
      executor: executor that writes the shards, such as Dask's. Its workers must share the storage
        of `config.out`. None: `config.workers` processes of this machine.
      part: `i/n` writes only the shards i, i + n, ... (i counts from 0). Parts may run at the same
        time on machines that share the storage; after them, a build without `part` writes the
        indices.
      encoder: encoder to use instead of that of `config.encoder`. It is sent to the executor with
        each job, unless `config.encoder` has a path, which the workers then open.

    Returns:
      The content of `index.json`; None with `part`, unless the datastore is complete.

    Raises:
      InputError: the folder was built from other text or settings, the text has no passage, or a
        source cannot be read.
    """
    index, part_of = (0, 1) if part is None else parse_part(part)
    check_path("out", config.out)
    check_outside_data("out", config.folder, config.data)
    encoder = encoder or config.encoder.open(config.mesh)
    import_pyarrow("a datastore")
    _check_settings(config, encoder)
    sources = _Sources(config)
    identity = _identity(config, sources, encoder)
    content = begin(config.folder, identity, INDEX, PLAN)
    if content is not None:
        _remove_drafts(config.folder)  # left by a build that was killed after its last step
        return content
    jobs = sources.jobs()
    _write_shards(config, f"{config} {identity}", jobs[index::part_of], executor, encoder)
    return _write_indices(config, jobs, encoder) if part is None else None


def _check_settings(config: BuildConfig, encoder: Encoder | None) -> None:
    """Raises an InputError for settings that contradict each other."""
    if encoder is None and config.sparse is None:
        raise InputError("sparse=null and no encoder leave nothing to search by: set one of them")
    if encoder is None and config.faiss is not None:
        raise InputError(f"faiss={config.faiss} is an index of vectors: name an encoder")
    if config.faiss is not None:
        check_one_of("faiss", config.faiss, FAISS_KINDS)
        faiss_module()  # raises the error of a missing package before the long work
    if config.sparse is not None:
        SparseIndex.check(config.sparse)
    _check_length(config.chunking, encoder)


def _check_length(chunking: Chunking, encoder: Encoder | None) -> None:
    most = None if encoder is None else encoder.max_tokens
    if most is not None and chunking.size > most:
        raise InputError(
            f"chunking.size={chunking.size} {'tokens' if chunking.unit == 'tokens' else 'words'}:"
            f" passages would be longer than the {most} tokens that {encoder.name} reads; lower it"
        )


class _Sources:
    """The open sources of a build."""

    def __init__(self, config: BuildConfig):
        self.config = config
        # A seqio task has no files, and is read in one job.
        self.sources = config.data.resolved_sources()
        check_documents(self.sources)
        self.files = [
            None
            if isinstance(source, SeqioSource)
            else open_files(source, config.data, config.chunking)
            for source in self.sources
        ]
        self._reader = JobReader(self.files, _in_order)

    @property
    def fingerprints(self) -> list[str]:
        return [
            source.content_key if files is None else files.paths.fingerprint
            for source, files in zip(self.sources, self.files)
        ]

    def jobs(self) -> list[Job]:
        files = [FileList([]) if files is None else files.paths for files in self.files]
        jobs = make_jobs(files, _in_order)
        without_files = [i for i, files in enumerate(self.files) if files is None]
        return jobs + [Job(len(jobs) + n, i, (), 0, 1, 1) for n, i in enumerate(without_files)]

    def documents(self, job: Job) -> Iterator[Document]:
        """Yields the documents of a job that are not held out.

        Their names are unique: with several sources they begin with the number of the source.
        """
        config, holdout = self.config, self.config.data.holdout
        if self.files[job.source] is None:
            documents = self._examples(job.source)
        else:
            documents = (
                read_document(files, reader, index, config.chunking)
                for files, reader, index in self._reader.records(job)
                if not holdout or reader.split_hash(index) >= holdout
            )
        prefix = f"{job.source}/" if len(self.sources) > 1 else ""
        for document in documents:
            yield dataclasses.replace(document, name=prefix + document.name)

    def _examples(self, number: int) -> Iterator[Document]:
        source, data = self.sources[number], self.config.data
        name = self.config.chunking.tokenizer
        corpus = open_corpus(source, data, tokenizer(name) if name else None)
        for i, (_, value) in enumerate(corpus.split(data.holdout, "train")):
            label = f"{source.task}:{i + 1}"
            yield Document(label, document_text(value, label, name), "", source.name)


def _in_order(count: int, *_: int) -> np.ndarray:
    return np.arange(count)


def _identity(config: BuildConfig, sources: _Sources, encoder: Encoder | None) -> dict[str, Any]:
    """Returns all settings and fingerprints that determine the datastore."""
    data = config.data
    identity = {
        "sources": [source.name for source in sources.sources],
        "fields of the sources": [source.content_key for source in sources.sources],
        "text of the corpus": sources.fingerprints,
        **{key: getattr(data, key) for key in ("holdout", "on_bad_text", "on_bad_record")},
        "chunking": dataclasses.asdict(config.chunking),
        "encoder": None if encoder is None else encoder_fields(encoder),
        "dtype": config.dtype,
        "sparse": config.sparse and dataclasses.asdict(config.sparse),
        "faiss": config.faiss,
    }
    if name := config.chunking.tokenizer:
        identity["tokenizer"] = tokenizer(name).fingerprint
    return json.loads(json.dumps(identity))


def _write_shards(
    config: BuildConfig,
    key: str,
    jobs: list[Job],
    executor: Executor | None,
    encoder: Encoder | None,
) -> None:
    """Writes the missing shards of `jobs`; `key` names the settings and the text of the build."""
    global _writer
    num_workers = config.workers or (1 if encoder else os.cpu_count() or 1)
    num_workers = max(1, min(num_workers, len(jobs)))
    pool = None if executor else worker_pool(num_workers, int)
    # Worker processes open the encoder by its path, because it may be too large to send to them.
    send = encoder if not config.encoder.path or (pool and num_workers == 1) else None
    write = functools.partial(_write_shard, config, key, send)
    depth = 2 * num_workers if pool else _TASKS_AHEAD
    progress, count = Progress(jobs, "passages", config.folder), 0
    try:
        with progress.run(pool):
            tasks = ((job, None) for job in jobs)
            for job, shard in map_ahead(executor or pool, write, tasks, depth):
                count += shard["passages"]
                progress.update(job, f"{count:,} passages")
    finally:
        _writer = None  # closes the files and frees the encoder, if threads have written


_writing = threading.Lock()
_writer: tuple[str, "_ShardWriter"] | None = None


def _write_shard(
    config: BuildConfig, key: str, encoder: Encoder | None, job: Job, _: None = None
) -> dict[str, Any]:
    """Writes the shard of a job if it is missing, and returns its description."""
    global _writer
    if shard := read_shard(config.folder, job.number):
        return shard
    with _writing:  # threads share the encoder and the open files
        if _writer is None or _writer[0] != key:
            _writer = key, _ShardWriter(config, encoder or config.encoder.open(config.mesh))
        return _writer[1].write(job)


class _ShardWriter:
    """The sources and encoder that a worker process keeps open between jobs."""

    def __init__(self, config: BuildConfig, encoder: Encoder | None):
        self._config, self._encoder = config, encoder
        self._sources = _Sources(config)

    def write(self, job: Job) -> dict[str, Any]:
        """Writes the passages, their vectors, and the description that completes the shard."""
        config, name = self._config, f"{job.number:06d}"
        passages, num_documents = [], 0
        for document in self._sources.documents(job):
            num_passages = len(passages)
            passages += config.chunking.passages(document)
            num_documents += len(passages) > num_passages
        shard = write_passages(config.folder, name, passages)
        if self._encoder is not None and passages:
            vectors = encode_passages(self._encoder, passages, config.dtype)
            with atomic_file(config.folder / f"{name}.vec", "wb") as file:
                file.write(vectors)
            shard["vectors"] = {self._encoder.fingerprint: hashlib.sha256(vectors).hexdigest()}
        shard["documents"] = num_documents
        write_json(config.folder / f"{name}.json", shard)
        return shard


def _write_indices(config: BuildConfig, jobs: list[Job], encoder: Encoder | None) -> dict[str, Any]:
    """Writes the vectors and indices of all shards, and `index.json` last."""
    out = config.folder
    with RunLock(out, "out"):
        shards = [read_shard(out, job.number) for job in jobs]
        if missing := [job.number for job, shard in zip(jobs, shards) if shard is None]:
            raise InputError(
                f"out={config.out}: {len(missing)} of {len(jobs)} shards are missing, such as"
                f" {missing[0]}: the workers of an executor must share this folder"
            )
        num_documents = sum(shard.pop("documents") for shard in shards)
        for shard in shards:
            if not shard["passages"]:
                (out / f"{shard['name']}.parquet").unlink(missing_ok=True)
        shards = [shard for shard in shards if shard["passages"]]
        if not shards:
            raise InputError(
                f"the {len(jobs)} files or parts of files of the data hold no text: nothing was"
                " built"
            )
        index = {
            "format": FORMAT,
            "passages": sum(shard["passages"] for shard in shards),
            "documents": num_documents,
            "chunking": dataclasses.asdict(config.chunking),
            "encoders": {},
            "sparse": None,
            "shards": shards,
            "identity": read_json(out / PLAN)["identity"],
        }
        if encoder is not None:
            entry = encoder_entry(encoder, config.encoder, config.dtype)
            index["encoders"][encoder.fingerprint] = entry
            _join_vectors(out, index, encoder)
        if config.sparse is not None:
            texts = (text for _, text in read_texts(out, shards))
            index["sparse"] = write_sparse(out, index["passages"], texts, config.sparse)
        if config.faiss is not None:
            faiss = write_faiss(out, index, encoder.fingerprint, config.faiss)
            index["encoders"][encoder.fingerprint]["faiss"] = faiss
        index = seal(index)
        write_json(out / INDEX, index)
        _remove_drafts(out)
    return index


def _join_vectors(out: Path, index: dict[str, Any], encoder: Encoder) -> None:
    """Concatenates the vectors of all shards into one file."""
    fields = index["encoders"][encoder.fingerprint]
    with atomic_file(vector_file(out, encoder.fingerprint), "wb") as file:
        file.write(vector_header(fields))
        for shard in index["shards"]:
            with (out / f"{shard['name']}.vec").open("rb") as part:
                shutil.copyfileobj(part, file, 1 << 24)


def _remove_drafts(out: Path) -> None:
    """Removes the temporary files of the build, which a complete datastore does not need."""
    for file in out.iterdir():
        is_draft = re.fullmatch(r"\d{6}\.(json|vec)|.*\.tmp|plan\.json(\..*)?", file.name)
        if is_draft and not file.is_dir():  # `append` makes, and removes, the folder sparse.tmp
            file.unlink(missing_ok=True)


@check_arguments
def read_documents(data: TextConfig, chunking: Chunking) -> Iterator[Document]:
    """Yields the documents of sources, in the order and with the names of `build`."""
    sources = _Sources(BuildConfig(data=data, chunking=chunking, out="."))
    for job in sources.jobs():
        yield from sources.documents(job)
