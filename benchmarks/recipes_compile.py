"""Compiles the training step of the 7B recipes for the devices that they name.

    python benchmarks/recipes_compile.py [--recipes pi_7b_32k ...] [--topology v5p:2x2x2]

TPUs need libtpu (extra `aot`), GPUs jax's CUDA plugin (extra `cuda`); no device is needed.

One row per recipe and kind of device: the memory that a device needs, the estimate of it, the
model's FLOPs of one update on all devices, the traffic that a device receives by collectives, and
the compile time.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

from lcjax import config as config_lib
from lcjax.cost.chips import Topology
from lcjax.parallel.sharding import AXES
from lcjax.training import TrainConfig, compile_only, estimate

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
# `# Hardware: v5e:8x8 (...)`, and under Elsewhere `h200:8 with --mesh.context=1 ...`
_NAMED = re.compile(r"^# Hardware: (\w+:[\dx*]+) \(", re.MULTILINE)
_ELSEWHERE = re.compile(r"(\w+:[\dx]+) with ((?:--\S+=\w+ ?)+)")

# The devices, and command-line options for them.
Place = tuple[Topology, list[str]]


def recipes() -> dict[str, list[Place]]:
    """Returns recipes whose header names a topology, with all devices that it names."""
    places = {}
    for file in sorted(CONFIGS.glob("*.yaml")):
        text = file.read_text()
        if hardware := _NAMED.search(text):
            others = _ELSEWHERE.findall(text)
            places[file.stem] = [(Topology.parse(hardware[1]), [])]
            places[file.stem] += [(Topology.parse(name), words.split()) for name, words in others]
    return places


def row(name: str, topology: Topology, words: list[str]) -> tuple[str, bool]:
    config = config_lib.parse(TrainConfig, ["--config", str(CONFIGS / f"{name}.yaml"), *words])
    note = "5 to 20 minutes for 7B on 64 chips"
    print(f"compiling {name} for {topology} ({note}) ...", file=sys.stderr, flush=True)
    result, model, mesh = compile_only.compile_step(config, topology)
    estimated = estimate.training_memory(config, model, mesh).total
    shape = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in AXES if mesh.shape[axis] > 1)
    traffic = ", ".join(
        f"{k} {t.count:,} ({t.bytes / 1e9:.0f} GB)" for k, t in result.traffic.items()
    )
    word = "" if result.fits else ", does not fit"
    cells = (
        name,
        str(topology),
        shape,
        f"{result.peak_memory / 1e9:.1f} of {result.chip.usable / 1e9:.1f}{word}",
        f"{estimated / 1e9:.1f} ({estimated / result.peak_memory:.0%})",
        f"{compile_only.step_flops(config, model) / 1e12:,.0f}",
        traffic,
        f"{result.seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |", result.fits


def main() -> int:
    known = recipes()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--recipes", nargs="+", choices=known, default=list(known))
    parser.add_argument("--topology", type=Topology.parse, help="instead of the recipe's own")
    args = parser.parse_args()
    titles = "Recipe", "Devices", "Mesh", "GB per device", "Estimated", "TFLOPs per step"
    titles += "Collectives", "Compile s"
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)
    fits = []
    for name in args.recipes:
        for place in [(args.topology, [])] if args.topology else known[name]:
            line, fit = row(name, *place)
            fits.append(fit)
            print(line, flush=True)
    return int(not all(fits))


if __name__ == "__main__":
    sys.exit(main())
