"""Attention patterns: who sees whom at which positions, and the call that computes it."""

from lcjax.attention.attend import attend, order_indices
from lcjax.attention.base import Pass, Pattern, Places
from lcjax.attention.causal import Causal
from lcjax.attention.dual_chunk import DualChunk
from lcjax.attention.lm_infinite import LMInfinite
from lcjax.attention.rerope import ReRoPE
from lcjax.attention.s2 import ShiftedSparse
from lcjax.attention.self_extend import SelfExtend
from lcjax.attention.sliding import Sliding
from lcjax.attention.streaming import Streaming

__all__ = [
    "Causal", "DualChunk", "LMInfinite", "Pass", "Pattern", "Places", "ReRoPE", "SelfExtend",
    "ShiftedSparse", "Sliding", "Streaming", "attend", "order_indices",
]  # fmt: skip
