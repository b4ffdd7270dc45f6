"""Cache policies by name: the `type` of `model.cache`."""

from lcjax.attention.policies.attention_sums import H2O, ObservedAttention
from lcjax.attention.policies.expected_attention import ExpectedAttention
from lcjax.attention.policies.key_geometry import KeyDiff, Knorm, Random, StreamingCache
from lcjax.attention.policies.kvzip import KVzip
from lcjax.attention.policies.lagkv import LagKV
from lcjax.attention.policies.last_queries import Finch, SnapKV, Tova

__all__ = [
    "H2O", "ExpectedAttention", "Finch", "KVzip", "KeyDiff", "Knorm", "LagKV", "ObservedAttention",
    "Random", "SnapKV", "StreamingCache", "Tova",
]  # fmt: skip
