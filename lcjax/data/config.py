"""What to read, how to cut it into rows, and in which order: the YAML section `data:`."""

from dataclasses import dataclass, field
from pathlib import Path

from lcjax.data.chunks import Chunks
from lcjax.data.masking import Masking
from lcjax.data.sources import (
    INDEX,
    PACKINGS,
    PLAN,
    TEACHER_INDEX,
    TEACHER_PLAN,
    SeqioSource,
    Source,
    TeacherSource,
    TextSource,
    TokenSource,
)
from lcjax.errors import InputError

OVERLONG = ("split", "truncate", "drop")
ON_BAD_TEXT = ("error", "skip", "replace")

__all__ = ["DataConfig", "SeqioSource", "Source", "TextConfig", "TextSource"]


@dataclass(frozen=True)
class TextConfig:
    """Which text is read: `data:` of eval.py, and a part of `data:` of train.py."""

    path: str = ""  # one source in short, of text or tokens; for several, or its settings: sources
    sources: list[Source] = field(default_factory=list)  # training mixes their rows by weight
    holdout: float = 0.0  # fraction of the documents (by hash of their name) kept for validation
    on_bad_text: str = "error"  # bytes that are not UTF-8: error, skip the document, or replace

    def __post_init__(self):
        _choice("on_bad_text", self.on_bad_text, ON_BAD_TEXT)
        if not 0 <= self.holdout < 1:
            raise InputError(
                f"data.holdout={self.holdout} must be a fraction in [0, 1), such as 0.01"
            )
        if self.path and self.sources:
            raise InputError(
                f"data.path={self.path} and data.sources are both set: keep one of them"
            )
        for i, source in enumerate(self.sources):
            if not source.weight > 0 or source.weight == float("inf"):
                raise InputError(
                    f"data.sources.{i}.weight={source.weight} must be a positive number;"
                    " leave the source out to switch it off"
                )

    def resolved_sources(self) -> list[Source]:
        """The sources, whichever way they were given."""
        sources = self.sources or ([_in_short(self.path)] if self.path else [])
        if not sources:
            raise InputError(
                "data.path is empty: give a file, a folder, a glob, python:stdlib or package:NAME"
            )
        for i, source in enumerate(sources):
            if not source.name:
                key = "task" if isinstance(source, SeqioSource) else "path"
                raise InputError(f"data.sources.{i}.{key} is empty: say what to read")
        return sources


