"""One implementation of one workload: its programs, results, time per call and memory.

A chain is one program of many calls. Each call depends on one number of the previous call's
results, so calls run one after another, while the large random inputs stay the same. A chain costs
an extra kernel of a few microseconds per call.
"""

from __future__ import annotations

import contextlib
import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax

from .implementations import Unavailable

SAMPLE = 0.03  # seconds that a chain should last
GUESS = 3e14  # FLOP/s, from which the length of a chain is chosen
NEVER = 1.2345e30  # no result is this number, but the compiler cannot know that


def chained(call, count: int):
    """Returns a program (x, *rest) -> a number that makes `count` calls of `call(x, *rest)`."""

    def program(x, *rest):
        first = (0,) * x.ndim

        def step(_, x):
            results = [y for y in jax.tree.leaves(call(x, *rest)) if y.size]
            number = sum(y[(0,) * y.ndim].astype(jnp.float32) for y in results)
            value = jnp.where(number == NEVER, jnp.zeros((), x.dtype), x[first])
            return lax.dynamic_update_slice(x, value.reshape((1,) * x.ndim), first)

        return lax.fori_loop(0, count, step, x)[first]

    return program


def chain_length(flops: float, guess: float = GUESS) -> int:
    return max(2, min(256, round(SAMPLE * guess / max(flops, 1.0))))


def rotated(runs: dict, seconds: float, least: int = 5, most: int = 25) -> dict[str, dict]:
    """Returns median seconds per call and spread of each implementation; they take turns.

    Every round begins with another side. After two rounds, a side is sampled no more once its
    samples add up to a second.
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
    """Returns the median, and half the interquartile range as a fraction of it."""
    middle = statistics.median(seconds)
    if len(seconds) < 3:
        return {"seconds": middle, "spread": None}
    low, _, high = statistics.quantiles(seconds, n=4)
    return {"seconds": middle, "spread": (high - low) / 2 / middle}


def ceilings(size: int, numbers: int) -> dict:
    """Returns FLOP/s of a bfloat16 product of `size` cubed, and bytes/s of copying float32."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (numbers,), jnp.float32)
    product = _seconds(jax.jit(lambda a: a @ a), a)
    copy = _seconds(jax.jit(lambda x: x + 1.0), x)
    return {"matmul": 2 * size**3 / product, "copy": 8 * numbers / copy}


def _seconds(program, x, count: int = 10) -> float:
    """Returns median seconds of a call that lasts much longer than its dispatch."""
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
    """Fills memory with NaN and frees it, so that results which no program writes are NaN."""
    trash = [jnp.full(shape, jnp.nan, dtype) for shape, dtype in shapes_and_dtypes for _ in "ab"]
    jax.block_until_ready(trash)
    for x in trash:
        x.delete()


@contextlib.contextmanager
def recorded_error(reasons: dict[str, str], name: str):
    """Stores any error of the block as the reason of `name`; libraries raise various errors."""
    try:
        yield
    except Unavailable as error:
        reasons[name] = str(error)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        reasons[name] = f"{type(error).__name__}: {lines[0]}"[:200]


