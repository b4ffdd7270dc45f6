"""Rotary position methods: one registered dataclass per method, with pure functions only."""

from lcjax.rope.base import Rope, from_hf
from lcjax.rope.clex import Clex
from lcjax.rope.default import Default
from lcjax.rope.dynamic_ntk import DynamicNTK
from lcjax.rope.e2_llm import E2LLM
from lcjax.rope.linear import Linear
from lcjax.rope.llama3 import Llama3
from lcjax.rope.longrope import LongRope
from lcjax.rope.none import NoRotation
from lcjax.rope.ntk import NTK
from lcjax.rope.positions import (
    Bf16Positions,
    ClexPositions,
    E2Positions,
    PlainPositions,
    Positions,
)
from lcjax.rope.rotation import Rotation, rotate, stack_rotations
from lcjax.rope.yarn import Yarn

__all__ = [
    "E2LLM",
    "NTK",
    "Bf16Positions",
    "Clex",
    "ClexPositions",
    "Default",
    "DynamicNTK",
    "E2Positions",
    "Linear",
    "Llama3",
    "LongRope",
    "NoRotation",
    "PlainPositions",
    "Positions",
    "Rope",
    "Rotation",
    "Yarn",
    "from_hf",
    "rotate",
    "stack_rotations",
]
