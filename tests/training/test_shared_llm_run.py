"""SharedLLM by a run: what is trained, what stays, and the folders that it leaves."""

import numpy as np
import pytest
from training_support import tiny

from lcjax import config as configs
from lcjax.checkpoints.build import ModelSection, build
from lcjax.data import Chunks
from lcjax.errors import InputError
from lcjax.memory import QueryAware, Random, SharedLlmSection
from lcjax.training import run
from lcjax.training.train_config import TrainConfig
from lcjax.tree import flatten

# Of the two layers the first reads the context; the paper trains it to, and all above.
TRAINED = ("cross_attention", r"^layers_1/")


pytestmark = pytest.mark.usefixtures("compiled_once")


def section(**changes):
    return SharedLlmSection(**{"layers": 1, "chunk": 16, "ratios": (4, 2)} | changes)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"policy": QueryAware(), "noise": None}], ids=str)
def test_a_run_trains_cross_attention_and_freezes_the_lower_model(changes, corpus, tmp_path):
    model = {"preset": "tiny", "memory": section(**changes)}
    data = {"length": 48, "chunks": Chunks(count=2, length=16), "document_mask": False}
    run(tiny(tmp_path / "run", corpus, model=model, trainable=TRAINED, data=data))
    _, initial, _ = build(ModelSection(**model))
    loaded, params, _ = build(ModelSection(path=str(tmp_path / "run" / "model")))
    initial, final = flatten(initial), flatten(params)
    moved = {path for path in initial if not np.array_equal(initial[path], final[path])}
    assert moved == {p for p in initial if "/memory/" in p or p.startswith("layers_1/")}
    again, params, _ = build(ModelSection(path=str(tmp_path / "run")))
    assert again.config.memory == loaded.config.memory
    for path, leaf in flatten(params).items():
        np.testing.assert_array_equal(leaf, final[path], err_msg=path)


def test_a_config_sets_the_trees(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "model:\n  preset: tiny\n  memory:\n    type: shared_llm\n    ratios: [1, 1, 1]\n"
        "    policy: {type: query}\n"
    )
    loaded = configs.parse(TrainConfig, ["--config", str(file)]).model.memory
    assert loaded == SharedLlmSection(ratios=(1, 1, 1), policy=QueryAware())
    words = ["--config", str(file), "--model.memory.policy.type=random"]
    loaded = configs.parse(TrainConfig, [*words, "--model.memory.noise=null"]).model.memory
    assert loaded.policy == Random() and loaded.noise is None
    with pytest.raises(InputError, match="policy.type='best' is unknown; known: query, random"):
        configs.parse(TrainConfig, [*words[:2], "--model.memory.policy.type=best"])


@pytest.mark.parametrize(
    ("length", "words"),
    [(32, "length=32 is more than the 16"), (10, "chunks.length=10 must be.*nearest: 8, 12")],
)
def test_chunks_of_another_length_raise_input_error_before_a_model_is_read(
    length, words, corpus, tmp_path
):
    data = {"length": 96, "chunks": Chunks(count=2, length=length), "document_mask": False}
    with pytest.raises(InputError, match=words):
        run(
            tiny(tmp_path / "run", corpus, model={"preset": "tiny", "memory": section()}, data=data)
        )
