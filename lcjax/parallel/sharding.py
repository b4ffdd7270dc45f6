"""Mesh axes, and the table of rules by which parameters and batches are sharded over them.

Mesh axes: `data` holds copies of the model, `fsdp` splits parameters and batch together (ZeRO,
Rajbhandari et al. 2020), `tensor` splits heads and the feed-forward width (Shoeybi et al. 2019),
`context` cuts each text, and the slots of a KV cache, in parts (`pallas_kernels.sharded` puts
attention together), `expert` splits the experts of mixtures, and the batch
(`lcjax.models.experts`).

Devices may be in several slices of TPUs, or NVLink domains of GPUs, with slow links between them.
An axis that spans slices is split into as many contiguous parts, each within a slice.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lcjax.errors import InputError, OneOf, check_fields, check_integer
from pallas_kernels import Layout

AXES = ("data", "fsdp", "tensor", "context", "expert")
ROWS = ("data", "fsdp", "expert")  # the axes over which the rows of a batch are spread
LENGTH = "context"  # the axis over which the tokens of a row are spread

# Axes that may span slices, in the order in which they do. Copies of the model send gradients once
# in an update; all other axes exchange weights or activations in every layer. A v5p chip sends 600
# GB/s within its slice and 6 out of it, an H100 450 GB/s within its NVLink domain and 50 out of it
# (`lcjax.cost.chips`), so other axes than `data` span slices of TPUs only if a user says so.
_SPANNING_TPUS = ("data",)
_SPANNING = ("data", "fsdp", "context", "expert", "tensor")

# Number of devices up to which XLA overlaps a reduce-scatter with the product before it: libtpu
# 0.0.42 does so on v5e:4x4 and not on v5e:8x8.
_HIDDEN = 16

# (pattern at the end of a parameter's path, mesh axis of each array axis). The first match counts.
# Stacked layers have one more axis in front, which is never split. An array axis of the rule `fsdp`
# is also split over `context`, and over `expert` if no other array axis is: devices along these
# axes need the same weights at the same time.
_RULES = (
    (r"(layer_)?embed/embedding", ("tensor", "fsdp")),
    (r"layer_embed/projection/kernel", ("fsdp", "tensor")),
    (r"embedding_gate/kernel", ("fsdp", None)),
    (r"embedding_out/kernel", (None, "fsdp")),
    (r"position/embedding", (None, "fsdp")),
    (r"position/bias", (None, "tensor")),
    (r"head/kernel", ("fsdp", "tensor")),
    (r"head/bias", ("tensor",)),
    (r"(query|key|value|output_gate)/kernel", ("fsdp", "tensor", None)),
    (r"mixer/(beta|decay)/kernel", ("fsdp", "tensor")),
    (r"mixer/(query|key|value)_taps", (None, "tensor", None)),
    (r"mixer/decay_(rate|bias)", ("tensor",)),
    (r"attention/position_key", ("fsdp", "tensor", None)),
    (r"attention/(content|position)_bias", ("tensor", None)),
    (r"attention/sinks", ("tensor",)),
    (r"pattern/(index_query|block_query|branch_gate)", ("fsdp", None, None)),
    (r"pattern/(index_key|index_weight|block_key)", ("fsdp", None)),
    (r"(query|key|value|output_gate)/bias", ("tensor", None)),
    (r"(query|key|value)/lora_b", (None, "tensor", None)),
    (r"(attention|memory|mixer)/out/kernel", ("tensor", None, "fsdp")),
    (r"(attention|mixer)/out/lora_a", ("tensor", None, None)),
    (r"experts/(gate|up)/kernel", ("expert", "fsdp", "tensor")),
    (r"experts/down/kernel", ("expert", "tensor", "fsdp")),
    (r"experts/(gate|up)/bias", ("expert", "tensor")),
    (r"experts/down/bias", ("expert", None)),
    (r"(gate|up)/kernel", ("fsdp", "tensor")),
    (r"(gate|up)/bias", ("tensor",)),
    (r"(gate|up)/lora_b", (None, "tensor")),
    (r"down/kernel", ("tensor", "fsdp")),
    (r"down/lora_a", ("tensor", None)),
    # Codes of kernels (`lcjax.models.weight_storage`) have one axis of inputs, nf4 one of the codes
    # of a block as well: blocks are whole on a device. Scales without a rule are small.
    (r"(query|key|value|output_gate)/kernel/nf4", ("fsdp", None, "tensor", None)),
    (r"(query|key|value|output_gate)/kernel/(absmax|int8)", ("fsdp", "tensor", None)),
    (r"(query|key|value|output_gate)/kernel/scale", ("tensor", None)),
    (r"(attention|mixer)/out/kernel/nf4", ("tensor", None, "fsdp")),
    (r"(attention|mixer)/out/kernel/(absmax|int8)", ("tensor", "fsdp")),
    (r"experts/(gate|up)/kernel/nf4", ("expert", "fsdp", None, "tensor")),
    (r"experts/(gate|up)/kernel/(absmax|int8)", ("expert", "fsdp", "tensor")),
    (r"experts/(gate|up)/kernel/scale", ("expert", "tensor")),
    (r"experts/down/kernel/nf4", ("expert", "tensor", None, "fsdp")),
    (r"experts/down/kernel/(absmax|int8)", ("expert", "tensor", "fsdp")),
    (r"experts/down/kernel/scale", ("expert", "fsdp")),
    (r"(gate|up)/kernel/nf4", ("fsdp", None, "tensor")),
    (r"(gate|up)/kernel/(absmax|int8)", ("fsdp", "tensor")),
    (r"(gate|up)/kernel/scale", ("tensor",)),
    (r"down/kernel/nf4", ("tensor", None, "fsdp")),
    (r"down/kernel/(absmax|int8)", ("tensor", "fsdp")),
    (r"(out|down)/kernel/scale", ("fsdp",)),
)


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Number of devices along each mesh axis; -1 (at most one axis) takes the remaining ones."""

    data: int = 1  # copies of the model, each reading its own part of the batch
    fsdp: int = -1  # parameters, optimizer state and batch split
    tensor: int = 1  # heads and feed-forward width split
    context: int = 1  # number of parts of each text, for rows too long for one device
    expert: int = 1  # experts of a mixture and batch split
    # Axes that may span slices of TPUs or NVLink domains of GPUs, the first one first; []: data on
    # TPUs, all on GPUs
    slices: tuple[Annotated[str, OneOf(AXES)], ...] = ()

    def __post_init__(self):
        check_fields("mesh", self)
        sizes = [getattr(self, axis) for axis in AXES]
        for axis, size in zip(AXES, sizes, strict=True):
            if isinstance(size, np.ndarray) or size != -1:
                check_integer(f"mesh.{axis}", size, 1, "-1 takes the devices that are left")
        if sizes.count(-1) > 1:
            raise InputError(f"mesh={sizes} for axes {AXES}: only one size may be -1")

    @property
    def shape(self) -> dict[str, int]:
        """The sizes of the axes by name, as those of a `jax.sharding.Mesh`.

        Raises:
          InputError: a size is -1.
        """
        sizes = {axis: getattr(self, axis) for axis in AXES}
        if -1 in sizes.values():
            raise InputError(f"mesh={sizes}: write how many devices lie along each axis, not -1")
        return sizes


