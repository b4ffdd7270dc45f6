"""ROUGE-L of the PyPI package `rouge` 1.0.1, by which LongBench scores summaries.

It is not rouge-score's: sentences end at full stops, words are what stands between blanks, with
case and punctuation, and every distinct word counts once. The package reads the subsequence back by
recursion, and LongBench gives 0 where that goes too deep: sentences of about a thousand words, as
of a model that repeats itself. Here they are scored.
"""

from lcjax.evaluation.metrics.sequences import lcs_pairs
from lcjax.evaluation.metrics.text import f1, words_zh


def rouge_l_sets(prediction: str, reference: str) -> float:
    """F1 of the distinct words in the union of longest common subsequences of sentences."""
    found, expected = _sentences(prediction), _sentences(reference)
    if not found or not expected:  # the package refuses empty texts, LongBench makes that a 0
        return 0.0
    shared: set[str] = set()
    for sentence in expected:
        for other in found:
            # Which one of several longest subsequences counts follows from the order of the two.
            shared |= {sentence[place] for _, place in lcs_pairs(other, sentence)}
    sizes = (len({word for line in lines for word in line}) for lines in (found, expected))
    return f1(len(shared), *sizes, epsilon=1e-8)


def rouge_l_sets_zh(prediction: str, reference: str) -> float:
    """The same of Chinese, cut into words by jieba."""
    return rouge_l_sets(*(" ".join(words_zh(text)) for text in (prediction, reference)))


def _sentences(text: str) -> list[list[str]]:
    # A sentence of blanks alone holds one empty word: so does the package's.
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]
