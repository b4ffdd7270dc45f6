"""Which axis of which array lies on which axis of the machine: one table.

Mesh axes: `data` holds copies of the model, `fsdp` splits parameters and batch together (ZeRO,
Rajbhandari et al. 2020), `tensor` splits heads and the feed-forward width (Shoeybi et al. 2019),
`context` cuts each text in parts (`pallas_kernels.sharded` puts attention together), `expert`
splits the experts of mixtures, and the batch (`lcjax.models.experts`).
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lcjax.errors import InputError, check_integer
from pallas_kernels import Layout

AXES = ("data", "fsdp", "tensor", "context", "expert")
ROWS = ("data", "fsdp", "expert")  # the axes over which the rows of a batch are spread
LENGTH = "context"  # the axis over which the tokens of a row are spread

# (pattern at the end of a parameter's path, mesh axis of each array axis). The first match counts;
# stacked layers have one more axis in front, which is never split. What `fsdp` splits is split over
# `context` as well, and over `expert` if no other axis is: these devices need the same weights at
# the same time.
_RULES = (
    (r"embed/embedding", ("tensor", "fsdp")),
    (r"position/embedding", (None, "fsdp")),
    (r"position/bias", (None, "tensor")),
    (r"head/kernel", ("fsdp", "tensor")),
    (r"head/bias", ("tensor",)),
    (r"(query|key|value)/kernel", ("fsdp", "tensor", None)),
    (r"attention/position_key", ("fsdp", "tensor", None)),
    (r"attention/(content|position)_bias", ("tensor", None)),
    (r"(query|key|value)/bias", ("tensor", None)),
    (r"(query|key|value)/lora_b", (None, "tensor", None)),
    (r"(attention|memory)/out/kernel", ("tensor", None, "fsdp")),
    (r"attention/out/lora_a", ("tensor", None, None)),
    (r"experts/(gate|up)/kernel", ("expert", "fsdp", "tensor")),
    (r"experts/down/kernel", ("expert", "tensor", "fsdp")),
    (r"(gate|up)/kernel", ("fsdp", "tensor")),
    (r"(gate|up)/bias", ("tensor",)),
    (r"(gate|up)/lora_b", (None, "tensor")),
    (r"down/kernel", ("tensor", "fsdp")),
    (r"down/lora_a", ("tensor", None)),
)


@dataclasses.dataclass(frozen=True)
class Mesh:
    """How many devices lie along each axis; -1 (one axis at most) takes what is left."""

    data: int = 1  # copies of the model, each reading its own part of the batch
    fsdp: int = -1  # parameters, optimizer state and batch split
    tensor: int = 1  # heads and feed-forward width split
    context: int = 1  # every text cut in so many parts, for rows too long for one device
    expert: int = 1  # experts of a mixture and batch split

    def __post_init__(self):
        sizes = [getattr(self, axis) for axis in AXES]
        for axis, size in zip(AXES, sizes, strict=True):
            if size != -1:
                check_integer(f"mesh.{axis}", size, 1, "-1 takes the devices that are left")
        if sizes.count(-1) > 1:
            raise InputError(f"mesh={sizes} for axes {AXES}: only one size may be -1")


def make_mesh(shape: Mesh = Mesh(), devices: list[jax.Device] | None = None) -> jax.sharding.Mesh:
    """The mesh of all devices (or of `devices`) with the axes `AXES`."""
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(mesh_sizes(shape, len(devices)), axis) for axis in AXES]
    kinds = (AxisType.Auto,) * len(AXES)
    try:
        return jax.make_mesh(tuple(sizes), AXES, axis_types=kinds, devices=devices)
    except NotImplementedError:  # such as 4 devices of an axis of 8 in a torus
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return jax.sharding.Mesh(grid, AXES, axis_types=kinds)


def mesh_sizes(shape: Mesh, devices: int) -> Mesh:
    """`shape` with a number in place of -1, for so many devices."""
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
    return Mesh(*sizes)


def _fitting(axis_sizes: dict[str, int], rest: bool, devices: int) -> str:
    """What to set in place of `axis_sizes`; with `rest` an axis takes the other devices."""
    changes = {} if rest else {"fsdp": -1}
    for axis, size in axis_sizes.items():
        if axis not in changes:
            fits = math.gcd(size, devices)
            devices //= fits
            changes |= {axis: fits} if fits < size else {}
    return " ".join(f"--mesh.{axis}={size}" for axis, size in changes.items())


def spec_of(path: str, shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> PartitionSpec:
    """The partition of one parameter; an axis that the mesh does not divide stays whole."""
    axes = _rule(path, len(shape))
    together = _together(mesh, axes)
    return PartitionSpec(*(_over(mesh, axis, size, together) for axis, size in zip(axes, shape)))


def _rule(path: str, dimensions: int) -> tuple[str | None, ...]:
    """The axis of the table for each axis of a parameter; none at all where no rule matches."""
    for pattern, axes in _RULES:
        if re.search(rf"(^|/){pattern}$", path):
            return (None,) * (dimensions - len(axes)) + axes
    return ()


def replicated_bytes(
    mesh: jax.sharding.Mesh, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, int]:
    """By path, the bytes that each device holds of a parameter because sizes do not divide.

    Beyond those that it would hold if the table of rules could be followed; others are left out.
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


