"""Memory of devices: checks that arrays fit, and offloading of arrays to host memory.

The memory kind of an array is part of its sharding, and of its type during tracing. Programs read
it there, so no function needs an argument for it.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from lcjax.errors import InputError, OutOfMemoryError
from lcjax.parallel.sharding import path_of

# What a training run offloads: nothing, the optimizer's state, or the weights as well.
Offload = Literal["none", "optimizer", "parameters"]

# At the start of a path: of layers stacked [L, ...], and of a layer by itself.
STACK, LAYER = re.compile(r"^(.*/)?layers/"), re.compile(r"^(.*/)?layers_\d+/")

_HOST = "pinned_host"  # memory that a device reads by itself
_LIMITS = Path("/sys/fs/cgroup")  # memory limits of containers and of jobs
# Files with the limit and the use, and the entry of memory.stat for pages of files that the system
# can drop, in versions 2 and 1 of control groups; by the name of the controller
_LIMIT_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


# What to change if a device has too little memory, the cheapest first; docs/out_of_memory.md
TRAINING = (
    "raise train.accumulation (fewer rows at a time)",
    "model.remat=offload (or full)",
    "train.offload=optimizer, then parameters",
    "mesh.fsdp over more devices, and mesh.context for long rows",
    "model.param_dtype=bfloat16",
    "train.lora.rank=8 (adapters), and on them model.weights.type=nf4 (4 bits)",
    "a smaller data.length",
)
READING = (
    "a smaller batch_size, or fewer prompts at a time",
    "model.param_dtype=bfloat16",
    "model.cache: storage of type int8, or a policy with chunk",
    "mesh.tensor over more devices, and mesh.context for long texts",
    "a smaller prefill_chunk",
    "shorter texts",
)


@contextlib.contextmanager
def explained(ways_out: Sequence[str]) -> Iterator[None]:
    """Raises an OutOfMemoryError in place of XLA's error about a device that is full.

    Args:
      ways_out: what to change, in order, such as `TRAINING`.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = next(line for line in str(error).splitlines() if "RESOURCE_EXHAUSTED" in line)
        advice = "; ".join(f"({number}) {way}" for number, way in enumerate(ways_out, 1))
        raise OutOfMemoryError(
            f"a device has too little memory; change, in this order: {advice}. XLA says:"
            f" {first[:200]}"
        ) from error


def is_offloaded(x: jax.Array) -> bool:
    """Returns whether `x`, an array or a tracer, is in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(tree: Any) -> Any:
    """Returns the tree with all offloaded arrays moved to the device."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Device) if is_offloaded(x) else x, tree
    )


def put_back(tree: Any, where: Any) -> Any:
    """Moves each array to the memory space of its counterpart in `where`; call it inside jit."""
    return jax.tree.map(
        lambda x, old: jax.device_put(x, jax.memory.Space.Host) if is_offloaded(old) else x,
        tree,
        where,
    )


def offloadable(path: str, dimensions: int) -> bool:
    """Returns whether a parameter can be offloaded: all but vectors, such as norms and biases.

    Vectors are small, and libtpu cannot slice a 16-bit row out of a stack [L, D] in host memory.
    """
    return dimensions - bool(STACK.match(path)) > 1


def host_sharding(
    path: str, dimensions: int, sharding: jax.sharding.Sharding
) -> jax.sharding.Sharding:
    """Returns `sharding` of the parameter at `path`, in host memory if it is `offloadable`."""
    return sharding.with_memory_kind(_HOST) if offloadable(path, dimensions) else sharding


def host_shardings(tree: Any, shardings: Any) -> Any:
    """Returns `host_sharding` for a tree of parameters (or optimizer moments) and its shardings."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf, sharding: host_sharding(path_of(keys), len(leaf.shape), sharding),
        tree,
        shardings,
    )


def to_host(path: str, x: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Returns the parameter `x` at `path` in `dtype` (None: its own), offloaded if it can be."""
    where = host_sharding(path, x.ndim, x.sharding)
    if dtype is None or x.dtype == dtype:
        return jax.device_put(x, where)
    return jax.jit(lambda x: to_device(x).astype(dtype), out_shardings=where)(x)


def free_bytes(device: jax.Device) -> int | None:
    """Returns the free memory of `device` in bytes; None if the platform does not report it.

    CPU devices share the memory of their machine, or the limit of its container or job.
    """
    if device.platform != "cpu":
        if device not in jax.local_devices():  # a description of hardware, for a compiler
            return None
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else limit - stats.get("bytes_in_use", 0)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        machine = next(1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None
    return min([machine, *_group_bytes()])


def _group_bytes() -> Iterator[int]:
    """Yields the bytes that each control group around this process leaves to it."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        lines = []
    for controller, (limit_file, use_file, dropped) in _LIMIT_FILES.items():
        base = _LIMITS / controller
        groups = [path.strip("/") for _, names, path in lines if controller in names.split(",")]
        # The groups of a container lie in its base, or have no folder there.
        folders = {base, *(base / group for group in groups)}
        folders |= {
            parent for folder in folders for parent in folder.parents if base in parent.parents
        }
        for folder in folders:
            try:
                limit, used = (int((folder / name).read_text()) for name in (limit_file, use_file))
                stat = (folder / "memory.stat").read_text().splitlines()
                yield (
                    limit - used + next(int(x.split()[1]) for x in stat if x.split()[0] == dropped)
                )
            except (OSError, StopIteration, ValueError):  # no such group, or one without a limit
                continue


def usable_bytes(device: jax.Device) -> int | None:
    """Returns the memory that this process can use on `device` in bytes: used already, or free.

    None if the platform does not report it.
    """
    if device.platform != "cpu":
        stats = device.memory_stats() or {} if device in jax.local_devices() else {}
        return stats.get("bytes_limit")
    free = free_bytes(device)
    return None if free is None else free + _resident_bytes()


def _resident_bytes() -> int:
    """Returns the bytes of this process in memory, without pages of files."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(x.split()[1]) for x in lines if x.startswith("RssAnon"))
    except (OSError, StopIteration, ValueError):
        return 0


def check_estimate(
    needed: int, device: jax.Device, what: str, way_out: str, *, ignore: bool = False
) -> str | None:
    """Raises an InputError if a run needs more memory than it can use on `device`.

    On accelerators an estimate may be a quarter too high, so up to a quarter more is a warning. A
    CPU that runs out of memory ends the process, so nothing more is allowed.

    Args:
      needed: the estimated bytes.
      device: a device of the run.
      what: description of the run with its estimate, for the message.
      way_out: settings that lower the memory, for the message.
      ignore: `run.ignore_memory`, which turns the error into a warning.

    Returns:
      A line with a warning; None if the memory is sufficient or unknown.
    """
    usable = usable_bytes(device)
    if usable is None or needed <= usable:
        return None
    place = "this machine" if device.platform == "cpu" else "a device"
    message = f"{what}, and {place} has {usable / 1e9:.1f} GB for it; {way_out}"
    if ignore or (device.platform != "cpu" and needed <= 1.25 * usable):
        return f"warning: {message}"
    raise InputError(f"{message}, or go on with run.ignore_memory=true")


def check_fits(arrays: Any, what: str, way_out: str) -> None:
    """Raises an InputError if arrays are larger than the free memory of a device of this process.

    Args:
      arrays: a tree of `jax.ShapeDtypeStruct`; without a sharding on the default device.
      what: description of the arrays in the error message, such as "the weights of PATH".
      way_out: advice at the end of the error message.
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
            if leaf.sharding.memory_kind == _HOST:
                continue
        for device in devices:
            # All CPU devices share one memory.
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
