"""Descriptions of devices that are not present, for compilers that run on any machine.

libtpu (extra `aot`) compiles for TPUs. JAX's CUDA plugin (extra `cuda`) compiles for GPUs without a
GPU or a driver. Without a GPU it cannot time kernels against each other, so a program that is
compiled on a GPU may use other kernels and workspaces.
"""

import importlib.util
import math
import os

import jax

from lcjax.cost.chips import Chip, Topology
from lcjax.errors import InputError, install_command

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
TPU_ENVIRONMENT = {  # of libtpu on a machine without a TPU
    "TPU_SKIP_MDS_QUERY": "1",  # no request to a cloud's metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no device is opened, so other processes do not matter
}

_GPU_FLAGS = "--xla_gpu_autotune_level=0"  # there is no GPU to time anything on

# From the tuning guides (docs.nvidia.com/cuda) and data sheets: compute capability, number of
# multiprocessors, float32 units and threads of each, clock in GHz, bytes of shared memory of each
# (1 KiB more than a block may use), bytes of level 2 cache.
_AMPERE = ((8, 0), 108, 64, 2048, 1.41, 164 * 2**10, 40 * 2**20)
_HOPPER = ((9, 0), 132, 128, 2048, 1.98, 228 * 2**10, 50 * 2**20)
_GPUS = {
    "t4": (((7, 5), 40, 64, 1024, 1.59, 65 * 2**10, 4 * 2**20), "Tesla T4"),
    "l4": (((8, 9), 58, 128, 1536, 2.04, 100 * 2**10, 48 * 2**20), "NVIDIA L4"),
    "a100-40": (_AMPERE, "NVIDIA A100-SXM4-40GB"),
    "a100-80": (_AMPERE, "NVIDIA A100-SXM4-80GB"),
    "h100": (_HOPPER, "NVIDIA H100 80GB HBM3"),
    "h200": (_HOPPER, "NVIDIA H200"),
}


def devices(topology: Topology) -> list[jax.Device]:
    """Returns devices for meshes and for `lower(...).compile()`; they hold no data.

    Raises:
      InputError: the compiler is not installed, or does not support the topology.
    """
    return _tpu_devices(topology) if topology.tpu else _gpu_devices(topology)


def _tpu_devices(topology: Topology) -> list[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            f"--topology={topology}: the TPU compiler is not installed; {install_command('tpu')}"
        )
    for name, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    # Without this option libtpu describes two devices per v4 chip; on real chips JAX shows one.
    options = {"chip_config_name": "megacore"} if topology.chip.name == "v4" else {}
    if 1 in topology.shape[:2]:  # libtpu's default is hosts of 2x2x1 chips
        options["chips_per_host_bounds"] = [min(2, n) for n in topology.shape[:2]] + [1]
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    try:
        description = topologies.get_topology_desc(topology.name_of_slice, "tpu", **options)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        raise InputError(f"--topology={topology}: libtpu does not support it ({why})") from error
    return list(description.devices)


def _gpu_devices(topology: Topology) -> list[jax.Device]:
    if not any(importlib.util.find_spec(name) for name in PLUGINS):
        raise InputError(
            f"--topology={topology}: jax's CUDA plugin is not installed; {install_command('cuda')}"
        )
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # no libraries, no driver
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_GPU_FLAGS}".strip()
    from jax.experimental import topologies

    name = f"1x{topology.slices}x{math.prod(topology.shape)}"  # the domains are hosts, as processes
    try:
        description = topologies.get_topology_desc(
            platform="cuda",
            topology_name=name,
            topology=name,
            target_config=_gpu_target(topology.chip),
        )
    except (jax.errors.JaxRuntimeError, NotImplementedError, RuntimeError) as error:
        why = str(error).strip().splitlines()[0]
        raise InputError(
            f"--topology={topology}: the CUDA plugin cannot describe it ({why})"
        ) from error
    return list(description.devices)


def _gpu_target(chip: Chip) -> str:
    """Returns XLA's description of a GPU (`GpuTargetConfigProto` as text)."""
    ((major, minor), cores, units, threads, clock, shared, cache), name = _GPUS[chip.name]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared - 2**10}
  threads_per_core_limit: {threads}
  core_count: {cores}
  fpus_per_core: {units}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
  memory_bandwidth: {chip.bandwidth:.0f}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  device_memory_size: {chip.memory:.0f}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
