"""Attention on this machine's CPU beside PyTorch's and JAX's own, in one run.

    python benchmarks/attention_cpu.py [--lengths 1024 4096 16384] [--dtype float32] [--batch 1]

Shapes of SmolLM2-135M: 9 query heads, 3 key heads, 64 channels, causal. The implementations take
turns within every repetition, so that a busy machine disturbs all of them alike; the table gives
medians and the ratio to ours. `peak` is what the process grew by at most while that
implementation ran alone in a fresh process.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import time

HEADS, KV_HEADS, SIZE = 9, 3, 64
JAX_DENSE_LIMIT = 4096  # jax.nn's memory grows with the square: 21 GB at 16,384 tokens


def ours(arrays, backward: bool):
    import jax

    from pallas_kernels import causal, flash

    return _jax_step(lambda q, k, v: flash(q, k, v, causal())[0], jax, arrays, backward)


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
    """Bytes of this process now (VmRSS) or at most so far (VmHWM)."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(key))


def peak(name: str, backward: bool, length: int, batch: int, dtype: str) -> float:
    """Megabytes that the process grows by, inputs included, after a warm-up at 128 tokens."""
    IMPLEMENTATIONS[name](inputs(128, batch, dtype), backward)()
    before = resident("VmRSS")
    IMPLEMENTATIONS[name](inputs(length, batch, dtype), backward)()
    return (resident("VmHWM") - before) / 1e6


def seconds(steps: dict, repeats: int) -> dict[str, float]:
    """Median seconds of each step, taken in turns after one warm-up each."""
    times = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--work", type=float, default=12.0, help="seconds of repetitions per row")
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    fresh = multiprocessing.get_context("spawn")
    print(
        f"{HEADS} query heads, {KV_HEADS} key heads, {SIZE} channels, causal, {args.dtype}, "
        f"batch {args.batch}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    )
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


if __name__ == "__main__":
    main()
