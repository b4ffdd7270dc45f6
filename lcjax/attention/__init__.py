"""Attention patterns: which keys a query sees, and at which positions."""

from lcjax.attention.base import POSITIONS, AttentionMetadata, Pass, Pattern, order_indices
from lcjax.attention.bigbird import BigBird
from lcjax.attention.budgets import (
    AcrossLayers,
    AdaptiveHeads,
    AdaptiveOriginal,
    Composite,
    Critical,
    HeadBudget,
    HeadRates,
    LayerBudget,
    LayerRatios,
    Pyramid,
    PyramidOriginal,
    Threshold,
)
from lcjax.attention.cache_method import CacheMethod, KeepAll
from lcjax.attention.cache_storage import Exact, Fp8, Int8, Storage, TurboQuant
from lcjax.attention.candidates import Candidates, Seen
from lcjax.attention.causal import Bidirectional, Causal, Chunked, Sliding
from lcjax.attention.channels import Channels
from lcjax.attention.dsa import DSA
from lcjax.attention.dual_chunk import DualChunk
from lcjax.attention.eviction import CachePolicy
from lcjax.attention.flex_prefill import FlexPrefill
from lcjax.attention.inf_llm import InfLLM
from lcjax.attention.inf_llm_v2 import InfLLMV2
from lcjax.attention.kivi import Kivi
from lcjax.attention.landmark.pattern import Landmark
from lcjax.attention.lm_infinite import LMInfinite, ReRoPE
from lcjax.attention.longformer import Longformer
from lcjax.attention.merging import Merging
from lcjax.attention.moba import MoBA
from lcjax.attention.msa import MSA
from lcjax.attention.nsa import NSA
from lcjax.attention.policies import (
    H2O,
    Cap,
    Compactor,
    Cur,
    DuoAttention,
    ExpectedAttention,
    Finch,
    KeyDiff,
    Knorm,
    KVCompose,
    KVzip,
    LagKV,
    LagKVOriginal,
    Leverage,
    NonCausal,
    ObservedAttention,
    Phases,
    QFilter,
    Random,
    SimLayerKV,
    SnapKV,
    StreamingCache,
    ThinK,
    Tova,
)
from lcjax.attention.qsa import QSA
from lcjax.attention.quest import Quest
from lcjax.attention.relative import Disentangled, TransformerXL
from lcjax.attention.s2 import ShiftedSparse
from lcjax.attention.seer import SeerAttention
from lcjax.attention.seer_r import SeerAttentionR
from lcjax.attention.self_extend import SelfExtend
from lcjax.attention.sparse_transformer import SparseTransformer
from lcjax.attention.streaming import Streaming
from lcjax.attention.tri_shape import TriShape
from lcjax.attention.vertical_slash import SparseHead, VerticalSlash, search_head_budgets
from lcjax.attention.xattention import XAttention

__all__ = [
    "DSA", "H2O", "MSA", "NSA", "POSITIONS", "QSA", "AcrossLayers", "AdaptiveHeads",
    "AdaptiveOriginal", "AttentionMetadata", "Bidirectional", "BigBird", "CacheMethod",
    "CachePolicy", "Candidates", "Cap", "Causal", "Channels", "Chunked", "Compactor", "Composite",
    "Critical", "Cur", "Disentangled", "DualChunk", "DuoAttention", "Exact", "ExpectedAttention",
    "Finch", "FlexPrefill", "Fp8", "HeadBudget", "HeadRates", "InfLLM", "InfLLMV2", "Int8",
    "KVCompose", "KVzip", "KeepAll", "KeyDiff", "Kivi", "Knorm", "LMInfinite", "LagKV",
    "LagKVOriginal", "Landmark", "LayerBudget", "LayerRatios", "Leverage", "Longformer", "Merging",
    "MoBA", "NonCausal", "ObservedAttention", "Pass", "Pattern", "Phases", "Pyramid",
    "PyramidOriginal", "QFilter", "Quest", "Random", "ReRoPE", "Seen", "SeerAttention",
    "SeerAttentionR", "SelfExtend", "ShiftedSparse", "SimLayerKV", "Sliding", "SnapKV",
    "SparseHead", "SparseTransformer", "Storage", "Streaming", "StreamingCache", "ThinK",
    "Threshold", "Tova", "TransformerXL", "TriShape", "TurboQuant", "VerticalSlash", "XAttention",
    "order_indices", "search_head_budgets",
]  # fmt: skip
