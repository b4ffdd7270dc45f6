"""Runs what a few minutes on an NVIDIA GPU can answer, the most telling first, and prints a table.

    python -m benchmarks.gpu.day --plan               # the order, the time limits, what is done
    python -m benchmarks.gpu.day --minutes 8          # repeat to go on
    python -m benchmarks.gpu.day --parts rows         # one part alone
    python -m benchmarks.gpu.summary                  # the table of what is stored
    python -m benchmarks.gpu.day --tiny               # every part at tiny sizes, on a CPU

The parts are commands of their own (`--plan` prints them):

check      the kernels against float64 formulas, where their code has changed
decode     TinyLlama-1.1B continues texts of 16K and 64K, beside jax.nn by XLA and by cuDNN
read       CEPE and SharedLLM read 128K beside full attention of the same decoder
train      TinyLlama-1.1B trains on 64K, beside jax.nn by cuDNN
longest    the longest texts of an update of TinyLlama-1.1B, and of Llama-3-8B under QLoRA, with and
           without offloading
attention  tables, cross-attention, masks per head and lengths that today's kernels have no times of
rows       LCEG's table 1 with SmolLM2-135M at 32K, one method at a time
shapes     the other workloads of attention, with other heads

Each part is a process with a time limit for all of it, and limits for the silence of a process that
compiles or runs, which is then ended and replaced. A part that hangs, crashes or runs out of memory
does not stop the next one. Results are written into `--out` after every case, with device, driver,
clocks, versions and commit; a case is not repeated until code that it ran changes (a row never,
unless it failed). What is left when the time is up is done by the next call. The time is exceeded
by at most half a minute.

Without a network, first run `pack.py` elsewhere and pass its folder as `--pack`. Where git does not
know the commit, set LCJAX_COMMIT.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import records
from .pack import SITE, TOKENS
from .summary import RESULTS, table
from .workers import ROOT, say

TIMESTAMP = re.compile(r"\d\d:\d\d:\d\d ")
GRACE = 25.0  # seconds after its limit in which a part must end by itself
LEAST = 30.0  # seconds; with less time left, no part begins
PARTS_FILE = "day"  # folder in `--out` with the outcome of each part


@dataclass(frozen=True)
class Part:
    """A command of this package with the words that select its cases."""

    name: str
    seconds: float  # at most, in one call; what it does not need is left to the next parts
    module: str
    folder: str  # of its results, in `--out`
    words: tuple[str, ...] = ()
    tiny: tuple[str, ...] = ()  # instead of `words`

    def command(self, args, device: str) -> list[str]:
        """Returns the words of the part's command, without its minutes."""
        from pallas_kernels import timings

        place = args.out / self.folder
        if self.module == "check":
            return [*self._words(args), "--results", str(place / timings.file_of(device))]
        words = [*self._words(args), "--out", str(place)]
        if self.module == "rows":
            words += ["--work", str(args.work / "rows")]
            tokens = args.pack / SITE / TOKENS if args.pack else None
            words += ["--data", str(tokens)] if tokens and tokens.exists() else []
        return words

    def _words(self, args) -> Sequence[str]:
        return self.tiny if args.tiny else self.words

    def left(self, args, about: dict) -> tuple[int, int]:
        """Returns how many of its cases are left, and how many there are."""
        module = importlib.import_module(f"{__package__}.{self.module}")
        return module.left(module.arguments(self.command(args, about["device"])), about)


def _models(*cases: str) -> tuple[str, ...]:
    return ("--outdated", "--cases", *cases)


TIMED = ("--outdated", "--passes", "fwd", "bwd")
TINY_MASK = ("--cpu", "--seconds", "0", "--passes", "fwd", "--only", "f blocks 12.5 128 2/2 of 32")

