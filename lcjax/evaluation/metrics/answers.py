"""Scores of short answers: F1 and exact match in the forms that benchmarks use.

`qa_f1` is LongBench's and InfiniteBench's. HotpotQA's and CEPE's has a rule for yes and no.
"""

from lcjax.evaluation.metrics.text import normalise, normalise_zh, overlap_f1, words_zh

_VERDICTS = ("yes", "no", "noanswer")


def qa_f1(prediction: str, reference: str) -> float:
    """F1 of the words of both after SQuAD's normalisation; "yes, it is" is half right for "yes"."""
    return overlap_f1(normalise(prediction).split(), normalise(reference).split())


def qa_f1_verdict(prediction: str, reference: str) -> float:
    """`qa_f1`, but yes, no and noanswer are right as a whole or not at all.

    HotpotQA (arXiv 1809.09600), and CEPE's F1 of open-domain QA, NarrativeQA and Qasper.
    """
    found, expected = normalise(prediction), normalise(reference)
    if found != expected and (found in _VERDICTS or expected in _VERDICTS):
        return 0.0
    return overlap_f1(found.split(), expected.split())


def qa_f1_zh(prediction: str, reference: str) -> float:
    """LongBench's F1 of Chinese: words of jieba, each normalised, empty ones left out."""
    found, expected = (
        [word for word in map(normalise_zh, words_zh(text)) if word]
        for text in (prediction, reference)
    )
    return overlap_f1(found, expected)


def qa_f1_characters(prediction: str, reference: str) -> float:
    """InfiniteBench's F1 of Chinese: characters."""
    return overlap_f1(normalise_zh(prediction), normalise_zh(reference))


def exact_match(prediction: str, reference: str) -> float:
    """1 where both are equal after SQuAD's normalisation."""
    return float(normalise(prediction) == normalise(reference))


def substring_match(prediction: str, reference: str) -> float:
    """1 where the reference stands in the prediction, both normalised, also inside a word."""
    return float(normalise(reference) in normalise(prediction))


def letter_match(prediction: str, reference: str) -> float:
    """1 where the answer is the letter, as "(B)", "B." or "b"; articles stay, for A is a letter.

    CEPE's code deletes articles, so that an empty answer, or "the", is right for A:
    `letter_match_cepe`.
    """
    kept = {"articles": True}
    return float(normalise(prediction, **kept) == normalise(reference, **kept))


letter_match_cepe = exact_match
