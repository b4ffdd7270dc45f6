"""Groups of successive layers that are alike, where not all of a model are: each is one scan.

Such a model keeps the weights of every layer by themselves, under the names that they have without
a scan: checkpoints, rules about what is trained and generation know no groups. To be scanned, the
weights of a group are stacked in the program that reads them. A step copies them once more for
that, and its gradients; without, compilers take minutes for what they do in seconds.
"""

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lcjax.models.layers import Context
from lcjax.models.memory import EncodedContext
from lcjax.models.offloaded import Offloaded
from lcjax.parallel.sharding import param_shardings


def single(count: int) -> list[range]:
    """Every layer as a group of its own."""
    return [range(index, index + 1) for index in range(count)]


def alike(layers: Sequence[dict], reads: Sequence[bool]) -> list[range]:
    """The groups of `layers`, trees of weights, from the first on.

    Those of a group read the memory or do not, and their weights have the same names, shapes and
    dtypes. Offloaded weights are left apart: to be stacked they would be fetched.
    """

    def kind(index: int) -> Any:
        leaves, names = jax.tree.flatten(layers[index], is_leaf=_is_offloaded)
        if any(map(_is_offloaded, leaves)):
            return index
        return reads[index], names, [(leaf.shape, leaf.dtype) for leaf in leaves]

    groups = (list(group) for _, group in itertools.groupby(range(len(layers)), kind))
    return [range(group[0], group[-1] + 1) for group in groups]


def _is_offloaded(node: Any) -> bool:
    return isinstance(node, Offloaded)


def memories(memory: EncodedContext | None, reads: Sequence[bool]) -> list[EncodedContext | None]:
    """Returns what each layer reads of `memory`: None for layers that do not read."""
    numbers = itertools.count()
    return [memory.for_layer(next(numbers)) if memory and reads_it else None for reads_it in reads]


def together(memories: Sequence[EncodedContext | None]) -> tuple[EncodedContext | None, Any]:
    """Returns what all of some layers read, and for a scan a stack [L, ...] of what each reads."""
    memory = memories[0]
    if memory is None or memory.layers is None:
        return memory, None
    pairs = jax.tree.map(lambda *x: jnp.stack(x), *(each.layers[0] for each in memories))
    return dataclasses.replace(memory, layers=None), pairs


def scan(
    block: nn.Module,
    layers: Sequence[dict],
    memories: Sequence[EncodedContext | None],
    x: jax.Array,
    context: Context,
    mesh: jax.sharding.Mesh | None,
) -> tuple[jax.Array, list]:
    """Applies `block` with each of `layers` in turn to `x` [B, T, D].

    Returns the new `x`, and the keys and values that each layer collects.
    """
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    if mesh is not None:  # as they lie one by one
        params = jax.lax.with_sharding_constraint(params, param_shardings(mesh, params))
    memory, pairs = together(memories)
    context = context._replace(memory=memory)

    def one(x, inputs):
        weights, pair = inputs
        return block.apply({"params": weights}, x, context, None, pair)

    x, collected = jax.lax.scan(one, x, (params, pairs))
    return x, unstack(collected, len(layers))


def collect_keys(
    block: nn.Module, stacked: dict, x: jax.Array, context: Context
) -> tuple[jax.Array, jax.Array]:
    """Returns the keys and values [L, B, S, K, H] of `context.collect`, with weights [L, ...].

    Attention and MLP of the last layer, which nobody reads, are not computed.
    """

    def one(x, inputs):
        weights, is_last = inputs

        def layer(x):
            return block.apply({"params": weights}, x, context, None)

        return jax.lax.cond(is_last, lambda x: (x, layer(x)[1]), layer, x)

    count = jax.tree.leaves(stacked)[0].shape[0]
    _, collected = jax.lax.scan(one, x, (stacked, jnp.arange(count) == count - 1))
    return collected


def unstack(stacked: Any, count: int) -> list:
    """Returns the trees of `count` layers of one whose arrays are [L, ...]."""
    return [jax.tree.map(operator.itemgetter(index), stacked) for index in range(count)]
