"""Decoders in Flax Linen: thin modules over plain functions."""

from lcjax.models.config import ModelConfig
from lcjax.models.decoder import (
    Decoder,
    head,
    stack_layers,
    unstack_layers,
    unstack_layers_in_place,
)
from lcjax.models.presets import PRESETS, preset

__all__ = [
    "PRESETS",
    "Decoder",
    "ModelConfig",
    "head",
    "preset",
    "stack_layers",
    "unstack_layers",
    "unstack_layers_in_place",
]
