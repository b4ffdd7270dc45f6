"""LongBench's scores of classes, numbers and code (arXiv 2308.14508); each between 0 and 1."""

import difflib
import re
from collections.abc import Sequence

from lcjax.evaluation.metrics.rouge import lcs_length

_COMMENTS = ("`", "#", "//")


def classification(
    prediction: str, reference: str, classes: Sequence[str], *, parity: bool = True
) -> float:
    """Returns 1 / n if the right class is among the n classes in the prediction, else 0.

    Classes whose name is part of the right class's name do not count. With `parity`, they are
    removed from the list while it is iterated, as in the official scorer, so the class after each
    of them is skipped.
    """
    matches = [name for name in classes if name in prediction]
    if not parity:
        matches = [name for name in matches if name == reference or name not in reference]
    index = 0
    while index < len(matches):
        if matches[index] in reference and matches[index] != reference:
            matches.remove(matches[index])  # the first of that name
        index += 1
    return 1 / len(matches) if reference in matches else 0.0


def count(prediction: str, reference: str) -> float:
    """Returns the share of numbers in the prediction that equal the reference as text."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str, word: str = "Paragraph ") -> float:
    """Returns the share of numbers in the prediction that equal the right paragraph's number."""
    return count(prediction, re.findall(word + r"(\d+)", reference)[0])


def retrieval_zh(prediction: str, reference: str) -> float:
    """Returns `retrieval` for Chinese."""
    return retrieval(prediction, reference, "段落")


def code_line(prediction: str) -> str:
    """Returns the first line without a comment or Markdown mark, or an empty string."""
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in _COMMENTS)), "")


def code_indel(prediction: str, reference: str) -> float:
    """Returns the similarity of the first line of code: 2 LCS / (n + m), in whole percent.

    It equals fuzzywuzzy with python-Levenshtein installed.
    """
    line = code_line(prediction)
    size = len(line) + len(reference)
    return _percent(line, reference, 2 * lcs_length(line, reference) / size if size else 1.0)


def code_difflib(prediction: str, reference: str) -> float:
    """Returns the similarity of the first line of code by difflib; never above `code_indel`.

    It equals fuzzywuzzy without python-Levenshtein.
    """
    line = code_line(prediction)
    ratio = difflib.SequenceMatcher(None, line, reference).ratio()
    return _percent(line, reference, ratio)


def _percent(line: str, reference: str, ratio: float) -> float:
    if line == reference:
        return 1.0
    return round(100 * ratio) / 100 if line and reference else 0.0
