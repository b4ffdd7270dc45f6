"""Contexts that are encoded: read by cross-attention, or by self-attention before the text."""

from lcjax.memory.auto_compressor import AutoCompressor
from lcjax.memory.beacon import Beacon
from lcjax.memory.cepe import Cepe
from lcjax.memory.config import (
    AutoCompressorSection,
    BeaconSection,
    CepeSection,
    MemorySection,
    SharedLlmSection,
)
from lcjax.memory.context_tree import Tree
from lcjax.memory.initial import with_lower_model, with_memory
from lcjax.memory.policies import Level, Own, Policy, QueryAware, Random, Right
from lcjax.memory.shared_llm import SharedLlm
from lcjax.models.memory import Encoded, Memory

__all__ = [
    "AutoCompressor", "AutoCompressorSection", "Beacon", "BeaconSection", "Cepe", "CepeSection",
    "Encoded", "Level", "Memory", "MemorySection", "Own", "Policy", "QueryAware", "Random", "Right",
    "SharedLlm", "SharedLlmSection", "Tree", "with_lower_model", "with_memory",
]  # fmt: skip
