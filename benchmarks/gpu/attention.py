"""Times attention on an NVIDIA GPU: lcjax's kernels beside other libraries', and the targets.

From the repository's root, with jax for CUDA (torch and tokamax are peers if they are installed; an
installed wheel has this package as `lcjax.benchmarks.gpu`):

    python -m benchmarks.gpu.check --minutes 3       # are the results right?
    python -m benchmarks.gpu.attention --minutes 6   # how fast are they?
    python -m benchmarks.gpu.attention --report      # what was measured, without a GPU

The second command with `--check --minutes 9` does both in 9 minutes. `--cpu` runs all of it at tiny
sizes without a GPU (`--interpret`: also Pallas-Triton kernels); its times are meaningless.

Workloads run in the order of workloads.py until the time is up; `--group` selects some of them. The
same command then continues with the remaining ones (`--again`: starts again with all). By default
lcjax's implementations and cuDNN are measured; `--sides .` adds the other libraries. All
implementations of a workload are compiled, compared with a dense float32 oracle, and run twice to
test for equal bits. They are then timed in turns, every round in another order, as medians of
chains of dependent calls. An implementation that cannot run a workload has a row with the reason. A
kernel that crashes the process or hangs, also during compilation, is left out of that workload,
and after the second time of all workloads. If it is a backward pass, `--passes fwd` still times the
forward passes.

"executed" counts the pairs in visited blocks of 128 x 128, "useful" the visible pairs; a backward
pass has 2.5 times the FLOPs of the forward pass. "peak GB" is the compiler's plan of a call's
memory. "table" is the time to list the blocks: on the host for a static mask, on the device for
documents.

Writes DEVICE.json and DEVICE.md into `--out` after every workload, and prints the tables last.
`--keep` checks first, and stores the timings for lcjax after every workload. From then on,
attention on such a GPU is computed by the implementation that was fastest for calls of its kind,
among those that were right in all calls of that form and dtype (`pallas_kernels.timings`).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

WATCHED = 75.0  # seconds without output after which the process counts as hanging


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--group", default="", help="letters of the groups to run; all if left out")
    parser.add_argument("--passes", nargs="+", default=["fwd", "bwd", "both"])
    parser.add_argument("--only", default="", help="words that a workload's name must have")
    sides_doc = "a regular expression that a side must match; . for all of them"
    parser.add_argument("--sides", default="lcjax|jax.nn cudnn", help=sides_doc)
    parser.add_argument("--again", action="store_true", help="do not go on with what --out has")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/gpu/results"))
    parser.add_argument("--seconds", type=float, default=0.8, help="of timing, per pass")
    parser.add_argument("--check", action="store_true", help="check.py first, in 2/5 of it")
    keep_doc = (
        "--check, and use what was fastest from then on; writes into FOLDER, or where it is read"
    )
    parser.add_argument("--keep", nargs="?", type=Path, const=True, metavar="FOLDER", help=keep_doc)
    parser.add_argument("--report", action="store_true", help="only print the tables of --out")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes, without a GPU")
    parser.add_argument("--interpret", action="store_true", help="Triton kernels on a CPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def about_here() -> dict:
    """Returns `measure.describe()` of a child process, which frees the device when it ends."""
    from .workers import ROOT, STARTING

    program = (
        f"import json; from {__package__}.measure import describe; print(json.dumps(describe()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True,
        timeout=STARTING, cwd=ROOT,
    )  # fmt: skip
    return json.loads(run.stdout.splitlines()[-1])


class Report:
    """Collects events, and writes the results and their tables."""

    def __init__(self, args):
        self.args, self.found = args, {"command": sys.argv[1:], "rows": [], "lost": [], "left": []}
        self.found |= {"done": [], "options": {x: getattr(args, x) for x in ("passes", "sides")}}
        self.failures: list[dict] = []  # failed cases of the check
        self.workloads: dict | None = None

    def resume(self, about: dict) -> None:
        """Continues with the results in `--out` if device, versions and options are equal."""
        from pallas_kernels import timings

        self.found["about"] = about
        file = self.args.out / timings.file_of(about["device"])
        if self.args.again or not file.exists():
            return
        before = json.loads(file.read_text())
        if (before.get("about"), before.get("options")) != (about, self.found["options"]):
            return
        done = before["done"]
        self.found |= {x: before[x] for x in ("done", "lost", "ceilings", "checked") if x in before}
        self.found["rows"] = [row for row in before["rows"] if row["workload"] in done]
        print(f"going on with {file}, which has {len(done)} workloads; --again begins anew")

    def take_check(self, log) -> None:
        self.failures, self.found["check"] = log.failures, log.lines()
        self.found["checked"] = log.state()

    def take(self, **event) -> None:
        if "row" in event:
            self.found["rows"].append(event["row"])
        elif "about" in event or "ceilings" in event:
            self.found |= event
        elif "lost" in event:
            self._lose(event)
        elif "left" in event:
            self.found["left"] = event["left"]
        if "done" in event:
            self.found["done"].append(event["done"])
        if "done" in event or "lost" in event:
            self.write()
            if self.args.keep:
                self.keep()
            print(f"{time.strftime('%H:%M:%S')} {event}", file=sys.stderr, flush=True)

    def _lose(self, event: dict) -> None:
        """Removes the rows of a lost workload, which is repeated or gets rows with the reason."""
        self.found["lost"].append(event)
        rows = [r for r in self.found["rows"] if r["workload"] != event["lost"]]
        if not event["again"]:
            self.found["done"].append(event["lost"])
        if not event["again"] and event["lost"] != "ceilings":
            start = {"workload": event["lost"], "group": event["lost"][0], "side": "all"}
            why = f"it ended the process: {event['why']}"
            rows += [start | {"pass": x, "reason": why} for x in self.args.passes]
        self.found["rows"] = rows

    def rows(self) -> list[dict]:
        from .report import with_ratios

        peak = self.found.get("ceilings", {}).get("matmul")
        shares = [
            r | {"peak_share": 1e12 * r["executed_tflops"] / peak if peak else None}
            if r.get("ms") else r
            for r in self.found["rows"]
        ]  # fmt: skip
        return with_ratios(shares)

    def wrong(self) -> int:
        """Returns 1 if a result of lcjax is wrong, or differs between two runs; otherwise 0."""
        from .implementations import OURS
        from .report import is_right

        ours = [r for r in self.found["rows"] if r.get("ms") and r["side"].startswith(OURS)]
        return int(not all(map(is_right, ours)))

    def keep(self) -> str:
        """Writes the timings that dispatch reads; returns a message with what was left out."""
        from pallas_kernels import timings

        from .check import calls_of
        from .report import fastest, milliseconds, wrong_implementations

        device, rows = self.found.get("about", {}).get("device"), self.found["rows"]
        wrong = wrong_implementations(
            rows, self.failures, self.found["lost"], self._forms_of, functools.cache(calls_of)
        )
        times = milliseconds(rows, wrong)
        if device is None or not (times or wrong):
            return "Nothing was kept: no implementation was timed."
        place = timings.folder() if self.args.keep is True else self.args.keep
        file = timings.write(place, device, times, wrong)
        excluded = "".join(f"\n- never {case}: {why}" for case, why in wrong.items())
        message = f"Kept in {file}, which attention on {device} follows from now on"
        return f"{message}:\n{fastest(times)}{excluded}"

    def _forms_of(self, workload: str) -> set[str]:
        """Returns the forms of a workload's calls."""
        from pallas_kernels import timings

        from .workloads import UNIT, workloads

        if self.workloads is None:
            self.workloads = {w.name: w for w in workloads(8 if self.args.cpu else UNIT)}
        return {timings.form_of(kind) for kind in self.workloads[workload].kinds}

    def tables(self) -> dict:
        """Returns ms of a static table of 128k, and a traced table's share of its call's time."""
        timed = [r for r in self.found["rows"] if r.get("ms") and r["table_ms"] is not None]
        static = [r["table_ms"] for r in timed if r["workload"].startswith("b window 4k, 128k")]
        shares: dict = {}
        for r in timed:
            if r["group"] == "e" and r["pass"] == "fwd" and r["side"].startswith("lcjax"):
                share = r["table_ms"] / r["ms"]
                shares[r["workload"]] = max(share, shares.get(r["workload"], 0.0))
        # Of lcjax's fastest implementation, and of the workload where the table costs most.
        most = max(shares.values(), default=None)
        return {"static_ms": min(static, default=None), "traced_share": most}

    def write(self) -> None:
        """Writes DEVICE.json and DEVICE.md."""
        from pallas_kernels import timings

        file = self.args.out / timings.file_of(self.found.get("about", {}).get("device", "unknown"))
        self.args.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.found | {"rows": self.rows()}, indent=1)
        part = file.with_suffix(".part")  # atomic, because `resume` reads it
        part.write_text(text + "\n")
        part.replace(file)
        file.with_suffix(".md").write_text(self.text(short=False) + "\n")

    def text(self, short: bool = True) -> str:
        """Returns the report, with the most important figures or (short=False) with all of them."""
        from . import report

        rows = self.rows()
        head = self._head(self.found.get("about", {}))
        end = f"## Targets\n\n{report.targets(rows, self.tables())}"
        why = f"## Who did not run\n\n{report.absences(rows)}"
        parts = [head, end, f"## All figures\n\n{report.full_table(rows)}", why]
        if short:
            parts = [why, head, f"## Milliseconds\n\n{report.brief_table(rows)}", end]
        return "\n\n".join(parts)

    def _head(self, about: dict) -> str:
        """Returns the device, versions, ceilings, and what went wrong."""
        parts = [f"# Attention on {about.get('device')}"]
        parts.append(", ".join(f"{k} {v}" for k, v in about.items() if v and k != "device"))
        if ceilings := self.found.get("ceilings"):
            parts.append(
                f"Ceilings: {ceilings['matmul'] / 1e12:.0f} TFLOP/s of a bfloat16 product, "
                f"{ceilings['copy'] / 1e12:.2f} TB/s read and written."
            )
        if "check" in self.found:
            parts.append("Checked: " + "; ".join(self.found["check"]))
        for lost in self.found["lost"]:
            side = lost["step"] or "something"
            parts.append(f"{side} ended the process in {lost['lost']}: {lost['why']}.")
        if self.found["left"]:
            parts.append(f"{len(self.found['left'])} workloads were not reached in time.")
        return "\n\n".join(parts)


