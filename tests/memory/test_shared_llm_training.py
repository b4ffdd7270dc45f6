"""SharedLLM as it begins, is trained, saved and read back; and what is refused."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memory_support import SECTION, assert_trained_alike_on, batch, gradients, tiny_model
from tiny_lm import text

from lcjax import checkpoints, cost
from lcjax.checkpoints import ByteTokenizer
from lcjax.checkpoints.build import ModelSection, build, model_config
from lcjax.checkpoints.safetensors_io import SafetensorsFolder
from lcjax.checkpoints.weights import read_params
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.memory import MemorySection, Policy, QueryAware, Random, Right, SharedLlmSection, Tree
from lcjax.models import Decoder, preset
from lcjax.parallel.sharding import Mesh
from lcjax.training import objective as objectives
from lcjax.tree import flatten

# What the paper trains in language modelling: cross-attention, and the layers above it.
TRAINED = ("cross_attention", r"^layers_1/")


def small(**changes):
    return tiny_model(dataclasses.replace(SECTION, **changes))


def asked(rows):
    """A batch whose texts begin with a question."""
    own = batch(rows)
    own["weights"][:, :6] = 0
    return own


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Right(), QueryAware()], ids=["right", "query"])
def test_what_is_trained_has_a_gradient_and_splits_are_drawn_anew_for_each_step(policy):
    model, params = small(policy=policy, noise=2.0)
    loss, grads = gradients(model.config, params, TRAINED, asked(2))
    flat = flatten(grads)
    assert flat and all("/memory/" in path or path.startswith("layers_1/") for path in flat)
    assert all(np.abs(leaf).max() > 0 for leaf in flat.values())
    again, other = (
        gradients(model.config, params, TRAINED, asked(2), seed=seed)[0] for seed in (0, 1)
    )
    assert again == loss != other


@pytest.mark.slow
def test_the_lower_model_learns_through_its_keys_and_values_where_it_is_trained():
    model, params = small(layers=2)
    _, grads = gradients(model.config, params, ("encoder", "cross_attention"), asked(2))
    flat = flatten(grads["encoder"])
    # What comes after the last layer's keys and values is never read.
    unread = {"final_norm/scale"}
    assert {path for path, leaf in flat.items() if not np.abs(leaf).max() > 0} == unread
    last = {path: np.abs(leaf[-1]).max() > 0 for path, leaf in flat.items() if "layers/" in path}
    read = {path for path, found in last.items() if found}
    names = "attention/key/kernel", "attention/value/kernel", "attention_norm/scale"
    assert read == {f"layers/{name}" for name in names}


def test_in_validation_and_inference_nothing_is_drawn():
    config, plain = small(noise=2.0)[0].config, small(noise=None)[0].config
    assert config.memory != plain.memory == config.memory.for_inference()
    model, params = small(noise=2.0)
    assert LanguageModel(model, params, ByteTokenizer()).config.memory == plain.memory


def test_the_question_is_the_last_token_before_the_loss():
    model, params = small(policy=QueryAware(), noise=None)
    plain = asked(2)
    rest = plain["positions"], model.config.rope.rotation(16, 16), jax.random.key(0)

    @jax.jit
    def kept(tokens):
        own = plain | {"tokens": tokens}
        return objectives._encode(model, params, own, *rest).layers[0][0]

    found, answer, question = kept(plain["tokens"]), plain["tokens"].copy(), plain["tokens"].copy()
    answer[:, 7:], question[:, 6] = text(9, 2, 9), text(9, 2)
    np.testing.assert_array_equal(kept(answer), found)
    assert np.abs(kept(question) - found).max() > 1e-3


def test_a_text_without_a_question_keeps_the_nearer_half():
    model, params = small(policy=QueryAware(), noise=None)
    nearer = Decoder(model.config.replace(memory=model.config.memory.without_query()))
    rows = asked(2)
    rest = rows["positions"], model.config.rope.rotation(16, 16), jax.random.key(0)
    weights = rows["weights"].copy()
    weights[0] = 1.0  # learned from the first token on
    encoded = jax.jit(objectives._encode, static_argnums=0)
    found, wanted, searched = (
        encoded(of, params, rows | {"weights": own}, *rest).layers[0][0]
        for of, own in ((model, weights), (nearer, weights), (model, rows["weights"]))
    )
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], searched[1])
    assert np.abs(searched[0] - wanted[0]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [(8, 1, 1, 1), (2, 2, 2, 1), (1, 2, 1, 4)], ids=lambda sizes: "x".join(map(str, sizes))
)
@pytest.mark.parametrize("policy", [Right(), QueryAware()], ids=["right", "query"])
def test_loss_and_gradients_are_the_same_on_any_mesh(sizes, policy):
    section = dataclasses.replace(SECTION, policy=policy)
    assert_trained_alike_on(sizes, section, ("encoder", "cross_attention"), asked(8))


@pytest.mark.parametrize("layers", [1, 2])
def test_the_lower_model_begins_as_the_first_layers_and_reading_as_self_attention(layers):
    params = small(layers=layers, output_share=0.0)[1]
    lower, reading = params["encoder"], params["layers_0"]
    for name in ("embed", "final_norm"):
        jax.tree.map(np.testing.assert_array_equal, lower[name], params[name])
    plain = [dict(params[f"layers_{index}"]) for index in range(layers)]
    assert all(layer.pop("memory") for layer in plain)
    stacked = jax.tree.map(lambda *x: np.stack(x), *plain)
    jax.tree.map(np.testing.assert_array_equal, lower["layers"], stacked)
    jax.tree.map(
        np.testing.assert_array_equal, reading["memory"]["query"], reading["attention"]["query"]
    )
    assert not reading["memory"]["out"]["kernel"].any()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layers": 2, "policy": QueryAware(), "noise": None},
        {"placement": "top", "positions": "released"},
        {"placement": "interleaved", "policy": Random(), "ratios": (2, 1)},
    ],
    ids=str,
)
def test_a_saved_folder_is_read_back_bit_for_bit(changes, tmp_path):
    model, params = small(**changes)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        checkpoints.save_hf(tmp_path / "model", params, model.config)
    misread = ["placement=interleaved as bottom" in str(w.message) for w in said]
    assert any(misread) == (changes.get("placement") == "interleaved")
    config = checkpoints.load_config(tmp_path / "model")
    assert config.memory == model.config.memory
    source = SafetensorsFolder(tmp_path / "model")
    found = read_params(source, config)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    first = {"bottom": 0, "top": 1, "interleaved": 0}[config.memory.placement]
    assert f"model.layers.{first}.cross_attn.q_proj.weight" in source.tensors
    assert (
        "encoder.norm.weight" in source.tensors and "encoder.lm_head.weight" not in source.tensors
    )


def test_released_configs_give_the_released_computation():
    hf = checkpoints.config_to_hf(small()[0].config)
    del hf["lcjax_shared_llm"], hf["last_p"]
    hf |= {"last_p": '"32,32"', "do_retrieval": False}
    memory = checkpoints.config_from_hf(hf).memory
    assert memory.tree == Tree((16, 8, 4)) and memory.chunk == 1024 and memory.policy == Right()
    assert memory.positions == "released" and memory.reader_layers(2) == (True, False)
    for kept, ratios in (("-1", (1, 1, 1)), ("0.25,0.25", (4, 4, 4)), ("64", (8, 4, 2))):
        assert checkpoints.config_from_hf(hf | {"last_p": kept}).memory.tree.ratios == ratios
    del hf["do_retrieval"]
    assert checkpoints.config_from_hf(hf).memory.policy == QueryAware()
    for wrong in ({"last_p": "many"}, {"last_p": "2000"}, {"num_cross_attn_layers": 0}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            checkpoints.config_from_hf(hf | wrong)


def test_sizes_of_the_7b_models():
    section = ModelSection(memory=SharedLlmSection(), preset="llama2-7b")
    config = model_config(section, preset("llama2-7b"))
    shapes = jax.eval_shape(
        lambda key: Decoder(config).init(key, jnp.zeros((1, 2), jnp.int32))["params"],
        jax.random.key(0),
    )
    sizes = {path: leaf.size for path, leaf in flatten(shapes).items()}
    assert sum(size for path, size in sizes.items() if "/memory/" in path) == 4 * 33_558_528
    lower = 32_000 * 4096 + 4096 + 4 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096)
    assert sum(size for path, size in sizes.items() if path.startswith("encoder/")) == lower


def test_a_note_of_a_section_is_read_back():
    for section in (SECTION, dataclasses.replace(SECTION, policy=QueryAware(), noise=None)):
        assert MemorySection.from_dict(section.to_dict()) == section


def test_a_policy_without_a_name_is_not_saved():
    @dataclasses.dataclass(frozen=True)
    class Nameless(Policy):
        def choose(self, level):
            return level.left > 0

    config = small()[0].config
    config = config.replace(memory=dataclasses.replace(config.memory, policy=Nameless()))
    with pytest.raises(InputError, match="has no name to be saved by; register its class"):
        checkpoints.config_to_hf(config)


def test_what_a_context_costs():
    config = small(policy=Right())[0].config
    context = 2, 16
    found, alone = cost.estimate(config, 16, context=context), cost.estimate(config, 16)
    layer = 2 * (64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 160)
    across, within = 4 * 4 * 16 * 2 * config.memory.num_slots(16), 2 * 2 * 64 * 4 * 16
    assert found.matmul_flops - alone.matmul_flops == 2 * layer + within
    within = 2 * 4 * 4 * 16 * (8 * 9 + 4 * 5 + 2 * 2 * 3) / 2 / 16
    assert found.attention_flops - alone.attention_flops == pytest.approx(within + across)
    asking = cost.estimate(small(policy=QueryAware())[0].config, 16, context=context)
    more = asking.forward_flops - found.forward_flops
    assert more > 2 * (16 + 8) / 16 * layer and asking.training_flops > found.training_flops


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_training_with_a_context_takes_memory(remat):
    def activations(chunks, **changes):
        config = small(**changes)[0].config.replace(remat=remat)
        mesh, context = Mesh(fsdp=1, tensor=2), (chunks, 16)
        return cost.training_memory(config, 16, 1, mesh, context=context).activations

    plain = activations(2)
    assert plain < activations(4) and activations(2, policy=QueryAware()) == plain


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"layers": 3}, "layers=3 must lie in 1 ... 2, the layers"),
        ({"chunk": 20}, "chunk=20 must be a multiple of 2.3 = 8.*nearest: 16, 24"),
        ({"ratios": (16, 2, 1)}, "one of 16 tokens is kept at level 1.*at most 8 there"),
        ({"ratios": ()}, "has 0 levels"),
    ],
)
def test_bad_sections_raise_input_error(section, words):
    with pytest.raises(InputError, match=words) as caught:
        build(ModelSection(preset="tiny", memory=dataclasses.replace(SECTION, **section)))
    assert "\n" not in str(caught.value)


def test_models_of_other_kinds_raise_input_error():
    for name, words in (("phi-2", "block=parallel"),):
        with pytest.raises(InputError, match=words):
            model_config(ModelSection(preset=name, memory=SECTION), preset(name))
    config = preset("tiny").replace(position="alibi")
    with pytest.raises(InputError, match="position=alibi"):
        model_config(ModelSection(preset="tiny", memory=SECTION), config)
