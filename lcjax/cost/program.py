"""The result of compiling a program: its memory, whether it fits into a chip, and its collectives.

XLA's counts include the body of a loop once. Here a collective in a loop is multiplied by the trip
count (`lcjax.cost.hlo`). All branches of a conditional are counted.

The bytes of a collective are those that a device receives when n devices pass parts around a ring,
which is the minimum. For a result of r bytes these are r (n - 1) / n in an all-gather or
all-to-all, twice that in an all-reduce, and r (n - 1) in a reduce-scatter, whose result is a part.

Other work overlaps a collective if the compiler schedules it between the collective's start and
its end, or fuses both. A device waits for any other collective.

Devices may be in several slices. A program for GPUs is one program for all of them, and the groups
of a collective show what it sends between slices. libtpu compiles the program of one slice: its
collectives stay within the slice, and what passes the data-center network are receives, which name
the collective that they are a part of. Between slices as few bytes are counted as possible: those
that a slice needs from others, shared by its devices in a group.

Copies between a device and the memory of its host (`model.remat=offload`, `train.offload`) overlap
with other work by the same rule.
"""

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from lcjax.cost import hlo
from lcjax.cost.chips import Chip
from lcjax.cost.hlo import ARRAY, BRANCHES, CALLS, WHILE
from lcjax.parallel.sharding import slice_of

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# The compiler's two messages: for the whole program, or for its temporaries alone.
_NEEDED = re.compile(
    r"Ran out of memory.*?(?:Used |temporaries \()([\d.]+)([KMGT]?)(?: of|\) exceeds)", re.DOTALL
)

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_WORK = re.compile(r" (?:fusion|custom-call|convolution|dot|while|conditional|call)\(")
_PRODUCT = re.compile(r" (?:convolution|dot)\(")
# The fusions of a collective have one channel; libtpu numbers them by chain where channels repeat.
_CHANNEL = re.compile(r'\b(?:channel_id=|chain_id=")\d+')
# The devices of all groups: of [8] or [2,4]T(1,0), the order in which an array of that shape lies.
_ORDER = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_GROUPS = re.compile(
    r"(?:replica_groups=|num_partitions=)"
    rf"(?:\{{\{{([\d,]*)\}}|\[\d+,(\d+)\]<={_ORDER}|(\d+)|"
    rf"mesh\[([^]]*)\](?:, device_ids=\((?:{_ORDER}|([\d,]+))\))? \{{(.*?)\}})"
)
# A mesh axis with its size, 'x'=8, or the part of size 4 that follows one of size 2: 'x':(2)4.
_AXIS = re.compile(r"'(\w+)'(?:(?:=|:\((\d+)\))(\d+))?")
# What may copy an array from or to the memory of the host, which has the memory space 5.
_COPY = re.compile(r"= (.*?) (copy|fusion|slice|dynamic-slice|dynamic-update-slice)(-start)?\(")
_HOST = "S(5)"
# What a slice of TPUs receives from others: the devices, and the kind of collective.
_RECEIVED = re.compile(r"= \((.*?), u32\[\].*? (recv)()\(.*_xla_megascale_target=")
_BETWEEN = re.compile(r'_xla_megascale_target="?\{([\d,]+|\{[^}]*)\}.*_transfer_type="(\w+)"')
_SLICE_IDS = 100_000  # libtpu numbers the devices of slice n from n times this number
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")
_PAIR = re.compile(r"(\d+),(\d+)")
_SCATTER = "all-reduce-scatter"  # libtpu's all-reduce fusions that keep a part of the sum


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind, or the copies, of one device in one run of the program."""

    count: int
    bytes: int  # received, or copied
    overlapped: int = 0  # how many of `count` overlap with other work


@dataclass(frozen=True)
class ProgramCost:
    """Memory and traffic of a program in bytes, on one device in one run."""

    chip: Chip
    peak_memory: float  # bytes
    seconds: float  # of compiling
    arguments: int = 0
    outputs: int = 0
    in_place: int = 0  # outputs that reuse the memory of arguments
    temporaries: int = 0
    program: int = 0  # generated code
    # Read and written, the body of a loop counted once; 0 if the compiler does not report it.
    accessed: float = 0.0
    flops: float = 0.0  # likewise; kernels have none
    optimal_seconds: float | None = None  # the compiler's estimate; None: it has none
    traffic: dict[str, Traffic] = field(default_factory=dict)
    between: Traffic = Traffic(0, 0)  # what devices of other slices send
    host: int = 0  # in the memory of the device's host
    host_copies: Traffic = Traffic(0, 0)  # from and to that memory
    out_of_memory: bool = False  # the compiler ran out of memory
    text: str = field(default="", repr=False)  # the optimised HLO

    @property
    def fits(self) -> bool:
        return not self.out_of_memory and self.peak_memory <= self.chip.usable

    @property
    def within(self) -> int:
        """Bytes that a device receives over the links of its slice."""
        received = sum(traffic.bytes for traffic in self.traffic.values())
        return received if self.chip.dimensions else received - self.between.bytes


def program_cost(
    lowered: jax.stages.Lowered, chip: Chip, mesh: jax.sharding.Mesh | None = None
) -> ProgramCost:
    """Compiles a program for `chip`; if it is too large, `out_of_memory` of the result is true.

    Args:
      lowered: the program.
      chip: the devices.
      mesh: of the program, if its devices are in several slices.

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
        return ProgramCost(chip, needed, time.perf_counter() - start, out_of_memory=True)
    seconds, usage = time.perf_counter() - start, compiled.memory_analysis()
    analysis, text = compiled.cost_analysis() or {}, compiled.as_text()
    optimal = analysis.get("optimal_seconds", -1.0)
    sizes = {
        "arguments": usage.argument_size_in_bytes,
        "outputs": usage.output_size_in_bytes,
        "in_place": usage.alias_size_in_bytes,
        "temporaries": usage.temp_size_in_bytes,
        "program": usage.generated_code_size_in_bytes,
    }
    return ProgramCost(
        chip,
        sum(sizes.values()) - 2 * sizes["in_place"],
        seconds,
        **sizes,
        host=usage.host_argument_size_in_bytes
        + usage.host_output_size_in_bytes
        + usage.host_temp_size_in_bytes
        - usage.host_alias_size_in_bytes,
        accessed=analysis.get("bytes accessed", 0.0),
        flops=max(analysis.get("flops", 0.0), 0.0),
        # XLA adds -1 or less for operations without an estimate, such as kernels.
        optimal_seconds=optimal if optimal > 0 else None,
        traffic=collectives(text),
        host_copies=host_copies(text),
        between=between_slices(text, [] if mesh is None else map(slice_of, mesh.devices.flat)),
        text=text,
    )


