"""Layers without attention: every way of reading a text gives the same result."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax import Conversation, LanguageModel, Sampling, read_prefix
from lcjax.attention import Bidirectional, KeepAll, Kivi, Landmark, Quest, Sliding
from lcjax.attention.policies import SnapKV
from lcjax.checkpoints import ByteTokenizer, load, save_hf
from lcjax.cost.resources import cache_bytes
from lcjax.errors import InputError
from lcjax.generation.sampling import join_pieces
from lcjax.generation.session import can_continue_prefix, can_share_prefix
from lcjax.models import Decoder, Int8Weights, LayerKind, ModelConfig, NF4Weights
from lcjax.models import cache as cache_lib
from lcjax.models.decoder import random_params
from lcjax.models.lora import LoRA
from lcjax.models.mixer import GatedDeltaNet
from lcjax.models.weight_storage import dequantise_params, quantise_params
from lcjax.parallel.sharding import Mesh, make_mesh, param_shardings
from lcjax.tree import flatten

MIXER = GatedDeltaNet(key_heads=2, value_heads=4, key_dim=6, value_dim=10)
CONFIG = ModelConfig(
    *(259, 32, 48, 3, 4, 2, 8, 128),
    attention_gate=True,
    rotary_fraction=0.5,
    layers=(LayerKind(repeat=2, mixer=MIXER), LayerKind()),
)
WINDOWS = CONFIG.replace(layers=(LayerKind(mixer=MIXER), LayerKind(pattern=Sliding(window=5))))


@functools.cache
def params_of(config):
    """Random parameters, large enough for layers to matter."""
    params = random_params(config, 0)
    return jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, params)


@functools.cache
def model_of(config):
    return LanguageModel(Decoder(config), params_of(config), ByteTokenizer())


def tokens_of(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape)


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, tokens, **options):
    return model.apply({"params": params}, tokens, **options)


def assert_close(actual, expected, tolerance=2e-5):
    expected = np.asarray(expected)
    np.testing.assert_allclose(actual, expected, atol=tolerance * np.abs(expected).max(), rtol=0)


# No convolution; states may change their sign; norms as in OLMo Hybrid
NARROW = WINDOWS.replace(
    norm_place="after",
    layers=(
        LayerKind(
            mixer=GatedDeltaNet(4, 4, 5, 3, taps=1, negative_eigenvalues=True, norm_epsilon=1e-3),
            norm_place="before",
        ),
        LayerKind(pattern=Sliding(window=5)),
    ),
)


@pytest.mark.slow_except("windows")
@pytest.mark.parametrize(
    "config", [CONFIG, WINDOWS, NARROW], ids=["full", "windows", "no convolution"]
)
def test_text_in_parts_behind_padding_is_read_as_a_whole(config):
    model, params, tokens = Decoder(config), params_of(config), tokens_of(0, 2, 41)
    padding = np.array([0, 13])
    whole = [apply(model, params, tokens[i : i + 1, padding[i] :]).hidden[0] for i in range(2)]
    cache = cache_lib.create(config, 2, 64, chunk=16)
    outputs, step = [], jax.jit(lambda cache, *x: model.apply(
        {"params": params}, x[0], segments=x[1], positions=x[2], cache=cache
    ))  # fmt: skip
    at = np.arange(41) - padding[:, None]
    for start, stop in ((0, 3), (3, 8), (8, 24), (24, 40), (40, 41)):  # a chunk of padding alone
        part = slice(start, stop)
        segments = (at[:, part] >= 0).astype(np.int32)
        output = step(cache, tokens[:, part], segments, np.maximum(at[:, part], 0))
        cache = output.cache
        outputs.append(output.hidden)
    hidden = np.concatenate(outputs, 1)
    for row, expected in enumerate(whole):
        assert_close(hidden[row, padding[row] :], expected)


def test_documents_of_a_packed_row_are_read_as_alone():
    model, params, tokens = Decoder(CONFIG), params_of(CONFIG), tokens_of(1, 1, 40)
    segments = np.repeat([1, 2, 3, 0], [17, 1, 19, 3])[None].astype(np.int32)
    packed = apply(model, params, tokens, segments=segments).hidden
    for part in (slice(0, 17), slice(17, 18), slice(18, 37)):
        assert_close(packed[:, part], apply(model, params, tokens[:, part]).hidden)


@pytest.mark.slow_except("tensor and context")
@pytest.mark.parametrize(
    "mesh",
    [Mesh(context=8, fsdp=1), Mesh(tensor=2, context=4, fsdp=1), Mesh(fsdp=8), Mesh(tensor=8)],
    ids=["context", "tensor and context", "fsdp", "tensor"],
)
def test_devices_compute_the_gradients_of_one(mesh):
    tokens = tokens_of(2, 8, 32)
    segments = np.repeat([1, 2, 0], [13, 16, 3])[None].repeat(8, 0).astype(np.int32)

    def loss(params, model):
        hidden = model.apply({"params": params}, tokens, segments=segments).hidden
        return (hidden[..., :5] ** 2 * (segments != 0)[..., None]).mean()

    config = CONFIG.replace(num_heads=8, num_kv_heads=8, head_dim=4, layers=(
        LayerKind(mixer=GatedDeltaNet(8, 8, 4, 6)), LayerKind()), num_layers=2)  # fmt: skip
    params, devices = params_of(config), make_mesh(mesh)
    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected, slopes = gradient(params, Decoder(config))
    sharded = jax.device_put(params, param_shardings(devices, params))
    actual, actual_slopes = gradient(sharded, Decoder(config, devices))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    jax.tree.map(functools.partial(assert_close, tolerance=2e-4), actual_slopes, slopes)


def test_rows_generate_as_alone_and_after_a_prefix_that_was_read_once():
    lm, sampling = model_of(CONFIG), Sampling(max_new_tokens=6, temperature=0)
    prefix = tokens_of(3, 50).tolist()
    prompts = [prefix + tokens_of(size, size).tolist() for size in (3, 17, 40)]
    together = lm.generate(prompts, sampling)
    assert together == [lm.generate([prompt], sampling)[0] for prompt in prompts]
    read = read_prefix(lm, prefix)
    for _ in range(2):  # reading what follows leaves it as it was
        assert join_pieces(lm.stream(prompts, sampling, prefix=read), 3) == together
    with pytest.raises(InputError, match="must begin with the 50 tokens"):
        join_pieces(lm.stream([prompts[0][:50]], sampling, prefix=read), 1)


@pytest.mark.slow
@pytest.mark.parametrize("length", [50, 3000])
def test_a_prefix_under_windows_is_continued_whether_it_fits_the_ring_or_not(length):
    lm, sampling = model_of(WINDOWS), Sampling(max_new_tokens=6, temperature=0)
    prefix = tokens_of(3, length).tolist()
    prompts = [prefix + tokens_of(size, size).tolist() for size in (3, 17, 40)]
    read = read_prefix(lm, prefix)
    assert join_pieces(lm.stream(prompts, sampling, prefix=read), 3) == lm.generate(
        prompts, sampling
    )


@pytest.mark.slow
def test_a_conversation_goes_on_from_its_state_also_after_a_copy_and_a_file(tmp_path):
    lm, sampling = model_of(CONFIG), Sampling(max_new_tokens=5, temperature=0)

    def answer(conversation, seed):
        conversation.read(tokens_of(seed, 11).tolist())
        return "".join(map(str, conversation.write(sampling)))

    conversation = Conversation(lm, length=100)
    answer(conversation, 4)
    copy = conversation.copy()
    conversation.save(tmp_path / "kept")
    opened = Conversation.open(lm, tmp_path / "kept")
    expected = answer(conversation, 5)
    assert answer(copy, 5) == answer(opened, 5) == expected


def test_a_policy_evicts_from_layers_with_attention_alone():
    config = CONFIG.replace(cache=SnapKV(tokens=32, window=8))
    lm, sampling = model_of(config), Sampling(max_new_tokens=6, temperature=0)
    prompts = [tokens_of(6, 90).tolist(), tokens_of(7, 70).tolist()]
    texts = lm.generate(prompts, sampling)
    assert texts == [lm.generate([prompt], sampling)[0] for prompt in prompts]
    state = 2 * 4 * (4 * 6 * 10 + 3 * (2 * 2 * 6 + 4 * 10))  # of two layers, in float32
    attention = cache_bytes(config.replace(num_layers=1, layers=()), 1000)
    assert lm.cache_bytes(1000) == lm.cache_bytes(100_000) == state + attention


@pytest.mark.slow
@pytest.mark.parametrize("storage", [Int8Weights(), NF4Weights()], ids=str)
def test_matrices_may_be_codes_and_rates_stay_floats(storage):
    sizes = {"width": 64, "mlp_width": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
    mixer = GatedDeltaNet(key_heads=2, value_heads=4, key_dim=16, value_dim=16)
    config = CONFIG.replace(**sizes, layers=(LayerKind(mixer=mixer), LayerKind()), num_layers=2)
    params, tokens = params_of(config), tokens_of(8, 1, 20)
    stored = quantise_params(jax.tree.map(jnp.copy, params), storage)
    codes = {path.split("/")[2] for path in flatten(stored) if path.startswith("layers_0/mixer/")
             and path.split("/")[-2] == "kernel"}  # fmt: skip
    assert codes == {"query", "key", "value", "output_gate", "out"}
    actual = apply(Decoder(config.replace(weights=storage)), stored, tokens).hidden
    rounded = dequantise_params(stored, storage, flatten(params))
    assert_close(actual, apply(Decoder(config), rounded, tokens).hidden)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mixer": MIXER}, "model.mixer takes the place of attention in all layers"),
        ({"pattern": Bidirectional()}, "from left to right; take a pattern"),
        ({"pattern": Landmark(block=8, top_k=1, train_length=64)}, "inserts no tokens"),
    ],
    ids=["mixers twice", "bidirectional", "landmark"],
)
def test_models_whose_layers_contradict_each_other_raise_input_error(changes, words):
    with pytest.raises(InputError, match=words):
        CONFIG.replace(**changes)


def test_an_entry_of_layers_with_a_mixer_takes_no_pattern():
    with pytest.raises(InputError, match="an entry with a mixer has no attention"):
        LayerKind(mixer=MIXER, pattern=Sliding(window=5))


def test_patterns_of_a_config_are_for_layers_with_attention():
    window = LayerKind(pattern=Sliding(window=5))
    assert CONFIG.kinds_with((window,)) == (LayerKind(2, mixer=MIXER), window)


@pytest.mark.parametrize(
    "cache", [KeepAll(storage=Kivi()), Quest(tokens=64, exact_layers=0)], ids=str
)
def test_caches_whose_groups_or_pages_would_begin_anew_are_not_continued(cache):
    config = CONFIG.replace(cache=cache, head_dim=32)
    assert not can_continue_prefix(config) and not can_share_prefix(config)


def test_rates_of_decay_are_float32_whatever_other_weights_are(tmp_path):
    norms = {"norm_plus_one": True, "qk_norm": "head", "family": "qwen3_5_text"}
    config = CONFIG.replace(**norms, num_layers=6, param_dtype="bfloat16")
    params = random_params(config, 0)
    save_hf(tmp_path / "model", params, config, ByteTokenizer())
    loaded, _, _ = load(tmp_path / "model")
    for tree in (params, loaded):
        wide = {path for path, x in flatten(tree).items() if x.dtype == jnp.float32}
        assert wide == {path for path in flatten(tree) if "/decay_" in path} and wide
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_layers_have_norms_where_their_kind_places_them():
    names = [{name for name in params_of(NARROW)[f"layers_{i}"] if "norm" in name} for i in (0, 1)]
    assert names == [{"attention_norm", "mlp_norm"}, {"attention_after_norm", "mlp_after_norm"}]
    with pytest.raises(InputError, match="norm_place=after is not defined for model.block=parall"):
        CONFIG.replace(block="parallel", layers=(LayerKind(norm_place="after"), LayerKind()))
    kept = NARROW.kinds_with((LayerKind(pattern=Sliding(window=3)),))
    assert [kind.norm_place for kind in kept] == ["before", None]
    with pytest.raises(InputError, match="norm_place=both of layer 0 does not fit the weights"):
        NARROW.kinds_with((LayerKind(norm_place="both"),))


def test_adapters_are_added_to_the_projections():
    config = CONFIG.replace(lora=LoRA(rank=2, alpha=4.0))
    params = random_params(config, 0)
    assert "lora_a" in params["layers_0"]["mixer"]["query"]
    assert "lora_a" in params["layers_0"]["mixer"]["out"]
    assert "lora_a" not in params["layers_0"]["mixer"]["decay"]


REFUSED = [
    ({"value_heads": 3}, "key_heads=2 must divide value_heads=3"),
    ({"taps": 0}, "taps"),
    ({"norm_epsilon": -1.0}, "norm_epsilon"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=str)
def test_sizes_that_do_not_fit_raise_input_error(changes, words):
    with pytest.raises(InputError, match=words):
        GatedDeltaNet(**{"key_heads": 2, "value_heads": 4, "key_dim": 6, "value_dim": 10} | changes)
