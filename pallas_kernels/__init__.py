"""Attention kernels that return differentiable partials, for JAX on any backend.

    out, lse = flash(q, k, v, causal() & window(4096))
    out, lse = merge([(out_a, lse_a), (out_b, lse_b)])

Depends on JAX only.
"""

from pallas_kernels.flash import flash, merge
from pallas_kernels.masks import (
    Mask,
    PerHead,
    band,
    by_heads,
    causal,
    chunk_distance,
    chunks,
    documents,
    everything,
    keys_in,
    nothing,
    per_head,
    prefix,
    queries_in,
    random_blocks,
    since_chunk,
    stride,
    tail_of,
    window,
)

__all__ = [
    "Mask",
    "PerHead",
    "band",
    "by_heads",
    "causal",
    "chunk_distance",
    "chunks",
    "documents",
    "everything",
    "flash",
    "keys_in",
    "merge",
    "nothing",
    "per_head",
    "prefix",
    "queries_in",
    "random_blocks",
    "since_chunk",
    "stride",
    "tail_of",
    "window",
]
