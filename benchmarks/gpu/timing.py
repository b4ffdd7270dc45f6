"""Times of attention on one device: chains of dependent calls, sides that take turns, ceilings.

A chain is one program of many calls: each has to wait for one number of what the call before it
wrote, and its big inputs stay as they are, random. Beside the calls a chain costs a kernel of a few
microseconds each.
"""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax

SAMPLE = 0.03  # seconds that a chain should last
GUESS = 3e14  # floating-point operations per second, to choose the length of a chain by
NEVER = 1.2345e30  # no result has this number, which the compiler does not know


def chained(call, count: int):
    """(x, *rest) -> a number, after `count` calls of `call(x, *rest)`."""

    def program(x, *rest):
        first = (0,) * x.ndim

        def step(_, x):
            results = [y for y in jax.tree.leaves(call(x, *rest)) if y.size]
            number = sum(y[(0,) * y.ndim].astype(jnp.float32) for y in results)
            kept = jnp.where(number == NEVER, jnp.zeros((), x.dtype), x[first])
            return lax.dynamic_update_slice(x, kept.reshape((1,) * x.ndim), first)

        return lax.fori_loop(0, count, step, x)[first]

    return program


def chain_length(flops: float, guess: float = GUESS) -> int:
    return max(2, min(256, round(SAMPLE * guess / max(flops, 1.0))))


def rotated(runs: dict, seconds: float, least: int = 5, most: int = 25) -> dict[str, dict]:
    """Median of every side's seconds per call, and their spread; the sides take turns.

    Every round begins with another side. A side whose sample lasts a second is taken twice only.
    """
    times = {name: [] for name in runs}
    names, begin = list(runs), time.perf_counter()
    for turn in range(most):
        start = turn % max(1, len(names))
        for name in names[start:] + names[:start]:
            if turn < 2 or sum(times[name]) < 1.0:
                times[name].append(runs[name]())
        if turn + 1 >= least and time.perf_counter() - begin > seconds:
            break
    return {name: summary(found) for name, found in times.items()}


def summary(seconds: list[float]) -> dict:
    """Median, and half the distance of the quartiles as a share of it."""
    middle = statistics.median(seconds)
    if len(seconds) < 3:
        return {"seconds": middle, "spread": None}
    low, _, high = statistics.quantiles(seconds, n=4)
    return {"seconds": middle, "spread": (high - low) / 2 / middle}


def ceilings(size: int, numbers: int) -> dict:
    """FLOP/s of a bfloat16 product of `size` cubed, bytes/s of reading and writing float32."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (numbers,), jnp.float32)
    product = _seconds(jax.jit(lambda a: a @ a), a)
    copy = _seconds(jax.jit(lambda x: x + 1.0), x)
    return {"matmul": 2 * size**3 / product, "copy": 8 * numbers / copy}


def _seconds(program, x, count: int = 10) -> float:
    """Median seconds of a call that lasts much longer than sending it off."""
    jax.block_until_ready(program(x))
    seconds = []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(count):
            y = program(x)
        jax.block_until_ready(y)
        seconds.append((time.perf_counter() - begin) / count)
    return statistics.median(seconds)


def timed(program, count: int, *arrays) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(program(*arrays))
    return (time.perf_counter() - begin) / count


def poison(*shapes_and_dtypes) -> None:
    """Fills memory with NaN and gives it back, so that what nothing writes is seen to be so."""
    trash = [jnp.full(shape, jnp.nan, dtype) for shape, dtype in shapes_and_dtypes for _ in "ab"]
    jax.block_until_ready(trash)
    for x in trash:
        x.delete()
