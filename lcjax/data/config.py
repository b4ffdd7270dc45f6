"""The YAML section `data:`: which text is read, how it is cut into rows, and in which order."""

import string
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import ClassVar

import draccus

from lcjax.data.chunks import Chunks
from lcjax.data.upsample import Upsample
from lcjax.errors import InputError

PACKINGS = ("concat", "first_fit", "best_fit", "windows", "single")
INDEX, PLAN = "index.json", "plan.json"  # of a token folder that is finished, and that is not
TEACHER_INDEX, TEACHER_PLAN = "teacher.json", "teacher_plan.json"  # of a folder of a teacher's rows
_PLACE = ("path", "weight")  # where the text lies and how much of it is wanted, not what it is


@dataclass(frozen=True)
class Source(draccus.ChoiceRegistry):
    """One body of text and its share of the training rows."""

    pack: str | None = field(default=None, kw_only=True)  # null: as data.pack says
    # Tokens from the beginning of a row to that of the next; null: data.length, rows do not overlap
    stride: int | None = field(default=None, kw_only=True)
    min_document_tokens: int | None = field(default=None, kw_only=True)  # null: as data says

    def __post_init__(self):
        if self.pack is not None and self.pack not in PACKINGS:
            raise InputError(f"pack={self.pack} is not one of {', '.join(PACKINGS)}")
        for key in ("stride", "min_document_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise InputError(f"{key}={value} must be 1 or more, or null")

    @classmethod
    def default_choice_name(cls) -> str:
        return "text"

    @property
    def name(self) -> str:
        return self.path

    @property
    def reads(self) -> str:
        """What of the source is read: a position in the data holds for nothing else."""
        parts = []
        for item in fields(self):
            value = getattr(self, item.name)
            default = item.default if item.default is not MISSING else None
            if item.name not in _PLACE and value != default:
                parts.append(f"{item.name}={value}")
        return ", ".join(parts)


@Source.register_subclass("text")
@dataclass(frozen=True)
class TextSource(Source):
    """FileCache."""

    path: str = ""  # file, folder, glob, python:stdlib, or package:NAME[/folder or glob]
    weight: float = 1.0  # share of the rows, relative to the other sources
    text_field: str = "text"  # field or column that holds the document; a.b for one inside another
    # Field that says what kind of text a document is, as meta.redpajama_set_name in SlimPajama;
    # empty: the folder (or the file) that it lies in
    label_field: str = ""
    # One file after the other in random order, documents of a file in random order: nothing is
    # indexed before the first row, as it must be for a global order
    stream: bool = False
    upsample: Upsample | None = None  # fewer short documents; reads as `stream` does


@Source.register_subclass("chat")
@dataclass(frozen=True)
class ChatSource(Source):
    """Conversations; the loss is on the answers only."""

    path: str = ""  # as for text: .jsonl, .parquet, .arrow or .array_record files
    weight: float = 1.0  # share of the rows, relative to the other sources
    messages_field: str = "messages"  # list of {role, content}, or of ShareGPT's {from, value}
    # In place of messages and the tokenizer's chat template: text with {fields} of the record, as
    # "### Instruction:\n{instruction}\n\n### Response:\n"
    prompt: str = ""
    answer: str = "{output}"  # with prompt: what follows it, and an EOS
    learn: str = "answers"  # answers, or all
    stream: bool = False  # one file after the other, as for text
    upsample: ClassVar[None] = None

    def __post_init__(self):
        super().__post_init__()
        if self.learn not in ("answers", "all"):
            raise InputError(f"learn={self.learn} is not one of answers, all")
        for key in ("prompt", "answer"):
            try:
                list(string.Formatter().parse(getattr(self, key)))
            except ValueError as error:
                raise InputError(
                    f"{key}={getattr(self, key)!r}: {error}; a brace of the text is written twice"
                ) from None


@Source.register_subclass("tokens")
@dataclass(frozen=True)
class TokenSource(Source):
    """Token ids: a folder of `python -m lcjax.data prepare`, or bare `.bin` files."""

    path: str = ""  # the folder, one .bin, or a folder of them
    weight: float = 1.0  # share of the rows, relative to the other sources
    labels: list[str] = field(default_factory=list)  # read only documents of these; empty: all
    # Run all documents together as they lie, cut that into rows, and shuffle the rows (LongLoRA,
    # LCEG); else documents are shuffled in every epoch, then packed
    rows: bool = False
    stream: bool = False  # one shard after the other, as for text
    upsample: Upsample | None = None  # fewer short documents, by the characters they had as text
    dtype: str = "uint16"  # of a bare .bin: uint16 or uint32
    # Of a bare .bin: token that documents begin with; null: the first one; -1: all is one document
    document_start: int | None = None
    document_end: int | None = None  # of a bare .bin: token that documents end with instead

    def __post_init__(self):
        super().__post_init__()
        if self.dtype not in ("uint16", "uint32"):
            raise InputError(f"dtype={self.dtype} is not one of uint16, uint32")
        if self.document_start is not None and self.document_end is not None:
            raise InputError("document_start and document_end are both set: keep one of them")
        for key in ("stream", "upsample", "pack"):
            if self.rows and getattr(self, key):
                raise InputError(f"rows=true cuts rows as the ids lie: leave {key} out")


@Source.register_subclass("teacher")
@dataclass(frozen=True)
class TeacherSource(Source):
    """Rows that a teacher has read: a folder of `python -m lcjax.data teacher`."""

    path: str = ""  # the folder
    weight: float = 1.0  # share of the rows, relative to the other sources
    stream: ClassVar[bool] = False
    upsample: ClassVar[None] = None

    def __post_init__(self):
        super().__post_init__()
        for key in ("pack", "stride", "min_document_tokens"):
            if getattr(self, key):
                raise InputError(f"type teacher: its rows are made already; leave {key} out")


@Source.register_subclass("seqio")
@dataclass(frozen=True)
class SeqioSource(Source):
    """A Task or Mixture from seqio's registries; needs the extra `seqio`."""

    task: str = ""  # name of the Task or Mixture
    module: str = ""  # Python module that registers it when it is imported
    weight: float = 1.0  # share of the rows, relative to the other sources
    split: str = "train"  # one of the task's splits; data.holdout cuts validation from it
    feature: str = "targets"  # output feature that holds the document
    prompt: str = ""  # feature that is read before it and not learned, such as inputs
    tokens: bool = False  # take the task's token ids (same vocabulary needed), else its text
    # null: documents, which become rows as pack says. chunks: the task's token ids become rows as
    # data.chunks says, every example for itself, with BOS or EOS of the task's own (and those of
    # data.add_bos and data.add_eos where they are true)
    converter: str | None = None
    context: str = ""  # of the converter: feature whose text comes before that of `feature`
    task_length: int | None = None  # tokens of each feature that preprocessors are told; null: none
    cached: bool = False  # read what seqio_cache_tasks wrote
    learn: ClassVar[str] = "answers"  # with prompt, as of type chat

    def __post_init__(self):
        super().__post_init__()
        if self.converter not in (None, "chunks"):
            raise InputError(f"converter={self.converter} is not one of null, chunks")
        if self.context and not self.converter:
            raise InputError(
                f"context={self.context} is for converter=chunks: set it, or leave out"
            )
        for key in ("prompt", "pack", "stride", "min_document_tokens"):
            if self.converter and getattr(self, key):
                raise InputError(f"converter={self.converter} makes the rows: leave {key} out")

    @property
    def name(self) -> str:
        return f"seqio:{self.task}" if self.task else ""


@dataclass(frozen=True)
class Masking:
    """`data.masking`."""

    rate: float = 0.3  # part of the ordinary tokens
    # Id of [MASK]; null: the first one behind the vocabulary, for which the model needs a row more
    token: int | None = None
    keep: list[int] = field(default_factory=list)  # more ids that stay; BOS, EOS, padding, UNK do

    def __post_init__(self):
        if not 0 < self.rate < 1:
            raise InputError(f"masking.rate={self.rate} must lie between 0 and 1, such as 0.3")
        if self.token is not None and self.token < 0:
            raise InputError(f"masking.token={self.token} must be the id of a token, or null")


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
