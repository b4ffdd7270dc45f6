"""The NVIDIA GPU that programs are for, and the block sizes of its kernels.

Tiles were chosen without a GPU, by the reports of the compilers (`benchmarks/gpu/compile.py`): they
spill no registers, use tensor cores, and stay within the limit of shared memory.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import jax

# Compute capability by name, for abstract devices (ahead-of-time compilation).
CAPABILITIES = {
    "T4": 75, "A100": 80, "A30": 80, "A10": 86, "A40": 86, "L4": 89, "L40": 89, "L40S": 89,
    "RTX 4090": 89, "H100": 90, "H200": 90, "GH200": 90, "B200": 100, "GB200": 100,
}  # fmt: skip
# Kernels by compute capability, the preferred ones first, for GPUs without a measurement; GPUs that
# are not listed run none of them. On an H100 Mosaic-GPU is about as fast as cuDNN backward, and
# faster forward (docs/benchmarks.md). On Ampere, measurements of others show cuDNN behind
# FlashAttention.
ORDER = {90: ("mosaic_gpu", "cudnn", "triton")}
ORDER |= dict.fromkeys(range(80, 90), ("triton", "cudnn"))


def device_kind() -> str | None:
    """Returns the name of the NVIDIA GPU that programs are for, or None.

    It is the name of the abstract device of the mesh in use, for which programs are compiled ahead
    of time, or else of this process' first device.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.platform in ("gpu", "cuda"):
        return described.device_kind
    device = _device()
    return None if device is None else device.device_kind


def capability() -> int | None:
    """Returns ten times the compute capability of the GPU of `device_kind`; None: unknown."""
    kind, device = device_kind(), _device()
    if kind is None:
        return None
    if device is None or kind != device.device_kind:
        names = "|".join(sorted(CAPABILITIES, key=len, reverse=True))
        match = re.search(rf"\b({names})\b", kind)
        return CAPABILITIES[match[1]] if match else None
    version = str(getattr(device, "compute_capability", ""))
    return int(version.replace(".", "")) if re.fullmatch(r"\d+\.\d", version) else None


def order() -> tuple[str, ...]:
    """Returns the backends that may run without a measurement, the preferred ones first."""
    return ORDER.get(capability(), ())


def is_here() -> bool:
    """Returns whether the GPU of `device_kind` is the first device of this process."""
    device = _device()
    return device is not None and device.device_kind == device_kind()


def is_described() -> bool:
    """Returns whether this process has no GPU of `device_kind`: programs are only compiled."""
    try:
        here = jax.local_devices(backend="cuda")
    except RuntimeError:
        here = []
    return device_kind() not in {None, *(x.device_kind for x in here)} and not is_here()


