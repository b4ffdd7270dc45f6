"""Accelerators by name: memory, speed and links of one device, and the devices of a topology.

Figures are the vendors'. TPUs: docs.cloud.google.com/tpu/docs, pages v4, v5e, v5p and v6e, tables
of key specifications (v6e: 1,640 GB/s; older versions of the page have 1,600). GPUs: NVIDIA's data
sheets of T4, L4, and A100, H100 and H200, each SXM; those of L4 and Hopper give bfloat16 with
sparsity, of which half is dense.

Links: the TPU pages give the bandwidth of a chip's links (ICI), both directions of all of them
together, and of the data-center network (DCN), of a chip or of a pod. The network of v4 is that of
the JAX scaling book (jax-ml.github.io/scaling-book/tpus, 25 GB/s a host of four chips), and its
links follow from the all-reduce bandwidth of a pod, 1.1 PB/s. GPUs: NVLink, or PCIe for T4 and L4,
from the same data sheets, which count both directions; the network is that of NVIDIA's DGX A100 and
DGX H100, a network card of 200 or 400 Gbit/s for each GPU. Measured bandwidths are lower.

A program can use less than the memory of a chip: libtpu reserves
a part, and so do a GPU's context and allocator.
"""

import functools
import math
import os
import re
import time
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lcjax.errors import InputError

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One JAX device (a v4 or v5p chip is one)."""

    name: str
    memory: float  # bytes, as sold
    usable: float  # bytes that one program can use
    peak: float  # FLOP/s, dense, bfloat16 with float32 sums
    bandwidth: float  # of memory, bytes/s
    dimensions: int = 0  # of a TPU's torus; 0: a GPU
    clock: float = 0.0  # of a TPU, Hz; 0: unknown
    # bytes/s that one link of a TPU's torus carries in one direction, or that a GPU sends to the
    # GPUs of its NVLink domain; 0: unknown
    link: float = 0.0
    network: float = 0.0  # bytes/s that a device sends to other slices or domains; 0: unknown

    @property
    def links(self) -> float:
        """bytes/s that a device sends within its slice over all its links."""
        return self.link * max(1, 2 * self.dimensions)


# T4 and L4 use a part of 16 and 24 GB for error correction: CUDA counts 15,110 MiB and about
# 22 GiB. The peak of a T4 is that of float16, as it has no units for bfloat16.
# The usable memory of a TPU is libtpu's limit, which its compiler reports if a program needs more.
# That of a v5p exceeds the 95 GB of its page, so its memory is set to 96 GiB. The usable memory of
# a GPU is 95 % (a context, workspaces of libraries and fragments take the rest) and needs
# XLA_PYTHON_CLIENT_MEM_FRACTION=.95: the default of JAX is 75 %.
# A clock is peak / (2 n 128^2), with the n = 8 matrix units of v4 and v5p, and the 4 of v5e.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 32 * GIB, 30.75 * GIB, 275e12, 1_228e9, 3, 1.05e9, 45e9, 6.25e9),
        Chip("v5e", 16 * GIB, 15.75 * GIB, 197e12, 819e9, 2, 1.5e9, 50e9, 3.125e9),
        Chip("v5p", 96 * GIB, 95.74 * GIB, 459e12, 2_765e9, 3, 1.75e9, 100e9, 6.25e9),
        Chip("v6e", 32 * GIB, 31.25 * GIB, 918e12, 1_640e9, 2, 0.0, 100e9, 12.5e9),
        Chip("t4", 14.75 * GIB, 0.95 * 14.75 * GIB, 65e12, 320e9, link=16e9),
        Chip("l4", 22 * GIB, 0.95 * 22 * GIB, 121e12, 300e9, link=32e9),
        Chip("a100-40", 40 * GIB, 0.95 * 40 * GIB, 312e12, 1_555e9, link=300e9, network=25e9),
        Chip("a100-80", 80 * GIB, 0.95 * 80 * GIB, 312e12, 2_039e9, link=300e9, network=25e9),
        Chip("h100", 80 * GIB, 0.95 * 80 * GIB, 989e12, 3_350e9, link=450e9, network=50e9),
        # nvidia-smi counts 143,771 MiB.
        Chip("h200", 140.4 * GIB, 0.95 * 140.4 * GIB, 989e12, 4_800e9, link=450e9, network=50e9),
    )
}


# Dense peak FLOP/s of one device in bfloat16 with float32 sums, and peak bytes/s of its memory
# (None: not listed), by its `device.device_kind`. The first name that occurs as whole words in the
# lower-case kind applies. Figures of devices that are not in CHIPS are from data sheets.
_PEAKS = (
    ("tpu7x", 2_307e12, None),
    ("tpu v6", CHIPS["v6e"].peak, CHIPS["v6e"].bandwidth),
    ("tpu v5p", CHIPS["v5p"].peak, CHIPS["v5p"].bandwidth),
    ("tpu v5 lite", CHIPS["v5e"].peak, CHIPS["v5e"].bandwidth),
    ("tpu v5e", CHIPS["v5e"].peak, CHIPS["v5e"].bandwidth),
    ("tpu v5", CHIPS["v5p"].peak, CHIPS["v5p"].bandwidth),  # v5p reports itself as "TPU v5"
    ("tpu v4", CHIPS["v4"].peak, CHIPS["v4"].bandwidth),
    ("tpu v3", 123e12, None),
    ("tpu v2", 46e12, None),
    ("gb200", 2_500e12, None),
    ("b200", 2_250e12, None),
    ("gh200", CHIPS["h200"].peak, None),
    ("h200", CHIPS["h200"].peak, CHIPS["h200"].bandwidth),
    ("h100 pcie", 756e12, 2_000e9),
    ("h100 nvl", 835e12, 3_900e9),
    ("h100", CHIPS["h100"].peak, CHIPS["h100"].bandwidth),
    ("a100-sxm4-40gb", CHIPS["a100-40"].peak, CHIPS["a100-40"].bandwidth),
    ("a100-pcie-40gb", CHIPS["a100-40"].peak, CHIPS["a100-40"].bandwidth),
    ("a100", CHIPS["a100-80"].peak, CHIPS["a100-80"].bandwidth),
    ("l40s", 362e12, None),
    ("l40", 181e12, None),
    ("l4", CHIPS["l4"].peak, CHIPS["l4"].bandwidth),
    ("a10g", 70e12, None),
    ("v100", 125e12, None),
    ("t4", CHIPS["t4"].peak, CHIPS["t4"].bandwidth),
)


@dataclass(frozen=True)
class Topology:
    """Devices of one kind: `v5e:4x4`, `h200:8`; in several slices, `v5p:2x2x2*4` or `h200:8*2`."""

    chip: Chip
    shape: tuple[int, ...]  # of a slice of TPUs, or number of GPUs of an NVLink domain
    slices: int = 1

    @property
    def devices(self) -> int:
        return math.prod(self.shape) * self.slices

    @property
    def tpu(self) -> bool:
        return self.chip.dimensions > 0

    @property
    def name_of_slice(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    def __str__(self) -> str:
        return self.name_of_slice + (f"*{self.slices}" if self.slices > 1 else "")

    @classmethod
    def parse(cls, text: str) -> "Topology":
        if not text:
            raise InputError(
                "--topology is missing: name the devices, as --topology v5e:8x8 or h200:8"
            )
        name, _, shape = text.partition(":")
        shape, star, slices = shape.partition("*")
        chip = CHIPS.get(name.lower())
        if chip is None:
            raise InputError(f"--topology={text}: unknown chip; choose one of {', '.join(CHIPS)}")
        example = {0: "8", 2: "4x4", 3: "2x2x2"}[chip.dimensions]
        if not re.fullmatch(r"[1-9]\d{0,6}(x[1-9]\d{0,6})*", shape) or shape.count("x") + 1 != max(
            1, chip.dimensions
        ):
            raise InputError(f"--topology={text}: write the devices, as {chip.name}:{example}")
        if star and not re.fullmatch(r"[1-9]\d{0,3}", slices):
            way_out = f"{chip.name}:{shape}*2"
            raise InputError(f"--topology={text}: write the number of slices, as {way_out}")
        return cls(chip, tuple(map(int, shape.split("x"))), int(slices or 1))


def peak_flops(device: jax.Device | None = None) -> float | None:
    """Returns the peak FLOP/s of a device, or None for a device that is not in the table."""
    return _peaks(device).flops


def peak_bandwidth(device: jax.Device | None = None) -> float | None:
    """Returns the peak bytes/s of a device's memory, or None for one that is not in the table."""
    return _peaks(device).bandwidth


