"""The records of `model.py` as Markdown tables."""

from __future__ import annotations

from .model_runs import CEPE, FULL, OURS, PROJECTED, SHARED_LLM
from .records import peers
from .report import number

SIDES = {
    CEPE: "CEPE",
    PROJECTED: "CEPE, keys and values kept",
    SHARED_LLM: "SharedLLM",
    FULL: "full attention",
}


def tables(records: list[dict]) -> str:
    """Returns the device, a table for each kind of case, and the reasons of failed cases."""
    parts = [_head(records)]
    kinds = {"train": _training, "decode": _decoding, "read": _reading, "longest": _longest}
    for kind, table in kinds.items():
        rows = [r for r in records if r["kind"] == kind and "reason" not in r]
        rows.sort(key=lambda r: (r["model"], r["tokens"]))  # equal ones in the order of measurement
        if rows:
            parts.append(table(rows))
    failed = [f"- {r['case']}: {r['reason']}" for r in records if "reason" in r]
    if failed:
        parts.append("### Failed\n\n" + "\n".join(failed))
    return "\n\n".join(parts)


def _head(records: list[dict]) -> str:
    """Returns the device and the versions of the records; values that differ are joined."""
    values: dict[str, list[str]] = {}
    for record in records:
        for key, value in record["about"].items():
            known = values.setdefault(key, [])
            if value is not None and str(value) not in known:
                known.append(str(value))
    device = " and ".join(values.pop("device"))
    versions = ", ".join(f"{key} {' and '.join(of)}" for key, of in values.items() if of)
    clocks = [r["clocks"]["clocks.sm"] for r in records if r.get("clocks", {}).get("clocks.sm")]
    after = f"; SM clocks right after a case: {min(clocks)} to {max(clocks)}" if clocks else ""
    return f"## Models on {device}\n\n{versions}{after}."


def _table(title: str, columns: str, rows: list[list[str]]) -> str:
    names = columns.split(" | ")
    lines = [f"| {columns} |", "|" + "|".join("---" if n in TEXT else "--:" for n in names) + "|"]
    return "\n".join([f"### {title}\n", *lines, *(f"| {' | '.join(row)} |" for row in rows)])


TEXT = ("model", "attention", "side", "kept on", "computed by", "remat")


def _training(rows: list[dict]) -> str:
    columns = (
        "model | tokens | attention | texts | remat | tokens/s | from - to | MFU % | lcjax is "
        "| peak GB | compile s | computed by"
    )
    cells = [
        [
            r["model"], f"{r['tokens']:,}", r["side"], str(r["rows"]), r["remat"],
            *_rate(r), _percent(r["mfu"]), _beside_peer(r, rows), *_costs(r), _computed(r),
        ]
        for r in rows
    ]  # fmt: skip
    return _table("Training", columns, cells)


def _decoding(rows: list[dict]) -> str:
    columns = (
        "model | context | attention | tokens/s | from - to | % of bandwidth | lcjax is "
        "| reads, tokens/s | peak GB | compile s | computed by"
    )
    cells = [
        [
            r["model"], f"{r['tokens']:,}", r["side"], *_rate(r), _percent(r["bandwidth_share"]),
            _beside_peer(r, rows), number(r["tokens"] / r["prefill"]), *_costs(r), _computed(r),
        ]
        for r in rows
    ]  # fmt: skip
    return _table("Decoding", columns, cells)


def _reading(rows: list[dict]) -> str:
    columns = (
        "model | tokens | side | encode s | decoder reads s | tokens/s | from - to | of full "
        "| ms per new token | of full | peak GB | of full | compile s | computed by"
    )
    cells = []
    for r in rows:
        full = next((x for x in peers(r, rows) if x["side"] == FULL), None)
        rate, token, peak = (_ratio(r, full, key) for key in RATIOS)
        cells.append([
            r["model"], f"{r['tokens']:,}", SIDES[r["side"]], number(r["encode"]),
            number(r["prefill"]), *_rate(r), rate, number(1e3 * r["token"]), token,
            _costs(r)[0], peak, _costs(r)[1], _computed(r),
        ])  # fmt: skip
    return _table("Reading", columns, cells)


def _longest(rows: list[dict]) -> str:
    columns = (
        "model | kept on | longest text | GB | host GB | of memory % | remat | timed text "
        "| tokens/s | from - to | MFU % | compile s"
    )
    cells = [
        [
            r["model"], r["side"], f"{r['longest']:,}", *map(number, r["longest_gb"]),
            _percent(r["used"]), r["remat"], f"{r['timed_tokens']:,}", *_rate(r),
            _percent(r["mfu"]), number(r["compile_s"]),
        ]
        for r in rows
    ]  # fmt: skip
    return _table("Longest texts", columns, cells)


RATIOS = ("tokens_per_second", "token", "peak_gb")


def _ratio(record: dict, other: dict | None, key: str) -> str:
    return f"{record[key] / other[key]:.2f}x" if other is not None else ""


def _beside_peer(record: dict, rows: list[dict]) -> str:
    """Returns the speed of lcjax relative to the peer of this row; empty for lcjax's row."""
    ours = next((r for r in peers(record, rows) if r["side"] == OURS), None)
    if ours is None:
        return ""
    return f"{ours['tokens_per_second'] / record['tokens_per_second']:.2f}x as fast"


def _rate(record: dict) -> list[str]:
    low, high = record["range"]
    return [number(record["tokens_per_second"]), f"{number(low)} - {number(high)}"]


def _costs(record: dict) -> list[str]:
    """Returns the peak memory, if the case had its process alone or was planned, and compile s."""
    peak = record["peak_gb"] or record.get("plan_gb")
    compiling = number(record["compile_s"])
    if cached := record.get("cached_programs", 0):
        compiling += f" ({cached} cached)"
    return [number(peak), compiling]


def _percent(share: float | None) -> str:
    return number(None if share is None else 100 * share)


def _computed(record: dict) -> str:
    return ", ".join(record["attention"])
