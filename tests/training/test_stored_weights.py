"""LoRA on weights that are stored as codes: loading, resuming, exporting, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_support import losses, tiny

from lcjax import checkpoints, cost
from lcjax import config as config_lib
from lcjax.checkpoints import ByteTokenizer, save_hf
from lcjax.checkpoints import weights as weights_lib
from lcjax.checkpoints.run_folder import MODEL_CONFIG
from lcjax.cost import parameter_shapes
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.models import ModelConfig, preset
from lcjax.models.lora import LoRA
from lcjax.models.weight_storage import (
    Int8Weights,
    NF4Weights,
    dequantise_params,
    is_stored,
    quantise_params,
)
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.training import estimate, loop, run
from lcjax.training.train_config import TrainConfig
from lcjax.tree import flatten, nest

NF4 = NF4Weights(block=16)
STEPS = {"steps": 4, "save_every": 2, "lr": 1e-2, "lora": LoRA(rank=2)}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A bfloat16 checkpoint."""
    config = preset("tiny").replace(param_dtype="bfloat16")
    random = np.random.default_rng(0)
    params = nest({
        path: jnp.asarray(0.1 * random.normal(size=x.shape) + path.endswith("scale"), x.dtype)
        for path, x in parameter_shapes(config).items()
    })  # fmt: skip
    return save_hf(tmp_path_factory.mktemp("base") / "hf", params, config, ByteTokenizer())


def settings(folder, corpus, base, mesh=None, model=None, **train):
    model = {"path": str(base), "weights": NF4, "dtype": "float32"} | (model or {})
    return tiny(folder, corpus, model=model, mesh=mesh or Mesh(fsdp=8), **STEPS | train)


