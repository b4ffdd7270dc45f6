"""CEPE beside the same decoder with full attention over all tokens, in one run.

    python benchmarks/cepe.py                                    # SmolLM2-135M on a CPU
    python benchmarks/cepe.py reading --lengths 8192 131072 --decoder llama2-7b \
        --encoder cepe-encoder --dtype bfloat16                  # a GPU or TPU
    python benchmarks/cepe.py context

reading: a text of so many tokens is read and continued. CEPE's decoder reads the last 4,096 of
    them (2,048 at a length of 4,096), its encoder the rest in chunks of 256 (arXiv 2402.16617,
    sec. 3.2); the other side reads all of them. Each measurement is its own process, so that peak
    memory is its own, weights included; times are those of a second run. Weights are random: they
    change no time.
context: cross-attention over a context of 131,072 places of which only some hold text, forward and
    with its backward pass; texts that fill a share of the chunks, or of every chunk.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

CHUNK = 256
NEW_TOKENS = 16
PLACES = 131_072
PAPER = "the paper (Llama-2-7B, 131,072 tokens, A100): 9.9x the throughput, 1/6 of the memory"


def decoder_tokens(length: int) -> int:
    """Of the text, what the decoder reads itself."""
    return min(4096, length // 2)


class Letters:
    """Every token is a letter: times without a tokenizer's."""

    add_bos, bos_id, eos_ids = False, None, ()

    def encode(self, text: str) -> list[int]:
        return [0] * len(text)

    def decode(self, ids, **options) -> str:
        return "x" * len(ids)


def reader(args, side: str):
    """A `LanguageModel` of random weights."""
    import jax

    from lcjax.lm import LanguageModel
    from lcjax.memory import Cepe
    from lcjax.models import Decoder, preset
    from lcjax.models.initial import random_params

    config = preset(args.decoder).replace(
        dtype=args.dtype, param_dtype=args.dtype, scan_layers=False
    )
    if args.layers:
        config = config.replace(num_layers=args.layers)
    config = config.replace(max_length=max(config.max_length, *args.lengths) + NEW_TOKENS)
    if side == "cepe":
        encoder = preset(args.encoder).replace(param_dtype=args.dtype)
        encoder = encoder.replace(vocab_size=max(encoder.vocab_size, config.vocab_size))
        config = config.replace(memory=Cepe(states=encoder, layers=config.num_layers))
    params = jax.block_until_ready(random_params(config, 0))
    return LanguageModel(Decoder(config), params, Letters())


def read_and_write(args, side: str, length: int) -> dict:
    """One process: seconds to encode, to read and for a new token; peak memory."""
    import jax
    import numpy as np

    from lcjax.evaluation.measure import highest_bytes, peak_bytes, reset_peak
    from lcjax.generate import Sampling

    lm = reader(args, side)
    text = np.random.default_rng(0).integers(3, lm.config.vocab_size, length).tolist()
    own = decoder_tokens(length) if side == "cepe" else length
    sampling = Sampling(max_new_tokens=NEW_TOKENS + 1, min_new_tokens=NEW_TOKENS + 1)
    floor = reset_peak()

    def run() -> dict:
        start, context = time.perf_counter(), None
        if side == "cepe":
            chunk = min(CHUNK, lm.config.memory.longest)
            context = lm.encode_contexts([text[:-own]], chunk=chunk, projected=args.projected)
            jax.block_until_ready(context.encoded)
        encoded = time.perf_counter()
        pieces = lm.stream([text[-own:]], sampling, context=context)
        next(pieces)
        read = time.perf_counter()
        count = sum(len(piece.ids) for piece in pieces)
        token = (time.perf_counter() - read) / count
        return {"encode": encoded - start, "prefill": read - encoded, "token": token}

    run()  # compiles
    return run() | {"peak_gb": (peak_bytes(floor) or highest_bytes()) / 1e9}


def reading(args) -> None:
    print(
        "| tokens | side | encode s | prefill s | tokens/s | CEPE / full | ms per new token "
        "| CEPE / full | peak GB | CEPE / full |"
    )
    print("|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for length in args.lengths:
        cepe, full = (spawn(args, side, length) for side in ("cepe", "full"))
        for side, found in (("CEPE", cepe), ("full attention", full)):
            speed, ratios = length / (found["encode"] + found["prefill"]), [""] * 3
            if found is cepe:
                both = [x["encode"] + x["prefill"] for x in (full, cepe)]
                ratios = [
                    f"{both[0] / both[1]:.2f}x faster",
                    f"{full['token'] / cepe['token']:.2f}x faster",
                    f"{cepe['peak_gb'] / full['peak_gb']:.2f}",
                ]
            print(
                f"| {length:,} | {side} | {found['encode']:.1f} | {found['prefill']:.1f} "
                f"| {speed:.0f} | {ratios[0]} | {1e3 * found['token']:.0f} | {ratios[1]} "
                f"| {found['peak_gb']:.2f} | {ratios[2]} |",
                flush=True,
            )
    print(PAPER)


def spawn(args, side: str, length: int) -> dict:
    root = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", side, str(length)]
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def context(args) -> None:
    """Time against the share of the context that is text."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from lcjax.models import preset
    from lcjax.models.memory import Encoded
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
            both = Encoded(mask, jnp.concatenate([flat(k), flat(v)], -1)).packed()
            k, v = (x.reshape(k.shape) for x in jnp.split(both.states, 2, axis=-1))
            mask = both.mask
        there = mask.astype(jnp.int32)
        return flash(q, k, v, q_segments=everywhere, k_segments=there)[0]

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
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 32768])
    parser.add_argument("--decoder", default="smollm2-135m", help="a preset")
    parser.add_argument("--encoder", default="smollm2-encoder", help="a preset")
    parser.add_argument("--layers", type=int, help="of the decoder; default: all")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--projected", action="store_true", help="keep keys and values of contexts")
    parser.add_argument("--no-pack", dest="pack", action="store_false", help="context: as it lies")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown {', '.join(sorted(unknown))}; choose of {', '.join(PARTS)}")
    if args.worker:
        print(json.dumps(read_and_write(args, args.worker[0], int(args.worker[1]))))
        return
    for part in args.parts or PARTS:
        print(f"\n{part}: {args.decoder}, {args.dtype}, load {os.getloadavg()[0]:.1f}", flush=True)
        PARTS[part](args)


if __name__ == "__main__":
    main()
