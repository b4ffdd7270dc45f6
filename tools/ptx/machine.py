"""Runs the blocks of a kernel's grid, one after the other, in an order that a GPU may take."""

from __future__ import annotations

import itertools
import random

import numpy as np

from tools.ptx.arithmetic import THREADS, Fault
from tools.ptx.host import Launch
from tools.ptx.memory import SHARED, Memory
from tools.ptx.program import Program, parse
from tools.ptx.warpgroup import Warpgroup

NAN_BYTE = 0xFF  # all bits of a float: not a number
MOST_IN_Y_AND_Z = 65535


def run(
    text: str, launch: Launch, inputs, outputs, *, late: bool, seed: int = 0, without: str = ""
) -> list:
    """The results of a kernel, [(shape, dtype), ...], from arrays.

    late: asynchronous work is done as late as the kernel allows, otherwise at once; warpgroups take
    turns at random. Results and shared memory hold NaN before. without: instructions whose name
    starts so are left out, to see what they are for.
    """
    program = parse(text, without)
    if launch.threads != program.threads or max(launch.grid[1:]) > MOST_IN_Y_AND_Z:
        raise Fault(f"no such kernel can be launched: {launch.threads} threads, {launch.grid}")
    results = [np.full(_bytes(*one), NAN_BYTE, np.uint8) for one in outputs]
    arrays = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in inputs]
    for tiles in launch.tiles:
        tiles.check()
    order = random.Random(seed)
    for z, y, x in itertools.product(*map(range, launch.grid[::-1])):
        Block(program, launch, [*arrays, *results], (x, y, z), late, order).run()
    return [
        x.view(dtype).reshape(shape) for x, (shape, dtype) in zip(results, outputs, strict=True)
    ]


def _bytes(shape, dtype) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


class Block:
    """Warpgroups with shared memory, and the copies into it that are under way, in any order."""

    def __init__(self, program: Program, launch: Launch, buffers, place, late: bool, order):
        self.program, self.launch, self.place, self.late = program, launch, place, late
        self.order, self.copies = order, []
        shared = np.full(SHARED + launch.shared, NAN_BYTE, np.uint8)
        groups = program.threads // THREADS
        self.memory = Memory(buffers, shared, groups)
        self.warpgroups = [Warpgroup(i, self) for i in range(groups)]

    def run(self) -> None:
        while left := [x for x in self.warpgroups if not x.done]:
            if ready := [x for x in left if x.ready()]:
                self.order.choice(ready).run()
            elif self.copies:
                self.copies.pop(self.order.randrange(len(self.copies)))()
            else:
                where = {x.number: str(self.program.code[x.at - 1]) for x in left}
                raise Fault(f"all wait for ever: {where}, {self.memory.barriers}")
        if self.copies or any(x.bytes for x in self.memory.barriers.values()):
            raise Fault("the kernel ends with copies under way")
