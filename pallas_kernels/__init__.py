"""Attention kernels that return differentiable partials, for JAX on any backend.

    out, lse = flash(q, k, v, causal() & window(4096))
    out, lse = merge([(out_a, lse_a), (out_b, lse_b)])

Depends on JAX only.
"""

from pallas_kernels.flash import flash, merge
from pallas_kernels.masks import Mask, causal, everything, window

__all__ = ["Mask", "causal", "everything", "flash", "merge", "window"]
