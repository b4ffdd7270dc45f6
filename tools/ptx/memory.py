"""Buffers, shared memory, barriers, and the copies of the copy engine between them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tools.ptx.arithmetic import Fault

SHARED = 1024  # address of the first byte of shared memory, of 1,024 as swizzled tiles need
BUFFER, PARAMETERS = 1 << 40, 1 << 60  # addresses: a buffer has 2^40 for itself
MAP_BYTES = 128  # of a tensor map
MOST_BYTES = 2**20 - 1  # that a barrier can wait for


def swizzled(address, span: int):
    """Where a byte of a tile lies that is shuffled over `span` bytes."""
    bits = {128: 7, 64: 3, 32: 1}.get(span, 0)
    return address ^ (((address >> 7) & bits) << 4)


@dataclass
class Barrier:
    """Threads and bytes that a phase waits for."""

    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def arrive(self, threads: int, expected: int) -> None:
        self.bytes += expected
        self.pending -= threads
        if self.pending < 0 or self.bytes > MOST_BYTES:
            raise Fault("more arrives at a barrier than it waits for")
        self.advance()

    def copied(self, size: int) -> None:
        self.bytes -= size
        self.advance()

    def advance(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = 1 - self.phase, self.count


@dataclass(frozen=True)
class Tiles:
    """A tensor map: how a buffer is cut into boxes that are copied at once; innermost axis last."""

    buffer: int
    item: int  # bytes
    sizes: list[int]
    strides: list[int]  # in items
    swizzle: int
    box: list[int]

    def check(self) -> None:
        """What the driver asks of a tensor map."""
        inner, strides = self.box[-1] * self.item, [x * self.item for x in self.strides]
        right = (
            len(self.sizes) <= 5
            and all(1 <= x <= 256 for x in self.box)
            and all(1 <= x <= 2**32 for x in self.sizes)
            and strides[-1] == self.item
            and all(x % 16 == 0 and x < 2**40 for x in strides[:-1])
            and inner % 16 == 0
            and (self.swizzle <= 16 or inner <= self.swizzle)
        )
        if not right:
            raise Fault(f"no driver takes this tensor map: {self}")

    def cells(self, at: list[int], shared: int):
        """Of every byte of the box at `at`: its place in the buffer, whether it is there, and its
        address in shared memory."""
        place, there = np.zeros(self.box, np.int64), np.ones(self.box, bool)
        for i, (many, stride, size, start) in enumerate(
            zip(self.box, self.strides, self.sizes, at, strict=True)
        ):
            along = (start + np.arange(many)).reshape([-1 if j == i else 1 for j in range(len(at))])
            place, there = place + along * stride, there & (along >= 0) & (along < size)
        inside = swizzled(shared + self.item * np.arange(place.size), self.swizzle)
        each = np.arange(self.item)
        return (
            (self.item * place.reshape(-1, 1) + each).reshape(-1),
            there.reshape(-1).repeat(self.item),
            (inside[:, None] + each).reshape(-1),
        )


@dataclass
class Memory:
    """What the warpgroups of a block see: `buffers` of bytes, its shared memory and barriers.

    Ordinary loads and stores of shared memory and the asynchronous units do not see each other
    before a fence: of each warpgroup what it wrote, and read, since its last one.
    """

    buffers: list[np.ndarray]
    shared: np.ndarray
    groups: int
    barriers: dict[int, Barrier] = field(default_factory=dict)
    started: bool = False  # the barriers are visible to the copy engine

    def __post_init__(self):
        self.wrote, self.looked = (
            np.zeros((self.groups, len(self.shared)), bool) for _ in range(2)
        )

    def fence(self, group: int) -> None:
        self.wrote[group] = self.looked[group] = False

    def load(self, group: int, cells):
        """Bytes of shared memory as threads load them."""
        self.looked[group, cells.reshape(-1)] = True
        return self.shared[cells]

    def store(self, group: int, cells, values) -> None:
        self.wrote[group, cells.reshape(-1)] = True
        self.shared[cells] = values

    def seen_by_units(self, cells):
        """Bytes of shared memory as the matrix unit and the copy engine read them."""
        if self.wrote[:, cells.reshape(-1)].any():
            raise Fault("an asynchronous unit reads what threads wrote, without a fence")
        return self.shared[cells]

    def global_bytes(self, address: int, size: int) -> np.ndarray:
        """A view of a buffer."""
        number, start = address // BUFFER - 1, address % BUFFER
        if not (0 <= number < len(self.buffers)) or start + size > self.buffers[number].size:
            raise Fault(f"bytes {start} to {start + size} of buffer {number} are not there")
        return self.buffers[number][start : start + size]

    def copy_in(self, tiles: Tiles, at: list[int], shared: int, barrier: int) -> None:
        """A box of a buffer; what of it is not there becomes zeros."""
        places, there, cells = tiles.cells(at, shared)
        if shared % (8 * tiles.swizzle if tiles.swizzle > 16 else 128):
            raise Fault(f"a box is copied to {shared - SHARED}, which is not aligned")
        if self.looked[:, cells].any() or self.wrote[:, cells].any():
            raise Fault("a box is copied over what threads read or wrote, without a fence")
        values, buffer = np.zeros(len(cells), np.uint8), self.buffers[tiles.buffer]
        if places[there].max(initial=0) >= buffer.size:
            raise Fault("a box reaches beyond its buffer")
        values[there] = buffer[places[there]]
        self.shared[cells] = values
        self.barriers[barrier].copied(len(cells))

    def copy_out(self, tiles: Tiles, at: list[int], shared: int) -> None:
        places, there, cells = tiles.cells(at, shared)
        values, buffer = self.seen_by_units(cells), self.buffers[tiles.buffer]
        if places[there].max(initial=0) >= buffer.size:
            raise Fault("a box reaches beyond its buffer")
        buffer[places[there]] = values[there]