def make_mesh(shape: Mesh = Mesh(), devices: list[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Returns a mesh with the axes `AXES` of `devices`; None: of all devices.

    Raises:
      InputError: the sizes do not fit the number of devices, or of slices.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_sizes(shape, len(devices))
    sizes = tuple(shape.shape.values())
    kinds = (AxisType.Auto,) * len(AXES)
    counts = Counter(map(slice_of, devices))
    if len(counts) > 1 and len({*counts.values()}) == 1:  # unequal ones have no common layout
        spans = spans_of_slices(shape, len(counts), tpu=devices[0].platform == "tpu")
        inside = tuple(size // spans[axis] for axis, size in shape.shape.items())
        grid = mesh_utils.create_hybrid_device_mesh(
            *(inside, tuple(spans.values()), devices),
            process_is_granule=all(slice_of(x) == x.process_index for x in devices),
            allow_split_physical_axes=True,
        )
        return jax.sharding.Mesh(grid, AXES, axis_types=kinds)
    try:
        return jax.make_mesh(sizes, AXES, axis_types=kinds, devices=devices)
    except NotImplementedError:  # such as 4 devices of an axis of 8 in a torus
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return jax.sharding.Mesh(grid, AXES, axis_types=kinds)


def slice_of(device: jax.Device) -> int:
    """Returns the number of the slice of TPUs, NVLink domain of GPUs, or process of the device."""
    place = getattr(device, "slice_index", None)
    # XLA's descriptions of GPUs that are not here have no slices, but processes (`cost.compilers`).
    described = device.platform == "gpu" and device.client.runtime_type == "compile_only_runtime"
    if place is None or described:
        place = 0 if device.platform == "tpu" else device.process_index
    return place


def slices_along(mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Returns over how many slices each axis of a mesh is spread."""
    slices = np.vectorize(slice_of, otypes=[int])(mesh.devices)
    lines = {name: np.moveaxis(slices, i, 0) for i, name in enumerate(mesh.axis_names)}
    return {name: len({*line.reshape(len(line), -1)[:, 0]}) for name, line in lines.items()}


def spans_of_slices(shape: Mesh, slices: int, *, tpu: bool) -> dict[str, int]:
    """Returns into how many slices each axis is split; the product is the number of slices.

    Args:
      shape: sizes of the axes, without -1.
      slices: number of slices, of equally many devices each.
      tpu: whether the devices are TPUs.

    Raises:
      InputError: the axes that may span slices cannot be split into as many.
    """
    axes, sizes = shape.slices or (_SPANNING_TPUS if tpu else _SPANNING), shape.shape
    if spans := _split(sizes, axes, slices):
        return spans
    ways, data = [], math.lcm(sizes["data"], slices)
    # As many devices, with a part of those along fsdp for more copies of the model.
    if "data" in axes and sizes["data"] * sizes["fsdp"] % data == 0:
        ways.append(f"set --mesh.data={data} --mesh.fsdp=-1")
    wider = (axis for axis in _SPANNING if _split(sizes, (*axes, axis), slices))
    if axis := next(wider, None):
        names = ",".join([*axes, axis])
        ways.append(f"let {axis} span slices, over slower links: --mesh.slices=[{names}]")
    product, names = math.prod(sizes[axis] for axis in axes), " x ".join(f"mesh.{a}" for a in axes)
    raise InputError(
        f"{names}={product} cannot be split over the {slices} slices of the devices;"
        f" {', or '.join(ways) or 'use one slice'}"
    )


def _split(sizes: dict[str, int], axes: Iterable[str], slices: int) -> dict[str, int] | None:
    """Returns the factors of `slices` by which axes are split, the first one first; None: none."""
    spans, rest = dict.fromkeys(AXES, 1), slices
    for axis in axes:
        spans[axis] = math.gcd(rest, sizes[axis])
        rest //= spans[axis]
    return spans if rest == 1 else None


def device_mesh(mesh: Mesh | jax.sharding.Mesh | None) -> jax.sharding.Mesh | None:
    """Returns a mesh with the axes `AXES`, all of type Auto; None stays None.

    Args:
      mesh: a `Mesh`, of all devices, or a `jax.sharding.Mesh` with some of the axes `AXES`, of any
        types; the others get size 1.

    Raises:
      InputError: the mesh has an axis of another name, or is no mesh.
    """
    if isinstance(mesh, Mesh):
        return make_mesh(mesh)
    if not isinstance(mesh, jax.sharding.Mesh | None):
        raise InputError(f"mesh={mesh!r:.40} must be an lcjax.Mesh or a jax.sharding.Mesh")
    kinds = (AxisType.Auto,) * len(AXES)
    if mesh is None or (mesh.axis_names == AXES and mesh.axis_types == kinds):
        return mesh
    if unknown := [str(axis) for axis in mesh.axis_names if axis not in AXES]:
        raise InputError(
            f"mesh: the axis {unknown[0]} of {dict(mesh.shape)} is none of {', '.join(AXES)}; name"
            " the axes so, or pass lcjax.Mesh(fsdp=..., tensor=...)"
        )
    order = [mesh.axis_names.index(axis) for axis in AXES if axis in mesh.axis_names]
    sizes = [mesh.shape.get(axis, 1) for axis in AXES]
    devices = np.transpose(mesh.devices, order).reshape(sizes)
    return jax.sharding.Mesh(devices, AXES, axis_types=kinds)


def mesh_sizes(shape: Mesh, devices: int) -> Mesh:
    """Returns `shape` with -1 replaced by its size for this number of devices.

    Raises:
      InputError: the product of the sizes does not divide, or equal, the number of devices.
    """
    sizes = [getattr(shape, axis) for axis in AXES]
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and devices % fixed == 0:
        sizes[sizes.index(-1)] = devices // fixed
    elif fixed != devices:
        axis_sizes = {axis: size for axis, size in zip(AXES, sizes) if size > 1}
        product = " x ".join(f"mesh.{axis}={size}" for axis, size in axis_sizes.items()) or "mesh"
        product += "" if len(axis_sizes) == 1 else f" = {fixed}"
        rule = "divide" if -1 in sizes else "equal"
        raise InputError(
            f"{product} must {rule} the number of devices here, {devices}; set"
            f" {_fitting(axis_sizes, -1 in sizes, devices)}"
        )
    return dataclasses.replace(shape, **dict(zip(AXES, sizes, strict=True)))


def _fitting(axis_sizes: dict[str, int], rest: bool, devices: int) -> str:
    """Returns options that fit in place of `axis_sizes`; with `rest`, one axis has size -1."""
    changes = {} if rest else {"fsdp": -1}
    for axis, size in axis_sizes.items():
        if axis not in changes:
            fits = math.gcd(size, devices)
            devices //= fits
            changes |= {axis: fits} if fits < size else {}
    return " ".join(f"--mesh.{axis}={size}" for axis, size in changes.items())


def spec_of(path: str, shape: tuple[int, ...], mesh: Mesh | jax.sharding.Mesh) -> PartitionSpec:
    """Returns the partition of a parameter; an axis that the mesh does not divide stays whole."""
    axes = _rule(path, len(shape))
    together = _together(mesh, axes)
    return PartitionSpec(*(_over(mesh, axis, size, together) for axis, size in zip(axes, shape)))


def _rule(path: str, dimensions: int) -> tuple[str | None, ...]:
    """Returns the rule's axis for each axis of a parameter; empty if no rule matches."""
    for pattern, axes in _RULES:
        if re.search(rf"(^|/){pattern}$", path):
            return (None,) * (dimensions - len(axes)) + axes
    return ()


def replicated_bytes(
    mesh: Mesh | jax.sharding.Mesh, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, int]:
    """Returns the extra bytes on each device, by path, of parameters that axes do not divide.

    That is the difference to the bytes that a device would hold if the rule applied. Parameters
    that are split as their rule says are left out.
    """
    excess = {}
    for path, leaf in shapes.items():
        axes = {axis for axis in _rule(path, len(leaf.shape)) if axis}
        rule_axes = axes | {*_together(mesh, tuple(axes))} if "fsdp" in axes else axes
        num_parts, num_rule_parts = (
            _devices(mesh, tuple(over))
            for over in (spread_over(spec_of(path, leaf.shape, mesh)), rule_axes)
        )
        if num_parts < num_rule_parts:
            size = math.prod(leaf.shape) * leaf.dtype.itemsize
            excess[path] = size // num_parts - size // num_rule_parts
    return excess


def _together(mesh: Mesh | jax.sharding.Mesh, axes: tuple[str | None, ...]) -> tuple[str, ...]:
    """Returns the mesh axes over which an array axis of the rule `fsdp` is split."""
    others = (axis for axis in (LENGTH, "expert") if axis not in axes and mesh.shape[axis] > 1)
    return "fsdp", *others


def _over(
    mesh: Mesh | jax.sharding.Mesh, axis: str | None, size: int, together: tuple[str, ...]
) -> str | tuple[str, ...] | None:
    """Returns the mesh axes that shard a dimension of `size` under the rule `axis`; None: none."""
    if axis == "fsdp":
        for count in range(len(together), 1, -1):
            if size % _devices(mesh, together[:count]) == 0:
                return together[:count]
    return axis if axis and size % mesh.shape[axis] == 0 else None


def _devices(mesh: Mesh | jax.sharding.Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def path_of(keys: tuple[Any, ...]) -> str:
    """Returns a path of `jax.tree_util` keys as a string such as `layers/mlp/up/kernel`."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in keys)


def param_shardings(mesh: jax.sharding.Mesh, tree: Any) -> Any:
    """Returns the shardings of a tree of arrays or shapes whose paths end in parameter names.

    Optimizer states contain the parameter tree below their own names, so they match as well.
    """
    mesh = device_mesh(mesh)
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: NamedSharding(mesh, spec_of(path_of(keys), leaf.shape, mesh)), tree
    )


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding of a batch [B, ...]: rows over `ROWS`, other axes whole."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def process_rows(mesh: jax.sharding.Mesh, rows: int, process: int | None = None) -> list[int]:
    """Returns the indices of the rows of a batch that the devices of a process hold.

    Processes that share a tensor-parallel group hold the same rows, and the rows of a process need
    not be consecutive. The order is the one that `jax.make_array_from_process_local_data` expects.

    Args:
      mesh: of all devices.
      rows: number of rows of the batch.
      process: index of the process; None: this one.

    Raises:
      InputError: the devices along `ROWS` cannot share the rows equally.
    """
    process = jax.process_index() if process is None else process
    parts = _devices(mesh, ROWS)
    if rows < 1 or rows % parts:
        raise InputError(
            f"batch size {rows} must be a positive multiple of {row_axes(mesh.shape)} = {parts};"
            f" nearest: {max(1, round(rows / parts)) * parts}"
        )
    share = rows // parts
    axes = [[*mesh.shape].index(axis) for axis in ROWS]
    devices = np.moveaxis(mesh.devices, axes, range(len(axes)))
    return [
        part * share + row
        for part, group in enumerate(devices.reshape(parts, -1))
        if any(device.process_index == process for device in group)
        for row in range(share)
    ]


def row_axes(sizes: Mapping[str, int]) -> str:
    """Returns the axes of `ROWS` for an error message; `expert` only if its size is above 1."""
    return " x ".join(f"mesh.{axis}" for axis in ROWS if axis != "expert" or sizes[axis] > 1)


def rows_over(mesh: jax.sharding.Mesh | None, rows: int) -> int:
    """Returns the number of devices that share `rows`; 1 without a mesh that divides them."""
    devices = 1 if mesh is None else _devices(mesh, ROWS)
    return devices if rows % devices == 0 else 1


def padding_rows(mesh: jax.sharding.Mesh | None, rows: int) -> int:
    """Returns the number of rows to add so that all devices along `ROWS` hold equally many."""
    return 0 if mesh is None else -rows % _devices(mesh, ROWS)


def tokens_spec(mesh: jax.sharding.Mesh | None, rows: int, length: int) -> PartitionSpec:
    """Returns the partition of [B, T, ...]: rows over `ROWS`, tokens over `context`."""
    spread = ROWS if rows_over(mesh, rows) > 1 else None
    cut = mesh is not None and mesh.shape[LENGTH] > 1 and length % mesh.shape[LENGTH] == 0
    return PartitionSpec(spread, LENGTH if cut else None)


def keep_rows(x: jax.Array, mesh: jax.sharding.Mesh | None) -> jax.Array:
    """Constrains `x` [B, ...] to be sharded by rows over `ROWS` only."""
    if rows_over(mesh, x.shape[0]) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, batch_sharding(mesh))


def keep_tokens(x: jax.Array, mesh: jax.sharding.Mesh | None) -> jax.Array:
    """Constrains `x` [B, T, ...] to the partition of `tokens_spec`.

    Without it XLA propagates the embedding's sharding by width over `fsdp`, and every device holds
    the hidden states of all rows.
    """
    spec = tokens_spec(mesh, *x.shape[:2])
    if spec == PartitionSpec(None, None):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def spread_over(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the mesh axes in a partition."""
    each = ((cut,) if isinstance(cut, str) else cut or () for cut in spec)
    return tuple(axis for cut in each for axis in cut)


def attention_layout(
    mesh: jax.sharding.Mesh | None,
    method: str = "ring",
    tokens: int | None = None,
    group: int = 1,
) -> Layout | None:
    """Returns the layout of attention on `mesh`; None for a single device.

    Args:
      mesh: the devices.
      method: as in `pallas_kernels.sharded`; with split_keys the keys are those of a cache whose
        slots are split over `context`.
      tokens: length of the texts, which are split over `context` if it divides them; None: queries
        are not split.
      group: neighbouring devices that exchange heads, for the method `usp`.
    """
    if mesh is None or mesh.size == 1:
        return None
    cut = method == "split_keys" or (tokens is not None and tokens % mesh.shape[LENGTH] == 0)
    return Layout(mesh, ROWS, "tensor", LENGTH if cut else None, method, group)


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device holds as a whole."""
    return NamedSharding(mesh, PartitionSpec())


@dataclasses.dataclass(frozen=True)
class ReduceScatter:
    """Explicit reduce-scatter of a gradient over devices that hold different tokens.

    It sums over one mesh axis after the other. If all devices of a slice share one sum, XLA for
    TPUs uses an all-reduce instead, which sends twice as much and holds the whole gradient on every
    device.
    """

    mesh: jax.sharding.Mesh
    tokens: PartitionSpec  # of the tokens [B, T]
    gradient: PartitionSpec  # of the gradient, along the axes over which tokens are spread

    def __call__(self, run: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        """Returns the sum over devices of `run` on their parts of arrays [B, T, ...]."""
        return jax.shard_map(
            lambda *arrays: self.of(run(*arrays)),
            mesh=self.mesh,
            in_specs=(self.tokens,) * len(arrays),
            out_specs=self.gradient,
            axis_names=set(spread_over(self.tokens)),
            check_vma=False,
        )(*arrays)

    def of(self, x: jax.Array) -> jax.Array:
        """Sums an array of each device, inside a `shard_map`."""
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
    """Splits an axis that spans the whole mesh into two stages of device groups; others: one."""
    size = mesh.shape[axis]
    minor = next((n for n in range(math.isqrt(size), 1, -1) if size % n == 0), 1)
    if size < mesh.size or minor == 1:
        return [None]
    places = np.arange(size).reshape(-1, minor)
    return [places.T.tolist(), places.tolist()]


def gradient_reduce_scatter(
    mesh: jax.sharding.Mesh | None, path: str, shape: tuple[int, ...], rows: int, length: int
) -> ReduceScatter | None:
    """Returns the reduce-scatter of a parameter's gradient; None: leave the sum to XLA.

    With up to `_HIDDEN` devices XLA overlaps the exchange with the product that computes the
    gradient.

    Args:
      mesh: the devices.
      path: of the parameter.
      shape: of the parameter.
      rows: number of rows of the batch.
      length: tokens of each row.
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


def init_on_mesh(
    init: Callable[[dict], dict], params: dict, mesh: jax.sharding.Mesh | None
) -> dict:
    """Returns `init(params)`, computed on `mesh` with the shardings of the sharding rules."""
    shardings = None if mesh is None else param_shardings(mesh, jax.eval_shape(init, params))
    return jax.jit(init, out_shardings=shardings)(params)
