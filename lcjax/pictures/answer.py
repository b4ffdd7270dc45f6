"""Records what the tokens of an answer attend to, layer by layer."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from lcjax.attention import Pattern
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import Sampling
from lcjax.generation.watched import watch
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

    def record(layer, q, k, pattern, metadata):
        if layer not in chosen:
            return None
        options = {"rotation": metadata.rotation, "metadata": metadata, "queries": len(written)}
        return attention_weights(q, k, pattern=pattern, **options)

    # A token is predicted by the query before it.
    by_layer = watch(lm, [*ids, *written[:-1]], record, length=length)
    by_layer = [weights for weights in by_layer if weights is not None]
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
