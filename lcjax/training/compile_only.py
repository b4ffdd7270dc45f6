"""Lowers and compiles the training step of a config for devices that need not be present.

It lowers the training step of a run from shapes only, so the compiler's result holds for the run.
Nothing is loaded.
"""

import jax
import jax.numpy as jnp

from lcjax.cost.chips import Topology
from lcjax.cost.compilers import devices
from lcjax.cost.program import ProgramCost, program_cost
from lcjax.models import ModelConfig
from lcjax.models.decoder import abstract_params
from lcjax.parallel.sharding import batch_sharding, make_mesh, replicated
from lcjax.training import batches, estimate, optim
from lcjax.training.objective import language_model
from lcjax.training.state import abstract_state
from lcjax.training.step import jitted_step
from lcjax.training.train_config import TrainConfig, trainable
from lcjax.tree import flatten, split


def compile_step(
    config: TrainConfig, topology: Topology
) -> tuple[ProgramCost, ModelConfig, jax.sharding.Mesh]:
    """Compiles the training step; returns its cost, the model's config and the mesh."""
    estimate.check_language_model(config)
    mesh = make_mesh(config.mesh, devices(topology))
    model = estimate.model_of(config)
    return program_cost(lower(config, model, mesh), topology.chip, mesh), model, mesh


def step_flops(config: TrainConfig, model: ModelConfig) -> float:
    """Returns the FLOPs of one update on all devices, without recomputation."""
    per_token = estimate.flops(config, model).training_flops
    return per_token * batches.row_length(config, model) * config.train.batch_size


def lower(config: TrainConfig, model: ModelConfig, mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """Lowers the training step for the devices of `mesh`, which need not be present."""
    inputs = abstract_inputs(config, model, mesh)
    objective = language_model(
        *(model, config.train.positions),
        chunk=config.train.loss_chunk,
        mesh=mesh,
        distill=config.train.distill,
    )
    step = jitted_step(config, objective, mesh, inputs[0])
    # The abstract mesh names the device kind, by which kernels choose their implementation.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return step.trace(*inputs).lower()


def abstract_inputs(config: TrainConfig, model: ModelConfig, mesh: jax.sharding.Mesh) -> tuple:
    """Returns shapes, dtypes and shardings of the arguments of the training step.

    They are the state, the frozen weights, a batch, and the number of updates that were skipped.
    """
    batches.check_rows(config, mesh.shape)
    batches.check_context(config, model)
    train = config.train
    params = abstract_params(model, mesh, host=train.offload == "parameters")
    trained, frozen = split(params, trainable(flatten(params), train.rules()))
    trained = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), trained
    )
    settings = {"seed": train.seed, "ema": train.ema is not None, "offload": train.offload}
    state = abstract_state(trained, optim.optimizer(train), mesh, **settings)
    num_nonfinite = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
    return state, frozen, abstract_batch(config, model, mesh), num_nonfinite


def abstract_batch(
    config: TrainConfig, model: ModelConfig, mesh: jax.sharding.Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes, dtypes and shardings of a batch."""
    shape = config.train.batch_size, batches.row_length(config, model)
    dtypes = dict.fromkeys(("tokens", "targets", "segments", "positions"), jnp.int32)
    dtypes["weights"] = jnp.float32
    arrays = {name: (shape, dtype) for name, dtype in dtypes.items()}
    if (chunks := config.data.chunks) is not None:
        shape_of_chunks = shape[0], chunks.count, chunks.length
        arrays["chunks"] = shape_of_chunks, jnp.int32
        arrays["chunk_mask"] = shape_of_chunks, jnp.bool_
        if chunks.learned:
            arrays["chunk_targets"] = shape_of_chunks, jnp.int32
            arrays["chunk_weights"] = shape_of_chunks, jnp.float32
    if (distill := config.train.distill) is not None:
        arrays["teacher_ids"] = (*shape, distill.top), jnp.int32
        arrays["teacher_probabilities"] = (*shape, distill.top), jnp.float16
        arrays["teacher_rest"] = shape, jnp.float16
    spread = batch_sharding(mesh)
    return {name: jax.ShapeDtypeStruct(*kind, sharding=spread) for name, kind in arrays.items()}
