"""Measures cache methods (`model.cache`): memory as compilers report it, time on a CPU, quality.

    python benchmarks/cache.py memory [--topologies cpu v5e:2x4 ...] [--lengths 131072 1048576]
    python benchmarks/cache.py speed [--tokens 4096] [--rounds 3]
    python benchmarks/cache.py quality [--lengths 4096 8192] [--ratios 0.5 0.25 0.75]
    python benchmarks/cache.py quality --streamed     # text that is evicted while it is read
    python benchmarks/cache.py tables [--write]       # from cache.json; fills docs/benchmarks.md

`memory` compiles Llama-3-8B in bfloat16, with `--layers` of its 32, for devices that need not be
present (extras `aot` and `cuda`): reading the last 4,096 tokens of a prompt (fewer with chunks),
the cut at its end, and a decoding step after it. `speed` reads prompts with SmolLM2-135M on this
CPU and decodes 64 tokens after each; methods and the full cache take turns with each prompt.
`quality` runs configs/eval_cache_smollm2.yaml, or eval_cache_stream_smollm2.yaml, for the methods
that can share readings; `--set model.path=... data.path=...` is for another model. All add their
results to cache.json; a case of `memory` or `quality` that is there is not repeated.
"""

import argparse
import functools
import hashlib
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import pages
import processes

FILE = Path(__file__).with_name("cache.json")
PAGE = processes.ROOT / "docs" / "benchmarks.md"
BUDGET, CHUNK = 2048, 1024
_POLICY = {"tokens": BUDGET}
METHODS = {
    "full": {"type": "full"},
    "snapkv": {"type": "snapkv", **_POLICY},
    "snapkv, chunks": {"type": "snapkv", **_POLICY, "chunk": CHUNK},
    "snapkv, Ada-KV, chunks": {
        "type": "snapkv", **_POLICY, "chunk": CHUNK, "heads": {"type": "adaptive"}
    },
    "snapkv, pyramid": {"type": "snapkv", **_POLICY, "layers": {"type": "pyramid"}},
    "expected attention": {"type": "expected_attention", **_POLICY},
    "h2o, chunks": {"type": "h2o", **_POLICY, "chunk": CHUNK},
    "keydiff, chunks": {"type": "keydiff", **_POLICY, "chunk": CHUNK},
    "streaming, chunks": {"type": "streaming", **_POLICY, "chunk": CHUNK},
    "quest": {"type": "quest", **_POLICY},
}  # fmt: skip
POLICIES = {
    "snapkv": {"type": "snapkv"},
    "snapkv, PyramidKV": {"type": "snapkv", "layers": {"type": "pyramid"}},
    "snapkv, Ada-KV": {"type": "snapkv", "heads": {"type": "adaptive"}},
    "snapkv, CriticalKV": {"type": "snapkv", "critical": {}},
    "snapkv, ChunkKV": {"type": "snapkv", "span": 20},
    "tova": {"type": "tova"},
    "h2o": {"type": "h2o"},
    "observed attention": {"type": "observed_attention"},
    "expected attention": {"type": "expected_attention"},
    "expected attention, Ada-KV": {
        "type": "expected_attention", "epsilon": 0.01, "heads": {"type": "adaptive"}
    },
    "lagkv": {"type": "lagkv"},
    "keydiff": {"type": "keydiff"},
    "cur": {"type": "cur"},
    "leverage": {"type": "leverage"},
    "non-causal": {"type": "non_causal"},
    "compactor": {"type": "compactor"},
    "kvzip": {"type": "kvzip"},
    "kvcompose": {"type": "kvcompose"},
    "knorm": {"type": "knorm"},
    "streaming": {"type": "streaming"},
    "random": {"type": "random"},
}  # fmt: skip
# Policies that observe the same queries, or none, cut the same readings, in one process.
ALIKE = (
    [name for name in POLICIES if name.startswith("snapkv")],
    ["h2o", "observed attention"],
    ["expected attention", "expected attention, Ada-KV"],
    ["non-causal", "compactor"],
    ["lagkv", "keydiff", "cur", "leverage", "knorm", "streaming", "random"],
)
READ_AGAIN = ("kvzip", "kvcompose")  # at the end of a prompt, so not streamed
# RULER at 4,096 tokens with Llama-3.1-8B-Instruct, question unseen, by the share evicted: the
# leaderboard of kvpress (github.com/NVIDIA/kvpress); the full cache has 95.4
PUBLISHED = {
    "kvzip": {0.25: 95.5, 0.5: 95.5, 0.75: 95.1},
    "expected attention, Ada-KV": {0.25: 94.0, 0.5: 91.5, 0.75: 74.3},
    "compactor": {0.25: 94.0, 0.5: 87.7, 0.75: 77.8},
    "keydiff": {0.25: 91.0, 0.5: 84.7, 0.75: 74.2},
    "snapkv, ChunkKV": {0.25: 85.8, 0.5: 75.0},
    "snapkv, Ada-KV": {0.25: 88.1, 0.5: 78},
    "tova": {0.25: 86.5, 0.5: 75.5, 0.75: 64.2},
    "expected attention": {0.25: 87.6, 0.5: 74.7, 0.75: 52.7},
    "snapkv": {0.25: 80.3, 0.5: 67.0, 0.75: 40.0},
    "streaming": {0.25: 78.2, 0.5: 59.8, 0.75: 40.3},
    "knorm": {0.25: 74.5, 0.5: 49.7, 0.75: 28.9},
    "observed attention": {0.25: 72.9, 0.5: 50.8, 0.75: 28.9},
    "random": {0.25: 63.1, 0.5: 7.7, 0.75: 0.5},
}
TOPOLOGIES = {"v5e:2x4": 8, "v6e:2x2": 4, "h100:2": 2, "cpu": 1}  # and the size of the axis tensor
PROGRAMS = ("prefill", "cut", "decode")
NEW = 64


