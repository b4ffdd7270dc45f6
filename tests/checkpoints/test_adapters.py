"""`peft` folders over their base: merged on the way in, or refused with the way out."""

import jax
import numpy as np
import pytest
from adapter_support import base_tensors, low_rank, merged, write_peft
from convert_support import adapters, assert_same, edit_json, random_params, saved, tiny_config
from gguf_support import write_gguf
from safetensors.numpy import load_file

from lcjax.attention import Causal, DualChunk, Landmark, ShiftedSparse, Sliding, Streaming
from lcjax.checkpoints import ByteTokenizer, load, load_config, save_hf
from lcjax.checkpoints.adapters import save_peft
from lcjax.checkpoints.build import ModelSection, build
from lcjax.cost import parameter_shapes
from lcjax.errors import InputError
from lcjax.memory import BeaconSection
from lcjax.models import LayerKind, lora
from lcjax.models.experts import Experts
from lcjax.models.lora import LoRA, is_adapter
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.rope import NTK, Default, DynamicNTK, Linear, NoRotation
from lcjax.training.language_modelling import LanguageModelTask
from lcjax.training.train_config import TrainConfig, TrainSection
from lcjax.tree import flatten, nest, split


def loaded_tensors(folder, tmp_path, **options):
    """The merged model by its Hugging Face names."""
    save_hf(tmp_path / "out", *load(folder, **options), overwrite=True)
    return load_file(tmp_path / "out" / "model.safetensors")


def assert_close(got, want):
    assert set(got) == set(want)
    for name, tensor in want.items():
        np.testing.assert_allclose(got[name], tensor, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ("q_proj", "v_proj", "down_proj", "gate_proj", "lm_head")),
        ("qwen2", ("o_proj", "up_proj")),
        ("phi", ("q_proj", "dense", "fc1", "fc2")),
    ],
)
def test_adapters_are_merged_into_the_base_that_their_config_names(tmp_path, family, targets):
    base = base_tensors(tmp_path / "base", family)
    pairs = low_rank(base, targets)
    assert {key.split(".")[-3] for key in pairs} == set(targets)
    write_peft(tmp_path / "lora", pairs, tmp_path / "base", target_modules=list(targets))
    assert_close(loaded_tensors(tmp_path / "lora", tmp_path), merged(base, pairs, 2.0))
    _, config, tokenizer = load(tmp_path / "lora")
    assert config == load_config(tmp_path / "base")
    assert tokenizer.fingerprint == ByteTokenizer().fingerprint


def test_the_base_may_be_a_gguf_file(tmp_path):
    params, config = saved(tmp_path / "base")
    write_gguf(tmp_path / "base.gguf", params, config)
    base = load_file(tmp_path / "base" / "model.safetensors")
    write_peft(tmp_path / "lora", low_rank(base), tmp_path / "base")
    merged_params = load(tmp_path / "lora", base=tmp_path / "base.gguf")[0]
    assert_same(merged_params, load(tmp_path / "lora")[0])


def test_the_base_may_be_a_run_by_the_model_that_it_exported(tmp_path):
    run = tmp_path / "run"
    base = base_tensors(run / "model")
    (run / "checkpoints").mkdir()
    (run / "config.yaml").write_text("")
    write_peft(tmp_path / "lora", low_rank(base), run)
    assert_same(load(tmp_path / "lora")[0], load(tmp_path / "lora", base=run / "model")[0])
    for option in ("base", "context"):
        with pytest.raises(InputError, match=rf"{option}=7: .*run is a run folder; leave {option}"):
            load(run, **{option: 7})


@pytest.mark.parametrize("shape", [Mesh(1, 8, 1), Mesh(1, 2, 2)])
def test_every_mesh_reads_the_same_sums(tmp_path, shape):
    base = base_tensors(tmp_path / "base", param_dtype="bfloat16")
    write_peft(tmp_path / "lora", low_rank(base), tmp_path / "base")
    devices = jax.devices()[: shape.data * shape.fsdp * shape.tensor]
    spread, config, _ = load(tmp_path / "lora", mesh=make_mesh(shape, devices))
    assert config.param_dtype == "bfloat16"
    assert_same(spread, load(tmp_path / "lora")[0])


