"""ROUGE in the two forms that benchmarks use, with their stemmer and common subsequences.

`rouge_n`, `rouge_l` and `rouge_lsum` equal rouge-score 0.1.2 (Lin, ROUGE: A Package for Automatic
Evaluation of Summaries, 2004), which ZeroSCROLLS, CEPE, InfiniteBench and needle-in-a-haystack use.
`rouge_l_sets` equals the PyPI package `rouge` 1.0.1, which LongBench uses.
"""

import re
from collections import Counter
from collections.abc import Hashable, Sequence

from lcjax.evaluation.metrics.qa import f1, overlap_f1, words_zh

_VOWELS = frozenset("aeiou")
_IRREGULAR = {
    "skies": "sky", "sky": "sky", "dying": "die", "lying": "lie", "tying": "tie", "news": "news",
    "innings": "inning", "inning": "inning", "outings": "outing", "outing": "outing",
    "cannings": "canning", "canning": "canning", "howe": "howe", "proceed": "proceed",
    "exceed": "exceed", "succeed": "succeed",
}  # fmt: skip
# Suffixes of Porter's steps 2 to 4 in the order of the test; only the first match applies.
_SECOND = (
    ("ational", "ate"), ("tional", "tion"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"),
    ("bli", "ble"), ("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous"),
    ("ization", "ize"), ("ation", "ate"), ("ator", "ate"), ("alism", "al"), ("iveness", "ive"),
    ("fulness", "ful"), ("ousness", "ous"), ("aliti", "al"), ("iviti", "ive"), ("biliti", "ble"),
    ("fulli", "ful"), ("logi", "log"),
)  # fmt: skip
_THIRD = (
    ("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""),
    ("ness", ""),
)  # fmt: skip
_FOURTH = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou",
    "ism", "ate", "iti", "ous", "ive", "ize",
)  # fmt: skip


def words(text: str, *, stem: bool) -> list[str]:
    """Splits `text` into lower-case runs of a-z and 0-9.

    With `stem`, words of four letters or more are replaced by their stem.
    """
    tokens = re.findall("[a-z0-9]+", text.lower())
    return [stem_word(word) if len(word) > 3 else word for word in tokens] if stem else tokens


def rouge_n(prediction: str, reference: str, size: int, *, stem: bool) -> float:
    """Computes the F1 of the bags of n-grams of `size` words."""
    bags = []
    for text in (prediction, reference):
        tokens = words(text, stem=stem)
        bags.append(list(zip(*(tokens[start:] for start in range(size)))))
    return overlap_f1(*bags)


def rouge_l(prediction: str, reference: str, *, stem: bool) -> float:
    """Computes the F1 of the longest common subsequence of words."""
    answer, label = words(prediction, stem=stem), words(reference, stem=stem)
    return f1(lcs_length(answer, label), len(answer), len(label))


def rouge_lsum(prediction: str, reference: str, *, stem: bool) -> float:
    """Computes the F1 of the union of longest common subsequences over pairs of lines.

    No word counts twice. rouge-score treats lines as sentences. InfiniteBench uses it unstemmed.
    """
    answer, label = (
        [words(line, stem=stem) for line in text.split("\n") if line]
        for text in (prediction, reference)
    )
    answer_counts, label_counts = (
        Counter(word for line in lines for word in line) for lines in (answer, label)
    )
    sizes, num_matches = (answer_counts.total(), label_counts.total()), 0
    for line in label:
        positions = {i for other in answer for i, _ in lcs_pairs(line, other)}
        for word in (line[i] for i in sorted(positions)):
            if answer_counts[word] > 0 and label_counts[word] > 0:
                num_matches += 1
                answer_counts[word] -= 1
                label_counts[word] -= 1
    return f1(num_matches, *sizes)


def rouge_l_sets(prediction: str, reference: str) -> float:
    """Computes the F1 of distinct words in the union of sentences' common subsequences.

    The subsequences are the longest ones of pairs of sentences. Sentences end at full stops and
    words at blanks; case and punctuation count. The package `rouge` backtracks by recursion, and
    LongBench scores 0 where the recursion is too deep (sentences of about a thousand words, such as
    repetitions). This implementation scores them.
    """
    answer, label = _sentences(prediction), _sentences(reference)
    if not answer or not label:  # the package refuses empty texts, which LongBench scores as 0
        return 0.0
    shared: set[str] = set()
    for sentence in label:
        for other in answer:
            # The order of the two decides which of several longest subsequences counts.
            shared |= {sentence[i] for _, i in lcs_pairs(other, sentence)}
    sizes = (len({word for line in lines for word in line}) for lines in (answer, label))
    return f1(len(shared), *sizes, epsilon=1e-8)


def rouge_l_sets_zh(prediction: str, reference: str) -> float:
    """Computes `rouge_l_sets` of Chinese text that jieba splits into words."""
    return rouge_l_sets(*(" ".join(words_zh(text)) for text in (prediction, reference)))


def _sentences(text: str) -> list[list[str]]:
    # As in the package, a sentence of blanks alone has one empty word.
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def lcs_length(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Returns the length of the longest common subsequence."""
    if not first or not second:
        return 0
    return len(first) - _lcs_columns(first, second)[-1].bit_count()


def lcs_pairs(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Returns index pairs (in `first`, in `second`) of one longest common subsequence.

    Scorers differ in which of several longest subsequences they choose, and so in their union over
    sentences. This one backtracks from the end: it takes equal items; otherwise it steps back in
    `first` if that keeps the length, else in `second`.
    """
    columns, pairs = _lcs_columns(first, second), []
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif columns[j] >> (i - 1) & 1:  # the same length without this item of `first`
            i -= 1
        else:
            j -= 1
    return pairs[::-1]


def _lcs_columns(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[int]:
    """Returns the columns of the dynamic program as integers of len(first) bits.

    Bit i of column j is 0 where item i increases the length (Hyyrö, Bit-parallel LCS-length
    computation revisited, 2004).
    """
    masks: dict[Hashable, int] = {}
    for index, item in enumerate(first):
        masks[item] = masks.get(item, 0) | 1 << index
    full = (1 << len(first)) - 1
    columns = [full]
    for item in second:
        column = columns[-1]
        matches = column & masks.get(item, 0)
        columns.append(((column + matches) | (column - matches)) & full)
    return columns


def stem_word(word: str) -> str:
    """Returns the stem of a lower-case word by Porter's algorithm as NLTK extends it.

    M. F. Porter, An algorithm for suffix stripping, 1980. NLTK and rouge-score differ from the
    paper in irregular forms, words of up to two letters, -ied and -ies of four letters, -y after a
    consonant, -alli, -bli, -fulli and -logi.
    """
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) <= 2:
        return word
    word = _strip_past(_strip_plural(word))
    if word.endswith("y") and len(word) > 2 and _is_consonant(word[:-1])[-1]:
        word = word[:-1] + "i"
    word = _strip_e(_strip_fourth(_replace_suffix(_step_two(word), _THIRD)))
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word


def _is_consonant(word: str) -> list[bool]:
    """Returns whether each letter is a consonant; y is one unless it follows a consonant."""
    flags: list[bool] = []
    for letter in word:
        after_consonant = bool(flags) and flags[-1]
        flags.append(letter not in _VOWELS and not (letter == "y" and after_consonant))
    return flags


def _measure(word: str) -> int:
    """Returns the number of vowels that a consonant follows."""
    flags = _is_consonant(word)
    return sum(not first and second for first, second in zip(flags, flags[1:]))


def _ends_short(word: str) -> bool:
    """Returns whether `word` is VC, or ends in CVC whose last consonant is not w, x or y."""
    flags = _is_consonant(word)
    if len(word) == 2:
        return flags == [False, True]
    return flags[-3:] == [True, False, True] and word[-1] not in "wxy"


def _strip_plural(word: str) -> str:
    if word.endswith("ies"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("sses"):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _strip_past(word: str) -> str:
    if word.endswith("ied"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for suffix in ("ed", "ing"):
        base = word.removesuffix(suffix)
        if base != word and not all(_is_consonant(base)):
            return _restore_ending(base)
    return word


def _restore_ending(base: str) -> str:
    """Undoes what -ed or -ing changed: a deleted e or a doubled consonant."""
    if base.endswith(("at", "bl", "iz")):
        return base + "e"
    if len(base) > 1 and base[-1] == base[-2] and _is_consonant(base)[-1]:
        return base if base[-1] in "lsz" else base[:-1]
    return base + "e" if _measure(base) == 1 and _ends_short(base) else base


def _step_two(word: str) -> str:
    if word.endswith("alli") and _measure(word[:-4]) > 0:
        return _step_two(word[:-2])
    if word.endswith("logi"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    return _replace_suffix(word, _SECOND)


def _replace_suffix(word: str, rules: tuple[tuple[str, str], ...]) -> str:
    for suffix, replacement in rules:
        if word.endswith(suffix):
            base = word[: -len(suffix)]
            return base + replacement if _measure(base) > 0 else word
    return word


def _strip_fourth(word: str) -> str:
    for suffix in _FOURTH:
        if word.endswith(suffix):
            base = word[: -len(suffix)]
            long = _measure(base) > 1 and (suffix != "ion" or base[-1] in "st")
            return base if long else word
    return word


def _strip_e(word: str) -> str:
    base = word.removesuffix("e")
    if base == word:
        return word
    size = _measure(base)
    return base if size > 1 or (size == 1 and not _ends_short(base)) else word
