"""Times whole models and peers on one NVIDIA GPU: training, decoding, reading, longest texts.

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
longest: the longest text of which an update fits by the compiler's plan, of TinyLlama-1.1B (all
    weights) and of Llama-3-8B under QLoRA (configs/llama3_8b_512k_qlora.yaml), with activations and
    moments in host memory ("offload"), or on the GPU with `remat: full` ("device"). An update of
    such a text takes minutes, so tokens/s are those of the longest one that is predicted to take 20
    seconds. Weights are zeros.

The side "lcjax" chooses its attention itself. Its peers are the same model with another attention:
jax.nn.dot_product_attention by cuDNN (training) or by XLA (decoding, because cuDNN copies the
cache), and "cudnn" and "xla" of `pallas_kernels`. With jax.nn's attention, remat computes attention
again in the backward pass. Rows of peers are one document; lcjax has the segments of packed rows,
as in train.py.

The most informative cases come first: a model of 1.1B at 16K tokens is large enough to fill the
GPU, and short enough that neither the weights nor attention dominate. Then 128K tokens, for which
memories are made. Longer texts precede shorter ones. The small model, whose steps are mostly
overhead, comes later.

Cases of training and of decoding that follow one another share a process, which starts once; a case
of reading, whose peak memory is compared, has its own, and so has one of the longest text. A
process is killed if it is silent for 100 s while it compiles, or for 45 s while it runs; another
one goes on with the next case. A case that fails, hangs or runs out of memory is recorded with the
reason. The same command continues with the cases that have no record for this kind of GPU. With
`--outdated` it also repeats the cases whose code or version of JAX has changed since; with
`--again` also, after the others, those that failed. Records are in DEVICE.json in `--out`, which is
written after every case. Where git does not know the commit, the environment variable LCJAX_COMMIT
says it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .records import NO_GPU, Records, code, failure_emitted, known_about, reserve_memory
from .workers import emit, jobs_of_child, say, supervise

ABOUT = "about"  # the job that describes the device and checks the kernels
CHECKING = 180.0  # seconds that this job may be silent; the self-check ends after 120
COMPILING, RUNNING = 100.0, 45.0  # seconds that a case may be silent
# Seconds that a case needs at least; with less time left, none begins.
LEAST = {"train": 45.0, "decode": 45.0, "read": 75.0, "longest": 90.0}
CACHE_HIT = "/jax/compilation_cache/cache_hits"  # a program that was not compiled again


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    words = "words that a case's name must have, once or more: 'train 16k' 'decode 1.1b lcjax'"
    parser.add_argument("--cases", nargs="+", metavar="WORDS", default=[""], help=words)
    parser.add_argument("--out", type=Path, help="default: benchmarks/gpu/results/model")
    parser.add_argument("--outdated", action="store_true", help="also cases of other code")
    parser.add_argument("--again", action="store_true", help="also failed and outdated cases")
    parser.add_argument("--report", action="store_true", help="only print the tables")
    parser.add_argument("--list", action="store_true", help="only print the names of the cases")
    overtime = "minutes that a case which has begun may last beyond --minutes"
    parser.add_argument("--overtime", type=float, default=0.0, help=overtime)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, without a GPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def chosen(args) -> list:
    """Returns the cases whose names contain all words of one of the choices."""
    from .model_runs import cases

    choices = [words.split() for words in args.cases]
    return [
        case for case in cases(args.tiny)
        if any(set(words) <= set(case.name.split()) for words in choices)
    ]  # fmt: skip


def left(args, about: dict) -> tuple[int, int]:
    """Returns how many of the chosen cases are to be measured, and how many there are."""
    return len(waiting(args, Records.of(args.out, about), about)), len(chosen(args))


def waiting(args, records: Records, about: dict) -> list:
    """Returns the chosen cases that are to be measured, in their order; failed ones come last."""
    states = {"missing"}
    states |= {"outdated"} if args.outdated or args.again else set()
    states |= {"failed"} if args.again else set()
    of = {case: records.state(case.name, about) for case in chosen(args)}
    return sorted((x for x in of if of[x] in states), key=lambda x: of[x] == "failed")


def processes(cases: list) -> list[list]:
    """Returns the cases of each process."""
    groups = itertools.groupby(
        enumerate(cases), lambda x: (x[1].kind, x[1].kind in ("read", "longest") and x[0])
    )
    return [[case for _, case in group] for _, group in groups]


def work(jobs: list[dict], args) -> None:
    """Does jobs in the child process and emits their results."""
    if jobs[0]["name"] == ABOUT:  # leaves GPU memory to the processes of the self-check
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from . import model_runs

    if jobs[0]["name"] == ABOUT:
        if missing := model_runs.missing_packages():
            emit(missing=missing)
        else:
            emit(about=model_runs.about())
        emit(done=ABOUT)
        return
    import jax.monitoring

    def compiled(event: str, seconds: float, **_) -> None:
        if seconds > 1.0:  # so that a case of many programs is not silent
            emit(took={event: seconds})

    hits = []
    jax.monitoring.register_event_duration_secs_listener(compiled)
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))

    def begin(what: str) -> None:
        within = RUNNING if what.startswith("run") else COMPILING
        emit(begins=what, within=within, code=code())

    by_name, peak = {case.name: case for case in model_runs.cases(args.tiny)}, 0
    for i, job in enumerate(jobs):
        now, case = time.monotonic(), by_name[job["name"]]
        if now > job["by"] or now + LEAST[case.kind] > job["end"]:
            emit(left=[x["name"] for x in jobs[i:]])
            return
        emit(job=job["name"])
        hits.clear()
        with failure_emitted():
            record = model_runs.measure(case, begin)
        highest = model_runs.peak_bytes()
        # Of several cases in one process, the peak of a later one is known only if it is higher.
        record["peak_gb"], peak = highest / 1e9 if highest > peak else None, highest
        emit(record=record | {"cached_programs": hits.count(CACHE_HIT), "code": code()})
        emit(done=job["name"])
        model_runs.release()


def described(args, deadline: float, env: dict[str, str] | None = None) -> dict | None:
    """Returns the device and versions (`model_runs.about`); None if nothing can be measured.

    The reason is printed. `env` is the environment of the process that asks; None: that of this
    one.
    """
    if (known := known_about()) is not None:
        return known
    limits = {"deadline": deadline, "patience": CHECKING}
    events = supervise(_command(args), [{"name": ABOUT}], **limits, env=env)
    about, why = None, "no time to find the device"
    for event in events:
        about = event.get("about", about)
        if "lost" in event:
            why = event["why"]
        if "missing" in event:
            why = (
                f"missing: {', '.join(event['missing'])}; see dependencies in pyproject.toml, and "
            )
            why += f"`python -m {__package__}.pack` for a machine without a network"
            break
    if about is not None and not args.tiny and about["platform"] != "gpu":
        print(NO_GPU.format(about["platform"], "--tiny"), file=sys.stderr)
        return None
    if about is None:
        print(f"error: {why}", file=sys.stderr)
    return about


def _command(args) -> list[str]:
    return [sys.executable, "-m", f"{__package__}.model", "--worker", *["--tiny"] * args.tiny]


def measured(cases: list, args, deadline: float) -> Iterator[tuple]:
    """Yields (case, record) of cases in order; a record has "reason" if its case failed.

    When the time is up, the others have none.
    """
    by_name, command = {case.name: case for case in cases}, _command(args)
    end = deadline + 60 * args.overtime
    for group in processes(cases):
        if time.monotonic() > deadline:  # no process is started to learn this
            return
        jobs = [{"name": case.name, "by": deadline, "end": end} for case in group]
        now: dict = {}
        for event in supervise(command, jobs, deadline=end, patience=COMPILING):
            if "job" in event:
                now = {"job": event["job"], "what": "starting"}
                say(f"{event['job']} begins")
            now |= {key: event[key] for key in event.keys() & {"code", "failed"}}
            now["what"] = event.get("begins", now.get("what", "starting"))
            if "record" in event:
                yield by_name[now["job"]], event["record"]
            if "lost" in event:
                now = now if event["lost"] == now.get("job") else {"what": "starting"}
                why = f"{now.get('failed', event['why'])} ({now['what']})"
                yield by_name[event["lost"]], {"reason": why, "code": now.get("code", code())}
            if "left" in event:
                return


def main(argv=None) -> int:
    args = arguments(argv)
    if args.out is None:  # times of tiny shapes are not results
        args.out = Path("runs/gpu_model_tiny" if args.tiny else "benchmarks/gpu/results/model")
    reserve_memory()
    if args.tiny:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # it compiles fast
    if args.worker:
        work(jobs_of_child(), args)
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
    deadline = time.monotonic() + 60 * args.minutes
    if (about := described(args, deadline)) is None:
        return 2
    say(f"{about}")
    records = Records.of(args.out, about)
    cases = waiting(args, records, about)
    say(f"{len(cases)} cases are to be measured")
    for case, result in measured(list(cases), args, deadline):
        about_case = {"case": case.name, "kind": case.kind, "model": case.model}
        about_case |= {"tokens": case.tokens, "side": case.side, "about": about}
        records.add(about_case | result)
        cases.remove(case)
        rate = result.get("tokens_per_second", 0.0)
        say(result.get("reason") or f"{rate:.4g} tokens/s, {len(cases)} cases are left")
    if cases:
        say(f"{len(cases)} cases are left; the same command goes on with {cases[0].name}")
    return 0


def report(folder: Path) -> str:
    """Returns the tables of all records in a folder, in Markdown."""
    from .model_report import tables

    files = sorted(folder.glob("*.json"))
    if not files:
        return f"No case has a record in {folder}."
    return "\n\n".join(tables(list(Records(file).by_case.values())) for file in files)


if __name__ == "__main__":
    sys.exit(main())
