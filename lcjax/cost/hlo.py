"""Reads optimised HLO (`compiled.as_text()`): loops, copies of an argument, float32 products.

XLA writes one instruction per line, after its operands. The computations that run are the entry and
the bodies of loops, branches and calls; a fusion is one instruction of these computations. An
instruction in a loop counts once per iteration. The number of iterations is the compiler's, or the
constant that the loop's condition compares with, or else 1.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ARRAY = re.compile(r"\b(pred|[a-z]+\d+)(?:e\d\w+)?\[([\d,]*)\](?:\{([^}]*)\})?")
WHILE = re.compile(r" while\(.*condition=%?([\w.-]+), body=%?([\w.-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
CALLS = re.compile(r" (?:fusion|call|async-start)\(.*(?:calls|to_apply)=%?([\w.-]+)")
_START = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LIMIT = re.compile(r"s32\[\]\S* constant\((\d+)\)")
_NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w-]*)\(")
_OPERAND = re.compile(r"%([\w.-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TILE = re.compile(r"T\((\d+),(\d+)\)")
# Of a matrix product: contracted dimensions of its left operand, in HLO and in a call of cuBLAS.
_CONTRACTED = re.compile(
    r'lhs_contracting_dim(?:s=\{([\d,]*)\}|ensions":\[([\d",]*)\])',
)
_LIBRARY_PRODUCT = re.compile(r'custom_call_target="__(?:cublas|onednn|ynn)')
# Of a convolution: sizes, strides, padding and dilations of its window, and names of dimensions.
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
# Scopes of JAX and flax that name no part of a model.
_PLUMBING = re.compile(
    r"^(jit\([^)]*\)|Decoder[\w.]*|checkpoint|cond|while|body|branch_\d+_fun|closed_call|"
    r"rematted_computation)$"
)

# Operations whose result is the bytes of an operand, or a part of them.
_SAME = {
    *("bitcast", "reshape", "optimization-barrier", "copy-done", "async-done", "slice-start"),
    *("slice-done", "slice", "dynamic-slice", "dynamic-slice-start", "dynamic-slice-done"),
}
_IN_PLACE = {"dynamic-update-slice", "scatter"}  # update their first operand
_READS = {"dot", "convolution", "reduce", "reduce-window", "gather", "custom-call", "sort", "rng"}
_VMEM = re.compile(r"S\(1\)")  # the memory space of a TPU's vector memory in a layout


@dataclass(frozen=True)
class Copies:
    """Instructions that write a copy of an argument, in one run on one device."""

    count: int = 0
    bytes: int = 0  # written, including the padding of tiles
    staged: int = 0  # bytes moved between HBM and VMEM in the same layout: a read in advance
    names: tuple[str, ...] = ()  # scopes of the copies, most bytes first


class Module:
    """The computations of a module, and how often each runs."""

    def __init__(self, text: str):
        self.header = text.split("\n", 1)[0]
        self.lines: dict[str, list[str]] = {}
        name = self.entry = ""
        for line in text.splitlines():
            if start := _START.match(line):
                name = start[1]
                self.lines[name] = []
                self.entry = name if line.startswith("ENTRY") else self.entry
            elif name:
                self.lines[name].append(line)

    @functools.cache  # noqa: B019  a module lives as long as its report
    def shapes(self, name: str) -> dict[str, str]:
        """Returns the shapes of the results of a computation's instructions."""
        return {x.name: x.shape for x in self.instructions(name)}

    @functools.cache  # noqa: B019
    def instructions(self, name: str) -> list["Instruction"]:
        return [x for line in self.lines.get(name, ()) if (x := Instruction.parse(line))]

    def trips(self, line: str) -> int:
        """Returns the trip count of the loop in `line`; 1 if it is unknown."""
        if known := _TRIPS.search(line):
            return int(known[1])
        condition = self.lines.get(WHILE.search(line)[1], ())
        limits = [int(limit) for text in condition for limit in _LIMIT.findall(text)]
        return max(limits, default=1)

    def computations(self, name: str | None = None, times: int = 1) -> Iterator[tuple[str, int]]:
        """Yields (computation, number of its runs), without the computations of fusions."""
        name = name or self.entry
        yield name, times
        for x in self.instructions(name):
            if x.opcode == "while":
                body = WHILE.search(x.line)[2]
                yield from self.computations(body, times * self.trips(x.line))
            elif x.opcode == "conditional":
                for branch in x.branches:
                    yield from self.computations(branch, times)
            elif x.opcode in ("call", "async-start") and x.callee:
                yield from self.computations(x.callee, times)

    def runs(self) -> Iterator[tuple["Instruction", int]]:
        """Yields (instruction, number of its runs); a fusion is one instruction."""
        for name, times in self.computations():
            yield from ((x, times) for x in self.instructions(name))


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str  # of the result, as XLA writes it: `bf16[4,64]{1,0:T(8,128)}`, or a tuple
    opcode: str
    operands: tuple[str, ...]
    line: str

    @classmethod
    def parse(cls, line: str) -> "Instruction | None":
        start = _NAME.match(line)
        if start is None:
            return None
        begin = start.end()
        end = _closing(line, begin) if line[begin] == "(" else line.find(" ", begin)
        opcode = _OPCODE.match(line, end)
        if opcode is None:
            return None
        inside = line[opcode.end() - 1 : _closing(line, opcode.end() - 1)]
        operands = tuple(_OPERAND.findall(inside))
        return cls(start[1], line[begin:end], opcode[1], operands, line)

    @property
    def callee(self) -> str | None:
        match = CALLS.search(self.line)
        return match and match[1]

    @property
    def branches(self) -> list[str]:
        match = BRANCHES.search(self.line)
        if match is None:
            return re.findall(r"(?:true|false)_computation=%?([\w.-]+)", self.line)
        return [name.strip().lstrip("%") for name in match[1].split(",")]

    @property
    def scope(self) -> str:
        """The named scopes of the program in which it originates; all layers share one name."""
        match = _OP_NAME.search(self.line)
        parts = (match[1] if match else "").split(";")[0].split("/")
        scope = "/".join(part for part in parts if not _PLUMBING.match(part)) or self.name
        return re.sub(r"layers_\d+", "layers", scope)

    @property
    def dtype(self) -> str:
        match = ARRAY.search(self.shape)
        return match[1] if match else ""


