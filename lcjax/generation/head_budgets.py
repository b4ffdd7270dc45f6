"""Budgets for the pattern `vertical_slash`, searched with the queries of a model on a text."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from lcjax.attention import Causal, Pattern
from lcjax.attention.base import rotate_qk
from lcjax.attention.vertical_slash import CANDIDATES, SparseHead, attention_mass, best_budgets
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.session import check_token_ids
from lcjax.models import Decoder
from lcjax.storage import to_path


class _Record:
    """What layers would keep, collected while the model is traced."""

    def __init__(self):
        self.by_layer = []


@dataclass(frozen=True)
class _Searching(Pattern):
    """A pattern that records what heads would keep of its attention, and computes `inner`."""

    inner: Pattern
    record: _Record
    candidates: tuple[SparseHead, ...]
    start: int

    @property
    def encodings(self):
        return self.inner.encodings

    @property
    def is_position_based(self):
        return self.inner.is_position_based

    def passes(self, metadata):
        return self.inner.passes(metadata)

    def attend(self, q, k, v, metadata):
        rotated = (x[0] for x in rotate_qk(q, k, metadata))
        self.record.by_layer.append(attention_mass(*rotated, self.candidates, self.start))
        return self.inner.attend(q, k, v, metadata)


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
    record = _Record()

    def searching(pattern):
        return pattern and _Searching(pattern, record, tuple(candidates), start)

    layers = tuple(
        dataclasses.replace(kind, pattern=searching(kind.pattern)) for kind in config.layers
    )
    options = {"scan_layers": False, "remat": "none", "layers": layers}
    model = Decoder(config.replace(**options, pattern=searching(config.pattern)), lm.mesh)

    @jax.jit
    def search(params, tokens, rotation):
        record.by_layer = []
        # With intermediate values, every layer is traced by itself.
        model.apply({"params": params}, tokens, rotation=rotation, mutable=["intermediates"])
        return record.by_layer

    by_layer = search(lm.params, np.asarray([ids], np.int32), lm.rotation(len(ids)))
    return [best_budgets(shares, candidates) for shares in by_layer]


def write_head_budgets(
    lm: LanguageModel, text: Sequence[int], file: str | Path, *, start: int = 2500
) -> None:
    """Writes `head_budgets` as a `file` of the pattern `vertical_slash` (.json)."""
    to_path(file).write_text(json.dumps(head_budgets(lm, text, start=start)))
