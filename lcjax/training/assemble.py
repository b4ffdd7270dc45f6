"""From a config to what a step needs: the model, trained and frozen parameters, the tokenizer."""

import hashlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lcjax import lora as lora_lib
from lcjax.models import Decoder, ModelConfig
from lcjax.sharding import param_shardings
from lcjax.training.config import TrainConfig, TrainSection
from lcjax.training.optim import wide
from lcjax.training.partition import flatten, matcher, split, trainable, union


@dataclass(frozen=True)
class Assembly:
    """A model that is ready to be trained, on its mesh."""

    config: ModelConfig  # with the adapters' settings
    trained: dict
    frozen: dict
    tokenizer: Any


def assemble(config: TrainConfig, mesh: jax.sharding.Mesh) -> Assembly:
    """Reads or makes the model of `config.model`, adds adapters, and splits off what is trained."""
    from lcjax.lm import build

    model, params, tokenizer = build(config.model, mesh)
    model_config = model.config
    if config.train.lora is not None:
        model_config = model_config.replace(lora=config.train.lora)
        params = union(params, new_adapters(model_config, mesh, seed=config.train.seed))
    keep = trainable(flatten(params), config.train.rules())
    trained, frozen = split(params, keep)
    return Assembly(model_config, trained, frozen, tokenizer)


def frozen_base(config: TrainConfig, mesh: jax.sharding.Mesh) -> dict:
    """The frozen parameters alone, read again from the base model."""
    from lcjax.lm import build

    _, params, _ = build(config.model, mesh)
    return split(params, matcher(config.train.rules(), "train.trainable"))[1]


def new_adapters(config: ModelConfig, mesh: jax.sharding.Mesh, *, seed: int) -> dict:
    """Adapters that change nothing yet, float32 whatever the weights beside them are.

    They are small, and the updates of a bfloat16 adapter would mostly round to nothing.
    """

    def start(key):
        tokens = jnp.zeros((1, 8), jnp.int32)
        return wide(lora_lib.split(Decoder(config).init(key, tokens)["params"])[1])

    key = jax.random.fold_in(jax.random.key(seed), 1)
    shardings = param_shardings(mesh, jax.eval_shape(start, key))
    return jax.jit(start, out_shardings=shardings)(key)


def abstract_params(config: ModelConfig, train: TrainSection, shardings_on) -> tuple[dict, dict]:
    """Shapes and shardings of the (trained, frozen) parameters of a run, nothing computed."""

    def start(key):
        return Decoder(config).init(key, jnp.zeros((1, 8), jnp.int32))["params"]

    shapes = jax.eval_shape(start, jax.random.key(0))
    shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        param_shardings(shardings_on, shapes),
    )
    return split(shapes, trainable(flatten(shapes), train.rules()))


def fingerprint(params: dict) -> str:
    """A digest of the values: equal for equal weights, however they are sharded.

    Sums of the raw bits modulo 2^32, one per array, so that 7B weights take one pass on their
    devices and nothing is copied to the host.
    """

    def checksum(leaf):
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
        return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)

    flat = dict(sorted(flatten(params).items()))
    sums = jax.device_get(jax.jit(lambda tree: jax.tree.map(checksum, tree))(flat))
    digest = hashlib.sha256()
    for path, total in sums.items():
        digest.update(f"{path} {flat[path].shape} {flat[path].dtype} {int(total)}\n".encode())
    return digest.hexdigest()[:32]
