"""LongRoPE (Ding et al. 2024, arXiv 2402.13753): a divisor for every frequency."""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Float

from lcjax.errors import InputError, PositiveFloat, Range
from lcjax.rope.base import Rope, base_frequencies, hf_number


@Rope.register_subclass("longrope")
@dataclass(frozen=True, kw_only=True)
class LongRope(Rope):
    """f_j = theta_j / ext_j, ext = long_factor beyond the trained length L, else short_factor.

    cos and sin are multiplied by A = sqrt(1 + ln(factor) / ln(L)) in both cases (Phi-3's form). The
    paper also leaves the first tokens unscaled; Phi-3's form does not. A request that grows beyond
    L would need all keys rotated again, so its length must be known beforehand.
    """

    short_factor: tuple[PositiveFloat, ...]  # [R/2] divisors up to the trained length
    long_factor: tuple[PositiveFloat, ...]  # [R/2] divisors beyond it
    # Trained length L; null: the checkpoint's
    original_length: Annotated[int, Range(2)] | None = None
    factor: PositiveFloat | None = None  # target length / trained length, for A only
    attention_factor: PositiveFloat | None = None  # A; null: from `factor`

    examples = (
        {"short_factor": (1.0,) * 8, "long_factor": (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5),
         "original_length": 32, "factor": 4.0},
    )  # fmt: skip
    depends_on_length = True
    hf_types = ("longrope", "su")  # su is the name in early Phi-3 configs

    def __post_init__(self):
        super().__post_init__()
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(float(x) for x in getattr(self, name)))
        self.require(
            len(self.long_factor) == len(self.short_factor),
            "long_factor",
            f"have as many numbers as short_factor, {len(self.short_factor)}",
        )

    def compute(self, head_dim: int, length: int) -> tuple[Float[np.ndarray, " R//2"], float]:
        if len(self.short_factor) != head_dim // 2:
            raise InputError(
                f"rope.short_factor has {len(self.short_factor)} numbers for {head_dim} rotary "
                f"channels: longrope needs {head_dim // 2}, one for each pair"
            )
        beyond = self.check_length(length) > self.get_resolved("original_length")
        divisors = np.asarray(self.long_factor if beyond else self.short_factor, np.float64)
        theta = base_frequencies(self.get_resolved("theta"), head_dim)
        return theta / divisors, self._attention_factor()

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        factor = self.get_resolved("factor")
        if factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(factor) / math.log(self.get_resolved("original_length")))

    def extended_length(self, length: int) -> int:
        return self.scaled_length(length, self.factor)

    def hf_rope(self, head_dim: int | None) -> tuple[dict, dict]:
        rope = {
            "rope_type": "longrope",
            "rope_theta": self.theta,
            "short_factor": list(self.short_factor),
            "long_factor": list(self.long_factor),
            "factor": self.factor,
            "attention_factor": self.attention_factor,
            "original_max_position_embeddings": self.original_length,
        }
        # Phi-3's code reads the trained length from the top level of the config.
        length = self.original_length
        return rope, {} if length is None else {"original_max_position_embeddings": length}

    @classmethod
    def from_hf_rope(cls, rope: dict, config: dict) -> "LongRope":
        for key in ("short_factor", "long_factor"):
            if not isinstance(rope.get(key), (list, tuple)):
                raise InputError(
                    f"rope_parameters.{key}={rope.get(key)!r} of the Hugging Face config must be a "
                    "list of numbers for rope type longrope; correct config.json"
                )
        optional = ("factor", "attention_factor")
        return cls(
            theta=rope.get("rope_theta"),
            short_factor=tuple(rope["short_factor"]),
            long_factor=tuple(rope["long_factor"]),
            original_length=rope.get("original_max_position_embeddings"),
            **{k: hf_number(rope, k) for k in optional if rope.get(k) is not None},
        )