class JaxRun:
    """A JAX `attention` of q, k, v [B, T, N, H], which is traced when made.

    Call `compile` and then `check`. `programs` are a chain of each pass, and "check", which returns
    results and residuals of the backward pass. `reasons` explains, by pass, why it cannot be run.
    """

    def __init__(self, attention, w, arrays, passes, guess):
        self.attention, self.rows, self.reasons = attention, jnp.asarray(w.rows()), {}
        self.lowered, self.programs, self.seconds, self.calls = {}, {}, {}, {}
        q, k, v, d_out = self.arrays = arrays
        for which in passes:
            self.calls[which] = chain_length(w.flops(which)[1], guess)
        self._lower("fwd", chained(attention, self.calls.get("fwd", 1)), q, k, v)
        if "fwd" in self.reasons:
            self.reasons |= dict.fromkeys(passes, self.reasons["fwd"])
            return
        pull = self._lower_check(passes)
        if pull is not None and "bwd" in passes:
            chain = chained(lambda d, pull: pull(d), self.calls["bwd"])
            self._lower("bwd", chain, d_out, pull)
        if pull is not None and "both" in passes:
            self._lower("both", chained(self._both, self.calls["both"]), q, k, v, d_out)

    def _both(self, q, k, v, d_out):
        out, pull = jax.vjp(self.attention, q, k, v)
        return out, *pull(d_out)

    def _lower_check(self, passes):
        """Returns shapes of the backward pass's residuals; None if there is no backward pass."""

        def check(q, k, v, d_out):
            out, pull = jax.vjp(self.attention, q, k, v)
            return (out, *pull(d_out)), pull

        pull = None
        if set(passes) & {"bwd", "both"}:
            pull = self._lower("check", check, *self.arrays)
        self.backward = pull is not None
        if self.backward:
            return pull[1]
        self._lower_forward_check()
        return None

    def _lower_forward_check(self):
        """Makes "check" the forward pass alone, for an attention without a backward pass."""
        self.backward, reason = False, self.reasons.pop("check", None)
        self.reasons |= {x: reason for x in self.calls if x != "fwd"}
        self._lower("check", lambda *x: ((self.attention(*x[:3]),), None), *self.arrays)

    def _lower(self, name, program, *arrays):
        """Lowers a program; returns the shapes of its results, or None and records the reason."""
        begin = time.perf_counter()
        with recorded_error(self.reasons, name):
            traced = jax.jit(program).trace(*arrays)
            self.lowered[name] = traced.lower()
            self.seconds[name] = time.perf_counter() - begin
            return traced.out_info
        return None

    def compile(self, name: str) -> None:
        """Compiles a program, possibly in a thread; `seconds` includes tracing and lowering."""
        begin = time.perf_counter()
        with recorded_error(self.reasons, name):
            self.programs[name] = self.lowered[name].compile()
        if name == "check" and name not in self.programs and self.backward:
            self._lower_forward_check()
            self.compile("check")
        self.seconds[name] += time.perf_counter() - begin

    def check(self) -> dict:
        """Returns results for a cotangent at `rows` only; out and dq are those of these rows."""
        if "check" not in self.programs:
            raise RuntimeError(self.reasons.get("check", "it was not compiled"))
        *arrays, d_out = self.arrays
        has_cotangent = jnp.zeros(d_out.shape[1], bool).at[self.rows].set(True)
        poison(*((x.shape, x.dtype) for x in (arrays[0], *arrays)))
        results, pull = self.programs["check"](
            *arrays, jnp.where(has_cotangent[None, :, None, None], d_out, 0)
        )
        self.pull = jax.block_until_ready(pull)
        named = dict(zip(("out", "dq", "dk", "dv"), results))
        return {x: y[:, self.rows] if x in ("out", "dq") else y for x, y in named.items()}

    def sample(self, which: str) -> float:
        """Returns the seconds of one call, from a chain of calls."""
        q, k, v, d_out = self.arrays
        inputs = {"fwd": (q, k, v), "bwd": (d_out, getattr(self, "pull", None))}
        inputs = inputs.get(which, (q, k, v, d_out))
        return timed(self.programs[which], self.calls[which], *inputs)

    def ready(self, which: str) -> bool:
        return which in self.programs and which not in self.reasons

    def bytes(self, which: str) -> int:
        """Returns the compiler's plan of a call's memory: inputs, results and temporary arrays."""
        plan = self.programs[which].memory_analysis()
        return plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes

    def kept_bytes(self) -> int | None:
        """Returns the bytes that the backward pass reads, including q, k, v and the output."""
        residuals = getattr(self, "pull", None)
        return sum(x.nbytes for x in jax.tree.leaves(residuals)) if residuals is not None else None


