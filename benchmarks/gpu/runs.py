"""One implementation of one workload: its programs, results, time per call and memory.

A chain is one program of many calls: each has to wait for one number of what the call before it
wrote, and its big inputs stay as they are, random. Beside the calls a chain costs a kernel of a few
microseconds each.
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
    """Median seconds per call of every implementation, and their spread; they take turns.

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


@contextlib.contextmanager
def recorded_error(reasons: dict[str, str], name: str):
    """Any error inside is the reason of `name`: other libraries raise what they like."""
    try:
        yield
    except Unavailable as error:
        reasons[name] = str(error)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        reasons[name] = f"{type(error).__name__}: {lines[0]}"[:200]


class JaxRun:
    """`attention` of q, k, v [B, T, N, H], traced when made; `compile` and `check` come next.

    reasons: of passes that it cannot do, why. Programs: one that gives results and what the
    backward pass reads ("check"), and a chain of each pass.
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
        """Shapes of what the backward pass reads, or None where there is no backward pass."""

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
        """Where there is no backward pass: results of the forward pass alone."""
        self.backward, reason = False, self.reasons.pop("check", None)
        self.reasons |= {x: reason for x in self.calls if x != "fwd"}
        self._lower("check", lambda *x: ((self.attention(*x[:3]),), None), *self.arrays)

    def _lower(self, name, program, *arrays):
        """Shapes of the program's results, or None with a reason."""
        begin = time.perf_counter()
        with recorded_error(self.reasons, name):
            traced = jax.jit(program).trace(*arrays)
            self.lowered[name] = traced.lower()
            self.seconds[name] = time.perf_counter() - begin
            return traced.out_info
        return None

    def compile(self, name: str) -> None:
        """May run in a thread; `seconds` is tracing, lowering and compiling."""
        begin = time.perf_counter()
        with recorded_error(self.reasons, name):
            self.programs[name] = self.lowered[name].compile()
        if name == "check" and name not in self.programs and self.backward:
            self._lower_forward_check()
            self.compile("check")
        self.seconds[name] += time.perf_counter() - begin

    def check(self) -> dict:
        """Results where only some rows of the output have a cotangent, out and dq of those rows."""
        if "check" not in self.programs:
            raise RuntimeError(self.reasons.get("check", "it was not compiled"))
        *arrays, d_out = self.arrays
        kept = jnp.zeros(d_out.shape[1], bool).at[self.rows].set(True)
        poison(*((x.shape, x.dtype) for x in (arrays[0], *arrays)))
        results, pull = self.programs["check"](
            *arrays, jnp.where(kept[None, :, None, None], d_out, 0)
        )
        self.pull = jax.block_until_ready(pull)
        found = dict(zip(("out", "dq", "dk", "dv"), results))
        return {x: y[:, self.rows] if x in ("out", "dq") else y for x, y in found.items()}

    def sample(self, which: str) -> float:
        """Seconds of one call."""
        q, k, v, d_out = self.arrays
        inputs = {"fwd": (q, k, v), "bwd": (d_out, getattr(self, "pull", None))}
        inputs = inputs.get(which, (q, k, v, d_out))
        return timed(self.programs[which], self.calls[which], *inputs)

    def ready(self, which: str) -> bool:
        return which in self.programs and which not in self.reasons

    def bytes(self, which: str) -> int:
        """Of one call at most, as the compiler plans it: inputs, results, and what is between."""
        plan = self.programs[which].memory_analysis()
        return plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes

    def kept_bytes(self) -> int | None:
        """What the backward pass is handed, q, k, v and the output included."""
        kept = getattr(self, "pull", None)
        return sum(x.nbytes for x in jax.tree.leaves(kept)) if kept is not None else None


class TorchRun:
    """`attention` of q, k, v [B, N, T, H] in torch, on the arrays of JAX; as `JaxRun`."""

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
        """Compiles what has to be, and reads the most memory that a call takes."""
        begin = time.perf_counter()
        with recorded_error(self.reasons, which):
            self._warm(which)
            self.seconds[which] = time.perf_counter() - begin
        if which in self.reasons:
            return
        if self.gpu:
            self.torch.cuda.reset_peak_memory_stats()
            self._warm(which)
            inputs = sum(x.nbytes for x in self.arrays)  # which JAX has allocated
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
        """As of `JaxRun`, as JAX arrays."""
        if "fwd" in self.reasons:
            raise RuntimeError(self.reasons["fwd"])
        kept = self.torch.zeros(self.d_out.shape[2], dtype=self.torch.bool)
        kept[self.rows] = True
        kept, rows = kept.to(self.d_out.device), self.rows.to(self.d_out.device)
        found = {"out": self._call("fwd").detach()[:, :, rows]}
        if self.seconds.keys() & {"bwd", "both"}:
            out = self.attention(*self.arrays)
            d_out = self.torch.where(kept[None, None, :, None], self.d_out, 0)
            dq, dk, dv = self.torch.autograd.grad(out, self.arrays, d_out)
            found |= {"dq": dq[:, :, rows], "dk": dk, "dv": dv}
        self._wait()
        return {x: jnp.from_dlpack(y.transpose(1, 2).contiguous()) for x, y in found.items()}

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
    """Relative norms of the differences; NaN where a result has one."""

    @jax.jit
    def off(x, y):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel())

    return {name: float(off(x, expected[name])) for name, x in found.items()}


def same_bits(one: dict, other: dict) -> dict[str, bool]:
    """Whether results are equal bit by bit."""

    @jax.jit
    def same(x, y):
        kind = f"uint{8 * x.dtype.itemsize}"
        return jnp.all(lax.bitcast_convert_type(x, kind) == lax.bitcast_convert_type(y, kind))

    return {name: bool(same(x, other[name])) for name, x in one.items()}
