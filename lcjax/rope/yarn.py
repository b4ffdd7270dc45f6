"""YaRN (Peng et al. 2023, arXiv 2309.00071): interpolates slow pairs and sharpens attention."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Float

from lcjax.errors import OneOf, PositiveFloat, PositiveInt
from lcjax.rope.base import Extension, Rope, base_frequencies, hf_number


@Rope.register_subclass("yarn")
@dataclass(frozen=True, kw_only=True)
class Yarn(Rope):
    """f_j = theta_j / factor * r_j + theta_j * (1 - r_j), cos and sin times A (arXiv 2309.00071).

    r_j is 0 for pairs that turn more than `beta_fast` times in the trained length, and 1 for pairs
    that turn less than `beta_slow` times. All released models use `ramp="index"`, which is linear
    in the index j between the rounded indices of these bounds. `ramp="frequency"` is the paper's
    eq. 17-20, linear in the number of turns. In between, the two differ by a factor of up to 3.
    A = 0.1 ln(factor) + 1, at every length (sec. 3.4, sqrt(1/t)).
    """

    factor: Extension  # target length / trained length
    original_length: PositiveInt | None = None  # trained length; null: the checkpoint's
    beta_fast: float = 32.0  # turns above which a pair is unchanged (sec. 3.2, Llama)
    beta_slow: PositiveFloat = 1.0  # turns below which a pair is fully interpolated
    # index (code, all checkpoints) or frequency (paper)
    ramp: Annotated[str, OneOf(("index", "frequency"))] = "index"
    truncate: bool = True  # round the bounds of the index ramp outwards (gpt-oss does not)
    extrapolation: float = 1.0  # multiplies 1 - r_j, the share of the unchanged frequency
    attention_factor: PositiveFloat | None = None  # A; null: from `factor` and the two below
    mscale: float | None = (
        None  # DeepSeek: A = get(mscale) / get(mscale_all_dim), when both are set
    )
    mscale_all_dim: float | None = None

    # Within 32 tokens the fastest pair turns 5 times, so pairs are blended below 4 turns, not 32.
    examples = (
        {"factor": 4.0, "original_length": 16},
        {"factor": 2.0, "original_length": 32, "beta_fast": 4.0, "ramp": "frequency"},
        {"factor": 4.0, "original_length": 32, "beta_fast": 4.0, "truncate": False, "mscale": 1.0,
         "mscale_all_dim": 0.7},
    )  # fmt: skip
    hf_types = ("yarn",)

    def __post_init__(self):
        super().__post_init__()
        self.require(
            self.beta_fast > self.beta_slow, "beta_fast", f"be above beta_slow={self.beta_slow}"
        )

    def compute(self, head_dim: int, length: int) -> tuple[Float[np.ndarray, " R//2"], float]:
        theta = base_frequencies(self.get_resolved("theta"), head_dim)
        ramp = self._index_ramp(head_dim) if self.ramp == "index" else self._turn_ramp(theta)
        unchanged = (1 - ramp) * self.extrapolation
        return theta / self.factor * (1 - unchanged) + theta * unchanged, self._attention_factor()

    def _index_ramp(self, head_dim: int) -> np.ndarray:
        length, theta = self.get_resolved("original_length"), self.get_resolved("theta")

        def index(turns):  # of the pair that makes `turns` turns in the trained length
            ratio = math.log(length / (turns * 2 * math.pi)) / math.log(theta)
            return head_dim * ratio / 2

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)  # d - 1, not d/2 - 1, as published
        if low == high:
            high += 0.001
        return np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)

    def _turn_ramp(self, theta: np.ndarray) -> np.ndarray:
        turns = self.get_resolved("original_length") * theta / (2 * math.pi)
        return 1 - np.clip((turns - self.beta_slow) / (self.beta_fast - self.beta_slow), 0.0, 1.0)

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def get(mscale):
            return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return get(self.mscale) / get(self.mscale_all_dim)
        return get(1.0)

    def extended_length(self, length: int) -> int:
        return self.scaled_length(length, self.factor)

    def hf_rope(self, head_dim: int | None) -> tuple[dict, dict]:
        if self.ramp == "index" and self.extrapolation == 1.0:
            return self._hf_yarn(), {}
        # transformers does not have this ramp, but its longrope supports arbitrary divisors.
        head_dim = self.check_export(head_dim)
        inv_freq, scale = self.compute(head_dim, self.get_resolved("original_length"))
        divisors = (base_frequencies(self.theta, head_dim) / inv_freq).tolist()
        return {
            "rope_type": "longrope",
            "rope_theta": self.theta,
            "short_factor": divisors,
            "long_factor": divisors,
            "factor": self.factor,
            "attention_factor": scale,
            "original_max_position_embeddings": self.original_length,
        }, {}

    def _hf_yarn(self) -> dict:
        return {
            "rope_type": "yarn",
            "rope_theta": self.theta,
            "factor": self.factor,
            "original_max_position_embeddings": self.original_length,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": None if self.truncate else False,  # older readers warn about the key
            "attention_factor": self.attention_factor,
            "mscale": self.mscale,
            "mscale_all_dim": self.mscale_all_dim,
        }

    @classmethod
    def from_hf_rope(cls, rope: dict, config: dict) -> "Yarn":
        optional = ("attention_factor", "mscale", "mscale_all_dim")
        return cls(
            theta=rope.get("rope_theta"),
            factor=hf_number(rope, "factor"),
            original_length=rope.get("original_max_position_embeddings"),
            # transformers treats 0 as the default.
            beta_fast=hf_number(rope, "beta_fast", 32.0) or 32.0,
            beta_slow=hf_number(rope, "beta_slow", 1.0) or 1.0,
            # transformers treats null as false.
            truncate=rope.get("truncate", True) or False,
            **{k: hf_number(rope, k) for k in optional if rope.get(k) is not None},
        )
