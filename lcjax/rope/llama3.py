"""The scaling of Llama 3.1 and 3.2."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from lcjax.errors import PositiveFloat, PositiveInt
from lcjax.rope.base import Extension, Rope, base_frequencies, hf_number


@Rope.register_subclass("llama3")
@dataclass(frozen=True, kw_only=True)
class Llama3(Rope):
    """f_j = (1 - m_j) theta_j / factor + m_j theta_j, m linear in the turns per trained length L.

    m_j = clip((L theta_j / 2 pi - low) / (high - low), 0, 1): pairs with more than `high` turns
    within L are unchanged, those with less than `low` are divided by `factor` (Llama 3.1's code).
    """

    factor: Extension = 8.0  # Llama-3.1; 32 in Llama-3.2
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: float = 4.0
    original_length: PositiveInt | None = None  # trained length L (8192); null: the checkpoint's

    examples = ({"original_length": 16},)
    hf_types = ("llama3",)

    def __post_init__(self):
        super().__post_init__()
        self.require(
            self.high_freq_factor >= self.low_freq_factor,
            "high_freq_factor",
            f"be at least low_freq_factor={self.low_freq_factor}",
        )

    def compute(self, head_dim: int, length: int) -> tuple[Float[np.ndarray, " R//2"], float]:
        theta = base_frequencies(self.get_resolved("theta"), head_dim)
        turns = self.get_resolved("original_length") * theta / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        if span:
            unchanged = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        else:  # a step (Llama 4 Scout)
            unchanged = (turns >= self.low_freq_factor).astype(np.float64)
        return (1 - unchanged) * theta / self.factor + unchanged * theta, 1.0

    def extended_length(self, length: int) -> int:
        return self.scaled_length(length, self.factor)

    def hf_rope(self, head_dim: int | None) -> tuple[dict, dict]:
        return {
            "rope_type": "llama3",
            "rope_theta": self.theta,
            "factor": self.factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_position_embeddings": self.original_length,
        }, {}

    @classmethod
    def from_hf_rope(cls, rope: dict, config: dict) -> "Llama3":
        return cls(
            theta=rope.get("rope_theta"),
            original_length=rope.get("original_max_position_embeddings"),
            **{k: hf_number(rope, k) for k in ("factor", "low_freq_factor", "high_freq_factor")},
        )
