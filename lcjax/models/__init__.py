"""Decoders in Flax Linen: thin modules over plain functions."""

from lcjax.models.config import PRESETS, ModelConfig, preset
from lcjax.models.decoder import Decoder, head
from lcjax.models.layer_groups import stack_layers, unstack_layers, unstack_layers_in_place

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
