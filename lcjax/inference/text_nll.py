"""Scores of a text that is read at once."""

import functools
from collections.abc import Callable

import jax
import numpy as np

from lcjax import distributed
from lcjax.inference.shapes import bucketed
from lcjax.loss import token_nll
from lcjax.models import Decoder, head
from lcjax.models.memory import Encoded
from lcjax.rope import Rotation
from lcjax.sharding import keep_rows


def text_nll(
    model: Decoder,
    params: dict,
    tokens: np.ndarray,
    rotation: Callable[[int], Rotation],
    first: int,
    memory: Encoded | None = None,
) -> np.ndarray:
    """-log p(tokens[t] | tokens[:t]) for t >= first, float32 [B, T - first].

    A program serves texts int [B, T] and starts of about this length; `memory` is read beside.
    """
    length, config = tokens.shape[1], model.config
    wide = length
    if config.pattern.any_order:  # others may weigh what follows a text, before they hide it
        wide = bucketed(length)
    if config.position == "learned":
        wide = min(wide, max(config.max_length, length))
    count = min(bucketed(length - first), wide - 1)
    start = min(first, wide - count)
    filled = np.pad(tokens, [(0, 0), (0, wide - length)])
    # What a rotation follows is the length of the text itself.
    scored = _score(model, params, filled, rotation(length), np.int32(start), count, memory)
    return distributed.gather(scored)[:, first - start : length - start]


@functools.partial(jax.jit, static_argnums=(0, 5))
def _score(model: Decoder, params, tokens, rotation: Rotation, start, count: int, memory=None):
    """float32 [B, count] of the tokens from `start` on; only these are projected to logits."""
    tokens = keep_rows(tokens, model.mesh)
    hidden, _ = model.apply({"params": params}, tokens, rotation=rotation, memory=memory)
    hidden = jax.lax.dynamic_slice_in_dim(hidden, start - 1, count, 1)
    targets = jax.lax.dynamic_slice_in_dim(tokens, start, count, 1)
    return token_nll(hidden, head(params, model.config), targets)
