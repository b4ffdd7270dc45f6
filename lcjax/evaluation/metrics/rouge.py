"""ROUGE as rouge-score 0.1.2 computes it: ROUGE-N, ROUGE-L, and ROUGE-L of sentences (Lsum).

Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004. Used by ZeroSCROLLS, CEPE,
InfiniteBench and needle in a haystack. LongBench's is another one: `rouge_sets`.
"""

import re
from collections import Counter

from lcjax.evaluation.metrics.porter import stem as stem_of
from lcjax.evaluation.metrics.sequences import lcs_length, lcs_pairs
from lcjax.evaluation.metrics.text import f1, overlap_f1


def words(text: str, *, stem: bool) -> list[str]:
    """Runs of a-z and 0-9 in lower case; with `stem`, those of four letters or more as stems."""
    found = re.findall("[a-z0-9]+", text.lower())
    return [stem_of(word) if len(word) > 3 else word for word in found] if stem else found


def rouge_n(prediction: str, reference: str, size: int, *, stem: bool) -> float:
    """F1 of the bags of `size` words in a row."""
    bags = []
    for text in (prediction, reference):
        found = words(text, stem=stem)
        bags.append(list(zip(*(found[start:] for start in range(size)))))
    return overlap_f1(*bags)


def rouge_l(prediction: str, reference: str, *, stem: bool) -> float:
    """F1 of the longest common subsequence of words."""
    found, expected = words(prediction, stem=stem), words(reference, stem=stem)
    return f1(lcs_length(found, expected), len(found), len(expected))


def rouge_lsum(prediction: str, reference: str, *, stem: bool) -> float:
    """F1 of the union of longest common subsequences of lines, no word counted twice.

    Lines are what the scorer takes for sentences; InfiniteBench's has no stemmer.
    """
    found, expected = (
        [words(line, stem=stem) for line in text.split("\n") if line]
        for text in (prediction, reference)
    )
    left, wanted = (Counter(word for line in lines for word in line) for lines in (found, expected))
    sizes, hits = (left.total(), wanted.total()), 0
    for line in expected:
        places = {place for other in found for place, _ in lcs_pairs(line, other)}
        for word in (line[place] for place in sorted(places)):
            if left[word] > 0 and wanted[word] > 0:
                hits += 1
                left[word] -= 1
                wanted[word] -= 1
    return f1(hits, *sizes)


def rouge_mean(prediction: str, reference: str) -> float:
    """Geometric mean of ROUGE-1, ROUGE-2 and ROUGE-L with stems: ZeroSCROLLS of summaries."""
    scores = [rouge_n(prediction, reference, size, stem=True) for size in (1, 2)]
    product = scores[0] * scores[1] * rouge_l(prediction, reference, stem=True)
    return product ** (1 / 3)
