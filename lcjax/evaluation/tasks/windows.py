"""Which tokens of a corpus a perplexity protocol reads and scores, as plain data.

Papers print "perplexity, sliding window of 256" for computations that differ by 9 to 19 % on one
model and text, because they choose and weigh windows differently. Here each choice has a name:

| id               | windows                                | scored     | mean over | BOS      |
|------------------|----------------------------------------|------------|-----------|----------|
| `slide_press`    | document: end at L, L+S, ..., its end  | new tokens | tokens    | document |
| `slide_yarn`     | the same                               | new tokens | windows   | window   |
| `slide_full`     | stream: start at 0, S, ..., less last  | all        | windows   | document |
| `last_k`         | document: start at 0, S, ..., all full | last k     | windows   | document |
| `last_k_n100`    | 100 of them; at 128K 10, one each      | last k     | windows   | document |
| `prefix_yarn`    | the beginning of each document         | all        | windows   | document |
| `stream_sink`    | the same, by a cache that forgets      | last k/all | tokens    | document |
| `rolling_lmeval` | document: blocks one after another     | new tokens | words     | prefix   |

`slide_press` is Press et al. 2021 (Shortformer), the text of PI and E2-LLM; `slide_yarn` and
`prefix_yarn` are YaRN's code without and with `--truncate`; `slide_full` is what the published code
of LongLoRA, of the LCEG study and of Dual Chunk Attention computes, with 2.71828 for e; `last_k` is
CEPE's code, and `last_k_n100` the first of its windows, as SharedLLM takes them. `stream_sink` is
StreamingLLM's stream (all scored), or CEPE's (the last 256): what is forgotten, after how many
tokens, is said by the method's pattern. `rolling_lmeval` is what lm-eval does with a text: blocks
of L new tokens, the last of which reads back to be as long; the prefix is BOS, or else the end of a
text. (A rotation that follows the length is there that of L + 1 tokens, the last of which is
predicted and not read.)
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lcjax.evaluation.corpus import Document


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens `start : start + size` of a document, of which `first : size` are scored.

    `weight` is what the mean of this window counts in the mean of all windows.
    """

    index: int
    document: int
    start: int
    size: int
    first: int
    weight: float


@dataclasses.dataclass(frozen=True)
class Options:
    """What a protocol may ask beside the length."""

    stride: int = 256
    last: int | None = 256
    has_bos: bool = False
    drop_last: bool = True
    per_document: int | None = None


_LONG = 131_072  # from here on `last_k_n100` takes fewer windows
Span = tuple[int, int, int]  # start, size, first scored position


def _slide_press(total: int, length: int, options: Options) -> Iterator[Span]:
    yield 0, min(total, length), 1
    for start in range(options.stride, total - length + options.stride, options.stride):
        yield start, min(length, total - start), length - options.stride


def _slide_full(total: int, length: int, options: Options) -> Iterator[Span]:
    # The published loop runs over range(0, total - length, stride) and leaves its last start out.
    stop = total - length if options.drop_last else total - length + 1
    starts = range(0, stop, options.stride)
    yield from ((start, length, 1) for start in (starts[:-1] if options.drop_last else starts))


def _last_k(total: int, length: int, options: Options) -> Iterator[Span]:
    starts = range(0, total - length + 1, options.stride)
    kept = starts[: options.per_document]
    yield from ((start, length, length - options.last) for start in kept)


def _last_k_n100(total: int, length: int, options: Options) -> Iterator[Span]:
    each = options.per_document or (1 if length >= _LONG else None)
    yield from _last_k(total, length, dataclasses.replace(options, per_document=each))


def _prefix_yarn(total: int, length: int, options: Options) -> Iterator[Span]:
    # L - 1 tokens of text; the place that is left over is BOS's.
    yield 0, min(total, length if options.has_bos else length - 1), 1


def _stream_sink(total: int, length: int, options: Options) -> Iterator[Span]:
    size = min(total, length)
    yield 0, size, 1 if options.last is None else max(size - options.last, 1)


def _rolling_lmeval(total: int, length: int, options: Options) -> Iterator[Span]:
    # The last token of a window is predicted and not read, so there is one more.
    for before in range(0, total - 1, length):
        stop = min(before + length + 1, total)
        start = max(stop - length - 1, 0)
        yield start, stop - start, before + 1 - start


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How windows are laid, and how their sums become one number."""

    spans: Callable[[int, int, Options], Iterator[Span]]
    mean_over: str  # tokens, windows, words
    base: float = math.e
    bos: str = "document"  # where it stands: document, window, or prefix, which is never left out
    stream: bool = False  # documents are joined; else each stands alone
    strided: bool = True
    whole: bool = False  # documents of any length are scored to their end
    ends: bool = False  # only the last tokens of a window may be scored
    most: Callable[[int], int] | None = None  # windows of a length, the first ones; None: all
    by_position: bool = False  # every position is scored, so a curve over positions means something


PROTOCOLS = {
    "slide_press": Protocol(_slide_press, "tokens"),
    "slide_yarn": Protocol(_slide_press, "windows", bos="window"),
    "slide_full": Protocol(_slide_full, "windows", base=2.71828, stream=True, by_position=True),
    "last_k": Protocol(_last_k, "windows", ends=True),
    "last_k_n100": Protocol(
        _last_k_n100, "windows", ends=True, most=lambda length: 10 if length >= _LONG else 100
    ),
    "prefix_yarn": Protocol(_prefix_yarn, "windows", strided=False, by_position=True),
    "stream_sink": Protocol(_stream_sink, "tokens", strided=False, ends=True),
    "rolling_lmeval": Protocol(_rolling_lmeval, "words", bos="prefix", strided=False, whole=True),
}


def join(documents: Sequence[Document]) -> Document:
    """One stream of all documents, in order, with nothing between them."""
    ends = None
    if all(document.byte_ends is not None for document in documents):
        offsets = np.cumsum([0.0] + [d.byte_ends[-1] for d in documents[:-1]])
        pairs = zip(documents, offsets, strict=True)
        ends = np.concatenate([document.byte_ends + offset for document, offset in pairs])
    tokens = np.concatenate([document.tokens for document in documents])
    return Document("stream", tokens, ends, sum(document.words for document in documents))


def lay(
    protocol: Protocol, documents: Sequence[Document], length: int, options: Options
) -> list[Window]:
    """All windows of `length` tokens that a protocol reads, in reading order."""
    windows: list[Window] = []
    for number, document in enumerate(documents):
        for start, size, first in protocol.spans(len(document), length, options):
            if size <= first:
                continue
            weight = 1.0
            if protocol.mean_over == "tokens":
                weight = float(size - first)
            elif protocol.mean_over == "words":  # as many as fall on its tokens
                weight = document.words * (size - first) / (len(document) - 1)
            windows.append(Window(len(windows), number, start, size, first, weight))
    return windows if protocol.most is None else windows[: protocol.most(length)]


def choose(windows: Sequence[Window], limit: int | None, how: str, seed: int) -> list[Window]:
    """At most `limit` windows (None: all): the `first`, evenly `spread`, or a seeded `random` draw.

    Neighbouring windows share all but S tokens, and the first ones come from few documents, so
    `spread` says more about a corpus than `first` at the same price.
    """
    if limit is None or limit >= len(windows):
        return list(windows)
    if how == "first":
        return list(windows[:limit])
    if how == "spread":
        picks = (np.arange(limit) * len(windows)) // limit
    else:
        picks = np.sort(np.random.default_rng(seed).choice(len(windows), limit, replace=False))
    return [windows[pick] for pick in picks]
