"""Why attention is computed by the implementation that computes it."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass

import jax

_notes: contextvars.ContextVar[list | None] = contextvars.ContextVar("attention", default=None)


@dataclass(frozen=True)
class Explanation:
    """One kind of attention call: the implementation that computes it here, and why."""

    call: str
    kind: str | None  # of calls that are measured together (`pallas_kernels.measured`)
    implementation: str
    reasons: tuple[tuple[str, str], ...]  # of every implementation that was considered

    def __str__(self) -> str:
        marks = ((">" if name == self.implementation else " ") for name, _ in self.reasons)
        lines = (f"  {m} {x:10} {y}" for m, (x, y) in zip(marks, self.reasons, strict=True))
        return "\n".join([self.call, *lines])


def explain(function, *args, **options) -> list[Explanation]:
    """The attention calls inside `function(*args, **options)`, which is traced and not run.

        print(*explain(lambda q, k, v: flash(q, k, v, causal()), q, k, v), sep="\\n")

    args and options: arrays, or their `jax.ShapeDtypeStruct`s. Each different call is there once;
    backward passes are if the function differentiates. Functions that `jax.jit` has traced before
    are not traced again: give the function under `jit`.

    Raises:
      ValueError: no attention call was traced.
    """
    token = _notes.set([])
    try:
        jax.eval_shape(lambda *x, **y: function(*x, **y), *args, **options)
        found = _notes.get()
    finally:
        _notes.reset(token)
    if not found:
        raise ValueError(
            "explain: the function traced no attention; one that jax.jit has traced before is not "
            "traced again: give the function that is under jit, or call jax.clear_caches() first"
        )
    return list(dict.fromkeys(found))


def note(inputs, kind, family: str, direction: str, choice: dict, reasons: dict, here: str) -> None:
    """Called for every choice: kept where `explain` listens."""
    notes = _notes.get()
    if notes is None:
        return
    shapes = (f"{n} {x.dtype}{list(x.shape)}" for n, x in zip("qkv", inputs, strict=False))
    what = f" ({kind})" if kind else ""
    call = f"{family} {direction}{what} on {here}: {', '.join(shapes)}"
    taken = choice.get(here, choice["default"])
    notes.append(Explanation(call, kind, taken, tuple(reasons.items())))
