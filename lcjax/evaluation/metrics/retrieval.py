"""Scores of needles: values that stand in the answer, and overlap with the needle's words."""

from collections.abc import Sequence

from lcjax.evaluation.metrics.rouge import rouge_n


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """The share of references that stand in the prediction, case aside (RULER, arXiv 2404.06654).

    Also inside words: "cat" stands in "category".
    """
    low = prediction.lower()
    return sum(reference.lower() in low for reference in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1 where any of the references stands in the prediction (RULER's of questions)."""
    low = prediction.lower()
    return float(any(reference.lower() in low for reference in references))


def value_match(prediction: str, references: Sequence[str]) -> float:
    """1 where every value stands in the prediction."""
    return float(string_match_all(prediction, references) == 1)


def rouge1_f(prediction: str, needle: str) -> float:
    """ROUGE-1 with stems against the needle: a tenth of what needle scripts store.

    A right answer that is shorter than the needle's sentence does not reach 1.
    """
    return rouge_n(prediction, needle, 1, stem=True)


def word_recall(prediction: str, needle: str, *, distinct: bool = True) -> float:
    """The share of the needle's words that stand in the prediction, lower case, with punctuation.

    LCEG's heat map divides by words that may stand twice and counts each once, so that its needle
    cannot reach 1: `distinct=False`.
    """
    words = needle.lower().split()
    found = set(words) & set(prediction.lower().split())
    return len(found) / len(set(words) if distinct else words)
