"""NTK scaling whose strength grows with the length of the request."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Float

from lcjax.errors import Interval, PositiveInt
from lcjax.rope.base import Rope, base_frequencies, hf_number, ntk_theta


@Rope.register_subclass("dynamic_ntk")
@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Rope):
    """NTK with alpha(n) = factor * n / C - (factor - 1), n = max(length, C, min_length).

    C is `original_length`; alpha(C) = 1 for every factor. Without `min_length` this is
    transformers' `dynamic`. With `min_length` it is LCEG's NTK-32K and NTK-64K (arXiv 2409.12181,
    sec. 9.2), which are trained at `min_length` and use its alpha for shorter inputs, too: factor
    4, C = 4096 and min_length = 32768 give alpha 29. Other implementations store the longest input
    so far; here the length is an argument, so results do not depend on the order of requests.
    """

    factor: Annotated[float, Interval(above=0, hint="2 for an untrained extension (LCEG)")]
    original_length: PositiveInt | None = None  # trained length C; null: the checkpoint's
    # Length of the long-context training (LCEG); null: HF's form
    min_length: PositiveInt | None = None

    examples = (
        {"factor": 2.0, "original_length": 32},
        {"factor": 4.0, "original_length": 16, "min_length": 32},
    )
    depends_on_length = True
    hf_types = ("dynamic",)

    def alpha(self, length: int) -> float:
        """Returns the NTK strength for a request of `length` tokens."""
        trained = self.get_resolved("original_length")
        effective = max(self.check_length(length), trained, self.min_length or 0)
        return self.factor * effective / trained - (self.factor - 1)

    def compute(self, head_dim: int, length: int) -> tuple[Float[np.ndarray, " R//2"], float]:
        theta = ntk_theta(self.get_resolved("theta"), self.alpha(length), head_dim)
        return base_frequencies(theta, head_dim), 1.0

    @property
    def hf_length(self) -> int | None:
        return max(self.original_length or 0, self.min_length or 0) or None

    def extended_length(self, length: int) -> int:
        return max(self.scaled_length(length, self.factor), self.min_length or 0)

    def hf_rope(self, head_dim: int | None) -> tuple[dict, dict]:
        """Returns transformers' `dynamic` rope that is equal at every length.

        With M = min_length and a = alpha(M), alpha(n) is a times the strength of a `dynamic` rope
        with trained length M and factor `factor * M / (C * a)`.
        """
        rope = {"rope_type": "dynamic", "rope_theta": self.theta, "factor": self.factor}
        if self.min_length is not None and self.min_length > self.get_resolved("original_length"):
            alpha = self.alpha(self.min_length)
            theta, head_dim = self.get_resolved("theta"), self.check_export(head_dim)
            rope["rope_theta"] = ntk_theta(theta, alpha, head_dim)
            rope["factor"] = self.factor * self.min_length / (self.original_length * alpha)
        # transformers has no other entry for the trained length of a dynamic rope.
        length = self.hf_length
        return rope, {} if length is None else {"max_position_embeddings": length}

    @classmethod
    def from_hf_rope(cls, rope: dict, config: dict) -> "DynamicNTK":
        return cls(
            theta=rope.get("rope_theta"),
            factor=hf_number(rope, "factor"),
            original_length=config.get("max_position_embeddings"),
        )
