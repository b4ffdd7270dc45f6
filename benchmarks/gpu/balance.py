"""Computes how evenly the Hopper kernels fill the 132 multiprocessors of an H100 or H200.

    python -m benchmarks.gpu.balance

Nothing runs on a GPU. The model: programs start in the order of their grid, each on the first free
multiprocessor; their time is proportional to the tiles that they visit; a multiprocessor's shared
memory holds one program at a time. One row per kernel and causal call: the number of programs, and
the balance, which is visited tiles / (132 x tiles that the busiest multiprocessor visits).
"""

from __future__ import annotations

import heapq
import sys

import jax
import numpy as np

from pallas_kernels import causal
from pallas_kernels.backends.mosaic_gpu import attention, program
from pallas_kernels.dispatch import Operands, Spec

PROCESSORS = 132
KERNELS = attention.FORWARD, attention.D_QUERIES, attention.D_KEYS
CALLS = [  # batch, tokens, query heads, key heads, head size
    (1, 4096, 16, 16, 128),
    (8, 4096, 16, 16, 128),
    (1, 4096, 32, 8, 128),
    (1, 8192, 8, 8, 128),
    (1, 16384, 16, 16, 128),
    (1, 16384, 4, 1, 128),
    (1, 16384, 32, 32, 64),
]


def steps(kernel: str, batch: int, tokens: int, heads: int, key_heads: int, size: int):
    """Returns the number of tiles that each program visits, in the order of the grid."""
    q, k = (jax.ShapeDtypeStruct((batch, tokens, n, size), "bfloat16") for n in (heads, key_heads))
    operands, call = Operands(), Spec(causal(), size**-0.5)
    tiles = attention._tiles(kernel, q, k, operands, call)
    table = attention._table(tiles, q, k, operands, call)
    spec = attention._kernel_spec(kernel, q, k, k, operands, call, table)
    seen = attention.list_operands(table, kernel, spec)["seen"][0, 0]
    is_keys = kernel == attention.D_KEYS
    resident, streamed = spec.tiling.queries, spec.tiling.keys
    if is_keys:
        resident, streamed = streamed, resident
    heads = key_heads if is_keys and not spec.per_query_head else heads
    index = np.indices(program.grid(spec, heads, resident.count, batch))
    place = program.of_keys if is_keys else program.of_queries
    tile = np.asarray(place(spec, tuple(index.astype(np.int32))).tile).ravel()
    repeats = spec.group if is_keys and not spec.per_query_head else 1
    return seen[tile // resident.pieces] * streamed.pieces * repeats


def balance(times) -> float:
    """Returns the sum of the times / (PROCESSORS x the time until all are done)."""
    free = [0] * PROCESSORS
    for time in times:
        heapq.heapreplace(free, free[0] + int(time))
    return sum(map(int, times)) / (PROCESSORS * max(free))


def main() -> int:
    jax.config.update("jax_platforms", "cpu")
    print(f"{'batch, tokens, heads, key heads, size':40}", *(f"{x:>20}" for x in KERNELS))
    for call in CALLS:
        grids = (steps(kernel, *call) for kernel in KERNELS)
        figures = (f"{len(x):12} {balance(x):7.2f}" for x in grids)
        print(f"{', '.join(map(str, call)):40}", *figures, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
