"""Contexts that are encoded beside the decoder's window and read by cross-attention."""

from lcjax.memory.cepe import Cepe
from lcjax.memory.context_tree import Tree
from lcjax.memory.initial import with_lower_model, with_memory
from lcjax.memory.policies import Level, Policy, QueryAware, Random, Right
from lcjax.memory.section import CepeSection, MemorySection, SharedLlmSection
from lcjax.memory.shared_llm import SharedLlm
from lcjax.models.memory import Encoded, Memory

__all__ = [
    "Cepe", "CepeSection", "Encoded", "Level", "Memory", "MemorySection", "Policy", "QueryAware",
    "Random", "Right", "SharedLlm", "SharedLlmSection", "Tree", "with_lower_model", "with_memory",
]  # fmt: skip
