"""Arrays that wait in the memory of their device's host, and how they get there and back.

Where an array lies is part of its sharding, and of its type while a program is traced: programs
look there instead of being told.
"""

import re
from typing import Any, Literal

import jax

from lcjax.sharding import path_of

# What of a training run waits there: nothing, the optimizer's state, or the weights, too.
Offload = Literal["none", "optimizer", "parameters"]

# At the start of a path: of layers stacked [L, ...], and of a layer by itself.
STACK, LAYER = re.compile(r"^(.*/)?layers/"), re.compile(r"^(.*/)?layers_\d+/")

_HOST = "pinned_host"  # memory that a device reads by itself


def waits(x: jax.Array) -> bool:
    """Whether `x`, an array or one that is being traced, lies in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def fetched(tree: Any) -> Any:
    """The tree with all that waits brought to the device."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if waits(x) else x, tree
    )


def put_back(tree: Any, where: Any) -> Any:
    """The tree with every array in that memory in which `where` has its own; inside a program."""
    return jax.tree.map(
        lambda x, old: jax.device_put(x, jax.memory.Space.Host) if waits(old) else x, tree, where
    )


def can_wait(path: str, dimensions: int) -> bool:
    """All parameters but vectors, such as norms and biases.

    They are little, and libtpu takes no row in 16 bits out of a stack [L, D] of them on the host.
    """
    return dimensions - bool(STACK.match(path)) > 1


def place(path: str, dimensions: int, sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Where the parameter at `path` waits: in the memory of the devices' hosts, if it can."""
    return sharding.with_memory_kind(_HOST) if can_wait(path, dimensions) else sharding


def on_host(tree: Any, shardings: Any) -> Any:
    """`place` for a tree of parameters, or of what belongs to them, and its shardings."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf, sharding: place(path_of(keys), len(leaf.shape), sharding),
        tree,
        shardings,
    )


def moved(path: str, x: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """The parameter `x` at `path` where it is to wait, in `dtype`, or its own if None."""
    where = place(path, x.ndim, x.sharding)
    if dtype is None or x.dtype == dtype:
        return jax.device_put(x, where)
    return jax.jit(lambda x: fetched(x).astype(dtype), out_shardings=where)(x)
