"""How a memory begins: from the self-attention beside it, from lower layers, from an embedding."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lcjax.errors import InputError
from lcjax.models.config import ModelConfig
from lcjax.parallel.sharding import param_shardings, replicated
from lcjax.tree import union


def check_width(encoder: ModelConfig, decoder: ModelConfig) -> None:
    """Refuses an encoder whose states are wider than what cross-attention begins with."""
    if encoder.width > decoder.width:
        raise InputError(
            f"model.memory.encoder has states of {encoder.width} channels, more than the decoder's"
            f" {decoder.width}, whose first rows cross-attention begins with; give a narrower one"
        )


def share(kernel: jax.Array, of: float) -> jax.Array:
    """`of` times `kernel`, in its own type."""
    return kernel * jnp.asarray(of, kernel.dtype)


def with_memory(
    params: dict,
    config: ModelConfig,
    encoder: dict,
    *,
    out: float = 0.0,
    mesh: jax.sharding.Mesh | None = None,
) -> dict:
    """`params` with `encoder`'s weights and a new cross-attention in every layer that reads it.

    Queries are those of self-attention; keys and values its first E input rows, E the encoder's
    width; the norm that of the MLP, which stands behind it in the same place (the released code;
    the paper is silent). `out`: the share of self-attention's output projection; with 0 nothing
    changes at first.
    """
    check_width(config.memory.states, config)
    width = config.memory.states.width

    def begin(layer):
        attention = layer["attention"]

        def rows(name):
            kernel = attention[name]["kernel"]
            return kernel[..., :width, :, :]

        kernel = attention["out"]["kernel"]
        branch = {
            "norm": {"scale": layer["mlp_norm"]["scale"]},
            "query": {"kernel": attention["query"]["kernel"]},
            "key": {"kernel": rows("key")},
            "value": {"kernel": rows("value")},
            "out": {"kernel": share(kernel, out)},
        }
        return {"memory": branch}

    return _grown(params, config, begin, mesh) | {"encoder": encoder}


def with_lower_model(
    params: dict,
    config: ModelConfig,
    *,
    out: float = 0.0,
    mesh: jax.sharding.Mesh | None = None,
) -> dict:
    """`params` with SharedLLM's lower model, and a new cross-attention in every reading layer.

    The lower model is a copy of the embedding, the first M layers and the final norm (sec. 3.1; the
    released code forgets to load it). Queries and the norm before them are those of self-attention,
    whose keys they are to meet. `out`: the share of self-attention's output projection; with 0
    nothing changes at first.
    """
    # Layers of a decoder with this memory are never stacked.
    layers_below = [f"layers_{index}" for index in range(config.memory.states.num_layers)]

    def begin(layer):
        attention = layer["attention"]
        kernel = attention["out"]["kernel"]
        branch = {
            "norm": layer["attention_norm"],
            "query": attention["query"],
            "out": {"kernel": share(kernel, out)},
        }
        return {"memory": branch}

    def lower(params):
        layers = jax.tree.map(lambda *x: jnp.stack(x), *(params[name] for name in layers_below))
        rest = {name: jax.tree.map(jnp.copy, params[name]) for name in ("embed", "final_norm")}
        return {"encoder": rest | {"layers": layers}}

    given = {name: params[name] for name in ("embed", "final_norm", *layers_below)}
    layout = None if mesh is None else param_shardings(mesh, jax.eval_shape(lower, given))
    return _grown(params, config, begin, mesh) | jax.jit(lower, out_shardings=layout)(given)


def check_token(token: int, config: ModelConfig) -> None:
    """Refuses to begin with the embedding of a token that the decoder does not know."""
    if not 0 <= token < config.vocab_size:
        raise InputError(
            f"model.memory.begin={token} must lie between 0 and {config.vocab_size - 1}: the token"
            " whose embedding is begun with; the papers take EOS"
        )


def with_beacons(
    params: dict, config: ModelConfig, token: int, mesh: jax.sharding.Mesh | None = None
) -> dict:
    """`params` with an embedding of beacons, that of `token`, and their projections.

    In every layer these begin as copies of the text's.
    """

    def begin(layer):
        return {"attention": {"memory": layer["attention"]}}

    return with_embedding(_grown(params, config, begin, mesh), config, token, mesh)


def with_embedding(
    params: dict, config: ModelConfig, token: int, mesh: jax.sharding.Mesh | None = None
) -> dict:
    """`params` with the embedding of `token` as that of all of the memory's own tokens."""

    def own(table):
        return jnp.tile(table[token], (config.memory.tokens, 1))

    layout = None if mesh is None else replicated(mesh)
    made = jax.jit(own, out_shardings=layout)(params["embed"]["embedding"])
    return params | {"encoder": {"embedding": made}}


def _grown(
    params: dict,
    config: ModelConfig,
    begin: Callable[[dict], dict],
    mesh: jax.sharding.Mesh | None,
) -> dict:
    """`params` with what `begin` adds to every layer that reads."""
    reading = config.memory.reader_layers(config.num_layers)
    names = [f"layers_{i}" for i, reads in enumerate(reading) if reads]
    names = ["layers"] if "layers" in params else names
    given = {name: params[name] for name in names}

    def make(layers):  # copies, so that what is trained shares no memory with what is not
        return {name: jax.tree.map(jnp.copy, begin(layer)) for name, layer in layers.items()}

    layout = None
    if mesh is not None:
        layout = param_shardings(mesh, jax.eval_shape(make, given))
    return union(params, jax.jit(make, out_shardings=layout)(given))
