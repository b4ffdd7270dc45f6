"""How long a model of random weights takes to read a text and to continue it: for other benchmarks.

Each measurement is a process of its own, so that peak memory is its own, weights included. A first
run compiles; times are the shortest of the next three, or of fewer where these take long. Weights
are random: they change no time.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator

NEW_TOKENS = 16
RUNS, ENOUGH = 3, 40.0  # runs that are timed, unless they have taken so many seconds before
# The usual setting of the paper's ablations (arXiv 2410.19318, app.).
SHARED_LLM = {"layers": 4, "ratios": (16, 8, 4), "chunk": 1024}


class Letters:
    """Every token is a letter: times without a tokenizer's."""

    add_bos, bos_id, eos_ids = False, None, ()

    def encode(self, text: str) -> list[int]:
        return [0] * len(text)

    def decode(self, ids, **options) -> str:
        return "x" * len(ids)


def decoder_tokens(length: int) -> int:
    """Of a text that is read with a context, what the decoder reads itself."""
    return min(4096, length // 2)


def decoder(args: argparse.Namespace):
    """The config of `args.decoder`, with `args.layers` layers and positions for all lengths."""
    from lcjax.models import preset

    config = preset(args.decoder).replace(
        dtype=args.dtype, param_dtype=args.dtype, scan_layers=False
    )
    if args.layers:
        config = config.replace(num_layers=args.layers)
    return config.replace(max_length=max(config.max_length, *args.lengths) + NEW_TOKENS)


def reader(config):
    """A `LanguageModel` of random weights."""
    import jax

    from lcjax.generation.language_model import LanguageModel
    from lcjax.models import Decoder
    from lcjax.models.decoder import random_params
    from lcjax.models.layer_groups import arrange_layers

    # Of stacked layers the program that draws the weights is that of one layer: seconds to compile.
    params = jax.block_until_ready(random_params(config.replace(scan_layers=True), 0))
    config = config.replace(scan_layers=False)
    params = arrange_layers(params, config)
    return LanguageModel(Decoder(config), params, Letters())


def with_cepe(config, encoder: str):
    """`config` with CEPE's memory in all layers, and the preset `encoder`."""
    from lcjax.memory import Cepe
    from lcjax.models import preset

    states = preset(encoder).replace(param_dtype=config.param_dtype)
    states = states.replace(vocab_size=max(states.vocab_size, config.vocab_size))
    return config.replace(memory=Cepe(states=states, layers=config.num_layers))


def with_shared_llm(config, **fields):
    """`config` with SharedLLM's memory in the usual setting, but for `fields` of its section."""
    from lcjax.memory import Right, SharedLlmSection

    usual = SHARED_LLM | {"layers": min(SHARED_LLM["layers"], config.num_layers), "policy": Right()}
    memory = SharedLlmSection(**usual | fields).memory(config)
    return config.replace(memory=memory).for_inference()


def read_and_write(config, length: int, *, chunk: int | None, projected: bool = False) -> dict:
    """Shortest of some runs of `timed_runs`, and peak memory."""
    from lcjax.evaluation.measure import highest_bytes, reset_peak

    lm = reader(config)
    reset_peak()
    runs = timed_runs(lm, length, chunk=chunk, projected=projected)
    next(runs)  # compiles
    start, timed = time.perf_counter(), [next(runs)]
    while len(timed) < RUNS and time.perf_counter() - start < ENOUGH:
        timed.append(next(runs))
    shortest = {key: min(run[key] for run in timed) for key in timed[0]}
    return shortest | {"peak_gb": highest_bytes() / 1e9}


def timed_runs(
    lm, length: int, *, chunk: int | None, projected: bool = False, new_tokens: int = NEW_TOKENS
) -> Iterator[dict]:
    """Yields what one run after another takes, without an end; the first one compiles.

    With a memory the decoder reads `decoder_tokens` of the text, and the rest is its context.

    Args:
      lm: a `LanguageModel`.
      length: tokens of the text.
      chunk: tokens of a chunk of the context.
      projected: whether keys and values of the context are kept, and not its states.
      new_tokens: after the first one, which belongs to reading.

    Yields:
      Seconds to encode, to read ("prefill") and for a new token, and tokens kept of a context.
    """
    import jax
    import numpy as np

    from lcjax.generation.sampling import Sampling

    config = lm.config
    text = np.random.default_rng(0).integers(3, config.vocab_size, length).tolist()
    own = length if config.memory is None else decoder_tokens(length)
    sampling = Sampling(max_new_tokens=new_tokens + 1, min_new_tokens=new_tokens + 1)
    while True:
        start, context, kept = time.perf_counter(), None, 0
        if config.memory is not None:
            options = {"chunk": chunk, "projected": projected}
            if config.memory.query_dependent:
                options["query"] = [text[-own:]]
            context = lm.encode_contexts([text[:-own]], **options)
            jax.block_until_ready(context.encoded)
            kept = int(context.encoded.mask.sum())
        encoded = time.perf_counter()
        pieces = lm.stream([text[-own:]], sampling, context=context)
        next(pieces)
        read = time.perf_counter()
        count = sum(len(piece.ids) for piece in pieces)
        token = (time.perf_counter() - read) / count
        yield {"encode": encoded - start, "prefill": read - encoded, "token": token, "kept": kept}
        del context, pieces  # so that two of them are never there at once


def spawn(script: str, *worker: str) -> dict:
    """What `script` prints last when it is called again with `--worker` and these words."""
    import processes  # beside the script

    return processes.measured(script, *sys.argv[1:], "--worker", *worker)


FULL = "full attention"


def reads(found: dict) -> float:
    """Seconds until a text has been read."""
    return found["encode"] + found["prefill"]


def beside_full(length: int, sides: dict[str, dict]) -> list[str]:
    """Rows of a table: what each side took, and its ratio to full attention, if that is there."""
    full, rows = sides.get(FULL), []
    for name, found in sides.items():
        ratios = [""] * 3
        if full not in (None, found):
            ratios = [
                f"{reads(full) / reads(found):.2f}x faster",
                f"{full['token'] / found['token']:.2f}x faster",
                f"{found['peak_gb'] / full['peak_gb']:.2f}",
            ]
        rows.append(
            f"| {length:,} | {name} | {found['encode']:.1f} | {found['prefill']:.1f} "
            f"| {length / reads(found):.0f} | {ratios[0]} | {1e3 * found['token']:.0f} "
            f"| {ratios[1]} | {found['peak_gb']:.2f} | {ratios[2]} |"
        )
    return rows


HEAD = (
    "| tokens | side | encode s | prefill s | tokens/s | beside full | ms per new token "
    "| beside full | peak GB | of full |\n|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def options(parser: argparse.ArgumentParser, lengths: list[int]) -> None:
    """What every benchmark of reading takes."""
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--decoder", default="smollm2-135m", help="a preset")
    parser.add_argument("--encoder", default="smollm2-encoder", help="a preset, of CEPE")
    parser.add_argument("--layers", type=int, help="of the decoder; default: all")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser, parts: dict[str, Callable]):
    """Each of the parts that were asked for, all if none was."""
    unknown = set(args.parts) - set(parts)
    if unknown:
        parser.error(f"unknown {', '.join(sorted(unknown))}; choose of {', '.join(parts)}")
    for part in args.parts or parts:
        print(f"\n{part}: {args.decoder}, {args.dtype}, load {os.getloadavg()[0]:.1f}", flush=True)
        parts[part](args)
