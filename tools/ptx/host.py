"""How a kernel is launched: read from what Mosaic-GPU's compiler writes about its host function.

The function's body is straight: values are made of constants and of the array of buffers that is
its last argument, and given to the calls that make tensor maps and launch the kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from tools.ptx.memory import BUFFER, MAP_BYTES, Tiles

BEFORE, AFTER = "IR Dump Before ConvertToLLVMPass", "IR Dump Before ReconcileUnrealizedCastsPass"
ITEMS = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4}
VALUE = r"%[\w#]+"


@dataclass(frozen=True)
class Launch:
    """arguments: addresses by parameter; shared: bytes of a block."""

    arguments: dict[int, int]
    tiles: list[Tiles]
    grid: tuple[int, int, int]
    threads: int
    shared: int


class _Buffer(NamedTuple):
    """An argument of the kernel, by its number."""

    number: int


class _Place(NamedTuple):
    """An item of an array of the host."""

    array: str
    index: int = 0

    def __add__(self, more: int) -> _Place:
        return _Place(self.array, self.index + more)


class _Host:
    """What the values of the host function mean, line by line."""

    def __init__(self, buffers: str):
        self.buffers = buffers  # the array of arguments
        self.values: dict[str, int | _Buffer | _Place] = {buffers: _Place(buffers)}
        self.items: dict[str, int] = {}  # bytes of a buffer's item, by value
        self.arrays: dict[str, dict[int, int]] = {}
        self.arguments: dict[int, int] = {}
        self.maps: dict[int, Tiles] = {}
        self.launched: list[int] = []

    def take(self, line: str) -> None:
        if made := re.match(rf"({VALUE}) = (?:llvm\.|memref\.)?([\w.]+)(.*)", line):
            self._make(*made.groups())
        if stored := re.match(rf"\w+\.store ({VALUE}), ({VALUE})(?:\[({VALUE})\])? :", line):
            self._store(*stored.groups())
        if called := re.search(r"call @mosaic_gpu_(\w+)\((.*?)\)", line):
            self._call(called[1], called[2].split(", "))

    def _make(self, name: str, operation: str, rest: str) -> None:
        used = re.findall(VALUE, rest.split(" : ")[0])
        known = [x for x in used if x in self.values]
        if operation == "mlir.constant" and (number := re.match(r"\((-?\d+) : i", rest)):
            self.values[name] = int(number[1])
        elif operation == "alloca":
            self.arrays[name], self.values[name] = {}, _Place(name)
        elif operation == "getelementptr" and known:
            index = re.search(r"\[(?:0, )?(\d+)\]", rest)
            self.values[name] = self.values[known[0]] + int(index[1])
        elif known:
            self._derive(name, known, rest, operation == "load")

    def _derive(self, name: str, known: list[str], rest: str, loaded: bool) -> None:
        """A value that stands for what it is made of: a buffer, a place, or a number."""
        first = next((x for x in known if not isinstance(self.values[x], int)), known[0])
        value = self.values[first]
        if loaded and isinstance(value, _Place) and value.array == self.buffers:
            value = _Buffer(value.index)
        self.values[name] = value
        if first in self.items:
            self.items[name] = self.items[first]
        kind = re.search(r"to memref<(?:\d+x)*(\w+)", rest)
        if kind and kind[1] in ITEMS:
            self.items[name] = ITEMS[kind[1]]

    def _store(self, name: str, at: str, index: str | None) -> None:
        value, place = self.values.get(name), self.values.get(at)
        if not isinstance(place, _Place) or place.array not in self.arrays:
            return
        if index is not None:
            place = place + self.values[index]
        if isinstance(value, int):
            self.arrays[place.array][place.index] = value
        elif isinstance(value, _Buffer):
            self.arguments[place.index] = value.number

    def _call(self, what: str, given: list[str]) -> None:
        values = [self.values.get(x) for x in given]
        if what in ("launch_kernel", "build_kernel_spec"):  # jax 0.11, 0.12
            self.launched = values
        elif what == "init_tma_desc":
            target, buffer, _, _, *lists, swizzle, box = values
            sizes, strides, box = (
                [n for _, n in sorted(self.arrays[x.array].items())] for x in (*lists, box)
            )
            item = self.items[given[1]]
            found = Tiles(buffer.number, item, sizes, strides, swizzle, box)
            self.maps[target.index // MAP_BYTES] = found
        else:
            raise ValueError(f"the host function calls mosaic_gpu_{what}, which is not known here")


def launch_of(log: str) -> Launch:
    """From the dump of the compiler's passes (MOSAIC_GPU_DUMP_TO, `.mlir-passes.log`)."""
    text = log[log.rindex(BEFORE) :]
    text = text[: text.index(AFTER)]
    header = re.search(r"func\.func @\w+\((.*)", text)
    host = _Host(re.findall(rf"({VALUE}): !llvm\.ptr", header[1])[-1])
    for line in text[header.end() :].splitlines():
        host.take(line.strip())
    numbers = host.launched
    return Launch(
        {i: BUFFER * (buffer + 1) for i, buffer in host.arguments.items()},
        [host.maps[i] for i in range(len(host.maps))],
        tuple(numbers[1:4]),
        numbers[7],
        numbers[10],
    )
