"""How cross-attention begins: from the self-attention beside it (CEPE, sec. 2.2)."""

import jax
import jax.numpy as jnp

from lcjax.errors import InputError
from lcjax.models.config import ModelConfig
from lcjax.sharding import param_shardings


def check_width(encoder: ModelConfig, decoder: ModelConfig) -> None:
    """Refuses an encoder whose states are wider than what cross-attention begins with."""
    if encoder.width > decoder.width:
        raise InputError(
            f"model.memory.encoder has states of {encoder.width} channels, more than the decoder's"
            f" {decoder.width}, whose first rows cross-attention begins with; give a narrower one"
        )


def with_memory(
    params: dict,
    config: ModelConfig,
    encoder: dict,
    *,
    out: str = "zeros",
    mesh: jax.sharding.Mesh | None = None,
) -> dict:
    """`params` with `encoder`'s weights and a new cross-attention in every layer that reads it.

    Queries are those of self-attention; keys and values its first E input rows, E the encoder's
    width; the norm that of the MLP, which stands behind it in the same place (the released code;
    the paper is silent). `out`: zeros, so that nothing changes at first, or copy.
    """
    check_width(config.memory.states, config)
    width = config.memory.states.width

    def begin(layer):
        attention = layer["attention"]

        def rows(name):
            kernel = attention[name]["kernel"]
            return kernel[..., :width, :, :]

        kernel = attention["out"]["kernel"]
        return {
            "norm": {"scale": layer["mlp_norm"]["scale"]},
            "query": {"kernel": attention["query"]["kernel"]},
            "key": {"kernel": rows("key")},
            "value": {"kernel": rows("value")},
            "out": {"kernel": jnp.zeros_like(kernel) if out == "zeros" else kernel},
        }

    reading = config.memory.reading(config.num_layers)
    names = [f"layers_{i}" for i, reads in enumerate(reading) if reads]
    names = ["layers"] if "layers" in params else names
    given = {name: params[name] for name in names}

    def make(layers):  # copies, so that what is trained shares no memory with what is not
        return {name: jax.tree.map(jnp.copy, begin(layer)) for name, layer in layers.items()}

    layout = None
    if mesh is not None:
        shapes = jax.eval_shape(lambda x: {k: {"memory": v} for k, v in make(x).items()}, given)
        layout = {k: v["memory"] for k, v in param_shardings(mesh, shapes).items()}
    made = jax.jit(make, out_shardings=layout)(given)
    grown = {name: params[name] | {"memory": made[name]} for name in names}
    return params | grown | {"encoder": encoder}
