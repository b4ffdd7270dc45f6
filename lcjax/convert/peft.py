"""Low-rank adapters as a folder that the `peft` package opens on top of the original checkpoint."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lcjax.convert import hf_names
from lcjax.convert.hf_save import check_destination
from lcjax.convert.tokenizer import write_json
from lcjax.errors import InputError
from lcjax.models.config import ModelConfig


def save_peft(
    folder: str | Path, params: dict, config: ModelConfig, *, base: str, overwrite: bool = False
) -> Path:
    """Writes `adapter_model.safetensors` and `adapter_config.json`, float32.

    Args:
      params: a tree with stacked layers that holds `lora_a` [L, in..., r] and `lora_b`
        [L, r, out...]; the base weights may be left out.
      base: what `peft` is to put the adapters on: a hub id or a folder.
    """
    if config.lora is None:
        raise InputError(f"{folder}: this model has no adapters; set train.lora, or use save_hf")
    folder = Path(folder)
    check_destination(folder, overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    tensors, modules = {}, set()
    for entry in hf_names.entries(config):
        *branches, projection, leaf = entry.path.split("/")
        if leaf != "kernel" or projection not in config.lora.targets:
            continue
        node = params
        for branch in (*branches, projection):
            node = node[branch]
        for name, a, b in zip(entry.names, node["lora_a"], node["lora_b"], strict=True):
            module, rank = name.removesuffix(".weight"), config.lora.rank
            modules.add(module.rsplit(".", 1)[1])
            for part, matrix in (
                ("lora_A", np.asarray(a, np.float32).reshape(-1, rank).T),
                ("lora_B", np.asarray(b, np.float32).reshape(rank, -1).T),
            ):
                key = f"base_model.model.{module}.{part}.weight"
                tensors[key] = np.ascontiguousarray(matrix)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": config.lora.rank,
            "lora_alpha": config.lora.alpha,
            "target_modules": sorted(modules),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        },
    )
    return folder
