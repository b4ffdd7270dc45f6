"""Compares estimates of models with Gated DeltaNet in three of four layers with compilers.

    python benchmarks/mixed_stacks.py measure [--models ...] [--topologies ...] [--programs ...]
    python benchmarks/mixed_stacks.py table [--write]    # from mixed_stacks.json

`measure` compiles layers with the sizes of Qwen3.5-9B and of Qwen3-Next-80B-A3B (with fewer experts
and tokens in the vocabulary) for devices that need not be present (extras `aot` and `cuda`):
training steps with `model.remat` none, dots and full, reading the last 4,096 tokens of a prompt,
and a decoding step. It adds bytes on a device and FLOPs of products to mixed_stacks.json. `table`
puts the estimates beside them, and `--write` fills docs/benchmarks.md.
"""

import argparse
import itertools
import json
import math
import sys
from pathlib import Path

import pages
import processes

FILE = Path(__file__).with_name("mixed_stacks.json")
PAGE = processes.ROOT / "docs" / "benchmarks.md"
# `config.json` of Qwen/Qwen3.5-9B (its text part) and of Qwen/Qwen3-Next-80B-A3B-Instruct, except
# for the vocabulary (248,320 and 151,936) and the number of experts (512)
_SIZES = {"num_hidden_layers": 4, "head_dim": 256, "vocab_size": 32_768, "hidden_act": "silu"}
_SIZES |= {"max_position_embeddings": 262_144, "rms_norm_eps": 1e-6, "num_attention_heads": 16}
MODELS = {
    "Qwen3.5": _SIZES
    | {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    | {"hidden_size": 4_096, "intermediate_size": 12_288, "num_key_value_heads": 4},
    "Qwen3-Next": _SIZES
    | {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
    | {"hidden_size": 2_048, "intermediate_size": 5_120, "num_key_value_heads": 2}
    | {"num_experts": 32},
}
# Sizes of the mesh axes
TOPOLOGIES = {
    "cpu": {},
    "h100:1": {},
    "v5p:1x1x1": {},
    "v5p:2x2x1": {"tensor": 4},
    "v5e:2x2": {"fsdp": 4},
}
PROGRAMS = "train none", "train dots", "train full", "prefill", "decode"
LENGTHS = {"train": 16_384, "prefill": 32_768, "decode": 32_768}
TOKENS = {"prefill": 4_096, "decode": 1}  # read by one call
PLATFORMS = {"cpu": "cpu", "h100": "gpu", "v5e": "tpu", "v5p": "tpu"}


def _program(name: str, topology: str, program: str) -> tuple:
    """Returns the model, the run that trains it, the sizes of the mesh and the rows."""
    from lcjax import config as config_lib
    from lcjax.checkpoints.hf_config import decoder_from_hf
    from lcjax.parallel.sharding import Mesh
    from lcjax.training import TrainConfig

    kind, _, remat = program.partition(" ")
    shape = Mesh(**{"fsdp": 1, **TOPOLOGIES[topology]})
    dtype = "float32" if topology == "cpu" else "bfloat16"  # as lcjax takes by itself
    model = decoder_from_hf(MODELS[name], "config.json").replace(dtype=dtype)
    words = [f"--data.length={LENGTHS[kind]}", f"--train.batch_size={shape.fsdp}"]
    run = config_lib.parse(TrainConfig, ["--model.preset=tiny", *words])
    changed = {"remat": remat} if kind == "train" else {"param_dtype": dtype}
    return model.replace(**changed), run, shape, shape.fsdp


def measure(name: str, topology: str, program: str) -> dict:
    """Compiles a program; returns bytes on a device, and FLOPs of products of all devices."""
    import jax

    from lcjax.cost import compilers, hlo
    from lcjax.cost.chips import Topology, local_chip
    from lcjax.cost.program import program_cost
    from lcjax.generation import session
    from lcjax.parallel.sharding import make_mesh
    from lcjax.training import compile_only

    model, run, shape, rows = _program(name, topology, program)
    if topology == "cpu":
        chip, mesh = local_chip("bfloat16"), make_mesh(shape, jax.devices()[:1])
    else:
        target = Topology.parse(topology)
        chip, mesh = target.chip, make_mesh(shape, compilers.devices(target))
    if program.startswith("train"):
        lowered = compile_only.lower(run, model, mesh)
    else:
        lowered = session.lower_read(model, mesh, rows, LENGTHS[program], TOKENS[program])
    cost = program_cost(lowered, chip, mesh)
    products = 0.0 if cost.out_of_memory else hlo.product_flops(hlo.Module(cost.text))
    return {
        "peak": cost.peak_memory, "temporaries": cost.temporaries, "arguments": cost.arguments,
        "products": mesh.size * products, "seconds": round(cost.seconds),
    }  # fmt: skip


def estimate(name: str, topology: str, program: str) -> tuple[float, float, float]:
    """Returns bytes on a device, those beside weights, state and cache, and FLOPs of products.

    FLOPs are those of all devices with what `model.remat: full` computes again and the rows that
    fill blocks of experts on CPUs, and without what kernels compute, which compilers do not count:
    attention, and experts on accelerators.
    """
    from lcjax.cost import generation_memory, resources, roofline
    from lcjax.training import compile_only
    from lcjax.training import estimate as training
    from pallas_kernels.rows import max_rows

    model, run, shape, rows = _program(name, topology, program)
    length, platform = LENGTHS[program.split()[0]], PLATFORMS[topology.partition(":")[0]]
    per_key = 4 * model.num_heads * model.head_dim * model.num_layers
    by_kernels, tokens = 0, TOKENS.get(program, length)
    if (experts := model.experts) is not None:
        layers = sum(count for layer, count in model.layer_counts if layer.experts is not None)
        by_kernels = 6 * experts.top_k * model.width * model.expert_width * layers
        if platform == "cpu":  # no kernels, and more rows than pairs of a token and an expert
            pairs = rows * tokens * experts.top_k
            by_kernels *= 1 - max_rows(pairs, experts.count) / pairs
    if program.startswith("train"):
        memory = training.training_memory(run, model, shape, platform)
        by_kernels += per_key * resources.visible_keys(model, length)
        flops, passes = compile_only.step_flops(run, model), 3
        if program == "train full":
            head = 2 * model.width * model.vocab_size
            flops += rows * length * (training.flops(run, model).forward_flops - head)
            passes += 1
        flops -= passes * rows * length * by_kernels
        return memory.total, memory.gradients + memory.activations, flops
    memory = generation_memory(model, length, rows, shape, chunk=tokens, platform=platform)
    flops = roofline.inference_work(model, rows, length, tokens, shape).flops
    flops *= math.prod(shape.shape.values())
    by_kernels += per_key * resources.visible_keys(model, length, tokens)
    return memory.total, memory.activations, flops - rows * tokens * by_kernels


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def table() -> str:
    """Returns the rows of the page."""
    titles = "model", "devices", "program", "compiled", "estimated", "", "temporaries"
    titles += "estimated", "TFLOP, compiled", "estimated", ""
    lines = [titles, ("---",) * 3 + ("---:",) * (len(titles) - 3)]
    results = json.loads(FILE.read_text())
    order = list(itertools.product(MODELS, TOPOLOGIES, PROGRAMS))
    for key in sorted((tuple(key.split(" | ")) for key in results), key=order.index):
        result, (total, held, flops) = results[" | ".join(key)], estimate(*key)
        axes = " ".join(f"{axis} {size}" for axis, size in TOPOLOGIES[key[1]].items())
        name, place, program = key
        cells = name, f"{place} {axes}".strip(), program
        cells += f"{result['peak'] / 1e9:.2f}", f"{total / 1e9:.2f}", _share(total, result["peak"])
        cells += f"{result['temporaries'] / 1e9:.2f}", f"{held / 1e9:.2f}"
        if result["products"] and program != "decode":
            cells += f"{result['products'] / 1e12:.4g}", f"{flops / 1e12:.4g}"
            cells += (_share(flops, result["products"]),)
        else:  # products of one token are rounded up to tiles
            cells += "", "", ""
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _measure_all(args: argparse.Namespace) -> None:
    for name in args.models:
        for topology in args.topologies:
            for program in args.programs:
                key = " | ".join((name, topology, program))
                print(f"{key} ...", file=sys.stderr, flush=True)
                words = str(Path(__file__)), "one", name, topology, program
                result = processes.measured(*words, **processes.CPU)
                results = json.loads(FILE.read_text()) if FILE.exists() else {}
                results[key] = result
                FILE.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
                print(json.dumps(result), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["one"]:
        print(json.dumps(measure(*sys.argv[2:5])))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("measure")
    command.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    command.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    command.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    command = commands.add_parser("table")
    command.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.command == "measure":
        _measure_all(args)
    else:
        text = table()
        print(text)
        if args.write:
            page = pages.filled(PAGE.read_text(), "mixed_stacks", {"estimates": lambda: text})
            PAGE.write_text(page)


if __name__ == "__main__":
    main()
