"""Scores of short answers: normalisation, F1, exact match, and values that an answer contains.

`qa_f1` is the F1 of LongBench and InfiniteBench. HotpotQA and CEPE treat yes and no separately
(`qa_f1_verdict`).
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

from lcjax.errors import InputError, install_command

_ASCII = frozenset(string.punctuation)
# Chinese punctuation as LongBench and InfiniteBench list it.
_CJK = _ASCII | frozenset(
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_VERDICTS = ("yes", "no", "noanswer")

Metric = Callable[[str, str], float]


def normalise(text: str, *, articles: bool = False) -> str:
    """Returns `text` in lower case without ASCII punctuation, articles and repeated blanks.

    This is SQuAD's normalisation (arXiv 1606.05250). Punctuation is deleted and not replaced by a
    blank, so "state-of-the-art" becomes one word.

    Args:
      text: An answer.
      articles: Whether to keep a, an and the, so that the answer "A" is not deleted.
    """
    words = "".join(letter for letter in text.lower() if letter not in _ASCII)
    return " ".join((words if articles else _ARTICLES.sub(" ", words)).split())


def normalise_zh(text: str) -> str:
    """Returns `text` in lower case without ASCII punctuation, Chinese punctuation and blanks."""
    return "".join("".join(c for c in text.lower() if c not in _CJK).split())


def words_zh(text: str) -> list[str]:
    """Splits Chinese text into words with jieba."""
    try:
        import jieba
    except ImportError:
        raise InputError(
            "scores of Chinese tasks split text into words with jieba, which is not installed;"
            f" {install_command('zh')}, or leave these tasks out"
        ) from None
    return list(jieba.cut(text, cut_all=False))


def f1(num_matches: int, num_predicted: int, num_reference: int, *, epsilon: float = 0.0) -> float:
    """Computes F1 from the numbers of matching, predicted and reference items.

    Returns 0 without a match. Some scorers add `epsilon` to the denominator.
    """
    if not num_matches:
        return 0.0
    precision, recall = num_matches / num_predicted, num_matches / num_reference
    return 2 * precision * recall / (precision + recall + epsilon)


def overlap_f1(predicted: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    """Computes the F1 of two bags of items."""
    num_matches = (Counter(predicted) & Counter(reference)).total()
    return f1(num_matches, len(predicted), len(reference))


def flat(references) -> list:
    """Flattens a reference, a list of references, or nested lists of references into one list."""
    if isinstance(references, str) or not isinstance(references, Iterable):
        return [references]
    return [item for entry in references for item in flat(entry)]


def best(metric: Metric, prediction: str, references) -> float:
    """Returns the highest score over all references, 0 without any."""
    return max((metric(prediction, reference) for reference in flat(references)), default=0.0)


def first_line(text: str) -> str:
    """Returns the first line of `text` after any leading newlines."""
    return text.lstrip("\n").split("\n")[0]


def first_digits(text: str) -> str:
    """Returns the first run of the digits 0 to 9, or an empty string."""
    match = re.search("[0-9]+", text)
    return match.group() if match else ""


def qa_f1(prediction: str, reference: str) -> float:
    """Computes the F1 of words after SQuAD's normalisation; "yes, it is" scores 0.5 for "yes"."""
    return overlap_f1(normalise(prediction).split(), normalise(reference).split())


def qa_f1_verdict(prediction: str, reference: str) -> float:
    """Computes `qa_f1`, but a prediction or reference of yes, no or noanswer must match exactly.

    HotpotQA (arXiv 1809.09600) defines it. CEPE uses it for open-domain QA, NarrativeQA and Qasper.
    """
    answer, label = normalise(prediction), normalise(reference)
    if answer != label and (answer in _VERDICTS or label in _VERDICTS):
        return 0.0
    return overlap_f1(answer.split(), label.split())


def qa_f1_zh(prediction: str, reference: str) -> float:
    """Computes LongBench's F1 for Chinese, of normalised, non-empty words of jieba."""
    answer, label = (
        [word for word in map(normalise_zh, words_zh(text)) if word]
        for text in (prediction, reference)
    )
    return overlap_f1(answer, label)


def qa_f1_characters(prediction: str, reference: str) -> float:
    """Computes InfiniteBench's F1 for Chinese, of characters."""
    return overlap_f1(normalise_zh(prediction), normalise_zh(reference))


def exact_match(prediction: str, reference: str) -> float:
    """Returns 1 if both are equal after SQuAD's normalisation, else 0."""
    return float(normalise(prediction) == normalise(reference))


def substring_match(prediction: str, reference: str) -> float:
    """Returns 1 if the normalised prediction contains the reference, also inside a word."""
    return float(normalise(reference) in normalise(prediction))


def letter_match(prediction: str, reference: str) -> float:
    """Returns 1 if the answer is the letter, such as "(B)", "B." or "b", else 0.

    Articles are kept, because the letter A is one.
    """
    return float(normalise(prediction, articles=True) == normalise(reference, articles=True))


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Returns the share of references in the prediction, ignoring case (RULER, 2404.06654).

    A match may lie inside a word: "category" contains "cat".
    """
    text = prediction.lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """Returns 1 if the prediction contains any of the references (RULER's QA tasks), else 0."""
    text = prediction.lower()
    return float(any(reference.lower() in text for reference in references))


def value_match(prediction: str, references: Sequence[str]) -> float:
    """Returns 1 if the prediction contains every reference, else 0."""
    return float(string_match_all(prediction, references) == 1)


def word_recall(prediction: str, expected: str, *, distinct: bool = True) -> float:
    """Returns the share of the expected answer's words that the prediction contains.

    Words are in lower case, and their punctuation is kept. With `distinct=False`, as in LCEG's heat
    map, each distinct match counts once but the divisor is the number of all expected words, so an
    expected answer with a repeated word cannot reach 1.
    """
    words = expected.lower().split()
    matches = set(words) & set(prediction.lower().split())
    return len(matches) / len(set(words) if distinct else words)