class _Collective(NamedTuple):
    match: re.Match  # of its line
    computation: str
    times: int  # how often it runs
    overlapped: bool


def collectives(text: str) -> dict[str, Traffic]:
    """Counts collectives by kind in the text of an optimised HLO module (`compiled.as_text()`)."""
    module = hlo.Module(text)
    num_devices = _group(module.header) or 1
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for match, computation, times, overlapped in _walk(module):
        kind, received = _received(match, _group(match.string) or num_devices, computation)
        if received:
            added = times, times * received, times * overlapped
            totals[kind] = [a + b for a, b in zip(totals[kind], added, strict=True)]
    return {kind: Traffic(*totals[kind]) for kind in KINDS if kind in totals}


def between_slices(text: str, slices: Iterable[int] = ()) -> Traffic:
    """Counts what a device receives from other slices, in all collectives of a module.

    Args:
      text: the optimised HLO.
      slices: number of the slice of each device of the program, in the order of its mesh. libtpu's
        programs do not need it.
    """
    module, slices, totals = hlo.Module(text), [*slices], [0, 0, 0]

    def add(times, size, overlapped):
        for i, count in enumerate((times, times * math.ceil(size), times * overlapped)):
            totals[i] += count if size else 0

    for match, _, times, overlapped in _walk(module, _RECEIVED):
        size = sum(hlo.array_bytes(*array[:2]) for array in ARRAY.findall(match[1]))
        devices, transfer = _BETWEEN.search(match.string).groups()
        kind = transfer.lower().replace("_", "-")
        add(times, _from_others(kind, size, _num_slices(devices)), overlapped)
    if len({*slices}) > 1:
        for match, computation, times, overlapped in _walk(module):
            if match[2] == "collective-permute":
                pairs = _PAIR.findall((_PAIRS.search(match.string) or ("", ""))[1])
                crosses = any(slices[int(a)] != slices[int(b)] for a, b in pairs)
                add(times, crosses * _received(match, 0, computation)[1], overlapped)
                continue
            group = _members(match.string) or [*range(len(slices))]
            places = Counter(slices[device] for device in group)
            kind, size = _result(match, computation)
            # The devices of a slice share what it needs; these results are different for each.
            shared = 1 if kind in ("all-to-all", "reduce-scatter") else max(places.values())
            add(times, _from_others(kind, size / shared, len(places)), overlapped)
    return Traffic(*totals)


