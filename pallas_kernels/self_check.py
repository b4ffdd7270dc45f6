"""Checks the kernels on the GPU of this machine once, and stores the results.

GPU kernels run by default only if they passed. The first call that one of them could run starts the
check: a child process for each backend computes a few small cases of the call's dtype, forward and
backward, and compares them with `pallas_kernels.reference` in float32 on the CPU (those of the
gated delta rule with its XLA form). Results are stored by backend, dtype, kind of call and
direction. What fails, crashes or takes too long is not used, and one line of the log lists it. The
file of results is in `timings.folder()`. Its name contains the name of the GPU, and a hash of it,
its driver, the versions of JAX, cuDNN and compilers, and the sources of the kernels. A check that
ran out of time is repeated by processes that allow more time, and one that ran out of memory by
every process.

    python -m pallas_kernels.self_check                     # now, again, and prints the results
    python -m pallas_kernels.self_check --dtypes bfloat16

LCJAX_KERNEL_CHECK=0 switches the check off: then cuDNN runs unchecked, and our own kernels run only
by name or where they were measured. Programs that are compiled for a GPU that this process does not
have assume that all kernels are right. LCJAX_KERNEL_CHECK_SECONDS limits the time of the check, by
default to 120 seconds, and to 600 for the command.

Processes of one job must choose the same kernels, so a job of several processes starts no check: it
reads the file, and runs XLA without one. Run the command above on every machine first, or once with
a folder that they share (LCJAX_KERNELS).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import json
import logging
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import key_bits, nvidia, timings

log = logging.getLogger(__name__)
SWITCH, SECONDS = "LCJAX_KERNEL_CHECK", "LCJAX_KERNEL_CHECK_SECONDS"
COMMAND = "python -m pallas_kernels.self_check"
DTYPES = ("bfloat16", "float16", "float32")
TRUSTED = ("cudnn",)  # NVIDIA's kernels, which may run where no check is possible
PASSED, LOGGED = "passed", "self-check: "  # LOGGED: prefix of reasons that were logged already
# Largest errors, relative to the norm and to the largest number; rounding is half of them.
LIMITS = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-5}
DESCRIBED = "the program is compiled for a described GPU"
MARK = "@case "  # prefix of the lines of results in a child's output
TIMED_OUT, OUT_OF_MEMORY = "not done in", "RESOURCE_EXHAUSTED"  # reasons with them are temporary
PACKAGE = Path(__file__).resolve().parent
_lock = threading.Lock()


class Case(NamedTuple):
    """One checked call. T and S are no multiples of a tile; 2 query heads share a key head."""

    t: int
    s: int
    size: int
    mask: Any = None
    options: dict[str, Any] | None = None  # further arguments of `flash`
    slopes: bool = False  # adds a linear bias, whose gradient is compared too
    codes: str | None = None  # dtype of keys and values, whole numbers, as codes; no backward pass
    landmark: int = 0  # tokens of a block of `landmark_attention`; 0: the call is `flash`
    call: str = "attention"  # or DELTA_RULE, GROUPED


# Cases that calls with such an option need besides their kind. In the last one several query heads
# share a key head and there are few programs, so dk and dv are computed for each query head.
BIAS, CAP, GROUPS = "linear bias", "soft cap", "grouped heads"
GRADIENTS = "dq", "dk", "dv", "d_slopes"
DELTA_RULE, GROUPED = "gated delta rule", "products of groups"


@functools.cache
def cases(dtype: str) -> dict[str, Case]:
    """Returns the cases by kind of call (`timings.kind_of_any_dtype`), the most usual first."""
    from pallas_kernels.masks import causal, everything, window
    from pallas_kernels.tables import from_block_mask

    listed = np.random.default_rng(3).random((1, 2, 5, 5)) < 0.5
    listed |= np.eye(5, dtype=bool)
    table = from_block_mask(listed, q_block=64, k_block=64)
    chosen = np.random.default_rng(4).random((1, 300, 333)) < 0.1
    words = key_bits.pack(chosen)
    ids = np.repeat([1, 2, 0], (140, 130, 30))[None].astype(np.int32)
    large = 128 if dtype != "float32" else nvidia.LARGEST_EXACT
    by_kind = {
        f"causal, heads of {large}": Case(300, 300, large, causal()),
        "causal, heads of 64": Case(333, 333, 64, causal()),
        f"window, heads of {large}": Case(300, 300, large, causal() & window(100)),
        f"documents, heads of {large}": Case(
            300, 300, large, causal(), {"q_segments": ids, "k_segments": ids}
        ),
        "blocks, heads of 64": Case(300, 300, 64, causal(), {"table": table}),
        f"{timings.CHOSEN}, heads of {large}": Case(300, 333, large, options={"key_bits": words}),
        f"few queries, heads of {large}": Case(
            1, 700, large, causal(), {"q_index": np.array([600])}
        ),
        f"codes, heads of {large}": Case(
            1, 700, large, causal(), {"q_index": np.array([600])}, codes="int8"
        ),
        f"dense, heads of {large}": Case(300, 300, large, everything()),
        f"cross, heads of {large}": Case(200, 333, large, everything()),
        BIAS: Case(300, 300, 64, causal(), slopes=True),
        CAP: Case(300, 300, 64, causal(), {"soft_cap": 5.0}),
        GROUPS: Case(1100, 1100, large, causal()),
        f"{DELTA_RULE}, heads of {large}": Case(300, 300, large, call=DELTA_RULE),
        GROUPED: Case(230, 230, large, call=GROUPED),
    }
    if dtype != "float32":
        by_kind["landmark, heads of 64"] = Case(300, 300, 64, landmark=64)
        by_kind["landmark, heads of 128"] = Case(300, 300, 128, landmark=64)
        by_kind["causal, heads of 256"] = Case(300, 300, 256, causal())
        by_kind[f"{DELTA_RULE}, heads of 256"] = Case(300, 300, 256, call=DELTA_RULE)
    return by_kind


def needed(q, k, v, operands, spec) -> list[str]:
    """Returns the cases that must be right for a call.

    They are its own kind; if that is no case, its form with another head size, and its head size
    with a causal mask.
    """
    kind, known = timings.kind_of_any_dtype(q, k, v, operands, spec), cases(str(q.dtype))
    form, size = kind.split(", ")
    names = [kind]
    if kind not in known:
        names = [x for x in known if x.startswith(f"{form}, ")] + [f"causal, {size}"]
    names += [BIAS] * (operands.bias is not None) + [CAP] * (spec.soft_cap is not None)
    grouped = spec.block is None and q.shape[2] > k.shape[2] and form != "few queries"
    names += [GROUPS] * grouped
    return list(dict.fromkeys(names))


def may_run(name: str, direction: str, inputs, measured: bool = False) -> tuple[bool, str]:
    """Returns whether a backend may run a call, and why; may start the check.

    Args:
      inputs: (q, k, v, operands, spec), which the backend supports.
      measured: whether a measurement of such calls was right, which is enough where no check is
        possible.
    """
    dtype, cases_needed = str(inputs[0].dtype), needed(*inputs)
    return _passed(name, dtype, cases_needed, (direction,), measured)


def why_refused(name: str, dtype: str, case: str) -> str | None:
    """Returns why a backend may not run calls like a case, or None; may start the check."""
    can, why = _passed(name, dtype, [case], ("forward", "backward"), False)
    return None if can else why


def needed_by_delta_rule(dtype: str, largest: int) -> str:
    """Returns the case with the kernels of a call of `gated_delta_rule`, which must be right.

    Args:
      dtype: of queries, keys and values.
      largest: the larger size of heads of keys and of values.
    """
    sizes = (nvidia.LARGEST_EXACT,) if dtype == "float32" else (128, 256)
    return f"{DELTA_RULE}, heads of {next((x for x in sizes if largest <= x), sizes[-1])}"


def _passed(name: str, dtype: str, required, directions, measured: bool) -> tuple[bool, str]:
    """Returns whether a backend passed the cases `required` in all `directions`, and why."""
    if measured and jax.process_count() > 1 and timings.is_current() and not known().get(dtype):
        return True, "measured, and not checked in a job of several processes"
    outcomes = results(dtype)
    if isinstance(outcomes, str):
        refused, reason = outcomes.startswith(LOGGED), f"not checked: {outcomes}"
        if measured and not refused:
            return True, f"measured, and {reason}"
        # Kernels cannot be checked on a GPU that this process does not have: they count as passed.
        if outcomes == DESCRIBED or (name in TRUSTED and not refused):
            return True, reason
        return False, outcomes if refused else reason
    for case, direction in itertools.product(required, directions):
        by_direction = outcomes.get(name, {}).get(case, {})
        if direction not in by_direction:
            return False, f"not checked: {case}"
        if by_direction[direction] != PASSED:
            return False, f"{LOGGED}{case}, {direction}: {by_direction[direction]}"
    return True, f"passed the self-check: {'; '.join(required)}"


def results(dtype: str) -> dict | str:
    """Returns outcomes by backend, case and direction, or why there are none; may start the check.

    It may be called while JAX traces, because child processes run the kernels.
    """
    if nvidia.is_described():
        return DESCRIBED
    if _is_off():
        return f"{SWITCH}={os.environ[SWITCH]}"
    if not nvidia.is_here():
        return "the GPU is not the first device of this process"
    with _lock:  # several threads may trace at the same time
        return _results(timings.folder(), tuple(key(dtype).items()))


def _is_off() -> bool:
    return os.environ.get(SWITCH, "1").strip().lower() in ("0", "false", "no", "off")


def known() -> dict:
    """Returns the stored results by dtype, which must be the same in all processes of a job.

    It starts no check.
    """
    if _is_off():
        return {"is_off": True}
    if not nvidia.is_here():
        return {}
    keys = [key(dtype) for dtype in DTYPES]
    return {x["dtype"]: _read(file_of(timings.folder(), x), x) for x in keys}


@functools.cache
def _results(folder: Path, items: tuple) -> dict | str:
    """Returns the stored results, or runs the check; logs, once per process, what is not used."""
    check = dict(items)
    outcomes = _read(file_of(folder, check), check)
    if outcomes is None and jax.process_count() > 1:
        log.warning(
            "XLA takes the place of kernels: those for %s were not checked on %s, and a job of "
            "several processes starts no check; run `%s` on every machine, or once with %s in a "
            "folder that they share",
            check["dtype"], check["device"], COMMAND, timings.VARIABLE,
        )  # fmt: skip
        return f"{LOGGED}it is not started in a job of several processes"
    if outcomes is None:
        with _machine_lock(folder):
            outcomes = _read(file_of(folder, check), check) or run(check, folder, limit())
    if bad := failures(outcomes):
        log.warning(
            "the self-check of kernels for %s on %s failed, and these are not used: %s; "
            "`%s` runs it again",
            check["dtype"], check["device"], bad, COMMAND,
        )  # fmt: skip
    return outcomes


def failures(found: dict) -> str:
    """Returns one line with the failed cases of each backend and reason."""
    lines = []
    for name, by_case in found.items():
        by_reason: dict = {}
        for case, directions in by_case.items():
            wrong = {x: why for x, why in directions.items() if x != "unsupported"}
            for direction, why in wrong.items():
                # One entry where both directions have the same reason.
                both = set(wrong.values()) == {why}
                if why != PASSED:
                    entry = case if both else f"{case}, {direction}"
                    by_reason.setdefault(why, {})[entry] = True
        for why, entries in by_reason.items():
            which = "in every case" if list(entries) == list(by_case) else f"({'; '.join(entries)})"
            lines.append(f"{name}: {why} {which}")
    return "; ".join(lines)


def key(dtype: str) -> dict[str, str]:
    """Returns what the results of a check depend on."""
    return {
        "device": nvidia.device_kind(),
        **timings.versions(),
        "libraries": _libraries(),
        "dtype": dtype,
    }


def file_of(folder: Path, of: dict) -> Path:
    digest = hashlib.sha256(json.dumps(of).encode()).hexdigest()[:12]
    stem = timings.file_of(of["device"]).removesuffix(".json")
    return folder / f"self_check_{stem}_{of['dtype']}_{digest}.json"


def _read(file: Path, of: dict) -> dict | None:
    """Returns the results in a file, or None if a check is due.

    It is due without valid results, and if a case ran out of time and more time is allowed now.
    """
    try:
        content = json.loads(file.read_text())
        results = content["results"] if content["key"] == of else None
        had_time = content["seconds"] >= limit() or TIMED_OUT not in json.dumps(results)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return results if had_time else None


# Packages besides JAX on which the results of kernels depend.
LIBRARIES = (
    "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12",
    "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12",
)  # fmt: skip


@functools.cache
def _libraries() -> str:
    """Returns the installed versions of `LIBRARIES`, and the flags of XLA."""
    installed = []
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join([*installed, os.environ.get("XLA_FLAGS", "")])


@contextlib.contextmanager
def _machine_lock(folder: Path):
    """Lets one process at a time check this machine; others wait, and then read its results."""
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"self_check_{platform.node()}.lock").open("w")
    except (ImportError, OSError):  # not Linux, or a folder that is not writable
        yield
        return
    with file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(of: dict, folder: Path, seconds: float) -> dict:
    """Checks the backends of this GPU in child processes; writes and returns the results."""
    log.info("checking kernels for %s on %s, once", of["dtype"], of["device"])
    results = check_in_children(nvidia.order(), of["dtype"], seconds)
    content, file = {"key": of, "seconds": seconds, "results": results}, file_of(folder, of)
    if OUT_OF_MEMORY in json.dumps(results):
        log.warning("the GPU has too little free memory for the self-check of kernels")
        return results
    part = file.with_suffix(f".{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(file)
    except OSError as error:
        log.warning("the self-check of kernels cannot be kept: %s", error)
    return results


def command(name: str, dtype: str) -> list[str]:
    """Returns the command line that runs `child`."""
    return [sys.executable, "-m", "pallas_kernels.self_check", "--child", name, dtype]


def limit(default: float = 120.0) -> float:
    """Returns how many seconds a check may take."""
    text = os.environ.get(SECONDS, default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"{SECONDS}={text!r} is no number of seconds above 0; {SWITCH}=0 switches the check off"
        )
    return seconds


def check_in_children(names, dtype: str, seconds: float, platforms: str = "cuda,cpu") -> dict:
    """Runs child processes; returns {backend: {case: {direction: PASSED or the reason why not}}}.

    Every backend has its own process, so that a crash or a hang does not affect the others; they
    run at the same time. Cases without a result have the exit of the child as their reason. This
    process already holds most of the GPU's memory, so children do not preallocate.
    """
    environment = os.environ | {SWITCH: "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment |= {"JAX_PLATFORMS": platforms}
    deadline, outcomes, children = time.monotonic() + seconds, {}, {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            for name in names:
                # A file and not a pipe: a compiler that the child started could keep a pipe open.
                output = Path(folder) / name
                children[name] = _start(command(name, dtype), output, environment)
            for name, process in children.items():
                end = process if isinstance(process, str) else _end(process, deadline, seconds)
                outcomes[name] = _cases_of(Path(folder) / name, end, dtype)
        finally:  # also after an interrupt by the user
            for process in children.values():
                if not isinstance(process, str) and process.poll() is None:
                    _kill(process)
    return outcomes


def _start(words, output: Path, environment) -> subprocess.Popen | str:
    """Starts a process in a process group of its own; returns it, or why it did not start."""
    try:
        with output.open("w") as file:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                cwd=PACKAGE.parent, env=environment, start_new_session=True,
            )  # fmt: skip
    except (OSError, TypeError) as error:
        return f"it could not be started ({error})"


def _end(child: subprocess.Popen, deadline: float, seconds: float) -> str:
    """Waits for a process, and kills it at the deadline; returns how it ended."""
    try:
        return f"exit code {child.wait(max(0.0, deadline - time.monotonic()))}"
    except subprocess.TimeoutExpired:
        _kill(child)
        return f"{TIMED_OUT} {seconds:g} s"


def _kill(child: subprocess.Popen) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)  # also kills the processes that it started
        child.wait(5.0)  # a process that waits for the driver may not end
    except (OSError, subprocess.TimeoutExpired):
        pass


def _cases_of(output: Path, end: str, dtype: str) -> dict:
    """Returns the results in a child's output; the reason of missing cases is how it ended."""
    outcomes, last = {}, ""
    for line in output.read_text(errors="replace").splitlines() if output.exists() else ():
        if not line.startswith(MARK):
            last = line.strip() or last
            continue
        try:
            outcomes |= json.loads(line.removeprefix(MARK))
        except ValueError:
            continue  # the process died in the middle of the line
    if end == "exit code 0":
        end = "it ended without a result"
    elif end.startswith("exit code") and last:
        end = f"{end}: {last[:120]}"
    missing = dict.fromkeys(("forward", "backward"), end)
    return {name: outcomes.get(name, missing) for name in cases(dtype)}


