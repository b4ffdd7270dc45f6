"""InfiniteBench's scores (arXiv 2402.13718), word for word as its scorer gives them.

Labels are what the official files hold after `labels`. `math_find` has a second flavour, without
the scorer's mistakes; that of `code_debug` is `option_letter`.
"""

import re
from collections.abc import Sequence

from lcjax.evaluation.metrics.text import first_digits

_LETTERS = "ABCD"
_CHOICE_CUES = ("answer is:", "answer:", "answer is", "option is")
_DEBUG_CUES = ("answer is:", "is:", "answer:", "correct option is:")


def labels(answer, options: Sequence[str]) -> list[str]:
    """Text and letter of a choice from the text alone, or both; ValueError where neither fits."""
    given = [answer] if isinstance(answer, str) else list(answer)
    if len(given) == 1 and given[0] in list(options)[: len(_LETTERS)]:
        return [given[0], _LETTERS[list(options).index(given[0])]]
    if len(given) == 2 and given[1] in list(_LETTERS):
        return given
    raise ValueError(f"answer {answer!r} is none of the options")


def digits(prediction: str, label) -> float:
    """1 where the first run of digits is the label: Retrieve.PassKey and Retrieve.Number."""
    return float(first_digits(prediction) == _first(label))


def kv_retrieval(prediction: str, label: str) -> float:
    """1 where the label is a word of the prediction, some punctuation being blanks."""
    return float(label in _blanked(prediction, "\n:\"'.,?!{}").split())


def code_run(prediction: str, label) -> float:
    """1 where the last word is the label as a whole number."""
    found = _blanked(prediction, "\n.`'\":").split()
    try:
        return float(int(found[-1]) == _first(label)) if found else 0.0
    except ValueError:
        return 0.0


def code_debug(prediction: str, label: Sequence[str]) -> float:
    """1 for "B." or "B:" in front, or the letter or name right behind the first cue that occurs.

    `label` is the name and the letter. A bare "B" is wrong to the official scorer.
    """
    name, letter = label
    text = prediction.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    for mark in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        text = text.replace(mark, " ")
    rest = _behind(text, _DEBUG_CUES)
    return float(rest is not None and rest.startswith((letter, name)))


def option_letter(prediction: str, label: Sequence[str]) -> float:
    """`code_debug`, but a letter alone counts as well."""
    return max(code_debug(prediction, label), float(prediction.strip() == label[1]))


def choice(prediction: str, label: Sequence[str]) -> float:
    """En.MC: the first letter if it is A to D, else the whole text, else what follows a cue.

    Without any of them the first word that is a letter (or a run of "ABCD") decides.
    """
    text = prediction.strip()
    if not text:
        return 0.0
    if text[0] in _LETTERS:
        return float(text[0] in label)
    if text in label:
        return 1.0
    text = _blanked(text, "\n\"'.,?!{}")
    if any(cue in _squeezed(text) for cue in _CHOICE_CUES):
        rest = _behind(text, _CHOICE_CUES)
        return float(rest is not None and rest.startswith(tuple(label)))
    word = next((word for word in text.split() if word in _LETTERS), None)
    return float(word in label)


def dialogue(prediction: str, label: Sequence[str]) -> float:
    """1 where the first name of the label is a word of the prediction in upper case."""
    return float(label[0] in [w.upper() for w in _blanked(prediction, "\n:\"'.,?!{}").split()])


def math_find(prediction: str, label, *, parity: bool = True) -> float:
    """1 where the first number is the label.

    The official scorer passes over minus signs, and stops with a ValueError where a decimal is
    found for a whole number; with `parity=False` numbers are compared as they stand.
    """
    label = _first(label)
    sign = "" if parity else "-?"
    number = re.search(rf"{sign}(?:\d+\.\d+|\d+)", prediction)
    if number is None:
        return 0.0
    kind = int if parity and isinstance(label, int) else float
    return float(kind(number.group()) == label)


def math_calc(prediction: str, label: Sequence) -> float:
    """How many numbers are right from the first one on, as a share of all.

    Minus signs are passed over, so that a negative value is never right.
    """
    label = label[0] if isinstance(label[0], list) else label
    # Compared as text: a run may have more digits than Python takes for a number.
    found = [run.lstrip("0") or "0" for run in re.findall("[0-9]+", prediction)]
    right = 0
    while right < min(len(label), len(found)) and str(label[right]) == found[right]:
        right += 1
    return right / len(label)


def _first(label):
    return label[0] if isinstance(label, list) else label


def _blanked(text: str, marks: str) -> str:
    return text.translate(dict.fromkeys(map(ord, marks), " "))


def _squeezed(text: str) -> str:
    return re.sub(" {2,}", " ", text)


def _behind(text: str, cues: Sequence[str]) -> str | None:
    """What follows the first of the cues that occurs and one more character; None: nothing."""
    text = _squeezed(text)
    for cue in cues:
        _, found, rest = text.partition(cue)
        if found:
            return rest[1:] if rest else None
    return None
