"""Compiles the TPU kernels for TPU generations on a machine without one (extra `aot`).

    python benchmarks/tpu_compile.py [--generations v4 v5e v5p v6e] [--cases causal window ...]

One row per case, direction and generation: blocks of a step, number of kernels, compile seconds,
HBM in addition to arguments and results, and TFLOP of the products of visited blocks. A forward
pass has 2 products. A backward pass has 5 in one kernel, or 7 in two kernels, which both compute
the scores and d_out v^T: one for dq, and one for dk and dv. A kernel that does not fit into VMEM or
scalar memory fails to compile.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.experimental import topologies

from lcjax.cost.compilers import TPU_ENVIRONMENT
from pallas_kernels import causal, prefix, window
from pallas_kernels.backends.tpu import attention as _tpu
from pallas_kernels.backends.tpu import grid as _tpu_grid
from pallas_kernels.dispatch import Operands, Spec

os.environ |= TPU_ENVIRONMENT  # libtpu reads it when it is loaded, by `get_topology_desc`

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
LONG = 131072
SINKS = causal() & (window(4096) | prefix(64))
CASES = {  # batch, queries, keys, query heads, key heads, head size, dtype, mask
    "causal": (1, LONG, LONG, 32, 32, 128, "bfloat16", causal()),
    "window": (1, LONG, LONG, 32, 32, 128, "bfloat16", SINKS),
    "grouped": (1, LONG, LONG, 32, 8, 128, "bfloat16", SINKS),
    "large": (1, 16384, 16384, 8, 8, 256, "bfloat16", causal()),
    "float32": (1, 16384, 16384, 8, 8, 64, "float32", causal()),
    "decode": (8, 1, LONG, 32, 8, 128, "bfloat16", None),
}


def shapes(case, generation):
    b, t, s, n, heads, size, dtype, _ = case
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation])
    place = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    q, k = array(b, t, n, size), array(b, s, heads, size)
    return q, k, array(b, t, n, dtype="float32"), array(1, t, dtype="int32")


def row(case, generation: str, backward: bool) -> str:
    q, k, lse, index = shapes(case, generation)
    mask = case[-1]
    # Decoding: the query's position is known at run time only, so its table is traced.
    spec = Spec(causal() if mask is None else mask, q.shape[-1] ** -0.5)
    operands = Operands(q_index=index if mask is None else None)
    if backward:
        function, args = _tpu.backward, (q, k, k, q, lse, q, lse, operands)
    else:
        function, args = _tpu.forward, (q, k, k, operands)
    device = jax.sharding.AbstractDevice(q.sharding._device.device_kind, 1, "tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(lambda *x: function(*x, spec)).trace(*args)
        lowered = traced.lower(lowering_platforms=("tpu",))
    start = time.perf_counter()
    memory = lowered.compile().memory_analysis()
    seconds = time.perf_counter() - start
    count = lowered.as_text().count("tpu_custom_call")
    cut, flops = _products(q, k, operands, spec, (5 if count == 1 else 7) if backward else 2)
    work = "traced" if flops is None else f"{flops / 1e12:.1f}"
    return (
        f"{generation:5}{'backward' if backward else 'forward':10}{cut.rows:6}{cut.key_block:6}"
        f"{count:9}{seconds:11.1f}{memory.temp_size_in_bytes / 2**20:10.0f}{work:>10}"
    )


def _products(q, k, operands, spec, products: int):
    """Returns the tiling, and the FLOPs of the visited blocks; None if the table is traced."""
    backward = products > 2
    if operands.q_index is not None:
        step = _tpu_grid.step_blocks(q, k, backward)
        return _tpu._tiling(q, k, k, operands, None, step), None
    cut, visits = _tpu._plan(q, k, k, operands, spec, backward)
    pairs = int(np.sum(visits.valid & (visits.kind != _tpu_grid.NOTHING)))
    per_step = 2 * cut.rows * cut.key_block * q.shape[-1]
    return cut, products * per_step * pairs * cut.batch * cut.heads


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--generations", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    print("case     chip direction   rows  keys  kernels  compile s  HBM MiB    TFLOP")
    for name in args.cases:
        for generation in args.generations:
            for backward in (False, True)[: 1 if name == "decode" else 2]:
                print(f"{name:9}{row(CASES[name], generation, backward)}", flush=True)


if __name__ == "__main__":
    main()
