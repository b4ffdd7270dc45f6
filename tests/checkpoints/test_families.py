"""Every model family: equal to its class in transformers, in both directions."""

import dataclasses
import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_support import low_rank, write_peft
from convert_support import assert_same
from family_models import MODELS, SIZES, STATE_DICTS, hf_model, saved
from safetensors import safe_open

from lcjax import LanguageModel, Sampling
from lcjax.attention import Landmark
from lcjax.checkpoints import ByteTokenizer, config_from_hf, config_to_hf, load, save_hf
from lcjax.checkpoints.adapters import save_peft
from lcjax.checkpoints.families import FAMILIES
from lcjax.errors import InputError
from lcjax.models import Decoder
from lcjax.models.layer_groups import stack_layers, unstack_layers
from lcjax.models.lora import LoRA
from lcjax.rope import Default, Yarn
from lcjax.rope.positions import PlainPositions
from lcjax.training.objective import language_model
from lcjax.training.step import accumulate
from lcjax.tree import flatten

torch = pytest.importorskip("torch")


def test_every_family_is_tested():
    assert {kind for kind, _ in MODELS.values()} == set(FAMILIES)


# With plain names of tensors, with fused ones, and with another order of rows;
# models/test_transformers.py has more, quick.
@pytest.mark.slow_except("qwen3", "phi3", "glm4")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_logits_and_texts_of_transformers_and_is_exported_as_it_was(
    tmp_path, name
):
    from transformers import AutoModelForCausalLM

    (tmp_path / "hf").mkdir()
    model = saved(name, tmp_path / "hf", "bin" if name in STATE_DICTS else "safetensors")
    params, config, tokenizer = load(tmp_path / "hf", allow_pickle=True)
    tokens = np.random.default_rng(1).integers(0, 256, (2, 40))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    lm = LanguageModel(Decoder(config), params, tokenizer)
    actual = lm.logits(tokens)
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())

    # The tokens that follow, each read beside the cache.
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        written = model.generate(torch.tensor(tokens), do_sample=False, max_new_tokens=12)
    for text, ids in zip(
        lm.generate(tokens.tolist(), Sampling(max_new_tokens=12)), written[:, 40:].tolist()
    ):
        assert list(text.ids) == ids[: len(text.ids)] and text.ids

    save_hf(tmp_path / "out", params, config, tokenizer)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert type(again) is type(model)
    state = again.state_dict()
    assert set(state) == set(model.state_dict())
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    with torch.no_grad():
        exported = again(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(exported, expected, atol=1e-5 * np.abs(expected).max())
    assert config_from_hf(again.config.to_dict()) == config
    eos = again.generation_config.eos_token_id
    assert tokenizer.eos_ids == ((eos,) if isinstance(eos, int) else tuple(eos))
    reread, reread_config, _ = load(tmp_path / "out")
    assert reread_config == config
    assert_same(reread, params)


@pytest.mark.slow_except(  # each stores other tensors
    "llama", "phi3", "gemma3", "mixtral", "llama4"
)
@pytest.mark.parametrize("name", MODELS)
def test_pickles_in_two_files_hold_the_model_of_safetensors(tmp_path, name):
    for form in ("safetensors", "bin"):
        (tmp_path / form).mkdir()
    model = saved(name, tmp_path / "safetensors")
    model.config.save_pretrained(tmp_path / "bin")
    ByteTokenizer().save(tmp_path / "bin")
    state = model.state_dict()
    files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    half = len(state) // 2
    weight_map = {key: files[i >= half] for i, key in enumerate(state)}
    for file in files:
        torch.save(
            {k: state[k] for k, f in weight_map.items() if f == file}, tmp_path / "bin" / file
        )
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (tmp_path / "bin/pytorch_model.bin.index.json").write_text(json.dumps(index))

    params, config, _ = load(tmp_path / "bin", allow_pickle=True)
    expected, expected_config, _ = load(tmp_path / "safetensors")
    assert config == expected_config
    assert_same(params, expected)
    (tmp_path / "bin" / files[1]).unlink()
    with pytest.raises(InputError, match=rf"1 of 2 shards are missing: {files[1]}"):
        load(tmp_path / "bin", allow_pickle=True)


def test_a_method_of_the_model_leaves_layers_with_a_window_alone(tmp_path):
    (tmp_path / "hf").mkdir()
    saved("gemma3", tmp_path / "hf")
    lm = LanguageModel.load(tmp_path / "hf")
    longer = lm.with_method(rope=Yarn(factor=4.0))
    ropes = [longer.config.layer(i).rope for i in range(6)]
    assert ropes[0] == Default(theta=10_000.0) and ropes[0] == ropes[4]
    assert isinstance(ropes[5], Yarn) and ropes[5].theta == 1_000_000.0


def test_phi3_keeps_its_class_as_long_as_that_takes_the_position_method(tmp_path):
    (tmp_path / "hf").mkdir()
    saved("phi3, all channels", tmp_path / "hf")
    params, config, _ = load(tmp_path / "hf")
    assert config.family == "phi3" == config_to_hf(config)["model_type"]
    assert "model.layers.1.self_attn.qkv_proj.weight" in stored_names(
        save_hf(tmp_path / "same", params, config, ByteTokenizer())
    )
    longer = config.replace(rope=Yarn(theta=1e4, factor=4.0, original_length=128))
    assert config_to_hf(longer)["model_type"] == "llama"
    assert "model.layers.1.self_attn.q_proj.weight" in stored_names(
        save_hf(tmp_path / "longer", params, longer, ByteTokenizer())
    )
    assert_same(load(tmp_path / "longer")[0], params)
    with pytest.raises(InputError, match=r"transformers has no .* with model.rotary_fraction=0.5"):
        config_to_hf(longer.replace(rotary_fraction=0.5, mlp_bias=True))
    with pytest.raises(InputError, match="stores the projections of this model together"):
        save_peft(tmp_path / "adapter", params, config.replace(lora=LoRA(rank=2)), base=None)


def test_a_phi3_that_its_class_does_not_compute_is_written_as_a_glm(tmp_path):
    """GLM rotates a part of each head under any position method, in another order of channels."""
    from transformers import AutoModelForCausalLM

    (tmp_path / "hf").mkdir()
    saved("phi3, all channels", tmp_path / "hf")
    params, config, _ = load(tmp_path / "hf")
    rope = Yarn(theta=1e4, factor=4.0, original_length=128)
    config = config.replace(rope=rope, rotary_fraction=0.5)
    save_hf(tmp_path / "out", params, config, ByteTokenizer())
    again, other, tokenizer = load(tmp_path / "out")
    assert_same(again, params)
    assert other == config.replace(family="glm")
    tokens = np.random.default_rng(1).integers(0, 256, (2, 40))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    actual = LanguageModel(Decoder(config), params, tokenizer).logits(tokens)
    np.testing.assert_allclose(actual, expected, atol=1e-4 * np.abs(expected).max())


def stored_names(folder):
    with safe_open(folder / "model.safetensors", "np") as file:
        return set(file.keys())


def test_fused_tensors_of_another_size_are_named(tmp_path):
    (tmp_path / "hf").mkdir()
    saved("phi3", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    with pytest.raises(InputError, match=r"missing: .*q_proj.*unexpected: .*qkv_proj"):
        load(tmp_path / "hf")


@pytest.mark.slow_except("mixtral-True")
@pytest.mark.parametrize(
    ("name", "scan"),
    [
        *(("mixtral", True), ("olmoe", False), ("qwen2_moe", True)),
        ("qwen2_moe, dense layers", True),
    ],
)
def test_the_loss_of_a_mixture_and_its_gradient_are_those_of_transformers(tmp_path, name, scan):
    (tmp_path / "hf").mkdir()
    model = saved(name, tmp_path / "hf", "bin")
    params, config, _ = load(tmp_path / "hf", allow_pickle=True)
    config = config.replace(experts=dataclasses.replace(config.experts, balance=0.5))
    model.router_aux_loss_coef = 0.5
    rng = np.random.default_rng(1)
    tokens, mask = rng.integers(0, 256, (3, 17)), np.ones((3, 17), np.int32)
    mask[1, 11:] = mask[2, 4:] = 0
    labels = np.where(mask, tokens, -100)
    labels, tokens, mask = (torch.tensor(x) for x in (labels, tokens, mask))
    expected = model(tokens, attention_mask=mask, labels=labels, output_router_logits=True)
    expected.loss.backward()

    # The gradients of transformers, read like weights.
    gradients = {path: leaf.grad for path, leaf in model.named_parameters()}
    torch.save(gradients, tmp_path / "hf/pytorch_model.bin")
    wanted = load(tmp_path / "hf", allow_pickle=True)[0]

    targets = np.roll(tokens.numpy(), -1, 1)
    weights = np.pad(mask.numpy()[:, 1:], ((0, 0), (0, 1))).astype(np.float32)
    batch = {"tokens": tokens.numpy(), "targets": targets, "segments": mask.numpy()}
    batch |= {"weights": weights, "positions": np.tile(np.arange(17), (3, 1))}
    batch = jax.tree.map(jnp.asarray, batch)
    layers = config.replace(scan_layers=scan, remat="dots")
    tree = params if scan else unstack_layers(params, layers)
    step = functools.partial(accumulate, language_model(layers, PlainPositions()), count=1)
    loss, _, grads, parts = jax.jit(step)(tree, {}, batch, jax.random.key(0))
    np.testing.assert_allclose(loss, expected.loss.detach(), rtol=1e-5)
    np.testing.assert_allclose(parts["balance"], expected.aux_loss.detach(), rtol=1e-5)
    np.testing.assert_allclose(loss, parts["ce"] + 0.5 * parts["balance"], rtol=1e-5)
    grads = grads if scan else stack_layers(grads, layers)
    for mine, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, want, atol=1e-4 * np.abs(want).max())
    plain = language_model(config, PlainPositions(), terms=False)
    nll, total, _ = jax.jit(plain)(params, {}, batch, jax.random.key(0))
    np.testing.assert_allclose(nll / total, parts["ce"], rtol=1e-5)


@pytest.mark.parametrize("folder", ["hf", "adapters"])
def test_projections_of_keys_that_no_layer_reads_are_left_out(tmp_path, folder):
    """Published Gemma 4 E2B has them in layers that read the keys of others."""
    from safetensors.torch import load_file, save_file

    (tmp_path / "hf").mkdir()
    model = hf_model("gemma4, keys of other layers")
    model.save_pretrained(tmp_path / "hf")
    ByteTokenizer().save(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    if folder == "adapters":
        write_peft(tmp_path / folder, low_rank(tensors, ("q_proj", "k_proj")), tmp_path / "hf")
    expected, _, _ = load(tmp_path / folder)
    for layer in (4, 5, 6, 7):
        name = f"model.layers.{layer}.self_attn"
        tensors |= {f"{name}.{x}_proj.weight": torch.zeros(2, 2) for x in "kv"}
        tensors[f"{name}.k_norm.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "hf/model.safetensors", {"format": "pt"})
    assert_same(load(tmp_path / folder)[0], expected)


@pytest.mark.slow_except("gemma4, mixture")
@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("gemma4")])
def test_gradients_of_gemma4_are_those_of_transformers(tmp_path, name):
    (tmp_path / "hf").mkdir()
    model = saved(name, tmp_path / "hf", "bin")
    params, config, _ = load(tmp_path / "hf", allow_pickle=True)
    tokens = np.random.default_rng(1).integers(0, 256, (3, 17))
    loss = model(torch.tensor(tokens), labels=torch.tensor(tokens)).loss
    loss.backward()
    # The gradients of transformers, read like weights. It does not train the scales of layers.
    gradients = {path: leaf.grad for path, leaf in model.named_parameters()}
    gradients |= {k: v for k, v in model.state_dict().items() if k.endswith("layer_scalar")}
    torch.save(gradients, tmp_path / "hf/pytorch_model.bin")
    expected = flatten(load(tmp_path / "hf", allow_pickle=True)[0])

    @jax.jit
    def nll(params):
        model = Decoder(config)
        hidden = model.apply({"params": params}, tokens).hidden
        logits = model.apply({"params": params}, hidden, method="logits")[:, :-1]
        likelihood = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(likelihood, tokens[:, 1:, None], -1).mean()

    actual, slopes = jax.value_and_grad(nll)(params)
    np.testing.assert_allclose(actual, loss.detach(), rtol=1e-5)
    for path, slope in flatten(slopes).items():
        if not path.endswith("output_scale"):
            wanted = expected[path]
            np.testing.assert_allclose(slope, wanted, atol=1e-4 * np.abs(wanted).max())


def test_experts_that_are_missing_or_of_another_size_are_named(tmp_path):
    (tmp_path / "hf").mkdir()
    saved("mixtral", tmp_path / "hf", "bin")
    path = tmp_path / "hf/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_local_experts": 7}))
    with pytest.raises(InputError, match=r"missing: .*w1.weight.*unexpected: .*gate_up_proj"):
        load(tmp_path / "hf", allow_pickle=True)
    path.write_text(json.dumps(config))
    params, config, tokenizer = load(tmp_path / "hf", allow_pickle=True)
    save_hf(tmp_path / "out", params, config, tokenizer)
    path = tmp_path / "out/config.json"
    hf = json.loads(path.read_text())
    path.write_text(json.dumps(hf | {"num_local_experts": 6}))
    name = r"model.layers.0.block_sparse_moe.experts.5.w1.weight"
    with pytest.raises(InputError, match=rf"missing: {name}, .*wrong shape: .*gate.weight is \[5"):
        load(tmp_path / "out")
    for key, value in {"router_jitter_noise": 0.1, "clip_qkv": 8.0}.items():
        kind = {"clip_qkv": "olmoe"}.get(key, "mixtral")
        with pytest.raises(InputError, match=rf"{key}=.* is not supported for model_type='{kind}'"):
            config_from_hf(hf | {key: value, "model_type": kind})


