"""Encoders out of the first layers of a decoder: what they begin with, and that they are read."""

import jax
import numpy as np
import pytest
from tiny_lm import ids, text

from lcjax import checkpoints
from lcjax.attention import Bidirectional
from lcjax.checkpoints import ByteTokenizer
from lcjax.checkpoints.build import ModelSection, build
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.memory import CepeSection
from lcjax.models import Decoder, preset
from lcjax.models.decoder import random_params
from lcjax.models.encoder import encoder_config, encoder_params
from lcjax.parallel.sharding import Mesh, make_mesh

CONFIG = preset("tiny").replace(num_layers=3, mlp_width=96)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """Folder and parameters of a decoder whose norms all differ."""
    params = random_params(CONFIG, 3)
    layers, random = params["layers"], np.random.default_rng(4)
    for norm in (layers["attention_norm"], layers["mlp_norm"], params["final_norm"]):
        norm["scale"] = random.uniform(0.5, 1, norm["scale"].shape).astype(np.float32)
    folder = tmp_path_factory.mktemp("decoder") / "model"
    checkpoints.save_hf(folder, params, CONFIG, ByteTokenizer())
    return str(folder), params


@pytest.mark.slow_except("2")
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_states_are_those_of_the_first_layers_seen_from_both_sides(decoder, layers):
    folder, weights = decoder
    model, params, _ = build(ModelSection(path=folder, encoder_layers=layers))
    tokens = text(1, 2, 20)
    apply = jax.jit(model.apply)
    states = apply({"params": params}, tokens).hidden
    # The same layers under the same name, and the norm of the layer behind them.
    first = jax.tree.map(lambda x: np.asarray(x)[:layers], weights["layers"])
    inner = layers < CONFIG.num_layers
    scale = weights["layers"]["attention_norm"]["scale"][layers] if inner else None
    norm = {"scale": scale} if inner else weights["final_norm"]
    plain = CONFIG.replace(num_layers=layers, pattern=Bidirectional())
    expected = jax.jit(Decoder(plain).apply)(
        {"params": weights | {"layers": first, "final_norm": norm}}, tokens
    ).hidden
    np.testing.assert_allclose(states, expected, atol=1e-5)
    later = tokens + (np.arange(20) == 19)
    changed = apply({"params": params}, later).hidden
    assert np.abs(changed - states)[:, 0].max() > 1e-4, "the first token sees the last one"


@pytest.mark.parametrize("name", ["rope", "position"])
def test_what_a_decoder_has_learned_of_order_is_kept(name):
    learned, scale = {"table": np.arange(6.0)}, np.ones((3, CONFIG.width))
    given = {
        "embed": {"embedding": np.ones((CONFIG.vocab_size, CONFIG.width))},
        "layers": {"attention_norm": {"scale": scale}},
        "final_norm": {"scale": scale[0]},
        name: learned,
    }
    params = encoder_params(given, encoder_config(CONFIG, 1))
    np.testing.assert_array_equal(params[name]["table"], learned["table"])


def test_mask_is_the_mean_token_and_can_be_written(decoder):
    folder, weights = decoder
    model, params, tokenizer = build(ModelSection(path=folder, encoder_layers=2))
    table = params["embed"]["embedding"]
    assert table.shape[0] == CONFIG.vocab_size + 1 and model.config.mlm_head
    mean = np.asarray(weights["embed"]["embedding"]).mean(0)
    np.testing.assert_allclose(table[-1], mean, atol=1e-6)

    @jax.jit
    def read(params, tokens):
        hidden = model.apply({"params": params}, tokens).hidden
        return model.apply({"params": params}, hidden, method="logits")

    logits = read(params, np.full((1, 4), tokenizer.vocab_size))
    assert logits.shape == (1, 4, CONFIG.vocab_size + 1) and np.isfinite(logits).all()


@pytest.mark.slow
def test_a_decoder_reads_with_an_encoder_of_its_own_layers(decoder, tmp_path):
    folder, _ = decoder
    model, params, tokenizer = build(ModelSection(path=folder, encoder_layers=2))
    checkpoints.save_hf(tmp_path / "encoder", params, model.config, tokenizer)
    section = CepeSection(encoder=str(tmp_path / "encoder"), output_share=1.0)
    lm = LanguageModel.load(folder, memory=section)
    tokens, context = np.array([ids(1, 20)]), [[ids(5, 30)]]
    assert lm.config.memory.states.num_layers == 2
    assert np.abs(lm.nll(tokens, context=context) - lm.nll(tokens)).max() > 1e-3


def test_on_a_mesh_it_begins_alike(decoder):
    mesh = make_mesh(Mesh(fsdp=4, tensor=2))
    section = ModelSection(path=decoder[0], encoder_layers=2)
    (_, one, _), (_, spread, _) = build(section), build(section, mesh)
    assert len(spread["layers"]["mlp"]["up"]["kernel"].sharding.device_set) == 8
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one, spread)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder_layers": 0}, "encoder_layers=0 must lie in 1 ... 3"),
        ({"encoder_layers": 4}, "encoder_layers=4 must lie in 1 ... 3"),
        ({"encoder_layers": 2, "memory": CepeSection()}, "leave model.memory out"),
        ({"encoder_layers": 2, "path": None, "preset": "tiny"}, "makes an encoder of the check"),
    ],
)
def test_bad_sections_raise_input_error(decoder, settings, message):
    with pytest.raises(InputError, match=message):
        build(ModelSection(**({"path": decoder[0]} | settings)))


def test_an_encoder_is_no_decoder_to_make_one_of(decoder, tmp_path):
    model, params, tokenizer = build(ModelSection(path=decoder[0], encoder_layers=2))
    checkpoints.save_hf(tmp_path / "encoder", params, model.config, tokenizer)
    with pytest.raises(InputError, match="is an encoder already"):
        build(ModelSection(path=str(tmp_path / "encoder"), encoder_layers=1))