def test_what_the_library_exports_it_reads_again(tmp_path):
    base = str(tmp_path / "base")
    tree, config = saved(base)
    adapters = LoRA(rank=2, alpha=3.0, targets=("query", "out"))
    rng = np.random.default_rng(3)
    shapes = {"query": ((3, 48, 2), (3, 2, 6, 8)), "out": ((3, 6, 8, 2), (3, 2, 48))}
    for name, (a, b) in shapes.items():
        tree["layers"]["attention"][name] |= {
            "lora_a": jax.numpy.asarray(rng.normal(size=a), "float32"),
            "lora_b": jax.numpy.asarray(rng.normal(size=b), "float32"),
        }
    config = config.replace(lora=adapters)
    save_peft(tmp_path / "lora", tree, config, base=base, checksums=True)
    want = lora.merge(tree, adapters)
    got = load(tmp_path / "lora")[0]
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    edit_json(tmp_path / "lora" / "adapter_config.json", lora_alpha=3.5)
    with pytest.raises(InputError, match=r"lora/adapter_config\.json is not as it was written"):
        load(tmp_path / "lora")


def test_of_a_mixture_the_shared_expert_gets_adapters(tmp_path):
    base = tmp_path / "base"
    params, config = saved(
        base, experts=Experts(4, shared_width=28, shared_gate=True), qkv_bias=True
    )
    adapters = LoRA(rank=2, targets=("key", "gate", "down"))
    config, rng = config.replace(lora=adapters), np.random.default_rng(3)
    shapes = {path: leaf.shape for path, leaf in parameter_shapes(config).items()}
    added = {path: rng.normal(size=shapes[path]) for path in shapes if is_adapter(path)}
    tree = nest(flatten(params) | {path: x.astype("float32") for path, x in added.items()})
    save_peft(tmp_path / "lora", tree, config, base=str(base))
    tensors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert {name.split("layers.1.")[1].split(".lora_")[0] for name in tensors if ".1." in name} == {
        *("self_attn.k_proj", "mlp.shared_expert.gate_proj", "mlp.shared_expert.down_proj")
    }
    got, want = load(tmp_path / "lora")[0], lora.merge(tree, adapters)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got, want)


@pytest.mark.parametrize(
    ("family", "base", "changes"),
    [
        ("llama", {}, {"rope": Linear(theta=5e4, factor=8.0)}),
        ("llama", {}, {"rope": NTK(theta=5e4, alpha=4.0), "pattern": Sliding(8)}),
        ("llama", {}, {"rope": DynamicNTK(theta=5e4, factor=2.0, original_length=32)}),
        ("llama", {}, {"rope": NoRotation()}),
        ("llama", {"rope": Linear(theta=5e4, factor=8.0)}, {"rope": Default(theta=5e4)}),
        ("llama", {"pattern": Sliding(8)}, {"pattern": Causal()}),
        ("llama", {}, {"pattern": Landmark(block=8, top_k=2, train_length=64, token=9)}),
        ("llama", {}, {"pattern": Streaming(sinks=2, recent=9)}),  # which no config.json has
        ("llama", {}, {"pattern": ShiftedSparse(group=8)}),
        ("qwen2", {}, {"pattern": DualChunk(chunk=16, local=4, growth="linear")}),
        ("qwen2", {}, {"layers": (LayerKind(), LayerKind(2, Sliding(8)))}),
        ("qwen2", {"layers": (LayerKind(), LayerKind(2, Sliding(8)))}, {"layers": ()}),
    ],
    ids=str,
)
def test_adapters_bring_the_method_that_they_were_trained_with(tmp_path, family, base, changes):
    _, config = saved(tmp_path / "base", family, **base)
    trained = config.replace(lora=LoRA(rank=2, targets=("query",)), **changes)
    tree, _ = adapters()
    save_peft(tmp_path / "lora", tree, trained, base=str(tmp_path / "base"))
    assert load(tmp_path / "lora")[1] == config.replace(**changes).for_inference()
    # With this name transformers would look for a whole model in the folder.
    assert not (tmp_path / "lora" / "config.json").exists()


