"""The YAML section `data:`: which text is read, how it is cut into rows, and in which order."""

import string
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Annotated, ClassVar

import draccus

from lcjax.data.chunks import Chunks
from lcjax.data.upsample import Upsample
from lcjax.errors import (
    InputError,
    Interval,
    NonNegativeInt,
    OneOf,
    PositiveInt,
    Range,
    Seed,
    check_fields,
)
from lcjax.storage import to_path

OVERLONG = ("split", "truncate", "drop")
ON_BAD_TEXT = ("error", "skip", "replace")
ON_BAD_RECORD = ("error", "skip")
PACKINGS = ("concat", "first_fit", "best_fit", "windows", "single")
NOT_CONTENT = ("path", "weight")  # fields of a source that are not in its `content_key`
# Fields that may change when a run resumes: speed, checks, and the number of epochs.
RESUMABLE = ("threads", "prefetch", "scan", "repeat")

# Part of a `content_key`: an earlier version encoded each part of a conversation alone.
_WHOLE = "; ids of the whole text"

# Share of the rows, relative to the other sources.
Weight = Annotated[float, Interval(above=0, hint="leave the source out to switch it off")]

# Fields that only apply to sources whose rows are packed here.
_PACKED = ("pack", "stride", "min_document_tokens", "max_document_tokens")


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder that a command writes, and that is read as a source."""

    name: str
    command: str
    index: str  # file of a complete folder
    plan: str  # file of an incomplete folder


TOKENS = FolderKind("tokens", "python -m lcjax.data prepare", "index.json", "plan.json")
TEACHER = FolderKind("teacher", "python -m lcjax.data teacher", "teacher.json", "teacher_plan.json")
RETRIEVED = FolderKind(
    "retrieved", "python -m lcjax.retrieval chunks", "retrieved.json", "retrieved_plan.json"
)


@dataclass(frozen=True)
class Source(draccus.ChoiceRegistry):
    """One body of text and its share of the training rows."""

    # Values for types that lack these fields. They have no annotation, so they are no fields here.
    stream, upsample, hashes = False, None, None
    # null: data.pack
    pack: Annotated[str, OneOf(PACKINGS)] | None = field(default=None, kw_only=True)
    # Tokens from the start of a row to the start of the next; null: data.length, without overlap
    stride: PositiveInt | None = field(default=None, kw_only=True)
    # null: data.min_document_tokens
    min_document_tokens: PositiveInt | None = field(default=None, kw_only=True)
    # Longer documents (without BOS, EOS) are left out; null: no limit
    max_document_tokens: PositiveInt | None = field(default=None, kw_only=True)

    def __post_init__(self):
        check_fields("", self)

    @classmethod
    def default_choice_name(cls) -> str:
        return "text"

    @property
    def name(self) -> str:
        return self.path

    def packing(self, default: str) -> str | None:
        """Returns the packing of its documents; None if they are not packed here.

        Args:
          default: `data.pack`.
        """
        return self.pack or default

    def selects(self, split_hash: float) -> bool:
        """Returns whether `hashes` contains the hash of a document's name."""
        return self.hashes is None or self.hashes[0] <= split_hash < self.hashes[1]

    @property
    def content_key(self) -> str:
        """Text of the fields that determine the rows; a saved position is valid only for it."""
        parts = []
        for item in fields(self):
            value = getattr(self, item.name)
            default = item.default if item.default is not MISSING else None
            if item.name not in NOT_CONTENT and value != default:
                parts.append(f"{item.name}={value}")
        return ", ".join(parts)


@Source.register_subclass("text")
@dataclass(frozen=True)
class TextSource(Source):
    """Files of text, or of records with a text field."""

    path: str = ""  # file, folder, glob, python:stdlib, or package:NAME[/folder or glob]
    weight: Weight = 1.0  # share of the rows, relative to the other sources
    text_field: str = "text"  # field or column with the document; a.b: field b inside field a
    # Field with the label of a document, as meta.redpajama_set_name in SlimPajama; empty: the name
    # of its folder (or of its file)
    label_field: str = ""
    # Read files in random order, and the documents of a file in random order. No index is needed
    # before the first row, unlike for a global order
    stream: bool = False
    upsample: Upsample | None = None  # fewer short documents; implies `stream`
    # Read only documents whose hash of the name, a number in [0, 1), lies in [first, second);
    # null: all. Sources of the same path with ranges that do not overlap share no document
    hashes: tuple[float, float] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.hashes is not None and not 0 <= self.hashes[0] < self.hashes[1] <= 1:
            raise InputError(
                f"hashes={list(self.hashes)} must be two numbers in [0, 1] that ascend, such as"
                " [0.0, 0.01]"
            )


