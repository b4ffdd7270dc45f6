"""What meshes a caller may be in: axes that JAX splits by types, and axes split by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.dispatch import REFERENCE


def on_any_mesh(attention: Callable) -> Callable:
    """`attention(q, k, v, ...) -> (out, lse)` where q, k, v may have axes of the kind Explicit.

    `jax.make_mesh` makes such axes unless told otherwise. The loops inside do not say how each of
    their steps is split, so it runs with these axes Auto; results are split as q's rows, length and
    heads are.

    Raises:
      ValueError: inside a `jax.shard_map` that checks which values vary (check_vma).
    """

    @functools.wraps(attention)
    def run(q, k, v, *args, **options):
        leaves, tree = jax.tree.flatten((q, k, v, args, options))
        arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}
        if options.get("implementation") != REFERENCE:
            _check_manual(attention.__name__, arrays.values())
        sharding = _explicit(arrays.values())
        if sharding is None or options.get("layout") is not None:
            return attention(q, k, v, *args, **options)

        def automatic(arrays):
            filled = [arrays.get(i, x) for i, x in enumerate(leaves)]
            q, k, v, args, options = jax.tree.unflatten(tree, filled)
            return attention(q, k, v, *args, **options)

        mesh, spec = sharding.mesh, jax.typeof(q).sharding.spec
        whole = NamedSharding(mesh, PartitionSpec(*spec[:3]))
        return jax.sharding.auto_axes(automatic, out_sharding=(whole, whole))(arrays)

    return run


def _explicit(arrays):
    """The sharding of the first array that has axes of the kind Explicit, or None."""
    shardings = (jax.typeof(x).sharding for x in arrays)
    return next((x for x in shardings if x.mesh.explicit_axes), None)


def _check_manual(call: str, arrays):
    axes = sorted({str(axis) for x in arrays for axis in jax.typeof(x).mat.varying})
    if axes:
        raise ValueError(
            f"{call}: inside a shard_map over {', '.join(axes)} that checks which values vary; "
            "give jax.shard_map check_vma=False, or leave it out and give a Layout"
        )