def host_copies(text: str) -> Traffic:
    """Counts copies between a device and its host in the text of an optimised HLO module."""
    module, totals = hlo.Module(text), [0, 0, 0]
    for match, computation, times, overlapped in _walk(module, _COPY, has_channels=False):
        x = hlo.Instruction.parse(match.string)
        shapes = [x.shape]
        if not match[3]:  # else the shape of the result has those of the operands
            operands = filter(None, map(module.shapes(computation).get, x.operands))
            shapes += [shape for shape in operands if (_HOST in shape) != (_HOST in x.shape)]
        if not any(_HOST in shape for shape in shapes) or (len(shapes) == 1 and not match[3]):
            continue  # nothing in the memory of the host, or all of it
        arrays = ARRAY.findall(" ".join(shapes))
        # The part that moves is the smallest of the arrays; scalars say where it is.
        size = min((hlo.array_bytes(*array[:2]) for array in arrays if array[1]), default=0)
        for i, count in enumerate((times, times * size, times * overlapped)):
            totals[i] += count
    return Traffic(*totals)


def _from_others(kind: str, size: float, slices: int) -> float:
    """Returns the bytes that a device receives from other slices for a result of `size` bytes."""
    if kind not in (*KINDS, "fused") or kind == "collective-permute":  # from device to device
        return size
    parts = {"all-reduce": 2 / slices, "reduce-scatter": 1}
    return size * parts.get(kind, 1 / slices) * (slices - 1)


