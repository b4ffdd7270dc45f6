"""Times static block tables on the host: making, transposing, and packing them for a TPU.

    python benchmarks/tables.py --lengths 131072 1048576 --block 512

Prints, for each length of text, the best of `--repeats` runs in milliseconds and the number of
visited pairs of blocks. A TPU's lists are those of a training step: by rows twice, by keys once.
"""

import argparse
import time

from pallas_kernels import causal, chunks, documents, keys_in, prefix, stride, window
from pallas_kernels.backends.tpu import grid as _tpu_grid
from pallas_kernels.tables import from_mask, transpose


def masks(length: int) -> dict:
    """Returns a mask of each kind of pattern, for texts of `length` tokens."""
    return {
        "causal": causal(),
        "window 4096 + 64 sinks": causal() & (window(4096) | prefix(64)),
        "chunks of 8192 + listed keys": causal() & (chunks(8192) | keys_in(range(0, length, 8192))),
        "window 512 + stride 7": causal() & (window(512) | stride(7)),
        "documents of 3000": causal() & documents(range(0, length, 3000)),
    }


def best(run, repeats: int):
    """Returns the fewest seconds of `repeats` runs, and the last result."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def packed(table, length: int):
    """Returns the lists that the TPU kernels read, for a head whose queries share nothing."""
    visits = _tpu_grid.list_visits(table, heads=1, split=1)
    sizes = dict(rows=-(-length // table.q_block), cols=-(-length // table.k_block))
    return [_tpu_grid.kernel_calls(visits, axis, **sizes, batch=1, heads=1) for axis in (0, 0, 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[131_072, 1_048_576])
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    heads = " ".join(f"{x:>10}" for x in ("table ms", "transp. ms", "TPU ms"))
    print(f"{'tokens':>9} {'mask':<30} {heads} {'visited':>10}")
    for length in args.lengths:
        sizes = dict(queries=length, keys=length, q_block=args.block, k_block=args.block)
        for name, mask in masks(length).items():
            made, table = best(lambda: from_mask(mask, **sizes), args.repeats)  # noqa: B023
            moved, _ = best(lambda: transpose(table, length), args.repeats)  # noqa: B023
            lists, _ = best(lambda: packed(table, length), args.repeats)  # noqa: B023
            visited = int(table.seen.sum())
            times = " ".join(f"{x * 1e3:>10.1f}" for x in (made, moved, lists))
            print(f"{length:>9} {name:<30} {times} {visited:>10}")


if __name__ == "__main__":
    main()
