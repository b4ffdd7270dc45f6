"""Computes functions of single tokens over tiles of the tokens of a device.

The intermediate results of an MLP are several times as large as its inputs, and so are logits. Over
tiles, memory holds those of one tile, whatever the length of the text. The backward pass computes
each tile again (ALST, Bekman et al. 2025, arXiv 2506.13996, section 3.1), as rematerialisation of
the layer would, so the work is the same.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import custom_vjp_primal_tree_values
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from lcjax.parallel.sharding import spec_of, spread_over, tokens_spec
from lcjax.tree import flatten, nest

# Maximum bytes of the intermediate results of one tile on one device: small enough for a CPU's
# caches, large enough to keep an accelerator's matrix unit busy.
_BYTES = {"cpu": 64 * 2**20}
_BYTES_DEFAULT = 2**30


def tile_bytes(platform: str | None) -> int:
    """Returns the maximum bytes of a tile's intermediate results; None: of an accelerator."""
    return _BYTES.get(platform, _BYTES_DEFAULT)


def tile_size(tokens: int, bytes_per_token: int, mesh: jax.sharding.Mesh | None) -> int:
    """Returns the number of tokens of a tile, at most `tokens`.

    Tiles are equal, or nearly: 1,000 tokens in tiles of at most 600 become 2 x 500, not 600 + 400.
    At most twice as many tiles as necessary are used if they need no padding, which would copy all
    tokens: 1,000 tokens in tiles of at most 350 become 4 x 250, not 3 x 334.

    Args:
      tokens: number of tokens of a device.
      bytes_per_token: bytes of the intermediate results of one token.
      mesh: the devices; None: the default backend's.
    """
    most = max(1, tile_bytes(_platform(mesh)) // bytes_per_token)
    least = -(-tokens // most)
    count = next((n for n in range(least, 2 * least) if tokens % n == 0), least)
    return -(-tokens // count)


def _platform(mesh: jax.sharding.Mesh | None) -> str:
    """Returns the platform for which a program is traced, whose devices need not be present."""
    if mesh is not None:
        return mesh.devices.flat[0].platform
    described = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if described is None else described.platform


def tokens_of_device(mesh: jax.sharding.Mesh | None, rows: int, length: int) -> tuple[int, int]:
    """Returns the rows of a batch [B, T] that a device has, and the tokens of each."""
    if mesh is None:
        return rows, length
    of_rows, of_length = (
        math.prod(mesh.shape[axis] for axis in spread_over(PartitionSpec(over)))
        for over in tokens_spec(mesh, rows, length)
    )
    return rows // of_rows, length // of_length


def map_devices(
    run: Callable[..., Any],
    mesh: jax.sharding.Mesh | None,
    tokens: PartitionSpec,
    inputs: Any,
    outputs: Any,
) -> Callable[..., Any]:
    """Maps `run` over the tokens of each device; XLA decides how other axes are sharded.

    Args:
      run: the function.
      mesh: the devices; None: one.
      tokens: how tokens are sharded (`tokens_spec`).
      inputs, outputs: partition specs of the arguments and results, over the axes of `tokens`.
    """
    axes = spread_over(tokens)
    if not axes:
        return run
    return jax.shard_map(
        run, mesh=mesh, in_specs=inputs, out_specs=outputs, axis_names=set(axes), check_vma=False
    )


def over_local_tiles(
    apply: Callable[[dict, jax.Array], jax.Array],
    weights: dict,
    x: Float[Array, "B T D"],
    *,
    path: str,
    tile: int,
    mesh: jax.sharding.Mesh | None,
) -> Float[Array, "B T D"]:
    """Applies a function of single tokens to tiles of the tokens of each device.

    Weights that the devices of a text share are gathered once for all tiles, and their gradients
    are reduce-scattered once.

    Args:
      apply: maps weights and a tile [M, D] to [M, D].
      weights: a tree of parameters, in the dtype in which devices exchange them.
      x: hidden states.
      path: the path of the weights in the model's parameters.
      tile: tokens of a tile.
      mesh: the devices; None: one.
    """
    tokens, weights = tokens_spec(mesh, *x.shape[:2]), flatten(weights)
    spread = spread_over(tokens)
    specs = {
        name: _spec(f"{path}/{name}", weight.shape, mesh, spread)
        for name, weight in weights.items()
    }

    def run(weights, x):
        whole = {name: _gathered(weight, specs[name]) for name, weight in weights.items()}
        flat = x.reshape(-1, x.shape[-1])
        y = over_tiles(lambda weights, x: apply(nest(weights), x), whole, flat, tile)
        return y.reshape(x.shape)

    return map_devices(run, mesh, tokens, (specs, tokens), tokens)(weights, x)


def _spec(
    path: str, shape: tuple[int, ...], mesh: jax.sharding.Mesh | None, spread: Sequence[str]
) -> PartitionSpec:
    """Returns how a weight is sharded over the mesh axes `spread`."""
    cuts = () if mesh is None else spec_of(path, shape, mesh)
    each = (spread_over(PartitionSpec(cut)) for cut in cuts)
    return PartitionSpec(*(tuple(axis for axis in cut if axis in spread) for cut in each))


def _gathered(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """All-gathers a weight inside a `shard_map`; its gradient is reduce-scattered."""
    for dimension, cut in enumerate(spec):
        # One axis after the other, the innermost first: libtpu sums the gradient of all devices
        # whole where a single reduce-scatter spans two axes.
        for axis in reversed(spread_over(PartitionSpec(cut))):
            x = jax.lax.all_gather(x, axis, axis=dimension, tiled=True)
    return x


def over_tiles(
    apply: Callable[[Any, Any], jax.Array], weights: Any, arrays: Any, tile: int
) -> jax.Array:
    """Applies a function of single tokens to one tile of tokens after the other.

    Gradients of the weights are sums over tiles in float32.

    Args:
      apply: maps weights and a tile of `arrays` to an array [tile, ...].
      weights: a tree of arrays.
      arrays: a tree of arrays [M, ...] with a row for each token.
      tile: tokens of a tile.

    Returns:
      The results [M, ...].
    """
    if tile >= jax.tree.leaves(arrays)[0].shape[0]:
        return apply(weights, arrays)
    return _over_tiles(weights, arrays, apply, tile)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _over_tiles(weights, arrays, apply, tile):
    count = jax.tree.leaves(arrays)[0].shape[0]
    results = jax.lax.map(functools.partial(apply, weights), _tiles(arrays, tile))
    return _joined(results, count)


def _forward(weights, arrays, apply, tile):
    learned, frozen = _by_gradient((weights, arrays))
    weights, arrays = custom_vjp_primal_tree_values((weights, arrays))
    return _over_tiles(weights, arrays, apply, tile), (learned, frozen)


def _backward(apply, tile, residuals, dy):
    """Computes each tile again, with gradients of the arrays that need one."""
    (weights, arrays), (fixed_weights, fixed_arrays) = residuals
    count = dy.shape[0]

    def add(sums, xs):
        arrays, fixed_arrays, dy = xs

        def run(weights, arrays):
            return apply(_merge(weights, fixed_weights), _merge(arrays, fixed_arrays))

        d_weights, d_arrays = jax.vjp(run, weights, arrays)[1](dy)
        return jax.tree.map(lambda a, d: a + d.astype(jnp.float32), sums, d_weights), d_arrays

    start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), weights)
    sums, d_arrays = jax.lax.scan(add, start, _tiles((arrays, fixed_arrays, dy), tile))
    d_weights = jax.tree.map(lambda d, x: d.astype(x.dtype), sums, weights)
    return d_weights, jax.tree.map(lambda d: _joined(d, count), d_arrays)


_over_tiles.defvjp(_forward, _backward, symbolic_zeros=True)


def _by_gradient(tree: Any) -> tuple[Any, Any]:
    """Splits a tree into the values that need a gradient and the others, None in their places."""

    def part(is_learned):
        return jax.tree.map(
            lambda x: x.value if x.perturbed == is_learned else None,
            tree,
            is_leaf=lambda x: hasattr(x, "perturbed"),
        )

    return part(True), part(False)


def _merge(tree: Any, other: Any) -> Any:
    """Inverts `_by_gradient`."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, tree, other, is_leaf=lambda x: x is None
    )


def _tiles(tree: Any, tile: int) -> Any:
    """Splits arrays [M, ...] into tiles [M / tile, tile, ...], padded with zeros."""

    def split(x):
        count = -(-x.shape[0] // tile)
        x = jnp.pad(x, [(0, count * tile - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(count, tile, *x.shape[1:])

    return jax.tree.map(split, tree)


def _joined(x: jax.Array, count: int) -> jax.Array:
    """Inverts `_tiles` for `count` tokens."""
    return x.reshape(-1, *x.shape[2:])[:count]