def test_a_method_that_cannot_be_read_is_refused_in_one_line(tmp_path):
    saved(tmp_path / "base")
    save_peft(tmp_path / "lora", *adapters(), base=str(tmp_path / "base"))
    edit_json(tmp_path / "lora" / "lcjax_method.json", pattern={"type": "mine"})
    with pytest.raises(InputError, match=r"lcjax_method.json: pattern.type='mine' is unknown; .*"):
        load(tmp_path / "lora")


def exported(folder, section, config):
    """Exports what a training of `config`'s adapters alone would have learned."""
    params, base = random_params(config), section.path
    low_rank, _ = adapters()
    for name, leaf in low_rank["layers"]["attention"]["query"].items():
        params["layers"]["attention"]["query"].setdefault(name, leaf)
    task = LanguageModelTask(TrainConfig(model=section, train=TrainSection(lora=config.lora)), None)
    task.model, task.tokenizer = config, ByteTokenizer()
    saved(base)
    task.export(folder, *split(params, lora.is_adapter))


def test_the_adapters_of_a_run_are_its_merged_model(tmp_path):
    section = ModelSection(path=str(tmp_path / "base"), rope=Linear(factor=8.0))
    config = tiny_config(rope=Linear(theta=5e4, factor=8.0), lora=adapters()[1].lora)
    exported(tmp_path / "run", section, config)
    model, adapter = (load(tmp_path / "run" / name) for name in ("model", "adapter"))
    # The rows of a training have data.length tokens, more than 8 times 64.
    assert adapter[1] == model[1] == config.replace(lora=None, extended_length=1024)
    assert_same(adapter[0], model[0])


@pytest.mark.parametrize(
    "made",
    [{"memory": BeaconSection(chunk=16, ratio=4, ratios=())}, {"encoder_layers": 3}],
    ids=lambda made: next(iter(made)),
)
def test_adapters_of_more_than_the_base_are_exported_merged_only(tmp_path, made):
    section = ModelSection(path=str(tmp_path / "base"), **made)
    exported(tmp_path / "run", section, adapters()[1])
    assert (tmp_path / "run" / "model").is_dir()
    assert not (tmp_path / "run" / "adapter").exists()


def test_scales_of_single_modules_and_of_rs_lora_are_those_of_peft(tmp_path):
    base = base_tensors(tmp_path / "base")
    q, v = low_rank(base, ("q_proj",), rank=4), low_rank(base, ("v_proj",), rank=2)
    patterns = {
        "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {r"layers\.\d\.self_attn.q_proj": 6},
    }
    write_peft(tmp_path / "lora", q | v, tmp_path / "base", **patterns)
    want = merged(merged(base, q, 6 / 4), v, 4 / 2)
    assert_close(loaded_tensors(tmp_path / "lora", tmp_path), want)
    write_peft(tmp_path / "rs", q | v, tmp_path / "base", use_rslora=True, **patterns)
    want = merged(merged(base, q, 6 / 4**0.5), v, 4 / 2**0.5)
    assert_close(loaded_tensors(tmp_path / "rs", tmp_path), want)


@pytest.mark.parametrize("family", ["llama", "tied"])
def test_saved_modules_take_the_place_of_the_base_s(tmp_path, family):
    base = base_tensors(tmp_path / "base", family)
    rng = np.random.default_rng(4)
    head, embedding = rng.normal(size=(2, 266, 48)).astype(np.float32)
    modules = {
        "base_model.model.lm_head.modules_to_save.default.weight": head,  # as older versions do
        "base_model.model.model.embed_tokens.weight": embedding,
    }
    pairs = low_rank(base)
    saved_modules = ["lm_head", "embed_tokens"]
    write_peft(tmp_path / "lora", pairs | modules, tmp_path / "base", modules_to_save=saved_modules)
    want = merged(base, pairs, 2.0) | {
        "lm_head.weight": head,
        "model.embed_tokens.weight": embedding,
    }
    assert_close(loaded_tensors(tmp_path / "lora", tmp_path), want)
    config = load(tmp_path / "lora")[1]
    assert (config.vocab_size, config.tie_embeddings) == (266, False)


