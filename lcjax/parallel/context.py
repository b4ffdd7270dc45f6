"""How devices that share a text exchange what attention needs, and which way is chosen.

`pallas_kernels.sharded` describes the ways. Published measurements (MaxText on 64 v5p, issues 4687
and 4893 of AI-Hypercomputer/maxtext): at 32,768 tokens a ring has half the speed of an all-to-all
or of gathered keys, and at 262,144 tokens nine tenths of it; groups that exchange heads are as fast
as the better of both.
"""

import math
from typing import NamedTuple

import jax
import numpy as np

from lcjax.errors import InputError
from lcjax.parallel.sharding import LENGTH, Mesh, slice_of

CHOICES = ("auto", "ring", "all_to_all", "usp", "all_gather")
_GATHERED = 2**30  # most bytes of the gathered keys and values of a layer, for `auto`


class Heads(NamedTuple):
    """The sizes of attention on which the choice depends."""

    queries: int
    keys: int
    size: int  # channels of a head


class Strategy(NamedTuple):
    """What devices that share a text exchange."""

    method: str  # of `pallas_kernels.sharded.METHODS`
    group: int  # neighbouring devices that exchange heads for tokens
    reason: str

    @property
    def keeps_queries(self) -> bool:
        """Whether a device attends with the queries of its own tokens, or of its group's."""
        return self.method != "all_to_all"


def strategy(
    choice: str,
    mesh: Mesh | jax.sharding.Mesh | None,
    heads: Heads,
    length: int,
    group: int | None = None,
    *,
    near: int | None = None,
) -> Strategy:
    """Returns the exchange of the devices along the mesh axis `context`.

    Args:
      choice: one of `CHOICES`.
      mesh: the devices, or the sizes of its axes; None: one device.
      heads: of a layer, on all devices.
      length: tokens of a text.
      group: devices that exchange heads, for `usp`; None: the neighbours that can.
      near: number of successive devices with fast links; None: as the devices of `mesh` say.

    Raises:
      InputError: heads cannot be shared as `choice` or `group` asks.
    """
    devices = 1 if mesh is None else mesh.shape[LENGTH]
    tensor = 1 if mesh is None else mesh.shape["tensor"]
    count = heads.queries // tensor if heads.queries % tensor == 0 else heads.queries
    if devices == 1:
        return Strategy("ring", 1, "a device has whole texts")
    near = group or near or _neighbours(mesh)
    if group is not None and (devices % group or count % group):
        raise InputError(
            f"model.context_group={group} must divide the {devices} devices of mesh.context and the"
            f" {count} query heads of a device"
        )
    shared = max(d for d in range(1, devices + 1) if devices % d == count % d == near % d == 0)
    if choice == "usp" and shared == 1:
        raise InputError(
            f"model.context_parallel=usp: no number of the {devices} devices of mesh.context"
            f" divides the {count} query heads of a device; use ring or all_gather"
        )
    if choice == "all_to_all" and count % devices:
        raise InputError(
            f"model.context_parallel=all_to_all: the {count} query heads of a device cannot be"
            f" shared by the {devices} devices of mesh.context; use usp, ring or all_gather"
        )
    if choice != "auto":
        return Strategy(choice, shared if choice == "usp" else 1, "as model.context_parallel says")
    if shared == devices:
        return Strategy("all_to_all", 1, f"{count} query heads are shared by {devices} devices")
    if shared > 1:
        why = f"{near} of {devices} devices have fast links"
        if near % devices == 0:
            why = f"{count} query heads cannot be shared by {devices} devices"
        return Strategy("usp", shared, f"{why}; groups of {shared} exchange heads")
    gathered = 4 * heads.keys * heads.size * length  # keys and values of 16 bits
    if gathered <= _GATHERED:
        why = f"the keys and values of a layer take {gathered / 1e9:.2f} GB"
        return Strategy("all_gather", 1, why)
    return Strategy("ring", 1, f"{count} query heads cannot be shared by {devices} devices")


def _neighbours(mesh: Mesh | jax.sharding.Mesh) -> int:
    """Returns how many successive devices along `context` have fast links; all, if not known.

    These are the devices of a slice of TPUs, of an NVLink domain, or of a process.
    """
    if isinstance(mesh, Mesh):
        return mesh.shape[LENGTH]
    axis = mesh.axis_names.index(LENGTH)
    line = np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.shape[LENGTH])[0]
    places = [slice_of(device) for device in line]
    starts = [i for i in range(1, len(places)) if places[i] != places[i - 1]]
    return math.gcd(len(places), *starts)