@Source.register_subclass("chat")
@dataclass(frozen=True)
class ChatSource(Source):
    """Conversations; only the answers are learned, unless `learn` is `all`."""

    path: str = ""  # as in type text: .jsonl, .parquet, .arrow or .array_record files
    weight: Weight = 1.0  # share of the rows, relative to the other sources
    # List of {role, content}, or of ShareGPT's {from, value}, and other keys that the chat template
    # reads (tool_calls, reasoning_content, name); `weight: 0` or `train: false`: not learned
    messages_field: str = "messages"
    # Instead of messages and the tokenizer's chat template: text with {fields} of the record, as
    # "### Instruction:\n{instruction}\n\n### Response:\n"
    prompt: str = ""
    answer: str = "{output}"  # with prompt: the text after it; EOS is added
    # Tokens to learn: answers (what follows the last one is left out), or all
    learn: Annotated[str, OneOf(("answers", "all"))] = "answers"
    # Read the strings of special tokens in messages as special tokens, as transformers does
    allow_special: bool = False
    stream: bool = False  # one file after the other, as in type text

    @property
    def content_key(self) -> str:
        return super().content_key + _WHOLE

    def __post_init__(self):
        super().__post_init__()
        check_fields("", self)
        for key in ("prompt", "answer"):
            try:
                list(string.Formatter().parse(getattr(self, key)))
            except ValueError as error:
                raise InputError(
                    f"{key}={getattr(self, key)!r}: {error}; write a brace of the text twice"
                ) from None


@Source.register_subclass("tokens")
@dataclass(frozen=True)
class TokenSource(Source):
    """Token ids: a folder of `python -m lcjax.data prepare`, or bare `.bin` files."""

    path: str = ""  # the folder, one .bin, or a folder of them
    weight: Weight = 1.0  # share of the rows, relative to the other sources
    # Read only documents with these labels; empty: all
    labels: list[str] = field(default_factory=list)
    # Concatenate all documents in stored order, cut that into rows, and shuffle the rows (LongLoRA,
    # LCEG); false: documents are shuffled in every epoch, then packed
    rows: bool = False
    stream: bool = False  # one shard after the other, as in type text
    upsample: Upsample | None = None  # fewer short documents, by the characters of their text
    # Of a bare .bin: uint16 or uint32
    dtype: Annotated[str, OneOf(("uint16", "uint32"))] = "uint16"
    # Of a bare .bin: first token of every document; null: the file's first; -1: one document
    document_start: int | None = None
    document_end: int | None = None  # of a bare .bin: last token of every document

    def __post_init__(self):
        super().__post_init__()
        check_fields("", self)
        if self.document_start is not None and self.document_end is not None:
            raise InputError("document_start and document_end are both set: keep one of them")
        for key in ("stream", "upsample", "pack", "max_document_tokens"):
            if self.rows and getattr(self, key):
                raise InputError(f"rows=true cuts rows in stored order: leave {key} out")

    def packing(self, default: str) -> str | None:
        return "concat" if self.rows else super().packing(default)


@dataclass(frozen=True)
class StoredSource(Source):
    """Base class of sources with stored rows, which have the fields of a batch."""

    kind: ClassVar[FolderKind]
    path: str = ""  # the folder
    weight: Weight = 1.0  # share of the rows, relative to the other sources

    def __post_init__(self):
        super().__post_init__()
        for key in _PACKED:
            if getattr(self, key):
                raise InputError(f"type {self.kind.name}: its rows are stored; leave {key} out")

    def packing(self, default: str) -> str | None:
        return None


