"""The results of `attention.py` as Markdown: tables, ratios, and the targets that are met."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from pallas_kernels import timings
from pallas_kernels.dispatch import BACKENDS, ranked_by

from .implementations import OURS

WRONG = 0.02  # relative error of wrong results; right ones in bfloat16 have at most 0.01
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}
FULL_WINDOW_RATE = 450e12  # FLOP/s: tokamax' backward pass on an H100, which visits all blocks


def number(x, digits: int = 3) -> str:
    """Returns `x` with about `digits` significant digits; None as a dash."""
    if x is None:
        return "-"
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    if x == 0 or abs(x) >= 100:
        return f"{x:.0f}"
    return f"{x:.{max(0, digits - 1 - math.floor(math.log10(abs(x))))}f}"


def is_right(row: dict) -> bool:
    """Whether the results agree with the oracle within bfloat16, and two runs are equal."""
    return row["error"] < WRONG and not _varies(row)


def _varies(row: dict) -> bool:
    """Whether two runs differed in bits; gradients of nondeterministic backends may."""
    backend = BACKENDS.get(row["side"].removeprefix(OURS))
    exempt = row["pass"] != "fwd" and backend is not None and not backend.deterministic
    return not row["same_bits"] and not exempt


def with_ratios(rows: list[dict]) -> list[dict]:
    """Returns the rows of lcjax with `speed_to` and `efficiency` added, and all other rows.

    `speed_to` has the speed relative to each other library. `efficiency`, of sparse workloads, is
    the time of the dense kernel x the share of visited blocks / the time of the row.
    """
    by = {(r["workload"], r["pass"], r["side"]): r for r in rows if r.get("ms")}
    dense = {
        (r["shape"], r["pass"], r["side"]): r["ms"] for r in by.values() if r["density"] == 1.0
    }
    result = []
    for row in rows:
        if row.get("ms") and row["side"].startswith(OURS):
            others = {
                side: other["ms"] / row["ms"]
                for (workload, which, side), other in by.items()
                if (workload, which) == (row["workload"], row["pass"]) and side[:6] != OURS
            }
            row = row | {"speed_to": others}
            whole = dense.get((row["shape"], row["pass"], row["side"]))
            if whole and row["density"]:
                row["efficiency"] = whole * row["visited_share"] / row["ms"]
        result.append(row)
    return result


def wrong_implementations(
    rows: list[dict],
    checks: list[dict],
    lost: list[dict],
    forms_of: Callable[[str], Iterable[str]],
    calls_of: Callable[[str], tuple[str, Iterable[str]]],
) -> dict[str, str]:
    """Returns what was wrong, crashed or hung, by implementation, dtype and form.

    Args:
      rows: the timed workloads.
      checks: failed cases of the check.
      lost: events of jobs that ended a process.
      forms_of: the forms of the calls of a workload, by its name.
      calls_of: the dtype and the forms of the calls of a case of the check, by its name.

    Returns:
      The first reason by `timings.case_key`.
    """
    reasons = {}

    def add(side: str, dtype: str, forms, why: str) -> None:
        for form in sorted(forms):
            reasons.setdefault(timings.case_key(side.removeprefix(OURS), dtype, form), why)

    for row in rows:
        if row.get("ms") and row["side"].startswith(OURS) and not is_right(row):
            forms = forms_of(row["workload"])
            add(row["side"], timings.TIMED_DTYPE, forms, f"wrong in {row['workload']}")
    for row in checks:
        add(row["backend"], *calls_of(row["case"]), f"{row['case']}: {row['why']}")
    for event in lost:
        if (event["step"] or "").startswith(OURS):
            why = f"it ended the process in {event['lost']}: {event['why']}"
            add(event["step"], timings.TIMED_DTYPE, forms_of(event["lost"]), why)
    return reasons


def fastest(times: dict) -> str:
    """Returns a line per kind of call with its fastest implementation, from `milliseconds`."""

    def first(way: str, of: dict[str, float]) -> str:
        name = min(of, key=lambda name: ranked_by(name, of[name], way))
        return f"{way} {name} {number(of[name])} ms"

    ways = {
        kind: ", ".join(first(way, of) for way, of in directions.items())
        for kind, directions in times.items()
    }
    return "\n".join(f"- {kind}: {said}" for kind, said in ways.items())


def milliseconds(rows: list[dict], wrong: Collection[str]) -> dict:
    """Returns milliseconds by kind of call, direction and implementation, for `timings.write`.

    Each kind has the workload that most implementations ran; of several, the more important one.

    Args:
      rows: the timed workloads.
      wrong: what to leave out, by `timings.case_key`.
    """
    found: dict = {}
    for row in rows:
        if not row.get("ms") or not row["side"].startswith(OURS) or not row["kind"]:
            continue
        name, form = row["side"].removeprefix(OURS), timings.form_of(row["kind"])
        if (
            row["pass"] in DIRECTIONS
            and timings.case_key(name, timings.TIMED_DTYPE, form) not in wrong
        ):
            of = found.setdefault(row["kind"], {}).setdefault(DIRECTIONS[row["pass"]], {})
            of.setdefault(row["workload"], {})[name] = row["ms"]
    return {
        kind: {way: max(of.values(), key=len) for way, of in ways.items()}
        for kind, ways in found.items()
    }


def full_table(rows: list[dict]) -> str:
    """Returns a table with one line per workload, pass and side."""
    head = (
        "| workload | pass | side | run | ms | +- % | executed TFLOP/s | useful | % of matmul "
        "| peak GB | table ms | compile s | error | same bits | efficiency | times as fast as |"
    )
    lines = [head, "|" + "---|" * 3 + "--:|" * 12 + "---|"]
    for row in rows:
        start = f"| {row['workload']} | {row['pass']} | {row['side']} | {row['run']} "
        if row.get("reason"):
            lines.append(f"{start}| {row['reason'].replace('|', '/')} |" + " |" * 11)
            continue
        spread, share = row["spread"], row["peak_share"]
        cells = [
            number(row["ms"]), number(None if spread is None else 100 * spread, 2),
            number(row["executed_tflops"]), number(row["useful_tflops"]),
            number(None if share is None else 100 * share), number(_over(row["peak_bytes"], 1e9)),
            number(row["table_ms"]), number(row["compile_s"], 2),
            "-" if row["error"] is None else f"{row['error']:.1e}",
            {True: "yes", False: "NO", None: "-"}[row["same_bits"]],
            number(row.get("efficiency"), 2),
            ", ".join(f"{k} {v:.2f}" for k, v in row.get("speed_to", {}).items()) or "-",
        ]  # fmt: skip
        lines.append(start + "| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _over(x, y):
    return None if x is None else x / y


def brief_table(rows: list[dict]) -> str:
    """Returns a table of milliseconds, and of the best executed rate of lcjax."""
    sides = list(dict.fromkeys(r["side"] for r in rows if r.get("ms")))
    names = [s.replace(OURS, "") for s in sides]
    lines = ["| workload | pass | " + " | ".join(names) + " | our TFLOP/s |"]
    lines.append("|---|---|" + "--:|" * (len(sides) + 1))
    cells: dict = {}
    for row in rows:
        cells.setdefault((row["workload"], row["pass"]), {})[row["side"]] = row
    for (workload, which), of in cells.items():
        if not any(row.get("ms") for row in of.values()):
            continue
        ms = (_milliseconds(of.get(s, {})) for s in sides)
        rates = [r["executed_tflops"] for s, r in of.items() if s.startswith(OURS) and r.get("ms")]
        rate = number(max(rates, default=None))
        lines.append(f"| {workload} | {which} | " + " | ".join(ms) + f" | {rate} |")
    return "\n".join(lines)


def _milliseconds(row: dict) -> str:
    if not row.get("ms"):
        return "-"
    return number(row["ms"]) + ("" if row["error"] < WRONG else " WRONG")


def absences(rows: list[dict]) -> str:
    """Returns a line per implementation and reason, with the number of rows."""
    counts: dict = {}
    for row in rows:
        if row.get("reason"):
            key = row["side"], row["reason"]
            counts[key] = counts.get(key, 0) + 1
    return "\n".join(f"- {side}, {n} rows: {why}" for (side, why), n in counts.items())


class Results:
    """Looks up rows with right results for the targets; None if nothing was measured."""

    def __init__(self, rows: list[dict]):
        self.rows = [r for r in rows if r.get("ms") and r["error"] < WRONG]

    def of(self, start: str, which: str, ours: bool | None = True) -> list[dict]:
        return [
            r for r in self.rows
            if r["workload"].startswith(start) and r["pass"] == which
            and (ours is None or r["side"].startswith(OURS) == ours)
        ]  # fmt: skip

    def best(self, start: str, which: str) -> dict | None:
        return min(self.of(start, which), key=lambda r: r["ms"], default=None)

    def peer(self, start: str, which: str, side: str) -> dict | None:
        rows = [r for r in self.of(start, which, False) if r["side"] == side]
        return rows[0] if rows else None


def targets(rows: list[dict], tables: dict) -> str:
    """Returns a table of the targets on an H200: measured values, and the best level met."""
    results = Results(rows)
    judged = [
        *(_rate(results, *case) for case in RATES),
        _window_backward(results), _efficiency(results), _flex(results),
        _tables(tables), _memory(results), _compiling(results),
    ]  # fmt: skip
    lines = ["| target | floor, good, excellent | measured | met |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(line)} |" for line in judged])


CAUSAL, WINDOW = "a causal, 16k x 16k, 16/16 heads of ", "b window 4k, 128k x 128k, 16/16 heads of "
# What, workload, pass, levels in TFLOP/s, and the least cuDNN time / lcjax time for excellent.
RATES = [
    ("forward causal 16k, heads of 128", CAUSAL + "128", "fwd", (350, 560, 620), 0.97),
    ("forward causal 16k, heads of 64", CAUSAL + "64", "fwd", (280, 450, 500), None),
    ("backward causal 16k, heads of 128", CAUSAL + "128", "bwd", (220, 400, 450), None),
    ("backward causal 16k, heads of 64", CAUSAL + "64", "bwd", (170, 300, 335), None),
    ("forward window 4,096 at 128k, executed", WINDOW + "128", "fwd", (300, 450, 520), 1.0),
]
NOT_MEASURED = "not measured", "?"


def _level(met: list[bool]) -> str:
    """Returns the last of floor, good, excellent up to which all levels are met."""
    names, count = ("below the floor", "floor", "good", "excellent"), 0
    while count < len(met) and met[count]:
        count += 1
    return names[count]


def _rate(results: Results, what, workload, which, levels, cudnn):
    target = ", ".join(map(str, levels)) + " TFLOP/s"
    target += f" and {cudnn:.0%} of cuDNN" if cudnn else ""
    row, peer = results.best(workload, which), results.peer(workload, which, "jax.nn cudnn")
    if row is None:
        return what, target, *NOT_MEASURED
    rate = row["executed_tflops" if workload == WINDOW + "128" else "useful_tflops"]
    met, measured = [rate >= x for x in levels], f"{rate:.0f} TFLOP/s, {row['side']}"
    if cudnn:
        measured += f", {peer['ms'] / row['ms']:.2f} of cuDNN" if peer else ", no cuDNN beside it"
        met[2] = met[2] and peer is not None and peer["ms"] / row["ms"] >= cudnn
    return what, target, measured, _level(met)


def _window_backward(results: Results):
    what = "backward window 1,024 at 32k"
    target = (
        "5 times as fast as tokamax (at 450 TFLOP/s on all pairs where it is missing), 300, 400"
    )
    row = results.best("b window 1k, 32k x 32k, 16/16 heads of 128", "bwd")
    if row is None:
        return what, target, *NOT_MEASURED
    peer = results.peer(row["workload"], "bwd", "tokamax mosaic")
    whole = 1e3 * 10 * 128 * 16 * (32 * 1024) ** 2 / FULL_WINDOW_RATE
    faster, rate = (peer["ms"] if peer else whole) / row["ms"], row["executed_tflops"]
    met = [faster >= 5, rate >= 300, rate >= 400]
    return what, target, f"{faster:.1f} times, {rate:.0f} TFLOP/s, {row['side']}", _level(met)


def _efficiency(results: Results):
    what, target = (
        "block-sparse efficiency",
        "0.70 at 12.5 %, 0.85 from 5 % up, 0.92 and 0.75 at 1 %",
    )
    best: dict = {}
    for row in results.of("f blocks", "fwd"):
        if row.get("efficiency") is not None:
            sides = best.setdefault(row["side"], {})
            sides[row["density"]] = min(row["efficiency"], sides.get(row["density"], 9.0))
    if not any(share < 1.0 for found in best.values() for share in found):
        return what, target, *NOT_MEASURED
    side, found = max(best.items(), key=lambda x: x[1].get(0.125, 0.0))
    upper = [x for share, x in found.items() if 0.05 <= share < 1.0]
    met = [
        found.get(0.125, 0.0) >= 0.7,
        bool(upper) and min(upper) >= 0.85,
        bool(upper) and min(upper) >= 0.92 and found.get(0.01, 0.0) >= 0.75,
    ]
    measured = ", ".join(f"{x:.2f} at {100 * share:g} %" for share, x in sorted(found.items()))
    return what, target, f"{measured}, {side}", _level(met)


def _flex(results: Results):
    what, target = "beside FlexAttention, worst mask", "0.9; 1.3 forward and 1.2 backward; 1.6"
    worst = {}
    for which in ("fwd", "bwd"):
        found = []
        for peer in (r for r in results.of("", which, False) if r["side"] == "torch flex"):
            ours = results.best(peer["workload"], which)
            found += [peer["ms"] / ours["ms"]] if ours else []
        if not found:
            return what, target, *NOT_MEASURED
        worst[which] = min(found)
    levels = ((0.9, 0.9), (1.3, 1.2), (1.6, 1.6))
    met = [worst["fwd"] >= x and worst["bwd"] >= y for x, y in levels]
    return what, target, ", ".join(f"{k} {v:.2f} times" for k, v in worst.items()), _level(met)


def _tables(tables: dict):
    what, target = "table of 128k: static; traced", "1 s; 5 % of fwd, 20 ms, 2 ms; 1 %"
    static, traced = tables.get("static_ms"), tables.get("traced_share")
    if static is None:
        return what, target, *NOT_MEASURED
    measured = f"{static:.1f} ms on the host; " + (
        "traced not measured" if traced is None else f"traced {traced:.1%} of the forward pass"
    )
    known = traced is not None
    met = [static < 1000 and known and traced < 0.05, static < 20, static < 2 and traced < 0.01]
    return what, target, measured, _level(met)


def _memory(results: Results):
    what = "memory: kept for the backward pass, and at most"
    target = (
        "at most 8 times q, k, v, out; kept: q, k, v, out, lse alone; nothing else for dq, dk, dv"
    )
    row = results.best(CAUSAL + "128", "both")
    if row is None or row["kept_bytes"] is None or row["peak_bytes"] is None:
        return what, target, *NOT_MEASURED
    kept, peak, array = row["kept_bytes"], row["peak_bytes"], row["array_bytes"]
    met = [peak <= 8 * 4 * array, kept <= 1.05 * 4 * array, peak <= 1.05 * 9 * array]
    measured = f"kept {kept / array:.2f} and at most {peak / array:.2f} times the bytes of q"
    return what, target, measured, _level(met)


def _compiling(results: Results):
    what, target = "compile time, slowest of ours", "10 s, 4 s, 2 s"
    found = [r for w in ("fwd", "bwd") for r in results.of("", w) if not r["side"].endswith("xla")]
    if not found:
        return what, target, *NOT_MEASURED
    row = max(found, key=lambda r: r["compile_s"])
    measured = f"{row['compile_s']:.1f} s, {row['side']}, {row['workload']}, {row['pass']}"
    return what, target, measured, _level([row["compile_s"] < x for x in (10, 4, 2)])
