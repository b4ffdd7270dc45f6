"""LongBench's scores of classes, numbers and code (arXiv 2308.14508); each between 0 and 1."""

import difflib
import re
from collections.abc import Sequence

from lcjax.evaluation.metrics.sequences import lcs_length

_COMMENTS = ("`", "#", "//")


def classification(
    prediction: str, reference: str, classes: Sequence[str], *, parity: bool = True
) -> float:
    """1 / n where the right class is among the n classes that stand in the prediction.

    Classes that are part of the right one's name do not count. With `parity` they are taken out of
    the list while it is walked through, as the official scorer does: the one behind each of them is
    then passed over.
    """
    found = [name for name in classes if name in prediction]
    if not parity:
        found = [name for name in found if name == reference or name not in reference]
    place = 0
    while place < len(found):
        if found[place] in reference and found[place] != reference:
            found.remove(found[place])  # the first of that name
        place += 1
    return 1 / len(found) if reference in found else 0.0


def count(prediction: str, reference: str) -> float:
    """The share of numbers in the prediction that are the right one, digit by digit."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str, word: str = "Paragraph ") -> float:
    """The share of numbers in the prediction that are the right paragraph's."""
    return count(prediction, re.findall(word + r"(\d+)", reference)[0])


def retrieval_zh(prediction: str, reference: str) -> float:
    """The same of Chinese."""
    return retrieval(prediction, reference, "段落")


def code_line(prediction: str) -> str:
    """The first line that is neither a comment nor a mark of Markdown; empty without one."""
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in _COMMENTS)), "")


def code_indel(prediction: str, reference: str) -> float:
    """Similarity of the first line of code: 2 LCS / (n + m), in whole percent.

    What fuzzywuzzy gives where python-Levenshtein is installed.
    """
    line = code_line(prediction)
    size = len(line) + len(reference)
    return _percent(line, reference, 2 * lcs_length(line, reference) / size if size else 1.0)


def code_difflib(prediction: str, reference: str) -> float:
    """The same by the matching blocks of Python's difflib, never higher than `code_indel`'s.

    What fuzzywuzzy gives without python-Levenshtein.
    """
    line = code_line(prediction)
    ratio = difflib.SequenceMatcher(None, line, reference).ratio()
    return _percent(line, reference, ratio)


def _percent(line: str, reference: str, ratio: float) -> float:
    if line == reference:
        return 1.0
    return round(100 * ratio) / 100 if line and reference else 0.0
