"""Porter's stemmer as NLTK extends it, which is what rouge-score counts words by.

M. F. Porter, An algorithm for suffix stripping, 1980. Differs from the paper where NLTK does:
irregular forms, words of up to two letters, -ied and -ies of four letters, -y after a consonant,
-alli, -bli, -fulli and -logi.
"""

_VOWELS = frozenset("aeiou")
_IRREGULAR = {
    "skies": "sky", "sky": "sky", "dying": "die", "lying": "lie", "tying": "tie", "news": "news",
    "innings": "inning", "inning": "inning", "outings": "outing", "outing": "outing",
    "cannings": "canning", "canning": "canning", "howe": "howe", "proceed": "proceed",
    "exceed": "exceed", "succeed": "succeed",
}  # fmt: skip
# Suffixes in the order in which they are tried; only the first one that fits counts.
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


def stem(word: str) -> str:
    """The stem of a lower-case word."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) <= 2:
        return word
    word = _past(_plural(word))
    if word.endswith("y") and len(word) > 2 and _consonants(word[:-1])[-1]:
        word = word[:-1] + "i"
    word = _final(_removed(_exchanged(_second(word), _THIRD)))
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word


def _consonants(word: str) -> list[bool]:
    """Which letters are consonants; y is one unless it follows one."""
    flags: list[bool] = []
    for letter in word:
        after = bool(flags) and flags[-1]
        flags.append(letter not in _VOWELS and not (letter == "y" and after))
    return flags


def _measure(word: str) -> int:
    """How often a vowel is followed by a consonant."""
    flags = _consonants(word)
    return sum(not before and here for before, here in zip(flags, flags[1:]))


def _short(word: str) -> bool:
    """Whether it ends consonant, vowel, consonant other than w, x, y; or is vowel, consonant."""
    flags = _consonants(word)
    if len(word) == 2:
        return flags == [False, True]
    return flags[-3:] == [True, False, True] and word[-1] not in "wxy"


def _plural(word: str) -> str:
    if word.endswith("ies"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("sses"):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _past(word: str) -> str:
    if word.endswith("ied"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for suffix in ("ed", "ing"):
        base = word.removesuffix(suffix)
        if base != word and not all(_consonants(base)):
            return _mended(base)
    return word


def _mended(base: str) -> str:
    """What -ed or -ing had taken: an e, or a doubled consonant."""
    if base.endswith(("at", "bl", "iz")):
        return base + "e"
    if len(base) > 1 and base[-1] == base[-2] and _consonants(base)[-1]:
        return base if base[-1] in "lsz" else base[:-1]
    return base + "e" if _measure(base) == 1 and _short(base) else base


def _second(word: str) -> str:
    if word.endswith("alli") and _measure(word[:-4]) > 0:
        return _second(word[:-2])
    if word.endswith("logi"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    return _exchanged(word, _SECOND)


def _exchanged(word: str, rules: tuple[tuple[str, str], ...]) -> str:
    for suffix, instead in rules:
        if word.endswith(suffix):
            base = word[: -len(suffix)]
            return base + instead if _measure(base) > 0 else word
    return word


def _removed(word: str) -> str:
    for suffix in _FOURTH:
        if word.endswith(suffix):
            base = word[: -len(suffix)]
            long = _measure(base) > 1 and (suffix != "ion" or base[-1] in "st")
            return base if long else word
    return word


def _final(word: str) -> str:
    base = word.removesuffix("e")
    if base == word:
        return word
    size = _measure(base)
    return base if size > 1 or (size == 1 and not _short(base)) else word
