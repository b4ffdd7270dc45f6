"""The roofline bound of a program: the least time in which a chip can run it.

It is the longest of three times: of the program's FLOPs at the chip's peak, of its least bytes at
the bandwidth of the chip's memory (Williams et al. 2009, Communications of the ACM 52(4)), and of
what devices of several slices must send to each other at the bandwidth of the network
(`exchanges`). FLOPs are the model's (`resources`), split evenly over the devices. The least bytes
that must pass between a device and its memory (HBM) are those of each weight once for each pass
that multiplies it, the visible part of the cache, the residuals of the backward pass, and the state
of the optimizer. An implementation that writes no other intermediate results to this memory needs
no more.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lcjax.cost import resources
from lcjax.cost.chips import Chip
from lcjax.cost.resources import MemoryEstimate
from lcjax.models import ModelConfig
from lcjax.parallel.sharding import Mesh


@dataclass(frozen=True)
class Work:
    """FLOPs, and bytes in HBM and from other slices, of one device in one run."""

    flops: float
    bytes: float  # read and written in HBM
    received: float = 0.0  # bytes from other slices

    def bound(self, chip: Chip) -> tuple[float, str]:
        """Returns the longest of the three times, and its cause: "FLOPs", "bytes" or "network"."""
        times = {"bytes": self.bytes / chip.bandwidth, "FLOPs": self.flops / chip.peak}
        if self.received and chip.network:
            times["network"] = self.received / chip.network
        cause = max(times, key=times.get)
        return times[cause], cause


def inference_work(
    config: ModelConfig, rows: int, length: int, tokens: int, mesh: Mesh | jax.sharding.Mesh
) -> Work:
    """Returns the work of reading the last `tokens` of `length` tokens; the cache holds the others.

    Logits are computed for the last token. A context of a memory is not counted.

    Args:
      config: the model.
      rows: rows on all devices.
      length: tokens of a row, the cached ones and the new ones.
      tokens: new tokens of a row; 1 is a decoding step.
      mesh: sizes of the mesh axes.
    """
    config = config.for_inference()
    sizes = mesh.shape
    head = 2 * config.width * config.vocab_size
    matmul = resources.estimate(config, length).matmul_flops - head
    attention = resources.attention_flops(config, length, tokens)
    flops = rows * (tokens * (matmul + attention) + head)
    local_rows = resources.rows_of_device(rows, sizes)
    cache = resources.read_cache_bytes(config, length, tokens, sizes)
    cache += resources.state_bytes(config, sizes["tensor"])  # which is also written
    logits = 4 * resources.divided(config.vocab_size, sizes["tensor"])
    weights = _read_weights(config, sizes, local_rows * tokens)
    return Work(flops / math.prod(sizes.values()), weights + local_rows * (cache + logits))


def cut_work(config: ModelConfig, rows: int, length: int, mesh: Mesh | jax.sharding.Mesh) -> Work:
    """Returns the work of evicting tokens at the end of a prompt: all keys and values are read.

    The states of layers without attention stay as they are. The arguments are those of
    `inference_work`.
    """
    sizes = mesh.shape
    whole, tensor = config.replace(cache=None), sizes["tensor"]
    cache = resources.cache_bytes(whole, length, tensor) - resources.state_bytes(whole, tensor)
    return Work(0.0, resources.rows_of_device(rows, sizes) * cache)


def training_work(
    config: ModelConfig,
    flops: float,
    estimated: MemoryEstimate,
    mesh: Mesh | jax.sharding.Mesh,
    *,
    accumulation: int = 1,
    received: float = 0.0,
) -> Work:
    """Returns the work of an update.

    Every microbatch reads the weights forward and backward, writes and reads the residuals of the
    backward pass, and adds to the gradients. The update reads and writes weights and optimizer
    state.

    Args:
      config: the model.
      flops: FLOPs of an update on all devices.
      estimated: bytes on one device (`training_memory`).
      mesh: sizes of the mesh axes.
      accumulation: microbatches of an update.
      received: bytes from other slices (`exchanges.received_from_slices`).
    """
    sizes = mesh.shape
    read = 2 * _read_weights(config, sizes, None)
    # Every microbatch writes the sum of gradients, and all but the first one read it before. The
    # update reads it, and reads and writes the trained weights, which are float32 like gradients.
    gradients = (2 * accumulation - 1 + 3) * estimated.gradients
    activations = 2 * estimated.activations
    nbytes = accumulation * (read + activations) + gradients + 2 * estimated.optimizer
    return Work(flops / math.prod(sizes.values()), nbytes, received)


def _read_weights(config: ModelConfig, sizes, tokens: int | None) -> float:
    """Returns the bytes of the weights that a device multiplies by `tokens`, with gathered ones.

    None: enough tokens to need all experts of a mixture, and weights in the compute dtype.
    """
    split = {**sizes, "fsdp": 1, "context": 1}
    total, experts = 0.0, config.experts
    for path, (count, size) in resources.per_device(config, split).items():
        is_table = path == "embed/embedding" and not config.tie_embeddings
        if is_table or path == "layer_embed/embedding":
            continue  # reads only one row per token
        if tokens is None:
            size = count * jnp.dtype(config.dtype).itemsize
        elif experts is not None and resources.is_expert(path):
            size *= min(1.0, tokens * experts.top_k / experts.count)
        total += size
    return total
