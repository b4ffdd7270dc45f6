"""Offloading of arrays to host memory, and transfers between host and device.

The memory kind of an array is part of its sharding, and of its type during tracing. Programs read
it there, so no function needs an argument for it.
"""

import re
from typing import Any, Literal

import jax

from lcjax.parallel.sharding import path_of

# What a training run offloads: nothing, the optimizer's state, or the weights as well.
Offload = Literal["none", "optimizer", "parameters"]

# At the start of a path: of layers stacked [L, ...], and of a layer by itself.
STACK, LAYER = re.compile(r"^(.*/)?layers/"), re.compile(r"^(.*/)?layers_\d+/")

_HOST = "pinned_host"  # memory that a device reads by itself


def is_offloaded(x: jax.Array) -> bool:
    """Whether `x`, an array or one that is being traced, lies in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: Any) -> Any:
    """The tree with all that is offloaded brought to the device."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if is_offloaded(x) else x, tree
    )


def put_back(tree: Any, where: Any) -> Any:
    """The tree with every array in that memory in which `where` has its own; inside a program."""
    return jax.tree.map(
        lambda x, old: jax.device_put(x, jax.memory.Space.Host) if is_offloaded(old) else x,
        tree,
        where,
    )


def offloadable(path: str, dimensions: int) -> bool:
    """All parameters but vectors, such as norms and biases.

    They are little, and libtpu takes no row in 16 bits out of a stack [L, D] of them on the host.
    """
    return dimensions - bool(STACK.match(path)) > 1


def host_sharding(
    path: str, dimensions: int, sharding: jax.sharding.Sharding
) -> jax.sharding.Sharding:
    """`sharding` of the parameter at `path`, in the memory of hosts if it is `offloadable`."""
    return sharding.with_memory_kind(_HOST) if offloadable(path, dimensions) else sharding


def host_shardings(tree: Any, shardings: Any) -> Any:
    """`host_sharding` for a tree of parameters, or of what belongs to them, and its shardings."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf, sharding: host_sharding(path_of(keys), len(leaf.shape), sharding),
        tree,
        shardings,
    )


def to_host(path: str, x: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """The parameter `x` at `path` offloaded, if it can be, in `dtype` or its own if None."""
    where = host_sharding(path, x.ndim, x.sharding)
    if dtype is None or x.dtype == dtype:
        return jax.device_put(x, where)
    return jax.jit(lambda x: to_device(x).astype(dtype), out_shardings=where)(x)
