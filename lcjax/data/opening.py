"""From `data:` to its documents: each source opened, and cut to one side of the split."""

from collections.abc import Iterator
from typing import Any

from lcjax.data.chat_files import ChatFiles
from lcjax.data.config import DataConfig, TextConfig
from lcjax.data.corpus import Corpus, SourceFiles
from lcjax.data.seqio_source import SeqioCorpus
from lcjax.data.sources import ChatSource, SeqioSource, Source, TeacherSource, TokenSource
from lcjax.data.stream import Stream
from lcjax.data.teacher_files import TeacherFiles
from lcjax.data.text_files import TextFiles
from lcjax.data.token_files import TokenFiles
from lcjax.errors import InputError

Documents = Corpus | Stream | SeqioCorpus


def source_files(source: Source, on_bad_text: str = "error", tokenizer: Any = None) -> SourceFiles:
    """The files of a source, found but not opened; token ids must be those of `tokenizer`."""
    match source:
        case TokenSource():
            files = TokenFiles(source, tokenizer)
        case TeacherSource():
            files = TeacherFiles(source, tokenizer)
        case ChatSource():
            files = ChatFiles(source, on_bad_text)
        case _:
            files = TextFiles(source, on_bad_text)
    if files.found.size == 0:
        raise _no_documents(source)
    return files


def check_sources(config: TextConfig) -> None:
    """Refuses sources without files; opens none, so it takes no time before a model is read."""
    for source in config.resolved_sources():
        if not isinstance(source, SeqioSource):  # its files are known once TensorFlow is imported
            _check_rows(source_files(source, config.on_bad_text), config)


def _check_rows(files: SourceFiles, config: TextConfig) -> None:
    """Rows that are stored must be those that the settings speak of."""
    if isinstance(files, TeacherFiles) and isinstance(config, DataConfig):
        files.check_rows(config)


def open_corpus(source: Source, *, on_bad_text: str = "error", tokenizer: Any = None) -> Documents:
    """Finds the files of a source and indexes those that hold many documents."""
    if isinstance(source, SeqioSource):
        corpus = SeqioCorpus(source, on_bad_text=on_bad_text)
        if tokenizer is not None:
            corpus.check_vocabulary(tokenizer)
        return corpus
    files = source_files(source, on_bad_text, tokenizer)
    if source.stream or source.upsample:
        return Stream(files)
    corpus = Corpus(files)
    if len(corpus) == 0:
        raise _no_documents(source)
    return corpus


def open_split(config: TextConfig, split: str = "train", tokenizer: Any = None) -> list[Documents]:
    """One corpus per source, cut to the `train` or the `validation` split."""
    if split not in ("train", "validation"):
        raise InputError(f"split={split} is not one of train, validation")
    if split == "validation" and config.holdout == 0.0:
        raise InputError("data.holdout=0.0 keeps nothing for validation: set it to, say, 0.01")
    sources = config.resolved_sources()
    found = [
        open_corpus(source, on_bad_text=config.on_bad_text, tokenizer=tokenizer)
        for source in sources
    ]
    for corpus in found:
        if isinstance(corpus, Corpus):
            _check_rows(corpus.files, config)
    corpora = [corpus.split(config.holdout, split) for corpus in found]
    if split == "validation":
        corpora = [corpus for corpus in corpora if corpus.count != 0]
    if not corpora or any(corpus.count == 0 for corpus in corpora):
        raise InputError(
            f"data.holdout={config.holdout} leaves no document for {split} out of"
            f" {sum(corpus.count or 0 for corpus in found)}: choose another fraction, or cut the"
            " text into more documents"
        )
    return corpora


def documents(data: TextConfig | str, split: str = "train") -> Iterator[tuple[str, str]]:
    """(name, text) of every document that is not empty, in the order of the files.

    Args:
      data: a data section, or just a path as in `data.path`.
      split: `train` (everything when nothing is held out) or `validation`.
    """
    config = TextConfig(path=data) if isinstance(data, str) else data
    corpora = open_split(config, split)
    empty = True
    for corpus in corpora:
        for name, text in corpus:
            if not isinstance(text, str):
                raise InputError(f"{name} is no text, {_way_out(corpus.source)}")
            if text.strip():
                empty = False
                yield name, text
    if empty:
        raise all_empty(corpora)


def _way_out(source: Source) -> str:
    if isinstance(source, SeqioSource) and source.tokens and not source.prompt:
        return "but token ids, and text is needed here: set data.sources.0.tokens=false"
    return "and text is needed here: name the source it was made from, with type: text"


def all_empty(corpora: list[Documents], why: str = "empty or skipped") -> InputError:
    """The error for sources whose documents have no text."""
    paths = ", ".join(corpus.source.name for corpus in corpora)
    known = [corpus.count for corpus in corpora if corpus.count is not None]
    return InputError(
        f"data.path={paths}: none of the {f'{sum(known)} ' if known else ''}documents has enough"
        f" text ({why})"
    )


def identity_of(corpora: list[Documents]) -> dict[str, Any]:
    """What tells whether a position in the data is one in the same text."""
    return {
        "data text fields": [corpus.source.reads for corpus in corpora],
        "data weights": [corpus.source.weight for corpus in corpora],
        "number of documents": [corpus.count for corpus in corpora],
        "bytes of text": [_found(corpus, "size") for corpus in corpora],
        "text of the corpus": [_found(corpus, "fingerprint") for corpus in corpora],
    }


def _found(corpus: Documents, what: str) -> Any:
    """seqio's tasks do not tell their files."""
    return None if isinstance(corpus, SeqioCorpus) else getattr(corpus.files.found, what)


def _no_documents(source: Source) -> InputError:
    return InputError(f"data.path={source.name} holds no document: its files are empty")
