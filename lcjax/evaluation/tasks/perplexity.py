"""Perplexity under a named protocol, bits per byte, and loss by position.

Papers print "perplexity, sliding window of 256" for computations that differ by 9 to 19 % on one
model and text, because they choose and weight windows differently. Here each choice has a name:

| id               | windows                                | scored     | mean over | BOS      |
|------------------|----------------------------------------|------------|-----------|----------|
| `slide_press`    | document: end at L, L+S, ..., its end  | new tokens | tokens    | document |
| `slide_yarn`     | the same                               | new tokens | windows   | window   |
| `slide_full`     | stream: start at 0, S, ..., less last  | all        | windows   | document |
| `last_k`         | document: start at 0, S, ..., less end | last k     | windows   | document |
| `last_k_n100`    | 100 of them; at 128K 10, one each      | last k     | windows   | document |
| `prefix_yarn`    | the beginning of each document         | all        | windows   | document |
| `stream_sink`    | the same, with a rolling cache         | last k/all | tokens    | document |
| `rolling_lmeval` | document: blocks one after another     | new tokens | words     | prefix   |

`slide_press` is Press et al. 2021 (Shortformer), the text of PI and E2-LLM; `slide_yarn` and
`prefix_yarn` are YaRN's code without and with `--truncate`; `slide_full` is what the published code
of LongLoRA, of the LCEG study and of Dual Chunk Attention computes, with 2.71828 for e; `last_k` is
CEPE's code, and `last_k_n100` the first of its windows, as in SharedLLM: their loop leaves out the
window that ends with its document. (Only a document of exactly L tokens, to which `max_tokens` may
cut it, has that window here, and none there.) `stream_sink` is StreamingLLM's stream (all scored),
or CEPE's (the last 256); the method's pattern defines which tokens the cache keeps.
`rolling_lmeval` is lm-eval's: blocks of L new tokens, where the last block gets earlier tokens as
context, to be as long as the others. The prefix is BOS, or else the end-of-text token. (A
length-dependent rotation is that of L + 1 tokens, as the last token is predicted and not read.)
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from lcjax.errors import InputError, OneOf, PositiveInt
from lcjax.evaluation import plots
from lcjax.evaluation.corpus import (
    BOS_RULES,
    TokenizedCorpus,
    TokenizedDocument,
    prefix_token,
    start_token,
)
from lcjax.evaluation.statistics import at_longest, bootstrap, group_by
from lcjax.evaluation.task import Limits, Metric, Record, Records, Task, Unit, pad_batch
from lcjax.generation.session import pad_right

_LONG = 131_072  # from here on `last_k_n100` takes fewer windows

Span = tuple[int, int, int]  # start, size, first scored position


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens `start : start + size` of a document, of which `first : size` are scored."""

    index: int
    document: int
    start: int
    size: int
    first: int
    weight: float  # weight of its mean loss in the mean over all windows


@dataclasses.dataclass(frozen=True)
class WindowOptions:
    """The settings of a protocol besides the length."""

    stride: int = 256
    last: int | None = 256
    per_document: int | None = None


def _slide_press(total: int, length: int, options: WindowOptions) -> Iterator[Span]:
    yield 0, min(total, length), 1
    for start in range(options.stride, total - length + options.stride, options.stride):
        yield start, min(length, total - start), length - options.stride


def _slide_full(total: int, length: int, options: WindowOptions) -> Iterator[Span]:
    # The published loop runs over range(0, total - length, stride) without its last start.
    yield from ((start, length, 1) for start in range(0, total - length, options.stride)[:-1])


def _last_k(total: int, length: int, options: WindowOptions) -> Iterator[Span]:
    stop = 1 if total == length else total - length
    starts = range(0, stop, options.stride)[: options.per_document]
    yield from ((start, length, length - options.last) for start in starts)


def _last_k_n100(total: int, length: int, options: WindowOptions) -> Iterator[Span]:
    each = options.per_document or (1 if length >= _LONG else None)
    yield from _last_k(total, length, dataclasses.replace(options, per_document=each))


def _prefix_yarn(total: int, length: int, options: WindowOptions) -> Iterator[Span]:
    yield 0, min(total, length), 1


def _stream_sink(total: int, length: int, options: WindowOptions) -> Iterator[Span]:
    size = min(total, length)
    yield 0, size, 1 if options.last is None else max(size - options.last, 1)


