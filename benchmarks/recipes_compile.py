"""Compiles the training step of the 7B recipes for the TPUs that they name (extra `aot`).

    python benchmarks/recipes_compile.py [--recipes pi_7b_32k ...] [--topology v5p:2x2x2]

One row per recipe: what a device needs of its HBM, the model's FLOPs of one update on all devices,
what a device receives by collectives in it, and the time that compiling takes.
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
from lcjax.sharding import AXES
from lcjax.training import TrainConfig, compile_only

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
_NAMED = re.compile(r"^# Hardware: (v\w+:[\dx]+) ", re.MULTILINE)


def recipes() -> dict[str, Topology]:
    """Recipes whose header names TPUs, with these."""
    found = {file.stem: _NAMED.search(file.read_text()) for file in sorted(CONFIGS.glob("*.yaml"))}
    return {name: Topology.parse(match[1]) for name, match in found.items() if match}


def row(name: str, topology: Topology) -> tuple[str, bool]:
    config = config_lib.parse(TrainConfig, ["--config", str(CONFIGS / f"{name}.yaml")])
    found, model, mesh = compile_only.compile_step(config, topology)
    shape = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in AXES if mesh.shape[axis] > 1)
    traffic = ", ".join(
        f"{k} {t.count:,} ({t.bytes / 1e9:.0f} GB)" for k, t in found.traffic.items()
    )
    word = "" if found.fits else ", does not fit"
    cells = (
        name,
        str(topology),
        shape,
        f"{found.needed / 1e9:.1f} of {found.chip.usable / 1e9:.1f}{word}",
        f"{compile_only.step_flops(config, model) / 1e12:,.0f}",
        traffic,
        f"{found.seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |", found.fits


def main() -> int:
    known = recipes()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--recipes", nargs="+", choices=known, default=list(known))
    parser.add_argument("--topology", type=Topology.parse, help="instead of the recipe's own")
    args = parser.parse_args()
    print("| Recipe | Devices | Mesh | GB per device | TFLOPs per step | Collectives | Compile s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    fits = []
    for name in args.recipes:
        line, fit = row(name, args.topology or known[name])
        fits.append(fit)
        print(line, flush=True)
    return int(not all(fits))


if __name__ == "__main__":
    sys.exit(main())
