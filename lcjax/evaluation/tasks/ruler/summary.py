"""What RULER says over tasks and lengths: groups, weighted means, the effective length."""

import re
from collections.abc import Sequence

import numpy as np

from lcjax.evaluation.task import Record

GROUPS = {
    "retrieval": (
        "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
        "niah_multikey_3", "niah_multivalue", "niah_multiquery",
    ),
    "tracing": ("vt",),
    "aggregation": ("cwe", "fwe"),
    "questions": ("qa_1", "qa_2"),
}  # fmt: skip
THRESHOLD = 0.856  # Llama-2-7B-chat at 4,096 tokens (RULER, sec. 4)


def tidy(answer: str) -> str:
    """The answer as upstream scores it: control characters are line ends, blanks around go."""
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip()


def over_lengths(cells: Sequence[Record]) -> Record:
    """By method: the mean over lengths, weighted towards long and short ones, and how far it is.

    `effective_length` is the longest with a score of at least 0.856; 0 where there is none.
    """
    found = {}
    for method in dict.fromkeys(cell["method"] for cell in cells):
        own = sorted((c for c in cells if c["method"] == method), key=lambda c: c["length"])
        scores = np.array([cell["value"] for cell in own])
        weights = np.arange(1, len(own) + 1)
        reached = [cell["length"] for cell in own if cell["value"] >= THRESHOLD]
        found[method] = {
            "mean": round(float(scores.mean()), 4),
            "weighted_increasing": round(float(np.average(scores, weights=weights)), 4),
            "weighted_decreasing": round(float(np.average(scores, weights=weights[::-1])), 4),
            "effective_length": max(reached, default=0),
        }
    return found
