"""Times attention on this machine's CPU: against PyTorch and JAX, at length, and by density.

    python benchmarks/attention.py [peers] [long] [density] [products] [--lengths 1024 4096 16384]

Shapes of SmolLM2-135M: 9 query heads, 3 key heads, 64 channels.

peers: causal attention. Implementations take turns within every repetition, so that other load on
    the machine affects all of them alike; the table has medians and their ratio to lcjax's. `peak`
    is the growth in memory of a fresh process that runs one implementation alone.
long: causal attention over 16,384 tokens beside `jax.nn.dot_product_attention` (at a shorter length
    if its memory does not suffice here), and a window of 2,048 over 131,072 tokens. Each runs alone
    in a fresh process; `peak` is the memory of that process. The times of runs of more than 10 s
    include compilation.
density: random block tables of 8,192 tokens; shows that time follows the share of visited blocks.
products: causal attention over 16,384 tokens beside its matrix products alone, without softmax.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import time

HEADS, KV_HEADS, SIZE = 9, 3, 64
JAX_DENSE_LIMIT = 4096  # jax.nn's memory grows with the square: 29 GB at 16,384 tokens
JAX_DENSE_BYTES = 115  # of that memory per token squared: about three float32 score matrices
WINDOW = 2048


def ours(arrays, backward: bool):
    import jax

    from pallas_kernels import causal, flash

    return _jax_step(lambda q, k, v: flash(q, k, v, causal())[0], jax, arrays, backward)


def ours_windowed(arrays, backward: bool):
    import jax

    from pallas_kernels import causal, flash, window

    mask = causal() & window(WINDOW)
    return _jax_step(lambda q, k, v: flash(q, k, v, mask)[0], jax, arrays, backward)


def jax_nn(arrays, backward: bool):
    import jax

    attention = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    return _jax_step(attention, jax, arrays, backward)


def _jax_step(attention, jax, arrays, backward: bool):
    def both(q, k, v, d_out):
        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(d_out)

    q, k, v, d_out = map(jax.numpy.asarray, arrays)
    step, inputs = (both, (q, k, v, d_out)) if backward else (attention, (q, k, v))
    step = jax.jit(step)
    return lambda: jax.block_until_ready(step(*inputs))


def torch_sdpa(arrays, backward: bool):
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def tensor(x):  # [B, T, N, H] -> [B, N, T, H]; bfloat16 passes through float32
        dtype = torch.bfloat16 if x.dtype.itemsize == 2 else torch.float32
        return torch.from_numpy(x.astype("float32")).to(dtype).transpose(1, 2)

    q, k, v, d_out = map(tensor, arrays)
    attention = functools.partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)

    def forward():
        with torch.no_grad():
            return attention(q, k, v)

    def both():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attention(*inputs), inputs, d_out)

    return both if backward else forward


IMPLEMENTATIONS = {"lcjax": ours, "torch": torch_sdpa, "jax.nn": jax_nn}


def inputs(length: int, batch: int, dtype: str):
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [rng.normal(size=(batch, length, n, SIZE)).astype(kind) for n in heads]


def resident(key: str) -> int:
    """Returns the resident bytes of this process: now (VmRSS), or their peak so far (VmHWM)."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(key))


def peak(name: str, backward: bool, length: int, batch: int, dtype: str) -> float:
    """Returns by how many MB the process grows, with inputs, after a warm-up at 128 tokens."""
    IMPLEMENTATIONS[name](inputs(128, batch, dtype), backward)()
    before = resident("VmRSS")
    IMPLEMENTATIONS[name](inputs(length, batch, dtype), backward)()
    return (resident("VmHWM") - before) / 1e6


def seconds(steps: dict, repeats: int, warm: bool = True) -> dict[str, float]:
    """Returns median seconds of each step; steps take turns, after one warm-up each if `warm`."""
    times = {name: [] for name in steps}
    for step in steps.values() if warm else ():
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def alone(step, length: int, backward: bool = False) -> tuple[float, float]:
    """Returns (seconds, peak GB) in this process; seconds of a second run if the first is short."""
    run = step(inputs(length, 1, "float32"), backward)
    took = seconds({"first": run}, repeats=1, warm=False)["first"]
    if took < 10:
        took = seconds({"second": run}, repeats=1, warm=False)["second"]
    return took, resident("VmHWM") / 1e9


def peers(args, fresh):
    print("| tokens | pass | implementation | ms | time / lcjax | peak MB |")
    print("|--:|---|---|--:|--:|--:|")
    for length in args.lengths:
        names = [n for n in IMPLEMENTATIONS if n != "jax.nn" or length <= JAX_DENSE_LIMIT]
        arrays = inputs(length, args.batch, args.dtype)
        for backward in (False, True):
            steps = {name: IMPLEMENTATIONS[name](arrays, backward) for name in names}
            guess = args.batch * (length / 4096) ** 2 * (0.9 if backward else 0.25) * len(names)
            times = seconds(steps, repeats=max(3, min(15, int(args.work / guess))))
            for name in names:
                with fresh.Pool(1) as pool:
                    grown = pool.apply(peak, (name, backward, length, args.batch, args.dtype))
                print(
                    f"| {length} | {'fwd+bwd' if backward else 'fwd'} | {name} "
                    f"| {1e3 * times[name]:.0f} | {times[name] / times['lcjax']:.2f} "
                    f"| {grown:.0f} |",
                    flush=True,
                )


