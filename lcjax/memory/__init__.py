"""Methods that encode contexts, which cross-attention or self-attention of a decoder reads."""

from lcjax.memory.auto_compressor import AutoCompressor, AutoCompressorSection
from lcjax.memory.beacon import Beacon, BeaconSection
from lcjax.memory.cepe import Cepe, CepeSection
from lcjax.memory.context_tree import (
    FunctionPolicy,
    Level,
    Policy,
    QueryAware,
    Random,
    Right,
    Tree,
)
from lcjax.memory.cross_attention import CrossAttentionMemory, init_reader
from lcjax.memory.prefix import PrefixMemory
from lcjax.memory.retro import Retro, RetroSection
from lcjax.memory.shared_llm import SharedLlm, SharedLlmSection
from lcjax.models.memory import EncodedContext, Memory, MemorySection, add_to_readers
from lcjax.parallel.sharding import init_on_mesh

__all__ = [
    "AutoCompressor", "AutoCompressorSection", "Beacon", "BeaconSection", "Cepe", "CepeSection",
    "CrossAttentionMemory", "EncodedContext", "FunctionPolicy", "Level", "Memory", "MemorySection",
    "Policy", "PrefixMemory", "QueryAware", "Random", "Retro", "RetroSection", "Right", "SharedLlm",
    "SharedLlmSection", "Tree", "add_to_readers", "init_on_mesh", "init_reader",
]  # fmt: skip
