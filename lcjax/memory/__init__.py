"""Contexts that are encoded beside the decoder's window and read by cross-attention."""

from lcjax.memory.cepe import Cepe
from lcjax.memory.initial import with_memory
from lcjax.memory.section import CepeSection, MemorySection
from lcjax.models.memory import Encoded, Memory

__all__ = [
    "Cepe", "CepeSection", "Encoded", "Memory", "MemorySection", "with_memory",
]  # fmt: skip
