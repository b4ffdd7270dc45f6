"""Argument checks of the public functions, and their support of Explicit mesh axes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.dispatch import REFERENCE
from pallas_kernels.key_bits import num_words
from pallas_kernels.masks import Mask, integer
from pallas_kernels.quantised import is_quantised
from pallas_kernels.tables import BlockTable


def check_arrays(call: str, q, k, v, scale, **positions):
    """Raises unless q, k, v and the positions have matching shapes, and the scale is static."""
    _check_qkv(call, q, k, v)
    _check_positions(call, q, k, **positions)
    if isinstance(scale, jax.core.Tracer):
        raise TypeError(
            f"{call}: scale must be a number known when tracing; multiply q by a scale that is "
            "learned or computed, and give scale=1.0"
        )
    if scale is not None and not _is_finite(scale):
        raise ValueError(
            f"{call}: scale={_shown(scale)} must be a finite number; None is H ** -0.5"
        )


def _is_finite(value) -> bool:
    """Returns whether `value` is a finite number: of Python, of NumPy, or a 0-dimensional array."""
    if isinstance(value, list | tuple):
        return False
    number = np.asarray(value)
    return number.ndim == 0 and number.dtype.kind in "iuf" and bool(np.isfinite(number))


def _shown(value) -> str:
    """Returns the first characters of `repr(value)`, on one line."""
    return " ".join(repr(value).split())[:60]


def _check_qkv(call: str, q, k, v):
    arrays = {name: x for name, x in (("q", q), ("k", k), ("v", v)) if not is_quantised(x)}
    for name, x in arrays.items():
        if not (hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)):
            dtype = getattr(x, "dtype", type(x).__name__)
            raise TypeError(f"{call}: {name} is {dtype}, must be a floating-point array")
    if len({x.dtype for x in arrays.values()}) > 1:
        raise TypeError(
            f"{call}: q is {q.dtype}, k {k.dtype}, v {v.dtype}; they must have one dtype, so cast "
            "with astype what should be computed in less or more bits"
        )
    if not all(isinstance(size, int) for x in (q, k, v) for size in x.shape):
        raise TypeError(
            f"{call}: q {q.shape}, k {k.shape}, v {v.shape} have symbolic sizes, which must be "
            "known when tracing; export a program for each shape"
        )
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"{call}: q, k, v must be [batch, length, heads, size]; "
            f"got {q.shape}, {k.shape}, {v.shape}"
        )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"{call}: q {q.shape}, k {k.shape}, v {v.shape}: k must share q's batch and head size, "
            "v must share k's batch, length and heads"
        )
    n, heads, size = q.shape[2], k.shape[2], q.shape[3]
    if not (n and heads and size) or n % heads:
        raise ValueError(
            f"{call}: {n} query heads must be a multiple of {heads} key heads; neither they nor "
            f"their size {size} may be 0"
        )


def _check_positions(call: str, q, k, q_index, k_index, q_segments, k_segments, k_lengths=None):
    """Raises unless indices, segments and lengths are integers whose shapes fit q and k.

    Segments may also be bool.
    """
    (b, t), s = q.shape[:2], k.shape[1]
    if (q_segments is None) != (k_segments is None):
        raise ValueError(f"{call}: give both q_segments and k_segments, or neither")
    for name, x, shapes in (
        ("q_index", q_index, [(t,), (1, t), (b, t)]),
        ("k_index", k_index, [(s,), (1, s), (b, s)]),
        ("q_segments", q_segments, [(b, t)]),
        ("k_segments", k_segments, [(b, s)]),
        ("k_lengths", k_lengths, [(b,)]),
    ):
        if x is None:
            continue
        x = _array(call, name, x)
        if x.shape not in shapes:
            rule = " or ".join(map(str, dict.fromkeys([shapes[0], shapes[-1]])))
            raise ValueError(f"{call}: {name} has shape {x.shape}, must be {rule}")
        flags = x.dtype == bool and name.endswith("segments")
        if x.size and not (flags or jnp.issubdtype(x.dtype, jnp.integer)):
            raise TypeError(f"{call}: {name} is {x.dtype}, must be integers")


def _array(call: str, name: str, value):
    try:
        return value if isinstance(value, jax.Array) else np.asarray(value)
    except ValueError:
        raise ValueError(f"{call}: {name} has rows of different lengths") from None


def check_options(q, k, mask, soft_cap, bias, sinks, table, splits, layout, key_bits):
    """Raises for options of `flash` that are invalid or do not fit q and k."""
    (b, t, n), (s, heads) = q.shape[:3], k.shape[1:3]
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(
            f"flash: the mask is a {type(mask).__name__}, must be an expression such as "
            "causal() & window(4096); an array of visible blocks goes through "
            "tables.from_block_mask(...) to `table`, padding through `k_lengths`, documents "
            "through `q_segments` and `k_segments`"
        )
    if isinstance(soft_cap, jax.core.Tracer) or (
        soft_cap is not None and not (_is_finite(soft_cap) and soft_cap > 0)
    ):
        raise ValueError(
            f"flash: soft_cap={_shown(soft_cap)} must be a number above 0, known when "
            "tracing; None leaves logits as is"
        )
    if bias is not None and not hasattr(bias, "num_heads"):
        raise TypeError(
            f"flash: the bias is a {type(bias).__name__}, must be an Alibi or a RelativeBias: "
            "functions of the distance, as an array of [T, S] is never made"
        )
    if bias is not None and bias.num_heads != n:
        raise ValueError(f"flash: the bias is for {bias.num_heads} heads, q has {n}")
    if sinks is not None and (shape := _array("flash", "sinks", sinks).shape) != (n,):
        raise ValueError(f"flash: sinks has shape {shape}, must be ({n},)")
    if splits is not None:
        integer("flash: splits", splits, 1)
    _check_layout("flash", layout)
    if table is not None:
        _check_table(table, b, t, n, s, heads)
    if key_bits is not None:
        _check_key_bits(key_bits, (b, t, num_words(s)), table, layout)


def _check_key_bits(key_bits, shape: tuple[int, int, int], table, layout):
    bits = _array("flash", "key_bits", key_bits)
    if bits.dtype != np.uint32 or bits.shape != shape:
        raise ValueError(
            f"flash: key_bits is {bits.dtype} {bits.shape}, must be uint32 {shape}: a bit of each"
            " query and key, which pallas_kernels.key_bits.pack makes"
        )
    if table is not None or layout is not None:
        raise ValueError(
            "flash: key_bits stand alone, without a table and without a layout; on a mesh call"
            " flash inside jax.shard_map, with the queries of each device and all keys"
        )


def _check_layout(call: str, layout):
    if layout is not None and not hasattr(layout, "fitting"):
        raise TypeError(f"{call}: layout is a {type(layout).__name__}, must be a Layout")


def _check_table(table, b: int, t: int, n: int, s: int, heads: int):
    if not isinstance(table, BlockTable):
        raise TypeError(
            f"flash: the table is a {type(table).__name__}, must be a BlockTable; "
            "tables.from_block_mask makes one of an array of visible blocks"
        )
    rows, table_heads, blocks = table.seen.shape
    expected, key_blocks = -(-t // table.q_block), -(-s // table.k_block)
    if rows not in (1, b) or table_heads not in (1, heads, n) or blocks != expected:
        raise ValueError(
            f"flash: table of {rows} rows, {table_heads} heads and {blocks} query blocks; must be "
            f"1 or {b} rows, 1, {heads} or {n} heads, and {expected} blocks of {table.q_block} "
            f"queries (keys: {key_blocks} blocks of {table.k_block})"
        )
    if table.static and np.max(table.index, initial=0, where=table.listed) >= max(key_blocks, 1):
        raise ValueError(
            f"flash: the table lists key block {np.max(table.index)}, but {s} keys are "
            f"{key_blocks} blocks of {table.k_block}; make it with keys={s}"
        )


def check_shapes(call: str, arrays: dict, segments, layout, sizes: dict[str, int] | None = None):
    """Raises unless arrays have floating-point dtypes and shapes of equal sizes for equal letters.

    Args:
      arrays: (array, one letter for each axis) by name; an array may be None.
      segments: None, or integers or bool [B, T].
      layout: None, or a Layout.
      sizes: sizes of letters that are known before.
    """
    sizes = dict(sizes or {})
    for name, (x, axes) in arrays.items():
        if x is None:
            continue
        if not (hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)):
            dtype = getattr(x, "dtype", type(x).__name__)
            raise TypeError(f"{call}: {name} is {dtype}, must be a floating-point array")
        by_axis = dict(zip(axes, x.shape))
        if x.ndim != len(axes) or any(sizes.get(a, size) != size for a, size in by_axis.items()):
            rule = ", ".join(f"{a} = {sizes[a]}" if a in sizes else a for a in axes)
            raise ValueError(f"{call}: {name} has shape {x.shape}, must be [{rule}]")
        sizes |= by_axis
    _check_layout(call, layout)
    if segments is None:
        return
    segments = _array(call, "segments", segments)
    if segments.shape != (sizes["B"], sizes["T"]):
        raise ValueError(
            f"{call}: segments has shape {segments.shape}, must be {(sizes['B'], sizes['T'])}"
        )
    if not (segments.dtype == bool or jnp.issubdtype(segments.dtype, jnp.integer)):
        raise TypeError(f"{call}: segments is {segments.dtype}, must be integers")


def on_any_mesh(attention: Callable, second: tuple[int | None, ...] = (0, 1, 2)) -> Callable:
    """Wraps `attention(q, ...) -> (out, lse)` so that it runs under Explicit mesh axes.

    `jax.make_mesh` makes such axes by default. The loops of the implementations do not annotate the
    sharding of each of their steps, so the call runs with these axes Auto. The first result is
    sharded like the rows, length and heads of q.

    Args:
      attention: a function of one or more arrays that returns two.
      second: for each leading axis of the second result, the axis of q like which it is sharded;
        None if it is not.

    Raises:
      ValueError: the call is inside a `jax.shard_map` that checks which values vary (check_vma).
    """
    first_name = next(iter(inspect.signature(attention).parameters))

    @functools.wraps(attention)
    def run(*args, **options):
        name = options.get("implementation")
        if name is not None and not isinstance(name, str):
            kind = type(name).__name__
            raise TypeError(f"{attention.__name__}: implementation is a {kind}, must be a name")
        leaves, tree = jax.tree.flatten((args, options))
        arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)}
        if name != REFERENCE:
            _check_manual(attention.__name__, arrays.values())
        sharding = _explicit(arrays.values())
        if sharding is None or options.get("layout") is not None:
            return attention(*args, **options)

        def automatic(arrays):
            filled = [arrays.get(i, x) for i, x in enumerate(leaves)]
            args, options = jax.tree.unflatten(tree, filled)
            return attention(*args, **options)

        q = args[0] if args else options[first_name]
        mesh, spec = sharding.mesh, jax.typeof(q).sharding.spec
        specs = spec[:3], [None if axis is None else spec[axis] for axis in second]
        on = tuple(NamedSharding(mesh, PartitionSpec(*axes)) for axes in specs)
        return jax.sharding.auto_axes(automatic, out_sharding=on)(arrays)

    return run


def _explicit(arrays):
    """Returns the sharding of the first array on a mesh with Explicit axes, or None."""
    shardings = (jax.typeof(x).sharding for x in arrays)
    return next((x for x in shardings if x.mesh.explicit_axes), None)


def _check_manual(call: str, arrays):
    axes = sorted({str(axis) for x in arrays for axis in jax.typeof(x).mat.varying})
    if axes:
        raise ValueError(
            f"{call}: inside a shard_map over {', '.join(axes)} that checks which values vary; "
            "give jax.shard_map check_vma=False, or leave it out and give a Layout"
        )
