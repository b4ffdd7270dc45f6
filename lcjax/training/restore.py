"""A run folder as a model for inference: trained parameters over their base, adapters merged."""

import json
from pathlib import Path
from typing import Any

import jax

from lcjax import checkpoint, lora
from lcjax import config as config_lib
from lcjax.errors import InputError
from lcjax.models import ModelConfig
from lcjax.sharding import Mesh, make_mesh
from lcjax.training.assemble import abstract_params, fingerprint, frozen_base
from lcjax.training.config import TrainConfig
from lcjax.training.folder import BASE, CONFIG, MODEL_CONFIG
from lcjax.training.optim import wide
from lcjax.training.partition import union


def load_run(
    folder: str | Path, step: int | None = None, *, mesh: jax.sharding.Mesh | None = None
) -> tuple[dict, ModelConfig, Any]:
    """(parameters, config, tokenizer) of the run's newest readable checkpoint, or of `step`.

    The running average of the weights is taken where the run kept one. Adapters are merged, so the
    config has none. What was frozen is read again from the base model and must be unchanged.
    """
    folder = Path(folder)
    if not (folder / CONFIG).exists():
        raise InputError(f"{folder} is no run folder: it has no {CONFIG}")
    config = config_lib.parse(TrainConfig, ["--config", str(folder / CONFIG)])
    model_config = config_lib.parse(ModelConfig, ["--config", str(folder / MODEL_CONFIG)])
    mesh = mesh if mesh is not None else make_mesh(Mesh(fsdp=1), jax.local_devices()[:1])
    trained, rest = abstract_params(model_config, config.train, mesh)
    if config.train.ema is None:
        params = checkpoint.load_state(folder, {"params": trained}, step=step)["params"]
    else:
        average = checkpoint.load_state(folder, {"ema": abstract_wide(trained)}, step=step)["ema"]
        params = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), average, trained)
    if rest:
        base = frozen_base(config, mesh)
        check_base(folder, base, config)
        params = union(params, base)
    return *merged(params, model_config), load_tokenizer(folder)


def abstract_wide(tree: dict) -> dict:
    """Float32 shapes, laid out as before."""
    return jax.tree.map(
        lambda leaf, like: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding),
        jax.eval_shape(wide, tree),
        tree,
    )


def merged(params: dict, config: ModelConfig) -> tuple[dict, ModelConfig]:
    """Parameters without adapters, and the config that fits them."""
    if config.lora is None:
        return params, config
    return lora.merge(params, config.lora), config.replace(lora=None)


def write_base(folder: Path, frozen: dict, config: TrainConfig) -> None:
    """Notes which frozen weights the checkpoints of this run belong to."""
    note = {"model": config.model.path, "frozen": fingerprint(frozen) if frozen else None}
    if jax.process_index() == 0:  # the digest above needs all processes
        (folder / BASE).write_text(json.dumps(note) + "\n", encoding="utf-8")


def check_base(folder: Path, frozen: dict, config: TrainConfig) -> None:
    """Refuses to put trained weights on another base than the one they were trained on."""
    if not frozen or not (folder / BASE).exists():
        return
    note = json.loads((folder / BASE).read_text(encoding="utf-8"))
    if note["frozen"] != fingerprint(frozen):
        raise InputError(
            f"model.path={config.model.path} has other weights than when the run in {folder} began;"
            " put the old ones back, or start another run.folder"
        )


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer that the run was trained with."""
    from lcjax.convert import load_tokenizer as load

    return load(folder / "tokenizer")