class _Peaks(NamedTuple):
    """FLOP/s and bytes/s of a device; None for one that is not in the table."""

    flops: float | None = None
    bandwidth: float | None = None


def _peaks(device: jax.Device | None) -> _Peaks:
    kind = (device or jax.devices()[0]).device_kind.lower()
    # Whole words, because "L4" is not "L40", and "T4" is not "T400".
    found = (_Peaks(*peaks) for name, *peaks in _PEAKS if re.search(rf"\b{name}\b", kind))
    return next(found, _Peaks())


@functools.cache
def measured_peak(dtype: str = "float32", size: int = 1024, repeats: int = 5) -> float:
    """Measures the FLOP/s of square matrix products on the default device; the best of `repeats`.

    It replaces the table for devices without a data sheet, such as CPUs. The "devices" of a CPU
    share its cores, so the result is that of the whole machine. It is measured once in a process.
    """
    a = jnp.full((size, size), 0.5, jnp.dtype(dtype))
    # Like the model's products: XLA uses a CPU's 16-bit units only for float32 results.
    dot = jax.jit(functools.partial(jnp.dot, preferred_element_type=jnp.float32))
    return 2 * size**3 / _shortest(dot, a, a, repeats=repeats)


def _measured_bandwidth() -> float:
    """Measures bytes/s of reading and writing 128 MiB on the default device; the best run."""
    x = jnp.ones(2**25, jnp.float32)
    return 2 * x.nbytes / _shortest(jax.jit(lambda x: x + 1), x, repeats=5)


