"""Folders of adapters as `peft` and LongLoRA's scripts publish them, over tiny models."""

import json
from pathlib import Path

import numpy as np
from convert_support import saved
from safetensors.numpy import load_file, save_file

PREFIX = "base_model.model."
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
NEW_ROWS = 265  # one more than the tiny model has


def base_tensors(folder: Path, family: str = "llama", **changes) -> dict[str, np.ndarray]:
    """Writes a tiny model and gives its tensors by their Hugging Face names."""
    saved(folder, family, **changes)
    return load_file(folder / "model.safetensors")


def low_rank(
    base: dict[str, np.ndarray], targets=TARGETS, rank: int = 2, seed: int = 1
) -> dict[str, np.ndarray]:
    """lora_A [r, in] and lora_B [out, r] of every matrix whose module ends in a target."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, tensor in sorted(base.items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            rows, columns = tensor.shape
            shapes = {"lora_A": (rank, columns), "lora_B": (rows, rank)}
            for half, shape in shapes.items():
                key = f"{PREFIX}{module}.{half}.weight"
                tensors[key] = rng.normal(size=shape).astype(np.float32)
    return tensors


def merged(
    base: dict[str, np.ndarray], tensors: dict[str, np.ndarray], scale: float
) -> dict[str, np.ndarray]:
    """W + scale * B A in float64, written out of the definition."""
    result = dict(base)
    for key, a in tensors.items():
        if ".lora_A." in key:
            name = key.removeprefix(PREFIX).replace(".lora_A", "")
            b = tensors[key.replace("lora_A", "lora_B")]
            update = b.astype(np.float64) @ a.astype(np.float64)
            result[name] = base[name].astype(np.float64) + scale * update
    return result


def write_peft(
    folder: Path, tensors: dict[str, np.ndarray], base: str | Path | None = None, **settings
) -> Path:
    """adapter_config.json and adapter_model.safetensors."""
    folder.mkdir(parents=True)
    settings = {
        "base_model_name_or_path": None if base is None else str(base),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": 4,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 2,
        "target_modules": list(TARGETS),
        "task_type": "CAUSAL_LM",
    } | settings
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def trained_whole(base: dict[str, np.ndarray], rows: int = NEW_ROWS) -> dict[str, np.ndarray]:
    """LongLoRA's second file: embeddings (a row more, for [PAD]) and norms, without the prefix."""
    rng = np.random.default_rng(2)
    chosen = {name: t.shape for name, t in sorted(base.items()) if "norm" in name}
    chosen["model.embed_tokens.weight"] = (rows, base["model.embed_tokens.weight"].shape[1])
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in chosen.items()}
