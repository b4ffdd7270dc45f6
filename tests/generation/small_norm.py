"""A cache policy of a user, loaded by `--import`: each head keeps the keys of the smallest norm."""

from dataclasses import dataclass

import jax.numpy as jnp

from lcjax.attention import CachePolicy, Candidates


@CachePolicy.register_subclass("small_norm")
@dataclass(frozen=True)
class SmallNorm(CachePolicy):
    """Keys of a small norm receive much attention (Devoto et al. 2024, arXiv 2406.11430)."""

    def score(self, slots: Candidates):
        return -jnp.linalg.norm(slots.keys.astype(jnp.float32), axis=-1)
