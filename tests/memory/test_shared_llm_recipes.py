"""SharedLLM's recipes: what is trained, on which rows."""

from pathlib import Path

import pytest

from lcjax import config, cost
from lcjax.memory import QueryAware, Right
from lcjax.training import estimate
from lcjax.training.config import TrainConfig, trainable

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "layers", "chunk", "noise", "policy", "rows"),
    [
        ("sharedllm_7b", 4, 1024, 5.0, Right(), (4, 8192, 4096, 128)),
        pytest.param(
            *("sharedllm_sft_7b_chat", 16, 512, 10.0, QueryAware(), (15, 8192, 4096, 8)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sharedllm_recipes_have_the_settings_of_the_paper(name, layers, chunk, noise, policy, rows):
    recipe = config.parse(TrainConfig, [f"--config={ROOT}/configs/{name}.yaml"])
    train, data, section = recipe.train, recipe.data, recipe.model.memory
    assert (section.layers, section.chunk, section.noise, section.policy) == (
        *(layers, chunk, noise, policy),
    )
    assert (data.chunks.count, data.length, data.decoder_length, train.batch_size) == rows
    assert data.chunks.length == chunk and section.ratios == (16, 8, 4)
    assert (train.lr, train.schedule, train.weight_decay) == (1e-5, "cosine", 0.0)
    shapes = cost.parameter_shapes(estimate.model_of(recipe))
    trained = trainable(shapes, train.rules())
    found = {path for path in shapes if trained(path)}
    if name == "sharedllm_7b":
        above = {f"layers_{layer}" for layer in range(layers, 32)}
        expected = {p for p in shapes if "/memory/" in p or p.split("/")[0] in above}
        assert sum("/memory/" in path for path in expected) == 3 * layers
    else:
        expected = {path for path in shapes if not path.startswith("encoder/")}
    assert found == expected
