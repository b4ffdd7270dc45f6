"""Times whole models and peers on one NVIDIA GPU: training, decoding and reading 128K tokens.

    python -m benchmarks.gpu.model --minutes 9          # repeat until no case is left
    python -m benchmarks.gpu.model --cases "train 16k" "decode 1.1b"
    python -m benchmarks.gpu.model --report             # prints the records
    python -m benchmarks.gpu.model --tiny               # every kind of case, on a CPU

Random weights in the shapes of SmolLM2-135M, TinyLlama-1.1B and Llama-2-7B, in bfloat16:

train: AdamW updates of all weights (float32, as in train.py) with train.py's default `remat`, of
    about 32K tokens or one text. If this does not fit, fewer texts are used, then more `remat`. MFU
    is the rate of the model's FLOPs (`lcjax.cost`) relative to the GPU's dense bfloat16 peak.
decode: one text is continued by 64 tokens. The share of bandwidth is the rate at which tokens read
    the weights and the cache, relative to the peak bandwidth of the GPU's memory.
read: a text is read and continued by CEPE, by SharedLLM and by full attention with the same decoder
    (CEPE, table 1; SharedLLM, figure 3; see reading.py). "cepe" stores the encoder's states, which
    are projected again for every token; "cepe projected" stores keys and values, as the others do.

The side "lcjax" chooses its attention itself. Its peers are the same model with another attention:
jax.nn.dot_product_attention by cuDNN (training) or by XLA (decoding, because cuDNN copies the
cache), and "cudnn" and "xla" of `pallas_kernels`. With jax.nn's attention, remat computes attention
again in the backward pass. Rows of peers are one document; lcjax has the segments of packed rows,
as in train.py.

The most informative cases come first: a model of 1.1B at 16K tokens is large enough to fill the
GPU, and short enough that neither the weights nor attention dominate. Then 128K tokens, for which
memories are made. Longer texts precede shorter ones. The small model, whose steps are mostly
overhead, comes later.

Each case runs in its own process, which is killed if it is silent for `--timeout` seconds while it
compiles or runs. A case that fails, hangs or runs out of memory is recorded with the reason. The
same command continues with the cases that have no record for this kind of GPU; with `--again`, also
with cases that failed, or whose record is of other kernels or another version of JAX. Records are
in DEVICE.json in `--out`, which is written after every case.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from .workers import emit, jobs_of_child, supervise

ABOUT = "about"  # the job that describes the device and checks the kernels
CHECKING = 300.0  # seconds that this job may be silent
LEAST = 60.0  # seconds that a case may need; with less time left, no case begins


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    words = "words that a case's name must have, once or more: 'train 16k' 'decode 1.1b lcjax'"
    parser.add_argument("--cases", nargs="+", metavar="WORDS", default=[""], help=words)
    parser.add_argument("--out", type=Path, help="default: benchmarks/gpu/results/model")
    parser.add_argument("--again", action="store_true", help="also failed and outdated cases")
    parser.add_argument("--report", action="store_true", help="only print the tables")
    parser.add_argument("--list", action="store_true", help="only print the names of the cases")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds; see above")
    parser.add_argument("--commit", help="of lcjax, where git does not know it")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, without a GPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


class Records:
    """Records of the cases on one kind of GPU, in a file that is written atomically."""

    def __init__(self, file: Path):
        self.file = file
        self.by_case = json.loads(file.read_text())["cases"] if file.exists() else {}

    def needs(self, case: str, again: bool, about: dict) -> bool:
        """Whether a case has no record; with `again`, also if it failed or `about` has changed."""
        if (record := self.by_case.get(case)) is None or not again:
            return record is None
        versions = [[x.get(name) for name in ("kernels", "jax")] for x in (record["about"], about)]
        return "reason" in record or versions[0] != versions[1]

    def add(self, record: dict) -> None:
        self.by_case[record["case"]] = record
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"cases": self.by_case}, indent=1) + "\n")
        part.replace(self.file)


def chosen(args) -> list:
    """Returns the cases whose names contain all words of one of the choices."""
    from .model_runs import cases

    choices = [words.split() for words in args.cases]
    return [
        case for case in cases(args.tiny)
        if any(set(words) <= set(case.name.split()) for words in choices)
    ]  # fmt: skip


def work(job: str, args) -> None:
    """Does one job in the child process and emits its result."""
    if job == ABOUT:  # leaves GPU memory to the processes of the self-check
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from . import model_runs

    if job == ABOUT:
        if missing := model_runs.missing_packages():
            emit(missing=missing)
        else:
            emit(about=model_runs.about(args.commit))
        return
    import jax.monitoring

    def compiled(event: str, seconds: float, **_) -> None:
        if seconds > 1.0:  # so that a case of many programs is not silent
            emit(took={event: seconds})

    jax.monitoring.register_event_duration_secs_listener(compiled)
    case = next(case for case in model_runs.cases(args.tiny) if case.name == job)
    try:
        emit(record=model_runs.measure(case, lambda what: emit(begins=what)))
    except Exception as error:  # XLA and its libraries raise various errors
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        emit(failed=f"{type(error).__name__}: {lines[0]}"[:400])
        raise


def child(job: str, args, deadline: float, patience: float) -> dict | None:
    """Returns what a child emitted, with "failed" if the job failed; None if time ran out."""
    command = [sys.executable, "-m", f"{__package__}.model", "--worker", *["--tiny"] * args.tiny]
    command += ["--commit", args.commit] * bool(args.commit)
    result, what = {}, "starting"
    for event in supervise(command, [{"name": job}], deadline=deadline, patience=patience):
        what = event.get("begins", what)
        result |= {key: event[key] for key in event.keys() & {"about", "missing", "record"}}
        if "failed" in event:
            result["failed"] = f"{event['failed']} ({what})"
        if "left" in event:
            return None
        if "lost" in event and not result:
            result["failed"] = f"{event['why']} ({what})"
    return result


def main(argv=None) -> int:
    args = arguments(argv)
    if args.out is None:  # times of tiny shapes are not results
        args.out = Path("runs/gpu_model_tiny" if args.tiny else "benchmarks/gpu/results/model")
    if "XLA_CLIENT_MEM_FRACTION" not in os.environ:  # JAX refuses both names at once
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # its default is 0.75
    if args.tiny:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # it compiles fast
    if args.worker:
        (job,) = jobs_of_child()
        work(job["name"], args)
        emit(done=job["name"])
        return 0
    if args.list:
        print(*(case.name for case in chosen(args)), sep="\n")
        return 0
    if not args.report and (code := run(args)):
        return code
    print(report(args.out))
    return 0


def run(args) -> int:
    """Measures cases until none is left or the time is up; returns the exit code."""
    from pallas_kernels import timings

    deadline = time.monotonic() + 60 * args.minutes
    result = child(ABOUT, args, deadline, CHECKING) or {"failed": "no time to find the device"}
    about = result.get("about")
    if about is None:
        why = result.get("failed", "")
        if "missing" in result:
            why = f"missing: {', '.join(result['missing'])}; see dependencies in pyproject.toml"
        print(f"error: {why}", file=sys.stderr)
        return 2
    if not args.tiny and about["platform"] != "gpu":
        print(f"error: JAX runs on {about['platform']} here, and this is for NVIDIA GPUs; install "
              "jax for CUDA, or try it at tiny sizes with --tiny", file=sys.stderr)  # fmt: skip
        return 2
    say(f"{about}")
    records = Records(args.out / timings.file_of(about["device"]))
    left = [case for case in chosen(args) if records.needs(case.name, args.again, about)]
    while left and (args.tiny or time.monotonic() + LEAST < deadline):
        case = left[0]
        say(f"{case.name} begins, {len(left)} cases are left")
        result = child(case.name, args, deadline, args.timeout)
        if result is None:
            break
        about_case = {"case": case.name, "kind": case.kind, "model": case.model}
        about_case |= {"tokens": case.tokens, "side": case.side, "about": about}
        failed = {"reason": result["failed"]} if "failed" in result else {}
        record = about_case | result.get("record", {}) | failed
        records.add(record)
        say(record.get("reason") or f"{record['tokens_per_second']:.4g} tokens/s")
        left.pop(0)
    if left:
        say(f"{len(left)} cases are left; the same command goes on with {left[0].name}")
    return 0


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def report(folder: Path) -> str:
    """Returns the tables of all records in a folder, in Markdown."""
    from .model_report import tables

    files = sorted(folder.glob("*.json"))
    if not files:
        return f"No case has a record in {folder}."
    return "\n\n".join(tables(list(Records(file).by_case.values())) for file in files)


if __name__ == "__main__":
    sys.exit(main())