def child(name: str, dtype: str) -> None:
    """Checks all cases of a backend in this process, and prints a line for each."""
    by_name = cases(dtype)
    with concurrent.futures.ThreadPoolExecutor(max(2, min(8, os.cpu_count() or 1))) as pool:
        pending = {case: _begin(pool, name, by_name[case], dtype) for case in by_name}
        for case, results_of in pending.items():
            print(MARK + json.dumps({case: results_of()}), flush=True)


def _begin(pool, name: str, case: Case, dtype: str):
    """Starts to compile a case and the reference; returns a function that returns its results."""
    from pallas_kernels.dispatch import BACKENDS, CannotRun

    d_lse, inputs = BACKENDS[name].takes_d_lse, arrays(case, dtype)
    try:
        lowered = jax.jit(program(case, name, d_lse)).lower(*inputs)
    except CannotRun as error:
        reason = str(error).partition("): ")[2].partition("; leave")[0]
        return lambda: {"unsupported": reason}
    except Exception as error:  # a compiler may raise anything
        wrong = _reason(error)
        return lambda: dict.fromkeys(("forward", "backward"), wrong)
    compiled = pool.submit(lowered.compile)
    reference = pool.submit(expected, case, inputs, d_lse)

    def finish() -> dict[str, str]:
        try:
            actual = _in_float32(compiled.result()(*inputs))
        except Exception as error:
            # The forward pass may be right without a backward pass.
            forward = _forward_alone(case, name, inputs, reference.result(), dtype)
            return {"forward": forward, "backward": _reason(error)}
        forward = {x: actual.pop(x) for x in [*actual] if x not in GRADIENTS}
        right = reference.result()
        if not actual:  # a call without gradients
            return {"forward": compare(forward, right, dtype)}
        return {
            "forward": compare(forward, right, dtype),
            "backward": compare(actual, right, dtype),
        }

    return finish