def test_a_family_that_is_not_known_is_refused_by_name():
    with pytest.raises(InputError, match=r"model_type='mamba' is not supported; .*llama.*qwen3"):
        config_from_hf({"model_type": "mamba"})


def test_what_no_class_computes_is_not_exported(tmp_path):
    (tmp_path / "hf").mkdir()
    saved("gemma2", tmp_path / "hf")
    params, config, _ = load(tmp_path / "hf")
    wrong = config.replace(block="parallel")
    with pytest.raises(InputError, match="transformers has no gemma2 model with model.block='para"):
        save_hf(tmp_path / "out", params, wrong)
    with pytest.raises(
        InputError, match="attention_soft_cap is not defined under pattern Landmark"
    ):
        config.replace(layers=(), pattern=Landmark(token=259))


@pytest.mark.parametrize("stored", ["both, different", "the head alone"])
def test_a_stored_head_of_a_tied_config_counts_as_in_transformers(tmp_path, stored):
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES | {"tie_word_embeddings": True})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ByteTokenizer().save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    tensors["lm_head.weight"] = torch.randn_like(tensors[embedding]) * 0.2
    if stored == "the head alone":
        del tensors[embedding]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    tokens = np.random.default_rng(1).integers(0, 256, (2, 40))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        expected = model(torch.tensor(tokens)).logits.numpy()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params, config, tokenizer = load(tmp_path)
    actual = LanguageModel(Decoder(config), params, tokenizer).logits(tokens)
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())
    assert config.tie_embeddings == (stored == "the head alone")
    messages = [str(one.message) for one in caught if "lm_head.weight differs" in str(one.message)]
    assert len(messages) == (not config.tie_embeddings)