def _rolling_lmeval(total: int, length: int, options: WindowOptions) -> Iterator[Span]:
    # The last token of a window is predicted and not read, so there is one more.
    for before in range(0, total - 1, length):
        stop = min(before + length + 1, total)
        start = max(stop - length - 1, 0)
        yield start, stop - start, before + 1 - start


@dataclasses.dataclass(frozen=True)
class Protocol:
    """A rule for windows, and for the mean over them."""

    spans: Callable[[int, int, WindowOptions], Iterator[Span]]
    mean_over: str  # tokens, windows, words
    base: float = math.e
    bos: str = "document"  # place of BOS: document, window, or prefix (BOS or end-of-text token)
    stream: bool = False  # whether the documents are joined
    strided: bool = True
    whole: bool = False  # whether documents of any length are scored to their end
    ends: bool = False  # whether only the last tokens of a window may be scored
    max_windows: Callable[[int], int] | None = None  # by length, the first ones; None: all
    by_position: bool = False  # whether every position is scored


PROTOCOLS = {
    "slide_press": Protocol(_slide_press, "tokens"),
    "slide_yarn": Protocol(_slide_press, "windows", bos="window"),
    "slide_full": Protocol(_slide_full, "windows", base=2.71828, stream=True, by_position=True),
    "last_k": Protocol(_last_k, "windows", ends=True),
    "last_k_n100": Protocol(
        _last_k_n100,
        "windows",
        ends=True,
        max_windows=lambda length: 10 if length >= _LONG else 100,
    ),
    "prefix_yarn": Protocol(_prefix_yarn, "windows", strided=False, by_position=True),
    "stream_sink": Protocol(_stream_sink, "tokens", strided=False, ends=True),
    "rolling_lmeval": Protocol(_rolling_lmeval, "words", bos="prefix", strided=False, whole=True),
}


def join_documents(documents: Sequence[TokenizedDocument]) -> TokenizedDocument:
    """Concatenates all documents."""
    ends = None
    if all(document.byte_ends is not None for document in documents):
        offsets = np.cumsum([0.0] + [d.byte_ends[-1] for d in documents[:-1]])
        pairs = zip(documents, offsets, strict=True)
        ends = np.concatenate([document.byte_ends + offset for document, offset in pairs])
    tokens = np.concatenate([document.tokens for document in documents])
    return TokenizedDocument("stream", tokens, ends, sum(document.words for document in documents))


def lay_windows(
    protocol: Protocol, documents: Sequence[TokenizedDocument], length: int, options: WindowOptions
) -> list[Window]:
    """Returns all windows of a protocol with `length` tokens, in reading order."""
    windows: list[Window] = []
    for number, document in enumerate(documents):
        for start, size, first in protocol.spans(len(document), length, options):
            if size <= first:
                continue
            weight = 1.0
            if protocol.mean_over == "tokens":
                weight = float(size - first)
            elif protocol.mean_over == "words":  # the share of its tokens
                weight = document.words * (size - first) / (len(document) - 1)
            windows.append(Window(len(windows), number, start, size, first, weight))
    return windows if protocol.max_windows is None else windows[: protocol.max_windows(length)]


