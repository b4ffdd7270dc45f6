"""What changes from step to step, where it lies on the mesh, and how it starts."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lcjax.parallel.offload import Offload, fetched, host_shardings
from lcjax.parallel.sharding import param_shardings
from lcjax.training.layerwise_update import joined
from lcjax.training.optim import wide
from lcjax.tree import flatten, nest

# What of the state is offloaded.
_OFFLOADED = {
    "none": (),
    "optimizer": ("opt_state", "ema"),
    "parameters": ("params", "opt_state", "ema"),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """A pytree, saved and donated as a whole. Frozen weights are not in it."""

    step: jax.Array  # int32, batches seen, skipped ones included
    skipped: jax.Array  # int32, batches that changed nothing: not finite, or a spike
    usual: jax.Array  # float32, running average of the gradient's norm; 0 before the first
    params: dict  # the trained parameters, float32
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
    offload: Offload = "none",
) -> TrainState:
    """The state before the first step, every array made where it will stay; `params` is donated.

    What is offloaded is made one parameter after another, so that a device never has to hold all of
    it.
    """
    start = _starter(optimizer, seed, ema)

    def made(params):
        shardings = state_shardings(jax.eval_shape(start, params), mesh, offload)
        return jax.jit(start, out_shardings=shardings, donate_argnums=0)(params)

    if offload == "none":
        return made(params)
    return joined([made(nest({path: leaf})) for path, leaf in flatten(params).items()])


def abstract_state(
    params: dict,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    seed: int,
    ema: bool,
    offload: Offload = "none",
) -> TrainState:
    """Shapes, dtypes and shardings of `init_state`'s result, for a checkpoint to be restored into.

    Nothing is computed: a run that is resumed has only one state in memory.
    """
    shapes = jax.eval_shape(_starter(optimizer, seed, ema), params)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(shapes, mesh, offload),
    )


def _starter(
    optimizer: optax.GradientTransformation, seed: int, ema: bool
) -> Callable[[dict], TrainState]:
    def start(params):
        params = wide(fetched(params))
        return TrainState(
            step=jnp.int32(0),
            skipped=jnp.int32(0),
            usual=jnp.float32(0),
            params=params,
            opt_state=optimizer.init(params),
            # A copy: two donated arrays must not be one buffer.
            ema=jax.tree.map(jnp.copy, params) if ema else None,
            rng=jax.random.key(seed),
        )

    return start


def state_shardings(
    state: TrainState, mesh: jax.sharding.Mesh, offload: Offload = "none"
) -> TrainState:
    """Moments and averages lie where their parameter lies; everything else on every device.

    What `offload` names lies in the memory of that device's host, but for vectors.
    """
    layout = param_shardings(mesh, state)
    offloaded = {
        name: host_shardings(getattr(state, name), getattr(layout, name))
        for name in _OFFLOADED[offload]
    }
    return dataclasses.replace(layout, **offloaded)