# On an H100, a process begins to measure after about 12 s; a case of decoding then compiles for 16
# to 29 s, of training for 8 to 14 s and of reading for 56 s (benchmarks/gpu/results/model), and the
# self-check takes 26 s once. So a call of 8 minutes measures about four cases of decoding, two of
# reading and three of training. Rows need about 5 minutes each, in a call of their own, and so do
# the four cases of longest texts: each compiles two to four programs.
PARTS = (
    Part(
        "check", 60, "check", "check",
        ("--seed", "1", "--backends", "mosaic_gpu", "triton", "cudnn"),
        ("--cpu", "--only", "small, float32: causal, odd"),
    ),
    Part(
        "decode", 90, "model", "model", _models("decode 1.1b 16k", "decode 1.1b 64k"),
        ("--tiny", "--outdated", "--cases", "decode lcjax"),
    ),
    Part(
        "read", 100, "model", "model", _models("read 1.1b 128k"),
        ("--tiny", "--outdated", "--cases", "read shared_llm"),
    ),
    Part(
        "train", 60, "model", "model", _models("train 1.1b 64k"),
        ("--tiny", "--outdated", "--cases", "train tiny 64 lcjax"),
    ),
    Part(
        "longest", 240, "model", "model", _models("longest"),
        ("--tiny", "--outdated", "--cases", "longest offload"),
    ),
    Part(
        "attention", 60, "attention", "",
        (*TIMED, "--group", "fgda", "--only", "16/16 heads of 128"), TINY_MASK,
    ),
    Part("rows", 600, "rows", "rows", (), ("--tiny",)),
    Part("shapes", 600, "attention", "", TIMED, TINY_MASK),
)  # fmt: skip


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=8.0)
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, help="default: benchmarks/gpu/results")
    parser.add_argument("--work", type=Path, default=Path("runs/gpu_day"), help="for what resumes")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="of pack.py")
    parser.add_argument("--plan", action="store_true", help="only print what would run")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, without a GPU")
    args = parser.parse_args(argv)
    if args.out is None:  # times of tiny sizes are not results
        args.out = Path("runs/gpu_day_tiny") if args.tiny else RESULTS
    if args.tiny and args.work == parser.get_default("work"):
        args.work = args.out / "work"
    if args.pack and not args.pack.is_dir():
        parser.error(f"--pack {args.pack} is no folder; python -m {__package__}.pack makes it")
    args.out, args.work = args.out.resolve(), args.work.resolve()  # parts run in another folder
    args.pack = args.pack and args.pack.resolve()
    return args


def environment(args, module: str = "") -> dict[str, str]:
    """Returns the environment of a part: packed packages, and a cache of compiled programs.

    Attention has no cache, since its compile times are results.
    """
    variables = dict(os.environ)
    if args.pack:
        paths = [str(args.pack / SITE), *variables.get("PYTHONPATH", "").split(":")]
        variables["PYTHONPATH"] = ":".join(filter(None, paths))
    if module in ("model", "rows"):
        variables.setdefault("JAX_COMPILATION_CACHE_DIR", str(args.work / "compiled"))
    if args.tiny:
        variables |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return variables


