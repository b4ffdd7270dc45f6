"""Trains and evaluates rows of LCEG's table 1 with SmolLM2-135M at 32,768 tokens, in minutes each.

    python -m benchmarks.gpu.rows --minutes 5                 # the next rows
    python -m benchmarks.gpu.rows --methods yarn_32k pi_32k
    python -m benchmarks.gpu.rows --tiny                      # random weights, on a CPU

A row is `python eval.py reproduce lceg/table1 --scale smollm2_32k` for one method, with a shorter
training (`STEPS` steps of 8 texts of 32,768 tokens instead of 200) and fewer windows, needles and
samples of RULER, so that it ends within minutes on one H100. The rows of one setting are comparable
with each other, not with those of the whole scale.

The first of `METHODS` come first. A row that is cut off goes on where it stopped, from the last
checkpoint of its training and the last record of its evaluation, if `--work` is still there (not
with `--again`). A record in DEVICE.json in `--out` has a finished row; `summary.py` prints it.
`--data` is a folder of `lcjax.data prepare` (see `pack.py`); without it the training tokenises
Python's standard library.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from pathlib import Path

from .records import NO_GPU, Records, about_here, code, failure_emitted, reserve_memory
from .workers import emit, jobs_of_child, supervise

# The most telling first: the exact method that won in the paper, then the others it compares.
METHODS = ("ntk_32k", "yarn_32k", "pi_32k", "longlora_32k", "clex_32k", "landmark")
TINY = ("ntk_32k",)
STEPS, LENGTH = 24, 32_768  # of a training: steps, and tokens of a text
SHORTER = (
    f"--study.extend=lcjax:study/lceg_extend_32k --train.steps={STEPS} --train.warmup_steps=4 "
    "--train.save_minutes=0.5 --train.log_every=2",
    "--tasks.0.lengths=[8192,32768]",  # perplexity
    "--max_windows=8",
    "--tasks.1.lengths=[32768]",  # needles
    "--tasks.1.depths=5",
    "--tasks.2.lengths=[8192,32768]",  # RULER
    "--tasks.2.samples=4",
    "--tasks.2.tasks=[niah_single_1,niah_multikey_1,vt]",
)
SILENT = 150.0  # seconds without a word, while compiling, after which a row counts as hanging
ENDING = 20.0  # seconds before the time is up in which a training writes its checkpoint
TASKS = ("pg19", "needle", "ruler")


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/gpu/results/rows"))
    parser.add_argument("--work", type=Path, default=Path("runs/gpu_rows"))
    parser.add_argument("--data", type=Path, help="prepared tokens to train on")
    parser.add_argument("--again", action="store_true", help="rows of other code, too, from anew")
    parser.add_argument("--tiny", action="store_true", help="random weights, without a GPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.tiny:
        args.methods = list(TINY)
    return args


def words(method: str, args) -> list[str]:
    """Returns the words of `eval.py` for a row."""
    scale = "tiny" if args.tiny else "smollm2_32k"
    only = f"{method},pg19" if args.tiny else method
    command = ["reproduce", "lceg/table1", "--scale", scale, "--only", only]
    command.append(f"--run.folder={args.work.resolve()}")
    if args.tiny:
        return command
    extend, *others = SHORTER
    data = f" --data.path={args.data.resolve()}" if args.data else ""
    existing = ["--run.existing=overwrite"] * args.again
    study = f"--study.folder={args.work.resolve()}/trained"
    return [*command, extend + data, study, *others, *existing]


class Heard:
    """A stream that also tells the parent that this process is alive, at most every 5 seconds."""

    def __init__(self, stream):
        self.stream, self.last, self.error = stream, 0.0, ""

    def write(self, text: str) -> int:
        if text.startswith("error: "):
            self.error = text.strip().removeprefix("error: ")[:300]
        if time.monotonic() - self.last > 5:
            self.last = time.monotonic()
            emit(alive=True)
        return self.stream.write(text)

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def work(method: str, args) -> None:
    """Makes one row in the child process and emits its record."""
    emit(job=method)
    sys.stderr = heard = Heard(sys.stderr)
    start = time.perf_counter()
    try:
        with failure_emitted():
            from lcjax.evaluation import command

            has_failed = command.main(words(method, args))
    except ModuleNotFoundError as error:  # the next row needs it, too
        emit(refused=f"{error}; `python -m {__package__}.pack` brings what lcjax needs")
        raise
    if has_failed:
        emit(refused=heard.error)
        raise SystemExit(1)
    cells = results(method, args.work)
    missing = {"pg19"} - {*cells} if args.tiny else {*TASKS} - {*cells}
    if missing:  # a signal stopped the training
        raise SystemExit(f"it was stopped before {', '.join(sorted(missing))}")
    record = {"cells": cells, "seconds": time.perf_counter() - start, "code": code()}
    emit(record=record | training(method, args.work))
    emit(done=method)


def results(method: str, folder: Path) -> dict[str, dict[str, float]]:
    """Returns the values of a row by task and length."""
    cells: dict = {}
    for file in sorted((folder / "tables").glob("*.csv")):
        with file.open() as lines:
            for line in csv.DictReader(lines):
                if line["method"] == method and "protocol" in line:
                    cells.setdefault(line["task"], {})[line["length"]] = float(line["value"])
    return cells


def training(method: str, folder: Path) -> dict:
    """Returns the loss and the speed of a row's training; empty without one."""
    file = folder / "trained" / method / "metrics.jsonl"
    if not file.exists():
        return {}
    log = [json.loads(line) for line in file.read_text().splitlines()]
    losses = [line["loss"] for line in log if line.get("loss") is not None]
    rates = [line["tokens_per_second"] for line in log if line.get("tokens_per_second")]
    return {"steps": log[-1]["step"], "loss": losses[-1], "tokens_per_second": max(rates)}


