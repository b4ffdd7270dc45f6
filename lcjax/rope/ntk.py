"""NTK-aware scaling with a fixed strength (YaRN, arXiv 2309.00071, sec. 3.1)."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Float

from lcjax.errors import Interval
from lcjax.rope.base import Rope, base_frequencies, ntk_theta


@Rope.register_subclass("ntk")
@dataclass(frozen=True, kw_only=True)
class NTK(Rope):
    """Plain frequencies of the base theta' = theta * alpha^(d/(d-2)).

    The fastest pair is unchanged and the slowest is divided by `alpha`. Pairs in between leave the
    trained range, so `alpha` must exceed target length / trained length. LCEG (arXiv 2409.12181)
    uses 29 for a ratio of 8, that is s * ratio - (s - 1) with s = ratio / 2.
    """

    alpha: Annotated[float, Interval(least=1, hint="29 extends a context 8 times")]

    examples = ({"alpha": 9.0},)
    hf_types = ()  # exported to transformers as plain rope with another base

    def compute(self, head_dim: int, length: int) -> tuple[Float[np.ndarray, " R//2"], float]:
        theta = ntk_theta(self.get_resolved("theta"), self.alpha, head_dim)
        return base_frequencies(theta, head_dim), 1.0

    def extended_length(self, length: int) -> int:
        """Returns ratio * `length` for LCEG's alpha = s * ratio - (s - 1) with s = ratio / 2."""
        return self.scaled_length(length, (1 + math.sqrt(8 * self.alpha - 7)) / 2)

    def hf_rope(self, head_dim: int | None) -> tuple[dict, dict]:
        theta = ntk_theta(self.get_resolved("theta"), self.alpha, self.check_export(head_dim))
        return {"rope_type": "default", "rope_theta": theta}, {}