def long(args, fresh):
    with open("/proc/meminfo") as memory:
        free = next(1024 * int(x.split()[1]) for x in memory if x.startswith("MemAvailable"))
    dense = next(n for n in (16384, 8192, 4096) if n == 4096 or JAX_DENSE_BYTES * n * n < free)
    rows = [(ours, "causal", 16384, False), (ours, "causal", 16384, True)]
    if dense < 16384:
        print(f"jax.nn at {dense} tokens: {free / 1e9:.0f} GB are free here")
        rows.append((ours, "causal", dense, False))
    rows.append((jax_nn, "causal, jax.nn", dense, False))
    rows.append((ours_windowed, f"window {WINDOW}", 131072, False))
    print("| tokens | attention | pass | s | peak GB |")
    print("|--:|---|---|--:|--:|")
    for step, what, length, backward in rows:
        with fresh.Pool(1) as pool:
            took, most = pool.apply(alone, (step, length, backward))
        which = "fwd+bwd" if backward else "fwd"
        print(f"| {length} | {what} | {which} | {took:.2f} | {most:.2f} |", flush=True)


def density(args, fresh, length: int = 8192, block: int = 256):
    import numpy as np

    from pallas_kernels import flash
    from pallas_kernels.tables import from_block_mask

    arrays, blocks, rng = inputs(length, 1, args.dtype), length // block, np.random.default_rng(0)
    print("| visited blocks | % | pass | ms | % of dense | ms per 100 blocks |")
    print("|--:|--:|---|--:|--:|--:|")
    for backward in (False, True):
        dense = None
        for share in (1.0, 0.5, 0.25, 0.125, 0.05):
            count = round(share * blocks**2)
            visible = (rng.permutation(blocks**2) < count).reshape(blocks, blocks)
            table = from_block_mask(visible, full=visible, q_block=block, k_block=block)
            step = _table_step(flash, table, arrays, backward)
            took = seconds({"lcjax": step}, repeats=3)["lcjax"]
            dense = took if dense is None else dense
            print(
                f"| {count} | {100 * share:g} | {'fwd+bwd' if backward else 'fwd'} "
                f"| {1e3 * took:.0f} | {100 * took / dense:.1f} | {1e5 * took / count:.0f} |",
                flush=True,
            )


def _table_step(flash, table, arrays, backward: bool):
    import jax

    return _jax_step(lambda q, k, v: flash(q, k, v, table=table)[0], jax, arrays, backward)


def products(args, fresh, length: int = 16384, block: int = 512):
    """Times the forward pass beside the two products of each visited pair of blocks."""
    import jax

    arrays, blocks = inputs(length, 1, "float32"), length // block
    steps = KV_HEADS * blocks * (blocks + 1) // 2

    @jax.jit
    def multiply(q, k, v):
        def step(i, out):
            key, value = (
                jax.lax.dynamic_slice_in_dim(x, i % blocks * block, block) for x in (k, v)
            )
            scores = jax.numpy.matmul(q, key.T, precision="highest")
            return out + jax.numpy.matmul(scores, value, precision="highest")

        return jax.lax.fori_loop(0, steps, step, jax.numpy.zeros_like(q))

    q, k, v = (jax.numpy.asarray(x[0, :, 0]) for x in arrays[:3])
    q = q[: block * HEADS // KV_HEADS]  # rows: a block of queries of the heads of one key head
    steps_alone = {
        "lcjax": ours(arrays, False),
        "products": lambda: jax.block_until_ready(multiply(q, k, v)),
    }
    times = seconds(steps_alone, repeats=5)
    rate = steps * 4 * len(q) * block * SIZE / times["products"] / 1e9
    print(f"attention {times['lcjax']:.2f} s, its products {times['products']:.2f} s", end="")
    print(f" ({rate:.0f} GFLOP/s): {times['lcjax'] / times['products']:.2f}x")


PARTS = {"peers": peers, "long": long, "density": density, "products": products}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--work", type=float, default=12.0, help="seconds of repetitions per row")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown {', '.join(sorted(unknown))}; choose of {', '.join(PARTS)}")
    os.environ["JAX_PLATFORMS"] = "cpu"
    for part in args.parts or PARTS:
        print(
            f"\n{part}: {HEADS} query heads, {KV_HEADS} key heads, {SIZE} channels, {args.dtype}, "
            f"batch {args.batch}, {len(os.sched_getaffinity(0))} cores, load "
            f"{os.getloadavg()[0]:.1f}",
            flush=True,
        )
        PARTS[part](args, multiprocessing.get_context("spawn"))


if __name__ == "__main__":
    main()
