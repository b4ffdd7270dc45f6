"""Tiny language models of random weights whose greedy choices do not hang on rounding."""

import jax
import numpy as np

from lcjax.checkpoints import ByteTokenizer
from lcjax.checkpoints.build import ModelSection
from lcjax.generation.language_model import LanguageModel
from lcjax.models import Decoder
from lcjax.models.decoder import random_params


def sharper(lm, factor=3):
    """`lm` with logits far enough apart for a greedy choice, the same on any devices."""
    lm.params = jax.tree.map(
        lambda x: jax.device_put(np.asarray(x) * (factor if x.ndim > 1 else 1), x.sharding),
        lm.params,
    )
    return lm


def sharp_lm(*, mesh=None, **settings):
    """The preset tiny with `settings` of its ModelSection, made `sharper`."""
    return sharper(LanguageModel.load(ModelSection(preset="tiny", **settings), mesh=mesh))


def sharp_decoder(config):
    """A decoder of any config. Its norms are sharper, too, as layers are stacked at first."""
    params = jax.tree.map(
        lambda x: np.asarray(x) * (3 if x.ndim > 1 else 1), random_params(config, 0)
    )
    return LanguageModel(Decoder(config), params, ByteTokenizer())


def generated(lm, prompts, sampling, **options):
    """The tokens that `stream` gives, of every row."""
    rows = [[] for _ in prompts]
    for piece in lm.stream(prompts, sampling, **options):
        rows[piece.row] += piece.ids
    return rows


def text(seed, *shape):
    """Random bytes as token ids int32, none of them special."""
    return np.random.default_rng(seed).integers(3, 250, shape).astype(np.int32)


def ids(seed, length):
    """The same for a prompt: a list."""
    return text(seed, length).tolist()


def recorded_template_variables(monkeypatch, tokenizer):
    """A list to which every `encode_chat` of the tokenizer's class adds its variables."""
    seen, encode = [], type(tokenizer).encode_chat

    def recorded(self, *args, allow_special, **variables):
        seen.append(variables)
        return encode(self, *args, allow_special=allow_special, **variables)

    monkeypatch.setattr(type(tokenizer), "encode_chat", recorded)
    return seen
