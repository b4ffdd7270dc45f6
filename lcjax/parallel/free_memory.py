"""Whether arrays fit into the free memory of their devices, before they are made."""

import math
from pathlib import Path
from typing import Any

import jax

from lcjax.errors import InputError

_LIMITS = Path("/sys/fs/cgroup")  # of a container


def free_bytes(device: jax.Device) -> int | None:
    """Memory in bytes that `device` has left; None where nothing tells.

    CPU devices share the memory of their machine, or what its container may take.
    """
    if device.platform != "cpu":
        if device not in jax.local_devices():  # of a description of hardware, for a compiler
            return None
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else limit - stats.get("bytes_in_use", 0)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        machine = next(1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    try:
        limit, used = (int((_LIMITS / f"memory.{x}").read_text()) for x in ("max", "current"))
        lines = (_LIMITS / "memory.stat").read_text().splitlines()
        cached = next(int(x.split()[1]) for x in lines if x.startswith("inactive_file"))
    except (OSError, StopIteration, ValueError):  # no container, or one without a limit
        return machine
    return min(machine, limit - used + cached)


def check_fits(arrays: Any, what: str, way_out: str) -> None:
    """Raises an InputError if arrays are larger than the free memory of a device of this process.

    Args:
      arrays: a tree of `jax.ShapeDtypeStruct`; without a sharding on the default device.
      what: they are, for the error: "the weights of PATH".
      way_out: what to do then.
    """
    needed: dict[jax.Device, int] = {}
    for leaf in jax.tree.leaves(arrays):
        if leaf.sharding is None:
            devices, shape = [jax.local_devices()[0]], leaf.shape
        else:
            devices, shape = (
                leaf.sharding.addressable_devices,
                leaf.sharding.shard_shape(leaf.shape),
            )
            if leaf.sharding.memory_kind == "pinned_host":
                continue
        for device in devices:
            # One place for all CPU devices.
            place = jax.local_devices()[0] if device.platform == "cpu" else device
            size = math.prod(shape) * leaf.dtype.itemsize
            needed[place] = needed.get(place, 0) + size
    for device, size in needed.items():
        free = free_bytes(device)
        if free is not None and size > free:
            raise InputError(
                f"{what} take {size / 1e9:.1f} GB, and {device} has {free / 1e9:.1f} GB free;"
                f" {way_out}"
            )
