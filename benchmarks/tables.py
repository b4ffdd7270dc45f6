"""Host time of static block tables, and of their key-major twins, against the length of the text.

    python benchmarks/tables.py --lengths 131072 1048576 --block 512

Prints the best of `--repeats` runs in milliseconds and how many pairs of blocks are visited.
"""

import argparse
import time

from pallas_kernels import causal, chunks, documents, keys_in, prefix, stride, window
from pallas_kernels.tables import from_mask, transpose


def masks(length: int) -> dict:
    """One mask of each kind of pattern, for texts of `length` tokens."""
    return {
        "causal": causal(),
        "window 4096 + 64 sinks": causal() & (window(4096) | prefix(64)),
        "chunks of 8192 + listed keys": causal() & (chunks(8192) | keys_in(range(0, length, 8192))),
        "window 512 + stride 7": causal() & (window(512) | stride(7)),
        "documents of 3000": causal() & documents(range(0, length, 3000)),
    }


def best(run, repeats: int):
    """Fewest seconds of some runs, and the last result."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[131_072, 1_048_576])
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"{'tokens':>9} {'mask':<30} {'table ms':>9} {'twin ms':>9} {'visited':>10}")
    for length in args.lengths:
        sizes = dict(queries=length, keys=length, q_block=args.block, k_block=args.block)
        for name, mask in masks(length).items():
            made, table = best(lambda: from_mask(mask, **sizes), args.repeats)  # noqa: B023
            moved, _ = best(lambda: transpose(table, length), args.repeats)  # noqa: B023
            visited = int(table.seen.sum())
            print(f"{length:>9} {name:<30} {made * 1e3:>9.1f} {moved * 1e3:>9.1f} {visited:>10}")


if __name__ == "__main__":
    main()
