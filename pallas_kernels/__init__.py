"""Attention kernels that return differentiable partials, for JAX on any backend.

    out, lse = flash(q, k, v, causal() & window(4096))
    out, lse = merge([(out_a, lse_a), (out_b, lse_b)])

A mask built from `causal`, `window`, ... defines the visible keys. A `BlockTable` can restrict them
further; `tables` makes it (`tables.from_mask`, `from_block_mask`, `from_top_k`). `key_bits` are the
keys that each query chooses. `decode` reads a cache in its memory layout, `landmark_attention`
computes a grouped softmax, and `Layout` shards each of them over the devices of a mesh. `explain`
reports which implementation runs, in which blocks, and why.

`gated_delta_rule` is a linear attention with a state in place of a cache, and `causal_convolution`
the short convolution before it.

Depends on JAX only.
"""

from pallas_kernels import gather, key_bits, tables
from pallas_kernels.biases import Alibi, Bias, RelativeBias, alibi_slopes
from pallas_kernels.convolution import causal_convolution
from pallas_kernels.delta_rule import gated_delta_rule
from pallas_kernels.explanations import explain
from pallas_kernels.flash import decode, flash
from pallas_kernels.folded import FoldedHeads
from pallas_kernels.landmark import landmark_attention
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
from pallas_kernels.online_softmax import merge
from pallas_kernels.quantised import Floats, Quantised, Scaled, dequantise, swap_heads
from pallas_kernels.sharded import Layout, zigzag
from pallas_kernels.tables import BlockTable

__all__ = [
    "Alibi",
    "Bias",
    "BlockTable",
    "Floats",
    "FoldedHeads",
    "Layout",
    "Mask",
    "PerHead",
    "Quantised",
    "RelativeBias",
    "Scaled",
    "alibi_slopes",
    "band",
    "by_heads",
    "causal",
    "causal_convolution",
    "chunk_distance",
    "chunks",
    "decode",
    "dequantise",
    "documents",
    "everything",
    "explain",
    "flash",
    "gated_delta_rule",
    "gather",
    "key_bits",
    "keys_in",
    "landmark_attention",
    "merge",
    "nothing",
    "per_head",
    "prefix",
    "queries_in",
    "random_blocks",
    "since_chunk",
    "stride",
    "swap_heads",
    "tables",
    "tail_of",
    "window",
    "zigzag",
]
