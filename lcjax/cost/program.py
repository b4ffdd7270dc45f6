"""The result of compiling a program: its memory, whether it fits into a chip, and its collectives.

XLA's counts include the body of a loop once. Here a collective in a loop is multiplied by the trip
count if the compiler knows it or if the condition compares with a constant. All branches of a
conditional are counted.
Bytes are those that a device receives when n devices pass parts around a ring, which is the
minimum: for a result of r bytes r (n - 1) / n in an all-gather, twice that in an all-reduce, and
r (n - 1) in a reduce-scatter, whose result is a part.
"""

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax

from lcjax.cost.chips import Chip

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# The compiler's two messages: for the whole program, or for its temporaries alone.
_NEEDED = re.compile(
    r"Ran out of memory.*?(?:Used |temporaries \()([\d.]+)([KMGT]?)(?: of|\) exceeds)", re.DOTALL
)

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
_START = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)(?:e\d\w+)?\[([\d,]*)\]")
_WHILE = re.compile(r" while\(.*condition=%?([\w.-]+), body=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_GROUPS = re.compile(
    r"(?:replica_groups=|num_partitions=)"
    r"(?:\{\{([\d,]*)\}|\[\d+,(\d+)\]|mesh\[(.*?)\] \{(.*?)\}|(\d+))"
)
# An axis with its size, or (of what is before and how much) a part of one.
_AXIS = re.compile(r"'(\w+)'(?:(?:=|:\(\d+\))(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")
_PAIR = re.compile(r"(\d+),(\d+)")
_SCATTER = "all-reduce-scatter"  # libtpu's fusions that leave each device its part of a sum
_CALLS = re.compile(r" (?:fusion|call|async-start)\(.*(?:calls|to_apply)=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LIMIT = re.compile(r"s32\[\]\S* constant\((\d+)\)")


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind on one device, in one run of the program."""

    count: int
    bytes: int  # received


@dataclass(frozen=True)
class ProgramCost:
    """Memory and traffic of a program in bytes, of one device in one run."""

    chip: Chip
    needed: float  # at the peak
    seconds: float  # of compiling
    arguments: int = 0
    outputs: int = 0
    in_place: int = 0  # outputs that take the place of arguments
    temporaries: int = 0
    program: int = 0
    # Read and written, the body of a loop counted once; 0 if the compiler does not report it.
    accessed: float = 0.0
    traffic: dict[str, Traffic] = field(default_factory=dict)
    host: int = 0  # in the memory of the device's host
    refused: bool = False  # the compiler ran out of memory

    @property
    def fits(self) -> bool:
        return not self.refused and self.needed <= self.chip.usable

    def __str__(self) -> str:
        lines = []
        if not self.refused:
            lines = [
                f"arguments          {self.arguments / 1e9:9.2f} GB",
                f"outputs            {self.outputs / 1e9:9.2f} GB, of which"
                f" {self.in_place / 1e9:.2f} in place of arguments",
                f"temporaries        {self.temporaries / 1e9:9.2f} GB",
                f"program            {self.program / 1e9:9.2f} GB",
            ]
            if self.host:
                lines.append(f"host memory        {self.host / 1e9:9.2f} GB")
        word = "FITS" if self.fits else "DOES NOT FIT"
        lines.append(
            f"peak               {self.needed / 1e9:9.2f} GB of {self.chip.usable / 1e9:.2f} GB"
            f" that {self.chip.name} leaves to a program: {word}"
        )
        if self.accessed:
            lines.append(
                f"bytes accessed     {self.accessed / 1e9:9.1f} GB, bodies of loops counted once"
            )
        for kind, sent in self.traffic.items():
            lines.append(f"{kind:19}{sent.bytes / 1e9:9.2f} GB in {sent.count:,}")
        return "\n".join(lines)


def program_cost(lowered: jax.stages.Lowered, chip: Chip) -> ProgramCost:
    """Compiles a program for `chip`; the result says so if it is too large.

    Raises:
      JaxRuntimeError: the compiler fails for another reason.
    """
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        match = _NEEDED.search(str(error))
        if match is None:
            raise
        needed = float(match[1]) * _UNITS[match[2]]
        return ProgramCost(chip, needed, time.perf_counter() - start, refused=True)
    seconds, memory = time.perf_counter() - start, compiled.memory_analysis()
    sizes = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "in_place": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
    }
    return ProgramCost(
        chip,
        sum(sizes.values()) - 2 * sizes["in_place"],
        seconds,
        **sizes,
        host=memory.host_argument_size_in_bytes
        + memory.host_output_size_in_bytes
        + memory.host_temp_size_in_bytes
        - memory.host_alias_size_in_bytes,
        accessed=(compiled.cost_analysis() or {}).get("bytes accessed", 0.0),
        traffic=collectives(compiled.as_text()),
    )


def collectives(text: str) -> dict[str, Traffic]:
    """Counts collectives by kind in the text of an optimised HLO module (`compiled.as_text()`)."""
    num_devices = _group(text.split("\n", 1)[0]) or 1
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for match, computation, times in _walk(text):
        kind, received = _received(match, _group(match.string) or num_devices, computation)
        if received:
            totals[kind][0] += times
            totals[kind][1] += times * received
    return {kind: Traffic(*totals[kind]) for kind in KINDS if kind in totals}


def permuted_bytes(text: str) -> dict[tuple[int, int], int]:
    """Counts the bytes that collective-permutes send, by the numbers of (sender, receiver).

    They are the messages of a ring; other collectives have no pairs. Numbers are places in the
    program's order of devices, which is that of its mesh.
    """
    totals: dict[tuple[int, int], int] = defaultdict(int)
    for match, computation, times in _walk(text):
        pairs = _PAIRS.search(match.string)
        if pairs and match[2] == "collective-permute":
            size = times * _received(match, 0, computation)[1]
            for source, target in _PAIR.findall(pairs[1]):
                if source != target:
                    totals[int(source), int(target)] += size
    return dict(totals)


def _walk(text: str) -> Iterator[tuple[re.Match, str, int]]:
    """Yields (match of a collective's line, its computation, how often it runs)."""
    bodies, entry = _computations(text)

    def walk(name: str, times: int, seen: set | None) -> Iterator[tuple[re.Match, str, int]]:
        """`seen`: channels of the caller if `name` is a part of it; None if it runs alone."""
        channels: set = set()
        for line in bodies.get(name, ()):
            if match := _COLLECTIVE.search(line):
                channel = match[2], (_CHANNEL.search(line) or [""])[0]
                # Fusions that overlap a collective with work repeat it at its start and its end.
                if seen is not None and channel in seen:
                    continue
                if seen is not None:
                    seen.add(channel)
                yield match, name, times
            elif match := _WHILE.search(line):
                known = _TRIPS.search(line)
                trips = int(known[1]) if known else _trips(bodies.get(match[1], ()))
                yield from walk(match[2], times * trips, None)
            elif match := _BRANCHES.search(line):
                for branch in match[1].split(","):
                    yield from walk(branch.strip().lstrip("%"), times, None)
            elif match := _CALLS.search(line):
                yield from walk(match[1], times, channels if seen is None else seen)

    yield from walk(entry, 1, None)


def _received(match: re.Match, devices: int, computation: str) -> tuple[str, int]:
    """(kind, bytes that a device receives) of a collective of `devices` in a computation."""
    shape, kind, started = match.groups()
    sizes = [_bytes(*array) for array in _ARRAY.findall(shape)]
    if started and kind != "all-reduce":
        # A start op lists its operands before its results, and counters after them.
        sizes = sizes[len(sizes) // 2 :] if kind != "collective-permute" else sizes[1:2]
    size = sum(sizes)
    if kind == "collective-permute":
        return kind, size
    if kind == "reduce-scatter":
        return kind, size * (devices - 1)
    part = size * (devices - 1) // devices
    if kind == "all-reduce":
        return ("reduce-scatter", part) if computation.startswith(_SCATTER) else (kind, 2 * part)
    return kind, part


def _group(line: str) -> int:
    """The number of devices in a group; 0 if the line names none."""
    match = _GROUPS.search(line)
    if match is None:
        return 0
    listed, size, mesh, axes, count = match.groups()
    if mesh is None:
        return len(listed.split(",")) if listed is not None else int(size or count)
    sizes = dict(_AXIS.findall(mesh))
    return math.prod(int(part or sizes[name]) for name, part in _AXIS.findall(axes))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the entry computation."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if start := _START.match(line):
            name = start[1]
            bodies[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _trips(condition: list[str]) -> int:
    """The trip count of a loop from the constant in its condition; 1 without a constant."""
    limits = [int(limit) for line in condition for limit in _LIMIT.findall(line)]
    return max(limits, default=1)


def _bytes(dtype: str, shape: str) -> int:
    bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
    return math.prod(int(size) for size in shape.split(",") if size) * bits // 8
