"""Compares CEPE with full attention of the same decoder over all tokens, in one run.

    python benchmarks/cepe.py                                    # SmolLM2-135M on a CPU
    python benchmarks/cepe.py reading --lengths 8192 131072 --decoder llama2-7b \
        --encoder cepe-encoder --dtype bfloat16                  # a GPU or TPU
    python benchmarks/cepe.py context

reading: a text of each length is read and continued. CEPE's decoder reads its last 4,096 tokens
    (2,048 at a length of 4,096), and its encoder the rest in chunks of 256 (arXiv 2402.16617,
    sec. 3); full attention reads all tokens. Each measurement runs in its own process, whose peak
    memory includes the weights; times are the shortest of up to three runs. Weights are random,
    which does not change times.
context: cross-attention over a context of 131,072 slots of which only some hold text, forward and
    with its backward pass. The text fills a share of the chunks, or a share of every chunk.
"""

import argparse
import json
import time

import reading as bench

CHUNK = 256
PLACES = 131_072
PAPER = "the paper (Llama-2-7B, 131,072 tokens, A100): 9.9x the throughput, 1/6 of the memory"


def read_and_write(args, side: str, length: int) -> dict:
    """Measures one side and length; runs in a process of its own."""
    config = bench.decoder(args)
    if side == "full":
        return bench.read_and_write(config, length, chunk=None)
    config = bench.with_cepe(config, args.encoder)
    chunk = min(CHUNK, config.memory.max_chunk_size)
    return bench.read_and_write(config, length, chunk=chunk, projected=args.projected)


def reading(args) -> None:
    print(bench.HEAD)
    for length in args.lengths:
        cepe, full = (bench.spawn(__file__, side, str(length)) for side in ("cepe", "full"))
        rows = bench.beside_full(length, {"CEPE": cepe, bench.FULL: full})
        print("\n".join(rows), flush=True)
    print(PAPER)


def context(args) -> None:
    """Prints times by the share of the context that holds text."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from lcjax.models import preset
    from lcjax.models.memory import EncodedContext
    from pallas_kernels import flash

    config, queries = preset(args.decoder), 512
    heads, sizes = config.num_kv_heads, (config.num_heads, config.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (1, queries, *sizes), args.dtype)
    k, v = (jax.random.normal(key, (1, PLACES, heads, sizes[1]), args.dtype) for key in keys[1:])
    everywhere = jnp.ones((1, queries), jnp.int32)

    def attention(q, k, v, mask):
        def flat(x):
            return x.reshape(1, PLACES, -1)

        if args.pack:
            both = EncodedContext(mask, jnp.concatenate([flat(k), flat(v)], -1)).packed()
            k, v = (x.reshape(k.shape) for x in jnp.split(both.states, 2, axis=-1))
            mask = both.mask
        filled = mask.astype(jnp.int32)
        return flash(q, k, v, q_segments=everywhere, k_segments=filled)[0]

    def loss(*arrays):
        return attention(*arrays).astype(jnp.float32).sum()

    steps = {"forward": jax.jit(attention), "with backward": jax.jit(jax.grad(loss, (0, 1, 2)))}
    print(f"{queries} queries, {PLACES:,} places in chunks of {CHUNK}")
    print("| text | " + " | ".join(f"{name}, s | of all" for name in steps) + " |")
    print("|---|" + "--:|--:|" * len(steps))
    whole = {}
    for share, every in ((1, False), (0.5, False), (0.5, True), (0.1, False), (0.1, True)):
        mask = np.zeros((PLACES // CHUNK, CHUNK), bool)
        mask[
            (slice(None), slice(int(share * CHUNK))) if every else slice(int(share * len(mask)))
        ] = 1
        cells = []
        for name, step in steps.items():
            arrays = q, k, v, jnp.asarray(mask.reshape(1, -1))
            jax.block_until_ready(step(*arrays))
            seconds = []
            for _ in range(args.repeats):
                start = time.perf_counter()
                jax.block_until_ready(step(*arrays))
                seconds.append(time.perf_counter() - start)
            took = sorted(seconds)[args.repeats // 2]
            whole.setdefault(name, took)
            cells.append(f"{took:.2f} | {100 * took / whole[name]:.0f} %")
        what = "of every chunk" if every else "of the chunks"
        print(f"| {100 * share:g} % {what} | {' | '.join(cells)} |", flush=True)


PARTS = {"reading": reading, "context": context}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    bench.options(parser, [4096, 8192, 32768])
    parser.add_argument("--projected", action="store_true", help="keep keys and values of contexts")
    parser.add_argument("--no-pack", dest="pack", action="store_false", help="context: as it lies")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(read_and_write(args, args.worker[0], int(args.worker[1]))))
        return
    bench.run(args, parser, PARTS)


if __name__ == "__main__":
    main()
