"""Position interpolation, PI (Chen et al. 2023, arXiv 2306.15595)."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from lcjax.rope.base import Extension, Rope, base_frequencies, hf_number


@Rope.register_subclass("linear")
@dataclass(frozen=True, kw_only=True)
class Linear(Rope):
    """f_j = theta^(-2j/d) / factor: divides every position by `factor` (PI, arXiv 2306.15595)."""

    factor: Extension  # target length / trained length, the same at every input length

    examples = ({"factor": 4.0},)
    hf_types = ("linear",)

    def compute(self, head_dim: int, length: int) -> tuple[Float[np.ndarray, " R//2"], float]:
        return base_frequencies(self.get_resolved("theta"), head_dim) / self.factor, 1.0

    def extended_length(self, length: int) -> int:
        return self.scaled_length(length, self.factor)

    def hf_rope(self, head_dim: int | None) -> tuple[dict, dict]:
        return {"rope_type": "linear", "rope_theta": self.theta, "factor": self.factor}, {}

    @classmethod
    def from_hf_rope(cls, rope: dict, config: dict) -> "Linear":
        return cls(theta=rope.get("rope_theta"), factor=hf_number(rope, "factor"))
