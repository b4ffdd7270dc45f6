"""Gates of key heads between full and streaming attention: the training of DuoAttention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from lcjax.attention.base import Features, Parameter, Pass, Pattern
from lcjax.attention.causal import Causal
from lcjax.errors import InputError, NonNegativeFloat, NonNegativeInt, PositiveInt, check_fields
from pallas_kernels import causal, prefix, window

HEAD_GATE = "head_gate"  # name of the parameter [K] of a layer's pattern


@dataclass(frozen=True)
class HeadGates:
    """Training of DuoAttention's scores (arXiv 2410.10819, sec. 2.2): `train.head_gates`.

    All weights are frozen but a gate g for each key head, which begins at 1. A head computes
    g x full attention + (1 - g) x attention to the first `sinks` and the last `recent` tokens. The
    loss is the squared difference of the last hidden states to those of full attention, averaged
    over channels and learned tokens, plus `penalty` times the mean of the gates. Gates are cut to
    0 ... 1 where they are read.
    """

    sinks: NonNegativeInt = 64
    recent: PositiveInt = 256  # last tokens that a token sees, itself included
    penalty: NonNegativeFloat = 0.05

    def __post_init__(self):
        check_fields("train.head_gates", self)

    def in_model(self, model: Any) -> Any:
        """Returns the `ModelConfig` with gates in all layers under the pattern of `model`."""
        if type(model.pattern) is not Causal:
            raise InputError(
                "train.head_gates mixes full attention with that to the first and last tokens, and"
                f" the pattern of the model is {model.pattern!r}; set model.pattern.type=causal"
            )
        return model.replace(pattern=GatedHeads(self.sinks, self.recent))


@dataclass(frozen=True)
class GatedHeads(Pattern):
    """Full attention and that to the first and last tokens, mixed by a gate for each key head."""

    encodings: ClassVar[tuple[str, ...]] = ("rope",)

    sinks: int
    recent: int

    def passes(self, metadata):
        near = causal() & (window(self.recent) | prefix(self.sinks))
        return [Pass(metadata.q_positions, metadata.k_positions, near)]

    @property
    def parameters(self):
        return {HEAD_GATE: Parameter("K", "self_attn.head_gate", "K", "ones", "float32")}

    def features(self, parameters, x, q, k, metadata):
        return Features({}, {}, parameters)

    def for_inference(self):
        return Causal()

    def attend(self, q, k, v, metadata):
        full = Causal().attend(q, k, v, metadata)
        streamed = super().attend(q, k, v, metadata)
        gates = clipped(metadata.features.layer[HEAD_GATE])
        gates = jnp.repeat(gates, q.shape[2] // k.shape[2])[:, None]
        return (gates * full + (1 - gates) * streamed).astype(q.dtype)


def clipped(gates: Float[Array, "... K"]) -> Float[Array, "... K"]:
    """Returns gates within 0 ... 1, in float32."""
    return jnp.clip(gates.astype(jnp.float32), 0, 1)
