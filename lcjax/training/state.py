"""What a training step reads and writes: the model's parameters and the state of the optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lcjax.checkpoints.build import build
from lcjax.checkpoints.landmark import with_landmark
from lcjax.checkpoints.run_folder import BaseModel, fingerprint
from lcjax.errors import InputError
from lcjax.models import Decoder, ModelConfig
from lcjax.models import lora as lora_lib
from lcjax.parallel.offload import Offload, host_shardings, to_device, to_host
from lcjax.parallel.sharding import param_shardings
from lcjax.training.batches import check_context
from lcjax.training.config import TrainConfig, trainable
from lcjax.training.optim import merge_trees, to_float32
from lcjax.tree import flatten, nest, split, union

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
      optimizer: its state is initialised here.
      mesh: the devices.
      seed: of the run's random key.
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


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A model that is ready for training, on its mesh."""

    config: ModelConfig  # includes the adapters; param_dtype is the dtype of exported weights
    trained: dict  # float32: bfloat16 would round most updates to nothing
    frozen: dict  # in the dtypes of the checkpoint
    tokenizer: Any


def assemble(config: TrainConfig, mesh: jax.sharding.Mesh) -> Assembly:
    """Loads or initialises the model of `config.model`, adds adapters, and splits its parameters.

    Raises:
      InputError: if a rule matches no parameter, or leaves new parameters untrained.
    """
    to_offload = config.train.offload == "parameters"
    model, params, tokenizer = build(config.model, mesh, host=to_offload)
    check_context(config, model.config)
    params, model_config, tokenizer = with_landmark(params, model.config, tokenizer, mesh)
    has_new_tokens = model_config.vocab_size > model.config.vocab_size
    if config.train.lora is not None:
        model_config = model_config.replace(lora=config.train.lora)
        params = union(params, new_adapters(model_config, mesh, seed=config.train.seed))
    trained, frozen = split(params, trainable(flatten(params), config.train.rules()))
    del params
    trainable(flatten(trained), [rate.rule for rate in config.train.rates], "train.rates")
    _check_adapters(frozen, config)
    if has_new_tokens:
        _check_new_tokens(frozen, config)
    if to_offload:
        trained = _map_leaves(trained, lambda path, leaf: to_host(path, leaf, jnp.float32))
        frozen = _map_leaves(frozen, to_host)
    else:
        trained = _map_leaves(trained, lambda _, leaf: to_float32(leaf))
    return Assembly(model_config, trained, frozen, tokenizer)


def _check_adapters(frozen: dict, config: TrainConfig) -> None:
    paths = [path for path in flatten(frozen) if lora_lib.is_adapter(path)]
    if paths:
        raise InputError(
            f"train.trainable={list(config.train.trainable)} leaves adapters of train.lora"
            f" untrained ({paths[0]}); add the rule lora, or drop train.lora"
        )


def _check_new_tokens(frozen: dict, config: TrainConfig) -> None:
    paths = [path for path in flatten(frozen) if path.startswith(("embed/", "head/"))]
    if paths:
        rules = ["head" if path.startswith("head/") else "embeddings" for path in paths]
        raise InputError(
            f"train.trainable={list(config.train.rules())} leaves the rows of [PAD] and <landmark>"
            f" untrained ({paths[0]}); add the rule {' and '.join(dict.fromkeys(rules))}, or train"
            " all"
        )


def _map_leaves(tree: dict, change: Callable[[str, jax.Array], jax.Array]) -> dict:
    """Replaces one leaf after another and empties `tree`, so no two copies are in memory."""
    flat = flatten(tree)
    tree.clear()
    for path in list(flat):
        flat[path] = change(path, flat[path])
    return nest(flat)


def new_adapters(config: ModelConfig, mesh: jax.sharding.Mesh, *, seed: int) -> dict:
    """Initialises LoRA adapters in float32; the model's outputs do not change."""

    def init(key):
        tokens = jnp.zeros((1, 8), jnp.int32)
        params = Decoder(config).init(key, tokens)["params"]
        return to_float32(split(params, lora_lib.is_adapter)[0])

    key = jax.random.fold_in(jax.random.key(seed), 1)
    shardings = param_shardings(mesh, jax.eval_shape(init, key))
    return jax.jit(init, out_shardings=shardings)(key)


def base_of(config: TrainConfig, assembly: Assembly) -> BaseModel:
    """Describes the frozen parameters, which the run's checkpoints leave out.

    Its fingerprint is a collective operation: all processes must call this function.
    """
    return BaseModel(
        path=config.model.path,
        param_dtype=config.model.param_dtype,
        seed=config.model.seed,
        trained=tuple(flatten(assembly.trained)),
        average=config.train.ema is not None,
        frozen=fingerprint(assembly.frozen),
        base=config.model.base,
        memory=config.model.memory and config.model.memory.to_dict(),
    )
