"""Attention patterns: who sees whom at which positions, and the call that computes it."""

from lcjax.attention.attend import attend
from lcjax.attention.base import Pass, Pattern
from lcjax.attention.causal import Causal
from lcjax.attention.sliding import Sliding

__all__ = ["Causal", "Pass", "Pattern", "Sliding", "attend"]
