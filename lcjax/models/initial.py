"""Parameters that no checkpoint gives: random weights, learned frequencies, and mere shapes."""

import jax
import jax.numpy as jnp

from lcjax.models.config import ModelConfig
from lcjax.models.decoder import Decoder
from lcjax.parallel.offload import host_shardings
from lcjax.parallel.sharding import param_shardings


def _init(config: ModelConfig, key: jax.Array) -> dict:
    return Decoder(config).init(key, jnp.zeros((1, 2), jnp.int32))["params"]


def random_params(config: ModelConfig, seed: int, mesh: jax.sharding.Mesh | None = None) -> dict:
    """Random weights, each array made where it stays: on `mesh`, or on the default device."""
    key = jax.random.key(seed)
    shardings = None
    if mesh is not None:
        shardings = param_shardings(mesh, jax.eval_shape(lambda k: _init(config, k), key))
    return jax.jit(lambda k: _init(config, k), out_shardings=shardings)(key)


def with_learned_rope(params: dict, config: ModelConfig, seed: int) -> dict:
    """`params`, with new frequencies if `config.rope` learns them and they are not there yet."""
    if not config.rope.learned or "rope" in params:
        return params
    return params | {"rope": config.rope.init(jax.random.key(seed), config.rotary_dim)}


def abstract_params(config: ModelConfig, mesh: jax.sharding.Mesh, *, host: bool = False) -> dict:
    """Shapes, dtypes and shardings of the parameters on `mesh`; nothing is computed.

    With `host` they wait in the memory of its hosts.
    """
    shapes = jax.eval_shape(lambda k: _init(config, k), jax.random.key(0))
    shardings = param_shardings(mesh, shapes)
    if host:
        shardings = host_shardings(shapes, shardings)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
