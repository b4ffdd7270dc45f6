"""The state of a training: the model's parameters and the state of the optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lcjax.models import lora as lora_lib
from lcjax.parallel.device_memory import Offload, host_shardings, to_device
from lcjax.parallel.sharding import param_shardings
from lcjax.training.optim import merge_trees, to_float32
from lcjax.tree import flatten, nest, split

# Fields of TrainState that are offloaded to the host's memory.
_OFFLOADED = {
    "none": (),
    "optimizer": ("opt_state", "ema"),
    "parameters": ("params", "opt_state", "ema"),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All values that change from step to step; saved and donated as one pytree.

    Frozen parameters are not part of it.
    """

    step: jax.Array  # int32, number of batches seen, including skipped ones
    skipped: jax.Array  # int32, number of batches without an update: not finite, or a spike
    grad_norm_ema: (
        jax.Array
    )  # float32, moving average of the gradient norm; 0 before the first step
    params: dict  # the trained parameters, float32
    opt_state: Any  # float32 moments of the trained parameters
    ema: dict | None  # float32 moving average of the trained parameters
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
    """Creates the state before the first step, with its final shardings.

    With `offload`, the state of one parameter is created after another, so no device ever holds
    all of it.

    Args:
      params: the trained parameters; donated.
      optimizer: the optimizer, whose state is initialised.
      mesh: the devices.
      seed: seed of the run's random key.
      ema: whether the state has a moving average of the parameters.
      offload: the part of the state that is stored in the host's memory.
    """
    init = _init_function(optimizer, seed, ema)

    def sharded_init(params):
        shardings = state_shardings(jax.eval_shape(init, params), mesh, offload)
        return jax.jit(init, out_shardings=shardings, donate_argnums=0)(params)

    if offload == "none":
        return sharded_init(params)
    return merge_trees([sharded_init(nest({path: leaf})) for path, leaf in flatten(params).items()])


def abstract_state(
    params: dict,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    seed: int,
    ema: bool,
    offload: Offload = "none",
) -> TrainState:
    """Returns shapes, dtypes and shardings of `init_state`'s result, as a target for restoring.

    It allocates nothing: a resumed run has only one state in memory.
    """
    shapes = jax.eval_shape(_init_function(optimizer, seed, ema), params)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(shapes, mesh, offload),
    )


def _init_function(
    optimizer: optax.GradientTransformation, seed: int, ema: bool
) -> Callable[[dict], TrainState]:
    def init(params):
        params = to_float32(to_device(params))
        return TrainState(
            step=jnp.int32(0),
            skipped=jnp.int32(0),
            grad_norm_ema=jnp.float32(0),
            params=params,
            opt_state=optimizer.init(params),
            # A copy: two donated arrays must not share a buffer.
            ema=jax.tree.map(jnp.copy, params) if ema else None,
            rng=jax.random.key(seed),
        )

    return init


def state_shardings(
    state: TrainState, mesh: jax.sharding.Mesh, offload: Offload = "none"
) -> TrainState:
    """Returns the sharding of every array of `state`.

    Moments and moving averages are sharded like their parameter; everything else is replicated.
    Arrays that `offload` names, except vectors, are in the host's memory.
    """
    shardings = param_shardings(mesh, state)
    offloaded = {
        name: host_shardings(getattr(state, name), getattr(shardings, name))
        for name in _OFFLOADED[offload]
    }
    return dataclasses.replace(shardings, **offloaded)


def new_adapters(init: Callable[..., dict], mesh: jax.sharding.Mesh, *, seed: int) -> dict:
    """Initialises a model's LoRA adapters in float32; the model's outputs do not change.

    Args:
      init: that of a module whose config has `lora`, such as `Decoder(config).init`.
      mesh: the devices.
      seed: of the random values.
    """
    return new_params(init, mesh, lora_lib.is_adapter, seed=seed)


def new_params(
    init: Callable[..., dict],
    mesh: jax.sharding.Mesh,
    select: Callable[[str], bool],
    *,
    seed: int,
) -> dict:
    """Initialises the parameters whose paths `select` selects, in float32.

    Args:
      init: as in `new_adapters`.
      mesh: the devices.
      select: tests a path.
      seed: of the random values.
    """

    def selected(key):
        params = init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        return to_float32(split(params, select)[0])

    key = jax.random.fold_in(jax.random.key(seed), 1)
    shardings = param_shardings(mesh, jax.eval_shape(selected, key))
    return jax.jit(selected, out_shardings=shardings)(key)
