"""How answers are made comparable: SQuAD's normalisation, its Chinese form, and overlap F1."""

import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

from lcjax.errors import InputError

_ASCII = frozenset(string.punctuation)
# What LongBench and InfiniteBench take for Chinese punctuation.
_CJK = _ASCII | frozenset(
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")

Metric = Callable[[str, str], float]


def normalise(text: str, *, articles: bool = False) -> str:
    """Lower case without ASCII punctuation, without a, an, the, and with single blanks.

    SQuAD (arXiv 1606.05250). Punctuation is deleted, not made a blank: "state-of-the-art" is one
    word. `articles` keeps them, so that the letter A does not vanish.
    """
    bare = "".join(letter for letter in text.lower() if letter not in _ASCII)
    return " ".join((bare if articles else _ARTICLES.sub(" ", bare)).split())


def normalise_zh(text: str) -> str:
    """Lower case without ASCII and Chinese punctuation and without any blanks."""
    return "".join("".join(c for c in text.lower() if c not in _CJK).split())


def words_zh(text: str) -> list[str]:
    """Chinese text cut into words by jieba."""
    try:
        import jieba
    except ImportError:
        raise InputError(
            "scores of Chinese tasks cut text into words with jieba, which is not installed;"
            " pip install jieba, or leave these tasks out"
        ) from None
    return list(jieba.cut(text, cut_all=False))


def f1(same: int, found: int, expected: int, *, epsilon: float = 0.0) -> float:
    """Of so many items found and expected, of which so many are the same; 0 where none is.

    `epsilon` is what some scorers add to the denominator.
    """
    if not same:
        return 0.0
    precision, recall = same / found, same / expected
    return 2 * precision * recall / (precision + recall + epsilon)


def overlap_f1(found: Sequence[Hashable], expected: Sequence[Hashable]) -> float:
    """F1 of two bags of items."""
    same = (Counter(found) & Counter(expected)).total()
    return f1(same, len(found), len(expected))


def flat(references) -> list:
    """One list of references from one, a list, or a list of lists."""
    if isinstance(references, str) or not isinstance(references, Iterable):
        return [references]
    return [one for entry in references for one in flat(entry)]


def best(metric: Metric, prediction: str, references) -> float:
    """The highest score over all references."""
    return max((metric(prediction, reference) for reference in flat(references)), default=0.0)


def first_line(text: str) -> str:
    """What stands before the first newline, leading newlines aside."""
    return text.lstrip("\n").split("\n")[0]


def first_digits(text: str) -> str:
    """The first run of the digits 0 to 9; empty without one."""
    found = re.search("[0-9]+", text)
    return found.group() if found else ""