def _closing(line: str, start: int) -> int:
    """Returns the index after the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(line)):
        depth += (line[index] == "(") - (line[index] == ")")
        if depth == 0:
            return index + 1
    return len(line)


def array_bytes(dtype: str, shape: str) -> int:
    """Returns the bytes of an array without padding."""
    bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
    return math.prod(int(size) for size in shape.split(",") if size) * bits // 8


def padded_bytes(shape: str) -> int:
    """Returns the bytes of the arrays of a shape, with the padding of their tiles (`T(8,128)`)."""
    total = 0
    for dtype, sizes, layout in ARRAY.findall(shape):
        dims = [int(size) for size in sizes.split(",") if size]
        order = [int(axis) for axis in layout.split(":")[0].split(",") if axis.isdigit()]
        if (tile := _TILE.search(layout)) and len(order) == len(dims) > 1:
            for axis, unit in zip(order, (int(tile[2]), int(tile[1]))):
                dims[axis] = -(-dims[axis] // unit) * unit
        total += array_bytes(dtype, ",".join(map(str, dims)))
    return total


def estimated_cycles(module: Module) -> int:
    """Sums libtpu's estimates of the cycles of its operations; it has none for Pallas kernels."""
    return sum(
        times * int(match[1]) for x, times in module.runs() if (match := _CYCLES.search(x.line))
    )


def kernels(module: Module) -> Counter[str]:
    """Counts calls of kernels whose FLOPs the compiler does not count (Pallas, libraries)."""
    targets = ("tpu_custom_call", "mosaic_gpu", "triton", "cudnn")
    counts = Counter()
    for x, times in module.runs():
        # libtpu fuses a kernel with the write of its result into a larger array.
        for part in module.instructions(x.callee) if x.opcode == "fusion" and x.callee else [x]:
            target = _TARGET.search(part.line) if part.opcode == "custom-call" else None
            if target and any(name in target[1] for name in targets):
                counts[part.name.rstrip("0123456789.")] += times
    return counts


def launches(module: Module) -> int:
    """Counts the fusions, calls of kernels and libraries, and copies that a GPU starts in a run.

    Each takes microseconds at least, which dominates the time of a decoding step of one row.
    """
    started = ("fusion", "custom-call", "copy")
    return sum(times for x, times in module.runs() if x.opcode in started)


