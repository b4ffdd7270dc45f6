"""Cache policies by name: the `type` of `model.cache`."""

from lcjax.attention.policies.attention_sums import H2O, ObservedAttention
from lcjax.attention.policies.compactor import Compactor, NonCausal
from lcjax.attention.policies.duo_attention import DuoAttention
from lcjax.attention.policies.expected_attention import ExpectedAttention
from lcjax.attention.policies.key_geometry import KeyDiff, Knorm, Random, StreamingCache, ThinK
from lcjax.attention.policies.kvcompose import KVCompose
from lcjax.attention.policies.kvzip import KVzip
from lcjax.attention.policies.lagkv import LagKV, LagKVOriginal
from lcjax.attention.policies.last_queries import Finch, SimLayerKV, SnapKV, Tova
from lcjax.attention.policies.leverage import Cap, Cur, Leverage
from lcjax.attention.policies.phases import Phases
from lcjax.attention.policies.q_filter import QFilter

__all__ = [
    "H2O", "Cap", "Compactor", "Cur", "DuoAttention", "ExpectedAttention", "Finch", "KVCompose",
    "KVzip", "KeyDiff", "Knorm", "LagKV", "LagKVOriginal", "Leverage", "NonCausal",
    "ObservedAttention", "Phases", "QFilter", "Random", "SimLayerKV", "SnapKV", "StreamingCache",
    "ThinK", "Tova",
]  # fmt: skip