@functools.cache
def assembler() -> tuple[int, ...] | None:
    """Returns the version of the ptxas that JAX runs, (12, 9, 86) in CUDA 12.9.1, or None.

    It is the first ptxas on the PATH, in an installed CUDA or in NVIDIA's wheels, in the order of
    XLA's search. The version of the runtime, which JAX reports, has no patch level.
    """
    wheels = importlib.util.find_spec("nvidia")
    roots = [Path("/usr/local/cuda"), Path("/opt/cuda")]
    for folder in wheels.submodule_search_locations if wheels else ():
        roots += [Path(folder) / "cu13", Path(folder) / "cuda_nvcc"]
    for folder in (*os.get_exec_path(), *(root / "bin" for root in roots)):
        run = [Path(folder) / "ptxas", "--version"]
        try:
            output = subprocess.run(run, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
        if match := re.search(r"\bV(\d+)\.(\d+)\.(\d+)\b", output):
            return tuple(map(int, match.groups()))
    return None


def _device():
    return jax.local_devices()[0] if jax.default_backend() == "gpu" else None


def architecture() -> str | None:
    """Returns the tables' key for `capability`; None without a GPU, or before sm80."""
    version = capability()
    if version is None or version < 80:
        return None
    if version in (80, 100, 103):  # 10.x uses the tiles that are known to fit 8.0
        return "sm80"
    return "sm90" if version == 90 else "sm86"  # for the least shared memory of all


@dataclass(frozen=True)
class Tile:
    """Rows and keys of a step, and its warps and pipeline stages in Triton."""

    rows: int
    keys: int
    warps: int
    stages: int
    reason: str = field(default="", compare=False)  # for `explain`


KINDS = ("forward", "d_queries", "d_keys", "decode")
# Tiles of the four kinds by architecture, padded head size (a power of two), and dtype.
TRITON = {
    ("sm90", 64, "bfloat16"): ((128, 128, 8, 3), (128, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 3)),
    ("sm90", 128, "bfloat16"): (
        (128, 128, 8, 2), (128, 128, 8, 2), (64, 128, 8, 2), (64, 64, 4, 3),
    ),
    ("sm90", 256, "bfloat16"): ((128, 64, 8, 2), (64, 64, 8, 2), (16, 64, 8, 2), (64, 32, 4, 3)),
    ("sm80", 64, "bfloat16"): ((128, 64, 4, 3), (128, 64, 8, 2), (64, 128, 8, 2), (64, 64, 4, 3)),
    ("sm80", 128, "bfloat16"): ((128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2)),
    ("sm80", 256, "bfloat16"): ((64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 2), (64, 32, 4, 2)),
    ("sm86", 64, "bfloat16"): ((128, 64, 4, 3), (128, 64, 8, 2), (64, 128, 8, 2), (64, 64, 4, 3)),
    ("sm86", 128, "bfloat16"): ((128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2)),
    ("sm86", 256, "bfloat16"): ((64, 32, 8, 2), (64, 32, 8, 1), (32, 32, 8, 2), (64, 32, 4, 2)),
}  # fmt: skip
# float32 on all architectures: a product is three in TF32, and operands have twice the bytes.
EXACT = (64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)
LARGEST_EXACT = 64  # largest head size in float32: beyond it every tile spills registers


@dataclass(frozen=True)
class Warpgroups:
    """Compute warpgroups of a Mosaic-GPU program, rows of a streamed tile, stages of its ring."""

    groups: int
    streamed: int
    stages: int
    reason: str = field(default="", compare=False)  # for `explain`


# For Hopper, by kernel and the larger head size rounded up to a multiple of 64. Without spills, a
# step fits into the registers of a thread (240 with two compute warpgroups, 160 with three) and the
# 227 KB of a program's shared memory.
MOSAIC_GPU = {
    ("forward", 64): Warpgroups(3, 128, 4),
    ("forward", 128): Warpgroups(2, 128, 2),
    ("d_queries", 64): Warpgroups(2, 128, 4),
    ("d_queries", 128): Warpgroups(2, 128, 2),
    ("d_keys", 64): Warpgroups(2, 128, 4),
    ("d_keys", 128): Warpgroups(2, 64, 4),
}


def mosaic_gpu(kind: str, size: int, capped: bool, vectors: int = 0) -> Warpgroups:
    """Returns the tiles of a Mosaic-GPU kernel for heads of `size`.

    Args:
      capped: whether there is a soft cap. Its slope is a third number per score, besides p and its
        cotangent; next to dk and dv, or dq of size 128, registers then hold half as many scores.
      vectors: how many of indices and segments the element test reads (0 to 2). With both, or with
        a cap, the registers of three warpgroups do not hold a step.
    """
    size = -(-size // 64) * 64
    tiles = MOSAIC_GPU[kind, size]
    reason = (
        f"{tiles.groups} warpgroups of 64 rows and streamed tiles of {tiles.streamed} rows fit "
    )
    reason += f"into registers and shared memory for heads up to {size}"
    if capped and (kind == "d_keys" or (kind == "d_queries" and size > 64)):
        tiles = replace(tiles, streamed=tiles.streamed // 2)
        reason += "; with a soft cap registers hold half the streamed tile"
    if capped or vectors > 1:
        if tiles.groups > 2:
            reason += "; with a soft cap, or indices and segments, registers hold two warpgroups"
        tiles = replace(tiles, groups=min(tiles.groups, 2))
    return replace(tiles, reason=reason)


def triton(kind: str, size: int, dtype, busy: bool = False) -> Tile:
    """Returns the tile of a kernel of KINDS.

    Args:
      size: the head size, padded to a power of two.
      busy: whether a step also holds indices, segments, a soft cap or a bias. The streamed side of
        a tile is then halved, because registers hold no more.
    """
    target = architecture() or "sm86"
    tiles = TRITON.get((target, max(size, 64), str(dtype)), EXACT)
    rows, keys, warps, stages = tiles[KINDS.index(kind)]
    reason = _tile_reason(f"{rows} x {keys}", target, dtype, max(size, 64))
    full = rows, keys
    if busy and kind in ("forward", "d_queries"):
        keys = max(32, keys // 2)
    if busy and kind == "d_keys":
        rows = max(16, rows // 2)
    if full != (rows, keys):
        reason += "; half of it with indices, segments, a soft cap or a bias in registers"
    return Tile(rows, keys, warps, stages, reason)


def _tile_reason(tile: str, target: str, dtype, size: int) -> str:
    return (
        f"{tile} spills no registers and fits into shared memory on {target} for {dtype} heads up "
        f"to {size}"
    )


# Rows, warps and stages of the first three kinds for grouped softmax, where a step is one landmark
# block; the last entry of a key is the block's number of tokens, padded to a power of two. Other
# tiles spill registers or were not tried.
LANDMARK = {
    ("sm90", 64, "bfloat16", 64): ((128, 8, 3), (128, 8, 2), (128, 8, 2)),
    ("sm90", 128, "bfloat16", 64): ((128, 8, 3), (128, 8, 2), (128, 8, 2)),
    ("sm80", 64, "bfloat16", 64): ((128, 8, 3), (128, 8, 2), (64, 4, 2)),
    ("sm80", 128, "bfloat16", 64): ((128, 8, 2), (64, 8, 2), (64, 8, 2)),
    ("sm86", 64, "bfloat16", 64): ((128, 8, 3), (128, 8, 2), (64, 4, 2)),
    ("sm86", 128, "bfloat16", 64): ((128, 8, 2), (64, 8, 2), (64, 8, 2)),
}


def landmark(kind: str, size: int, height: int, dtype) -> Tile | None:
    """Returns the tile of a kernel of grouped softmax, or None if no tile is known.

    Args:
      size: the head size, padded to a power of two.
      height: the number of tokens of a block, padded to a power of two.
    """
    sizes = max(size, 64), str(dtype), max(height, 64)
    target = architecture() or "sm86"
    if (tiles := LANDMARK.get((target, *sizes))) is None:
        return None
    rows, warps, stages = tiles[KINDS.index(kind)]
    reason = _tile_reason(f"{rows} x a landmark block", target, dtype, max(size, 64))
    return Tile(rows, 1, warps, stages, reason)


class StateTile(NamedTuple):
    """Columns of a state that a program of the delta rule holds, its warps and pipeline stages."""

    columns: int
    warps: int
    stages: int


def delta_rule_tile(size: int, dtype) -> StateTile:
    """Returns the sizes of the kernels of the gated delta rule.

    Args:
      size: the larger head size, padded to a power of two.
    """
    if size > 128:
        return StateTile(16, 8, 1)
    if str(dtype) == "float32":
        return StateTile(16, 4, 1)
    return StateTile(32 if architecture() == "sm90" else 16, 4, 2)


class ProductTile(NamedTuple):
    """Tile of a product: rows and columns of a result, the step of sums, warps and stages."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


def grouped_tile(dtype) -> ProductTile:
    """Returns the tile of the kernels of products of groups of rows."""
    if str(dtype) == "float32":
        return ProductTile(64, 64, 32, 4, 2)
    return ProductTile(128, 128, 64 if architecture() == "sm90" else 32, 8, 3)
