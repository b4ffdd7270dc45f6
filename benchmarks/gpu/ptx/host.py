"""How a kernel is launched: read from what Mosaic-GPU's compiler writes about its host function.

The function's body is straight: values are made of constants and of the array of buffers that is
its last argument, and given to the calls that make tensor maps and launch the kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from benchmarks.gpu.ptx.memory import BUFFER, Tiles

BEFORE, AFTER = "IR Dump Before ConvertToLLVMPass", "IR Dump Before ReconcileUnrealizedCastsPass"
ITEMS = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4}
MAP_BYTES = 128
VALUE = r"%[\w#]+"


@dataclass(frozen=True)
class Launch:
    """arguments: addresses by parameter; shared: bytes of a block."""

    arguments: dict[int, int]
    tiles: list[Tiles]
    grid: tuple[int, int, int]
    threads: int
    shared: int


@dataclass
class _Host:
    """Values of the host function by name."""

    buffers: str  # the argument that is the array of buffers
    numbers: dict[str, int] = field(default_factory=dict)
    pointers: dict[str, int] = field(default_factory=dict)  # number of the buffer
    items: dict[str, int] = field(default_factory=dict)  # bytes of a buffer's item
    places: dict[str, tuple[str, int]] = field(default_factory=dict)  # (array, index)
    arrays: dict[str, dict[int, int]] = field(default_factory=dict)
    arguments: dict[int, int] = field(default_factory=dict)
    maps: dict[int, Tiles] = field(default_factory=dict)
    launched: list[int] | None = None

    def take(self, line: str) -> None:
        if made := re.match(rf"({VALUE}) = (\S+) ?(.*)", line):
            name, operation, rest = made.groups()
            self._make(name, operation.removeprefix("llvm."), rest)
        if stored := re.match(rf"llvm\.store ({VALUE}), ({VALUE}) :", line):
            self._store(*stored.groups())
        if called := re.search(r"call @mosaic_gpu_(\w+)\((.*?)\)", line):
            self._call(called[1], called[2].split(", "))

    def _make(self, name: str, operation: str, rest: str) -> None:
        used = re.findall(VALUE, rest.split(" : ")[0])
        index = re.search(r"\[(?:0, )?(\d+)\]", rest)
        if constant := re.match(r"mlir\.constant\((-?\d+)", operation):
            self.numbers[name] = int(constant[1])
        elif not used:
            return
        elif operation == "trunc":
            self.numbers[name] = self.numbers[used[0]]
        elif operation == "alloca":
            self.arrays[name] = {}
        elif operation == "getelementptr":
            base, start = self.places.get(used[0], (used[0], 0))
            self.places[name] = base, start + int(index[1])
        elif operation == "load" and self.places.get(used[0], (used[0], 0))[0] == self.buffers:
            self.pointers[name] = self.places.get(used[0], ("", 0))[1]
        else:
            self._derive(name, used, rest)

    def _derive(self, name: str, used: list[str], rest: str) -> None:
        """A value that stands for the same buffer as one that it is made of."""
        known = [x for x in used if x in self.pointers]
        if not known:
            return
        self.pointers[name] = self.pointers[known[0]]
        if known[0] in self.items:
            self.items[name] = self.items[known[0]]
        if kind := re.search(r"to memref<(?:\d+x)*(\w+)", rest):
            self.items[name] = ITEMS[kind[1]]

    def _store(self, value: str, at: str) -> None:
        array, index = self.places.get(at, (at, 0))
        if array in self.arrays and value in self.numbers:
            self.arrays[array][index] = self.numbers[value]
        elif array in self.arrays and value in self.pointers:
            self.arguments[index] = self.pointers[value]

    def _call(self, what: str, given: list[str]) -> None:
        if what == "launch_kernel":
            self.launched = [self.numbers.get(x, 0) for x in given]
        elif what == "init_tma_desc":
            target, base, _, _, sizes, strides, swizzle, box = given
            lists = ([n for _, n in sorted(self.arrays[x].items())] for x in (sizes, strides, box))
            sizes, strides, box = lists
            tiles = Tiles(
                self.pointers[base], self.items[base], sizes, strides, self.numbers[swizzle], box
            )
            self.maps[self.places.get(target, ("", 0))[1] // MAP_BYTES] = tiles
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
