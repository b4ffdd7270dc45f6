"""Masked language models, and encoders that start from the first layers of a decoder.

A decoder becomes an encoder by letting its tokens see later ones and by learning to fill in masked
tokens (LLM2Vec, BehnamGhader et al. 2024, arXiv 2404.05961, sec. 2). This needs far less training
than random initial weights. `lcjax.memory.cepe` encodes contexts with such an encoder.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lcjax.attention import Bidirectional
from lcjax.errors import InputError
from lcjax.models.layers import Linear, Norm
from lcjax.models.model_config import ModelConfig
from lcjax.parallel.sharding import param_shardings

_SHARED = ("rope", "position")  # parameters that some models have once for all layers


class MaskedHead(nn.Module):
    """The head of a masked language model: norm(silu(dense(x))).

    Logits are its products with the tied embedding, plus a bias, as in CEPE's encoder (arXiv
    2402.16617, released code `LlamaForMLM`).
    """

    config: ModelConfig

    def setup(self):
        c = self.config
        self.dense = Linear((c.width,), (c.width,), c, bias=True)
        self.norm = Norm(c)
        dtype = jnp.dtype(c.param_dtype)
        self.bias = self.param("bias", nn.initializers.zeros, (c.vocab_size,), dtype)

    def __call__(self, hidden: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return self.norm(nn.silu(self.dense(hidden)))


def encoder_config(config: ModelConfig, layers: int) -> ModelConfig:
    """Returns the config of an encoder made of the first `layers` of a decoder.

    Its vocabulary has one more token, [MASK], which is the last one.
    """
    if not 1 <= layers <= config.num_layers:
        raise InputError(
            f"model.encoder_layers={layers} must lie in 1 ... {config.num_layers}, the layers of"
            " the checkpoint"
        )
    if config.memory is not None or config.mlm_head or config.layers:
        kind = "an encoder already" if config.mlm_head else "a model with a memory or model.layers"
        raise InputError(
            f"model.encoder_layers={layers}: the checkpoint is {kind}; give a plain decoder, or"
            " leave it out"
        )
    return config.replace(
        vocab_size=config.vocab_size + 1,
        num_layers=layers,
        tie_embeddings=True,
        head_bias=False,
        mlm_head=True,
        pattern=Bidirectional(),
        scan_layers=True,
    )


def encoder_params(
    params: dict, config: ModelConfig, mesh: jax.sharding.Mesh | None = None
) -> dict:
    """Returns initial parameters for `encoder_config` from those of a decoder.

    The embedding of [MASK] starts as the mean of all embeddings, and the dense layer of the head as
    the identity. The final norm is the attention norm of the decoder's next layer, because
    cross-attention reads the encoder's result in place of that layer.

    Args:
      params: parameters of the decoder, with stacked layers.
      config: the config of the encoder.
      mesh: the devices of the result.
    """
    count, dtype = config.num_layers, jnp.dtype(config.param_dtype)

    def init(decoder: dict) -> dict:
        norms, table = decoder["layers"]["attention_norm"], decoder["embed"]["embedding"]
        inner = count < norms["scale"].shape[0]
        mean = table.mean(0, keepdims=True, dtype=jnp.float32).astype(table.dtype)
        dense = {
            "kernel": jnp.eye(config.width, dtype=dtype),
            "bias": jnp.zeros(config.width, dtype),
        }
        return {
            "embed": {"embedding": jnp.concatenate([table, mean])},
            "layers": jax.tree.map(lambda x: x[:count], decoder["layers"]),
            "final_norm": jax.tree.map(lambda x: x[count], norms)
            if inner
            else decoder["final_norm"],
            **{name: decoder[name] for name in _SHARED if name in decoder},
            "mlm": {
                "dense": dense,
                "norm": {"scale": jnp.ones(config.width, dtype)},
                "bias": jnp.zeros(config.vocab_size, dtype),
            },
        }

    names = ("embed", "layers", "final_norm", *_SHARED)
    decoder = {name: params[name] for name in names if name in params}
    shardings = None if mesh is None else param_shardings(mesh, jax.eval_shape(init, decoder))
    return jax.jit(init, out_shardings=shardings)(decoder)
