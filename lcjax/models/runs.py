"""Runs of layers that are alike, where not all layers of a model are: one compiled layer for each.

Such a model keeps the weights of every layer by themselves, under the names that they have without
a scan: checkpoints, rules about what is trained and generation know no runs. To be scanned, the
weights of a run are stacked in the program that reads them. A step copies them once more for that,
and its gradients; without, compilers take minutes for what they do in seconds.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lcjax.models.layers import Context
from lcjax.models.memory import Encoded
from lcjax.models.waiting import Waiting
from lcjax.sharding import param_shardings


def single(count: int) -> list[range]:
    """Every layer as a run of its own."""
    return [range(index, index + 1) for index in range(count)]


def alike(layers: Sequence[dict], reads: Sequence[bool]) -> list[range]:
    """The runs of `layers`, trees of weights, from the first on.

    Those of a run read the memory or do not, and their weights have the same names, shapes and
    dtypes. Weights that wait on the host are left apart: to be stacked they would be fetched.
    """

    def kind(index: int) -> Any:
        leaves, names = jax.tree.flatten(layers[index], is_leaf=_waits)
        if any(map(_waits, leaves)):
            return index
        return reads[index], names, [(leaf.shape, leaf.dtype) for leaf in leaves]

    groups = (list(group) for _, group in itertools.groupby(range(len(layers)), kind))
    return [range(group[0], group[-1] + 1) for group in groups]


def _waits(node: Any) -> bool:
    return isinstance(node, Waiting)


def memories(memory: Encoded | None, reads: Sequence[bool]) -> list[Encoded | None]:
    """What each layer sees of `memory`: those that do not read, nothing."""
    numbers = itertools.count()
    return [memory.of_layer(next(numbers)) if memory and reads_it else None for reads_it in reads]


def scan(
    block: nn.Module,
    layers: Sequence[dict],
    memories: Sequence[Encoded | None],
    x: jax.Array,
    context: Context,
    mesh: jax.sharding.Mesh | None,
) -> jax.Array:
    """`x` [B, T, D] after a run: after `block` with one of `layers` after the other."""
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    if mesh is not None:  # as they lie one by one
        params = jax.lax.with_sharding_constraint(params, param_shardings(mesh, params))
    memory, pairs = memories[0], None
    if memory is not None and memory.layers is not None:
        pairs = jax.tree.map(lambda *x: jnp.stack(x), *(each.layers for each in memories))

    def one(x, part):
        own, pair = part
        here = memory if pair is None else dataclasses.replace(memory, layers=pair)
        return block.apply({"params": own}, x, context._replace(memory=here), None)

    return jax.lax.scan(one, x, (params, pairs))[0]
