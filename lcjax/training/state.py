"""What changes from step to step, where it lies on the mesh, and how it starts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lcjax.sharding import param_shardings
from lcjax.training.optim import wide


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """A pytree, saved and donated as a whole. Frozen weights are not in it."""

    step: jax.Array  # int32, batches seen, skipped ones included
    skipped: jax.Array  # int32, batches whose loss or gradient was not finite
    params: dict  # the trained parameters
    opt_state: Any  # float32 moments of the trained parameters
    ema: dict | None  # float32 running average of the trained parameters
    rng: jax.Array  # key of the run; step i draws from fold_in(rng, i)


def init_state(
    params: dict,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    seed: int,
    ema: bool,
) -> TrainState:
    """The state before the first step, every array made where it will stay."""

    def start(params):
        return TrainState(
            step=jnp.int32(0),
            skipped=jnp.int32(0),
            params=params,
            opt_state=optimizer.init(wide(params)),
            # A copy even for float32 parameters: two donated arrays must not be one buffer.
            ema=jax.tree.map(jnp.copy, wide(params)) if ema else None,
            rng=jax.random.key(seed),
        )

    shardings = state_shardings(jax.eval_shape(start, params), mesh)
    return jax.jit(start, out_shardings=shardings, donate_argnums=0)(params)


def state_shardings(state: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
    """Moments and averages lie where their parameter lies; everything else on every device."""
    return param_shardings(mesh, state)


def abstract(state: TrainState) -> TrainState:
    """Shapes, dtypes and shardings of a state: what a checkpoint is restored into."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
