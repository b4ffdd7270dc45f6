"""The worker of `attention.py`, which measures one workload after another."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import math
import os
import re
import sys
import time

import jax
import jax.numpy as jnp

from pallas_kernels.tables import from_mask

from . import implementations
from .implementations import Unavailable
from .records import CLOCKS, describe, nvidia_smi
from .runs import (
    GUESS,
    JaxRun,
    TorchRun,
    ceilings,
    errors,
    recorded_error,
    rotated,
    same_bits,
    summary,
)
from .workloads import UNIT, oracle, workloads

COMPILING = 60.0  # seconds without a compiled program after which a compiler counts as hanging
LONGEST_XLA = 4e12  # visited FLOP of a forward pass, above which blockwise XLA is left out


def chosen(args) -> list:
    words = args.only.split()
    known = workloads(8 if args.cpu else UNIT)
    groups = args.group or {w.group for w in known}
    return [w for w in known if w.group in groups and {*words} <= {*w.name.split()}]


def work(jobs: list[dict], args, emit, deadline=math.inf) -> None:
    """Does the jobs in this process: "ceilings" or the name of a workload."""
    if args.interpret:
        implementations.interpret_triton()
    by_name = {w.name: w for w in chosen(args)}
    emit(about=describe())
    for i, job in enumerate(jobs):
        if time.monotonic() > deadline:
            emit(left=[x["name"] for x in jobs[i:]])
            break
        emit(job=job["name"])
        if job["name"] == "ceilings":
            sizes = (256, 2**16) if args.cpu else (8192, 2**30)
            emit(ceilings=ceilings(*sizes))
        else:
            measure(by_name[job["name"]], args, job, emit)
        gc.collect()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()
        emit(done=job["name"])


def measure(w, args, job: dict, emit) -> None:
    """Measures one workload and emits all of its rows."""
    arrays = w.arrays()
    expected, table_ms, results = oracle(w, arrays), table_time(w), {}
    runs = begin(w, arrays, args, job, emit)
    for side, run in runs.items():
        emit(step=side)
        results[side] = checked(run, expected)
    times = {}
    for which in args.passes:
        ready = {s: r for s, r in runs.items() if r.ready(which) and "error" in results[s]}
        times[which] = in_turns(ready, which, args.seconds, emit)
    emit(clocks={w.name: nvidia_smi(*CLOCKS)})
    for side, run in runs.items():
        for which in args.passes:
            timing = times[which].get(side)
            reason = run.reasons.get(which, results[side].get("reason"))
            if timing is None:
                emit(row=absent(w, which, side, reason or "it failed while it was timed"))
            else:
                emit(row=row(w, which, side, run, timing, results[side], table_ms))


def begin(w, arrays, args, job: dict, emit) -> dict:
    """Returns compiled implementations of a workload; emits rows with reasons for the others."""
    runs, reasons = {}, {}
    for side, library in implementations.names().items():
        if not re.search(args.sides, side):
            continue
        emit(step=side)
        with recorded_error(reasons, side):
            if side in job.get("skip", ()):
                raise Unavailable("it has crashed the process or hung, here or twice before")
            guess, attention = guess_of(side, w, args), implementations.attention(side, w)
            make = JaxRun if library == "jax" else TorchRun
            runs[side] = make(attention, w, arrays, args.passes, guess)
        if side in reasons:
            for which in args.passes:
                emit(row=absent(w, which, side, reasons[side]))
            alive()
    emit(step=None)
    tasks = [(side, run, name) for side, run in runs.items() for name in run.lowered]
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        for some in [[task] for task in tasks] if job.get("alone") else [tasks]:
            emit(step=some[0][0] if job.get("alone") else None)
            compile_all(pool, some, emit)
    emit(step=None)
    return runs


def compile_all(pool, tasks: list[tuple], emit) -> None:
    """Compiles (side, run, program) concurrently; ends the process if a compiler hangs."""
    pending = {pool.submit(run.compile, name): side for side, run, name in tasks}
    while pending:
        done, _ = concurrent.futures.wait(pending, COMPILING, concurrent.futures.FIRST_COMPLETED)
        if not done:
            emit(step=next(side for future, side in pending.items() if future.running()))
            os._exit(4)  # a thread cannot be ended
        for future in done:
            future.result()
            pending.pop(future)
            if len(tasks) > 1:  # the parent kills a process that is silent for long
                emit(step=None)


def guess_of(side: str, w, args) -> float:
    """Returns the expected FLOP/s; raises Unavailable for a side that would take too long."""
    if args.cpu:
        return 1.0
    if side != implementations.OURS + "xla":
        return GUESS
    if w.flops("fwd")[1] > LONGEST_XLA:
        raise Unavailable(f"blockwise XLA on a GPU is left out above {LONGEST_XLA:.0e} FLOP")
    return GUESS / 100


def checked(run, expected) -> dict:
    """Returns errors and reproducibility of a side's results, or the reason why it has none."""
    result = {}
    with recorded_error(result, "reason"):
        first = run.check()
        return {"error": errors(first, expected), "same_bits": same_bits(first, run.check())}
    alive()
    return result


