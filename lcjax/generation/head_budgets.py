"""Budgets for the pattern `vertical_slash`, searched with the queries of a model on a text."""

import json
from collections.abc import Sequence
from pathlib import Path

from lcjax.attention import Causal
from lcjax.attention.base import rotate_qk
from lcjax.attention.vertical_slash import CANDIDATES, SparseHead, attention_mass, best_budgets
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.session import check_token_ids
from lcjax.generation.watched import watch
from lcjax.storage import to_path


def head_budgets(
    lm: LanguageModel,
    text: Sequence[int],
    candidates: Sequence[SparseHead] = CANDIDATES,
    start: int = 2500,
) -> list[dict[str, list]]:
    """Searches budgets of all heads of a model: `search_head_budgets` in each layer.

    Args:
      lm: the model, with full attention.
      text: token ids of a prompt, more than `start`.
      candidates: as in `search_head_budgets`.
      start: as in `search_head_budgets`.

    Returns:
      For each layer {head: [kind, vertical, slash, share of the attention that is kept]}.
    """
    config = lm.config
    ids = check_token_ids("text", text, config.vocab_size)
    plain = all(type(pattern) is Causal for pattern in config.patterns)
    if not plain or config.memory is not None or config.mixers or config.attention_soft_cap:
        raise InputError(
            "head budgets are searched in layers that all have full attention; give a model under"
            " pattern causal, without memory, mixers and attention_soft_cap"
        )
    if len(ids) <= start:
        raise InputError(
            f"text has {len(ids)} tokens, and the first {start} do not count; give a longer one, or"
            " a smaller start"
        )

    def record(layer, q, k, pattern, metadata):
        rotated = (x[0] for x in rotate_qk(q, k, metadata))
        return attention_mass(*rotated, tuple(candidates), start)

    by_layer = watch(lm, ids, record)
    return [best_budgets(shares, candidates) for shares in by_layer]


def write_head_budgets(
    lm: LanguageModel, text: Sequence[int], file: str | Path, *, start: int = 2500
) -> None:
    """Writes `head_budgets` as a `file` of the pattern `vertical_slash` (.json)."""
    to_path(file).write_text(json.dumps(head_budgets(lm, text, start=start)))
