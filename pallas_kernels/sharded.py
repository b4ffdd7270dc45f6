"""Attention over a mesh: rows, heads and the length of q, k, v are sharded over devices.

Rows and heads are independent. If the length is sharded over c devices, each needs keys of others:

- "ring": queries stay on their device. Keys and values move around the ring of devices in c - 1
  hops, and the partial result of every hop is merged by log-sum-exp (Ring Attention, Liu et al.
  2023, arXiv 2310.01889). No device ever holds more than two parts of the keys. The backward pass
  repeats the hops with the log-sum-exp over all keys; the gradients of keys and values move along
  with them.
- "all_to_all": an exchange gives every device the whole length of some heads, and a second one
  returns the results (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509). The number of heads
  limits the number of devices.
- "usp": groups of neighbouring devices exchange heads for the tokens of their group, and keys move
  around a ring of groups (Unified Sequence Parallelism, Fang and Zhao 2024, arXiv 2405.07719). The
  exchange is inside a host, where links are fast, and the ring between hosts.
- "all_gather": every device receives all keys and values, and attends with its own queries. The
  gradients of keys and values are summed and scattered in float32.
- "split_keys": only keys and values are sharded, such as those of a cache. Every device attends
  with all queries to its keys, and one exchange of the partial results (out, lse) merges them
  (Flash-Decoding, Dao et al. 2023, over devices). If the number of devices divides that of queries,
  a device receives the partials of its part of the queries, and the result is sharded by length.
  Otherwise, such as in a decoding step, each device receives all partials.

Tokens may be in any order, which `q_index` and `k_index` define. With the order `zigzag` all
devices have the same work under a causal mask.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Operands, Spec
from pallas_kernels.masks import Mask, PerHead, by_heads
from pallas_kernels.online_softmax import merge, merge_parts

METHODS = ("ring", "all_to_all", "usp", "all_gather", "split_keys")


@dataclass(frozen=True)
class Layout:
    """The mesh axes over which q, k and v [B, T, N, H] are sharded."""

    mesh: jax.sharding.Mesh
    rows: tuple[str, ...] = ()  # axes that shard the rows of the batch
    heads: str | None = None  # the axis that shards the heads
    length: str | None = None  # the axis that shards the lengths of queries and keys
    method: str = "ring"  # of `METHODS`: what devices exchange if the length is sharded
    group: int = 1  # neighbouring devices that exchange heads for tokens, for the method `usp`

    def __post_init__(self):
        if self.method not in METHODS:
            raise ValueError(f"Layout(method={self.method!r}): choose one of {', '.join(METHODS)}")
        parts = (self.rows, self.heads, self.length)
        used = [a for x in parts for a in ((x,) if isinstance(x, str) else x or ())]
        names = self.mesh.axis_names
        if len(set(used)) < len(used) or not set(used) <= set(names):
            raise ValueError(
                f"Layout: rows, heads and length use the axes {used}; each may be used once, of "
                f"those of the mesh: {list(names)}"
            )

    @property
    def num_exchanging(self) -> int:
        """The number of neighbouring devices that exchange heads for tokens."""
        if self.length is None or self.method not in ("all_to_all", "usp"):
            return 1
        return self.group if self.method == "usp" else self.size(self.length)

    def size(self, axis: str | tuple[str, ...] | None) -> int:
        """Returns the number of devices along an axis or several axes together; 1 for None."""
        axes = (axis,) if isinstance(axis, str) else axis or ()
        return math.prod(self.mesh.shape[a] for a in axes)

    def fitting(self, q, k) -> Layout:
        """Returns the layout without the axes that do not divide rows or heads.

        Raises:
          ValueError: the axis `length` does not divide the number of keys, or of queries if they
            are sharded.
        """
        rows = self.rows if q.shape[0] % self.size(self.rows) == 0 else ()
        heads = self.heads if q.shape[2] % self.size(self.heads) == 0 else None
        length = self.length if self.size(self.length) > 1 else None
        count = self.size(length)
        if self.method == "usp" and count % self.group:
            raise ValueError(
                f"usp: the {count} devices of the mesh axis {length!r} cannot be split into groups"
                f" of {self.group}; give a group that divides them"
            )
        lengths = {"queries": q.shape[1], "keys": k.shape[1]}
        if self.method == "split_keys":
            del lengths["queries"]
        for name, tokens in lengths.items():
            if tokens % count:
                near = -(-tokens // count) * count
                raise ValueError(
                    f"{tokens} {name} cannot be split over the {count} devices of the mesh axis "
                    f"{length!r}; the next length that can: {near}"
                )
        return replace(self, rows=rows, heads=heads, length=length)

    def of_tokens(self, x) -> Layout:
        """Returns the layout of a recurrence over x [B, T, N, ...], `fitting` to it.

        The length is not split if there are fewer tokens than devices, such as the one of a
        decoding step, nor that of queries with the method `split_keys` if it is no multiple.

        Raises:
          ValueError: the axis `length` does not divide the number of tokens.
        """
        count = self.size(self.length)
        is_whole = x.shape[1] < count or (self.method == "split_keys" and x.shape[1] % count)
        layout = replace(self, length=None) if is_whole else self
        return layout.fitting(x, x)

    def spec(self, x, *, heads: bool = False) -> PartitionSpec:
        """Returns the PartitionSpec of x [1 or B, T], or with `heads` of x [B, T, N, ...]."""
        rows = self.rows if self.rows and x.shape[0] > 1 else None
        return PartitionSpec(rows, self.length, *((self.heads,) if heads else ()))

    @property
    def of_queries(self) -> Layout:
        """The layout of queries, which are not sharded by length with the method `split_keys`."""
        return replace(self, length=None) if self.method == "split_keys" else self


def zigzag(length: int, devices: int) -> np.ndarray:
    """Returns int32 [length], an order of tokens that balances the work of a causal mask.

    The text is split into 2 c pieces for c devices; device i holds pieces i and 2 c - 1 - i. One of
    them sees few keys and the other sees many (Llama 3, Grattafiori et al. 2024, sec. 3.3.2).
    """
    if length % (2 * devices):
        near = -(-length // (2 * devices)) * 2 * devices
        raise ValueError(
            f"{length} tokens cannot be split into 2 x {devices} equal pieces; the next length "
            f"that can: {near}"
        )
    pieces = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    order = [piece for i in range(devices) for piece in (i, 2 * devices - 1 - i)]
    return pieces[order].reshape(-1)


def over_mesh(q, k, v, operands: Operands, spec: Spec, implementation, layout: Layout):
    """Returns (out, lse) of attention that is sharded by `layout`."""
    if dispatch.user_table(operands, spec) is not None:
        raise ValueError("flash: a table lists blocks of a whole row; give a table or a layout")
    layout = layout.fitting(q, k)
    parts = layout.size(layout.length) // layout.num_exchanging
    hops = 1
    if layout.method in ("ring", "usp"):
        hops = _hops(spec.mask, q, k, operands, parts)
    if parts > 1:
        operands = _with_indices(q, k, operands)

    def local(q, k, v, operands):
        if layout.num_exchanging > 1:
            return _exchanged(implementation, layout, hops, q, k, v, operands, spec)
        if layout.method == "all_gather" and layout.length is not None:
            k, v = (_all_gather(x, layout.length) for x in (k, v))
            join = functools.partial(lax.all_gather, axis_name=layout.length, axis=1, tiled=True)
            operands = _joined_keys(operands, join)
        mask = _of_shard(spec.mask, layout.size(layout.heads))
        ring = _Ring(implementation, layout, hops, replace(spec, mask=mask))
        out, lse = _local(q, k, v, operands, ring)
        if layout.length is None or layout.method != "split_keys":
            return out, lse
        return _merged(out, lse, layout)

    return _on_shards(local, q, k, v, operands, layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _all_gather(x, axis: str):
    """Gathers the tokens of x [B, S, K, H]; their gradients are summed in float32."""
    return lax.all_gather(x, axis, axis=1, tiled=True)


def _scatter_gradient(axis, _, dx):
    total = lax.psum_scatter(dx.astype(jnp.float32), axis, scatter_dimension=1, tiled=True)
    return (total.astype(dx.dtype),)


_all_gather.defvjp(lambda x, axis: (_all_gather(x, axis), None), _scatter_gradient)


def _merged(out, lse, layout: Layout):
    """Merges the partials of all devices, for all queries or for this device's part of them."""
    axis, parts, rest = layout.length, layout.size(layout.length), out.shape[1:]
    if rest[0] % parts:
        # One collective, as the time of a decoding step is that of starting it.
        pair = jnp.concatenate([out.astype(jnp.float32), lse[..., None]], -1)
        pair = lax.all_gather(pair, axis)
        merged, lse = merge_parts(pair[..., :-1], pair[..., -1])
        return merged.astype(out.dtype), lse

    def exchange(x):
        x = jnp.moveaxis(x.reshape(x.shape[0], parts, -1, *x.shape[2:]), 1, 0)
        return lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)

    return merge_parts(exchange(out), exchange(lse))


