"""Counts the instructions of the Hopper kernels' loops, and predicts their highest speed.

    python -m benchmarks.gpu.machine_code [--only "mosaic forward 128"]

Nothing runs on a GPU. Each kernel is compiled as by `benchmarks.gpu.compile` and disassembled by
nvdisasm (of the wheels `nvidia-cuda-nvdisasm` or `triton`, or on the PATH), and the instructions of
its loops with tensor-core products are counted. One row per loop: the clocks that a step needs of
each unit. They are clocks of one of the four schedulers of a multiprocessor for one warpgroup,
which has one of its four warps on each scheduler:

tensor   wgmma: 4096 bfloat16 operations per clock and multiprocessor (989 TFLOP/s at 1.83 GHz)
shared   128 bytes per clock: operands of wgmma, loads and stores, and the tiles that are copied in
special  16 lanes per clock and multiprocessor: powers of two
float    128 lanes: float32 sums and products; 64: integer products, also those that move values
integer  64 lanes: other arithmetic, maxima, selections, conversions
issue    one instruction per clock and scheduler

`masked` instructions are those that a step skips unless its block needs an element test; no other
figure counts them. `groups` is the number of warpgroups of a program that compute, and `barriers`
the number of arrivals and waits of one of them in a step. The two predictions assume the clock
above: `overlapped` if the busiest unit never waits, `alone` if the tensor cores wait for the rest
of a step. They are TFLOP/s of executed products; a backward pass, which needs 5 products, executes
3 for dq and 4 for dk and dv.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from pallas_kernels import nvidia

from . import compile as programs

CLOCK, PROCESSORS = 1.83e9, 132  # of an H200, for NVIDIA's figure of 989 TFLOP/s
TENSOR, SHARED = 4096, 128  # operations, and bytes, per clock and multiprocessor
PEAK = CLOCK * PROCESSORS * TENSOR / 1e12
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?(\w+) )?([A-Z][\w.]*) ?(.*?) ?;|^\.(\w+):", re.M)
# Clocks of a scheduler per instruction of a warp, by the prefix of its name.
CLOCKS = {
    "special": (8, "MUFU"),
    "float": (1, "FFMA FMUL FADD"),
    "products": (2, "IMAD IDP"),
    "integer": (2, "FMNMX FSEL FSETP F2FP FSWZ ISETP IADD VIADD LOP LEA SHF SEL PRMT PLOP MOV"),
}  # fmt: skip
UNITS = ("tensor", "shared", "special", "float", "integer", "issue")


def disassembler() -> str | None:
    """Returns the path of nvdisasm; None if it is missing."""
    folders = [folder / "bin" for folder in programs.wheels()]
    if (triton := importlib.util.find_spec("triton")) is not None:
        folders.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    return next(filter(None, (shutil.which("nvdisasm", path=x) for x in (*folders, None))), None)


def parse(text: str) -> list[tuple]:
    """Returns (guarding predicate, operation, operands) of each line; a label is (name,)."""
    matches = LINE.findall(text)
    return [(label,) if label else (guard, name, rest) for _, guard, name, rest, label in matches]


def loops(lines: list[tuple]) -> list[tuple[list, int]]:
    """Returns (instructions, number of masked ones) of the innermost loops with products."""
    labels = {line[0]: i for i, line in enumerate(lines) if len(line) == 1}

    def target(line):
        match = re.search(r"\((\.?\w+)\)", line[2]) if line[1:2] == ("BRA",) else None
        return labels.get(match[1].lstrip(".")) if match else None

    spans = [(target(line), i) for i, line in enumerate(lines) if len(line) == 3]
    spans = [(a, b) for a, b in spans if a is not None and a < b and multiplies(lines[a:b])]
    # Code that waits for a barrier follows the last exit and jumps back into its loop.
    spans = [(a, b) for a, b in spans if not any(x[1:2] == ("EXIT",) for x in lines[a:b])]
    inner = [(a, b) for a, b in spans if not any(a <= c and d < b for c, d in spans)]
    result = []
    for start, end in inner:
        hidden = set()
        for i in range(start, end):
            to = target(lines[i]) if len(lines[i]) == 3 else None
            if to is not None and lines[i][0] and i < to <= end and not multiplies(lines[i:to]):
                hidden |= set(range(i + 1, to))
        body = [lines[i] for i in range(start, end + 1) if len(lines[i]) == 3]
        shown = [lines[i] for i in range(start, end + 1) if i not in hidden and len(lines[i]) == 3]
        result.append((shown, len(body) - len(shown)))
    return result


def multiplies(lines) -> bool:
    return any(len(line) == 3 and line[1].startswith("HGMMA") for line in lines)


def units(instructions, brought: float = 0) -> Counter:
    """Returns the clocks of every unit for a step of a warpgroup that copies `brought` bytes."""
    clocks = Counter(dict.fromkeys(UNITS, 0), issue=len(instructions))
    clocks["shared"] = brought / SHARED
    for _, name, rest in instructions:
        if shape := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", name):
            m, n, k = map(int, shape.groups())
            clocks["tensor"] += 2 * m * n * k / TENSOR
            in_memory = re.match(r"R\d+, gdesc", rest) is not None
            clocks["shared"] += 2 * k * (n + m * in_memory) / SHARED
        elif name.startswith(("LDS", "STS")):
            wide = 16 if ".M88" in name else int((re.findall(r"\.(64|128)", name) or [32])[0]) // 8
            clocks["shared"] += 128 * wide / SHARED
        for unit, (each, starts) in CLOCKS.items():
            if name.startswith(tuple(starts.split())):
                clocks["float" if unit == "products" else unit] += each
    return clocks


def predicted(clocks: Counter) -> tuple[float, float]:
    """Returns TFLOP/s of executed products: if units overlap, and if tensor cores wait."""
    others = max(clocks[unit] for unit in UNITS if unit != "tensor")
    useful = PEAK * clocks["tensor"]
    return useful / max(clocks["tensor"], others), useful / (clocks["tensor"] + others)


def barriers(instructions) -> int:
    """Returns the number of arrivals at barriers in shared memory and of waits for them."""
    return sum(name.startswith("SYNCS") for _, name, _ in instructions)


def tile(word: str, kernel: str, size: int, dtype: str) -> tuple[int, int]:
    """Returns (compute warpgroups, rows of a streamed tile) of a kernel."""
    if word == "mosaic":
        tiles = nvidia.mosaic_gpu(kernel, size, False)
        return tiles.groups, tiles.streamed
    with programs.described("h200"):
        tile = nvidia.triton(kernel, size, dtype)
    return tile.warps // 4, tile.rows if kernel == "d_keys" else tile.keys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", default="", help="words that a row's name must have")
    args = parser.parse_args()
    if (command := disassembler()) is None:
        print("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
        return 1
    programs.prepare()
    print(
        f"{'clocks of a step':40}",
        *(f"{x:>8}" for x in UNITS),
        " masked groups barriers  overlapped  alone",
    )
    for row in programs.rows(every=False):
        name, words = " ".join(map(str, row)), {*args.only.split(), "h200", "causal"}
        if not words <= set(name.split()):
            continue
        programs.compile_one(*row)
        run = [command, "-c", programs.BINARY]
        text = subprocess.run(run, capture_output=True, text=True, check=True).stdout
        word, _, kernel = row[0].rpartition(" ")
        groups, streamed = tile(word, kernel, row[2], row[3])
        brought = 4 * row[2] * streamed / groups  # two streamed tiles of 16 bits per step
        for instructions, masked in loops(parse(text)):
            clocks = units(instructions, brought)
            figures = (f"{clocks[x]:8.0f}" for x in UNITS)
            most, least = predicted(clocks)
            counts = f"{masked:7} {groups:6} {barriers(instructions):8}"
            print(f"{name:40}", *figures, counts, f"{most:11.0f} {least:6.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
