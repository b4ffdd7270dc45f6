"""Tokenises long texts in pieces; the ids equal those of the whole text.

A backend needs about 200 bytes of memory for each character that it encodes at once, so a text of
some megabytes is encoded in windows that overlap. Neighbouring windows are joined between two
tokens around which both have the same tokens, although one of them ends there and the other begins:

- Byte pair encoding merges neighbours only. A boundary between two tokens that is found by a window
  with the text before it, and by a window with the text after it, is one of the whole text.
- Pre-tokenizers and normalizers read a bounded context, or a run of characters of one class. Those
  that count characters count from multiples of `_ALIGNED`. Runs of digits are never cut.
- The best path of a unigram model depends on the text near a token. If it depends on the end of the
  text, as in a run of equal characters, two windows differ: their ends are prime numbers apart. (If
  splits have equal probability, as "aa a" and "a aa", the rounding of sums chooses; a run of equal
  characters that is longer than a window may then have the same tokens in another order.)

A window that has no such place is made larger.
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from lcjax.checkpoints.tokenizer import Tokenizer
from lcjax.errors import InputError

# Characters from one window to the next: the first prime, and those after it where no cut is found.
_STEPS = (262_147, 524_309, 1_048_583, 2_097_169, 4_194_319, 8_388_617, 16_777_259)
_OVERLAP = 4_096  # characters that windows share, or up to _ALIGNED more
_ALIGNED = 2_520  # windows begin at multiples of it, and so of all numbers up to 10
_AGREEING = 16  # tokens on either side of a cut that must be equal
_DELAY = 3  # seconds until the progress is shown


class Piece(NamedTuple):
    """Tokens of a part of a text.

    They are the tokens `first` to `last` of the window `text[start:stop]`.
    """

    ids: np.ndarray  # int32 [last - first]
    start: int
    stop: int
    first: int
    last: int
    end: int  # number of characters of the text before the next piece


def encode_long(tokenizer: Tokenizer, text: str, *, name: str = "a text") -> np.ndarray:
    """Returns `tokenizer.encode(text)`, computed in bounded memory and with a progress bar.

    Args:
      tokenizer: the tokenizer.
      text: the text.
      name: its name, for messages.

    Returns:
      The ids int32 [n].

    Raises:
      InputError: a part of the text is too long for the memory and has no safe place for a cut.
    """
    parts = [piece.ids for piece in pieces(tokenizer, text, name=name)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def spans_long(tokenizer: Tokenizer, text: str, *, name: str = "a text") -> np.ndarray:
    """Returns `tokenizer.spans(text)` as int64 [n, 2], computed as in `encode_long`."""
    if len(text) <= _STEPS[1]:
        return np.array(tokenizer.spans(text), np.int64).reshape(-1, 2)
    parts = []
    for piece in pieces(tokenizer, text, name=name):
        spans = np.array(tokenizer.spans(text[piece.start : piece.stop]), np.int64).reshape(-1, 2)
        parts.append(spans[piece.first : piece.last] + piece.start)
    return np.concatenate(parts)


def pieces(
    tokenizer: Tokenizer, text: str, *, name: str = "a text", steps: tuple[int, ...] = _STEPS
) -> Iterator[Piece]:
    """Yields the tokens of a text piece by piece; see `encode_long`.

    Args:
      tokenizer: the tokenizer.
      text: the text.
      name: its name, for messages.
      steps: characters of a piece, as growing primes; the next one is tried where no cut is found.
    """
    if len(text) <= 2 * steps[0]:
        ids = np.array(tokenizer.encode(text), np.int32)
        yield Piece(ids, 0, len(text), 0, len(ids), len(text))
        return
    interval = 0.1 if sys.stderr.isatty() else 30.0  # in a log file a line now and then is enough
    options = {"unit": "char", "unit_scale": True, "delay": _DELAY, "mininterval": interval}
    with tqdm(total=len(text), desc=f"tokenise {name}", leave=False, **options) as bar:
        end = 0
        for piece in _Windows(tokenizer, text, name, steps).pieces():
            bar.update(piece.end - end)
            end = piece.end
            yield piece


class _Windows:
    """The windows of a text, and the places where one is joined to the next."""

    def __init__(self, tokenizer: Tokenizer, text: str, name: str, steps: tuple[int, ...]):
        self._tokenizer, self._text, self._name, self._steps = tokenizer, text, name, steps

    def pieces(self) -> Iterator[Piece]:
        start = shared = first = step = 0  # of the window; `shared`: end of the window before it
        seen = np.zeros(0, np.int32)  # its first tokens, which must not change if it grows
        ids, stop = self._window(start, shared, step)
        while stop < len(self._text):
            next_start = (stop - _OVERLAP) // _ALIGNED * _ALIGNED
            next_ids, next_stop = self._window(next_start, stop, 0)
            cut = None
            if _common_prefix(ids, seen) == len(seen):
                cut = self._cut(ids, next_ids, next_start, stop)
            if cut is not None:
                last, next_first, end = cut
                yield Piece(ids[first:last], start, stop, first, last, end)
                start, shared, stop, step = next_start, stop, next_stop, 0
                ids, first, seen = next_ids, next_first, next_ids[: next_first + _AGREEING]
                continue
            step += 1
            if step == len(self._steps):
                raise self._no_cut(shared)
            ids, stop = self._window(start, shared, step)
        if _common_prefix(ids, seen) < len(seen):
            raise self._no_cut(shared)
        yield Piece(ids[first:], start, stop, first, len(ids), stop)

    def _window(self, start: int, shared: int, step: int) -> tuple[np.ndarray, int]:
        """Returns the ids of the window from `start` on, int32 [n], and the end of its text."""
        stop = min(shared + self._steps[step], len(self._text))
        return np.array(self._tokenizer.encode(self._text[start:stop]), np.int32), stop

    def _cut(
        self, ids: np.ndarray, next_ids: np.ndarray, start: int, stop: int
    ) -> tuple[int, int, int] | None:
        """Returns a cut in the text that two windows share, `text[start:stop]`.

        The shared text is encoded, too. Its last tokens must be those of the window that ends with
        it, and its first tokens those of the window that begins with it.

        Returns:
          The number of tokens of the first window before the cut, and of the next window; and the
          number of characters of the text. None: no cut is safe.
        """
        shared = self._text[start:stop]
        shared_ids = np.array(self._tokenizer.encode(shared), np.int32)
        first = len(shared_ids) - _common_prefix(ids[::-1], shared_ids[::-1]) + _AGREEING
        last = _common_prefix(next_ids, shared_ids) - _AGREEING
        if first > last:
            return None
        spans = self._tokenizer.spans(shared)
        places = [
            i
            for i in range(first, last + 1)
            if spans[i - 1][1] <= (at := spans[i][0])
            and at > 0
            and not (shared[at - 1].isnumeric() and shared[at].isnumeric())
        ]
        if not places:
            return None
        middle = (first + last) / 2
        lines = [i for i in places if shared[spans[i][0] - 1] == "\n"]
        best = min(lines or places, key=lambda i: abs(i - middle))
        return len(ids) - len(shared_ids) + best, best, start + spans[best][0]

    def _no_cut(self, place: int) -> InputError:
        return InputError(
            f"{self._name}: the tokens from character {place:,} on depend on more than"
            f" {self._steps[-1]:,} characters, so the text cannot be tokenised in pieces; divide"
            " it into several documents"
        )


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the number of first entries that are equal."""
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size