def _together(mesh: jax.sharding.Mesh, axes: tuple[str | None, ...]) -> tuple[str, ...]:
    """The mesh axes over which a rule with `axes` splits what it gives to `fsdp`."""
    others = (axis for axis in (LENGTH, "expert") if axis not in axes and mesh.shape[axis] > 1)
    return "fsdp", *others


def _over(
    mesh: jax.sharding.Mesh, axis: str | None, size: int, together: tuple[str, ...]
) -> str | tuple[str, ...] | None:
    """The mesh axes over which `size` numbers are split by a rule that says `axis`."""
    if axis == "fsdp":
        for count in range(len(together), 1, -1):
            if size % _devices(mesh, together[:count]) == 0:
                return together[:count]
    return axis if axis and size % mesh.shape[axis] == 0 else None


def _devices(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def path_of(keys: tuple[Any, ...]) -> str:
    """`layers/mlp/up/kernel` for a path of `jax.tree_util` keys."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in keys)


def param_shardings(mesh: jax.sharding.Mesh, tree: Any) -> Any:
    """Shardings for a tree of arrays or shapes whose paths end in parameter names.

    Optimizer states repeat the parameter tree below their own names, so they match as well.
    """
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: NamedSharding(mesh, spec_of(path_of(keys), leaf.shape, mesh)), tree
    )


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Rows of a batch [B, ...] lie over `ROWS`, each whole on all devices of a text."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def process_rows(mesh: jax.sharding.Mesh, rows: int, process: int | None = None) -> list[int]:
    """Rows of a batch of `rows` that the devices of a process hold (of this one by default).

    Processes that share a tensor-parallel group hold the same rows, and a mesh may scatter those of
    a process; in this order `jax.make_array_from_process_local_data` expects them.
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
    """The axes of `ROWS` for an error, without that of experts where there is none."""
    return " x ".join(f"mesh.{axis}" for axis in ROWS if axis != "expert" or sizes[axis] > 1)


def rows_over(mesh: jax.sharding.Mesh | None, rows: int) -> int:
    """Devices that the `rows` of a batch are spread over: 1 without a mesh that divides them."""
    devices = 1 if mesh is None else _devices(mesh, ROWS)
    return devices if rows % devices == 0 else 1


def padding_rows(mesh: jax.sharding.Mesh | None, rows: int) -> int:
    """Rows that a batch lacks until every device of `ROWS` has equally many."""
    return 0 if mesh is None else -rows % _devices(mesh, ROWS)


def tokens_spec(mesh: jax.sharding.Mesh | None, rows: int, length: int) -> PartitionSpec:
    """Of [B, T, ...]: rows over `ROWS`, tokens over `context`, where these divide."""
    spread = ROWS if rows_over(mesh, rows) > 1 else None
    cut = mesh is not None and mesh.shape[LENGTH] > 1 and length % mesh.shape[LENGTH] == 0
    return PartitionSpec(spread, LENGTH if cut else None)


def keep_rows(x: jax.Array, mesh: jax.sharding.Mesh | None) -> jax.Array:
    """`x` [B, ...] with its rows over `ROWS`, and nothing else split."""
    if rows_over(mesh, x.shape[0]) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, batch_sharding(mesh))


def keep_tokens(x: jax.Array, mesh: jax.sharding.Mesh | None) -> jax.Array:
    """`x` [B, T, ...] with its tokens where `tokens_spec` says, and nothing else split.

    Left alone, XLA follows the split of the embedding's width over `fsdp` instead of the batch, and
    every device then carries the hidden states of all rows.
    """
    spec = tokens_spec(mesh, *x.shape[:2])
    if spec == PartitionSpec(None, None):
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def spread_over(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes of a partition."""
    each = ((cut,) if isinstance(cut, str) else cut or () for cut in spec)
    return tuple(axis for cut in each for axis in cut)


def attention_layout(
    mesh: jax.sharding.Mesh | None, method: str = "ring", tokens: int | None = None
) -> Layout | None:
    """How attention runs on `mesh`; None on one device. `method` as in `pallas_kernels.sharded`.

    The `tokens` of a text lie as `tokens_spec` has them; without, queries and keys stay whole.
    """
    if mesh is None or mesh.size == 1:
        return None
    cut = tokens is not None and tokens % mesh.shape[LENGTH] == 0
    return Layout(mesh, ROWS, "tensor", LENGTH if cut else None, method)


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
