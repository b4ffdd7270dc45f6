"""Times attention on an NVIDIA GPU: lcjax's kernels beside other libraries', and the targets.

From the repository's root, with jax for CUDA (torch and tokamax are peers if they are installed; an
installed wheel has this package as `lcjax.benchmarks.gpu`):

    python -m benchmarks.gpu.check --minutes 3       # are the results right?
    python -m benchmarks.gpu.attention --minutes 6   # how fast are they?
    python -m benchmarks.gpu.attention --report      # what was measured, without a GPU

The second command with `--check --minutes 9` does both in 9 minutes. `--cpu` runs all of it at tiny
sizes without a GPU (`--interpret`: also Pallas-Triton kernels); its times are meaningless.

Workloads run in the order of workloads.py until the time is up; `--group` selects some of them, and
`--outdated` those without results of today's kernels, those without any first. The same command
then continues with the remaining ones (`--again`: starts again with all). Results of other kernels,
versions or options stay until their workload is measured again; the report says which run each row
is of. By default
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
import sys
import time
from pathlib import Path

from . import records

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
    outdated_doc = "only workloads without results of these kernels, those without any first"
    parser.add_argument("--outdated", action="store_true", help=outdated_doc)
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


class Report:
    """Collects events, and writes the results and their tables.

    A file has the rows of all workloads, and the runs that measured them: `row["run"]` is the place
    of a row's run, which has the device, versions, kernels, options and ceilings. A workload has
    rows of one run, the last one that finished it.
    """

    def __init__(self, args):
        self.args = args
        self.current: dict = {"command": sys.argv[1:], "lost": [], "left": [], "done": []}
        self.current["clocks"] = {}
        self.current["options"] = {x: getattr(args, x) for x in ("passes", "sides")}
        self.runs, self.rows = [self.current], []
        self.failures: list[dict] = []  # failed cases of the check
        self.workloads: dict | None = None

    @property
    def run(self) -> int:
        """The place of the current run."""
        return len(self.runs) - 1

    def resume(self, about: dict) -> None:
        """Adds to the results in `--out`; goes on with their last run if the setup is equal."""
        from pallas_kernels import timings

        self.current["about"] = about
        file = self.args.out / timings.file_of(about["device"])
        if not file.exists():
            return
        runs, rows = self.read(file)
        last = runs[-1]
        same = (
            records.same_setup(last["about"], about) and last["options"] == self.current["options"]
        )
        if same and not self.args.again:
            continued = ("done", "lost", "clocks", "ceilings", "checked")
            self.current |= {x: last[x] for x in continued if x in last}
            runs = runs[:-1]
        self.runs = [*runs, self.current]
        # Of a workload that was cut off, nothing is kept.
        self.rows = [r for r in rows if r["workload"] in self.runs[r["run"]]["done"]]

    @staticmethod
    def read(file: Path) -> tuple[list[dict], list[dict]]:
        """Returns the runs and the rows of a file."""
        content = json.loads(file.read_text())
        return content["runs"], content["rows"]

    def names(self) -> list[str]:
        """Returns the jobs of this run that are left: the ceilings, then workloads."""
        from .measure import chosen

        workloads = chosen(self.args)
        if self.args.outdated:
            kernels = [run["about"].get("kernels") for run in self.runs]
            known = {r["workload"] for r in self.rows if kernels[r["run"]] == kernels[-1]}
            measured = {row["workload"] for row in self.rows}
            workloads.sort(key=lambda w: w.name in measured)
            sparse = {w.shape for w in workloads if w.density and w.name not in known}
            # The efficiency of sparse tables is relative to a dense one of the same run.
            workloads = [
                w for w in workloads
                if w.name not in known or (w.density == 1.0 and w.shape in sparse)
            ]  # fmt: skip
        names = ["ceilings", *(w.name for w in workloads)]
        return [name for name in names if name not in self.current["done"]]

    def take_check(self, log) -> None:
        self.failures, self.current["check"] = log.failures, log.lines()
        self.current["checked"] = log.state()

    def take(self, **event) -> None:
        if "row" in event:
            self.rows.append(event["row"] | {"run": self.run})
        elif "about" in event or "ceilings" in event:
            self.current |= event
        elif "clocks" in event:  # right after a workload
            self.current["clocks"] |= event["clocks"]
        elif "lost" in event:
            self._lose(event)
        elif "left" in event:
            self.current["left"] = event["left"]
        if "done" in event:
            self._finish(event["done"])
        if "done" in event or "lost" in event:
            self.write()
            if self.args.keep:
                self.keep()
            print(f"{time.strftime('%H:%M:%S')} {event}", file=sys.stderr, flush=True)

    def _finish(self, workload: str) -> None:
        """Marks a workload as done, and removes its rows of earlier runs."""
        self.current["done"].append(workload)
        self.rows = [r for r in self.rows if r["workload"] != workload or r["run"] == self.run]

    def _lose(self, event: dict) -> None:
        """Removes the rows of a lost workload, which is repeated or gets rows with the reason."""
        self.current["lost"].append(event)
        name, now = event["lost"], self.run
        self.rows = [r for r in self.rows if r["workload"] != name or r["run"] != now]
        if event["again"]:
            return
        if name != "ceilings":
            start = {"workload": name, "group": name[0], "side": "all", "run": now}
            why = f"it ended the process: {event['why']}"
            self.rows += [start | {"pass": x, "reason": why} for x in self.args.passes]
        self._finish(name)

    def compared(self) -> list[dict]:
        """Returns all rows with their shares of the ceiling, and ratios within their run."""
        from .report import with_ratios

        result = []
        for place, run in enumerate(self.runs):
            peak = run.get("ceilings", {}).get("matmul")
            result += with_ratios([
                r | {"peak_share": 1e12 * r["executed_tflops"] / peak if peak else None}
                if r.get("ms") else r
                for r in self.rows if r["run"] == place
            ])  # fmt: skip
        return result

    def _ours(self) -> list[dict]:
        """Returns the rows of this run."""
        return [row for row in self.rows if row["run"] == self.run]

    def wrong(self) -> int:
        """Returns 1 if a result of lcjax is wrong, or differs between two runs; otherwise 0."""
        from .implementations import OURS
        from .report import is_right

        ours = [r for r in self._ours() if r.get("ms") and r["side"].startswith(OURS)]
        return int(not all(map(is_right, ours)))

    def keep(self) -> str:
        """Writes the timings that dispatch reads; returns a message with what was left out."""
        from pallas_kernels import timings

        from .check import calls_of
        from .report import fastest, milliseconds, wrong_implementations

        device, rows = self.current.get("about", {}).get("device"), self._ours()
        wrong = wrong_implementations(
            rows, self.failures, self.current["lost"], self._forms_of, functools.cache(calls_of)
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
        timed = [r for r in self.rows if r.get("ms") and r["table_ms"] is not None]
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

        device = self.current.get("about", {}).get("device", "unknown")
        file = self.args.out / timings.file_of(device)
        runs, rows = self._numbered()
        records.write(file, {"runs": runs, "rows": rows})
        file.with_suffix(".md").write_text(self.text(short=False) + "\n")

    def _numbered(self) -> tuple[list[dict], list[dict]]:
        """Returns the runs that have rows, with the last one, and the rows, numbered anew."""
        used = sorted({*(row["run"] for row in self.rows), self.run})
        rows = [row | {"run": used.index(row["run"])} for row in self.compared()]
        return [self.runs[x] for x in used], rows

    def text(self, short: bool = True) -> str:
        """Returns the report, with the most important figures or (short=False) with all of them."""
        from . import report

        runs, rows = self._numbered()
        heads = [self._head(run, number) for number, run in enumerate(runs)]
        device = self.runs[-1].get("about", {}).get("device")
        head = "\n\n".join([f"# Attention on {device}", *heads])
        end = f"## Targets\n\n{report.targets(rows, self.tables())}"
        why = f"## Who did not run\n\n{report.absences(rows)}"
        parts = [head, end, f"## All figures\n\n{report.full_table(rows)}", why]
        if short:
            parts = [why, head, f"## Milliseconds\n\n{report.brief_table(rows)}", end]
        return "\n\n".join(parts)

    @staticmethod
    def _head(run: dict, number: int) -> str:
        """Returns the versions and ceilings of a run, and what went wrong."""
        about = run.get("about", {})
        versions = ", ".join(f"{k} {v}" for k, v in about.items() if v and k != "device")
        parts = [f"Run {number}: {versions}"]
        if ceilings := run.get("ceilings"):
            parts.append(
                f"Ceilings: {ceilings['matmul'] / 1e12:.0f} TFLOP/s of a bfloat16 product, "
                f"{ceilings['copy'] / 1e12:.2f} TB/s read and written."
            )
        if "check" in run:
            parts.append("Checked: " + "; ".join(run["check"]))
        for lost in run["lost"]:
            side = lost["step"] or "something"
            parts.append(f"{side} ended the process in {lost['lost']}: {lost['why']}.")
        if run["left"]:
            parts.append(f"{len(run['left'])} workloads were not reached in time.")
        return "\n\n".join(parts)


def left(args, about: dict) -> tuple[int, int]:
    """Returns how many of the chosen workloads are left for a device, and how many there are."""
    from .measure import chosen

    report = Report(args)
    report.resume(about)
    return len({*report.names()} - {"ceilings"}), len(chosen(args))


def reported(args) -> str:
    """Returns the tables of all devices with results in `--out`."""
    reports = []
    for file in sorted(args.out.glob("*.json")):
        report = Report(args)
        report.runs, report.rows = report.read(file)
        reports.append(report.text())
    return "\n\n".join(reports) or f"No workload has results in {args.out}."


def main(argv=None) -> int:
    args = arguments(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from .measure import work
    from .workers import emit, jobs_of_child, supervise

    if args.worker:
        work(jobs_of_child(), args, emit)
        return 0
    if args.report:
        print(reported(args))
        return 0
    about = records.about_here()
    if not args.cpu and about["platform"] != "gpu":
        print(records.NO_GPU.format(about["platform"], "--cpu"), file=sys.stderr)
        return 2
    # This process only traces failed cases, and leaves the GPU to its children.
    jax.config.update("jax_platforms", "cpu")
    deadline, failed, report = time.monotonic() + 60 * args.minutes, 0, Report(args)
    report.resume(about)
    if done := report.current["done"]:
        print(f"going on with {args.out}, which has {len(done)} workloads; --again begins anew")
    if args.check or args.keep:
        from . import check

        options = ["--minutes", str(0.4 * args.minutes), *["--cpu"] * args.cpu]
        log = check.run(check.arguments(options), options, report.current.get("checked"))
        report.take_check(log)
        failed = log.failed()
    jobs = [{"name": x, "alone": False} for x in report.names()]
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
