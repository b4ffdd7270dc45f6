"""What the devices of a compiled program send each other, read from the program's text.

XLA's own counts take the body of a loop once. Here each collective counts as often as it runs:
loops are multiplied out where the compiler knows how often they run or their condition compares
with a constant, branches count as if all ran.
Bytes are those that a device receives where n devices pass parts round a ring, which is the least
that they can: of a result of r bytes r (n - 1) / n for an all-gather, twice that for an all-reduce,
and r (n - 1) for a reduce-scatter, whose result is a part.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass

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
_SCATTER = "all-reduce-scatter"  # libtpu's fusions that leave each device its part of a sum
_CALLS = re.compile(r" (?:fusion|call|async-start)\(.*(?:calls|to_apply)=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LIMIT = re.compile(r"s32\[\]\S* constant\((\d+)\)")


@dataclass(frozen=True)
class Traffic:
    """Of one kind of collective, on one device, in one run of the program."""

    count: int
    bytes: int  # received


def collectives(text: str) -> dict[str, Traffic]:
    """By kind, from the text of an optimised HLO module (`compiled.as_text()`)."""
    bodies, entry = _computations(text)
    everyone = _group(text.split("\n", 1)[0]) or 1
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def walk(name: str, times: int, seen: set | None) -> None:
        """`seen`: channels of the caller where `name` is a part of it; None where it runs alone."""
        own: set = set()
        for line in bodies.get(name, ()):
            if match := _COLLECTIVE.search(line):
                channel = match[2], (_CHANNEL.search(line) or [""])[0]
                # Fusions that overlap a collective with work repeat it at its start and its end.
                if seen is not None and channel in seen:
                    continue
                if seen is not None:
                    seen.add(channel)
                kind, received = _received(match, _group(line) or everyone, name)
                if received:
                    found[kind][0] += times
                    found[kind][1] += times * received
            elif match := _WHILE.search(line):
                known = _TRIPS.search(line)
                trips = int(known[1]) if known else _trips(bodies.get(match[1], ()))
                walk(match[2], times * trips, None)
            elif match := _BRANCHES.search(line):
                for branch in match[1].split(","):
                    walk(branch.strip().lstrip("%"), times, None)
            elif match := _CALLS.search(line):
                walk(match[1], times, own if seen is None else seen)

    walk(entry, 1, None)
    return {kind: Traffic(*found[kind]) for kind in KINDS if kind in found}


def _received(match: re.Match, devices: int, computation: str) -> tuple[str, int]:
    """(kind, bytes that a device receives) of a collective of `devices` in a computation."""
    shape, kind, started = match.groups()
    sizes = [_bytes(*array) for array in _ARRAY.findall(shape)]
    if started and kind != "all-reduce":
        # What starts names its operands before its results, and counters after them.
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
    """Devices that take part together; 0 where none are named."""
    match = _GROUPS.search(line)
    if match is None:
        return 0
    listed, size, mesh, axes, count = match.groups()
    if mesh is None:
        return len(listed.split(",")) if listed is not None else int(size or count)
    sizes = dict(_AXIS.findall(mesh))
    return math.prod(int(part or sizes[name]) for name, part in _AXIS.findall(axes))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the one that is run."""
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
    """How often a loop runs that counts to a constant; 1 where none stands in its condition."""
    limits = [int(limit) for line in condition for limit in _LIMIT.findall(line)]
    return max(limits, default=1)


def _bytes(dtype: str, shape: str) -> int:
    bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
    return math.prod(int(size) for size in shape.split(",") if size) * bits // 8
