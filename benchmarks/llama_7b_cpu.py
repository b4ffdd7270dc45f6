"""Compares Llama-2-7B in bfloat16 on a CPU with 24 GB with transformers + torch, same files.

    python benchmarks/llama_7b_cpu.py --folder llama_7b   # about 15 minutes on 2 cores

Writes random weights of 13.5 GB in 7 safetensors files unless the folder has them. Each side runs
in its own process, which loads the model, scores 256 tokens and continues a prompt of 32 tokens by
8 greedy ones. Prints seconds, the peak memory of the process, and the difference between the losses
of the two sides. `--float32`, for fewer layers, also prints the difference of both from torch in
float32, which is rounding alone.
Needs `pip install torch==2.13.0`.
"""

import argparse
import functools
import json
import math
import os
import resource
import time
from pathlib import Path

import numpy as np
import processes

SCORED, PROMPT, NEW = 256, 32, 8
PARTS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the random model")
    parser.add_argument("--layers", type=int, default=32, help="fewer for a trial")
    parser.add_argument("--float32", action="store_true", help="also torch in float32")
    in_float32 = functools.partial(torch_side, dtype="float32")
    sides = {"lcjax": lcjax_side, "torch": torch_side, "float32": in_float32}
    parser.add_argument("--worker", choices=sides, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(sides[arguments.worker](arguments)))
        return
    if not (arguments.folder / "config.json").exists():
        processes.python(
            "-c",
            f"import llama_7b_cpu; llama_7b_cpu.write_model({str(arguments.folder)!r},"
            f" {arguments.layers})",
            PYTHONPATH=os.pathsep.join((str(Path(__file__).parent), str(processes.ROOT))),
        )
    words = __file__, "--folder", str(arguments.folder), "--worker"
    results = {
        side: processes.measured(*words, side, **processes.CPU)
        for side in list(sides)[: 3 if arguments.float32 else 2]
    }
    nll = {side: np.asarray(result.pop("nll")) for side, result in results.items()}
    ids = {side: result.pop("ids") for side, result in results.items()}
    same = ids["lcjax"] == ids["torch"]
    print("| | load, s | load, peak GB | score, s | continue, s | peak GB |")
    print("|---|---|---|---|---|---|")
    for side, result in results.items():
        print(f"| {side} | " + " | ".join(f"{value:.1f}" for value in result.values()) + " |")
    difference = np.abs(nll["lcjax"] - nll["torch"])
    print(f"\nlosses of {difference.size} tokens: mean {nll['lcjax'].mean():.4f} and")
    print(f"{nll['torch'].mean():.4f}, at most {difference.max():.4f} apart; same text: {same}")
    for side in ("lcjax", "torch") if arguments.float32 else ():
        off = np.abs(nll[side] - nll["float32"])
        print(f"from float32: {side} {off.mean():.4f} on average, at most {off.max():.4f}")


def write_model(folder: str, layers: int) -> None:
    """Writes a random Llama-2-7B in bfloat16: normal weights, norms of 1, a tokenizer of bytes."""
    import ml_dtypes

    from lcjax.checkpoints import ByteTokenizer, config_to_hf
    from lcjax.checkpoints.safetensors_io import INDEX, write_file
    from lcjax.checkpoints.weights import TensorInfo
    from lcjax.models import preset

    config = preset("llama2-7b").replace(num_layers=layers)
    wide, square = (config.mlp_width, config.width), (config.width, config.width)
    layer = {
        **{f"self_attn.{name}_proj": square for name in "qkvo"},
        **{f"mlp.{name}_proj": wide for name in ("gate", "up")},
        "mlp.down_proj": wide[::-1],
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (config.width,)),
    }
    vocabulary = (config.vocab_size, config.width)
    shapes = {"model.embed_tokens": vocabulary, "model.norm": vocabulary[1:], "lm_head": vocabulary}
    shapes |= {f"model.layers.{i}.{k}": v for i in range(layers) for k, v in layer.items()}
    infos = {f"{name}.weight": TensorInfo(shape, "bfloat16") for name, shape in shapes.items()}
    rng = np.random.default_rng(0)
    # A prime number of values, from which each tensor is cut at a random start.
    pool = (0.02 * rng.standard_normal(2**25 - 39, np.float32)).astype(ml_dtypes.bfloat16)

    def array(name: str) -> np.ndarray:
        shape = infos[name].shape
        if len(shape) == 1:
            return np.ones(shape, ml_dtypes.bfloat16)
        places = rng.integers(pool.size) + np.arange(math.prod(shape))
        return pool[places % pool.size].reshape(shape)

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    names, files = list(infos), {}
    for part in range(PARTS):
        members = names[part::PARTS]
        file = f"model-{part + 1:05}-of-{PARTS:05}.safetensors"
        write_file(path / file, {n: infos[n] for n in members}, ((n, array(n)) for n in members))
        files |= dict.fromkeys(members, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    ByteTokenizer().save(path)
    (path / "config.json").write_text(json.dumps(config_to_hf(config, dtype="bfloat16")))


def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(100, 31_000, SCORED)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _timed(function):
    begin = time.perf_counter()
    return function(), time.perf_counter() - begin


def lcjax_side(arguments: argparse.Namespace) -> dict:
    from lcjax import LanguageModel, Sampling

    types = dict(dtype="bfloat16", param_dtype="bfloat16")
    lm, load = _timed(lambda: LanguageModel.load(str(arguments.folder), **types))
    peak, text = _peak(), tokens()
    nll, score = _timed(lambda: np.asarray(lm.nll(text[None])))
    sampling = Sampling(max_new_tokens=NEW, min_new_tokens=NEW)
    texts, seconds = _timed(lambda: lm.generate([text[:PROMPT].tolist()], sampling))
    figures = {"load": load, "load_peak": peak, "score": score, "continue": seconds}
    return figures | {
        "peak": _peak(),
        "nll": nll[0, 1:].astype(float).tolist(),
        "ids": list(map(int, texts[0].ids)),
    }


def torch_side(arguments: argparse.Namespace, dtype: str = "bfloat16") -> dict:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    model, load = _timed(
        lambda: AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=getattr(torch, dtype))
    )
    peak, ids = _peak(), torch.tensor(tokens())[None]

    @torch.inference_mode()
    def losses():
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")

    @torch.inference_mode()
    def write():
        prompt = ids[:, :PROMPT]
        options = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

    nll, score = _timed(losses)
    text, seconds = _timed(write)
    figures = {"load": load, "load_peak": peak, "score": score, "continue": seconds}
    return figures | {
        "peak": _peak(),
        "nll": nll.tolist(),
        "ids": text[0, PROMPT:].tolist(),
    }


if __name__ == "__main__":
    main()