@pytest.mark.parametrize("storage", [NF4, Int8Weights()], ids=["nf4", "int8"])
@pytest.mark.parametrize("mesh", [None, Mesh(data=1, fsdp=2, tensor=4)], ids=["one", "eight"])
@pytest.mark.slow_except("one-nf4")
def test_a_checkpoint_is_read_as_codes_one_matrix_at_a_time(base, storage, mesh, monkeypatch):
    sizes, read_block = [], weights_lib._read_block

    def read(*arguments):
        block = read_block(*arguments)
        sizes.append(block.size)
        return block

    monkeypatch.setattr(weights_lib, "_read_block", read)
    mesh = mesh and make_mesh(mesh)
    params, config, _ = checkpoints.load(base, weights=storage, mesh=mesh)
    # The embedding is the largest array; no stack of layers is read at once.
    assert max(sizes) <= config.vocab_size * config.width and config.weights == storage
    plain, _, _ = checkpoints.load(base)
    expected = flatten(quantise_params(plain, storage))
    assert flatten(params).keys() == expected.keys()
    for path, leaf in flatten(params).items():
        assert leaf.dtype == expected[path].dtype, path
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)
    shapes = {path: (x.shape, x.dtype) for path, x in parameter_shapes(config).items()}
    assert shapes == {path: (x.shape, x.dtype) for path, x in flatten(params).items()}
    apart, separate, _ = checkpoints.load(base, weights=storage, mesh=mesh, scan_layers=False)
    assert not separate.stacked
    for path, leaf in flatten(apart["layers_1"]).items():
        np.testing.assert_array_equal(leaf, expected[f"layers/{path}"][1], err_msg=path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus, base, compiled_once):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(settings(folder, corpus, base))
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path, corpus, base, whole):
    report = loop.Progress.report

    def stop(self, step, metrics):
        report(self, step, metrics)
        if step == 3:
            raise ConnectionError("the machine is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Progress, "report", stop)
        with pytest.raises(ConnectionError):
            run(settings(tmp_path / "run", corpus, base))
    run(settings(tmp_path / "run", corpus, base))
    assert losses(tmp_path / "run") == losses(whole)
    a, b = (flatten(checkpoints.load(x / "model")[0]) for x in (tmp_path / "run", whole))
    for path, leaf in a.items():
        np.testing.assert_array_equal(leaf, b[path], err_msg=path)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_adapters_are_merged_into_the_weights_before_quantisation(corpus, base, whole, capsys):
    lora, (floats, _, _) = LoRA(rank=2), checkpoints.load(base)
    model = config_lib.parse(ModelConfig, ["--config", str(whole / MODEL_CONFIG)], is_stored=True)
    assert model.weights == NF4 and model.lora == lora
    loaded, opened, _ = checkpoints.load(whole)  # what eval.py reads
    exported, _, _ = checkpoints.load(whole / "model")
    assert opened.weights is None and opened.lora is None
    assert checkpoints.load_config(whole).weights is None
    again, restored, _ = checkpoints.load(whole, weights=NF4, scan_layers=False)
    assert restored.weights == NF4 and not restored.stacked
    codes = flatten(quantise_params(checkpoints.load(whole)[0], NF4))
    for path, leaf in flatten(again["layers_1"]).items():
        np.testing.assert_array_equal(leaf, codes[f"layers/{path}"][1], err_msg=path)
    adapted, _, _ = checkpoints.load(whole / "adapter", base=base)
    for path, leaf in flatten(loaded).items():
        np.testing.assert_array_equal(flatten(exported)[path], leaf, err_msg=path)
        np.testing.assert_array_equal(flatten(adapted)[path], leaf, err_msg=path)
        moved = np.abs(np.asarray(leaf, "f4") - np.asarray(flatten(floats)[path], "f4")).max()
        is_adapted = path.endswith(("query/kernel", "key/kernel", "value/kernel", "out/kernel"))
        assert (moved > 0) == is_adapted, path  # matrices without adapters are not dequantised


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_adapters_on_random_weights_are_merged_into_dequantised_ones(tmp_path, corpus, capsys):
    model = {"preset": "tiny", "path": None, "param_dtype": "bfloat16"}
    config = settings(tmp_path / "run", corpus, None, model=model, steps=2)
    run(config)
    assert "adapters are merged into dequantised nf4: model.preset=tiny" in capsys.readouterr().err
    loaded, exported = (checkpoints.load(tmp_path / x)[0] for x in ("run", "run/model"))
    jax.tree.map(np.testing.assert_array_equal, loaded, exported)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_losses_are_the_same_on_other_meshes(tmp_path, corpus, base, whole):
    mesh = Mesh(data=1, fsdp=2, tensor=4)
    run(settings(tmp_path / "run", corpus, base, mesh=mesh, export=False))
    expected = losses(whole)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_model_with_codes_generates_as_its_dequantised_weights(base):
    model = LanguageModel.load(str(base), weights=NF4, dtype="float32")
    assert model.config.weights == NF4
    plain = LanguageModel.load(str(base), dtype="float32")
    shapes = flatten(plain.params)
    floats = dequantise_params(model.params, NF4, shapes)
    tokens = np.arange(40)[None] % 200
    expected = LanguageModel(plain.model, floats, plain.tokenizer).logits(tokens)
    np.testing.assert_allclose(model.logits(tokens), expected, atol=0.05)
    assert np.abs(plain.logits(tokens) - expected).max() > 0.5


REFUSED = [
    ({"train.lora": None}, "train.trainable=.'all'. selects layers/attention/key/kernel"),
    ({"train.trainable": ("lora", "query/kernel$")}, "codes cannot be trained; train adapters"),
    ({"train.trainable": ("lora", "absmax")}, "selects layers/.*/kernel, which model.weights"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_weights_that_are_trained_are_refused_as_codes(tmp_path, corpus, changes, message):
    train = {"lora": LoRA(rank=2)} | {k.removeprefix("train."): v for k, v in changes.items()}
    config = settings(tmp_path, corpus, None, model={"path": None, "preset": "tiny"}, **train)
    with pytest.raises(InputError, match=message) as error:
        estimate.check_rules(config)
    assert "\n" not in str(error.value)


def test_norms_and_embeddings_can_be_trained_beside_codes(tmp_path, corpus):
    rules = ("lora", "embeddings", "norms")
    model = {"path": None, "preset": "tiny"}
    estimate.check_rules(settings(tmp_path, corpus, None, model=model, trainable=rules))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.weights.type=nf4"], "block=64 must divide .*mlp_width 160.*block=32"),
        (["--model.weights.type=nf4", "--model.weights.block=48"], "block=48 must be one of 16"),
        (["--model.weights.type=int4"], "int4"),
    ],
)
def test_storages_that_do_not_fit_a_model_are_refused(words, message):
    with pytest.raises(InputError, match=message) as error:
        config = config_lib.parse(TrainConfig, ["--model.preset=tiny", *words])
        estimate.model_of(config)
    assert "\n" not in str(error.value)


def test_memories_have_no_codes():
    config = config_lib.parse(TrainConfig, ["--config", "lcjax:cepe_smollm2"])
    with pytest.raises(InputError, match="model.weights is not defined for models with model.mem"):
        estimate.model_of(config).replace(weights=NF4)


def test_estimates_count_codes_and_scales():
    plain = preset("llama3-8b").replace(param_dtype="bfloat16")
    total = cost.estimate(plain, 8).parameters
    # From the paper: 4 + 8/64 + 32/(64 * 256) bits; of int8 a scale for 4,096 inputs or more.
    for storage, bits in ((NF4Weights(), 4.127), (Int8Weights(), 8.007)):
        stored = plain.replace(weights=storage)
        count, size = cost.stored_weights(stored)
        matrices = {p: x for p, x in parameter_shapes(plain).items() if is_stored(p)}
        assert count == sum(x.size for x in matrices.values())
        assert 8 * size / count == pytest.approx(bits, abs=1e-3)
        one = cost.estimate(stored, 8)
        assert one.parameters == total
        assert one.forward_flops == cost.estimate(plain, 8).forward_flops
        floats = 2 * (total - count)
        assert one.parameter_bytes == floats + size
        memory = cost.training_memory(stored, 1024, 1, Mesh(fsdp=1), trained=lambda path: False)
        assert memory.weights == one.parameter_bytes
        assert estimate.storage_notes(stored)[0].startswith(f"weights: {count:,} in {storage.name}")
