"""A memory for a decoder that has none: its encoder is read or copied, its reading begun."""

import jax

from lcjax.convert.load import load
from lcjax.memory import MemorySection, SharedLlmSection, with_lower_model, with_memory
from lcjax.models import PRESETS, ModelConfig, unstack_layers
from lcjax.models.initial import random_params


def add_memory(
    params: dict,
    config: ModelConfig,
    section: MemorySection,
    seed: int,
    mesh: jax.sharding.Mesh | None = None,
) -> dict:
    """The parameters of a decoder, and those of the memory that `resolve` gave its config."""
    if not config.scan_layers and "layers" in params:
        params = unstack_layers(params, config)
    if isinstance(section, SharedLlmSection):
        return with_lower_model(params, config, out=section.out, mesh=mesh)
    encoder = config.memory.states.replace(param_dtype=config.param_dtype)
    if section.encoder in PRESETS:
        weights = random_params(encoder, seed + 1, mesh)
    else:
        weights, _, _ = load(section.encoder, mesh=mesh, param_dtype=config.param_dtype)
    weights = {name: branch for name, branch in weights.items() if name != "mlm"}
    return with_memory(params, config, weights, out=section.out, mesh=mesh)