def _num_slices(devices: str) -> int:
    """Returns the number of slices in libtpu's `1,2` (slices) or `{100000,200000` (devices)."""
    numbers = [int(x) for x in re.findall(r"\d+", devices)]
    return len({x // _SLICE_IDS if devices.startswith("{") else x for x in numbers})


def permuted_bytes(text: str) -> dict[tuple[int, int], int]:
    """Counts the bytes that collective-permutes send, by (sender, receiver).

    They are the messages of a ring; other collectives have no pairs. Senders and receivers are
    indices into the devices of the program, which have the order of its mesh.
    """
    totals: dict[tuple[int, int], int] = defaultdict(int)
    for match, computation, times, _ in _walk(hlo.Module(text)):
        pairs = _PAIRS.search(match.string)
        if pairs and match[2] == "collective-permute":
            size = times * _received(match, 0, computation)[1]
            for source, target in _PAIR.findall(pairs[1]):
                if source != target:
                    totals[int(source), int(target)] += size
    return dict(totals)


def _walk(
    module: hlo.Module, pattern: re.Pattern = _COLLECTIVE, *, has_channels: bool = True
) -> Iterator[_Collective]:
    """Yields the instructions that match `pattern`, with groups as those of `_COLLECTIVE`.

    Those of one channel in a fusion or call count once; False: they have no channels.
    """
    bodies = module.lines

    def walk(name: str, times: int, seen: set | None, overlapped: bool) -> Iterator[_Collective]:
        """`seen`: channels counted in the caller of a fusion or call; None: not called by one."""
        lines, channels = bodies.get(name, ()), set()
        repeated = _repeated_channels(module, lines)
        for index, line in enumerate(lines):
            if match := pattern.search(line):
                channel = match[2], _channel(line)
                # Fusions that overlap a collective with work repeat it at its start and its end.
                if has_channels and seen is not None and channel in seen:
                    continue
                if seen is not None:
                    seen.add(channel)
                is_started = bool(match[3]) or match[2] == "recv"
                during = is_started and _works_until_done(lines, index)
                yield _Collective(match, name, times, overlapped or during)
            elif match := WHILE.search(line):
                yield from walk(match[2], times * module.trips(line), None, False)
            elif match := BRANCHES.search(line):
                for branch in match[1].split(","):
                    yield from walk(branch.strip().lstrip("%"), times, None, False)
            elif match := CALLS.search(line):
                callee, part = match[1], channels if seen is None else seen
                during = overlapped or _works(module, callee)
                during |= any(channel in repeated for channel in _channels(module, callee))
                during |= " async-start(" in line and _works_until_done(lines, index)
                yield from walk(callee, times, part, during)

    yield from walk(module.entry, 1, None, False)


def _works_until_done(lines: list[str], start: int) -> bool:
    """Returns whether anything is computed between the start of an operation and its end."""
    name = f"%{lines[start].split(' = ')[0].replace('ROOT', '').strip().lstrip('%')}"
    for line in lines[start + 1 :]:
        if re.search(rf"-done\({re.escape(name)}\)", line):
            return False
        if _WORK.search(line):
            return True
    return False


def _works(module: hlo.Module, fusion: str) -> bool:
    """Returns whether a fusion multiplies matrices, besides running a collective."""
    lines = module.lines.get(fusion, ())
    callees = (match[1] for line in lines if (match := CALLS.search(line)))
    return any(map(_PRODUCT.search, lines)) or any(_works(module, name) for name in callees)


def _channels(module: hlo.Module, computation: str) -> set[str]:
    """Returns the channels of the collectives in a fusion."""
    channels = set()
    for line in module.lines.get(computation, ()):
        if _COLLECTIVE.search(line) and (channel := _channel(line)):
            channels.add(channel)
        elif match := CALLS.search(line):
            channels |= _channels(module, match[1])
    return channels


def _channel(line: str) -> str:
    """Returns what the fusions of a collective share: its channel, and its chain if it has one."""
    return " ".join(_CHANNEL.findall(line))


def _repeated_channels(module: hlo.Module, lines: list[str]) -> set[str]:
    """Returns the channels that occur in several fusions of a computation."""
    callees = (match[1] for line in lines if (match := CALLS.search(line)))
    counts = Counter(channel for name in callees for channel in _channels(module, name))
    return {channel for channel, count in counts.items() if count > 1}


def _received(match: re.Match, devices: int, computation: str) -> tuple[str, int]:
    """Returns (kind, bytes that a device receives) of a collective over `devices` devices."""
    kind, size = _result(match, computation)
    if kind == "collective-permute":
        return kind, size
    if kind == "reduce-scatter":
        return kind, size * (devices - 1)
    if kind == "fused":  # the whole sum, of which a device keeps a part
        return "reduce-scatter", size * (devices - 1) // devices
    return kind, (2 if kind == "all-reduce" else 1) * (size * (devices - 1) // devices)


def _result(match: re.Match, computation: str) -> tuple[str, int]:
    """Returns (kind, bytes of the result) of a collective."""
    shape, kind, started = match.groups()
    arrays = [array[:2] for array in ARRAY.findall(shape)]
    if started and kind == "collective-permute":
        arrays = [array for array in arrays if array != ("u32", "")]  # counters
    sizes = [hlo.array_bytes(*array) for array in arrays]
    if started and kind != "all-reduce":
        sizes = sizes[len(sizes) // 2 :]  # a start op lists its operands before its results
    fused = kind == "all-reduce" and computation.startswith(_SCATTER)
    return "fused" if fused else kind, sum(sizes)


def _group(line: str) -> int:
    """Returns the number of devices in a group; 0 if the line names none."""
    return len(_members(line))


def _members(line: str) -> list[int]:
    """Returns the devices of the first group, as indices into those of the program; []: none."""
    match = _GROUPS.search(line)
    if match is None:
        return []
    listed, size, sizes, order, count, mesh, mesh_sizes, mesh_order, ids, axes = match.groups()
    if listed is not None:
        return [int(device) for device in listed.split(",") if device]
    if count is not None:
        return [*range(int(count))]
    if mesh is None:
        return _in_order(sizes, order)[: int(size)]
    axis_sizes = {name: int(n) for name, _, n in _AXIS.findall(mesh)}
    members, stride = [0], math.prod(axis_sizes.values())
    parts = {name: (before, part) for name, before, part in _AXIS.findall(axes)}
    for name, axis_size in axis_sizes.items():
        stride //= axis_size
        before, part = parts.get(name, ("", "1"))
        number = int(part or axis_size)
        step = stride * (axis_size // (int(before or 1) * number)) if name in parts else 0
        members = [member + step * i for member in members for i in range(number)]
    devices = [*map(int, ids.split(","))] if ids else None
    devices = _in_order(mesh_sizes, mesh_order) if mesh_sizes else devices
    return [devices[member] for member in members] if devices else members


def _in_order(sizes: str, order: str | None) -> list[int]:
    """Returns the devices in the order of `[2,4]T(1,0)`: of an array [2, 4], transposed."""
    shape = [int(size) for size in sizes.split(",")]
    axes = range(len(shape)) if order is None else map(int, order.split(","))
    return np.arange(math.prod(shape)).reshape(shape).transpose(*axes).reshape(-1).tolist()
