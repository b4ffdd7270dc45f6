"""The head of a masked language model: hidden states made ready for the tied embedding."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from lcjax.models.config import ModelConfig
from lcjax.models.layers import Linear, Norm


class MaskedHead(nn.Module):
    """norm(silu(dense(x))), of which the logits are the products with the embedding, plus a bias.

    As in CEPE's encoder (arXiv 2402.16617, released code `LlamaForMLM`).
    """

    config: ModelConfig

    def setup(self):
        c = self.config
        self.dense = Linear((c.width,), (c.width,), c, bias=True)
        self.norm = Norm(c)
        dtype = jnp.dtype(c.param_dtype)
        self.bias = self.param("bias", nn.initializers.zeros, (c.vocab_size,), dtype)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        return self.norm(nn.silu(self.dense(hidden)))