def test_a_tied_embedding_without_its_head_is_refused(tmp_path):
    base = base_tensors(tmp_path / "base", "tied")
    name = "model.embed_tokens.weight"
    tensors = low_rank(base) | {f"base_model.model.{name}": base[name]}
    write_peft(tmp_path / "lora", tensors, tmp_path / "base", modules_to_save=["embed_tokens"])
    with pytest.raises(InputError, match="modules_to_save has embed_tokens, .*not lm_head; merge"):
        load(tmp_path / "lora")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"r": 4}, r"q_proj has lora_A \[2, 48\] .*says r=4; take both files from one training"),
        ({"r": None}, r"r=None must be a number above 0"),
        ({"lora_alpha": "16"}, r"lora_alpha='16' must be a number"),
        *(
            ({key: value}, f"{key}=.* is not supported.*merge_and_unload")
            for key, value in (
                ("peft_type", "IA3"),
                ("bias", "some"),
                *(("init_lora_weights", name) for name in ("pissa_niter_4", "olora", "corda")),
                *(("init_lora_weights", name) for name in ("loftq", "lora_ga", "mica", "newer")),
                *((f"use_{name}", True) for name in ("dora", "qalora")),
                *((name, True) for name in ("lora_bias", "fan_in_fan_out", "ensure_weight_tying")),
                ("use_bdlora", {"nblocks": 2}),
                ("layer_replication", [[0, 2], [1, 3]]),
                ("trainable_token_indices", {"embed_tokens": [3]}),
                ("target_parameters", ["mlp.experts.gate_up_proj"]),
                ("alora_invocation_tokens", [5, 6]),
                *((f"{name}_config", {"x": 1}) for name in ("arrow", "kasa", "monteclora")),
                ("megatron_config", {"x": 1}),
            )
        ),
        ({"target_modules": ["v_proj"]}, r"q_proj has tensors, but .* adapts other modules"),
        ({"target_modules": r".*layers\.[1-9].*"}, r"layers.0.self_attn.q_proj has tensors"),
        ({"exclude_modules": ["q_proj"]}, "q_proj has tensors"),
        ({"layers_to_transform": [0, 2]}, "layers.1.self_attn.q_proj has tensors"),
        ({"layers_to_transform": 1}, "layers.0.self_attn.q_proj has tensors"),
        ({"target_modules": "q_proj("}, r"target_modules: 'q_proj\(': .*mend it"),
        ({"target_modules": 3}, r"target_modules=3 must be a list of names"),
        ({"rank_pattern": {"q_proj": "2"}}, r"rank_pattern=.* must give numbers above 0"),
        ({"alpha_pattern": ["q_proj"]}, r"alpha_pattern=\['q_proj'\] must give numbers"),
        ({"alpha_pattern": {"q_proj(": 2}}, r"alpha_pattern: 'q_proj\(': .*mend it"),
    ],
)
def test_settings_that_cannot_be_merged_are_refused_in_one_line(tmp_path, settings, words):
    base = base_tensors(tmp_path / "base")
    write_peft(tmp_path / "lora", low_rank(base, ("q_proj",)), tmp_path / "base", **settings)
    with pytest.raises(InputError, match=words) as error:
        load(tmp_path / "lora")
    assert "\n" not in str(error.value)


def test_settings_of_training_alone_change_nothing(tmp_path):
    base = base_tensors(tmp_path / "base")
    pairs = low_rank(base, ("q_proj",))
    # Those that peft 0.21 writes, but for the base; and adapters of a base class (AutoModel).
    usual = {
        **dict.fromkeys(("auto_mapping", "revision", "layers_pattern", "layers_to_transform")),
        **dict.fromkeys(("layer_replication", "megatron_config", "trainable_token_indices")),
        **dict.fromkeys(("arrow_config", "kasa_config", "use_bdlora", "target_parameters")),
        **dict.fromkeys(("use_dora", "use_qalora", "lora_bias", "use_rslora"), False),
        "qalora_group_size": 16,
        "megatron_core": "megatron.core",
        "peft_version": "0.21.2",
        "loftq_config": {},
        "rank_pattern": {},
        "alpha_pattern": {},
        "lora_dropout": 0.1,
        "target_modules": ["q_proj"],
        "init_lora_weights": "eva",
        "eva_config": {"rho": 2.0},
        "layers_to_transform": [0, 1, 2],
        "exclude_modules": ["v_proj"],
    }
    write_peft(tmp_path / "lora", pairs, tmp_path / "base", **usual)
    want = merged(base, pairs, 2.0)
    assert_close(loaded_tensors(tmp_path / "lora", tmp_path), want)
    inner = {name.replace("model.model.model", "model.model"): x for name, x in pairs.items()}
    settings = {"target_modules": r"layers\.\d\.self_attn\.q_proj", "a_newer_key": 3}
    write_peft(tmp_path / "inner", inner, tmp_path / "base", **settings)
    with pytest.warns(UserWarning, match="a_newer_key not known to lcjax .*merge them with peft"):
        assert_close(loaded_tensors(tmp_path / "inner", tmp_path), want)


_LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{_LAYER}.lora_B.weight": None}, "layers.0.self_attn.q_proj has lora_A only"),
        ({f"{_LAYER}.lora_magnitude_vector": (48,)}, r"not of plain LoRA \(.*lora_magnitude"),
        ({"base_model.model.model.layers.7.mlp.up_proj.weight": (8, 8)}, "not in the base: .*7"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_the_names_of_their_tensors(tmp_path, changes, words):
    base = base_tensors(tmp_path / "base")
    tensors = low_rank(base)
    for name, shape in changes.items():
        if shape is None:
            del tensors[name]
        else:
            tensors[name] = np.zeros(shape, np.float32)
    write_peft(tmp_path / "lora", tensors, tmp_path / "base")
    with pytest.raises(InputError, match=words):
        load(tmp_path / "lora")


def test_a_base_that_cannot_be_found_is_asked_for(tmp_path):
    base = base_tensors(tmp_path / "base")
    lost = write_peft(tmp_path / "lost", low_rank(base), "/models/of/somebody")
    with pytest.raises(InputError, match=r"'/models/of/somebody' cannot be .*\(--base PATH\)"):
        load(lost)
    unnamed = write_peft(tmp_path / "unnamed", low_rank(base))
    with pytest.raises(InputError, match=r"names no base_model_name_or_path; .*\(--base PATH\)"):
        load(unnamed)
    with pytest.raises(InputError, match=r"config\.json: no such file; .*adapters only"):
        load_config(lost)
    with pytest.raises(InputError, match=r"lost: no config\.json there, so this is no base"):
        load(unnamed, base=lost)
    assert_same(load(unnamed, base=tmp_path / "base")[0], load(lost, base=tmp_path / "base")[0])
    (unnamed / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no adapter_model\.safetensors or \.bin; download it"):
        load(unnamed, base=tmp_path / "base")


@pytest.mark.parametrize("option", ["base", "context"])
def test_whole_models_take_no_base_and_no_length(tmp_path, option):
    saved(tmp_path / "base")
    with pytest.raises(InputError, match=rf"{option}=128: .*base is a whole model.*leave {option}"):
        load(tmp_path / "base", **{option: 128})


def test_a_model_section_names_adapters_and_their_base(tmp_path):
    base = base_tensors(tmp_path / "base")
    write_peft(tmp_path / "lora", low_rank(base), tmp_path / "gone")
    section = ModelSection(path=str(tmp_path / "lora"), base=str(tmp_path / "base"))
    _, params, _ = build(section)
    assert_same(params, load(tmp_path / "lora", base=tmp_path / "base")[0])
    with pytest.raises(InputError, match=r"model.base='x': give the adapters' folder as"):
        ModelSection(base="x", preset="tiny")


@pytest.mark.parametrize("other", ["lora_A.default.weight", "lora_A"])
def test_two_names_of_one_matrix_are_refused(tmp_path, other):
    base = base_tensors(tmp_path / "base")
    tensors = low_rank(base)
    tensors[f"{_LAYER}.{other}"] = tensors[f"{_LAYER}.lora_A.weight"] + 1
    write_peft(tmp_path / "lora", tensors, tmp_path / "base")
    with pytest.raises(InputError, match=r"q_proj\.lora_A.* and .*lora_A.* are two names of one"):
        load(tmp_path / "lora")