def gathered(run, q, k, v, operands: Operands, layout: Layout):
    """Calls `run(q, k, v, operands) -> (out, lse)` on each device's queries and heads and all keys.

    It gathers the keys of a sharded length, for attention that cannot be merged from parts.
    """
    layout = layout.fitting(q, k).of_queries
    if layout.length is not None:
        operands = _with_indices(q, k, operands)

    def local(q, k, v, operands):
        if layout.length is not None:
            join = functools.partial(lax.all_gather, axis_name=layout.length, axis=1, tiled=True)
            k, v = join(k), join(v)
            operands = _joined_keys(operands, join)
        return run(q, k, v, operands)

    return _on_shards(local, q, k, v, operands, layout)


def _on_shards(local, q, k, v, operands: Operands, layout: Layout):
    """Runs `local(q, k, v, operands) -> (out, lse)` on each device's shards."""
    k, v = jax.tree.map(lambda x: _shareable(x, layout.size(layout.heads)), (k, v))
    of_queries = layout.of_queries
    layouts = of_queries, layout, of_queries, layout  # of q_index, k_index, and segments
    positions = (
        None if x is None else each.spec(x) for x, each in zip(operands[:4], layouts, strict=True)
    )
    bias = jax.tree.map(
        lambda x: PartitionSpec(*(None,) * (x.ndim - 1), layout.heads), operands.bias
    )
    keys = layout.spec(k, heads=True)
    specs = of_queries.spec(q, heads=True), keys, keys, Operands(*positions, bias)
    is_sharded = q.shape[1] % layout.size(layout.length) == 0
    out_spec = (layout if is_sharded else of_queries).spec(q, heads=True)
    return on_shards(local, (q, k, v, operands), specs, (out_spec, out_spec), layout.mesh)


