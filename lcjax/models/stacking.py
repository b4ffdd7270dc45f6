"""Weights of a decoder's layers as one stack, for a scan, or each by itself."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from lcjax.models.config import ModelConfig


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
