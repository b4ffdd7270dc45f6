"""From tokenised documents to rows: grain's packers, windows inside documents, overlapping rows."""

import functools
from typing import Any

import grain
import numpy as np

from lcjax.data.chunks import positions_in
from lcjax.data.config import DataConfig
from lcjax.data.sources import Source

Element = dict[str, np.ndarray]
_PACKERS = {
    "first_fit": grain.experimental.FirstFitPackIterDataset,
    "best_fit": grain.experimental.BestFitPackIterDataset,
}


def pack(
    pieces: grain.IterDataset, config: DataConfig, source: Source, *, shuffle: bool
) -> grain.IterDataset:
    """Rows of the elements of `pieces`, cut or fitted as `pack` of the source or the data says."""
    length, how = config.length, source.pack or config.pack
    stride = source.stride or length
    if how not in ("windows", "concat") and config.overlong == "split":
        pieces = grain.experimental.FlatMapIterDataset(pieces, _SplitOverlong(length))
    if how == "windows":
        windows = Windows(length, stride, first_only=config.overlong == "truncate")
        return grain.experimental.FlatMapIterDataset(pieces, windows).map(_row)
    if how == "single":
        return pieces.map(functools.partial(_padded, length=length))
    if how == "concat":
        rows = grain.experimental.ConcatThenSplitIterDataset(pieces, length_struct={"pair": stride})
        return rows if stride == length else _Overlapping(rows, length // stride)
    return _PACKERS[how](
        pieces,
        length_struct={"pair": length},
        num_packing_bins=config.packing_bins,
        seed=config.seed,
        shuffle_bins=shuffle,
    )


class _SplitOverlong(grain.experimental.FlatMapTransform):
    """Pieces of at most a row; their targets still reach into the next piece."""

    def __init__(self, length: int):
        self._length = length

    def flat_map(self, element):
        pair = element["pair"]
        return [{"pair": pair[i : i + self._length]} for i in range(0, len(pair), self._length)]


class Windows(grain.experimental.FlatMapTransform):
    """Every full row inside a document, `stride` apart; shorter documents give none.

    CEPE's train-filter (Yen et al. 2024, arXiv 2402.16617, sec. 3.1), where a row is what the
    encoder reads and what the decoder reads behind it.
    """

    def __init__(self, length: int, stride: int, *, first_only: bool = False):
        self._length, self._stride, self._first_only = length, stride, first_only

    def flat_map(self, element: Element) -> list[Element]:
        starts = self.starts(len(element["pair"]))
        return [{"pair": element["pair"][i : i + self._length]} for i in starts]

    def starts(self, tokens: int) -> range:
        """Where the windows of a document of so many tokens begin."""
        starts = range(0, tokens - self._length + 1, self._stride)
        return starts[:1] if self._first_only else starts


def _row(element: Element) -> Element:
    """A window as the packers give rows: one segment."""
    places = np.arange(len(element["pair"]), dtype=np.int32)
    return element | {"pair_segment_ids": np.ones_like(places), "pair_positions": places}


def _padded(element: Element, *, length: int) -> Element:
    """A document of at most `length` tokens as the packers give rows: one segment, and padding."""
    missing = length - len(element["pair"])
    pads = {"pair": ((0, missing), (0, 0))}
    return {name: np.pad(x, pads.get(name, (0, missing))) for name, x in _row(element).items()}


def join(parts: list[Element]) -> Element:
    """Neighbouring rows as one: a document that goes on over the seam stays one segment."""
    pair = np.concatenate([part["pair"] for part in parts])
    segments, last = [], 0
    for part, before in zip(parts, [None, *parts[:-1]], strict=True):
        ids = part["pair_segment_ids"]
        # The last place of a part has a target exactly if its document goes on.
        goes_on = before is not None and ids[0] and before["pair"][-1, 1] != -1
        ids = np.where(ids > 0, ids + last - int(goes_on), 0)
        segments.append(ids)
        last = max(last, int(ids.max()))
    segments = np.concatenate(segments).astype(np.int32)
    positions = positions_in(segments)
    return {"pair": pair, "pair_segment_ids": segments, "pair_positions": positions}


class _Overlapping(grain.IterDataset):
    """Rows of `count` parts each, every one beginning one part after the row before it."""

    def __init__(self, parts: grain.IterDataset, count: int):
        super().__init__(parts)
        self._count = count

    def __iter__(self) -> grain.DatasetIterator:
        return _OverlappingIterator(iter(self._parent), self._count)


class _OverlappingIterator(grain.DatasetIterator):
    def __init__(self, parts: grain.DatasetIterator, count: int):
        super().__init__(parts)
        self._count, self._held = count, []
        self._states: list[Any] = [parts.get_state()]  # before each part that is held, and after

    def __next__(self) -> Element:
        if len(self._held) == self._count:
            self._held, self._states = self._held[1:], self._states[1:]
        while len(self._held) < self._count:
            self._held.append(next(self._parent))
            self._states.append(self._parent.get_state())
        return join(self._held)

    def get_state(self) -> dict[str, Any]:
        """Parts that the next row needs again are read again."""
        again = int(len(self._held) == self._count)
        return {"parts": self._states[again]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parts"])
        self._held, self._states = [], [state["parts"]]
