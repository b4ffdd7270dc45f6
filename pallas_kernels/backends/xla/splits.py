"""Keys cut into parts that are attended to side by side and merged: parallel work for few queries.

A decoding step of one row has few products of its own. Parts of a long cache are a batch of them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Operands, Spec, given_table
from pallas_kernels.merging import merge


def needed(k, operands: Operands, spec: Spec) -> bool:
    """A caller's table lists blocks of all keys: then they are walked as it says."""
    some = spec.splits is not None and min(spec.splits, k.shape[1]) > 1
    return some and given_table(operands, spec) is None


def forward(run, q, k, v, operands: Operands, spec: Spec):
    """out and lse by `run(q, k, v, operands, spec)` of each part, merged."""
    keys, count = k.shape[1], min(spec.splits, k.shape[1])
    q_index, k_index, q_segments, k_segments = operands[:4]
    size = -(-keys // count)
    if k_index is None:
        k_index = jnp.arange(keys, dtype=jnp.int32)[None]
    if k_segments is None and size * count != keys:  # what fills the last part is padding
        q_segments, k_segments = (jnp.ones(x.shape[:2], jnp.int32) for x in (q, k))
    if q_index is None:
        q_index = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    spec = dataclasses.replace(spec, splits=None)

    def cut(x, axis):
        widths = [(0, size * count - keys) if i == axis else (0, 0) for i in range(x.ndim)]
        x = jnp.pad(x, widths)
        return x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])

    def part(k, v, k_index, k_segments):
        places = Operands(q_index, k_index, q_segments, k_segments, operands.bias)
        return run(q, k, v, places, spec)

    segments = None if k_segments is None else cut(k_segments, 1)
    parts = jax.vmap(part, in_axes=1)(cut(k, 1), cut(v, 1), cut(k_index, 1), segments)
    return merge([tuple(x[i] for x in parts) for i in range(count)])