def _shortest(function, *args, repeats: int) -> float:
    """Returns the seconds of the fastest of `repeats` calls, after one call that compiles."""
    function(*args).block_until_ready()
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        function(*args).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best


def local_chip(dtype: str) -> Chip:
    """Describes a device of this machine; measures its speeds if they are not in the tables.

    CPU devices share the machine's cores and memory, so each has an equal part of them.
    """
    devices = jax.devices()
    peak, _ = machine_peak(dtype, devices)
    nbytes, share = (devices[0].memory_stats() or {}).get("bytes_limit"), 1
    if devices[0].platform == "cpu":
        share = len(devices)
        nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / share
    nbytes = nbytes or math.inf
    kind = devices[0].device_kind
    bandwidth = peak_bandwidth(devices[0]) or _measured_bandwidth() / share
    return Chip(kind, nbytes, nbytes, peak / len(devices), bandwidth)


def machine_peak(dtype: str, devices: list[jax.Device] | None = None) -> tuple[float, str]:
    """Returns the FLOP/s of `devices` (None: all) together, and the source of that number.

    Known chips count with their bfloat16 peak, whatever `dtype` is; others are measured in `dtype`.
    """
    devices = jax.devices() if devices is None else devices
    peak = peak_flops(devices[0])
    if peak is not None:
        return peak * len(devices), f"{len(devices)} x {devices[0].device_kind}, bfloat16 peak"
    count = 1 if devices[0].platform == "cpu" else len(devices)
    source = f"measured {dtype} matrix product on this {devices[0].platform}"
    return measured_peak(dtype) * count, source
