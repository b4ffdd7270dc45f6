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
from jax.sharding import NamedSharding, PartitionSpec

from lcjax.models.config import ModelConfig
from lcjax.models.layers import Context, Offloaded
from lcjax.models.memory import Encoded
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


def memories(memory: Encoded | None, reads: Sequence[bool]) -> list[Encoded | None]:
    """What each layer sees of `memory`: those that do not read, nothing."""
    numbers = itertools.count()
    return [memory.of_layer(next(numbers)) if memory and reads_it else None for reads_it in reads]


def together(memories: Sequence[Encoded | None]) -> tuple[Encoded | None, Any]:
    """What all of some layers read, and stacked [L, ...] what each reads of its own, for a scan."""
    memory = memories[0]
    if memory is None or memory.layers is None:
        return memory, None
    pairs = jax.tree.map(lambda *x: jnp.stack(x), *(each.layers[0] for each in memories))
    return dataclasses.replace(memory, layers=None), pairs


def scan(
    block: nn.Module,
    layers: Sequence[dict],
    memories: Sequence[Encoded | None],
    x: jax.Array,
    context: Context,
    mesh: jax.sharding.Mesh | None,
) -> tuple[jax.Array, list]:
    """`x` [B, T, D] after a group: after `block` with one of `layers` after the other.

    And what each of them returns of the keys and values that are to be kept.
    """
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    if mesh is not None:  # as they lie one by one
        params = jax.lax.with_sharding_constraint(params, param_shardings(mesh, params))
    memory, pairs = together(memories)
    context = context._replace(memory=memory)

    def one(x, part):
        own, pair = part
        return block.apply({"params": own}, x, context, None, pair)

    x, kept = jax.lax.scan(one, x, (params, pairs))
    return x, apart(kept, len(layers))


def keys_alone(
    block: nn.Module, stacked: dict, x: jax.Array, context: Context
) -> tuple[jax.Array, jax.Array]:
    """Keys and values [L, B, S, K, H] that `context.keep` names, with weights [L, ...].

    What nobody reads of the last layer, its attention and its MLP, is not computed.
    """

    def one(x, part):
        own, last = part

        def whole(x):
            return block.apply({"params": own}, x, context, None)

        return jax.lax.cond(last, lambda x: (x, whole(x)[1]), whole, x)

    count = jax.tree.leaves(stacked)[0].shape[0]
    _, found = jax.lax.scan(one, x, (stacked, jnp.arange(count) == count - 1))
    return found


def apart(stacked: Any, count: int) -> list:
    """The trees of `count` layers of one whose arrays are [L, ...]."""
    return [jax.tree.map(operator.itemgetter(index), stacked) for index in range(count)]


def unstack_layers(params: dict, config: ModelConfig) -> dict:
    """A new tree with `layers` [L, ...] as layers_0, layers_1, ...: that of `scan_layers=False`.

    `params` stays, so for a while there are two copies of the layers; each part is split over
    the devices as the whole was.
    """
    rest = {name: child for name, child in params.items() if name != "layers"}
    return rest | _spread(params["layers"], config.num_layers)


def unstack_layers_in_place(params: dict, config: ModelConfig) -> None:
    """Turns `params` itself into the tree of `unstack_layers`, one array after another.

    Each stacked array is given up as soon as its parts exist: memory never holds more than the
    model and one such array, provided that nobody else holds on to the arrays.
    """
    layers = params.pop("layers")
    params |= _spread(layers, config.num_layers, consume=True)


def _spread(stacked: dict, count: int, *, consume: bool = False) -> dict:
    """{layers_0: tree, ...} of a tree of [L, ...]; `consume` empties `stacked` on the way."""
    trees: list[dict] = [{} for _ in range(count)]
    for key in list(stacked):
        child = stacked.pop(key) if consume else stacked[key]
        if isinstance(child, dict):
            parts = list(_spread(child, count, consume=consume).values())
        else:
            parts = _parts(child)
        del child
        for tree, part in zip(trees, parts, strict=True):
            tree[key] = part
    return {f"layers_{index}": tree for index, tree in enumerate(trees)}


def _parts(leaf: jax.Array) -> list[jax.Array]:
    """The L arrays of a stack [L, ...], each laid out as it was; they are there on return."""
    # Without waiting, the stacks of all leaves would be alive until the device has caught up.
    layout, found = None, getattr(leaf, "sharding", None)
    if isinstance(found, NamedSharding):
        layout = NamedSharding(found.mesh, PartitionSpec(*found.spec[1:]))
    return jax.block_until_ready(jax.jit(list, out_shardings=layout)(leaf))


def stack_layers(params: dict, config: ModelConfig) -> dict:
    """The inverse of `unstack_layers`."""
    each = [params[f"layers_{index}"] for index in range(config.num_layers)]
    rest = {name: child for name, child in params.items() if not name.startswith("layers_")}
    return rest | {"layers": jax.tree.map(_stacked, *each)}


def _stacked(*leaves: jax.Array) -> jax.Array:
    """[L, ...] of L arrays, laid out as they are."""
    layout = getattr(leaves[0], "sharding", None)
    if not isinstance(layout, NamedSharding):
        return jnp.stack(leaves)
    layout = NamedSharding(layout.mesh, PartitionSpec(None, *layout.spec))
    return jax.jit(jnp.stack, out_shardings=layout)(leaves)
