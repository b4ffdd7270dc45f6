"""The results of all benchmarks on GPUs as one table, and the tables of the docs that they fill.

    python -m benchmarks.gpu.summary [--out FOLDER]   # prints the table
    python -m benchmarks.gpu.summary --write          # fills README.md and docs/benchmarks.md

In a page, a table stands between `<!-- gpu: NAME -->` and `<!-- end -->`, where NAME is one of
`BLOCKS`. A test compares the pages with the results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from .records import peers
from .report import DIRECTIONS, number
from .workers import ROOT

FOLDERS = ("check", "model", "", "rows")  # of the results of check, model, attention and rows
RESULTS = Path(__file__).resolve().parent / "results"
PAGES = ("README.md", "docs/benchmarks.md")
SIDES = ("lcjax mosaic_gpu", "lcjax triton", "lcjax cudnn", "jax.nn cudnn")
SHORT = (  # of the README: what, and the start of the workload's name
    ("causal, 16,384 tokens", "a causal, 16k x 16k, 16/16 heads of 128"),
    ("window of 4,096, 131,072 tokens", "b window 4k, 128k x 128k, 16/16 heads of 128"),
    ("12 packed documents, 65,536 tokens", "e 12 documents, 64k x 64k, 16/16 heads of 128"),
)


HEAD = ["| {} | case | result | beside | before | commit |", "|---|---|---|---|---|---|"]


def table(out: Path) -> str:
    """Returns the results of all devices and parts as one table."""
    lines = [HEAD[0].format("part"), HEAD[1]]
    for device in sorted(
        {file.stem for folder in FOLDERS for file in (out / folder).glob("*.json")}
    ):
        lines.append(f"| **{device.replace('_', ' ')}** |" + " |" * 5)
        for folder in FOLDERS:
            if (file := out / folder / f"{device}.json").exists():
                content = json.loads(file.read_text())
                rows = attention_rows(content) if "runs" in content else rows_of(folder, content)
                lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def rows_of(folder: str, content: dict) -> list[list[str]]:
    """Returns a line of the table for each record of a file in a folder."""
    records = content["cases"]
    return [_row(folder, record, records) for record in records.values()]


def _row(part: str, record: dict, records: dict[str, dict]) -> list[str]:
    """Returns a line of the table for a record of a part's folder."""
    part, commit = record.get("kind", part), record["about"].get("commit") or "unknown"
    before = record.get("before") or {}
    said = f"{_rate(before['tokens_per_second'])} tokens/s, {before['commit']}" if before else ""
    if "reason" in record:
        return [part, record["case"], record["reason"].replace("|", "/"), "", said, commit]
    if part == "check":
        counts = ", ".join(f"{n} {what}" for what, n in record["counts"].items())
        return [part, record["case"], f"{counts} of {record['cases']}", "", "", commit]
    if part == "rows":
        cells = (f"{task} {number(x)} at {int(length):,}"
                 for task, of in record["cells"].items() for length, x in of.items())  # fmt: skip
        trained = (
            f"{record['steps']} steps, last loss {record['loss']:.3f}, "
            f"{_rate(record['tokens_per_second'])} tokens/s; "
        ) if record.get("steps") else ""  # fmt: skip
        return [part, record["case"], trained + ", ".join(cells), "", said, commit]
    low, high = map(_rate, record["range"])
    fits = (
        f"{record['longest']:,} tokens fit; of {record['timed_tokens']:,} "
        if "longest" in record
        else ""
    )
    result = fits + f"{_rate(record['tokens_per_second'])} tokens/s ({low} - {high})"
    for key, unit in (("mfu", "MFU"), ("bandwidth_share", "of bandwidth")):
        result += f", {record[key]:.0%} {unit}" if record.get(key) else ""
    peak = record["peak_gb"] or record.get("plan_gb")
    result += f", {number(peak)} GB" if peak else ""
    return [part, record["case"], result, _beside(record, records), said, commit]


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else number(value)


def _beside(record: dict, records: dict[str, dict]) -> str:
    """Returns the speed (and memory, of reading) relative to the peers of the same task."""
    others = peers(record, records.values())
    if record["kind"] == "read":
        others = [r for r in others if r["side"] == "full"]
    elif record["side"] != "lcjax":
        return ""
    ratios = []
    for peer in others:
        speed = record["tokens_per_second"] / peer["tokens_per_second"]
        ratio = f"{speed:.2f}x as fast as {peer['side']}"
        if record["kind"] == "read" and record["peak_gb"] and peer["peak_gb"]:
            ratio += f", {record['peak_gb'] / peer['peak_gb']:.2f} of its memory"
        ratios.append(ratio)
    return "; ".join(ratios)


def attention_rows(content: dict) -> Iterator[list[str]]:
    """Yields a line for each workload and pass: lcjax's fastest implementation."""
    best: dict = {}
    for row in content["rows"]:
        if row.get("ms") and row["side"].startswith("lcjax"):
            key = row["workload"], row["pass"]
            if key not in best or row["ms"] < best[key]["ms"]:
                best[key] = row
    for (workload, which), row in best.items():
        rate = f"{number(row['ms'])} ms, {number(row['executed_tflops'])} TFLOP/s, {row['side']}"
        ratios = (f"{x:.2f}x as fast as {side}" for side, x in row.get("speed_to", {}).items())
        commit = content["runs"][row["run"]]["about"].get("commit") or "unknown"
        yield ["attention", f"{workload}, {which}", rate, "; ".join(ratios), "", commit]