def main(argv=None) -> int:
    args = arguments(argv)
    reserve_memory()
    if args.tiny:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if args.worker:
        (job,) = jobs_of_child()
        work(job["name"], args)
        return 0
    return run(args, sys.argv[1:] if argv is None else argv)


def waiting(args, about: dict) -> list[str]:
    """Returns the methods whose rows are to be made: no record, or failed with other code.

    A good row of other code is not repeated unless `args.again`, since it takes minutes.
    """
    records = Records.of(args.out, about)

    def is_waiting(method: str) -> bool:
        state = records.state(method, about)
        failed = "reason" in records.by_case.get(method, ())
        return state == "missing" or (state == "outdated" and failed) or (
            args.again and state != "done"
        )  # fmt: skip

    return [method for method in args.methods if is_waiting(method)]


def left(args, about: dict) -> tuple[int, int]:
    """Returns how many of the rows are left for a device, and how many there are."""
    return len(waiting(args, about)), len(args.methods)


def run(args, options: list[str]) -> int:
    """Makes rows until none is left or the time is up; returns the exit code."""
    deadline = time.monotonic() + 60 * args.minutes
    about = about_here()
    if not args.tiny and about["platform"] != "gpu":
        print(NO_GPU.format(about["platform"], "--tiny"), file=sys.stderr)
        return 2
    records = Records.of(args.out, about)
    for method in waiting(args, about):
        if time.monotonic() + 3 * ENDING > deadline:
            break
        record = made(method, options, deadline)
        if record is None:
            print(f"{method} was cut off; the same command goes on with it", file=sys.stderr)
            break
        if "refused" in record:  # such as a package that is missing: the next row needs it, too
            print(f"error: {record['refused']}", file=sys.stderr)
            return 2
        records.add({"case": method, "about": about} | record)
    return 0


def made(method: str, options: list[str], deadline: float) -> dict | None:
    """Returns the record of a row; None if the time was up.

    It has "reason" if the row failed, or is {"refused": why} if `eval.py` did not begin.
    """
    command = [sys.executable, "-m", f"{__package__}.rows", *options, "--worker"]
    ran: dict = {"code": code()}
    ending = {"deadline": deadline - ENDING, "patience": SILENT, "grace": ENDING}
    for event in supervise(command, [{"name": method}], **ending):
        ran |= {key: event[key] for key in event.keys() & {"code", "failed", "refused"}}
        if "record" in event:
            return event["record"]
        if "left" in event:
            return None
        if "lost" in event:
            if "refused" in ran:
                return {"refused": ran["refused"]}
            return {"reason": ran.get("failed", event["why"]), "code": ran["code"]}
    return None


if __name__ == "__main__":
    sys.exit(main())
