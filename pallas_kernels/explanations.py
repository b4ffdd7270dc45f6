"""Reports of attention calls: the implementation that runs, the blocks of its kernels, and why.

A backend calls `report` where it has chosen the blocks of a kernel. So the report holds the values
with which the kernel is called, and nothing is computed if nobody explains.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax


class VisitedFraction(NamedTuple):
    """The part of all pairs of blocks that a kernel visits, and the part of these that it tests."""

    visited: float
    tested: float  # of the visited pairs, those with an element test

    @classmethod
    def of(cls, pairs: int, visited, tested) -> VisitedFraction:
        """Returns the fractions for numbers of pairs of blocks."""
        return cls(int(visited) / pairs, int(tested) / max(int(visited), 1))


@dataclass(frozen=True)
class KernelBlocks:
    """The blocks of one kernel of an attention call.

    A step of the kernel multiplies `rows` rows by `keys` keys. The rows are `queries` queries of
    each of `heads` query heads that share a key head, and padding.
    """

    kernel: str
    queries: int
    heads: int
    rows: int
    keys: int
    reason: str  # the rule or table that the sizes come from, and what limited them, with "; "
    fraction: VisitedFraction | None = None  # None: the visited blocks are computed on the device

    def __str__(self) -> str:
        rows = f"{self.queries} queries" if self.queries > 1 else "1 query"
        if self.heads > 1:
            rows += f" of {self.heads} heads"
        if self.rows != self.queries:
            rows += f" ({self.rows} rows)"
        visited = "the visited blocks are computed on the device"
        if self.fraction is not None:
            visited = (
                f"{self.fraction.visited:.0%} of the blocks are visited, "
                f"{self.fraction.tested:.0%} of these with an element test"
            )
        lines = [f"{self.kernel}: {rows} x {self.keys} keys", *self.reason.split("; "), visited]
        return "\n      ".join(lines)


@dataclass(frozen=True)
class Explanation:
    """An attention call, the implementation that computes it on this platform, and its blocks."""

    call: str
    kind: str | None  # the kind of call by which measurements are stored (`timings.kind`)
    implementation: str
    reasons: tuple[tuple[str, str], ...]  # (name, reason) of each implementation considered
    blocks: tuple[KernelBlocks, ...] = ()  # of its kernels; (): a library that does not report them

    def __str__(self) -> str:
        lines = [self.call]
        for name, reason in self.reasons:
            mark = ">" if name == self.implementation else " "
            lines.append(f"  {mark} {name:10} {reason}")
        lines += [f"    {blocks}" for blocks in self.blocks or ("its blocks are not reported",)]
        return "\n".join(lines)


_explanations: contextvars.ContextVar[list[Explanation] | None] = contextvars.ContextVar(
    "explanations", default=None
)
_blocks: contextvars.ContextVar[list[KernelBlocks] | None] = contextvars.ContextVar(
    "blocks", default=None
)


def current_explanations() -> list[Explanation] | None:
    """Returns the list to which calls are added; None: nobody explains."""
    return _explanations.get()


@contextlib.contextmanager
def _record(variable: contextvars.ContextVar) -> Iterator[list]:
    """Sets the variable to a new list inside the context."""
    entries: list = []
    token = variable.set(entries)
    try:
        yield entries
    finally:
        variable.reset(token)


def record_blocks() -> contextlib.AbstractContextManager[list[KernelBlocks]]:
    """Records the blocks of the kernels that are traced inside the context."""
    return _record(_blocks)


def report(make: Callable[[], KernelBlocks]) -> None:
    """Adds `make()` to the recorded blocks; `make` is not called if nobody explains."""
    if (blocks := _blocks.get()) is not None:
        blocks.append(make())


def explain(function, *args, **options) -> list[Explanation]:
    """Returns which implementation computes each attention call of a function, and in which blocks.

        print(*explain(lambda q, k, v: flash(q, k, v, causal()), q, k, v), sep="\\n")

    For each call it lists the implementations with the reasons for and against them, then the
    kernels of the chosen one: the block sizes and where they come from, and which fraction of the
    blocks is visited.

    `function(*args, **options)` is traced and not run. Each different call is listed once; backward
    passes are listed if the function differentiates. Functions that `jax.jit` has traced before are
    not traced again: pass the original function, without `jit`.

    Args:
      function: calls `flash`, `decode` or `landmark_attention`.
      *args, **options: arrays, or their `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: no attention call was traced.
    """
    with record_explanations() as explanations:
        jax.eval_shape(lambda *x, **y: function(*x, **y), *args, **options)
    if not explanations:
        raise ValueError(
            "explain: the function traced no attention; one that jax.jit has traced before is not "
            "traced again: give the function that is under jit, or call jax.clear_caches() first"
        )
    return list(dict.fromkeys(explanations))


def record_explanations() -> contextlib.AbstractContextManager[list[Explanation]]:
    """Records the explanation of every attention call that is traced inside the context.

    Use it where `explain` cannot trace the whole computation, such as a Python loop over several
    jitted programs. Functions that `jax.jit` has traced before are not traced again.
    """
    return _record(_explanations)
