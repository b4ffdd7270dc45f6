"""Perplexity under a named protocol, bits per byte, and loss by position."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lcjax.errors import InputError, one_of, whole_numbers
from lcjax.evaluation.corpus import BOS_RULES, Corpus, prefix_token, start_token
from lcjax.evaluation.report import plots
from lcjax.evaluation.statistics import bootstrap
from lcjax.evaluation.task import Limits, Metric, Record, Task, Unit, pad_batch
from lcjax.evaluation.tasks.windows import PROTOCOLS, Options, Protocol, choose, join, lay

SELECT = ("spread", "first", "random")


@Task.register_subclass("perplexity")
@dataclasses.dataclass(frozen=True)
class Perplexity(Task):
    """How well the next token is predicted, under one of the protocols of `windows.py`."""

    # slide_press, slide_yarn, slide_full, last_k, last_k_n100, prefix_yarn, stream_sink or
    # rolling_lmeval
    protocol: str = "slide_press"
    # last_k, last_k_n100, stream_sink: scored tokens at the end of a window; null, for stream_sink
    # alone: all
    last: int | None = 256
    bos: str = "auto"  # BOS before each document: auto (if the model expects it), always, never
    min_tokens: int | None = None  # shortest document that counts; null: the longest length
    # Where documents are cut, so that all lengths score the same text; null: nowhere
    max_tokens: int | None = None
    # Only so many documents (the LCEG study: 10, CEPE at 128K: 10); null: all
    first_documents: int | None = None
    # last_k: only so many from each (CEPE at 128K: 1); null: all
    windows_per_document: int | None = None
    drop_last_window: bool = True  # slide_full: as the published loop does
    select: str = "spread"  # which windows max_windows keeps: spread evenly, first, or random
    position_bins: str = "linear"  # loss by position: bins of 128 tokens, or log: 4 an octave

    @property
    def label(self) -> str:
        return self.name or f"perplexity_{self.protocol}"

    @property
    def metric(self) -> Metric:
        # Papers print a dash where a model has broken down.
        what = "word perplexity" if self._rules.mean_over == "words" else "perplexity"
        return Metric("perplexity", f"{what} ({self.protocol})", True, 2, dash_above=1e3)

    @property
    def _rules(self) -> Protocol:
        return PROTOCOLS[self.protocol]

    @property
    def _per(self) -> str:
        """What a record's loss is divided by: its tokens, or the words that it is weighed by."""
        return "weight" if self._rules.mean_over == "words" else "scored"

    def check(self, limits: Limits, key: str) -> None:
        for field, value, known in (
            ("protocol", self.protocol, tuple(PROTOCOLS)),
            ("select", self.select, SELECT),
            ("bos", self.bos, BOS_RULES),
            ("position_bins", self.position_bins, ("linear", "log")),
        ):
            one_of(f"{key}.{field}", value, known)
        counts = ("min_tokens", "max_tokens", "first_documents", "windows_per_document")
        whole_numbers(key, self, 1, *counts, *(["last"] if self.last is not None else []))
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

    def plan(self, corpus: Corpus, length: int, limits: Limits) -> list[Unit]:
        bos, rules = self._start(corpus.tokenizer), self._rules
        # All lengths score texts of one size, but where they score whole ones anyway.
        shortest = 1 if rules.whole else max(limits.lengths)
        minimum = 2 if rules.stream else self.min_tokens or shortest
        counts = [n for n in (self.first_documents, limits.max_documents) if n is not None]
        # YaRN's windows leave one place to BOS; the other protocols count it as a token of text.
        documents = corpus.documents(minimum - (bos is not None), min(counts, default=None))
        documents = [document.with_first(bos).cut(self.max_tokens) for document in documents]
        if rules.stream and documents:
            documents = [join(documents)]
        options = Options(
            limits.stride, self.last, bos is not None, self.drop_last_window,
            self.windows_per_document,
        )  # fmt: skip
        windows = lay(rules, documents, length, options)
        units = []
        for window in choose(windows, limits.max_windows, self.select, limits.seed):
            document, stop = documents[window.document], window.start + window.size
            facts = {
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
                facts["bytes"] = float(ends[stop - 1] - ends[before])
            tokens = document.tokens[window.start : stop]
            if bos is not None and rules.bos == "window":
                tokens = np.concatenate([np.asarray([bos], np.int32), tokens[1:]])
            # Of blocks every last one begins elsewhere, and they are to run together.
            shape = (length + 1, 1) if rules.whole else (length, window.first)
            units.append(Unit(window.index, shape, tokens, facts))
        return units

    def _start(self, tokenizer) -> int | None:
        """What stands before a text, if anything does."""
        if self._rules.bos == "prefix" and self.bos != "never":
            return prefix_token(tokenizer)
        return start_token(tokenizer, self.bos)

    def check_model(self, model, units: Sequence[Unit]) -> None:
        if self.protocol == "stream_sink" and model.config.pattern.cache_window() is None:
            raise InputError(
                f"tasks: {self.label} reads texts by a cache that forgets (stream_sink), and one of"
                " the methods keeps every key; give it a pattern, such as {type: streaming, sinks:"
                " 4, recent: 2044}, or use protocol=prefix_yarn"
            )
        for unit in units:
            model.check_scored(*unit.shape, unit.facts["size"])

    def reach(self, corpus: Corpus) -> tuple[int, str]:
        sizes = sorted(map(len, corpus.documents(1)))
        more = sum(self._start(corpus.tokenizer) is not None for _ in sizes)
        if self._rules.stream:
            return sum(sizes) + more, (
                f"the {len(sizes)} documents, joined, are too short (a window that is the last is "
                "dropped unless drop_last_window=false); add text or choose shorter lengths"
            )
        return sizes[-1] + (more > 0), (
            f"the longest of {len(sizes)} documents has {sizes[-1]} tokens; choose shorter "
            "lengths, longer documents, or protocol=slide_full, which joins them"
        )

    def score(self, model, units: Sequence[Unit], batch: int) -> list[Record]:
        length, first = units[0].shape
        rows = [unit.tokens for unit in pad_batch(units, batch)]
        sizes = np.array([len(row) for row in rows], np.int32)
        tokens = np.zeros((batch, length), np.int32)
        for row, own in enumerate(rows):
            tokens[row, : len(own)] = own
        nll = np.asarray(model.nll(tokens, first=first, lengths=sizes), np.float64)
        return [
            self._record(unit, nll[row, unit.facts["first"] : sizes[row]])
            for row, unit in enumerate(units)
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
            edges = bin_edges(unit.facts["length"], self.position_bins)
            positions = np.arange(unit.facts["first"], unit.facts["size"])
            places = np.searchsorted(edges, positions, "right")
            sums = np.bincount(places - 1, known, len(edges) - 1)
            record["position_nll"] = sums.astype(np.float32)
            if record["nan"]:  # else they follow from what was scored
                counts = np.bincount(places - 1, finite, len(edges) - 1)
                record["position_count"] = counts.astype(int).tolist()
        return record

    def summarise(self, records: Sequence[Record]) -> Record:
        """Perplexity base ** (sum of weight * window mean / sum of weights), and bits per byte.

        `value` is NaN as soon as one loss is; `value_without_nan` leaves those windows out.
        """
        clean = [record for record in records if not record["nan"]]
        scored = sum(record["scored"] for record in records)
        loss = _mean_loss(clean, self._per)
        value = self._rules.base**loss if loss < 700 else math.inf
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
        """Nats per token of a window, or per word."""
        return None if record["nan"] else record["nll"] / record[self._per]

    def interval(self, records: Sequence[Record]) -> tuple[float, float]:
        """Bootstrap over documents."""
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

    def figures(
        self, cells: Sequence[Record], records: Sequence[Record], folder: Path
    ) -> list[Path]:
        files = [plots.over_lengths(cells, self.metric, folder / f"{self.label}.png")]
        if self._rules.by_position:
            curves = self.curves(records)
            files.append(plots.over_positions(curves, folder / f"{self.label}_by_position.png"))
        return files

    def curves(self, records: Sequence[Record]) -> list[Record]:
        """Mean loss by position, one curve per method, from its longest length."""
        curves = []
        for method in dict.fromkeys(record["method"] for record in records):
            own = [record for record in records if record["method"] == method]
            length = max(record["length"] for record in own)
            own = [record for record in own if record["length"] == length]
            edges = bin_edges(length, self.position_bins)
            sums = np.asarray([record["position_nll"] for record in own], np.float64)
            counts = np.asarray([_position_counts(record, edges) for record in own])
            seen = counts.sum(0) > 0
            total = np.maximum(counts.sum(0), 1)
            mean = sums.sum(0) / total
            spread = np.sqrt(((sums - counts * mean) ** 2).sum(0)) / total
            # Windows of one stream overlap: their scatter says nothing about the mean.
            apart = 1 < len(own) == len({record["document"] for record in own})
            curves.append(
                {
                    "method": method,
                    "length": length,
                    "trained": own[0]["trained"],
                    "position": ((edges[:-1] + edges[1:] - 1) / 2)[seen],
                    "nll": mean[seen],
                    "standard_error": spread[seen] if apart else None,
                    "log": self.position_bins == "log",
                }
            )
        return curves


def bin_edges(length: int, how: str) -> np.ndarray:
    """Edges of the position bins of a window, int64; position 0 is never predicted."""
    if how == "linear":
        return np.append(np.arange(0, length, 128), length)
    steps = np.round(2.0 ** np.arange(0, math.log2(length), 0.25)).astype(np.int64)
    return np.append(np.unique(steps), length)


def _position_counts(record: Record, edges: np.ndarray) -> np.ndarray | list[int]:
    """Scored tokens of a window in each position bin."""
    if "position_count" in record:
        return record["position_count"]
    return np.diff(np.clip(edges, record["first"], record["size"]))


def _mean_loss(records: Sequence[Record], per: str) -> float:
    """Weighted mean of window means, in nats per token or word."""
    if not records:
        return math.nan
    total = math.fsum(r["weight"] * (r["nll"] / r[per]) for r in records)
    return total / math.fsum(r["weight"] for r in records)


def _standard_error(records: Sequence[Record], per: str) -> float:
    """Of the mean loss, over documents: windows of one document are not independent.

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