def float32_products(module: Module) -> Counter[str]:
    """Counts matrix products of two float32 operands, by scope."""
    counts: Counter[str] = Counter()

    def visit(name: str, times: int) -> None:
        dtypes = {}
        for x in module.instructions(name):
            dtypes[x.name] = x.dtype
            if x.opcode in ("dot", "convolution"):
                if {dtypes.get(operand) for operand in x.operands[:2]} == {"f32"}:
                    counts[x.scope] += times
            elif x.opcode == "fusion" and x.callee:
                visit(x.callee, times)

    for name, times in module.computations():
        visit(name, times)
    return counts


def product_flops(module: Module) -> float:
    """Returns the FLOPs of all matrix products in one run, loops by their number of iterations.

    The compiler's own count (`cost_analysis`) has the body of a loop once. Kernels are not counted,
    and all branches of a conditional are.
    """
    total = 0.0

    def visit(name: str, times: int) -> None:
        nonlocal total
        shapes = module.shapes(name)
        for x in module.instructions(name):
            if x.opcode == "fusion" and x.callee:
                visit(x.callee, times)
            elif x.opcode == "convolution":
                total += times * _convolution_flops(x, shapes)
            elif x.opcode == "dot" or _LIBRARY_PRODUCT.search(x.line):
                total += times * _dot_flops(x, shapes)

    for name, times in module.computations():
        visit(name, times)
    return total


def _sizes(shape: str) -> list[int]:
    """Returns the dimensions of the first array of a shape."""
    return [int(size) for size in ARRAY.search(shape)[2].split(",") if size]


def _dot_flops(x: Instruction, shapes: dict[str, str]) -> float:
    left, contracted = _sizes(shapes[x.operands[0]]), _CONTRACTED.search(x.line)
    axes = re.findall(r"\d+", contracted[1] or contracted[2] or "")
    return 2.0 * math.prod(_sizes(x.shape)) * math.prod(left[int(axis)] for axis in axes)


def _convolution_flops(x: Instruction, shapes: dict[str, str]) -> float:
    """Returns the FLOPs of a convolution, as which libtpu writes products; padding has none."""
    of_input, of_kernel, of_output = (
        dict(zip(labels, _sizes(shape), strict=True))
        for labels, shape in zip(
            _DIM_LABELS.search(x.line).groups(), (*map(shapes.get, x.operands[:2]), x.shape)
        )
    )
    match = _WINDOW.search(x.line)
    window = dict(re.findall(r"(\w+)=(\S+)", match[1] if match else ""))

    def settings(name: str, axis: int, default: str) -> list[int]:
        parts = window.get(name, "").split("x")
        return [int(n) for n in (parts[axis] if parts[0] else default).split("_")]

    total = 2.0 * of_output["b"] * of_output["f"] * of_kernel["i"]
    for axis in range(sum(label.isdigit() for label in of_kernel)):
        label = str(axis)
        (stride,), (low, *_) = settings("stride", axis, "1"), settings("pad", axis, "0_0")
        (dilation,) = settings("lhs_dilate", axis, "1")
        (spread,) = settings("rhs_dilate", axis, "1")
        outputs, taps = range(of_output[label]), range(of_kernel[label])
        last = (of_input[label] - 1) * dilation
        places = (o * stride + w * spread - low for o in outputs for w in taps)
        total *= sum(0 <= place <= last and place % dilation == 0 for place in places)
    return total


# The part of the argument in an instruction's result: nothing, its bytes as they are, or (inside a
# fusion) bytes that were converted or moved. A list holds the values of a tuple's entries.
_NOTHING, _KEPT, _MOVED = 0, 1, 2


def has_argument(module: Module, argument: str) -> bool:
    """Returns whether the jitted call has arguments whose paths start with `argument`."""
    return any(_is_argument(x, argument) for x in module.instructions(module.entry))


def _is_argument(x: Instruction, argument: str) -> bool:
    path = _OP_NAME.search(x.line)
    return x.opcode == "parameter" and path is not None and path[1].startswith(argument)


def copies(module: Module, argument: str) -> Copies:
    """Finds instructions that write a copy of an argument: in another layout, dtype or buffer.

    It follows the argument from the entry through loops, calls and fusions. Updates in place,
    slices, and reads by products and kernels are not copies.

    Args:
      module: the optimised module.
      argument: the start of the argument's path in the jitted call, such as `cache.layers`.
    """
    return _CopyCount(module, argument).result()


