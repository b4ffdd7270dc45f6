"""Scans over the layers of a decoder: all layers at once, or groups of equal or periodic layers.

If the layers of a model differ, successive equal layers form a group, and so do layers that repeat
with a period, such as five layers of one kind and one of another. Each group is one scan over its
periods. Such a model stores the weights of every layer separately, under the same names as without
a scan, so checkpoints, training rules and generation do not depend on groups. The compiled program
stacks the weights of a group, which costs one copy of them and of their gradients in a step.
Without groups, compilation takes minutes instead of seconds.
"""

import dataclasses
import itertools
import operator
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from lcjax.models.layers import LayerInputs, LayerOutput, Offloaded
from lcjax.models.memory import EncodedContext
from lcjax.models.model_config import ModelConfig
from lcjax.parallel.sharding import param_shardings
from lcjax.tree import flatten, nest


class Group(NamedTuple):
    """Successive layers, and the period after which their kinds repeat."""

    layers: range
    period: int = 1


def one_group_per_layer(count: int) -> list[Group]:
    """Returns `count` groups of one layer each."""
    return [Group(range(index, index + 1)) for index in range(count)]


def group_layers(layers: Sequence[dict], kinds: Sequence[Hashable]) -> list[Group]:
    """Returns the groups of successive layers that one scan can compute.

    Layers a period apart are of one kind, and their weights have the same names, shapes and dtypes.
    A layer with offloaded weights is a group by itself: stacking would fetch it.

    Args:
      layers: the weights of each layer.
      kinds: the kind of each layer; only layers of equal kinds are scanned together.
    """

    def kind(index: int) -> Any:
        leaves, names = jax.tree.flatten(layers[index], is_leaf=_is_offloaded)
        if any(map(_is_offloaded, leaves)):
            return index
        return kinds[index], names, [(leaf.shape, leaf.dtype) for leaf in leaves]

    return _group(list(map(kind, range(len(layers)))))


def layer_kinds(config: ModelConfig) -> list[Hashable]:
    """Returns the kind of each layer, which `group_layers` compares.

    A layer whose keys and values others read is a kind of its own, so that no scan computes it
    together with a layer that reads them.
    """
    memory, count = config.memory, config.num_layers
    reads = (False,) * count if memory is None else memory.reader_layers(count)
    sources = config.shared_layers
    return [
        (kind, reads_it, index if index in sources else None)
        for index, (kind, reads_it) in enumerate(zip(config.kind_by_layer, reads, strict=True))
    ]


