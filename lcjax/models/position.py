"""How a decoder without rotations knows the order of its tokens.

- `alibi`: logits get -m_h (i - j), m_h fixed by the head (Press et al. 2022, arXiv 2108.12409).
- `t5`: logits get a learned b[bucket(i - j), h], one table for all layers (Raffel et al. 2020,
  sec. 2.1). Logits keep their scale 1/sqrt(H), which T5 leaves to its initial weights.
- `sinusoidal`: hidden states start at sqrt(D) embed + PE, PE[p, 2i] = sin(p / 10000^(2i/D)) and
  PE[p, 2i+1] = cos of the same (Vaswani et al. 2017, sec. 3.4 and 3.5).
- `learned`: they start at embed + a learned row for each position up to the trained length (GPT-2).

Distances are those of the tokens in their document, whatever is packed around them. Here B is the
batch, T the tokens of a row, D the width, N the query heads.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from lcjax.errors import InputError
from lcjax.models.config import ModelConfig
from lcjax.rope import Rotation
from pallas_kernels import Alibi, RelativeBias, alibi_slopes

BUCKETS = 32  # of T5's table, per head
MAX_DISTANCE = 128  # from which all distances share its last bucket


def no_rotation() -> Rotation:
    """The rotation that turns no channel."""
    return Rotation(jnp.zeros(0, jnp.float32))


class Position(nn.Module):
    """What `config.position` adds to embeddings and to logits, with its parameters."""

    config: ModelConfig

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.param_dtype)
        if c.position == "t5":
            spread = nn.initializers.normal(c.width**-0.5)
            self.bias = self.param("bias", spread, (BUCKETS, c.num_heads), dtype)
        if c.position == "learned":
            spread = nn.initializers.normal(0.02)
            self.embedding = self.param("embedding", spread, (c.max_length, c.width), dtype)

    def logit_bias(self) -> Alibi | RelativeBias | None:
        """The bias of all layers' logits."""
        c = self.config
        if c.position == "alibi":
            return Alibi(jnp.asarray(alibi_slopes(c.num_heads)))
        if c.position == "t5":
            return RelativeBias(self.bias.astype(jnp.float32), MAX_DISTANCE)
        return None

    def __call__(self, x: jax.Array, positions: jax.Array, segments: jax.Array | None) -> jax.Array:
        """The first hidden states of embeddings x [B, T, D] at `positions` [B, T]."""
        c = self.config
        if c.position not in ("sinusoidal", "learned"):
            return x
        if segments is not None:
            positions = jnp.where(segments == 0, 0, positions)  # padding may stand anywhere
        if c.position == "sinusoidal":
            waves = sinusoids(positions, c.width)
            return (math.sqrt(c.width) * x.astype(jnp.float32) + waves).astype(x.dtype)
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise InputError(
                f"positions of type {positions.dtype} have no row of the table that "
                "model.position=learned looks up; give whole ones"
            )
        # Past the table a row of NaN, since what is traced cannot be refused.
        rows = jnp.take(self.embedding, positions, axis=0, mode="fill", fill_value=jnp.nan)
        return x + rows.astype(x.dtype)


def sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """PE float32 [..., width] of `positions` [...]: sines in even channels, cosines in odd ones."""
    exponents = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    angles = positions.astype(jnp.float32)[..., None] * 10_000.0**-exponents
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*positions.shape, -1)[..., :width]