def on_shards(local, arrays, specs, out_specs, mesh: jax.sharding.Mesh):
    """Runs `local(*arrays)` on the shards of each device, with arrays sharded by `specs`."""
    if mesh.explicit_axes:  # the types of arrays contain their sharding, which must match
        on = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        arrays = jax.tree.map(jax.reshard, arrays, on)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    # Without jit shard_map has no symbolic zeros, which mark outputs that nothing depends on.
    return jax.jit(run)(*arrays)


def _joined_keys(operands: Operands, join) -> Operands:
    index, segments = (None if x is None else join(x) for x in (operands[1], operands[3]))
    return operands._replace(k_index=index, k_segments=segments)


def _with_indices(q, k, operands: Operands) -> Operands:
    """Returns the operands with explicit order indices, which are sharded like the tokens."""

    def explicit(index, x):
        return jnp.arange(x.shape[1], dtype=jnp.int32)[None] if index is None else index

    return operands._replace(q_index=explicit(operands[0], q), k_index=explicit(operands[1], k))


def _shareable(x, parts: int):
    """Returns x [B, S, K, H] with heads repeated until `parts` divides their number."""
    return jnp.repeat(x, math.lcm(x.shape[2], parts) // x.shape[2], axis=2)


@dataclass(frozen=True)
class _ByShard(Mask):
    """One mask for each device along the axes that shard the heads."""

    masks: tuple[Mask, ...]

    @property
    def arithmetic(self) -> bool:
        return all(mask.arithmetic for mask in self.masks)


def _of_shard(mask: Mask, shards: int) -> Mask:
    """Returns the mask of one shard's heads; parts that differ between shards are `_ByShard`."""
    if not isinstance(mask, PerHead) or shards == 1:
        return mask
    each = [part for part, count in mask.parts for _ in range(count)]
    heads = mask.heads // shards
    of_head = [tuple(each[s * heads + h] for s in range(shards)) for h in range(heads)]
    runs = [(masks, len(list(run))) for masks, run in itertools.groupby(of_head)]
    parts = [(m[0] if len(set(m)) == 1 else _ByShard(m), count) for m, count in runs]
    return parts[0][0] if len(parts) == 1 else PerHead(tuple(parts))


def _hops(mask: Mask, q, k, operands: Operands, count: int) -> int:
    """Returns how many of `count` parts of the keys a part of the queries needs.

    These are all unless the mask hides the rest.

    It is all, too, unless tokens are in order and the mask depends on differences of indices only.
    """
    ordered = operands.q_index is None and operands.k_index is None
    if not (ordered and q.shape[1] == k.shape[1] and mask.shift_invariant):
        return count
    part, first = q.shape[1] // count, np.arange(count)
    lo, hi = first * part, first * part + part - 1

    def meet(hop):
        at = (first - hop) % count
        return any(
            np.any(m.bounds(lo, hi, lo[at], hi[at])[0]) for m, _ in by_heads(mask, q.shape[2])
        )

    return max((hop for hop in range(count) if meet(hop)), default=0) + 1


def _exchanged(implementation, layout: Layout, hops: int, q, k, v, operands: Operands, spec: Spec):
    """Computes attention of some heads over the tokens of a group, between two exchanges."""
    axis, parts = layout.length, layout.num_exchanging
    if q.shape[2] % parts:
        raise ValueError(
            f"{layout.method}: {q.shape[2]} query heads of a device cannot be shared among the"
            f" {parts} devices of the mesh axis {axis!r}; use method 'ring'"
        )
    k, v = jax.tree.map(lambda x: _shareable(x, parts), (k, v))
    count = layout.size(axis)
    groups = np.arange(count).reshape(-1, parts).tolist() if parts < count else None
    exchange = functools.partial(
        lax.all_to_all, axis_name=axis, axis_index_groups=groups, tiled=True
    )
    to_heads = functools.partial(exchange, split_axis=2, concat_axis=1)
    to_length = functools.partial(exchange, split_axis=1, concat_axis=2)
    join = functools.partial(
        lax.all_gather, axis_name=axis, axis_index_groups=groups, axis=1, tiled=True
    )

    def slice_heads(x):
        size, place = x.shape[-1] // parts, lax.axis_index(axis) % parts
        return lax.dynamic_slice_in_dim(x, place * size, size, x.ndim - 1)

    positions = (None if x is None else join(x) for x in operands[:4])
    operands = Operands(*positions, jax.tree.map(slice_heads, operands.bias))
    shards = layout.size(layout.heads) * parts
    spec = replace(spec, mask=_of_shard(spec.mask, shards))
    ring = _Ring(implementation, layout, hops, spec)
    out, lse = _local(*jax.tree.map(to_heads, (q, k, v)), operands, ring)
    return to_length(out), to_length(lse)


@dataclass(frozen=True)
class _Ring:
    """The static part of a device's attention over keys of `hops` devices, its own first."""

    implementation: str | None
    layout: Layout
    hops: int
    spec: Spec


def _local(q, k, v, operands: Operands, ring: _Ring):
    """Returns (out, lse) of this device's queries and heads."""
    results = []
    for *arrays, spec in dispatch.split_heads(q, k, v, operands, ring.spec):
        results.append(_ring(*arrays, replace(ring, spec=spec)))
    return dispatch.join_heads(results)


def _ring_forward(arrays, operands: Operands, ring: _Ring):
    q, k, v = arrays

    def add(partial, keys):
        operands_of_keys = _with_keys(operands, keys)
        return merge([partial, _run("forward", ring, (q, *keys[:2]), operands_of_keys)])

    keys = k, v, operands.k_index, operands.k_segments
    if ring.hops == 1:
        return _run("forward", ring, (q, k, v), operands)
    empty = jnp.zeros((*q.shape[:3], v.shape[3]), jnp.float32)
    start = (empty, jnp.full(q.shape[:3], -jnp.inf, jnp.float32)), keys

    def hop(carry, _):
        partial, keys = carry
        # The next keys are sent while these are multiplied.
        return (add(partial, keys), _send(keys, ring.layout, 1)), None

    (partial, keys), _ = lax.scan(hop, start, None, length=ring.hops - 1)
    out, lse = add(partial, keys)
    return out.astype(q.dtype), lse


def _ring_backward(arrays, operands: Operands, ring: _Ring):
    q, k, v, *rows = arrays

    def add(sums, keys):
        """Adds the cotangents of these keys; lse, and so the probabilities, are over all keys."""
        dq, dk, dv, d_bias = _run(
            "backward", ring, (q, *keys[:2], *rows), _with_keys(operands, keys)
        )
        return jax.tree.map(lambda a, x: a + x.astype(a.dtype), sums, ((dq, d_bias), (dk, dv)))

    keys, hops = (k, v, operands.k_index, operands.k_segments), ring.hops
    sums = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), ((q, operands.bias), (k, v)))

    def follow(sums):
        """Sends the cotangents of keys after these keys."""
        fixed, travelling = sums
        return fixed, _send(travelling, ring.layout, 1)

    def hop(carry, _):
        sums, keys = carry
        # Neither message depends on the products with these keys, so both are sent meanwhile.
        return (add(follow(sums), keys), _send(keys, ring.layout, 1)), None

    sums = add(sums, keys)
    if hops > 1:
        carry = sums, _send(keys, ring.layout, 1)
        (sums, keys), _ = lax.scan(hop, carry, None, length=hops - 2)
        sums = add(follow(sums), keys)
    (dq, d_bias), travelling = sums
    # The cotangents of keys and values return to the device of those keys.
    travelling = jax.tree.map(lambda x, like: x.astype(like.dtype), travelling, (k, v))
    dk, dv = _send(travelling, ring.layout, 1 - hops) if hops > 1 else travelling
    return dq.astype(q.dtype), dk, dv, d_bias


