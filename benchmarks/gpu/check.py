"""Checks all GPU implementations against the tests' float64 formulas, on this machine's GPU.

    python -m benchmarks.gpu.check --minutes 4 [--backends triton mosaic_gpu] [--only "words"]
    python -m benchmarks.gpu.check --results FILE.json  # what changed since it was written

The cases of tests/pallas_kernels (masks, tables, documents, biases, sinks, shared key heads, odd
sizes, cotangents of the log-sum-exp), and larger ones of several tiles, in bfloat16, float16 and
float32, on new random inputs. Every program writes into buffers full of NaN, and three runs must
agree bit by bit (except gradients of cuDNN, which adds them up in any order). Decoding and
Landmark's grouped softmax have the oracles of their own tests.

Prints one line per case; "skip" is followed by the reason why an implementation does not support
it. The exit code is 1 if a case fails, crashes or hangs, or if an implementation passes no case.
Several processes share the GPU; one that crashes or hangs is replaced. `--cpu` checks "xla" without
a GPU (`--interpret`: also Pallas-Triton).

`--results FILE` writes what each implementation passed into FILE, for one kind of GPU, and leaves
out what is there for the same code and version of JAX; a check that was cut off goes on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import math
import os
import re
import sys
import threading
import time
from pathlib import Path

from .records import Records, about_here, code_of

HERE = Path(__file__).resolve().parent
# The formulas of the tests, of which a wheel has a copy.
FORMULAS = HERE / "formulas"
if not FORMULAS.is_dir():
    FORMULAS = HERE.parents[1] / "tests" / "pallas_kernels"
sys.path.insert(0, str(FORMULAS))
ORACLES = ("attention_oracle", "decode_cases", "landmark_oracle")
LANDMARK, DECODE = "Landmark: ", "decode, "  # prefixes of the names of their cases
WATCHED = 60.0  # seconds without output after which a process counts as hanging


def large() -> dict:
    """Returns cases of several tiles, with head sizes of real models."""
    from attention_oracle import Blocked, Case

    from pallas_kernels import causal, everything, per_head, prefix, window

    one = functools.partial(Case, batch=1, heads=4, kv_heads=2, size=64, v_size=64)
    apart = per_head((causal(), 2), (causal() & window(200), 2))
    return {
        "causal": one(t=1111, s=1111),
        "causal, heads of 128": one(t=1024, s=1024, size=128, v_size=128),
        "everything, whole tiles": one(t=512, s=1024, mask=everything()),
        "window and first keys": one(t=1300, s=1300, mask=causal() & (window(300) | prefix(9))),
        "window, heads of 128": one(t=900, s=900, size=128, v_size=128, mask=causal() & window(99)),
        "documents, two rows": one(batch=2, t=700, s=700, segments=6),
        "end of a longer text": one(t=130, s=1200, offset=1070),
        "cross, lengths": one(batch=2, t=300, s=1200, mask=None, k_lengths=(1200, 411)),
        "soft cap and sinks": one(t=600, s=600, soft_cap=5.0, sinks=True),
        "traced tables per query head, blocks of 64": one(
            batch=2, t=700, s=700, mask=everything(), table=Blocked(2, 4, 64, 64, traced=True)
        ),
        "a table per key head, blocks of 128": one(
            t=1000, s=900, mask=everything(), table=Blocked(1, 2, 128, 128), size=128, v_size=128
        ),
        "masks per head": one(t=800, s=800, mask=apart),
    }


def cases(seed: int) -> dict:
    """Returns the cases of the three oracles by name, the most informative ones first."""
    import attention_oracle
    import decode_cases
    import landmark_oracle

    small, many = attention_oracle.CASES, large()
    rounds = [
        ("bfloat16", many), ("bfloat16", small), ("float16", many), ("float32", many),
        ("float32", small),
    ]  # fmt: skip
    result = {}
    for dtype, group in rounds:
        kind = "tiles" if group is many else "small"
        for i, (name, case) in enumerate(group.items()):
            case = dataclasses.replace(case, dtype=dtype, seed=seed + i)
            result[f"{kind}, {dtype}: {name}"] = case
    landmark = {LANDMARK + name: case for name, case in landmark_oracle.CASES.items()}
    for dtype in ("bfloat16", "float32"):
        for name, case in decode_cases.CASES.items():
            result[f"{DECODE}{dtype}: {name}"] = dataclasses.replace(case, dtype=dtype)
    return landmark | result


def calls_of(name: str) -> tuple[str, set[str]]:
    """Returns the dtype of a case, and the forms of its calls (`timings.form_of`)."""
    import attention_oracle as oracle

    from pallas_kernels import explain, timings

    case = cases(0)[name]
    if name.startswith(LANDMARK):
        return "float32", {"landmark"}
    if name.startswith(DECODE):
        return case.dtype, {"few queries"}
    alike = dataclasses.replace(case, dtype=timings.TIMED_DTYPE)  # float32 has no kind
    explanations = explain(oracle.program(alike, "xla"), *oracle.inputs(alike))
    return case.dtype, {timings.form_of(x.kind) for x in explanations}


def poisoned(program, inputs):
    """Returns a function that runs the program into buffers of NaN, and the bytes of NaN.

    The buffers are donated, so that the program writes its results into them.
    """
    import jax
    import jax.numpy as jnp

    from .runs import poison

    shapes = jax.eval_shape(program, *inputs)
    over = jax.jit(lambda trash, *x: program(*x), donate_argnums=0, keep_unused=True)
    compiled = over.lower(shapes, *inputs).compile()

    def run():
        poison(*((x.shape, x.dtype) for x in jax.tree.leaves(shapes)))
        trash = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes)
        return compiled(trash, *inputs)

    return run, compiled.memory_analysis().alias_size_in_bytes


def check(name: str, case, backend: str) -> tuple[str, str]:
    """Checks one case; returns "ok", "skip" or "FAIL", and the reason."""
    from pallas_kernels.dispatch import BACKENDS

    from .runs import recorded_error

    reasons = {}
    with recorded_error(reasons, name):
        if name.startswith(LANDMARK):
            return _check_landmark(case, backend)
        if name.startswith(DECODE):
            return _check_decode(case, backend)
        # A backend without `takes_d_lse` leaves gradients with a cotangent of lse to another one.
        of_lse = BACKENDS[backend].takes_d_lse
        return _check_flash(dataclasses.replace(case, of_lse=of_lse), backend)
    refused = re.match(rf"CannotRun: \w+\(implementation='{backend}'\): ([^;]*)", reasons[name])
    return ("skip", refused[1]) if refused else ("FAIL", reasons[name])


def _check_flash(case, backend: str) -> tuple[str, str]:
    import attention_oracle as oracle
    import numpy as np

    run, poisons = poisoned(oracle.program(case, backend), oracle.inputs(case))
    runs = [{k: np.asarray(x) for k, x in run().items()} for _ in range(3)]
    wrong = oracle.above_limit(case, runs[0], oracle.oracle(case))
    if wrong:
        return "FAIL", f"relative errors {wrong}"
    return _same(_reproducible(runs, backend), f"over {poisons} bytes of NaN")


def _check_decode(case, backend: str) -> tuple[str, str]:
    import jax
    import numpy as np
    from decode_cases import assert_close, build, expected

    from pallas_kernels import decode

    def program(arrays, options):
        options = options | {"soft_cap": case.soft_cap, "implementation": backend}
        return decode(*arrays, case.mask, **options)

    inputs = build(case)
    run, poisons = poisoned(program, inputs)
    runs = [jax.tree.map(np.asarray, run()) for _ in range(3)]
    with jax.default_device(jax.devices("cpu")[0]):
        reference = expected(case, *jax.device_put(inputs, jax.devices("cpu")[0]))
    assert_close(runs[0], reference, case.dtype)
    return _same(runs, f"over {poisons} bytes of NaN")


def _check_landmark(case, backend: str) -> tuple[str, str]:
    import jax
    import landmark_oracle as oracle
    import numpy as np

    from .runs import poison

    q, k, v = case.arrays()[:3]
    runs = []
    for _ in range(2):
        poison(*((x.shape, x.dtype) for x in (q, q, k, v)))
        runs.append(jax.tree.map(np.asarray, oracle.run.__wrapped__(case, backend)))
    with jax.default_device(jax.devices("cpu")[0]):
        expected = oracle.oracle(case)[:3]
    oracle.assert_same(runs[0], expected, case.loose)
    return _same(runs, "")


def _reproducible(found: list[dict], backend: str) -> list[dict]:
    """Returns results that must not vary between runs; without gradients for some backends."""
    from pallas_kernels.dispatch import BACKENDS

    if BACKENDS[backend].deterministic:
        return found
    return [{x: one[x] for x in ("out", "lse")} for one in found]


def _same(found: list, said: str) -> tuple[str, str]:
    import jax

    bits = [b"".join(x.tobytes() for x in jax.tree.leaves(one)) for one in found]
    return ("ok", said) if len(set(bits)) == 1 else ("FAIL", "two runs differ in bits")


def work(jobs: list[dict], args, emit, deadline=math.inf) -> None:
    """Does jobs in this process; their names are "backend | case"."""
    if args.interpret:
        from .implementations import interpret_triton

        interpret_triton()
    known = cases(args.seed)
    for i, job in enumerate(jobs):
        if time.monotonic() > deadline:
            emit(left=[x["name"] for x in jobs[i:]])
            break
        emit(job=job["name"])
        backend, name = job["name"].split(" | ")
        status, why = check(name, known[name], backend)
        emit(row={"backend": backend, "case": name, "status": status, "why": why})
        emit(done=job["name"])
        if status == "FAIL":
            from .measure import alive

            alive()


def shards(args, names: list[str]) -> list[list[dict]]:
    """Returns the jobs of each process; every backend has `args.processes` of its own."""
    result = []
    for backend in args.backends:
        for i in range(args.processes):
            some = names[i :: args.processes]
            result.append([{"name": f"{backend} | {name}"} for name in some])
    return result


def supervised(jobs: list[dict], command: list[str], deadline: float, take) -> None:
    from .workers import supervise

    for event in supervise(command, jobs, deadline=deadline, patience=WATCHED):
        if "lost" in event:
            backend, name = event["lost"].split(" | ")
            why = f"it ended the process: {event['why']}"
            event = {"row": {"backend": backend, "case": name, "status": "FAIL", "why": why}}
        take(**event)


class Results:
    """A file with the results of each implementation, and the code that they are of."""

    def __init__(self, file: Path, names: list[str], about: dict):
        self.records, self.names, self.about = Records(file), names, about

    def state(self, backends: list[str]) -> dict:
        """Returns the `Log.state` of all cases that were done with the same code."""
        names = [x for x in backends if self.records.state(x, self.about) == "done"]
        current = [self.records.by_case[x] for x in names]
        return {
            "counts": {x["case"]: x["counts"] for x in current},
            "failures": [row for x in current for row in x["failures"]],
            "done": [f"{x['case']} | {name}" for x in current for name in x["done"]],
        }

    def write(self, backend: str, log: Log) -> None:
        start = f"{backend} | "
        code = code_of(backend, HERE / "check.py", *(FORMULAS / f"{x}.py" for x in ORACLES))
        record = {"case": backend, "about": self.about, "code": code}
        record["counts"] = log.counts[backend]
        record["failures"] = [row for row in log.failures if row["backend"] == backend]
        record["done"] = [x.removeprefix(start) for x in log.done if x.startswith(start)]
        self.records.add(record | {"cases": len(self.names)})


class Log:
    """Prints a line per case and counts them.

    Args:
      earlier: the `state` of an earlier log, which this one continues.
      results: where to write the result of each implementation after every case.
    """

    def __init__(self, backends, earlier: dict | None = None, results: Results | None = None):
        self.counts = {name: {"ok": 0, "skip": 0, "FAIL": 0} for name in backends}
        self.left, self.failures, self.done, self.results = 0, [], [], results
        self.lock = threading.Lock()  # events come from the threads of several processes
        if earlier is not None:
            self.counts, self.failures = self.counts | earlier["counts"], earlier["failures"]
            self.done = earlier["done"]

    def state(self) -> dict:
        return {"counts": self.counts, "failures": self.failures, "done": self.done}

    def take(self, **event) -> None:
        with self.lock:
            self._take(event)

    def _take(self, event: dict) -> None:
        self.left += len(event.get("left", ()))
        if "row" not in event:
            return
        row = event["row"]
        self.counts[row["backend"]][row["status"]] += 1
        self.done.append(f"{row['backend']} | {row['case']}")
        if row["status"] == "FAIL":
            self.failures.append(row)
        print(self._line(row), flush=True)
        if self.results is not None:
            self.results.write(row["backend"], self)

    @staticmethod
    def _line(row: dict) -> str:
        return f"{row['status']:4} {row['backend']:10} {row['case']}: {row['why']}"

    def lines(self) -> list[str]:
        """Returns the lines of failed cases, and the counts of each backend."""
        counts = self.counts.items()
        summary = [f"{x}: " + ", ".join(f"{n} {what}" for what, n in y.items()) for x, y in counts]
        summary += [f"{self.left} cases were not reached in time"] if self.left else []
        return [*map(self._line, self.failures), *summary]

    def failed(self) -> int:
        """Returns exit code 1 if a case failed or a backend passed none, otherwise 0."""
        return int(bool(self.failures) or any(not x["ok"] for x in self.counts.values()))


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--backends", nargs="+", help="all for NVIDIA GPUs if left out")
    parser.add_argument("--only", default="", help="words that a case's name must have")
    results_doc = "a JSON file of results; what is in it for the same code is left out"
    parser.add_argument("--results", type=Path, metavar="FILE", help=results_doc)
    parser.add_argument("--processes", type=int, default=3, help="for every backend")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 2**20)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.backends is None:
        from pallas_kernels.dispatch import BACKENDS

        gpu = [name for name, x in BACKENDS.items() if "cuda" in x.platforms or x.portable]
        args.backends = ["xla"] + ["triton"] * args.interpret if args.cpu else gpu
    return args


def main(argv=None) -> int:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    args = arguments(argv)
    if args.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    from .workers import emit, jobs_of_child

    if args.worker:
        work(jobs_of_child(), args, emit)
        return 0
    log = run(args, sys.argv[1:] if argv is None else argv)
    print("\n".join(["", *log.lines()]))
    return log.failed()


def left(args, about: dict) -> tuple[int, int]:
    """Returns how many cases are left for a device in `args.results`, and how many there are."""
    names = chosen(args)
    done = {*Results(args.results, names, about).state(args.backends)["done"]}
    count = sum(f"{backend} | {name}" not in done for backend in args.backends for name in names)
    return count, len(args.backends) * len(names)


def chosen(args) -> list[str]:
    """Returns the names of the cases that `--only` selects."""
    return [name for name in cases(args.seed) if all(x in name for x in args.only.split())]


def run(args, options: list[str], earlier: dict | None = None) -> Log:
    """Checks all cases, in child processes with the same options; on a CPU, in this process.

    Args:
      earlier: the `Log.state` of a run whose cases are not repeated.
    """
    deadline = time.monotonic() + 60 * args.minutes
    results, names = None, chosen(args)
    if args.results:
        results = Results(args.results, names, about_here())
        earlier = results.state(args.backends)
    log = Log(args.backends, earlier, results)
    jobs = [[x for x in some if x["name"] not in log.done] for some in shards(args, names)]
    jobs = [some for some in jobs if some]
    if not jobs:
        return log
    print(f"seed {args.seed}, {len(names)} cases, {', '.join(args.backends)}", flush=True)
    if args.cpu:
        work([job for shard in jobs for job in shard], args, log.take, deadline)
        return log
    command = [sys.executable, "-m", f"{__package__}.check", *options]
    command += ["--seed", str(args.seed), "--worker"]
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        check_jobs = functools.partial(supervised, command=command, deadline=deadline)
        list(pool.map(lambda x: check_jobs(x, take=log.take), jobs))
    return log


if __name__ == "__main__":
    sys.exit(main())
