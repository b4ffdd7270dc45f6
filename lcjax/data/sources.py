"""The entries of `data.sources`: bodies of text, how they are read, and their share of the rows."""

import string
from dataclasses import MISSING, dataclass, field, fields
from typing import ClassVar

import draccus

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
    """Files."""

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
