"""Estimates the cost of a model before it runs: parameters, FLOPs, cache and memory per device.

For example:

    cost.estimate(config, length)                      # parameters, FLOPs per token, cache bytes
    cost.layer_lines(config, length)                   # which settings reach which layers
    cost.training_memory(config, length, rows, Mesh(fsdp=8)) # bytes on each device, by purpose

`python -m lcjax.cost` prints these numbers for a config. With `--compiled` it compiles the programs
and compares the compiler's numbers with their roofline bounds.
"""

from lcjax.cost.chips import machine_peak, measured_peak, peak_bandwidth, peak_flops
from lcjax.cost.layers import layer_lines
from lcjax.cost.resources import (
    Cost,
    MemoryEstimate,
    cache_bytes,
    estimate,
    generation_memory,
    parameter_shapes,
    stored_weights,
    training_memory,
    visible_keys,
)

__all__ = [
    "Cost",
    "MemoryEstimate",
    "cache_bytes",
    "estimate",
    "generation_memory",
    "layer_lines",
    "machine_peak",
    "measured_peak",
    "parameter_shapes",
    "peak_bandwidth",
    "peak_flops",
    "stored_weights",
    "training_memory",
    "visible_keys",
]
