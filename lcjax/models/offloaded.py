"""Weights offloaded to the host's memory, fetched when a layer asks for them.

Flax takes a parameter out of its box where a module names it. For a box of this kind that is the
moment at which the weight is fetched: inside the scan over layers one layer's part of it, and again
where a layer is computed again for its gradient. No module has to know.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import meta

from lcjax.parallel.offload import fetched, is_offloaded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Offloaded(meta.AxisMetadata):
    """A weight on the host, and what takes its gradient on the device.

    `gradient` is like the weight and never read: the derivative by it is the derivative by the
    weight. That by the weight itself would be sent to the host as it is made. None: not trained.
    """

    weight: jax.Array
    gradient: jax.Array | None = None

    def unbox(self) -> jax.Array:
        return fetched(self.weight) if self.gradient is None else _fetch(self.weight, self.gradient)

    def replace_boxed(self, val: Any) -> Any:
        return val

    def add_axis(self, index: int, params: dict) -> "Offloaded":
        return self

    def remove_axis(self, index: int, params: dict) -> "Offloaded":
        return self


@jax.custom_vjp
def _fetch(weight: jax.Array, gradient: jax.Array) -> jax.Array:
    return fetched(weight)


_fetch.defvjp(lambda weight, gradient: (fetched(weight), None), lambda _, slope: (None, slope))


def differentiable(params: dict) -> dict:
    """What the loss is to be differentiated by: the parameters, zeros for those on the host."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if is_offloaded(x) else x, params)


def with_gradients(params: dict, by: dict) -> dict:
    """The parameters for a model, `by` being `differentiable(params)`."""
    return jax.tree.map(lambda x, d: Offloaded(x, d) if is_offloaded(x) else d, params, by)


def boxed(params: dict) -> dict:
    """The parameters for a model, those on the host in boxes."""
    return jax.tree.map(
        lambda x: x if isinstance(x, Offloaded) or not is_offloaded(x) else Offloaded(x),
        params,
        is_leaf=lambda x: isinstance(x, Offloaded),
    )


def unboxed(tree: Any) -> Any:
    """What is in the boxes of a tree, fetched."""
    return meta.unbox(tree)