def attention_table() -> str:
    """Returns, for each GPU, the conditions and milliseconds of every workload and pass."""
    parts = []
    for file in sorted(RESULTS.glob("*.json")):
        content = json.loads(file.read_text())
        for place, run in enumerate(content["runs"]):
            rows = [row for row in content["rows"] if row["run"] == place and row.get("ms")]
            if rows:
                parts.append("\n".join([_conditions(run, rows), "", *_milliseconds(rows)]))
    return "\n\n".join(parts)


def _conditions(run: dict, rows: list[dict]) -> str:
    about, ceilings = run["about"], run.get("ceilings")
    cudnn = about.get("nvidia-cudnn-cu13") or about.get("nvidia-cudnn-cu12")
    spread = max((row["spread"] or 0.0 for row in rows if row["side"] in SIDES), default=0.0)
    error = max(row["error"] for row in rows)
    rates = "" if ceilings is None else (
        f"A bfloat16 product of 8,192 cubed runs at {ceilings['matmul'] / 1e12:.0f} TFLOP/s there, "
        f"and memory is read and written at {ceilings['copy'] / 1e12:.2f} TB/s. "
    )  # fmt: skip
    return (
        f"{about['device']}, jax {about['jax']}, cuDNN {cudnn}, driver {about['driver']}, commit "
        f"{about['commit']}. {rates}Half the distance of the quartiles is at most {spread:.0%} of "
        f"a median; the largest error relative to a float32 reference is {error:.1e}."
    )


def _milliseconds(rows: list[dict]) -> Iterator[str]:
    names = [f"`{side.split()[-1]}`" if side[:5] == "lcjax" else side for side in SIDES]
    head = ["queries and keys", "heads", "pass", names[0], "TFLOP/s", *names[1:], "ratio"]
    yield f"| {' | '.join(head)} |"
    yield "|---|---|---|" + "---:|" * (len(head) - 3)
    by_key: dict = {}
    for row in rows:
        by_key.setdefault((row["workload"], row["pass"]), {})[row["side"]] = row
    shown: list[str] = []
    for (workload, which), of in sorted(by_key.items(), key=lambda x: _order(x[0])):
        first, *others = (of.get(side) for side in SIDES)
        if not any((first, *others)) or which not in DIRECTIONS:
            continue
        what, _, heads = workload[2:].rpartition(", ")
        start = [what, heads.replace(" heads", "")]
        start = [x if shown[: i + 1] != start[: i + 1] else "" for i, x in enumerate(start)]
        shown = [what, heads.replace(" heads", "")]
        rate = number(first["executed_tflops"]) if first else ""
        peer = others[-1]
        ratio = f"{peer['ms'] / first['ms']:.2f}x" if peer and first else ""
        cells = [_ms(first), rate, *map(_ms, others), ratio]
        yield f"| {' | '.join([*start, DIRECTIONS[which], *cells])} |"


def _order(key: tuple[str, str]) -> tuple:
    workload, which = key
    what, _, heads = workload.rpartition(", ")
    return what, heads.endswith("of 64"), heads, which != "fwd"


def _ms(row: dict | None) -> str:
    return number(row["ms"]) if row else ""


def short_attention() -> str:
    """Returns the workloads of the README, on the first GPU that has measured all of them."""
    lines = ["| 16 heads of 128 | forward, ms | speed | backward, ms | speed |"]
    lines.append("|---|---:|---:|---:|---:|")
    for file in sorted(RESULTS.glob("*.json")):
        rows = json.loads(file.read_text())["rows"]
        by_key = {(r["workload"], r["pass"], r["side"]): r for r in rows if r.get("ms")}
        if not all((name, x, SIDES[0]) in by_key for _, name in SHORT for x in DIRECTIONS):
            continue
        for what, workload in SHORT:
            cells = [what]
            for which in DIRECTIONS:
                ours = by_key[workload, which, SIDES[0]]
                peer = by_key.get((workload, which, SIDES[-1]))
                cells.append(f"{number(ours['ms'])} ({number(ours['executed_tflops'])} TFLOP/s)")
                cells.append(f"{peer['ms'] / ours['ms']:.2f}x" if peer else "not supported")
            lines.append(f"| {' | '.join(cells)} |")
        break
    return "\n".join(lines)


def model_table(only: str = "") -> str:
    """Returns, for each GPU, a line for each case of `model.py` whose name matches `only`."""
    lines = [HEAD[0].format("GPU"), HEAD[1]]
    for file in sorted((RESULTS / "model").glob("*.json")):
        for row in rows_of("model", json.loads(file.read_text())):
            if re.search(only, row[1]):
                lines.append(f"| {' | '.join([file.stem.replace('_', ' '), *row[1:]])} |")
    return "\n".join(lines)


def short_models() -> str:
    """Returns the cases of lcjax's side at 16K and of the memories at 128K."""
    return model_table(only=r"1\.1b (16k lcjax|128k (cepe|shared_llm))$")


BLOCKS = {
    "attention": attention_table,
    "attention, short": short_attention,
    "models": model_table,
    "models, short": short_models,
}


def filled(page: str) -> str:
    """Returns a page with the tables of its blocks as the results are."""

    def block(match: re.Match) -> str:
        return f"{match[1]}\n{BLOCKS[match[2]]()}\n{match[3]}"

    pattern = re.compile(r"(<!-- gpu: (.*?) -->)\n.*?\n(<!-- end -->)", re.DOTALL)
    return pattern.sub(block, page)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="fill the tables of the docs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the results")
    args = parser.parse_args(argv)
    if args.write:
        for page in PAGES:
            file = ROOT / page
            file.write_text(filled(file.read_text()))
        return 0
    print(table(args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
