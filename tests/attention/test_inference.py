"""A pattern for training only is left behind wherever a model is evaluated, used or exported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.attention import Causal, ShiftedSparse
from lcjax.checkpoints import ByteTokenizer, config_to_hf
from lcjax.generation.language_model import LanguageModel
from lcjax.models import Decoder, preset
from lcjax.training import language_modelling
from lcjax.training.train_config import TrainConfig

TINY = preset("tiny").replace(num_layers=1)
TRAINED = TINY.replace(pattern=ShiftedSparse(group=8))


@pytest.mark.slow
def test_models_trained_with_s2_use_full_attention_at_inference():
    model = Decoder(TRAINED)
    # Weights are made with two tokens, which are no group.
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    tokens = np.random.default_rng(0).integers(0, 256, (1, 24))
    grouped, full = (
        jax.jit(m.apply)({"params": params}, tokens).hidden for m in (model, Decoder(TINY))
    )
    assert np.abs(grouped - full).max() > 1e-2
    np.testing.assert_allclose(grouped[:, :4], full[:, :4], atol=1e-5)  # before any group ends
    plain = LanguageModel(Decoder(TINY), params, ByteTokenizer())
    odd = tokens[:, :23]  # which no group divides
    for lm in (
        LanguageModel(model, params, ByteTokenizer()),
        plain.with_method(pattern=ShiftedSparse(group=8)),
    ):
        assert lm.config.pattern == Causal()
        np.testing.assert_array_equal(lm.nll(odd), plain.nll(odd))


def test_an_export_has_full_attention():
    assert config_to_hf(TRAINED) == config_to_hf(TINY)


def test_held_out_text_is_scored_with_full_attention(monkeypatch):
    seen = []
    monkeypatch.setattr(
        language_modelling, "language_model", lambda config, *a, **k: seen.append(config)
    )
    run = language_modelling.LanguageModelTask(TrainConfig(), None)
    run.model = TRAINED
    run.objective("validation")
    assert seen == [TINY]
