"""The documents of the sources in `data:`, by index or as a stream, and their validation split.

`Corpus` indexes all files of a source and gives random access. A `Stream` (`lcjax.data.streams`)
reads one file after the other. `open_split` chooses one of them for each source.
"""

import bisect
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from lcjax.data.chat import ChatFiles
from lcjax.data.data_config import (
    ChatSource,
    DataConfig,
    SeqioSource,
    Source,
    StoredSource,
    TextConfig,
    TextSource,
    TokenSource,
)
from lcjax.data.files import FileCache
from lcjax.data.readers import Reader, SourceFiles, TextFiles, TextReader
from lcjax.data.stored_rows import StoredFiles
from lcjax.data.streams import Stream, StreamedCorpus
from lcjax.data.token_files import token_files
from lcjax.errors import InputError, check_arguments
from lcjax.storage import URLPath, to_path


class DocumentLocation(NamedTuple):
    """The reader of a document, and its index in that reader."""

    reader: Reader
    index: int


class Corpus:
    """The documents of one source as a sequence of (name, value) in a fixed order.

    A value is a text, token ids, a conversation, or a stored row. `indices` selects a subset of the
    documents, such as one side of the validation split; None: all documents.
    """

    is_mixture = False

    def __init__(self, files: SourceFiles, readers: list[Reader] | None = None, indices=None):
        self.files, self.source, self.indices = files, files.source, indices
        if readers is None:
            cache = FileCache()
            readers = [files.open(i, cache) for i in range(len(files.paths))]
        self.readers = readers
        self._starts = np.cumsum([0] + [len(reader) for reader in readers]).tolist()
        if indices is None and self.source.hashes is not None:
            self.indices = np.flatnonzero([self.source.selects(x) for x in self._hashes()])

    def __len__(self) -> int:
        return self._starts[-1] if self.indices is None else len(self.indices)

    @property
    def count(self) -> int:
        return len(self)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> tuple[str, Any]:
        return self.files.document(*self.locate(index)).pair

    def split(self, holdout: float, split: str) -> "Corpus":
        """Returns the documents of the `train` or the `validation` split.

        A document belongs to the validation split if the hash of its name, a number in [0, 1), is
        below `holdout`. So the split does not depend on the seed, file order or machine.
        """
        if holdout == 0.0 and split == "train":
            return self
        is_held_out = np.fromiter((value < holdout for value in self._hashes()), bool, len(self))
        indices = np.flatnonzero(is_held_out if split == "validation" else ~is_held_out)
        indices = indices if self.indices is None else self.indices[indices]
        return Corpus(self.files, self.readers, indices)

    def _hashes(self) -> Iterator[float]:
        """Yields the hash of the name of every document."""
        return (reader.split_hash(i) for reader, i in map(self.locate, range(len(self))))

    def documents_of(self, num_bytes: int) -> int:
        """Returns how many of the largest files of one document have `num_bytes`; at least 1."""
        files = zip(self.readers, self.files.paths.sizes, strict=True)
        largest = max((size for reader, size in files if len(reader) == 1), default=1)
        return max(1, num_bytes // max(1, largest))

    def locate(self, index: int) -> DocumentLocation:
        """Returns the reader of a document, and its index in that reader."""
        index = int(index if self.indices is None else self.indices[index])
        file = bisect.bisect_right(self._starts, index) - 1
        return DocumentLocation(self.readers[file], index - self._starts[file])


def derived_seed(seed: int, index: int) -> int:
    """Returns a seed for source `index`; seeds are far apart, because grain adds the epoch."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) >> 1


Documents = Corpus | StreamedCorpus


def source_files(
    source: Source, config: TextConfig = TextConfig(), tokenizer: Any = None
) -> SourceFiles:
    """Finds the files of a source without opening them.

    Checks the tokenizer of stored token ids against `tokenizer`, and the shape of stored rows
    against `config`.
    """
    match source:
        case TokenSource():
            files = token_files(source, tokenizer)
        case StoredSource():
            files = StoredFiles(source, tokenizer)
            if isinstance(config, DataConfig):
                files.check_rows(config)
        case ChatSource():
            files = ChatFiles(source, config)
        case _:
            files = TextFiles(source, config)
    if files.paths.size == 0:
        raise _no_documents(source)
    return files


@check_arguments
def check_sources(config: TextConfig) -> None:
    """Raises an `InputError` for sources without files; called before a model is loaded.

    It opens no file. Sources of type seqio are not checked, because that would import TensorFlow.
    """
    for source in config.resolved_sources():
        if not isinstance(source, SeqioSource):
            source_files(source, config)


@check_arguments
def largest_text(config: TextConfig) -> int:
    """Returns the bytes of the largest local file that is one document; 0 if there is none."""
    largest = 0
    for source in config.resolved_sources():
        if isinstance(source, TextSource) and not isinstance(to_path(source.path), URLPath):
            files = source_files(source, config)
            sizes = zip(files.paths.sizes, files.paths, strict=True)
            texts = [size for size, (_, path) in sizes if files.reader_class(path) is TextReader]
            largest = max([largest, *texts])
    return largest


@check_arguments
def check_outside_data(key: str, folder: Path, config: TextConfig) -> None:
    """Raises an InputError if `folder`, the destination of results, is inside a data folder.

    Its files would become documents, so a resumed run would find other data.
    """
    for source in config.resolved_sources() if config.sources or config.path else ():
        if not isinstance(source, TextSource | ChatSource):
            continue  # other sources read only the files in their index
        data = to_path(source.path)
        if type(data) is not type(folder) or not data.is_dir():
            continue
        if folder.resolve().is_relative_to(data.resolve()):
            raise InputError(
                f"{key}={folder} lies in the data folder {source.path}, so its files would become"
                " documents; name a folder outside of it"
            )


def open_corpus(
    source: Source, config: TextConfig = TextConfig(), tokenizer: Any = None
) -> Documents:
    """Opens a source.

    Returns:
      A SeqioCorpus for sources of type seqio, a Stream for sources that are streamed or up-sampled,
      and otherwise a Corpus, which indexes the files that hold many documents.
    """
    if isinstance(source, SeqioSource):
        from lcjax.data.seqio_source import SeqioCorpus

        return SeqioCorpus(source, config, tokenizer)
    files = source_files(source, config, tokenizer)
    if source.stream or source.upsample:
        return Stream(files)
    corpus = Corpus(files)
    if len(corpus) == 0:
        raise _no_documents(source)
    return corpus


def open_split(config: TextConfig, split: str = "train", tokenizer: Any = None) -> list[Documents]:
    """Opens every source, and selects the documents of the `train` or the `validation` split.

    Raises:
      InputError: a split has no document, or a source cannot be read.
    """
    if split not in ("train", "validation"):
        raise InputError(f"split={split} is not one of train, validation")
    if split == "validation" and config.holdout == 0.0:
        raise InputError("data.holdout=0.0 leaves nothing for validation: set it to, say, 0.01")
    sources = [open_corpus(source, config, tokenizer) for source in config.resolved_sources()]
    corpora = [corpus.split(config.holdout, split) for corpus in sources]
    if split == "validation":
        corpora = [corpus for corpus in corpora if corpus.count != 0]
    if not corpora or any(corpus.count == 0 for corpus in corpora):
        raise InputError(
            f"data.holdout={config.holdout} leaves no document for {split} out of"
            f" {sum(corpus.count or 0 for corpus in sources)}: choose another fraction, or cut the"
            " text into more documents"
        )
    return corpora


@check_arguments
def scan(config: TextConfig) -> int:
    """Reads every document of all sources, to find bad records before a training.

    Returns:
      The number of documents.

    Raises:
      InputError: a record cannot be read, and `on_bad_record` is error.
    """
    count = 0
    for source in config.resolved_sources():
        corpus = open_corpus(source, config)
        label = f"checking {source.name}"
        for _ in tqdm(corpus, desc=label, total=corpus.count, unit="document", delay=2):
            count += 1
    return count


@check_arguments
def documents(data: TextConfig | str, split: str = "train") -> Iterator[tuple[str, str]]:
    """Yields (name, text) of every document that is not empty, in the order of the files.

    Args:
      data: a data section, or a path as in `data.path`.
      split: `train` (all documents if nothing is held out) or `validation`.

    Raises:
      InputError: no document has text, or a source holds token ids.
    """
    config = TextConfig(path=data) if isinstance(data, str) else data
    yield from _documents(open_split(config, split), str)


def texts_or_ids(
    config: TextConfig, split: str, tokenizer: Any = None
) -> Iterator[tuple[str, str | np.ndarray]]:
    """Yields (name, text or int32 ids) of every document that is not empty, as `documents`.

    Sources of type tokens have ids: those of `tokenizer`, as far as files tell; None: not checked.
    """
    yield from _documents(open_split(config, split, tokenizer), str | np.ndarray)


def _documents(corpora: list[Documents], kind: Any) -> Iterator[tuple[str, Any]]:
    is_empty = True

    def has_text(source: Source, document: tuple[str, Any]) -> bool:
        nonlocal is_empty
        name, text = document
        if not isinstance(text, kind):
            raise InputError(f"{name} is no text, {_way_out(source)}")
        found = len(text) > 0 and not (isinstance(text, str) and text.isspace())
        is_empty &= not found
        return found

    for corpus in corpora:
        # A loop variable would hold a document, which may be large, as long as its reader works.
        yield from filter(functools.partial(has_text, corpus.source), corpus)
    if is_empty:
        raise all_empty(corpora)


def _way_out(source: Source) -> str:
    if isinstance(source, SeqioSource) and source.tokens and not source.prompt:
        return "but token ids, and text is needed here: set tokens: false for it in data.sources"
    return "and text is needed here: name the source of that text, with type: text"


def all_empty(corpora: list[Documents], reason: str = "empty or skipped") -> InputError:
    """Returns the error for sources whose documents have no text."""
    paths = ", ".join(corpus.source.name for corpus in corpora)
    counts = [corpus.count for corpus in corpora if corpus.count is not None]
    return InputError(
        f"data.path={paths}: none of the {f'{sum(counts)} ' if counts else ''}documents has enough"
        f" text ({reason})"
    )


def corpus_identity(corpora: list[Documents]) -> dict[str, Any]:
    """Returns fields that identify the text; a saved position is valid only for equal fields."""
    # The files of a seqio task are unknown.
    files = [corpus.files and corpus.files.paths for corpus in corpora]
    return {
        "data text fields": [corpus.source.content_key for corpus in corpora],
        "data weights": [corpus.source.weight for corpus in corpora],
        "number of documents": [corpus.count for corpus in corpora],
        "bytes of text": [None if paths is None else paths.size for paths in files],
        "text of the corpus": [None if paths is None else paths.fingerprint for paths in files],
    }


def _no_documents(source: Source) -> InputError:
    if source.hashes is not None:
        reason = f"its files are empty, or no name has a hash in {list(source.hashes)}"
        return InputError(f"data.path={source.name} holds no document: {reason}")
    return InputError(f"data.path={source.name} holds no document: its files are empty")