def _forward_alone(case: Case, name: str, inputs, wanted: dict, dtype: str) -> str:
    try:
        actual = jax.jit(program(case, name, None))(*inputs)
        return compare(_in_float32(actual), wanted, dtype)
    except Exception as error:
        return _reason(error)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]


def _in_float32(found: dict) -> dict:
    return {name: np.asarray(x, np.float32) for name, x in found.items()}


def compare(found: dict, wanted: dict, dtype: str) -> str:
    """Returns PASSED, or a reason with the largest error."""
    errors = {name: error_of(x, wanted[name]) for name, x in found.items()}
    worst = max(errors, key=lambda x: (errors[x] != errors[x], errors[x]))  # NaN is the worst
    return (
        PASSED
        if errors[worst] < LIMITS[dtype]
        else f"relative error of {worst} {errors[worst]:.1e}"
    )


def error_of(x, y) -> float:
    """Returns the larger of two errors of x: |x - y| / |y|, and max |x - y| / max |y|.

    NaN if the shapes or the elements that are -inf differ.
    """
    hidden = np.isneginf(y)  # lse of queries that see no key
    if x.shape != y.shape or not np.array_equal(np.isneginf(x), hidden):
        return float("nan")
    x, y = np.where(hidden, 0.0, x).ravel(), np.where(hidden, 0.0, y).ravel()
    norm, largest = np.linalg.norm(y), np.max(np.abs(y))
    return float(
        np.maximum(np.linalg.norm(x - y) / max(norm, 1e-30),
                   np.max(np.abs(x - y)) / max(largest, 1e-30))
    )  # fmt: skip


