"""How much of the attention of a text a pattern keeps: recall, layer by layer."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.attention import AttentionMetadata, Causal, Pattern
from lcjax.errors import InputError, check_integer
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.session import check_token_ids
from lcjax.generation.watched import watch
from lcjax.pictures.weights import attention_weights


@dataclass(frozen=True)
class Recall:
    """What the last queries of a text keep of full attention, in each layer with attention."""

    mass: np.ndarray  # float32 [layers, N], share of the probabilities of full attention
    keys: np.ndarray  # float32 [layers, N], share of the keys before a query that it reads
    queries: int


def attention_recall(lm: LanguageModel, text: Sequence[int], *, queries: int = 64) -> Recall:
    """Returns what the pattern of a model keeps of full attention, for the last queries of a text.

    Queries and keys are those of the model under its pattern. Of these, `mass` is the mean over
    queries of the probability that full attention gives to the keys that the pattern reads. A
    method that chooses well keeps most of it while it reads few keys.

    Args:
      lm: a model without memory and inserted tokens, under a pattern that leaves keys where they
        are.
      text: token ids.
      queries: number of last tokens of the text whose attention counts.

    Raises:
      InputError: the model or the pattern has no such number, or the text is too short.
    """
    config = lm.config
    ids = check_token_ids("text", text, config.vocab_size)
    check_integer("queries", queries, 1)
    moved = [x for x in config.patterns if x.moves_keys or x.inserts_tokens]
    if config.memory is not None or config.position != "rope" or moved:
        raise InputError(
            "recall compares with full attention of the same keys, which memories, other positions"
            " than rope, and patterns that move keys or insert tokens do not have"
        )
    if len(ids) <= queries:
        raise InputError(f"text has {len(ids)} tokens; give more than queries={queries}")

    layers: dict[int, tuple[Pattern, float | None]] = {}

    def record(layer, q, k, pattern, metadata):
        layers[layer] = pattern, metadata.soft_cap
        return q, k, metadata.rotation, metadata.features

    @functools.cache  # layers under one pattern share a compiled program
    def measure(pattern, soft_cap):
        options = {"pattern": pattern, "soft_cap": soft_cap, "queries": queries}
        return jax.jit(functools.partial(_recall, **options))

    by_layer = watch(lm, ids, record)
    results = [measure(*layers[layer])(*inputs) for layer, inputs in enumerate(by_layer)]
    mass, keys = map(np.stack, zip(*jax.tree.map(np.asarray, results), strict=True))
    return Recall(mass, keys, queries)


def _recall(q, k, rotation, features, *, pattern: Pattern, soft_cap: float | None, queries: int):
    """Returns (mass, keys) [N] of one layer."""
    at = jnp.arange(q.shape[1])
    metadata = AttentionMetadata(at[None], at[None], features=features, soft_cap=soft_cap)
    options = {"metadata": metadata, "rotation": rotation, "queries": queries}
    weights = attention_weights(q, k, pattern=pattern, **options)[0]  # [queries, N, S]
    full = attention_weights(q, k, pattern=Causal(), **options)[0]
    is_read = weights != 0  # gates may be negative
    mass = jnp.where(is_read, full, 0).sum(-1).mean(0)
    return mass, (is_read.sum(-1) / (at[-queries:, None] + 1)).mean(0)
