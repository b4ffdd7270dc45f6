"""A run that trains the parameters of an attention pattern, and what it writes."""

import jax
import numpy as np
import pytest
from training_support import losses, tiny

from lcjax.attention import DSA, Causal
from lcjax.checkpoints.build import ModelSection
from lcjax.generation.language_model import LanguageModel
from lcjax.models import preset
from lcjax.training import run
from lcjax.tree import flatten

SIZE = preset("tiny").head_dim


@pytest.mark.usefixtures("compiled_once")
def test_a_run_of_two_stages_converts_a_dense_model(tmp_path, corpus):
    first, second = tmp_path / "first", tmp_path / "second"
    dense = DSA(heads=2, head_dim=SIZE, top_k=12, dense=True)
    model = {"preset": "tiny", "pattern": dense}
    run(tiny(first, corpus, model=model, trainable=("pattern",), lr=0.02))
    found = losses(first)
    assert found[max(found)] < found[min(found)]
    lm = LanguageModel.load(first / "model")
    assert lm.config.pattern == dense
    # The rest is as it was, and without its pattern the model is a plain one.
    plain = LanguageModel.load(ModelSection(preset="tiny"))
    want, have = flatten(plain.params), flatten(lm.params)
    assert {path for path in have if path not in want} == {
        path for path in have if "/pattern/" in path
    }
    for path, x in want.items():
        np.testing.assert_array_equal(x, have[path])
    causal = LanguageModel.load(first / "model", pattern=Causal())
    assert jax.tree.structure(causal.params) == jax.tree.structure(plain.params)
    # Second stage
    sparse = DSA(heads=2, head_dim=SIZE, top_k=12)
    model = {"path": str(first / "model"), "pattern": sparse}
    run(tiny(second, corpus, model=model, steps=4))
    trained = LanguageModel.load(second / "model")
    assert trained.config.pattern == sparse
    changed = flatten(trained.params)
    assert all(np.any(changed[path] != x) for path, x in have.items() if "/pattern/" in path)
