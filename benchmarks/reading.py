"""Times a model with random weights that reads and continues a text; used by other benchmarks.

Each measurement runs in its own process, whose peak memory includes the weights. The first run
compiles; times are the shortest of the next three runs, or of fewer if these take long. Weights are
random, which does not change times.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator

NEW_TOKENS = 16
RUNS, ENOUGH = 3, 40.0  # timed runs, and seconds after which no further run begins
# The usual setting of the paper's ablations (arXiv 2410.19318, app. C).
SHARED_LLM = {"layers": 4, "ratios": (16, 8, 4), "chunk": 1024}


class Letters:
    """A tokenizer with one token per letter, whose own time is negligible."""

    add_bos, bos_id, eos_ids = False, None, ()

    def encode(self, text: str) -> list[int]:
        return [0] * len(text)

    def decode(self, ids, **options) -> str:
        return "x" * len(ids)


def decoder_tokens(length: int) -> int:
    """Returns how many tokens of a text the decoder reads; the rest is its context."""
    return min(4096, length // 2)


def decoder(args: argparse.Namespace):
    """Returns the config of `args.decoder`, with `args.layers` layers, for all `args.lengths`."""
    from lcjax.models import preset

    config = preset(args.decoder).replace(
        dtype=args.dtype, param_dtype=args.dtype, scan_layers=False
    )
    if args.layers:
        config = config.replace(num_layers=args.layers)
    return config.replace(max_length=max(config.max_length, *args.lengths) + NEW_TOKENS)


def reader(config):
    """Returns a `LanguageModel` with random weights."""
    import jax

    from lcjax.generation.language_model import LanguageModel
    from lcjax.models import Decoder
    from lcjax.models.decoder import random_params
    from lcjax.models.layer_groups import arrange_layers

    # With stacked layers, the program that draws weights has one layer and compiles in seconds.
    params = jax.block_until_ready(random_params(config.replace(scan_layers=True), 0))
    config = config.replace(scan_layers=False)
    params = arrange_layers(params, config)
    return LanguageModel(Decoder(config), params, Letters())


def with_cepe(config, encoder: str):
    """Returns `config` with CEPE's memory in all layers; `encoder` is a preset."""
    from lcjax.memory import Cepe
    from lcjax.models import preset

    states = preset(encoder).replace(param_dtype=config.param_dtype)
    states = states.replace(vocab_size=max(states.vocab_size, config.vocab_size))
    return config.replace(memory=Cepe(states=states, layers=config.num_layers))


def with_shared_llm(config, **fields):
    """Returns `config` with SharedLLM's memory; `fields` replace those of the usual setting."""
    from lcjax.memory import Right, SharedLlmSection

    usual = SHARED_LLM | {"layers": min(SHARED_LLM["layers"], config.num_layers), "policy": Right()}
    memory = SharedLlmSection(**usual | fields).memory(config)
    return config.replace(memory=memory).for_inference()


def read_and_write(config, length: int, *, chunk: int | None, projected: bool = False) -> dict:
    """Returns the shortest times of some runs of `timed_runs`, and the peak memory in GB."""
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
    """Yields the times of one run after another, without end; the first run compiles.

    With a memory, the decoder reads the last `decoder_tokens` of the text; the rest is its context.

    Args:
      lm: a `LanguageModel`.
      length: tokens of the text.
      chunk: tokens of a chunk of the context.
      projected: whether the context is stored as keys and values instead of states.
      new_tokens: tokens after the first one, which belongs to reading.

    Yields:
      Seconds to encode, to read ("prefill") and per new token, and slots of the context ("kept").
    """
    import jax
    import numpy as np

    from lcjax.generation.sampling import Sampling

    config = lm.config
    text = np.random.default_rng(0).integers(3, config.vocab_size, length).tolist()
    tail = length if config.memory is None else decoder_tokens(length)
    sampling = Sampling(max_new_tokens=new_tokens + 1, min_new_tokens=new_tokens + 1)
    while True:
        start, context, slots = time.perf_counter(), None, 0
        if config.memory is not None:
            options = {"chunk": chunk, "projected": projected}
            if config.memory.query_dependent:
                options["query"] = [text[-tail:]]
            context = lm.encode_contexts([text[:-tail]], **options)
            jax.block_until_ready(context.encoded)
            slots = int(context.encoded.mask.sum())
        encoded = time.perf_counter()
        pieces = lm.stream([text[-tail:]], sampling, context=context)
        next(pieces)
        read = time.perf_counter()
        count = sum(len(piece.ids) for piece in pieces)
        token = (time.perf_counter() - read) / count
        yield {"encode": encoded - start, "prefill": read - encoded, "token": token, "kept": slots}
        del context, pieces  # so that memory never holds two of them


def spawn(script: str, *worker: str) -> dict:
    """Runs `script` again with `--worker` and these arguments; returns its result."""
    import processes  # in the folder of the script

    return processes.measured(script, *sys.argv[1:], "--worker", *worker)


FULL = "full attention"


def reads(found: dict) -> float:
    """Returns the seconds to encode and read a text."""
    return found["encode"] + found["prefill"]


def beside_full(length: int, sides: dict[str, dict]) -> list[str]:
    """Returns table rows with the times of each side and, if measured, ratios to full attention."""
    full, rows = sides.get(FULL), []
    for name, result in sides.items():
        ratios = [""] * 3
        if full not in (None, result):
            ratios = [
                f"{reads(full) / reads(result):.2f}x faster",
                f"{full['token'] / result['token']:.2f}x faster",
                f"{result['peak_gb'] / full['peak_gb']:.2f}",
            ]
        rows.append(
            f"| {length:,} | {name} | {result['encode']:.1f} | {result['prefill']:.1f} "
            f"| {length / reads(result):.0f} | {ratios[0]} | {1e3 * result['token']:.0f} "
            f"| {ratios[1]} | {result['peak_gb']:.2f} | {ratios[2]} |"
        )
    return rows


HEAD = (
    "| tokens | side | encode s | prefill s | tokens/s | beside full | ms per new token "
    "| beside full | peak GB | of full |\n|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def options(parser: argparse.ArgumentParser, lengths: list[int]) -> None:
    """Adds the options that all benchmarks of reading share."""
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--decoder", default="smollm2-135m", help="a preset")
    parser.add_argument("--encoder", default="smollm2-encoder", help="a preset, of CEPE")
    parser.add_argument("--layers", type=int, help="of the decoder; default: all")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser, parts: dict[str, Callable]):
    """Runs the parts that `args` names, or all if it names none."""
    unknown = set(args.parts) - set(parts)
    if unknown:
        parser.error(f"unknown {', '.join(sorted(unknown))}; choose of {', '.join(parts)}")
    for part in args.parts or parts:
        print(f"\n{part}: {args.decoder}, {args.dtype}, load {os.getloadavg()[0]:.1f}", flush=True)
        parts[part](args)
