"""The training step of a config before anything is loaded: shapes only, for any devices.

What is lowered here is what the loop runs, so a compiler's word about it holds for the run.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from lcjax import checkpoints
from lcjax import config as config_lib
from lcjax.attention.landmark.tokens import Landmarks
from lcjax.checkpoints.build import ModelSection, resolve
from lcjax.checkpoints.load import SMOLLM2
from lcjax.cost import parameter_shapes
from lcjax.errors import InputError
from lcjax.models import PRESETS, ModelConfig, preset
from lcjax.models.initial import abstract_params
from lcjax.models.presets import HUB
from lcjax.parallel.sharding import batch_sharding, replicated
from lcjax.training import batches, optim
from lcjax.training.assemble import jitted_step
from lcjax.training.config import TrainConfig
from lcjax.training.partition import trainable
from lcjax.training.state import abstract_state
from lcjax.tree import flatten, nest, split


def model_of(config: TrainConfig) -> ModelConfig:
    """The model that `config` trains, with its adapters, as on an accelerator."""
    section = config.model
    if section.dtype is None:
        section = dataclasses.replace(section, dtype="bfloat16")
    memory = section.memory
    if memory is not None and memory.encoder is not None:
        memory = dataclasses.replace(memory, encoder=_like(memory.encoder))
        section = dataclasses.replace(section, memory=memory)
    model = resolve(section, _architecture(section))
    landmarks = Landmarks.read_by(model.pattern)
    if landmarks is not None and landmarks.token == model.vocab_size + 1:
        model = model.replace(vocab_size=model.vocab_size + 2)  # [PAD] and <landmark> are added
    return model.replace(lora=config.train.lora or model.lora)


def _architecture(section: ModelSection) -> ModelConfig:
    """Of the checkpoint where it is on this machine, else of the preset that is its like."""
    if section.preset is not None:
        return preset(section.preset)
    if section.path is None:
        raise InputError("model.path=null: give a checkpoint, or model.preset")
    if _is_here(section.path):
        return checkpoints.load_config(section.path)
    if (recipe := _made_by(section.path)) is not None:
        return model_of(recipe)
    if section.path not in HUB:
        raise InputError(
            f"model.path={section.path} is not on this machine, and nothing is downloaded here;"
            " name its architecture: --model.path=null --model.preset=llama2-7b"
        )
    return preset(HUB[section.path])


def _is_here(path: str) -> bool:
    return path == SMOLLM2 or Path(path).expanduser().exists()


def _like(encoder: str) -> str:
    """The `encoder` of `model.memory` where it is here; else the preset that is its like."""
    if encoder in PRESETS or _is_here(encoder):
        return encoder
    if (recipe := _made_by(encoder)) is not None and recipe.model.preset is not None:
        return recipe.model.preset
    return HUB.get(encoder, encoder)


def _made_by(path: str) -> TrainConfig | None:
    """The recipe `configs/NAME.yaml` for `runs/NAME/model`: recipes go on from one another."""
    match Path(path).parts:
        case ("runs", name, "model") if (file := Path("configs", f"{name}.yaml")).is_file():
            return config_lib.parse(TrainConfig, ["--config", str(file)])
    return None


def check_rules(config: TrainConfig) -> None:
    """Refuses rules of `train` that hold for no parameter, by shapes: no weight is read for it.

    Where shapes cannot be told ahead (adapters of other libraries, checkpoints of the hub under
    names of their own) nothing is said; `assemble` looks at the parameters themselves.
    """
    try:
        shapes = parameter_shapes(model_of(config))
    except InputError:
        return
    trained = filter(trainable(shapes, config.train.rules()), shapes)
    trainable(trained, [rate.rule for rate in config.train.rates], "train.rates")


def lower(config: TrainConfig, model: ModelConfig, mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """The step for the devices of `mesh`, which need not be here."""
    batches.check_batch(config, mesh)
    batches.check_context(config, model)
    train = config.train
    params = abstract_params(model, mesh, host=train.offload == "parameters")
    trained, frozen = split(params, trainable(flatten(params), train.rules()))
    settings = {"seed": train.seed, "ema": train.ema is not None, "offload": train.offload}
    state = abstract_state(_wide(trained), optim.optimizer(train), mesh, **settings)
    bad = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
    step = jitted_step(config, model, mesh, state)
    return step.trace(state, frozen, _batch(config, model, mesh), bad).lower()


def _wide(tree: dict) -> dict:
    def one(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)

    return nest({path: one(leaf) for path, leaf in flatten(tree).items()})


def _batch(config: TrainConfig, model: ModelConfig, mesh: jax.sharding.Mesh) -> dict:
    shape = config.train.batch_size, batches.row_length(config, model)
    kinds = dict.fromkeys(("tokens", "targets", "segments", "positions"), jnp.int32)
    kinds["weights"] = jnp.float32
    shapes = {name: (shape, dtype) for name, dtype in kinds.items()}
    if (chunks := config.data.chunks) is not None:
        context = shape[0], chunks.count, chunks.length
        shapes |= {"chunks": (context, jnp.int32), "chunk_mask": (context, jnp.bool_)}
        if chunks.learned:
            learned = {"chunk_targets": jnp.int32, "chunk_weights": jnp.float32}
            shapes |= {name: (context, dtype) for name, dtype in learned.items()}
    if (distill := config.train.distill) is not None:
        places, half = (*shape, distill.top), jnp.float16
        shapes |= {"teacher_ids": (places, jnp.int32), "teacher_probabilities": (places, half)}
        shapes["teacher_rest"] = shape, half
    where = batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct(*kind, sharding=where) for name, kind in shapes.items()}
