"""Records what the tokens of an answer attend to, layer by layer."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from lcjax.attention import AttentionMetadata, Pass, Pattern
from lcjax.attention.base import Features, Parameter
from lcjax.attention.cache import LayerCache
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.models import Decoder
from lcjax.pictures.weights import attention_weights


@dataclasses.dataclass(frozen=True)
class AnswerAttention:
    """Attention of the tokens of an answer over the text before them."""

    answer: str
    tokens: list[str]  # the text of each token of the answer
    prompt: int  # number of tokens of the prompt
    layers: tuple[int, ...]
    # float32 [layers, N, answer, prompt + answer]: row t has the weights from which token t is
    # predicted, so only earlier tokens have a weight
    weights: np.ndarray


class _Notes:
    """Weights collected while the model is traced; a dict would not be hashable in a pattern."""

    def __init__(self):
        self.calls, self.found = 0, {}


@dataclasses.dataclass(frozen=True)
class _Watched(Pattern):
    """A pattern that records the attention weights of another one, `inner`."""

    inner: Pattern
    noted: _Notes
    layers: tuple[int, ...]
    queries: int

    @property
    def encodings(self) -> tuple[str, ...]:
        return self.inner.encodings

    @property
    def is_position_based(self) -> bool:
        return self.inner.is_position_based

    def for_inference(self) -> "Pattern":
        return self

    @property
    def differs_by_layer(self) -> bool:
        return self.inner.differs_by_layer

    def for_layer(self, layer: int, num_layers: int) -> "Pattern":
        return dataclasses.replace(self, inner=self.inner.for_layer(layer, num_layers))

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        return self.inner.parameters

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.inner.sizes

    def features(self, *inputs) -> Features:
        return self.inner.features(*inputs)

    @property
    def layer_cache(self) -> LayerCache:
        return self.inner.layer_cache

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        return self.inner.passes(metadata)

    def attend(self, q, k, v, metadata: AttentionMetadata) -> jax.Array:
        if self.noted.calls in self.layers:
            self.noted.found[self.noted.calls] = attention_weights(
                q, k, pattern=self.inner, rotation=metadata.rotation, metadata=metadata,
                queries=self.queries,
            )  # fmt: skip
        self.noted.calls += 1
        return self.inner.attend(q, k, v, metadata)


def answer_attention(
    lm: LanguageModel,
    prompt: str | Sequence[int],
    *,
    answer: str | None = None,
    layers: Sequence[int] | None = None,
    max_new_tokens: int = 16,
) -> AnswerAttention:
    """Generates an answer, and returns the attention weights from which each token is predicted.

    Args:
      lm: any model without a memory, with any rotation and any pattern without inserted tokens.
      prompt: a text, or token ids.
      answer: the answer to read; None: the model generates one.
      layers: layers counted from 0, negative ones from the end; None: first, middle and last.
      max_new_tokens: maximum number of tokens of a generated answer.
    """
    config = lm.config
    if config.pattern.inserts_tokens:
        kind = Pattern.get_choice_name(type(config.pattern))
        raise InputError(
            f"model.pattern.type={kind} reads a prompt piece by piece, with inserted tokens, which"
            " this picture does not show; choose another pattern"
        )
    if config.memory is not None:
        raise InputError("model.memory reads beside the text, which this picture does not show")
    ids = lm.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise InputError("prompt is empty; give a text")
    if answer is None:
        pieces = list(lm.stream([ids], Sampling(max_new_tokens=max_new_tokens)))
        answer = "".join(piece.text for piece in pieces)
        written = [token for piece in pieces for token in piece.ids]
        length = len(ids) + max_new_tokens  # the length that `generate` made the rotation for
    else:
        written = list(lm.tokenizer.encode(answer))
        length = len(ids) + len(written)
    if not written:
        raise InputError("the answer has no token, so there is no attention to draw; give --answer")
    chosen = _layers(layers, config.num_layers)
    # A token is predicted by the query before it.
    tokens = np.asarray([[*ids, *written[:-1]]], np.int32)
    notes = _Notes()

    def watched(pattern: Pattern) -> Pattern:
        return _Watched(pattern, notes, chosen, len(written))

    # Layers without a pattern of their own stay so: rotations are numbered by kinds of layers.
    layers = tuple(
        dataclasses.replace(kind, pattern=kind.pattern and watched(kind.pattern))
        for kind in config.layers
    )
    plain = config.replace(scan_layers=False, remat="none", layers=layers)
    model = Decoder(plain.replace(pattern=watched(config.pattern)), lm.mesh)

    @jax.jit
    def weights(params, tokens, rotation):
        notes.calls, notes.found = 0, {}
        # With intermediate values, every layer is traced by itself.
        model.apply({"params": params}, tokens, rotation=rotation, mutable=["intermediates"])
        return [notes.found[layer] for layer in chosen]

    by_layer = weights(lm.params, tokens, lm.rotation(length))
    shown = np.stack([np.asarray(w[0]).transpose(1, 0, 2) for w in by_layer])
    names = [lm.tokenizer.decode([token]) for token in written]
    return AnswerAttention(answer, names, len(ids), chosen, shown)


def _layers(layers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    if layers is None:
        return tuple(sorted({0, count // 2, count - 1}))
    if not layers:
        raise InputError("layers is empty; name one, such as 0, or leave it out")
    for layer in layers:
        if not -count <= layer < count:
            raise InputError(f"layers: {layer} must be from {-count} to {count - 1}")
    return tuple(sorted({layer % count for layer in layers}))