class _CopyCount:
    def __init__(self, module: Module, argument: str):
        self.module, self.argument = module, argument
        self.count = self.staged = 0
        self.by_scope: Counter[str] = Counter()

    def result(self) -> Copies:
        parameters = {
            _parameter(x): _KEPT
            for x in self.module.instructions(self.module.entry)
            if _is_argument(x, self.argument)
        }
        self._run(self.module.entry, parameters, 1, counted=True)
        names = tuple(name for name, _ in self.by_scope.most_common())
        return Copies(self.count, self.by_scope.total(), self.staged, names)

    def _run(self, name: str, parameters: dict[int, Any], times: int, *, counted: bool) -> Any:
        """Follows a computation from its parameters; returns the value of its result."""
        values: dict[str, Any] = {}
        value: Any = _NOTHING
        for x in self.module.instructions(name):
            operands = [values.get(operand, _NOTHING) for operand in x.operands]
            value = self._value(x, operands, parameters, times, counted)
            values[x.name] = value
        return value  # of the root, which is the last instruction

    def _value(
        self, x: Instruction, operands: list, parameters: dict, times: int, counted: bool
    ) -> Any:
        if x.opcode == "parameter":
            return parameters.get(_parameter(x), _NOTHING)
        if not any(map(_any, operands)):
            return _NOTHING
        if x.opcode == "tuple":
            return operands
        if x.opcode == "get-tuple-element":
            index = int(re.search(r"index=(\d+)", x.line)[1])
            first = operands[0]
            return first[index] if isinstance(first, list) else first
        if x.opcode in _SAME or x.opcode.endswith("-done"):
            return _any(operands[0])
        if x.opcode in _IN_PLACE:
            return operands[0]
        if x.opcode == "custom-call" and "ConcatBitcast" in x.line:
            return _KEPT  # joins adjacent slices without moving them
        if x.opcode in _READS:
            return _NOTHING
        if x.opcode == "while":
            body_times = self.module.trips(x.line) * times
            result = self._run(
                WHILE.search(x.line)[2], dict(enumerate(operands)), body_times, counted=counted
            )
            return (
                [max(_any(a), _any(b)) for a, b in zip(result, operands[0])]
                if isinstance(result, list) and isinstance(operands[0], list)
                else result
            )
        if x.opcode == "conditional":
            return max(
                (
                    self._run(branch, {0: operand}, times, counted=counted)
                    for branch, operand in zip(x.branches, operands[1:])
                ),
                key=_any,
            )
        if x.opcode in ("call", "async-start") and x.callee:
            return self._run(x.callee, dict(enumerate(operands)), times, counted=counted)
        if x.opcode == "fusion" and x.callee:
            result = self._run(x.callee, dict(enumerate(operands)), times, counted=False)
            if counted and _any(result) == _MOVED:
                self._add(x, times, result)
            return _each(result, lambda has: has and (_KEPT if counted else has))
        if x.opcode == "copy-start" and _is_staging(x.shape):
            self.staged += counted * times * _first_bytes(x.shape)
            return _KEPT
        if counted:
            self._add(x, times, _MOVED)
            return _KEPT
        return _MOVED

    def _add(self, x: Instruction, times: int, after: Any) -> None:
        self.count += times
        size = _first_bytes(x.shape)
        if isinstance(after, list):
            shapes = [match[0] for match in ARRAY.finditer(x.shape)]
            size = sum(padded_bytes(s) for s, has in zip(shapes, after) if _any(has) == _MOVED)
        self.by_scope[x.scope] += times * size


def _parameter(x: Instruction) -> int:
    return int(re.search(r" parameter\((\d+)\)", x.line)[1])


def _any(value: Any) -> int:
    """Returns the largest of a value, or of the values of a tuple's entries."""
    return max(map(_any, value), default=_NOTHING) if isinstance(value, list) else value


def _each(value: Any, change) -> Any:
    return [_each(item, change) for item in value] if isinstance(value, list) else change(value)


def _first_bytes(shape: str) -> int:
    """Returns the bytes of the first array of a shape; it is the result of a `copy-start`."""
    return padded_bytes(ARRAY.search(shape)[0])


def _is_staging(shape: str) -> bool:
    """Returns whether a copy goes from HBM to VMEM, or back, and keeps the layout."""
    layouts = [match[3] or "" for match in ARRAY.finditer(shape)][:2]
    spaces = [bool(_VMEM.search(layout)) for layout in layouts]
    return spaces[0] != spaces[1] and len({_VMEM.sub("", layout) for layout in layouts}) == 1
