"""E2-LLM at inference (Liu et al. 2024, arXiv 2401.06951): interpolation by a whole number."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Float

from lcjax.errors import Interval, PositiveInt
from lcjax.rope.base import Rope, base_frequencies


@Rope.register_subclass("e2_llm")
@dataclass(frozen=True, kw_only=True)
class E2LLM(Rope):
    """f_j = theta_j / g, where g is fixed or max(1, ceil(n / L)) for n tokens (sec. 4).

    One training on short rows with many scales and offsets (`lcjax.rope.positions.E2Positions`) is
    enough for every g. The paper changes g "based on the length of input context" without a
    formula. It trains with whole numbers up to 20, and uses larger ones to evaluate up to 120K
    tokens (sec. 5.5).
    """

    # g for every request (8 for E2-32K of L = 4096); null: from length
    factor: Annotated[float, Interval(least=1)] | None = None
    original_length: PositiveInt | None = None  # trained length L; null: the checkpoint's

    examples = ({"original_length": 16}, {"factor": 4.0, "original_length": 16})
    hf_types = ()  # transformers: linear for a fixed g; plain, up to L tokens, for a dynamic g

    @property
    def depends_on_length(self) -> bool:
        return self.factor is None

    def scale(self, length: int) -> float:
        """Returns g for a request of `length` tokens."""
        if self.factor is not None:
            return self.factor
        length = self.check_length(length)
        return float(max(1, math.ceil(length / self.get_resolved("original_length"))))

    def compute(self, head_dim: int, length: int) -> tuple[Float[np.ndarray, " R//2"], float]:
        return base_frequencies(self.get_resolved("theta"), head_dim) / self.scale(length), 1.0

    @property
    def hf_limit(self) -> int | None:
        return self.get_resolved("original_length") if self.factor is None else None

    def extended_length(self, length: int) -> int:
        return self.scaled_length(length, self.factor)

    def hf_rope(self, head_dim: int | None) -> tuple[dict, dict]:
        if self.factor is None:
            return {"rope_type": "default", "rope_theta": self.theta}, {}
        return {"rope_type": "linear", "rope_theta": self.theta, "factor": self.factor}, {}
