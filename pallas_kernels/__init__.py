"""Attention kernels that return differentiable partials, for JAX on any backend.

    out, lse = flash(q, k, v, causal() & window(4096))
    out, lse = merge([(out_a, lse_a), (out_b, lse_b)])

Depends on JAX only.
"""

from pallas_kernels.biases import Alibi, RelativeBias, alibi_slopes
from pallas_kernels.decode import decode
from pallas_kernels.flash import flash
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
from pallas_kernels.merging import merge
from pallas_kernels.tables import BlockTable

__all__ = [
    "Alibi",
    "BlockTable",
    "Mask",
    "PerHead",
    "RelativeBias",
    "alibi_slopes",
    "band",
    "by_heads",
    "causal",
    "chunk_distance",
    "chunks",
    "decode",
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
