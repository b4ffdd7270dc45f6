"""The text of a kernel, as a list of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

# Blocks of inline assembly with labels and predicates of their own, as one instruction each.
WAIT = re.compile(
    r"\{\s*\.reg \.pred\s+P1;\s*LAB_WAIT:\s*mbarrier\.try_wait\.parity\.shared\.b64 "
    r"P1, ([^,]+), ([^,]+), [^;]+;\s*@P1 bra\.uni DONE;\s*bra\.uni\s+LAB_WAIT;\s*DONE:\s*\}"
)
PRODUCT = re.compile(
    r"\{\s*\.reg \.pred p;\s*setp\.ne\.b32 p, ([^,]+), 0;\s*(wgmma\.mma_async\S+) ([^;]*);\s*\}"
)


class Instruction(NamedTuple):
    """One instruction; it is done where the predicate `guard` has the value `wanted`."""

    guard: str | None
    wanted: bool
    words: tuple[str, ...]  # of its name: ("setp", "lt", "s32")
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{'.'.join(self.words)} {', '.join(self.operands)}"


@dataclass(frozen=True)
class Program:
    """A kernel; a label is the place of the instruction behind it."""

    name: str
    threads: int
    code: list[Instruction]
    labels: dict[str, int]


def parse(text: str, without: str = "") -> Program:
    """The one kernel of a file; instructions whose name starts with `without` are left out."""
    text = text[text.index(".entry") :]
    name, threads = re.match(r"\.entry (\w+)", text)[1], re.search(r"\.maxntid (\d+)", text)[1]
    body = re.sub(r"//.*|^\s*\.loc\s.*$", "", text[text.index("{") + 1 :], flags=re.M)
    body = WAIT.sub(r"wait \1, \2;", body)
    body = PRODUCT.sub(r"\2 \1, \3;", body)
    code, labels = [], {}
    for piece in re.split(r"(;|\$L__\w+:)", body[: body.index("$L__func_end")]):
        line = " ".join(piece.split())
        if line.startswith("$L__"):
            labels[line[:-1]] = len(code)
        elif line and not line.startswith((";", ".", "}")):
            one = _instruction(line)
            if not without or not ".".join(one.words).startswith(without):
                code.append(one)
    return Program(name, int(threads), code, labels)


def _instruction(line: str) -> Instruction:
    guard, wanted = None, True
    if line.startswith("@"):
        guard, line = line[1:].split(" ", 1)
        wanted, guard = not guard.startswith("!"), guard.lstrip("!")
    name, _, rest = line.partition(" ")
    return Instruction(guard, wanted, tuple(name.split(".")), operands(rest))


def operands(text: str) -> tuple[str, ...]:
    """What stands between the commas that are in no brackets."""
    found, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            found.append(text[start:i].strip())
            start = i + 1
    return (*found, text[start:].strip()) if text.strip() else ()


def members(operand: str) -> list[str]:
    """The registers of a vector, or the one that it is."""
    return [x.strip() for x in operand.strip("{} ").split(",")]
