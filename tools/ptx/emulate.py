"""The Hopper kernels as compiled, run on a CPU: their PTX in an emulator, against dense formulas.

    pip install "jax-cuda12-plugin[with-cuda]" jax-cuda12-pjrt     # or cuda13; jax's own version
    python -m tools.ptx.emulate [--only "documents"]

The cases are those of the interpreter's tests. Every kernel of a case is compiled for an H200 and
executed twice, with asynchronous copies and products done at once, and as late as the kernel
allows; warpgroups take turns at random. Results have to be those of float64 formulas, with equal
bits. An access that NVIDIA's rules forbid, a wait that does not end or a box beyond its array fails
the case (`ptx/`): try `--without fence.proxy.async`.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path

# By path: draccus installs a package of the name `tests`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "pallas_kernels"))

import attention_oracle
import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_gpu_cases import CASES

from benchmarks.gpu import compile as programs
from pallas_kernels.dispatch import BACKENDS, Backend
from tools.ptx.arithmetic import Fault
from tools.ptx.host import launch_of
from tools.ptx.machine import run

GPU = "h200"


@functools.cache
def place():
    """Where programs are compiled for."""
    target = (programs.HERE / "targets" / f"{GPU}.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def compiled(kernel, operands, name: str):
    """The kernel's PTX, and how it is launched."""
    for file in programs.DUMP.glob("flash_*"):
        file.unlink()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place()) for x in operands]
    jax.jit(kernel).trace(*shapes).lower(lowering_platforms=("cuda",)).compile()
    texts = {file: file.read_text() for file in programs.DUMP.glob("flash_*.ptx")}
    file = next(x for x, text in texts.items() if f".entry {name}_mosaic_gpu_kernel(" in text)
    return texts[file], launch_of(file.with_suffix(".mlir-passes.log").read_text())


def emulated(make, **options):
    """In place of `make`, which is Pallas' `kernel`: calls run in the emulator."""

    def kernel(entry, out_type, **how):
        def call(*operands):
            real = make(entry, out_type=out_type, **how)
            text, launch = compiled(real, operands, entry.__name__)
            outputs = [(x.shape, np.dtype(x.dtype)) for x in out_type]

            def execute(*arrays):
                early, late = (
                    run(text, launch, arrays, outputs, late=x, **options) for x in (False, True)
                )
                if any(x.tobytes() != y.tobytes() for x, y in zip(early, late, strict=True)):
                    raise Fault(f"{entry.__name__}: bits depend on the order of work")
                return late

            return jax.pure_callback(execute, list(out_type), *operands)

        return call

    return kernel


def check(case) -> str:
    """Results that are wrong, or why there are none; empty: all is right."""
    try:
        found = jax.block_until_ready(attention_oracle.run(case, "mosaic_gpu"))
    except jax.errors.JaxRuntimeError as error:
        faults = [x for x in str(error).splitlines() if "Fault: " in x]
        return faults[-1] if faults else str(error)
    wrong = attention_oracle.above_limit(case, found, attention_oracle.oracle(case))
    return f"relative errors {wrong}" if wrong else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", default="", help="words that a case's name must have")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 2**20)
    parser.add_argument("--without", default="", help="leaves out instructions of that name")
    args = parser.parse_args()
    programs.prepare(xla=False)
    plgpu.kernel = emulated(plgpu.kernel, seed=args.seed, without=args.without)
    BACKENDS["mosaic_gpu"] = Backend("pallas_kernels.backends.mosaic_gpu.attention", ("cpu",))
    print(f"seed {args.seed}")
    failed = 0
    with programs.described(GPU):
        for name, case in CASES.items():
            if all(word in name for word in args.only.split()):
                start, why = time.perf_counter(), check(case)
                failed += bool(why)
                seconds = time.perf_counter() - start
                print(f"{'FAIL' if why else 'ok':4} {name}, {seconds:.0f} s {why}", flush=True)
    programs.SCRATCH.cleanup()
    return failed


if __name__ == "__main__":
    sys.exit(main())
