"""Attention patterns: who sees whom at which positions, and the call that computes it."""

from lcjax.attention.attend import attend, order_indices
from lcjax.attention.base import POSITIONS, Pass, Pattern, Places
from lcjax.attention.bidirectional import Bidirectional
from lcjax.attention.bigbird import BigBird
from lcjax.attention.causal import Causal
from lcjax.attention.dual_chunk import DualChunk
from lcjax.attention.inf_llm import InfLLM
from lcjax.attention.landmark.pattern import Landmark
from lcjax.attention.lm_infinite import LMInfinite
from lcjax.attention.longformer import Longformer
from lcjax.attention.rerope import ReRoPE
from lcjax.attention.s2 import ShiftedSparse
from lcjax.attention.self_extend import SelfExtend
from lcjax.attention.sliding import Sliding
from lcjax.attention.sparse_transformer import SparseTransformer
from lcjax.attention.streaming import Streaming
from lcjax.attention.vertical_slash import VerticalSlash

__all__ = [
    "POSITIONS", "BigBird", "Bidirectional", "Causal", "DualChunk", "InfLLM", "LMInfinite",
    "Landmark", "Longformer", "Pass", "Pattern", "Places", "ReRoPE", "SelfExtend", "ShiftedSparse",
    "Sliding", "SparseTransformer", "Streaming", "VerticalSlash", "attend", "order_indices",
]  # fmt: skip
