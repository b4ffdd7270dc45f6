"""CEPE equals the released code, and its context has no order, no padding and no side effects."""

import functools

import cepe_golden as golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memory_support import assert_close, assert_trained_alike_on, batch, gradients, read
from tiny_lm import text

from lcjax import checkpoints
from lcjax.checkpoints.build import ModelSection, build, model_config
from lcjax.checkpoints.safetensors_io import SafetensorsFolder
from lcjax.checkpoints.weights import read_params
from lcjax.errors import InputError
from lcjax.memory import CepeSection
from lcjax.models import Decoder, head, preset, unstack_layers
from lcjax.models import cache as cache_lib
from lcjax.models.loss import cross_entropy
from lcjax.tree import flatten, split

pytestmark = pytest.mark.usefixtures("exact_products")


encode = functools.partial(jax.jit, static_argnums=0)(
    lambda model, params, chunks, mask: model.apply(
        {"params": params}, chunks, mask, method="encode"
    )
)


def run(model, params, tokens, chunks=None, mask=None, **options):
    """Logits [B, T, V] with the context of `chunks`, or without any."""
    memory = None
    if chunks is not None:
        mask = np.ones(chunks.shape, bool) if mask is None else mask
        memory = encode(model, params, chunks, mask)
    return np.asarray(read(model, params, tokens, memory, options)[0])


@pytest.mark.parametrize("name", ["mha_nopad", "padded", "decode_cache"])
def test_encoder_states_equal_the_released_code(name):
    model, params = golden.model(name)
    chunks, mask = golden.context(name)
    encoded = encode(model, params, chunks, mask)
    wanted = golden.arrays(name)["encoder_hidden_states"]
    flat = mask.reshape(len(mask), -1)
    assert_close(np.asarray(encoded.states)[flat], wanted[flat])


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("mha_nopad", "logits"),
        ("padded", "logits_full_decoder"),
        ("init_zero", "logits"),
        ("distill", "logits"),
    ],
)
def test_logits_equal_the_released_code(name, field):
    model, params = golden.model(name)
    tokens = golden.arrays(name)["input_ids"].astype(np.int32)
    assert_close(run(model, params, tokens, *golden.context(name)), golden.arrays(name)[field])


def test_without_a_context_the_released_code_is_the_plain_decoder_and_so_is_ours():
    model, params = golden.model("mha_nopad")
    tokens = golden.arrays("mha_nopad")["input_ids"].astype(np.int32)
    assert_close(run(model, params, tokens), golden.arrays("mha_nopad")["logits_without_encoder"])


def test_padding_before_the_decoders_text_changes_nothing():
    model, params = golden.model("padded")
    io = golden.arrays("padded")
    there, tokens = io["attention_mask"].astype(np.int32), io["input_ids"].astype(np.int32)
    places = io["position_ids"].astype(np.int32)
    found = run(model, params, tokens, *golden.context("padded"), segments=there, positions=places)
    wanted = io["logits_padded_decoder_posids"]
    assert_close(found[there > 0], wanted[there > 0])


