"""What the threads of a warpgroup compute: instructions that change nothing but registers."""

from __future__ import annotations

import ml_dtypes
import numpy as np

THREADS = 128  # of a warpgroup
LANE, WARP = np.arange(THREADS) % 32, np.arange(THREADS) // 32
TYPES = {
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32, "b64": np.uint64,
    "u64": np.uint64, "s64": np.int64, "u16": np.uint16, "s16": np.int16, "pred": np.bool_,
}  # fmt: skip
HALVES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "neu": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
FLOATS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative,
    "max": np.fmax, "min": np.fmin, "maxNaN": np.maximum, "minNaN": np.minimum, "abs": np.abs,
    "ex2": np.exp2, "lg2": np.log2, "tanh": np.tanh, "rcp": lambda x: np.float32(1) / x,
    "fma": lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32),
}  # fmt: skip
ROUNDINGS = {"rn", "approx", "ftz", "full", "NaN"}  # what they change is below float32's precision
WHOLES = {
    "add": np.add, "sub": np.subtract, "max": np.maximum, "min": np.minimum, "neg": np.negative,
    "abs": np.abs, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": np.bitwise_not,
}  # fmt: skip


class Fault(Exception):
    """What the kernel may not do, or the emulator does not know."""


class Registers:
    """Values of the registers of 128 threads."""

    def __init__(self, special: dict[str, np.ndarray]):
        self.values = dict(special)

    def read(self, operand: str, kind: str) -> np.ndarray:
        """A register or a number, as an array of a type of TYPES."""
        dtype = np.dtype(TYPES[kind])
        if operand in self.values:
            value = self.values[operand]
        elif operand.startswith("0f"):
            value = np.full(THREADS, int(operand[2:], 16), np.uint32)
        else:
            value = np.full(THREADS, int(operand, 0) & (2**64 - 1), np.uint64)
        if dtype.kind == "f":
            return value.astype(np.uint32).view(np.float32)
        return value.astype(dtype)

    def write(self, name: str, value, where: np.ndarray | None = None) -> None:
        if name == "_":
            return
        value = np.broadcast_to(value, (THREADS,))
        if value.dtype != bool:
            unsigned = value.view(f"u{value.dtype.itemsize}")
            value = unsigned.astype(np.uint64 if name.startswith("%rd") else np.uint32)
        if where is not None and not where.all():
            value = np.where(where, value, self.values.get(name, np.zeros_like(value)))
        self.values[name] = value.copy()


def uniform(values: np.ndarray) -> int:
    """The one value that all threads have."""
    if not (values == values[0]).all():
        raise Fault("the threads of a warpgroup differ where they must not")
    return int(values[0])


def compute(words, operands, read) -> np.ndarray | None:
    """The result of an instruction on registers; None: it is none that is known here."""
    name, kind = words[0], words[-1]
    with np.errstate(all="ignore"):
        if name == "setp":
            return _compared(words[1:-1], kind, operands, read)
        if name == "selp":
            return np.where(read(operands[3], "pred"), *(read(x, kind) for x in operands[1:3]))
        if name in ("mov", "cvta"):
            return read(operands[1], kind)
        if name == "cvt":
            return _converted(words, operands, read)
        if kind == "f32" and name in FLOATS and ROUNDINGS.issuperset(words[1:-1]):
            function = FLOATS[f"{name}NaN" if "NaN" in words else name]
            return function(*(read(x, "f32") for x in operands[1:]))
        if kind in TYPES and (len(words) == 2 or name in ("mul", "mad")):
            return _whole(name, words[1], kind, operands, read)
    return None


def _compared(how, kind: str, operands, read):
    found = COMPARISONS[how[0]](read(operands[1], kind), read(operands[2], kind))
    if len(how) == 1:
        return found
    return WHOLES[how[1]](found, read(operands[3], "pred")) if how[1] in ("and", "or") else None


def _converted(words, operands, read):
    if words[1] == "rn" and words[2] in ("bf16x2", "f16x2"):
        dtype = HALVES[words[2].removesuffix("x2")]
        high, low = (
            read(x, "f32").astype(dtype).view(np.uint16).astype(np.uint32) for x in operands[1:3]
        )
        return (high << 16) | low
    if words[1:] == ("rn", "f32", "s32"):
        return read(operands[1], "s32").astype(np.float32)
    if len(words) == 3 and words[1] in TYPES and "f32" not in words:
        return read(operands[1], words[2]).astype(TYPES[words[1]])
    return None


def _whole(name: str, how: str, kind: str, operands, read):
    """Whole numbers and predicates."""
    first = read(operands[1], kind)
    if name in ("mul", "mad"):
        return _product(name, how, kind, operands, read)
    if name in ("shl", "shr"):
        count, bits = read(operands[2], "u32"), 8 * first.dtype.itemsize
        shift = np.left_shift if name == "shl" else np.right_shift
        moved = shift(first, np.minimum(count, bits - 1).astype(first.dtype))
        empty = (count >= bits) & (name == "shl" or first.dtype.kind == "u")
        return np.where(empty, first.dtype.type(0), moved)
    if name == "bfe":
        start, width = (first.dtype.type(int(x)) for x in operands[2:])
        field = (first >> start) & first.dtype.type((1 << int(width)) - 1)
        negative = (first.dtype.kind == "i") & ((field >> first.dtype.type(int(width) - 1)) & 1)
        return np.where(negative, field - first.dtype.type(1 << int(width)), field)
    if name in ("div", "rem"):
        second = read(operands[2], kind)
        quotient = np.trunc(first.astype(np.longdouble) / second).astype(first.dtype)
        return quotient if name == "div" else first - quotient * second
    if name in WHOLES:
        return WHOLES[name](first, *(read(x, kind) for x in operands[2:]))
    return None


def _product(name: str, how: str, kind: str, operands, read):
    wide = {"u32": "u64", "s32": "s64"}.get(kind, kind)
    if how == "lo":
        product = read(operands[1], kind) * read(operands[2], kind)
        return product + read(operands[3], kind) if name == "mad" else product
    product = read(operands[1], kind).astype(TYPES[wide]) * read(operands[2], kind)
    if how == "wide":
        return product + read(operands[3], wide) if name == "mad" else product
    if how == "hi" and wide != kind:
        return (product >> product.dtype.type(32)).astype(TYPES[kind])
    return None
