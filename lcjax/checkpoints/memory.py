"""A memory for a decoder that has none: its encoder is read or copied, its reading begun."""

import jax

from lcjax.checkpoints.load import load
from lcjax.memory import MemorySection
from lcjax.models import PRESETS, ModelConfig, unstack_layers
from lcjax.models.decoder import random_params


def add_memory(
    params: dict,
    config: ModelConfig,
    section: MemorySection,
    seed: int,
    mesh: jax.sharding.Mesh | None = None,
) -> dict:
    """The parameters of a decoder, and those of the memory that `resolve` gave its config."""
    if not config.stacked and "layers" in params:
        params = unstack_layers(params, config)
    encoder = None
    if section.encoder in PRESETS:
        made = config.memory.states.replace(param_dtype=config.param_dtype)
        encoder = random_params(made, seed + 1, mesh)
    elif section.encoder is not None:
        encoder, _, _ = load(section.encoder, mesh=mesh, param_dtype=config.param_dtype)
    return section.init_params(params, config, encoder, mesh)