def arrays(case: Case, dtype: str) -> tuple:
    """Returns NumPy q, k, v, slopes or None, and the cotangents of out and lse.

    q, k, v and d_out are rounded to `dtype`.
    """
    rng, heads, rows = np.random.default_rng(0), 4, 1
    kv_heads = heads // 2 if case.call == "attention" else heads
    q, k = (rows, case.t, heads, case.size), (rows, case.s, kv_heads, case.size)
    q, k, v, d_out = (
        rng.normal(size=x).astype(np.float32).astype(jnp.dtype(dtype)) for x in (q, k, k, q)
    )
    if case.codes:
        k, v = (np.round(30 * x.astype(np.float32)).astype(x.dtype) for x in (k, v))
    slopes = np.array([0.5, 0.25, 0.1, 0.01], np.float32) if case.slopes else None
    return q, k, v, slopes, d_out, rng.normal(size=d_out.shape[:3]).astype(np.float32)


def program(case: Case, name: str, d_lse: bool | None):
    """Returns a function that maps `arrays` to out, lse and the gradients of an implementation.

    Args:
      d_lse: whether lse has a cotangent; None: the function computes no gradients.
    """
    from pallas_kernels.biases import Alibi
    from pallas_kernels.flash import flash
    from pallas_kernels.landmark import landmark_attention
    from pallas_kernels.quantised import Scaled

    if case.call != "attention":
        call = _delta_rule_program if case.call == DELTA_RULE else _grouped_program
        return call(name, with_gradients=d_lse is not None)

    def attention(q, k, v, slopes):
        if case.landmark:
            return landmark_attention(q, k, v, case.landmark, implementation=name)
        if case.codes:
            scale = jnp.arange(1.0, 1 + k.shape[1])[None, :, None, None] / (30 * k.shape[1])
            scale = jnp.broadcast_to(scale, (*k.shape[:3], 1))
            k, v = (Scaled(x.astype(case.codes), scale) for x in (k, v))
        bias = None if slopes is None else Alibi(slopes)
        return flash(
            q, k, v, case.mask, bias=bias, implementation=name, **(case.options or {})
        )  # fmt: skip

    def run(q, k, v, slopes, d_out, d_lse_values):
        arrays = q, k, v, slopes
        if d_lse is None or case.codes:
            out, lse = attention(*arrays)
            return {"out": out, "lse": lse}
        if d_lse:
            (out, lse), pull = jax.vjp(attention, *arrays)
            gradients = pull((d_out, d_lse_values))
        else:
            out, pull, lse = jax.vjp(attention, *arrays, has_aux=True)
            gradients = pull(d_out)
        named = zip(GRADIENTS, gradients, strict=True)
        return {"out": out, "lse": lse} | {x: y for x, y in named if y is not None}

    return run


