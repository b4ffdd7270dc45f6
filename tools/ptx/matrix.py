"""The asynchronous matrix unit: products of tiles in shared memory, or of registers with those."""

from __future__ import annotations

import re

import numpy as np

from tools.ptx.arithmetic import HALVES, LANE, WARP, Fault, uniform
from tools.ptx.memory import Memory, swizzled
from tools.ptx.program import members

SPANS = {1: 128, 2: 64, 3: 32}  # bytes over which a tile is shuffled, by its descriptor's last bits
DEPTH = 16  # of one product


def product(words, operands, registers, memory: Memory):
    """A function that does `wgmma.mma_async`, reading its factors when it is called."""
    shape = re.fullmatch(r"m64n(\d+)k16", next(x for x in words if x.startswith("m64")))
    width, dtype = int(shape[1]), HALVES[words[-1]]
    adds, sums, first, second, on, *signs = operands
    sums, rows = members(sums), members(first) if first.startswith("{") else None
    if on != "p" or signs[:2] != ["1", "1"] or len(sums) != width // 2:
        raise Fault(f"an unknown product: {'.'.join(words)}")
    turned = [int(x) for x in signs[2:]]
    turned = turned if rows is None else [0, *turned]
    descriptors = [None if x.startswith("{") else uniform(registers.read(x, "u64"))
                   for x in (first, second)]  # fmt: skip

    def run() -> None:
        left = (
            _fragments(rows, registers, dtype)
            if rows is not None
            else _tile(descriptors[0], 64, turned[0], memory, dtype)
        )
        found = left @ _tile(descriptors[1], width, turned[1], memory, dtype).T
        keep = uniform(registers.read(adds, "b32")) != 0
        for i, name in enumerate(sums):
            row = 16 * WARP + LANE // 4 + 8 * ((i // 2) % 2)
            column = 8 * (i // 4) + 2 * (LANE % 4) + i % 2
            old = registers.read(name, "f32") if keep else np.float32(0)
            registers.write(name, (found[row, column] + old).astype(np.float32))

    return run


def _tile(descriptor: int, rows: int, turned: int, memory: Memory, dtype) -> np.ndarray:
    """float32 [rows, 16] of a tile in shared memory; turned: its 16 go from row to row."""
    start, leading, stride = (16 * ((descriptor >> x) & 0x3FFF) for x in (0, 16, 32))
    if (descriptor >> 49) & 7 or descriptor >> 62 not in SPANS:
        raise Fault("an unknown descriptor of a tile")
    span, row, k = SPANS[descriptor >> 62], np.arange(rows)[:, None], np.arange(DEPTH)
    if turned:
        address = start + 2 * row // span * leading + 2 * row % span
        address = address + k % 8 * span + k // 8 * stride
    else:
        address = start + row // 8 * stride + row % 8 * span + 2 * k
    cells = swizzled(address, span)[..., None] + np.arange(2)
    found = np.ascontiguousarray(memory.seen_by_units(cells))
    return found.view(np.uint16)[..., 0].view(dtype).astype(np.float32)


def _fragments(names: list[str], registers, dtype) -> np.ndarray:
    """float32 [64, 16] of four registers, each of which holds two numbers of a row."""
    found = np.zeros((64, DEPTH), np.float32)
    for i, name in enumerate(names):
        row, column = 16 * WARP + LANE // 4 + 8 * (i % 2), 2 * (LANE % 4) + 8 * (i // 2)
        pair = registers.read(name, "b32").view(np.uint16).reshape(-1, 2)
        for j in range(2):
            found[row, column + j] = pair[:, j].copy().view(dtype).astype(np.float32)
    return found