@Source.register_subclass("teacher")
@dataclass(frozen=True)
class TeacherSource(StoredSource):
    """Rows with a teacher's probabilities: a folder of `python -m lcjax.data teacher`."""

    kind: ClassVar[FolderKind] = TEACHER


@Source.register_subclass("retrieved")
@dataclass(frozen=True)
class RetrievedSource(StoredSource):
    """Rows with retrieved passages as chunks: a folder of `python -m lcjax.retrieval chunks`."""

    kind: ClassVar[FolderKind] = RETRIEVED


@Source.register_subclass("seqio")
@dataclass(frozen=True)
class SeqioSource(Source):
    """A Task or Mixture from seqio's registries; needs the extra `seqio`."""

    task: str = ""  # name of the Task or Mixture
    module: str = ""  # Python module whose import registers the task
    weight: Weight = 1.0  # share of the rows, relative to the other sources
    split: str = "train"  # one of the task's splits; data.holdout takes validation from it
    feature: str = "targets"  # output feature that holds the document
    prompt: str = ""  # feature that precedes it and is not learned, such as inputs
    tokens: bool = False  # read token ids (of the model's vocabulary), not text
    # null: read documents, and pack them. chunks: cut the token ids of every example into rows by
    # data.chunks; BOS and EOS are those of the task, and those of data.add_bos and data.add_eos
    # where these are true
    converter: Annotated[str, OneOf(("chunks",))] | None = None
    context: str = ""  # with converter: feature whose text precedes that of `feature`
    task_length: int | None = None  # feature length for preprocessors; null: none
    cached: bool = False  # read the output of seqio_cache_tasks
    learn: ClassVar[str] = "answers"  # with prompt, as in type chat

    def __post_init__(self):
        super().__post_init__()
        if self.context and not self.converter:
            raise InputError(
                f"context={self.context} is for converter=chunks: set it, or leave out"
            )
        for key in ("prompt", *_PACKED):
            if self.converter and getattr(self, key):
                raise InputError(f"converter={self.converter} makes the rows: leave {key} out")

    @property
    def name(self) -> str:
        return f"seqio:{self.task}" if self.task else ""

    @property
    def content_key(self) -> str:
        return super().content_key + (_WHOLE if self.prompt else "")

    def packing(self, default: str) -> str | None:
        return None if self.converter else super().packing(default)


@dataclass(frozen=True)
class Masking:
    """`data.masking`: masked language modelling.

    Every ordinary token is selected with the same probability and becomes [MASK] (CEPE's encoder,
    Yen et al. 2024, arXiv 2402.16617, app. A.1). Special tokens are never selected.
    """

    # Fraction of the ordinary tokens
    rate: Annotated[float, Interval(above=0, below=1, hint="such as 0.3")] = 0.3
    # Id of [MASK]; null: the vocabulary size, for which the model needs one more embedding
    token: NonNegativeInt | None = None
    # Ids that are never masked, in addition to BOS, EOS, padding and UNK
    keep: list[int] = field(default_factory=list)

    def __post_init__(self):
        check_fields("masking", self)


@dataclass(frozen=True)
class TextConfig:
    """The sources of text: `data:` of eval.py, and a part of `data:` of train.py."""

    path: str = ""  # one source of text or tokens; use sources for several, or for settings
    sources: list[Source] = field(default_factory=list)  # rows are mixed by weight
    # Fraction of the documents for validation, by hash of the name
    holdout: Annotated[float, Interval(least=0, below=1, hint="such as 0.01")] = 0.0
    # Invalid UTF-8: error, skip the document, or replace the bytes
    on_bad_text: Annotated[str, OneOf(ON_BAD_TEXT)] = "error"
    # A record without the text, or damaged: error, or skip it
    on_bad_record: Annotated[str, OneOf(ON_BAD_RECORD)] = "error"

    def __post_init__(self):
        check_fields("data", self)
        if self.path and self.sources:
            raise InputError(
                f"data.path={self.path} and data.sources are both set: keep one of them"
            )

    def resolved_sources(self) -> list[Source]:
        """Returns `sources`, or the source that `path` names."""
        sources = self.sources or ([_source_at(self.path)] if self.path else [])
        if not sources:
            raise InputError(
                "data.path is empty: give a file, a folder, a glob, python:stdlib or package:NAME"
            )
        for i, source in enumerate(sources):
            if not source.name:
                key = "task" if isinstance(source, SeqioSource) else "path"
                raise InputError(f"data.sources.{i}.{key} is empty: name the source")
        return sources