def memory(topology: str, name: str, length: int, layers: int) -> dict:
    """Compiles the programs of a method; returns bytes on a device, and seconds of compiling."""
    import draccus
    import jax

    from lcjax.attention import CacheMethod
    from lcjax.cost import compilers, resources
    from lcjax.cost.chips import Topology, local_chip
    from lcjax.cost.program import program_cost
    from lcjax.generation import session
    from lcjax.models import preset
    from lcjax.parallel.sharding import Mesh, make_mesh

    method = draccus.decode(CacheMethod, METHODS[name])
    config = preset("llama3-8b").replace(num_layers=layers, cache=method)
    config = config.replace(dtype="bfloat16", param_dtype="bfloat16")
    shape = Mesh(fsdp=1, tensor=TOPOLOGIES[topology])
    if topology == "cpu":
        chip, mesh = local_chip("bfloat16"), make_mesh(shape, jax.devices()[:1])
    else:
        target = Topology.parse(topology)
        chip, mesh = target.chip, make_mesh(shape, compilers.devices(target))
    tokens = min(session.chunk_of_cache(config, 4096), length)
    lowered = {
        "prefill": lambda: session.lower_read(config, mesh, 1, length, tokens),
        "cut": lambda: session.lower_cut(config, mesh, 1, length, tokens),
        "decode": lambda: session.lower_read(config, mesh, 1, length, 1),
    }
    if not (config.evicts and method.chunk is None):
        del lowered["cut"]
    costs = {program: program_cost(lower(), chip) for program, lower in lowered.items()}
    return {
        "held": resources.cache_bytes(config, length) // layers * 32,
        "usable": chip.usable,
        **{
            program: {
                "peak": cost.peak_memory, "temporaries": cost.temporaries,
                "seconds": cost.seconds, "fits": cost.fits,
            }
            for program, cost in costs.items()
        },
    }  # fmt: skip


def speed(tokens: int, rounds: int, *names: str) -> dict:
    """Returns seconds of a prompt of `tokens`, and milliseconds of a token after it, of each round.

    Methods take turns with each prompt; all are compiled before the first round.
    """
    import draccus
    import numpy as np

    from lcjax.attention import CacheMethod
    from lcjax.generation.language_model import LanguageModel
    from lcjax.generation.sampling import Sampling

    lm = LanguageModel.load("smollm2-135m-instruct")
    sides = {
        name: lm.with_method(cache=draccus.decode(CacheMethod, METHODS[name])) for name in names
    }
    times = {f"{tokens} {name}": {"prompt": [], "token": []} for name in names}
    sampling = Sampling(max_new_tokens=NEW, min_new_tokens=NEW)
    prompts = np.random.default_rng(0).integers(100, 10_000, (1 + rounds, tokens)).tolist()
    for round_, prompt in enumerate(prompts):
        for name, side in sides.items():
            start = time.perf_counter()
            pieces = side.stream([prompt], sampling)
            first = next(pieces)
            middle = time.perf_counter()
            count = sum(len(piece.ids) for piece in pieces)
            end = time.perf_counter()
            print(f"{round_} {name}: {middle - start:.2f} s, {count} in {end - middle:.2f} s",
                  file=sys.stderr, flush=True)  # fmt: skip
            if round_:
                assert len(first.ids) + count == NEW
                times[f"{tokens} {name}"]["prompt"].append(middle - start)
                times[f"{tokens} {name}"]["token"].append(1e3 * (end - middle) / count)
    return times


