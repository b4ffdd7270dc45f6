"""What all layers that read a context share: attention to it, added beside self-attention."""

import abc

import flax.linen as nn
import jax
import jax.numpy as jnp

from lcjax.models.config import ModelConfig
from lcjax.models.layers import Linear, Norm
from lcjax.models.memory import Encoded
from lcjax.parallel.sharding import LENGTH, attention_layout
from pallas_kernels import flash


class CrossAttention(nn.Module):
    """What a layer reads of the context: [B, T, D], 0 in rows whose context is all padding."""

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None

    @nn.compact
    def __call__(self, x: jax.Array, encoded: Encoded) -> jax.Array:
        c, mesh = self.config, self.mesh
        with jax.named_scope("memory"):
            normed, shape = Norm(c, name="norm")(x), (c.num_heads, c.head_dim)
            q = Linear((c.width,), shape, c, self.query_bias, mesh, name="query")(normed)
            k, v = self.keys(encoded)
            there = encoded.mask.astype(jnp.int32)
            y, _ = flash(
                self.queries(q, encoded),
                k,
                v,
                q_segments=jnp.ones(x.shape[:2], jnp.int32),
                k_segments=there,
                layout=self._layout(x, there),
            )
            return Linear(shape, (c.width,), c, mesh=mesh, name="out")(y)

    @property
    def query_bias(self) -> bool:
        """Whether queries have one."""
        return False

    @abc.abstractmethod
    def keys(self, encoded: Encoded) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, M, K, H] of a context of M tokens."""

    @abc.abstractmethod
    def queries(self, q: jax.Array, encoded: Encoded) -> jax.Array:
        """Projected queries [B, T, N, H] as they meet the keys."""

    def _layout(self, x: jax.Array, mask: jax.Array):
        """Tokens and context are cut over the devices of a text, where these divide both."""
        if self.mesh is None or self.is_initializing():
            return None
        tokens = x.shape[1] if mask.shape[1] % self.mesh.shape[LENGTH] == 0 else None
        return attention_layout(self.mesh, self.config.context_parallel, tokens)
