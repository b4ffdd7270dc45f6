"""InfiniteBench's scores (arXiv 2402.13718), equal to its official scorer.

Labels of multiple-choice tasks are those that `labels` returns. `math_find(parity=False)` and
`option_letter` (of `code_debug`) are variants without the scorer's mistakes.
"""

import re
from collections.abc import Sequence

from lcjax.evaluation.metrics.qa import first_digits

_LETTERS = "ABCD"
_CHOICE_CUES = ("answer is:", "answer:", "answer is", "option is")
_DEBUG_CUES = ("answer is:", "is:", "answer:", "correct option is:")


def labels(answer, options: Sequence[str]) -> list[str]:
    """Returns [text, letter] of a multiple-choice answer.

    Args:
      answer: The text of an option, or [text, letter].
      options: The texts of the options.

    Raises:
      ValueError: `answer` is not one of the options.
    """
    label = [answer] if isinstance(answer, str) else list(answer)
    if len(label) == 1 and label[0] in list(options)[: len(_LETTERS)]:
        return [label[0], _LETTERS[list(options).index(label[0])]]
    if len(label) == 2 and label[1] in list(_LETTERS):
        return label
    raise ValueError(f"answer {answer!r} must be one of the options")


def digits(prediction: str, label) -> float:
    """Returns 1 if the first run of digits is the label (Retrieve.PassKey, Retrieve.Number)."""
    return float(first_digits(prediction) == _first(label))


def kv_retrieval(prediction: str, label) -> float:
    """Returns 1 if the label is a word of the prediction; some punctuation becomes blanks."""
    return float(_first(label) in _replace_marks(prediction, "\n:\"'.,?!{}").split())


def code_run(prediction: str, label) -> float:
    """Returns 1 if the last word is an integer equal to the label, else 0."""
    words = _replace_marks(prediction, "\n.`'\":").split()
    try:
        return float(int(words[-1]) == _first(label)) if words else 0.0
    except ValueError:
        return 0.0


def code_debug(prediction: str, label: Sequence[str]) -> float:
    """Returns 1 if the prediction starts with "B." or "B:", or a cue precedes the letter or name.

    `label` is [name, letter]. Only the first cue that occurs counts. The official scorer counts a
    bare "B" as wrong.
    """
    name, letter = label
    text = prediction.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    for mark in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        text = text.replace(mark, " ")
    rest = _after_cue(text, _DEBUG_CUES)
    return float(rest is not None and rest.startswith((letter, name)))


def option_letter(prediction: str, label: Sequence[str]) -> float:
    """Returns `code_debug`, or 1 if the prediction is the bare letter."""
    return max(code_debug(prediction, label), float(prediction.strip() == label[1]))


def choice(prediction: str, label: Sequence[str]) -> float:
    """Scores En.MC: compares the first letter if it is A to D, the text, or what follows a cue.

    Otherwise the first word that is part of "ABCD" decides.
    """
    text = prediction.strip()
    if not text:
        return 0.0
    if text[0] in _LETTERS:
        return float(text[0] in label)
    if text in label:
        return 1.0
    text = _replace_marks(text, "\n\"'.,?!{}")
    if any(cue in _squeeze_blanks(text) for cue in _CHOICE_CUES):
        rest = _after_cue(text, _CHOICE_CUES)
        return float(rest is not None and rest.startswith(tuple(label)))
    word = next((word for word in text.split() if word in _LETTERS), None)
    return float(word in label)


def dialogue(prediction: str, label: Sequence[str]) -> float:
    """Returns 1 if the label's first name is a word of the prediction in upper case."""
    return float(
        label[0] in [w.upper() for w in _replace_marks(prediction, "\n:\"'.,?!{}").split()]
    )


def math_find(prediction: str, label, *, parity: bool = True) -> float:
    """Returns 1 if the first number equals the label, else 0.

    The official scorer ignores minus signs, and raises a ValueError if the label is an integer and
    the first number has decimals. `parity=False` compares the numbers themselves.
    """
    label = _first(label)
    sign = "" if parity else "-?"
    number = re.search(rf"{sign}(?:\d+\.\d+|\d+)", prediction)
    if number is None:
        return 0.0
    kind = int if parity and isinstance(label, int) else float
    return float(kind(number.group()) == label)


def math_calc(prediction: str, label: Sequence) -> float:
    """Returns the share of the label's numbers that are right before the first mistake.

    Minus signs are ignored, so a negative value is never right.
    """
    label = label[0] if isinstance(label[0], list) else label
    # Compared as text: Python refuses to convert runs of more than 4,300 digits.
    numbers = [run.lstrip("0") or "0" for run in re.findall("[0-9]+", prediction)]
    num_right = 0
    while num_right < min(len(label), len(numbers)) and str(label[num_right]) == numbers[num_right]:
        num_right += 1
    return num_right / len(label)


def _first(label):
    return label[0] if isinstance(label, list) else label


def _replace_marks(text: str, marks: str) -> str:
    """Replaces every mark by a blank."""
    return text.translate(dict.fromkeys(map(ord, marks), " "))


def _squeeze_blanks(text: str) -> str:
    return re.sub(" {2,}", " ", text)


def _after_cue(text: str, cues: Sequence[str]) -> str | None:
    """Returns the text after the first of `cues` that occurs and one character, or None."""
    text = _squeeze_blanks(text)
    for cue in cues:
        _, match, rest = text.partition(cue)
        if match:
            return rest[1:] if rest else None
    return None
