"""No rotation of queries and keys, for layers or models without positions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from lcjax.rope.base import Rope
from lcjax.rope.rotation import Rotation, no_rotation


@Rope.register_subclass("none")
@dataclass(frozen=True, kw_only=True)
class NoRotation(Rope):
    """NoPE: the causal mask is the only source of order (Kazemnejad et al. 2023, arXiv 2305.19466).

    Use it for some layers of a model (`model.layers`), as in SmolLM3 and Llama 4 (every fourth
    layer) and RNoPE (Yang et al. 2025, arXiv 2501.18795), or for all layers.
    """

    def __post_init__(self):
        super().__post_init__()
        self.require(self.theta is None, "theta", "be left out: nothing is rotated")

    def resolve(self, *, theta: float | None = None, length: int | None = None) -> "NoRotation":
        return self

    def frequencies(
        self, head_dim: int, length: int, params: Mapping[str, Any] | None = None
    ) -> tuple[Float[np.ndarray, " 0"], float]:
        return np.zeros(0, np.float32), 1.0

    def rotation(
        self, head_dim: int, length: int, params: Mapping[str, Any] | None = None
    ) -> Rotation:
        return no_rotation()

    def hf_rope(self, head_dim: int | None) -> tuple[dict, dict]:
        return {"rope_type": "default", "rope_theta": 10_000.0}, {}