def ended(command: list[str], limit: float, log: Path, env: dict[str, str]) -> str:
    """Runs a command for at most `limit` seconds; returns how it ended, "" for exit code 0.

    It has a process group of its own, all of which is ended. What it prints is in `log`; lines
    with a time are printed here, too.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child = subprocess.Popen(
        command, cwd=ROOT, env=env, process_group=0, errors="replace", **pipes
    )  # fmt: skip
    pump = threading.Thread(target=_copy, args=(child.stdout, log), daemon=True)
    pump.start()
    try:
        code = child.wait(limit)
        if code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        return f"it was ended after {limit:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # also what it has left behind
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        pump.join(5.0)


def _copy(lines: Iterable[str], log: Path) -> None:
    with log.open("w") as file:
        for line in lines:
            file.write(line)
            file.flush()
            if TIMESTAMP.match(line):
                print(line, end="", file=sys.stderr, flush=True)


def run(args, about: dict, deadline: float, parts: Sequence[Part] = PARTS) -> None:
    """Runs the parts that have cases left, one after the other, until the time is up."""
    outcomes = records.Records.of(args.out / PARTS_FILE, about)
    for part in (part for part in parts if part.name in args.parts):
        count, _ = part.left(args, about)
        if not count:
            continue
        seconds = min(part.seconds, deadline - time.monotonic())
        if seconds < LEAST and not args.tiny:
            say("the time is up; the same command goes on")
            break
        say(f"{part.name} begins, {count} cases are left, at most {seconds:.0f} s")
        start = time.monotonic()
        words = part.command(args, about["device"])
        command = [sys.executable, "-m", f"{__package__}.{part.module}", *words]
        command += ["--minutes", str(seconds / 60)]
        log, limit = args.work / f"{part.name}.log", seconds
        if part.module == "model":  # a case that has begun ends, if the whole time suffices
            limit = max(limit, deadline - start)
            command += ["--overtime", str((limit - seconds) / 60)]
        why = ended(command, limit + GRACE, log, environment(args, part.module))
        now_left, _ = part.left(args, about)
        spent = time.monotonic() - start
        said = f"; {why}, see {log}:\n{_last_lines(log)}" if why else ""
        say(f"{part.name} took {spent:.0f} s, {now_left} cases are left{said}")
        outcomes.add({
            "case": part.name, "about": about, "date": time.strftime("%Y-%m-%d %H:%M"),
            "seconds": round(spent, 1), "left": now_left, "ended": why,
        })  # fmt: skip


def _last_lines(log: Path, count: int = 6) -> str:
    return "\n".join(f"    {line[:200]}" for line in log.read_text().splitlines()[-count:])


def plan(args, about: dict) -> str:
    """Returns the parts in their order with limits, what is left, and how they ended last."""
    outcomes = records.Records.of(args.out / PARTS_FILE, about).by_case
    head = ("part", "limit, s", "silence, s", "left", "last call", "command")
    lines = ["| " + " | ".join(head) + " |", "|---|--:|---|--:|---|---|"]
    for part in (part for part in PARTS if part.name in args.parts):
        left, count = part.left(args, about)
        last = outcomes.get(part.name)
        said = "never" if last is None else f"{last['date']}, {last['seconds']:.0f} s"
        said += f", {last['ended']}" if last and last["ended"] else ""
        words = shlex.join([part.module, *part.command(args, about["device"])])
        cells = [part.name, f"{part.seconds:.0f}", silence(part.module), f"{left} of {count}", said]
        lines.append(f"| {' | '.join([*cells, f'`{words}`'])} |")
    return "\n".join([f"{about['device']}\n", *lines])


def silence(module: str) -> str:
    """Returns how long a process of a part may be silent before it is ended and replaced."""
    from . import attention, check, measure, model, rows

    limits = {
        "check": f"{check.WATCHED:.0f}",
        "model": f"{model.COMPILING:.0f} compiling, {model.RUNNING:.0f} running",
        "attention": f"{measure.COMPILING:.0f} compiling, {attention.WATCHED:.0f} running",
        "rows": f"{rows.SILENT:.0f}",
    }
    return limits[module]


def stored(out: Path) -> list[dict]:
    """Returns the descriptions of the devices with results of attention, for today's kernels."""
    from pallas_kernels.timings import sources

    runs = (json.loads(file.read_text())["runs"][-1] for file in sorted(out.glob("*.json")))
    return [run["about"] | {"kernels": sources()} for run in runs]


def main(argv=None) -> int:
    args = arguments(argv)
    import jax

    from . import model
    from .pack import unpack

    # This process only reads results, and leaves the GPU to its children.
    jax.config.update("jax_platforms", "cpu")
    if args.plan:
        devices = stored(args.out)
        if not devices:
            print(f"{args.out} has no results, so everything is left on any GPU.\n")
        print("\n\n".join(plan(args, device) for device in devices or [{"device": "any GPU"}]))
        return 0
    end_with_sigterm()
    if args.pack:
        unpack(args.pack)
    say("describing the device and checking its kernels")
    deadline = time.monotonic() + 60 * args.minutes
    about = model.described(args, deadline, environment(args))
    if about is None:
        return 2
    if not about["commit"]:
        say(f"git does not know the commit; set {records.COMMIT}")
    os.environ[records.ABOUT] = json.dumps(about)  # for the parts
    before = table(args.out).splitlines()
    run(args, about, deadline)
    # What this call has added is last, where the end of a long output is all that comes back.
    lines = table(args.out).splitlines()
    print("\n".join(x for n, x in enumerate(lines) if n < 2 or x not in before))
    print(f"\nAll results: python -m {__package__}.summary --out {args.out}")
    return 0


def end_with_sigterm() -> None:
    """Makes SIGTERM an exception, so that the part that runs is ended, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


if __name__ == "__main__":
    sys.exit(main())