def quality(config: str, length: int, methods: dict[str, dict], words: list[str]) -> dict:
    """Runs an evaluation; returns the scores of needles and windows, by the keys of `methods`.

    Methods that observe nothing, or the same, read each prompt once. A run that was stopped goes on
    in the same folder.
    """
    rows = [{**method, "name": key} for key, method in methods.items()]
    call = [config, length, rows, words]
    name = f"lcjax-cache-{hashlib.sha256(json.dumps(call).encode()).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir(), name)
    processes.python(
        str(processes.ROOT / "eval.py"), "--config", f"lcjax:{config}", f"--lengths=[{length}]",
        f"--methods={json.dumps(rows)}", f"--run.folder={folder}", "--readings_gb=6",
        *(f"--{word}" for word in words), **processes.CPU,
    )  # fmt: skip
    lines: dict[str, list[dict]] = {}
    for path in folder.glob("*/*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            lines.setdefault(line["method"], []).append(line)
    scores = {key: _scores(lines[key]) for key in methods}
    shutil.rmtree(folder)
    return scores


def _scores(lines: list[dict]) -> dict:
    """Returns the scores in the records and costs of a method."""
    windows = sorted((x for x in lines if "nll" in x), key=lambda x: (x["source"], x["window"]))
    return {
        "held": max(x["cache_bytes"] for x in lines if "cache_bytes" in x),
        "needles": [x["correct"] for x in lines if "correct" in x],
        "nats": [x["nll"] / x["scored"] for x in windows],
        "sources": [x["source"] for x in windows],
    }


def measure_memory(args: argparse.Namespace) -> None:
    for topology in args.topologies:
        for length in args.lengths:
            for name in args.methods:
                key = f"{topology} {length} {args.layers} {name}"
                words = ("memory", topology, name, str(length), str(args.layers))
                _measure("memory", key, *words)


def measure_speed(args: argparse.Namespace) -> None:
    names = list(dict.fromkeys(["full", *args.methods]))
    words = "worker", "speed", str(args.tokens), str(args.rounds), *names
    _add("speed", processes.measured(__file__, *words, **processes.CPU))


def measure_quality(args: argparse.Namespace) -> None:
    config = "eval_cache_stream_smollm2" if args.streamed else "eval_cache_smollm2"
    protocol = "streamed" if args.streamed else args.question
    part, done = " ".join(["quality", *args.set]), _results()
    for length in args.lengths or ([2048] if args.streamed else [4096]):
        first = "streamed" if args.streamed else "text"
        groups = {"full": {f"{length} {first} - full": {}}}
        for name in args.methods:
            alike = next((i for i, group in enumerate(ALIKE) if name in group), name)
            if args.streamed and name in READ_AGAIN:
                continue
            for setting in [512] if args.streamed else args.ratios:
                method = {"cache": {**POLICIES[name], "ratio": setting}}
                if args.streamed:
                    method["cache"] = {**POLICIES[name], "tokens": setting, "chunk": 256}
                else:
                    method["question"] = args.question
                groups.setdefault(alike, {})[f"{length} {protocol} {setting} {name}"] = method
        for methods in groups.values():
            missing = {key: x for key, x in methods.items() if key not in done.get(part, {})}
            if missing:
                _add(part, quality(config, length, missing, args.set))


def _results() -> dict:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def _add(part: str, new: dict[str, dict]) -> None:
    """Adds results by their keys; others may have added theirs in the meantime."""
    results = _results()
    results.setdefault(part, {}).update(new)
    results["machine"] = f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"
    FILE.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    for key, result in new.items():
        print(f"{key}: {result}", file=sys.stderr, flush=True)


def _measure(part: str, key: str, *words: str) -> None:
    """Adds a measurement in a process of its own, unless it is there."""
    if key not in _results().get(part, {}):
        _add(part, {key: processes.measured(__file__, "worker", *words, **processes.CPU)})


def quality_table(results: dict) -> str:
    """Returns a line for each method: its bytes, needles, and nats a token above the full cache."""
    from lcjax.evaluation.statistics import paired, wilson

    lines = [
        "| method | tokens | question | evicted | MB of a row | needles found | nats a token more"
        " | kvpress, RULER |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    rows = results.get("quality", {})
    for key, row in sorted(rows.items(), key=lambda item: _quality_order(item[0])):
        length, protocol, setting, name = key.split(" ", 3)
        full = rows[f"{length} {'streamed' if protocol == 'streamed' else 'text'} - full"]
        needles, nats, published = "", "", ""
        if row["needles"]:
            right, total = sum(row["needles"]), len(row["needles"])
            low, high = wilson(round(right), total)
            needles = f"{right / total:.2f} ({low:.2f} to {high:.2f}, n = {total})"
        if name != "full":
            loss = paired(full["nats"], row["nats"], clusters=row["sources"])
            nats = f"{loss.mean:+.3f} ({loss.low:+.3f} to {loss.high:+.3f}, n = {loss.count})"
        if length == "4096" and protocol == "unseen" and name in PUBLISHED:
            published = PUBLISHED[name].get(float(setting), "")
        elif length == "4096" and protocol == "text":
            published = 95.4
        evicted = f"to {setting} tokens" if protocol == "streamed" else setting
        evicted = "" if name == "full" else evicted
        cells = name, f"{int(length):,}", protocol, evicted, f"{row['held'] / 1e6:.0f}"
        lines.append(f"| {' | '.join(map(str, (*cells, needles, nats, published)))} |")
    return "\n".join(lines)


def _quality_order(key: str) -> tuple:
    length, protocol, setting, name = key.split(" ", 3)
    place = 0 if name == "full" else 1 + list(POLICIES).index(name)
    protocols = ["text", "unseen", "seen", "streamed"]
    is_streamed = protocol == "streamed"
    return is_streamed, int(length), protocols.index(protocol), setting, place


def memory_table(results: dict) -> str:
    """Returns a line for each method, length and kind of device."""
    lines = [
        "| method | tokens | held, GB | devices | layers | prefill | cut | decode |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for key, row in sorted(results.get("memory", {}).items(), key=_order):
        topology, length, layers, name = key.split(" ", 3)
        cells = [
            f"{row[program]['peak'] / 1e9:.2f}{'' if row[program]['fits'] else ' (does not fit)'}"
            if program in row
            else ""
            for program in PROGRAMS
        ]
        first = f"| {name} | {int(length):,} | {row['held'] / 1e9:.3g} | {topology} | {layers} | "
        lines.append(first + " | ".join(cells) + " |")
    return "\n".join(lines)


def _order(item: tuple[str, dict]) -> tuple:
    topology, length, layers, name = item[0].split(" ", 3)
    return int(length), list(METHODS).index(name), list(TOPOLOGIES).index(topology), int(layers)


def speed_table(results: dict) -> str:
    """Returns a line for each method: its times as multiples of those of the full cache."""
    lines = [
        "| method | prompt tokens | prompt, of the full cache's time | a token | rounds |",
        "|---|---:|---:|---:|---:|",
    ]
    runs = results.get("speed", {})
    cases = [key.split(" ", 1) for key in runs]
    for tokens, name in sorted(cases, key=lambda case: (case[0], list(METHODS).index(case[1]))):
        own, full = runs[f"{tokens} {name}"], runs[f"{tokens} full"]
        cells = []
        for part, unit in (("prompt", "s"), ("token", "ms")):
            if name == "full":
                cells.append(f"{statistics.median(own[part]):.3g} {unit}")
                continue
            ratios = [x / y for x, y in zip(own[part], full[part], strict=True)]
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {name} | {int(tokens):,} | {' | '.join(cells)} | {len(own['token'])} |")
    return "\n".join(lines)


TABLES = {"memory": memory_table, "speed": speed_table, "quality": quality_table}


def filled(page: str) -> str:
    """Returns the page with the tables of its blocks as the results are."""
    results = json.loads(FILE.read_text())
    tables = {name: functools.partial(table, results) for name, table in TABLES.items()}
    return pages.filled(page, "cache", tables)


def tables(args: argparse.Namespace) -> None:
    if args.write:
        PAGE.write_text(filled(PAGE.read_text()))
    else:
        results = json.loads(FILE.read_text())
        print("\n\n".join(table(results) for table in TABLES.values()))


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        part, *words = sys.argv[2:]
        run = {"memory": memory, "speed": speed}[part]
        print(json.dumps(run(*(int(word) if word.isdigit() else word for word in words))))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(required=True)
    measures = {"memory": measure_memory, "speed": measure_speed, "quality": measure_quality}
    for name, run in (measures | {"tables": tables}).items():
        part = parts.add_parser(name)
        part.set_defaults(run=run)
        if name != "tables":
            names = list(POLICIES if name == "quality" else METHODS)
            part.add_argument("--methods", nargs="+", choices=names, default=names)
        if name == "memory":
            part.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=[*TOPOLOGIES])
            part.add_argument("--lengths", nargs="+", type=int, default=[131_072, 1_048_576])
            part.add_argument("--layers", type=int, default=32)
        elif name == "speed":
            part.add_argument("--tokens", type=int, default=4096)
            part.add_argument("--rounds", type=int, default=3)
        elif name == "quality":
            part.add_argument("--lengths", nargs="+", type=int)
            part.add_argument("--ratios", nargs="+", type=float, default=[0.5, 0.25, 0.75])
            part.add_argument("--question", choices=("unseen", "seen"), default="unseen")
            part.add_argument("--streamed", action="store_true")
            part.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
        else:
            part.add_argument("--write", action="store_true", help="fill the tables of the docs")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
