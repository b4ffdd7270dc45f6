"""Which tokens of a corpus a perplexity protocol reads and scores, as plain data.

Papers print "perplexity, sliding window of 256" for computations that differ by 9 to 19 % on one
model and text, because they choose and weigh windows differently. Here each choice has a name:

| id            | windows                                      | scored     | mean over | base    |
|---------------|----------------------------------------------|------------|-----------|---------|
| `slide_press` | of a document: end at L, L+S, ..., its end   | new tokens | tokens    | e       |
| `slide_full`  | of the stream: start at 0, S, ..., less last | all        | windows   | 2.71828 |
| `last_k`      | of a document: start at 0, S, ..., all full  | last k     | windows   | e       |
| `prefix_yarn` | the beginning of each document               | all        | windows   | e       |

`slide_press` is Press et al. 2021 (Shortformer), the text of PI and E2-LLM; `slide_full` is what
the published code of LongLoRA, of the LCEG study and of Dual Chunk Attention computes; `last_k` is
CEPE's code; `prefix_yarn` is YaRN's code as its script calls it (`--truncate`).
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
    last: int = 256
    has_bos: bool = False
    drop_last: bool = True
    per_document: int | None = None


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


def _prefix_yarn(total: int, length: int, options: Options) -> Iterator[Span]:
    # L - 1 tokens of text; the place that is left over is BOS's.
    yield 0, min(total, length if options.has_bos else length - 1), 1


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How windows are laid, and how their sums become one number."""

    spans: Callable[[int, int, Options], Iterator[Span]]
    mean_over: str  # tokens, windows
    base: float = math.e
    stream: bool = False  # documents are joined; else each stands alone
    strided: bool = True
    by_position: bool = False  # every position is scored, so a curve over positions means something


PROTOCOLS = {
    "slide_press": Protocol(_slide_press, "tokens"),
    "slide_full": Protocol(_slide_full, "windows", base=2.71828, stream=True, by_position=True),
    "last_k": Protocol(_last_k, "windows"),
    "prefix_yarn": Protocol(_prefix_yarn, "windows", strided=False, by_position=True),
}


def join(documents: Sequence[Document]) -> Document:
    """One stream of all documents, in order, with nothing between them."""
    ends = None
    if all(document.byte_ends is not None for document in documents):
        offsets = np.cumsum([0.0] + [d.byte_ends[-1] for d in documents[:-1]])
        pairs = zip(documents, offsets, strict=True)
        ends = np.concatenate([document.byte_ends + offset for document, offset in pairs])
    return Document("stream", np.concatenate([document.tokens for document in documents]), ends)


def lay(
    protocol: Protocol, documents: Sequence[Document], length: int, options: Options
) -> list[Window]:
    """All windows of `length` tokens that a protocol reads, in reading order."""
    windows: list[Window] = []
    for number, document in enumerate(documents):
        for start, size, first in protocol.spans(len(document), length, options):
            if size <= first:
                continue
            weight = float(size - first) if protocol.mean_over == "tokens" else 1.0
            windows.append(Window(len(windows), number, start, size, first, weight))
    return windows


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