def choose_windows(windows: Sequence[Window], limit: int | None) -> list[Window]:
    """Returns `limit` windows (None: all), evenly spread.

    Neighbouring windows share all but S tokens, and the first ones are from few documents, so the
    estimate for the corpus is better than that of the first windows at the same cost.
    """
    if limit is None or limit >= len(windows):
        return list(windows)
    return [windows[pick] for pick in (np.arange(limit) * len(windows)) // limit]


@Task.register_subclass("perplexity")
@dataclasses.dataclass(frozen=True)
class Perplexity(Task):
    """The loss of the next token under one of the protocols of this module."""

    table_settings: ClassVar[tuple[str, ...]] = ("protocol", "last")

    # slide_press, slide_yarn, slide_full, last_k, last_k_n100, prefix_yarn, stream_sink or
    # rolling_lmeval
    protocol: Annotated[str, OneOf(PROTOCOLS)] = "slide_press"
    # last_k, last_k_n100, stream_sink: scored tokens at the end of a window; null, for stream_sink
    # alone: all
    last: PositiveInt | None = 256
    # BOS before each document: auto (if the model expects it), always, never
    bos: Annotated[str, OneOf(BOS_RULES)] = "auto"
    min_tokens: PositiveInt | None = None  # shortest document that counts; null: the longest length
    # Documents are cut to this length, so that all lengths score the same text; null: not cut
    max_tokens: PositiveInt | None = None
    # Number of documents (the LCEG study: 10, CEPE at 128K: 10); null: all
    first_documents: PositiveInt | None = None
    # last_k: number of windows of each document (CEPE at 128K: 1); null: all
    windows_per_document: PositiveInt | None = None
    # Loss by position: linear, bins of 128 tokens; log, 4 an octave
    position_bins: Annotated[str, OneOf(("linear", "log"))] = "linear"

    @property
    def label(self) -> str:
        return self.name or f"perplexity_{self.protocol}"

    @property
    def metric(self) -> Metric:
        if self._rules.mean_over == "words":
            name, unit = "word perplexity", "nats a word"
        else:
            name, unit = "perplexity", "nats a token"
        return Metric("perplexity", f"{name} ({self.protocol})", True, 2, unit)

    @property
    def _rules(self) -> Protocol:
        return PROTOCOLS[self.protocol]

    @property
    def _per(self) -> str:
        """The field of records that divides their loss: the number of tokens or of words."""
        return "weight" if self._rules.mean_over == "words" else "scored"

    def check(self, limits: Limits, key: str) -> None:
        super().check(limits, key)
        if self.last is None and self._rules.ends and self.protocol != "stream_sink":
            raise InputError(
                f"{key}.last=null scores all tokens, and {self.protocol} the last ones of a window;"
                " give a number, or use protocol=stream_sink"
            )
        if self.max_tokens is not None and self.max_tokens < max(limits.lengths):
            raise InputError(
                f"{key}.max_tokens={self.max_tokens} cuts documents below the longest of "
                f"lengths, {max(limits.lengths)}; raise it or drop that length"
            )
        for field, is_used in (
            ("min_tokens", not self._rules.stream),  # else all documents are joined
            ("windows_per_document", self._rules.spans in (_last_k, _last_k_n100)),
        ):
            value = getattr(self, field)
            if value is not None and not is_used:
                raise InputError(
                    f"{key}.{field}={value} has no effect on {self.protocol}; remove it or choose"
                    " another protocol"
                )
        for length in limits.lengths:
            self._check_length(length, limits.stride, key)

    def _check_length(self, length: int, stride: int, key: str) -> None:
        if self._rules.ends and self.last is not None and self.last >= length:
            raise InputError(
                f"{key}.last={self.last} must be below every length, also {length}: the "
                "first token of a window cannot be predicted"
            )
        if not self._rules.strided or self._rules.stream:
            return
        # Windows of all lengths then end at the same tokens, and a row of a table compares them.
        if length % stride or length < 2 * stride:
            down = max(2, length // stride) * stride
            raise InputError(
                f"lengths: {length} must be a multiple of stride={stride}, at least twice that, "
                f"for {self.protocol}; nearest: {down}, {down + stride}; or set --stride"
            )

    def plan(self, corpus: TokenizedCorpus, length: int, limits: Limits) -> list[Unit]:
        bos, rules = self._start(corpus.tokenizer), self._rules
        # All lengths score the same documents, unless they score documents of any length.
        shortest = 1 if rules.whole else max(limits.lengths)
        minimum = 2 if rules.stream else self.min_tokens or shortest
        counts = [n for n in (self.first_documents, limits.max_documents) if n is not None]
        # In YaRN's windows BOS replaces the first token; other protocols count it as text.
        documents = corpus.documents(minimum - (bos is not None), min(counts, default=None))
        documents = [document.with_first(bos).cut(self.max_tokens) for document in documents]
        if rules.stream and documents:
            documents = [join_documents(documents)]
        options = WindowOptions(limits.stride, self.last, self.windows_per_document)
        windows = lay_windows(rules, documents, length, options)
        units = []
        for window in choose_windows(windows, limits.max_windows):
            document, stop = documents[window.document], window.start + window.size
            fields = {
                "protocol": self.protocol,
                "length": length,
                "stride": limits.stride if rules.strided else None,
                "bos": "none" if bos is None else rules.bos,
                "document": window.document,
                "source": document.name,
                "start": window.start,
                "size": window.size,
                "first": window.first,
                "weight": window.weight,
                "bytes": None,
            }
            if document.byte_ends is not None:
                ends, before = document.byte_ends, window.start + window.first - 1
                fields["bytes"] = float(ends[stop - 1] - ends[before])
            tokens = document.tokens[window.start : stop]
            if bos is not None and rules.bos == "window":
                tokens = np.concatenate([np.asarray([bos], np.int32), tokens[1:]])
            # The last blocks of documents have other first positions, but run in one function.
            shape = (length + 1, 1) if rules.whole else (length, window.first)
            units.append(Unit(window.index, shape, tokens, fields))
        return units

    def _start(self, tokenizer) -> int | None:
        """Returns the token before a text, or None."""
        if self._rules.bos == "prefix" and self.bos != "never":
            return prefix_token(tokenizer)
        return start_token(tokenizer, self.bos)

    def check_model(self, model, units: Sequence[Unit]) -> None:
        if self.protocol == "stream_sink" and any(
            not pattern.is_bounded for pattern in model.config.patterns
        ):
            raise InputError(
                f"tasks: {self.label} reads texts with a cache that evicts keys (stream_sink), and"
                " one of the methods keeps every key; give it a pattern, such as {type: streaming,"
                " sinks: 4, recent: 2044}, or use protocol=prefix_yarn"
            )
        for unit in units:
            model.check_scored(*unit.shape, unit.fields["size"])

    def longest_length(self, corpus: TokenizedCorpus) -> tuple[int, str]:
        sizes = sorted(map(len, corpus.documents(1)))
        has_start = self._start(corpus.tokenizer) is not None
        if self._rules.stream:
            return sum(sizes) + has_start * len(sizes), (
                f"the {len(sizes)} documents, joined, are too short (the last window is "
                "dropped, as in the published loop); add text or choose shorter lengths"
            )
        return sizes[-1] + has_start, (
            f"the longest of {len(sizes)} documents has {sizes[-1]} tokens; choose shorter "
            "lengths, longer documents, or protocol=slide_full, which joins them"
        )

    def score(self, model, units: Sequence[Unit], batch: int) -> list[Record]:
        length, first = units[0].shape
        rows = [unit.tokens for unit in pad_batch(units, batch)]
        sizes = np.array([len(row) for row in rows], np.int32)
        nll = np.asarray(model.nll(pad_right(rows, length), first=first, lengths=sizes), np.float64)
        return [
            self._record(unit, nll[index, unit.fields["first"] : sizes[index]])
            for index, unit in enumerate(units)
        ]

    def _record(self, unit: Unit, nll: np.ndarray) -> Record:
        finite = np.isfinite(nll)
        known = np.where(finite, nll, 0.0)
        record = {
            "scored": int(nll.size),
            "nll": float(known.sum()),  # over finite values
            "nan": int(nll.size - finite.sum()),
        }
        if self._rules.by_position:
            edges = bin_edges(unit.fields["length"], self.position_bins)
            positions = np.arange(unit.fields["first"], unit.fields["size"])
            bins = np.searchsorted(edges, positions, "right") - 1
            sums = np.bincount(bins, known, len(edges) - 1)
            record["position_nll"] = sums.astype(np.float32)
            if record["nan"]:  # else the counts follow from the window
                counts = np.bincount(bins, finite, len(edges) - 1)
                record["position_count"] = counts.astype(int).tolist()
        return record

    def summarise(self, records: Records) -> Record:
        """Returns perplexity base ** (sum of weight * window mean / sum of weights), and details.

        `value` is NaN if one loss is NaN; the other numbers ignore the windows with such losses.
        `bits_per_byte` is also NaN if the tokenizer does not preserve the text.
        """
        clean = [record for record in records if not record["nan"]]
        scored = sum(record["scored"] for record in records)
        loss = _mean_loss(clean, self._per)
        value = math.inf if loss >= 700 else self._rules.base**loss
        sizes = [record["bytes"] for record in clean]
        bits = math.nan
        if clean and all(size is not None for size in sizes) and sum(sizes):
            bits = math.fsum(r["nll"] for r in clean) / math.log(2) / math.fsum(sizes)
        by_bytes = {} if self._rules.mean_over != "words" else {"byte_perplexity": 2**bits}
        return {
            "value": value if len(clean) == len(records) else math.nan,
            "value_without_nan": value,
            "loss": loss,
            "loss_standard_error": _standard_error(clean, self._per),
            "bits_per_byte": bits,
            **by_bytes,
            "windows": len(records),
            "documents": len({record["document"] for record in records}),
            "tokens_scored": scored,
            "nan_tokens": sum(record["nan"] for record in records),
            "nan_windows": len(records) - len(clean),
        }

    def example(self, record: Record) -> float | None:
        """Returns nats per token of a window, or per word; None if a loss is NaN."""
        return None if record["nan"] else record["nll"] / record[self._per]

    def interval(self, records: Records) -> tuple[float, float]:
        """Returns the bootstrap interval over documents, or NaN."""
        if any(record["nan"] for record in records):
            return math.nan, math.nan
        low, high = bootstrap(
            [self.example(record) for record in records],
            weights=[record["weight"] for record in records],
            clusters=[record["document"] for record in records],
        )
        if math.isnan(low):
            return math.nan, math.nan
        return tuple(self._rules.base**end if end < 700 else math.inf for end in (low, high))

    def figures(self, cells: Records, records: Records, folder: Path) -> list[Path]:
        files = [plots.over_lengths(cells, self.metric, folder / f"{self.label}.png")]
        if self._rules.by_position:
            curves = self.curves(records)
            files.append(plots.over_positions(curves, folder / f"{self.label}_by_position.png"))
        return files

    def curves(self, records: Records) -> list[Record]:
        """Returns the mean loss by position: one curve per method, from its longest length."""
        curves = []
        for method, group in group_by(records, "method").items():
            group = at_longest(group)
            length = group[0]["length"]
            edges = bin_edges(length, self.position_bins)
            sums = np.asarray([record["position_nll"] for record in group], np.float64)
            counts = np.asarray([_position_counts(record, edges) for record in group])
            has_tokens = counts.sum(0) > 0
            total = np.maximum(counts.sum(0), 1)
            mean = sums.sum(0) / total
            # As in `_standard_error`; NaN for a bin of one window.
            size = (counts > 0).sum(0)
            factor = np.where(size > 1, size / np.maximum(size - 1, 1), math.nan)
            spread = np.sqrt(factor * ((sums - counts * mean) ** 2).sum(0)) / total
            # The spread of overlapping windows of one stream is no error of the mean.
            independent = 1 < len(group) == len({record["document"] for record in group})
            curves.append(
                {
                    "method": method,
                    "length": length,
                    "trained": group[0]["trained"],
                    "position": ((edges[:-1] + edges[1:] - 1) / 2)[has_tokens],
                    "nll": mean[has_tokens],
                    "standard_error": spread[has_tokens] if independent else None,
                    "log": self.position_bins == "log",
                }
            )
        return curves


def bin_edges(length: int, how: str) -> np.ndarray:
    """Returns the edges of the position bins, int64; position 0 is never predicted."""
    if how == "linear":
        return np.append(np.arange(0, length, 128), length)
    steps = np.round(2.0 ** np.arange(0, math.log2(length), 0.25)).astype(np.int64)
    return np.append(np.unique(steps), length)


def _position_counts(record: Record, edges: np.ndarray) -> np.ndarray | list[int]:
    """Returns the number of scored tokens of a window in each position bin."""
    if "position_count" in record:
        return record["position_count"]
    return np.diff(np.clip(edges, record["first"], record["size"]))


def _mean_loss(records: Records, per: str) -> float:
    """Returns the weighted mean of window means, in nats per token or word."""
    if not records:
        return math.nan
    total = math.fsum(r["weight"] * (r["nll"] / r[per]) for r in records)
    return total / math.fsum(r["weight"] for r in records)


def _standard_error(records: Records, per: str) -> float:
    """Returns the standard error of the mean loss over documents: windows are not independent.

    Ratio estimator: sqrt(n / (n - 1) * sum_d (t_d - w_d m)^2) / sum_d w_d.
    """
    sums: dict[int, list[float]] = {}
    for record in records:
        entry = sums.setdefault(record["document"], [0.0, 0.0])
        entry[0] += record["weight"] * record["nll"] / record[per]
        entry[1] += record["weight"]
    if len(sums) < 2:
        return math.nan
    total, weight = (math.fsum(values) for values in zip(*sums.values(), strict=True))
    mean = total / weight
    squares = math.fsum((t - w * mean) ** 2 for t, w in sums.values())
    return math.sqrt(len(sums) / (len(sums) - 1) * squares) / weight