def test_loss_equals_the_released_code():
    model, params = golden.model("mha_nopad")
    io = golden.arrays("mha_nopad")
    tokens, labels = (io[key].astype(np.int32) for key in ("input_ids", "labels"))
    memory = encode(model, params, *golden.context("mha_nopad"))
    targets = labels[:, 1:]
    weights = (targets >= 0).astype(np.float32)

    @jax.jit
    def loss(params, memory):
        hidden = model.apply({"params": params}, tokens, memory=memory).hidden
        projection = head(params, model.config)
        return cross_entropy(hidden[:, :-1], projection, np.maximum(targets, 0), weights)

    total, count = loss(params, memory)
    assert_close(total / count, io["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["states", "projected"])
def test_decoding_with_a_cache_equals_the_released_code(keys):
    stacked, params = golden.model("decode_cache")
    config = stacked.config.replace(scan_layers=False)
    model, params = Decoder(config), unstack_layers(params, stacked.config)
    io = golden.arrays("decode_cache")
    prompt, text = (io[key].astype(np.int32) for key in ("input_ids", "generated"))
    context = golden.context("decode_cache")
    memory = encode(model, params, *context)
    assert_close(run(model, params, text, *context), io["full_logits"])
    if keys == "projected":
        memory = config.memory.project_states(params, config, memory)
    cache = cache_lib.create(config, len(text), text.shape[1])
    start = 0
    for step, stop in enumerate(range(prompt.shape[1], text.shape[1] + 1)):
        logits, cache = read(model, params, text[:, start:stop], memory, {"cache": cache})
        logits = np.asarray(logits)[:, -1]
        assert_close(logits, io["full_logits"][:, stop - 1])
        if step < io["step_logits"].shape[1]:
            assert_close(logits, io["step_logits"][:, step])
            assert stop == text.shape[1] or (logits.argmax(-1) == text[:, stop]).all()
        start = stop


def test_cross_attention_begins_as_the_released_code_has_it():
    model, params = golden.model("init_zero")
    plain = split(params, lambda path: "memory/" not in path and not path.startswith("encoder/"))[0]
    made = CepeSection().init_params(plain, model.config, params["encoder"], None)
    for path, wanted in flatten(params).items():
        np.testing.assert_array_equal(flatten(made)[path], wanted, err_msg=path)
    section = CepeSection(output_share=0.25)
    quarter = flatten(section.init_params(plain, model.config, params["encoder"], None))
    shares = [path for path in quarter if path.endswith("/memory/out/kernel")]
    assert shares
    for path in shares:
        whole = quarter[path.replace("/memory/", "/attention/")]
        np.testing.assert_array_equal(quarter[path], 0.25 * whole, err_msg=path)


@functools.cache
def small(seed=0, layers=None, out=1.0):
    """A random model that listens to its context."""
    section = CepeSection(encoder="tiny-encoder", layers=layers, output_share=out)
    model, params, _ = build(ModelSection(preset="tiny", memory=section, seed=seed))
    return model, params


@pytest.mark.slow_except("None")
@pytest.mark.parametrize("layers", [None, 1])
def test_chunks_have_no_order(layers):
    model, params = small(layers=layers)
    tokens, chunks = text(0, 2, 9), text(1, 2, 3, 8)
    found = run(model, params, tokens, chunks)
    assert_close(run(model, params, tokens, chunks[:, [2, 0, 1]]), found)
    assert np.abs(found - run(model, params, tokens)).max() > 1e-3, "it does listen"


@pytest.mark.slow
def test_a_masked_suffix_is_a_shorter_chunk_and_a_masked_chunk_is_none():
    model, params = small()
    tokens, chunks = text(0, 2, 9), text(1, 2, 3, 8)
    mask = np.ones(chunks.shape, bool)
    mask[:, :, 5:] = False
    short = run(model, params, tokens, chunks[:, :, :5])
    assert_close(run(model, params, tokens, chunks, mask), short)
    mask = np.ones(chunks.shape, bool)
    mask[:, 1] = False
    assert_close(
        run(model, params, tokens, chunks, mask), run(model, params, tokens, chunks[:, [0, 2]])
    )


@pytest.mark.parametrize("form", ["states", "projected"])
def test_packing_the_context_changes_nothing(form):
    model, params = golden.model("padded")
    tokens = golden.arrays("padded")["input_ids"].astype(np.int32)
    encoded = encode(model, params, *golden.context("padded"))
    if form == "projected":
        params, config = unstack_layers(params, model.config), model.config
        model = Decoder(config.replace(scan_layers=False))
        encoded = model.config.memory.project_states(params, model.config, encoded)
    packed = jax.jit(type(encoded).packed)(encoded)
    count = np.asarray(encoded.mask).sum(1)
    assert not np.array_equal(packed.mask, encoded.mask)
    np.testing.assert_array_equal(packed.mask, np.arange(packed.mask.shape[1]) < count[:, None])
    found, wanted = (read(model, params, tokens, memory, {})[0] for memory in (packed, encoded))
    assert_close(found, wanted)


def test_padding_may_hold_any_token():
    model, params = small()
    tokens, chunks = text(0, 2, 9), text(1, 2, 3, 8)
    mask = np.ones(chunks.shape, bool)
    mask[:, :, 5:] = False
    other = np.where(mask, chunks, 10**6).astype(np.int32)
    found = run(model, params, tokens, chunks, mask)
    np.testing.assert_array_equal(run(model, params, tokens, other, mask), found)


def test_no_context_is_the_decoder_bit_for_bit():
    model, params = small()
    plain = Decoder(model.config.replace(memory=None))
    tokens, chunks = text(0, 2, 9), text(1, 2, 3, 8)
    bare = split(params, lambda p: "memory/" not in p and not p.startswith("encoder/"))[0]
    wanted = run(plain, bare, tokens)
    np.testing.assert_array_equal(run(model, params, tokens), wanted)
    nothing = run(model, params, tokens, chunks, np.zeros(chunks.shape, bool))
    np.testing.assert_array_equal(nothing, wanted)
    mask = np.ones(chunks.shape, bool)
    mask[1] = False  # in one row only
    mixed = run(model, params, tokens, chunks, mask)
    np.testing.assert_array_equal(mixed[1], wanted[1])
    assert np.abs(mixed[0] - wanted[0]).max() > 1e-3


def test_zeros_in_the_output_projection_change_nothing():
    model, params = small(out=0.0)
    tokens, chunks = text(0, 2, 9), text(1, 2, 3, 8)
    found = run(model, params, tokens, chunks)
    np.testing.assert_array_equal(found, run(model, params, tokens))


RULES = ("encoder", "cross_attention")  # what the recipes train


def holes():
    """A batch with padding anywhere in its chunks."""
    return batch(8, chunk=8) | {"chunk_mask": np.random.default_rng(5).random((8, 2, 8)) < 0.8}


@pytest.mark.slow
def test_what_is_trained_is_encoder_and_cross_attention_and_all_of_it_has_a_gradient():
    model, params = small()
    _, grads = gradients(model.config, params, RULES, holes())
    flat = flatten(grads)
    assert all(path.startswith("encoder/") or "/memory/" in path for path in flat)
    assert all(np.abs(leaf).max() > 0 for leaf in flat.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [(8, 1, 1, 1), (2, 2, 2, 1), (1, 2, 1, 4)], ids=lambda sizes: "x".join(map(str, sizes))
)
def test_loss_and_gradients_are_the_same_on_any_mesh(sizes):
    section = CepeSection(encoder="tiny-encoder", output_share=1.0)
    assert_trained_alike_on(sizes, section, RULES, holes())


@pytest.mark.parametrize("layers", [None, 1])
def test_a_saved_folder_is_read_back_bit_for_bit(layers, tmp_path):
    model, params = small(layers=layers)
    checkpoints.save_hf(tmp_path / "model", params, model.config)
    config = checkpoints.load_config(tmp_path / "model")
    assert config.memory == model.config.memory
    found = read_params(SafetensorsFolder(tmp_path / "model"), config)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_the_encoders_own_folder_is_read_back_bit_for_bit(tmp_path):
    encoder, params, _ = build(ModelSection(preset="tiny-encoder"))
    checkpoints.save_hf(tmp_path / "encoder", params, encoder.config)
    config = checkpoints.load_config(tmp_path / "encoder")
    found = read_params(SafetensorsFolder(tmp_path / "encoder"), config)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert config.mlm_head and config.pattern == encoder.config.pattern


def test_an_encoder_sees_both_ways():
    model, params, _ = build(ModelSection(preset="tiny-encoder"))
    tokens = text(0, 1, 9)
    changed = tokens.copy()
    changed[0, -1] += 1
    found, other = run(model, params, tokens), run(model, params, changed)
    assert np.abs(found - other)[0, 0].max() > 1e-6


def test_sizes_of_the_published_models():
    config = model_config(
        ModelSection(memory=CepeSection(), preset="llama2-7b"), preset("llama2-7b")
    )
    shapes = jax.eval_shape(
        lambda key: Decoder(config).init(key, jnp.zeros((1, 2), jnp.int32))["params"],
        jax.random.key(0),
    )
    sizes = {path: leaf.size for path, leaf in flatten(shapes).items()}
    assert sum(size for path, size in sizes.items() if path.startswith("encoder/")) == 435_472_384
    assert sum(size for path, size in sizes.items() if "/memory/" in path) == 1_342_308_352
    assert sum(sizes.values()) == 8_516_196_352


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (dict(preset="tiny", memory=CepeSection(encoder="tiny-encoder", layers=3)), "1 ... 2"),
        (dict(preset="smollm2-135m", memory=CepeSection(encoder="tiny-encoder")), "260 tokens"),
        (dict(preset="phi-2", memory=CepeSection()), "sequential|Phi-2|fewer"),
        (dict(preset="tiny", memory=CepeSection(encoder="llama-1m")), "causal attention"),
        (dict(preset="tiny", memory=CepeSection(encoder="nowhere")), "nowhere"),
        (dict(preset="tiny", memory=CepeSection()), "1024 channels"),
    ],
)
def test_bad_sections_raise_input_error(section, words):
    with pytest.raises(InputError, match=words) as caught:
        build(ModelSection(**section))
    assert "\n" not in str(caught.value)