def in_turns(runs: dict, which: str, seconds: float, emit) -> dict:
    """Returns the times of a pass by implementation, without implementations that fail."""
    ready = {}
    for side, run in runs.items():
        emit(step=side)
        with recorded_error(run.reasons, which):
            run.sample(which)
            ready[side] = functools.partial(sample, side, run, which, emit)
        if side not in ready:
            alive()
    times = rotated(ready, seconds)
    emit(step=None)
    return times


def sample(side: str, run, which: str, emit) -> float:
    """Returns the seconds of a call; emits the step before it."""
    emit(step=side)
    return run.sample(which)


def alive() -> None:
    """Ends the process if an error has broken the device; another process goes on."""
    try:
        jax.block_until_ready(jnp.ones(8) + 1)
    except jax.errors.JaxRuntimeError:
        os._exit(3)


def table_time(w) -> float | None:
    """Returns the milliseconds to list the blocks of a mask; with documents, on the device."""
    if w.listed is not None:
        return None
    if not w.documents:
        run = w.table
    else:
        blocks = dict(queries=w.t, keys=w.s, q_block=w.block, k_block=w.block)
        traced = jax.jit(lambda x: from_mask(w.mask, **blocks, q_segments=x, k_segments=x))
        ids = w.places()["q_segments"]

        def run():
            jax.block_until_ready(traced(ids))

        run()
    times = []
    for _ in range(3 if not w.documents else 9):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e3 * summary(times)["seconds"]


def absent(w, which: str, side: str, reason: str) -> dict:
    return {"workload": w.name, "group": w.group, "pass": which, "side": side, "reason": reason}


def row(w, which: str, side: str, run, found: dict, result: dict, table_ms) -> dict:
    """Returns a row of the tables; the share of the matrix product's rate is added later."""
    useful, executed = w.flops(which)
    made = [x for x in result["error"] if which != "fwd" or x == "out"]
    worst = max((result["error"][x] for x in made), key=lambda x: (x != x, x))  # NaN is the worst
    same = all(result["same_bits"][x] for x in made)
    return {
        "workload": w.name, "group": w.group, "pass": which, "side": side,
        "kind": w.kind, "shape": w.shape,
        "density": w.density, "visited_share": w.pairs[1] / (w.t * w.s * w.heads),
        "ms": 1e3 * found["seconds"], "spread": found["spread"],
        "executed_tflops": executed / found["seconds"] / 1e12,
        "useful_tflops": useful / found["seconds"] / 1e12,
        "peak_bytes": run.bytes(which), "kept_bytes": run.kept_bytes(),
        "array_bytes": 2 * w.t * w.heads * w.size,
        "table_ms": table_ms, "compile_s": run.seconds[which],
        "error": worst, "errors": result["error"], "same_bits": same,
    }  # fmt: skip
