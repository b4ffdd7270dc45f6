"""E2-LLM at inference: interpolation by a whole number that may follow the request."""

import math
from dataclasses import dataclass

import numpy as np

from lcjax.rope.base import Rope, base_frequencies


@Rope.register_subclass("e2_llm")
@dataclass(frozen=True, kw_only=True)
class E2LLM(Rope):
    """f_j = theta_j / g, g fixed or max(1, ceil(n / L)) (E2-LLM, arXiv 2401.06951, sec. 4).

    One training at short length over many scales and offsets (`lcjax.rope.positions.E2Positions`)
    serves every g. The paper changes g "based on the length of input context" without a formula;
    whole numbers are what it trains with, up to 20. Larger ones served it up to 120K tokens (5.5).
    """

    factor: float | None = None  # g for every request (8 for E2-32K of L = 4096); null: from length
    original_length: int | None = None  # trained length L; null: the checkpoint's

    hf_types = ()  # a fixed g is linear in transformers; a following one is plain up to L tokens

    def __post_init__(self):
        super().__post_init__()
        self.require(self.factor is None or self.factor >= 1, "factor", "be 1 or more, or null")
        length = self.original_length
        self.require(length is None or length >= 1, "original_length", "be the trained length")

    @property
    def depends_on_length(self) -> bool:
        return self.factor is None

    def scale(self, length: int) -> float:
        """g for a request of `length` tokens."""
        if self.factor is not None:
            return self.factor
        return float(max(1, math.ceil(self.check_length(length) / self.known("original_length"))))

    def compute(self, head_dim: int, length: int) -> tuple[np.ndarray, float]:
        return base_frequencies(self.known("theta"), head_dim) / self.scale(length), 1.0

    @property
    def hf_limit(self) -> int | None:
        return self.known("original_length") if self.factor is None else None

    def hf_rope(self, head_dim: int | None) -> tuple[dict, dict]:
        if self.factor is None:
            return {"rope_type": "default", "rope_theta": self.theta}, {}
        return {"rope_type": "linear", "rope_theta": self.theta, "factor": self.factor}, {}