class TorchRun:
    """A torch `attention` of q, k, v [B, N, T, H] on JAX's arrays, with methods as `JaxRun`."""

    def __init__(self, attention, w, arrays, passes, guess):
        import torch

        self.torch, self.attention = torch, attention
        self.rows = torch.from_numpy(w.rows()).long()
        self.reasons, self.seconds, self.memory, self.lowered = {}, {}, {}, {}
        self.calls = {x: chain_length(w.flops(x)[1], guess) for x in passes}
        self.gpu = torch.cuda.is_available()
        *arrays, self.d_out = (torch.from_dlpack(x).transpose(1, 2) for x in arrays)
        self.arrays = [x.detach().requires_grad_() for x in arrays]
        for which in passes:
            self._first(which)
        self.out = None

    def _first(self, which: str) -> None:
        """Runs a pass, which compiles it, and measures the peak memory of a call."""
        begin = time.perf_counter()
        with recorded_error(self.reasons, which):
            self._warm(which)
            self.seconds[which] = time.perf_counter() - begin
        if which in self.reasons:
            return
        if self.gpu:
            self.torch.cuda.reset_peak_memory_stats()
            self._warm(which)
            inputs = sum(x.nbytes for x in self.arrays)  # JAX has allocated these
            self.memory[which] = inputs + self.torch.cuda.max_memory_allocated()

    def _warm(self, which: str) -> None:
        self.out = None
        if which != "fwd":
            self._call("both")
        self._call("fwd")
        self._wait()

    def _call(self, which: str):
        if which == "fwd":
            return self.attention(*self.arrays)
        if which == "both":
            return self._gradients(self.attention(*self.arrays), False)
        if self.out is None:
            self.out = self.attention(*self.arrays)
        return self._gradients(self.out, True)

    def _gradients(self, out, keep: bool):
        return self.torch.autograd.grad(out, self.arrays, self.d_out, retain_graph=keep)

    def _wait(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize()

    def check(self) -> dict:
        """Returns results as `JaxRun.check` does, as JAX arrays."""
        if "fwd" in self.reasons:
            raise RuntimeError(self.reasons["fwd"])
        has_cotangent = self.torch.zeros(self.d_out.shape[2], dtype=self.torch.bool)
        has_cotangent[self.rows] = True
        has_cotangent, rows = has_cotangent.to(self.d_out.device), self.rows.to(self.d_out.device)
        results = {"out": self._call("fwd").detach()[:, :, rows]}
        if self.seconds.keys() & {"bwd", "both"}:
            out = self.attention(*self.arrays)
            d_out = self.torch.where(has_cotangent[None, None, :, None], self.d_out, 0)
            dq, dk, dv = self.torch.autograd.grad(out, self.arrays, d_out)
            results |= {"dq": dq[:, :, rows], "dk": dk, "dv": dv}
        self._wait()
        return {x: jnp.from_dlpack(y.transpose(1, 2).contiguous()) for x, y in results.items()}

    def sample(self, which: str) -> float:
        self._wait()
        begin = time.perf_counter()
        for _ in range(self.calls[which]):
            self._call(which)
        self._wait()
        return (time.perf_counter() - begin) / self.calls[which]

    def ready(self, which: str) -> bool:
        return which in self.seconds

    def bytes(self, which: str) -> int | None:
        return self.memory.get(which)

    def kept_bytes(self) -> None:
        return None


def errors(found: dict, expected: dict) -> dict[str, float]:
    """Returns relative norms of the differences; NaN for a result that contains NaN."""

    @jax.jit
    def off(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel())

    return {name: float(off(x, expected[name])) for name, x in found.items()}


def same_bits(one: dict, other: dict) -> dict[str, bool]:
    """Returns, by name, whether results are equal bit by bit."""

    @jax.jit
    def same(x, y):
        kind = f"uint{8 * x.dtype.itemsize}"
        return jnp.all(lax.bitcast_convert_type(x, kind) == lax.bitcast_convert_type(y, kind))

    return {name: bool(same(x, other[name])) for name, x in one.items()}
