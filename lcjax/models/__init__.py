"""Decoders in Flax Linen: configs, layers, KV cache, losses, adapters."""

from lcjax.models.decoder import Decoder, head
from lcjax.models.layer_groups import (
    arrange_layers,
    stack_layers,
    unstack_layers,
    unstack_layers_in_place,
)
from lcjax.models.model_config import PRESETS, LayerKind, ModelConfig, preset
from lcjax.models.weight_storage import Int8Weights, NF4Weights

__all__ = [
    "PRESETS",
    "Decoder",
    "Int8Weights",
    "LayerKind",
    "ModelConfig",
    "NF4Weights",
    "arrange_layers",
    "head",
    "preset",
    "stack_layers",
    "unstack_layers",
    "unstack_layers_in_place",
]
