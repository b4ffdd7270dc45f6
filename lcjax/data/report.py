"""What a tokenised corpus holds: tokens of every kind of text, and how long its documents are."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_BINS = 40  # bin b holds documents of 2**b ... 2**(b + 1) - 1 tokens
_LONG = (4096, 32768)  # lengths that the long-context studies look at
_LABELS = 12  # of the most tokens that stand for themselves in a report
_BAR = 30  # characters of the longest bar


def lengths_by_label(
    lengths: np.ndarray, labels: np.ndarray, names: Iterable[str]
) -> dict[str, dict[str, list[int]]]:
    """Documents and tokens by label and by bin of length."""
    bins = np.log2(np.maximum(lengths, 1)).astype(int)
    found = {}
    for number, name in enumerate(names):
        own = labels == number
        documents = np.bincount(bins[own], minlength=_BINS)
        tokens = np.zeros(_BINS, np.int64)
        np.add.at(tokens, bins[own], lengths[own])
        found[name] = {"documents": documents.tolist(), "tokens": tokens.tolist()}
    return found


def total(shards: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """The sum over shards."""
    sums: dict[str, dict[str, list[int]]] = {}
    for shard in shards:
        for label, counts in shard["lengths"].items():
            into = sums.setdefault(label, {key: [0] * _BINS for key in counts})
            for key, values in counts.items():
                into[key] = [a + b for a, b in zip(into[key], values, strict=True)]
    return dict(sorted(sums.items()))


def table(index: dict[str, Any]) -> str:
    """Tokens of every label, then the histogram over all of them, as Markdown."""
    rows = [(name, *_sums(counts)) for name, counts in _largest(index["lengths"]).items()]
    if len(rows) > 1:
        rows.append(("all", *_sums(_all(index))))
    everything = max(1, index["tokens"])
    lines = [
        "| source | documents | tokens | share | mean | "
        + " | ".join(f"in documents >= {length:,}" for length in _LONG)
        + " |",
        "|---|" + "---:|" * (4 + len(_LONG)),
    ]
    for name, documents, tokens, *long in rows:
        parts = " | ".join(f"{part / max(1, tokens):.1%}" for part in long)
        lines.append(
            f"| {name} | {documents:,} | {tokens:,} | {tokens / everything:.2%}"
            f" | {tokens / max(1, documents):,.0f} | {parts} |"
        )
    return "\n".join([*lines, "", *_histogram(_all(index)["tokens"])])


def _largest(lengths: dict[str, dict]) -> dict[str, dict]:
    """The labels with the most tokens, and all others together."""
    names = sorted(lengths, key=lambda name: -sum(lengths[name]["tokens"]))
    if len(names) <= _LABELS + 1:
        return lengths
    rest = names[_LABELS:]
    found = {name: lengths[name] for name in names[:_LABELS]}
    return found | {f"{len(rest)} others": _all({"lengths": {n: lengths[n] for n in rest}})}


def _all(index: dict[str, Any]) -> dict[str, list[int]]:
    return {
        key: np.sum([counts[key] for counts in index["lengths"].values()], axis=0).tolist()
        for key in ("documents", "tokens")
    }


def _sums(counts: dict[str, list[int]]) -> tuple[int, ...]:
    """Documents, tokens, and the tokens in documents of at least so many."""
    long = [sum(counts["tokens"][int(np.log2(length)) :]) for length in _LONG]
    return sum(counts["documents"]), sum(counts["tokens"]), *long


def _histogram(tokens: Sequence[int]) -> list[str]:
    """Share of the tokens by the length of their document."""
    used = [b for b, count in enumerate(tokens) if count]
    whole, most = max(1, sum(tokens)), max([1, *tokens])
    lines = ["| tokens of a document | share of all tokens | |", "|---:|---:|---|"]
    for b in range(used[0], used[-1] + 1) if used else ():
        bar = "█" * round(_BAR * tokens[b] / most)
        lines.append(f"| {2**b:,} - {2 ** (b + 1) - 1:,} | {tokens[b] / whole:.1%} | {bar} |")
    return lines


def plot(index: dict[str, Any], path: Path) -> None:
    """The histogram by label, stacked, as PNG."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    used = [b for b, count in enumerate(_all(index)["tokens"]) if count]
    bins = np.arange(used[0], used[-1] + 1)
    below = np.zeros(len(bins))
    for number, (name, counts) in enumerate(_largest(index["lengths"]).items()):
        share = np.array(counts["tokens"])[bins] / index["tokens"]
        axes.bar(bins, share, bottom=below, width=0.9, label=name, color=colormaps["tab20"](number))
        below += share
    axes.set_xticks(bins, [f"{2**b:,}" for b in bins], rotation=45)
    axes.set_xlabel("tokens of a document, from")
    axes.set_ylabel("share of all tokens")
    axes.set_title(f"{index['tokens']:,} tokens in {index['documents']:,} documents")
    axes.legend()
    figure.savefig(path, dpi=120)