_ring = dispatch.differentiable(_ring_forward, _ring_backward, name="attention")


def _with_keys(operands: Operands, keys) -> Operands:
    return operands._replace(k_index=keys[2], k_segments=keys[3])


def _send(tree, layout: Layout, hops: int):
    """Sends every array of the tree to the device, or group, `hops` further along the ring."""
    count, step = layout.size(layout.length), hops * layout.num_exchanging
    pairs = [(i, (i + step) % count) for i in range(count)]
    return jax.tree.map(lambda x: lax.ppermute(x, layout.length, pairs), tree)


def _run(direction: str, ring: _Ring, arrays, operands: Operands):
    """Runs a backend's `forward` or `backward` with the mask of this device."""
    mask = ring.spec.mask
    masks = mask.masks if isinstance(mask, _ByShard) else (mask,)
    different = tuple(dict.fromkeys(masks))

    def under(mask):
        spec = replace(ring.spec, mask=mask)
        static = ring.implementation, spec
        return lambda: dispatch.choose_and_run(direction, arrays, operands, static)

    if len(different) == 1:
        return under(different[0])()
    which = jnp.array([different.index(mask) for mask in masks])
    layout, shard = ring.layout, 0
    if layout.heads is not None:
        shard = lax.axis_index(layout.heads)
    if layout.num_exchanging > 1:
        place = lax.axis_index(layout.length) % layout.num_exchanging
        shard = shard * layout.num_exchanging + place
    return lax.switch(which[shard], [under(mask) for mask in different])
