"""Plain rotary positions."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from lcjax.rope.base import Rope, base_frequencies


@Rope.register_subclass("default")
@dataclass(frozen=True, kw_only=True)
class Default(Rope):
    """f_j = theta^(-2j/d), j = 0..d/2-1 (RoFormer, arXiv 2104.09864).

    Some papers count j from 1 in this formula, so that no frequency is 1. All published code counts
    from 0.
    """

    hf_types = ("default",)

    def compute(self, head_dim: int, length: int) -> tuple[Float[np.ndarray, " R//2"], float]:
        return base_frequencies(self.get_resolved("theta"), head_dim), 1.0

    def hf_rope(self, head_dim: int | None) -> tuple[dict, dict]:
        return {"rope_type": "default", "rope_theta": self.theta}, {}

    @classmethod
    def from_hf_rope(cls, rope: dict, config: dict) -> "Default":
        return cls(theta=rope.get("rope_theta"))