def reported(args) -> str:
    """Returns the tables of all devices with results in `--out`."""
    reports = []
    for file in sorted(args.out.glob("*.json")):
        report = Report(args)
        report.found = json.loads(file.read_text())
        reports.append(report.text())
    return "\n\n".join(reports) or f"No workload has results in {args.out}."


def main(argv=None) -> int:
    args = arguments(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from .measure import chosen, work
    from .workers import emit, jobs_of_child, supervise

    if args.worker:
        work(jobs_of_child(), args, emit)
        return 0
    if args.report:
        print(reported(args))
        return 0
    about = about_here()
    if not args.cpu and about["platform"] != "gpu":
        print(
            f"error: JAX runs on {about['platform']} here, and this is for NVIDIA GPUs; install jax"
            " for CUDA, or try it at tiny sizes with --cpu",
            file=sys.stderr,
        )
        return 2
    # This process only traces failed cases, and leaves the GPU to its children.
    jax.config.update("jax_platforms", "cpu")
    deadline, failed, report = time.monotonic() + 60 * args.minutes, 0, Report(args)
    report.resume(about)
    if args.check or args.keep:
        from . import check

        options = ["--minutes", str(0.4 * args.minutes), *["--cpu"] * args.cpu]
        log = check.run(check.arguments(options), options, report.found.get("checked"))
        report.take_check(log)
        failed = log.failed()
    names = ("ceilings", *(w.name for w in chosen(args)))
    jobs = [{"name": x, "alone": False} for x in names if x not in report.found["done"]]
    if args.cpu:
        work(jobs, args, report.take, deadline)
    else:
        options = sys.argv[1:] if argv is None else argv
        command = [sys.executable, "-m", f"{__package__}.attention", *options, "--worker"]
        for event in supervise(command, jobs, deadline=deadline - 3, patience=WATCHED):
            report.take(**event)
    report.write()
    print(report.text())
    if args.keep:
        print(f"\n{report.keep()}")
    return failed or report.wrong()


if __name__ == "__main__":
    sys.exit(main())
