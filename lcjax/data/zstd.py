"""Frames of a .zst file: where each one lies, and its content (RFC 8878).

A zstd file is a row of frames, each packed for itself; inside a frame nothing can be read without
all that comes before. Headers alone say where frames end, so finding them unpacks nothing.
"""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from lcjax.errors import InputError

LARGEST = 1 << 28  # bytes of an unpacked frame: several are held in memory, one per thread made
_CHUNK = 1 << 24
_MAGIC = 0xFD2FB528
_SKIPPABLE = 0x184D2A50  # the last four bits are free
_CONTENT = (0, 2, 4, 8)  # bytes of the content size, by bits 6-7


class Frames:
    """The frames of one file; `chunks` has to be run through once before the others are used."""

    def __init__(self, path: Path, data: Callable[[], bytes]):
        """`data` gives the packed bytes: a map of the file, asked for whenever it is read."""
        self._path, self._data = path, data
        self._ends = np.zeros(1, np.int64)  # in the unpacked content, behind a first 0
        self._bounds = np.zeros((0, 2), np.int64)  # in the file

    def chunks(self) -> Iterator[bytes]:
        """All of the content once, in order."""
        self._bounds = np.array(self._find(), np.int64).reshape(-1, 2)
        ends = [0]
        for index in range(len(self._bounds)):
            size = 0
            for chunk in self._stream(index):
                size += len(chunk)
                if size > LARGEST:
                    raise self._too_large(index)
                yield chunk
            ends.append(ends[-1] + size)
        self._ends = np.array(ends, np.int64)

    def covering(self, start: int, end: int) -> range:
        """Indices of the frames that hold the bytes `start` ... `end` of the content."""
        first = int(np.searchsorted(self._ends, start, side="right")) - 1
        return range(first, int(np.searchsorted(self._ends, end, side="left")))

    def start(self, index: int) -> int:
        return int(self._ends[index])

    def unpack(self, index: int) -> bytes:
        return b"".join(self._stream(index))

    def _find(self) -> list[tuple[int, int]]:
        if self._path.stat().st_size == 0:
            return []
        try:
            return frame_bounds(self._data())
        except (struct.error, IndexError, ValueError) as error:
            why = error if type(error) is ValueError else "it ends inside a frame"
            raise InputError(f"{self._path} is damaged or cut short: {why}") from None

    def _stream(self, index: int) -> Iterator[bytes]:
        pyarrow = _pyarrow()
        start, end = self._bounds[index].tolist()
        packed = pyarrow.BufferReader(pyarrow.py_buffer(memoryview(self._data())[start:end]))
        try:
            with pyarrow.CompressedInputStream(packed, "zstd") as stream:
                while chunk := stream.read(_CHUNK):
                    yield chunk
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{self._path} is damaged at byte {start}: {error}") from None

    def _too_large(self, index: int) -> InputError:
        name = self._path.name
        return InputError(
            f"{self._path}: the zstd frame at byte {self._bounds[index][0]} unpacks to more than"
            f" {LARGEST >> 20} MiB and could only be read from its start: write smaller frames"
            f" (`zstd -dc {name} | split -C 64M --filter=zstd - > new.jsonl.zst`) or unpack it"
        )


def frame_bounds(data: bytes) -> list[tuple[int, int]]:
    """(start, end) of all frames with content, from the sizes in the headers."""
    bounds, at = [], 0
    while at < len(data):
        (magic,) = struct.unpack_from("<I", data, at)
        if magic & ~0xF == _SKIPPABLE:
            (size,) = struct.unpack_from("<I", data, at + 4)
            end = at + 8 + size
        elif magic == _MAGIC:
            end = _frame_end(data, at)
            bounds.append((at, end))
        else:
            raise ValueError(f"no zstd frame begins at byte {at}")
        if end > len(data):
            raise ValueError(f"the frame at byte {at} goes on after the end of the file")
        at = end
    return bounds


def _frame_end(data: bytes, start: int) -> int:
    descriptor = data[start + 4]
    single, checksum = descriptor >> 5 & 1, descriptor >> 2 & 1
    if descriptor & 3:
        raise ValueError(f"the frame at byte {start} needs a dictionary; unpack it first")
    size = _CONTENT[descriptor >> 6] or single
    at = start + 5 + (not single) + size
    last = False
    while not last:
        header = data[at] | data[at + 1] << 8 | data[at + 2] << 16
        last, run = header & 1, header >> 1 & 3 == 1
        at += 3 + (1 if run else header >> 3)  # a run is one byte to be repeated
    return at + 4 * checksum


def _pyarrow():
    try:
        import pyarrow
    except ImportError:
        raise InputError(
            "reading .zst files needs `pip install pyarrow`; .gz needs nothing"
        ) from None
    return pyarrow
