"""From a config to what a step needs: the model, trained and frozen parameters, the tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lcjax.checkpoints.build import build
from lcjax.checkpoints.landmark import with_landmark
from lcjax.checkpoints.run_folder import Base, fingerprint
from lcjax.errors import InputError
from lcjax.models import Decoder, ModelConfig
from lcjax.models import lora as lora_lib
from lcjax.parallel.offload import to_host
from lcjax.parallel.sharding import param_shardings, replicated
from lcjax.training.batches import check_context
from lcjax.training.config import TrainConfig
from lcjax.training.objective import language_model
from lcjax.training.optim import optimizer, schedule, wide
from lcjax.training.partition import trainable
from lcjax.training.state import TrainState, state_shardings
from lcjax.training.step import make_train_step
from lcjax.tree import flatten, nest, split, union


@dataclass(frozen=True)
class Assembly:
    """A model that is ready to be trained, on its mesh."""

    config: ModelConfig  # with the adapters' settings; param_dtype is what results are stored in
    trained: dict  # float32: a bfloat16 weight would round most of its updates to nothing
    frozen: dict  # as they were read
    tokenizer: Any


def assemble(config: TrainConfig, mesh: jax.sharding.Mesh) -> Assembly:
    """Reads or makes the model of `config.model`, adds adapters, and splits off what is trained."""
    away = config.train.offload == "parameters"
    model, params, tokenizer = build(config.model, mesh, host=away)
    check_context(config, model.config)
    params, model_config, tokenizer = with_landmark(params, model.config, tokenizer, mesh)
    grown = model_config.vocab_size > model.config.vocab_size
    if config.train.lora is not None:
        model_config = model_config.replace(lora=config.train.lora)
        params = union(params, new_adapters(model_config, mesh, seed=config.train.seed))
    trained, frozen = split(params, trainable(flatten(params), config.train.rules()))
    del params
    trainable(flatten(trained), [rate.rule for rate in config.train.rates], "train.rates")
    _check_adapters(frozen, config)
    if grown:
        _check_new_rows(frozen, config)
    if away:
        trained = _each(trained, lambda path, leaf: to_host(path, leaf, jnp.float32))
        frozen = _each(frozen, to_host)
    else:
        trained = _each(trained, lambda _, leaf: wide(leaf))
    return Assembly(model_config, trained, frozen, tokenizer)


def _check_adapters(frozen: dict, config: TrainConfig) -> None:
    idle = [path for path in flatten(frozen) if lora_lib.is_adapter(path)]
    if idle:
        raise InputError(
            f"train.trainable={list(config.train.trainable)} leaves adapters of train.lora"
            f" untrained ({idle[0]}); add the rule lora, or drop train.lora"
        )


def _check_new_rows(frozen: dict, config: TrainConfig) -> None:
    idle = [path for path in flatten(frozen) if path.startswith(("embed/", "head/"))]
    if idle:
        rules = dict.fromkeys("head" if path.startswith("head/") else "embeddings" for path in idle)
        raise InputError(
            f"train.trainable={list(config.train.rules())} leaves the rows of [PAD] and <landmark>"
            f" untrained ({idle[0]}); add the rule {' and '.join(rules)}, or train all"
        )


def _each(tree: dict, change: Callable[[str, jax.Array], jax.Array]) -> dict:
    """`change` of one leaf after the other, so that a model never lies in memory twice."""
    flat = flatten(tree)
    tree.clear()
    for path in list(flat):
        flat[path] = change(path, flat[path])
    return nest(flat)


def new_adapters(config: ModelConfig, mesh: jax.sharding.Mesh, *, seed: int) -> dict:
    """Adapters that change nothing yet, float32 whatever the weights beside them are."""

    def start(key):
        tokens = jnp.zeros((1, 8), jnp.int32)
        params = Decoder(config).init(key, tokens)["params"]
        return wide(split(params, lora_lib.is_adapter)[0])

    key = jax.random.fold_in(jax.random.key(seed), 1)
    shardings = param_shardings(mesh, jax.eval_shape(start, key))
    return jax.jit(start, out_shardings=shardings)(key)


def jitted_step(
    config: TrainConfig,
    model: ModelConfig,
    mesh: jax.sharding.Mesh,
    state: TrainState,
    *,
    halt_after: int = 1,
) -> Callable:
    """The step of `lcjax.training.step` for a state of these shapes, which it takes over."""
    train = config.train
    step = make_train_step(
        language_model(
            *(model, train.positions), chunk=train.loss_chunk, mesh=mesh, distill=train.distill
        ),
        optimizer(train),
        schedule(train),
        accumulation=train.accumulation,
        ema_decay=train.ema,
        halt_after=halt_after,
        spike=train.spike,
    )
    layout = state_shardings(state, mesh, train.offload), replicated(mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=layout)


def base_of(config: TrainConfig, assembly: Assembly) -> Base:
    """What the run's checkpoints will leave out; a digest that needs all processes."""
    return Base(
        path=config.model.path,
        param_dtype=config.model.param_dtype,
        seed=config.model.seed,
        trained=tuple(flatten(assembly.trained)),
        average=config.train.ema is not None,
        frozen=fingerprint(assembly.frozen),
        base=config.model.base,
        memory=config.model.memory and config.model.memory.note(),
    )