def _delta_rule_program(name: str, with_gradients: bool):
    """Returns a function that maps `arrays` to the results of `gated_delta_rule`."""
    from pallas_kernels.delta_rule import XLA, gated_delta_rule

    def rule(q, k, v):
        x, y = (x.astype(jnp.float32) for x in (q, k))
        log_decay, beta = -0.1 * jnp.square(x[..., 0]), jax.nn.sigmoid(y[..., 0])
        q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (x, y))
        implementation = XLA if name == "reference" else name
        return gated_delta_rule(
            q.astype(v.dtype), k.astype(v.dtype), v, log_decay, beta, implementation=implementation
        )

    def run(q, k, v, slopes, d_out, d_lse):
        (out, state), pull = jax.vjp(rule, q, k, v)
        values = {"out": out, "state": state}
        if not with_gradients:
            return values
        gradients = pull((d_out, jnp.ones_like(state)))
        return values | dict(zip(GRADIENTS, gradients, strict=False))

    return run


def _grouped_program(name: str, with_gradients: bool):
    """Returns a function that maps `arrays` to products of groups of rows, some of them empty."""
    from pallas_kernels.dispatch import CannotRun
    from pallas_kernels.grouped import TRITON

    if name not in ("triton", "reference"):
        raise CannotRun("products of groups(): it has none; leave it out")
    groups = np.array([2, 0, 1, 3])  # blocks of each matrix; one more block has none

    def reference(x, w, block):
        owners = np.repeat(np.arange(4), groups)
        blocks = jnp.einsum("BRI,BIO->BRO", x[:-block].reshape(-1, block, x.shape[1]), w[owners])
        return jnp.pad(blocks.reshape(-1, w.shape[2]), [(0, block), (0, 0)])

    def of_block(block, x, w, dy):
        if name == "reference":
            y, pull = jax.vjp(functools.partial(reference, block=block), x, w)
            return y, *pull(dy)
        kernels = TRITON.load()
        if (reason := kernels.unsupported(x, w, block)) is not None:
            raise CannotRun(f"products of groups(): {reason}; leave it out")
        owners = np.repeat(np.arange(5), [*groups, 1]).astype(np.int32)
        y = kernels.products(x, w, owners, block=block)
        dx = kernels.products(dy, w, owners, block=block, transpose=True)
        return y, dx, kernels.sums(x, dy, (groups * block).astype(np.int32), block=block)

    def run(q, k, v, slopes, d_out, d_lse):
        size = q.shape[-1]
        columns, rows = size - size // 4, (groups.sum() + 1) * 128
        x, dy = (x.reshape(-1, size)[:rows] for x in (q, d_out))
        w = k.reshape(-1, size)[: 4 * size].reshape(4, size, size)
        # Whole tiles, and parts of tiles of blocks of the fewest rows
        whole = of_block(128, x, w, dy)
        few = groups.sum() * 16 + 16
        part = of_block(16, x[:few], w[:, :, :columns], dy[:few, :columns])
        y, dx, dw = (jnp.concatenate([a.ravel(), b.ravel()]) for a, b in zip(whole, part))
        return {"out": y} | ({"dq": dx, "dk": dw} if with_gradients else {})

    return run


def expected(case: Case, inputs, d_lse: bool) -> dict:
    """Returns the reference's results for the same numbers, in float32 on the CPU."""
    inputs = [None if x is None else np.asarray(x, np.float32) for x in inputs]
    with jax.default_device(jax.devices("cpu")[0]):
        return _in_float32(jax.jit(program(case, "reference", d_lse))(*inputs))


def main(argv=None) -> int:
    """Checks this machine's GPU again, stores the results for later processes, and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(*args.child)
        return 0
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not nvidia.is_here() or not nvidia.order():
        print(f"no kernel runs without a measurement on {jax.devices()[0].device_kind}")
        return 2
    failed = False
    for dtype in args.dtypes:
        check = key(dtype)
        outcomes = run(check, timings.folder(), limit(600.0))
        print(f"{dtype} on {check['device']}, kept in {file_of(timings.folder(), check)}")
        for name, by_case in outcomes.items():
            for case, results in by_case.items():
                print(f"  {name:10} {case}: {', '.join(f'{x} {y}' for x, y in results.items())}")
        failed |= bool(failures(outcomes))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