@dataclass(frozen=True)
class DataConfig(TextConfig):
    """Text in, rows of exactly `length` tokens out."""

    length: int = 1024  # tokens in a row, those of chunks counted
    # concat (cut anywhere, no padding), first_fit or best_fit (whole documents), windows (rows that
    # lie in one document; what does not fill a row is left out), single (a row for each document,
    # padded)
    pack: str = "concat"
    # first_fit, best_fit, single: longer than a row: split, truncate or drop
    overlong: str = "split"
    packing_bins: int = 32  # first_fit, best_fit: rows that are filled at the same time
    document_mask: bool = True  # attention and positions stop at documents, else only at rows
    add_bos: bool | None = None  # BOS before each document; null: as the model was trained
    add_eos: bool | None = None  # EOS after each document; null: if the tokenizer has one
    min_document_tokens: int = 1  # documents with fewer tokens (BOS, EOS not counted) are left out
    shuffle: bool = True  # documents in another random order in every epoch
    shuffle_rows: int = 0  # also shuffle rows among this many (parts of a book lie side by side)
    seed: int = 0  # of every random choice in the data
    masking: Masking | None = None  # masked language modelling in place of the next token
    # The beginning of a row as context for an encoder (model.memory); the decoder has the rest
    chunks: Chunks | None = None
    repeat: int | None = None  # epochs; null: for ever; a mixture ends with its first source
    threads: int = 2  # that read and tokenise
    prefetch: int = 2  # batches made ahead

    def __post_init__(self):
        super().__post_init__()
        _choice("pack", self.pack, PACKINGS)
        _choice("overlong", self.overlong, OVERLONG)
        _at_least("length", self.length, 2, "a row holds a token and the one to predict")
        _at_least("packing_bins", self.packing_bins, 1, "rows that are filled at the same time")
        _at_least("min_document_tokens", self.min_document_tokens, 1, "empty documents never count")
        _at_least("shuffle_rows", self.shuffle_rows, 0, "0 leaves the rows in order")
        _at_least("threads", self.threads, 0, "0 reads in the caller's thread")
        _at_least("prefetch", self.prefetch, 0, "0 makes no batch ahead")
        if self.repeat is not None:
            _at_least("repeat", self.repeat, 1, "null repeats for ever")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"data.seed={self.seed} must lie in 0 ... 4294967295")
        for i, source in enumerate(self.sources):
            self._check_stride(i, source)
            self._check_converter(i, source)
        taught = [isinstance(source, TeacherSource) for source in self.sources]
        if any(taught) and not all(taught):
            raise InputError(
                f"data.sources.{taught.index(False)} has no teacher and others are of type teacher:"
                " rows of both cannot be in one batch; keep one kind"
            )
        if self.chunks is not None:
            self._check_chunks(self.chunks)

    @property
    def decoder_length(self) -> int:
        """Tokens of a row that the decoder reads."""
        return self.length if self.chunks is None else self.chunks.decoder_length(self.length)

    def _check_chunks(self, chunks: Chunks) -> None:
        chunks.decoder_length(self.length)
        if self.masking is not None:
            raise InputError(
                "data.chunks give the decoder its context and data.masking trains an encoder: keep"
                " one of them"
            )
        made = [s for s in self.sources if isinstance(s, TeacherSource) or _converts(s)]
        if chunks.learned and made:
            raise InputError(
                "data.chunks.learned=true learns what follows the tokens of chunks, which sources"
                " whose rows are made already do not say (teacher, converter); leave one out"
            )
        rows = [s for s in self.sources if s not in made]
        packings = {s.pack or self.pack for s in rows} if self.sources else {self.pack}
        if self.document_mask and packings - {"windows", "single"}:
            raise InputError(
                "data.document_mask=true cannot hold with data.chunks, which all documents of a row"
                " read: set it to false, or pack: windows or single, where a row has one document"
            )
        if chunks.text == "beginning" and (made or packings != {"single"}):
            raise InputError(
                "data.chunks.text=beginning is of documents: set pack: single, and leave out"
                " sources whose rows are made already (teacher, converter)"
            )
        if chunks.text == "beginning" and self.overlong == "split":
            raise InputError(
                "data.overlong=split would part questions from their answers with data.chunks.text="
                "beginning: set it to truncate or drop"
            )

    def _check_converter(self, i: int, source: Source) -> None:
        if _converts(source) and self.chunks is None:
            raise InputError(
                f"data.sources.{i}.converter={source.converter} needs data.chunks, which say how"
                " many there are and how long"
            )

    def _check_stride(self, i: int, source: Source) -> None:
        if source.stride is None:
            return
        how, key = source.pack or self.pack, f"data.sources.{i}.stride={source.stride}"
        if how not in ("concat", "windows"):
            raise InputError(f"{key}: rows of {how} cannot overlap; set pack: concat or windows")
        if source.stride > self.length or (how == "concat" and self.length % source.stride):
            rule = "divide" if how == "concat" else "not exceed"
            raise InputError(f"{key} must {rule} data.length={self.length}")


def _converts(source: Source) -> bool:
    return isinstance(source, SeqioSource) and source.converter is not None


def _in_short(path: str) -> Source:
    """The source that a path alone stands for: what `prepare` wrote holds tokens, the rest text."""
    folder = Path(path).expanduser()
    if any((folder / name).is_file() for name in (TEACHER_INDEX, TEACHER_PLAN)):
        return TeacherSource(path)
    prepared = any((folder / name).is_file() for name in (INDEX, PLAN))
    return TokenSource(path) if prepared or folder.suffix == ".bin" else TextSource(path)


def _choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InputError(f"data.{key}={value} is not one of {', '.join(choices)}")


def _at_least(key: str, value: int, least: int, why: str) -> None:
    if value < least:
        raise InputError(f"data.{key}={value} must be {least} or more: {why}")
