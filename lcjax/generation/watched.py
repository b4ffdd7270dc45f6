"""Runs a model and records what each layer's attention is given: for searches and pictures."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lcjax.attention import AttentionMetadata, Pass, Pattern
from lcjax.attention.base import Features, Parameter
from lcjax.attention.cache import LayerCache
from lcjax.generation.language_model import LanguageModel
from lcjax.models import Decoder

# (number of the layer among those with attention, unrotated q [B, T, N, H] and k [B, S, K, H],
# the pattern of the layer, metadata) -> what is recorded
Record = Callable[[int, jax.Array, jax.Array, Pattern, AttentionMetadata], Any]


def watch(
    lm: LanguageModel, ids: Sequence[int], record: Record, *, length: int | None = None
) -> list[Any]:
    """Reads a text without a cache, and returns what `record` returns in each layer with attention.

    Args:
      lm: the model, without a memory.
      ids: token ids of the text.
      record: a function of arrays that JAX can trace.
      length: tokens that rotations are made for; None: those of the text.
    """
    notes: list[Any] = []

    def watched(pattern: Pattern | None) -> Pattern | None:
        return pattern and _Watched(
            pattern, lambda *inputs: notes.append(record(len(notes), *inputs))
        )

    # Layers without a pattern of their own stay so: rotations are numbered by kinds of layers.
    layers = tuple(
        dataclasses.replace(kind, pattern=watched(kind.pattern)) for kind in lm.config.layers
    )
    config = lm.config.replace(scan_layers=False, remat="none", layers=layers)
    model = Decoder(config.replace(pattern=watched(lm.config.pattern)), lm.mesh)

    @jax.jit
    def read(params, tokens, rotation):
        notes.clear()
        # With intermediate values, every layer is traced by itself.
        model.apply({"params": params}, tokens, rotation=rotation, mutable=["intermediates"])
        return list(notes)

    length = len(ids) if length is None else length
    return read(lm.params, np.asarray([ids], np.int32), lm.rotation(length))


@dataclass(frozen=True)
class _Watched(Pattern):
    """A pattern that computes `inner`, and calls `record` with what it is given."""

    inner: Pattern
    record: Callable[..., None]

    @property
    def encodings(self) -> tuple[str, ...]:
        return self.inner.encodings

    @property
    def is_position_based(self) -> bool:
        return self.inner.is_position_based

    @property
    def supports_soft_cap(self) -> bool:
        return self.inner.supports_soft_cap

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        return self.inner.parameters

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.inner.sizes

    @property
    def differs_by_layer(self) -> bool:
        return self.inner.differs_by_layer

    @property
    def layer_cache(self) -> LayerCache:
        return self.inner.layer_cache

    def for_inference(self) -> Pattern:
        return self

    def for_layer(self, layer: int, num_layers: int) -> Pattern:
        return dataclasses.replace(self, inner=self.inner.for_layer(layer, num_layers))

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        return self.inner.passes(metadata)

    def features(self, *inputs: Any) -> Features:
        return self.inner.features(*inputs)

    def attend(self, q, k, v, metadata: AttentionMetadata) -> jax.Array:
        self.record(q, k, self.inner, metadata)
        return self.inner.attend(q, k, v, metadata)