def _group(kinds: list) -> list[Group]:
    """Groups the first layers with the period that covers most of them, then those after them."""
    groups, start = [], 0
    while start < len(kinds):
        rest, best = len(kinds) - start, Group(range(start, start + 1))
        for period in range(1, rest // 2 + 1):
            is_same = map(operator.eq, kinds[start:], kinds[start + period :])
            size = period + sum(itertools.takewhile(bool, is_same))
            size -= size % period
            if size > max(period, len(best.layers)):
                best = Group(range(start, start + size), period)
        groups.append(best)
        start = best.layers.stop
    return groups


def _is_offloaded(node: Any) -> bool:
    return isinstance(node, Offloaded)


def contexts_by_layer(
    memory: EncodedContext | None, reads: Sequence[bool]
) -> list[EncodedContext | None]:
    """Returns the part of `memory` that each layer reads; None for layers that read nothing."""
    numbers = itertools.count()
    return [memory.for_layer(next(numbers)) if memory and reads_it else None for reads_it in reads]


def stack_contexts(memories: Sequence[EncodedContext | None]) -> tuple[EncodedContext | None, Any]:
    """Splits the contexts of several layers into what they share and what a scan iterates over.

    Args:
      memories: the context of each layer.

    Returns:
      The shared context, and keys and values stacked to [L, ...]; None if layers have none.
    """
    memory = memories[0]
    if memory is None or memory.layers is None:
        return memory, None
    pairs = jax.tree.map(lambda *x: jnp.stack(x), *(each.layers[0] for each in memories))
    return dataclasses.replace(memory, layers=None), pairs


def scan(
    blocks: Sequence[nn.Module],
    layers: Sequence[dict],
    all_inputs: Sequence[LayerInputs],
    x: Float[Array, "B T D"],
    mesh: jax.sharding.Mesh | None,
) -> tuple[Float[Array, "B T D"], list[LayerOutput]]:
    """Applies a group of layers, one period per step of a scan.

    Args:
      blocks: the module of each layer of a period.
      layers: weights of each layer.
      all_inputs: the inputs of each layer besides hidden states.
      x: hidden states.
      mesh: shards the stacked weights like those of each layer.

    Returns:
      The hidden states, and the output of each layer.
    """
    period, stacks, shared = len(blocks), [], []
    for first in range(period):
        params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers[first::period])
        if mesh is not None:
            params = jax.lax.with_sharding_constraint(params, param_shardings(mesh, params))
        memory, pairs = stack_contexts([inputs.memory for inputs in all_inputs[first::period]])
        embeddings = [inputs.embedding for inputs in all_inputs[first::period]]
        embeddings = None if embeddings[0] is None else jnp.stack(embeddings)
        stacks.append((params, pairs, embeddings))
        shared.append(all_inputs[first]._replace(memory=memory))

    def apply_period(x, stacks):
        outputs = []
        for block, inputs, (layer, pair, embedding) in zip(blocks, shared, stacks, strict=True):
            inputs = inputs._replace(embedding=embedding)
            x, output = block.apply({"params": layer}, x, inputs, None, pair)
            outputs.append(output)
        return x, outputs

    x, outputs = jax.lax.scan(apply_period, x, stacks)
    by_period = zip(*(unstack(output, len(layers) // period) for output in outputs))
    return x, list(itertools.chain(*by_period))


def collect_keys(block: nn.Module, stacked: dict, x: jax.Array, inputs: LayerInputs) -> LayerOutput:
    """Returns the keys and values [L, B, S, K, H] of all layers that `inputs.collect` selects.

    The attention and the MLP of the last layer are not computed, since their result is unused.
    """

    def apply_layer(x, scanned):
        layer, is_last = scanned

        def apply(x):
            return block.apply({"params": layer}, x, inputs, None)

        return jax.lax.cond(is_last, lambda x: (x, apply(x)[1]), apply, x)

    count = jax.tree.leaves(stacked)[0].shape[0]
    return jax.lax.scan(apply_layer, x, (stacked, jnp.arange(count) == count - 1))[1]


def unstack(stacked: Any, count: int) -> list:
    """Splits a tree of arrays [L, ...] into the trees of L = `count` layers."""
    return [jax.tree.map(operator.itemgetter(index), stacked) for index in range(count)]


def unstack_layers(params: dict, config: ModelConfig) -> dict:
    """Returns the parameters with one tree for each layer, `layers_0`, `layers_1`, ...

    `params` has arrays [L, ...] under `layers` and is not changed, so memory holds two copies of
    the layers. Each part is sharded like its stack. Models with `scan_layers=False` need this form.
    """
    params = dict(params)
    unstack_layers_in_place(params, config)
    return params


def unstack_layers_in_place(params: dict, config: ModelConfig) -> None:
    """Changes `params` to the result of `unstack_layers`, one array at a time.

    Each stacked array is released as soon as its parts exist, so memory holds no more than the
    model and one such array, provided that nothing else refers to the arrays.
    """
    stacks = flatten(params.pop("layers"))
    layers: list[dict] = [{} for _ in range(config.num_layers)]
    for path in list(stacks):
        for layer, part in zip(layers, _unstack(stacks.pop(path)), strict=True):
            layer[path] = part
    params |= {f"layers_{index}": nest(layer) for index, layer in enumerate(layers)}


def _unstack(stack: jax.Array) -> list[jax.Array]:
    """Returns the L arrays of a stack [L, ...], sharded like the stack."""
    sharding = getattr(stack, "sharding", None)
    is_named = isinstance(sharding, NamedSharding)
    out = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:])) if is_named else None
    # Without waiting, the stacks of all arrays would stay allocated until the device has finished.
    return jax.block_until_ready(jax.jit(list, out_shardings=out)(stack))


def stack_layers(params: dict, config: ModelConfig) -> dict:
    """Returns the parameters with arrays [L, ...] under `layers`: inverts `unstack_layers`."""
    layers = [params[f"layers_{index}"] for index in range(config.num_layers)]
    rest = {name: child for name, child in params.items() if not name.startswith("layers_")}
    return rest | {"layers": jax.tree.map(_stack, *layers)}


def arrange_layers(params: dict, config: ModelConfig) -> dict:
    """Returns `params` with layers stacked if `config.stacked` is true, else separate.

    Stacked layers are separated in place (`unstack_layers_in_place`).
    """
    if config.stacked and "layers" not in params:
        return stack_layers(params, config)
    if not config.stacked and "layers" in params:
        unstack_layers_in_place(params, config)
    return params


def _stack(*arrays: jax.Array) -> jax.Array:
    """Stacks arrays to [L, ...], sharded like each of them."""
    sharding = getattr(arrays[0], "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return jnp.stack(arrays)
    out = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    return jax.jit(jnp.stack, out_shardings=out)(arrays)
