"""Gradients of which each device keeps a part: an explicit reduce-scatter, where XLA does worse."""

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import PartitionSpec

from lcjax.parallel.sharding import spec_of, spread_over, tokens_spec

_HIDDEN = 16  # devices; what libtpu 0.0.42 does on v5e:4x4 and not on v5e:8x8


@dataclasses.dataclass(frozen=True)
class ReduceScatter:
    """How devices with different tokens add up a gradient of which each keeps a part.

    One mesh axis after the other: where all devices of a slice share one sum, XLA makes an
    all-reduce of it for TPUs, which sends twice as much and holds the whole gradient everywhere.
    """

    mesh: jax.sharding.Mesh
    tokens: PartitionSpec  # of the tokens [B, T]
    gradient: PartitionSpec  # of the gradient, along the axes over which tokens are spread

    def __call__(self, run: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        """The sum over all devices of `run(*arrays)` on each one's part of arrays [B, T, ...]."""
        return jax.shard_map(
            lambda *arrays: self.of(run(*arrays)),
            mesh=self.mesh,
            in_specs=(self.tokens,) * len(arrays),
            out_specs=self.gradient,
            axis_names=set(spread_over(self.tokens)),
            check_vma=False,
        )(*arrays)

    def of(self, x: jax.Array) -> jax.Array:
        """The same of an array of each device, inside a `shard_map`."""
        for dim, cut in enumerate(self.gradient):
            for axis in spread_over(PartitionSpec(cut)):
                for groups in _stages(self.mesh, axis):
                    x = jax.lax.psum_scatter(
                        x, axis, scatter_dimension=dim, axis_index_groups=groups, tiled=True
                    )
        spread, size = spread_over(self.gradient), self.mesh.shape
        rest = tuple(a for a in spread_over(self.tokens) if a not in spread and size[a] > 1)
        return jax.lax.psum(x, rest) if rest else x


def _stages(mesh: jax.sharding.Mesh, axis: str) -> list[list[list[int]] | None]:
    """Groups along an axis that make two sums of one where it alone is the whole mesh."""
    size = mesh.shape[axis]
    minor = next((n for n in range(math.isqrt(size), 1, -1) if size % n == 0), 1)
    if size < mesh.size or minor == 1:
        return [None]
    places = np.arange(size).reshape(-1, minor)
    return [places.T.tolist(), places.tolist()]


def gradient_reduce_scatter(
    mesh: jax.sharding.Mesh | None, path: str, shape: tuple[int, ...], rows: int, length: int
) -> ReduceScatter | None:
    """For the gradient of a parameter from `rows` texts of `length` tokens; None: XLA does it well.

    Up to `_HIDDEN` devices XLA hides the exchange behind the product that makes the gradient.
    """
    if mesh is None:
        return None
    tokens, spec = tokens_spec(mesh, rows, length), spec_of(path, shape, mesh)
    summed = spread_over(tokens)
    gradient = PartitionSpec(
        *(tuple(axis for axis in spread_over(PartitionSpec(cut)) if axis in summed) for cut in spec)
    )
    if math.prod(mesh.shape[axis] for axis in spread_over(gradient)) <= _HIDDEN:
        return None
    return ReduceScatter(mesh, tokens, gradient)