@dataclass(frozen=True)
class LengthShare:
    """`data.length_shares`: share of rows with documents of at most `tokens`, without BOS, EOS."""

    tokens: int
    share: float


@dataclass(frozen=True)
class DataConfig(TextConfig):
    """The sources, and how they are made into rows of exactly `length` tokens."""

    # Tokens in a row, including those of chunks that are cut from it
    length: Annotated[int, Range(2, hint="a row holds a token and its target")] = 1024
    # concat: cut anywhere, no padding. first_fit, best_fit: whole documents. windows: full rows
    # within one document; the rest of the document is left out. single: one padded row per document
    pack: Annotated[str, OneOf(PACKINGS)] = "concat"
    # first_fit, best_fit, single: split, truncate or drop documents longer than a row. windows:
    # truncate takes the first row of a document only
    overlong: Annotated[str, OneOf(OVERLONG)] = "split"
    packing_bins: PositiveInt = 32  # first_fit, best_fit: rows filled at the same time
    # true: a token attends to its own document only, and positions start at 0 in each document.
    # false: the same for rows. null: true, but false if the documents of a row share data.chunks
    document_mask: bool | None = None
    add_bos: bool | None = None  # BOS before each document; null: as the model was trained
    add_eos: bool | None = None  # EOS after each document; null: if the tokenizer has one
    min_document_tokens: PositiveInt = 1  # shorter documents (without BOS, EOS) are left out
    # pack=single: shares of the rows of each source by the length of their documents: up to the
    # first number of tokens, from there up to the second one, ...; the last includes longer ones.
    # `python -m lcjax.data lengths` counts them. Empty: as in the text
    length_shares: list[LengthShare] = field(default_factory=list)
    shuffle: bool = True  # read documents in a new random order in every epoch
    # Rows in the window of a second shuffle, which separates parts of a book
    shuffle_rows: NonNegativeInt = 0
    seed: Seed = 0  # of all random numbers in the data
    masking: Masking | None = None  # null: next-token prediction
    # Context for an encoder (model.memory): the beginning of a row (the decoder reads the rest), or
    # retrieved passages
    chunks: Chunks | None = None
    repeat: PositiveInt | None = None  # epochs; null: no end; a mixture ends when one source ends
    threads: NonNegativeInt = 2  # threads that read and tokenise
    prefetch: NonNegativeInt = 2  # batches computed ahead
    scan: bool = False  # read all documents before the training, to find bad records early

    def __post_init__(self):
        super().__post_init__()
        check_fields("data", self)
        for i, source in enumerate(self.sources):
            self._check_source(f"data.sources.{i}", source)
        for cls in (TeacherSource, RetrievedSource):
            is_stored = [isinstance(source, cls) for source in self.sources]
            if any(is_stored) and not all(is_stored):
                raise InputError(
                    f"data.sources.{is_stored.index(False)} is not of type {cls.kind.name}, and"
                    " others are: one batch cannot hold rows of both; keep one kind"
                )
        if self.chunks is not None:
            self._check_chunks(self.chunks)
        if self.length_shares:
            self._check_length_shares()
        if self.document_mask is None:
            joined = self.chunks is not None and self.chunks.stride is None
            joined = joined and self._has_packed_documents()
            object.__setattr__(self, "document_mask", not joined)

    @property
    def decoder_length(self) -> int:
        """Number of tokens that the decoder reads in a row."""
        return self.length if self.chunks is None else self.chunks.decoder_length(self.length)

    def resolved_sources(self) -> list[Source]:
        sources = super().resolved_sources()
        if self.length_shares:
            sources = [part for source in sources for part in self._by_length(source)]
        if self.chunks is not None and self.chunks.text == "retrieved":
            for source in sources:
                if not isinstance(source, RetrievedSource):
                    raise InputError(
                        f"data.chunks.text=retrieved: {source.name} has no passages; write rows"
                        f" with `{RETRIEVED.command}`, and name their folder"
                    )
        return sources

    def _by_length(self, source: Source) -> list[Source]:
        """Returns a source for each of `length_shares`, with documents of these lengths only."""
        bounds = [part.tokens for part in self.length_shares]
        least = source.min_document_tokens or self.min_document_tokens
        lows = [max(low + 1, least) for low in (0, *bounds[:-1])]
        highs = [*bounds[:-1], source.max_document_tokens]
        return [
            replace(
                source,
                weight=source.weight * part.share,
                min_document_tokens=low,
                max_document_tokens=high,
            )
            for part, low, high in zip(self.length_shares, lows, highs, strict=True)
        ]

    def _check_length_shares(self) -> None:
        bounds = [part.tokens for part in self.length_shares]
        shares = [part.share for part in self.length_shares]
        key = "data.length_shares"
        if not all(0 < share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-6:
            raise InputError(f"{key}: {shares} must be positive, with a sum of 1")
        if sorted(set(bounds)) != bounds or bounds[0] < 1:
            raise InputError(f"{key}: numbers of tokens {bounds} must ascend")
        if bounds[-1] != self.length:
            raise InputError(
                f"{key}: the last is of documents up to {bounds[-1]} tokens, and rows have"
                f" data.length={self.length}; write that number"
            )
        if self._packings() != {"single"}:
            raise InputError(f"{key} needs rows of one document; set pack: single")

    def _check_chunks(self, chunks: Chunks) -> None:
        chunks.decoder_length(self.length)
        if self.masking is not None:
            raise InputError(
                "data.chunks give the decoder its context and data.masking trains an encoder: keep"
                " one of them"
            )
        if chunks.learned and None in self._packings():
            raise InputError(
                "data.chunks.learned=true needs targets of the tokens of chunks, which rows of"
                " type teacher and of a converter do not have; leave one out"
            )
        if self.document_mask and not chunks.stride and self._has_packed_documents():
            raise InputError(
                "data.document_mask=true conflicts with data.chunks, which all documents of a row"
                " attend to: set it to false, or pack: windows or single, with one document a row"
            )
        if chunks.text == "beginning" and self._packings() != {"single"}:
            raise InputError(
                "data.chunks.text=beginning cuts whole documents: set pack: single, and leave"
                " out sources of type teacher and with a converter"
            )
        if chunks.text == "beginning" and self.overlong == "split":
            raise InputError(
                "data.overlong=split would separate questions from their answers with"
                " data.chunks.text=beginning: set it to truncate or drop"
            )

    def _packings(self) -> set[str | None]:
        """Returns the packings of the sources; None is that of rows that are not packed here."""
        return {source.packing(self.pack) for source in self.sources} or {self.pack}

    def _has_packed_documents(self) -> bool:
        """Whether a row may hold several documents."""
        return bool(self._packings() - {"windows", "single", None})

    def _check_source(self, key: str, source: Source) -> None:
        if isinstance(source, SeqioSource) and source.converter and self.chunks is None:
            raise InputError(
                f"{key}.converter={source.converter} needs data.chunks: their number and length"
            )
        if source.stride is None:
            return
        how, key = source.packing(self.pack), f"{key}.stride={source.stride}"
        if how not in ("concat", "windows"):
            raise InputError(f"{key}: rows of {how} cannot overlap; set pack: concat or windows")
        if source.stride > self.length or (how == "concat" and self.length % source.stride):
            rule = "divide" if how == "concat" else "not exceed"
            raise InputError(f"{key} must {rule} data.length={self.length}")


def _source_at(path: str) -> Source:
    """Returns the source at a path; folders of every `FolderKind` are recognised."""
    folder = to_path(path)
    classes = {TEACHER: TeacherSource, RETRIEVED: RetrievedSource, TOKENS: TokenSource}
    for kind, source in classes.items():
        if any((folder / name).is_file() for name in (kind.index, kind.plan)):
            return source(path)
    return TokenSource(path) if folder.suffix == ".bin" else TextSource(path)
