"""Hugging Face folders: what is written is what is read, on any mesh, and faults are named."""

import json
import subprocess
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_support import FAMILIES, assert_same, edit_json, random_params, saved, tiny_config
from safetensors.numpy import load_file, save_file

import lcjax.checkpoints.hf_save
import lcjax.config
import lcjax.models.lora
from lcjax.attention import Bidirectional
from lcjax.checkpoints import (
    ByteTokenizer,
    hf_names,
    hub,
    load,
    load_config,
    load_tokenizer,
    save_hf,
)
from lcjax.checkpoints.build import ModelSection, check_source
from lcjax.checkpoints.safetensors_io import INDEX, SINGLE, SafetensorsFolder, write_file
from lcjax.checkpoints.weights import TensorInfo
from lcjax.errors import InputError
from lcjax.files import CHECKSUMS
from lcjax.models import Decoder, LayerKind, unstack_layers
from lcjax.models.lora import LoRA
from lcjax.parallel.sharding import Mesh, make_mesh, param_shardings
from lcjax.rope import E2LLM, Default, Linear, NoRotation
from lcjax.rope.clex import Clex
from lcjax.storage import to_path
from lcjax.tree import nest


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_of_names_makes_the_tree_that_the_model_makes(family):
    config = tiny_config(family)
    init = jax.eval_shape(
        lambda key: Decoder(config).init(key, jnp.zeros((1, 4), jnp.int32))["params"],
        jax.random.key(0),
    )
    table = nest({e.path: e.shape for e in hf_names.entries(config)})
    assert jax.tree.map(lambda leaf: leaf.shape, init) == table


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, "float32") for family in FAMILIES), ("llama", "bfloat16"), ("llama", "float16")],
)
def test_export_and_import_is_the_identity(tmp_path, family, dtype):
    params, config = saved(tmp_path, family, param_dtype=dtype)
    loaded, loaded_config, tokenizer = load(tmp_path)
    assert loaded_config == config == load_config(tmp_path)
    assert_same(loaded, params)
    assert tokenizer.fingerprint == ByteTokenizer().fingerprint
    assert load_tokenizer(tmp_path).eos_ids == (257,)


def test_weights_are_cast_on_the_way(tmp_path):
    params, _ = saved(tmp_path / "full")
    loaded, config, _ = load(tmp_path / "full", param_dtype="bfloat16")
    assert config.param_dtype == "bfloat16"
    assert_same(loaded, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    save_hf(tmp_path / "half", params, config.replace(param_dtype="float32"), dtype="float16")
    info = SafetensorsFolder(tmp_path / "half").tensors["model.norm.weight"]
    assert info == TensorInfo((48,), "float16")


NAME = "model.layers.1.mlp.up_proj.weight"


def edit_tensors(folder, change):
    """Replaces the tensors of a folder by `change` of their dictionary."""
    tensors = load_file(folder / SINGLE)
    save_file(change(tensors) or tensors, folder / SINGLE)


def with_value(params, value):
    """`params` with a number of one matrix of layer 1 replaced."""
    params = jax.tree.map(lambda leaf: leaf, params)  # a copy of the dictionaries
    up = params["layers"]["mlp"]["up"]
    up["kernel"] = up["kernel"].at[1, 5, 7].set(value)
    return params


@pytest.mark.parametrize(
    ("dtype", "value"), [("float32", np.nan), ("bfloat16", np.inf), ("float16", -np.inf)]
)
def test_a_tensor_that_is_not_finite_is_named(tmp_path, dtype, value):
    params, config = saved(tmp_path / "bad", param_dtype=dtype)
    with pytest.raises(InputError, match=f"{NAME} holds NaN or infinity, so the model cannot be"):
        save_hf(tmp_path / "bad", with_value(params, value), config, overwrite=True)
    assert_same(load(tmp_path / "bad")[0], params)  # the old one is there
    edit_tensors(tmp_path / "bad", lambda tensors: tensors[NAME].__setitem__((5, 7), value))
    for options in ({}, {"mesh": make_mesh(Mesh(1, 4, 2))}, {"param_dtype": "bfloat16"}):
        with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or inf"):
            load(tmp_path / "bad", **options)


def test_a_number_that_the_type_of_the_weights_cannot_hold_is_refused(tmp_path):
    params, config = saved(tmp_path / "good")
    save_hf(tmp_path / "large", with_value(params, 1e5), config, ByteTokenizer())
    load(tmp_path / "large", param_dtype="bfloat16")
    with pytest.raises(InputError, match=r"up_proj\.weight holds numbers beyond float16"):
        load(tmp_path / "large", param_dtype="float16")
    with pytest.raises(InputError, match=r"holds numbers beyond float16.* save it in float32"):
        save_hf(tmp_path / "half", with_value(params, 1e5), config, dtype="float16")


@pytest.mark.parametrize("prefix", ["", "transformer.", "module.model.", "_orig_mod.model."])
@pytest.mark.parametrize("family", ["tied", "llama", "phi"])
def test_weights_of_a_base_class_or_a_wrapper_are_read(tmp_path, family, prefix):
    params, _ = saved(tmp_path, family)
    outer = prefix.removesuffix("model.") if prefix != "transformer." else ""

    def rename(tensors):
        names = {n: outer + n for n in tensors if n.startswith("lm_")}
        names |= {n: prefix + n.removeprefix("model.") for n in tensors if n not in names}
        return {names[n]: x for n, x in tensors.items() if prefix or not n.startswith("lm_")}

    edit_tensors(tmp_path, rename)
    if family != "tied" and not prefix:
        with pytest.raises(InputError, match=r"no lm_head.weight, so a base class .* saved these"):
            load(tmp_path)
    else:
        assert_same(load(tmp_path)[0], params)


def test_generation_defaults_of_the_source_are_kept(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    saved(source)
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    defaults |= {"do_sample": True, "suppress_tokens": [3], "max_length": 64}
    ids = {"bos_token_id": None, "eos_token_id": [257, 9], "pad_token_id": 258}
    version = {"transformers_version": "4.51.0"}
    (source / GENERATION).write_text(json.dumps(defaults | ids | version))
    # The tokenizer has a BOS, which the model does not use.
    values = json.loads((source / CONFIG).read_text())
    (source / CONFIG).write_text(json.dumps(values | {"bos_token_id": None}))
    params, config, tokenizer = load(source)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (256, (257, 9))
    save_hf(out, params, config, tokenizer)
    assert json.loads((out / GENERATION).read_text()) == defaults | ids
    assert json.loads((out / CONFIG).read_text()) | ids == json.loads((out / CONFIG).read_text())
    tokenizer.save(tmp_path / "run")  # as a run folder keeps it
    again = load_tokenizer(tmp_path / "run")
    assert (again.generation, again.eos_ids) == (tokenizer.generation, tokenizer.eos_ids)
    longer = config.replace(rope=Linear(theta=5e4, factor=2.0))
    save_hf(out, params, longer, again, overwrite=True)
    assert json.loads((out / GENERATION).read_text()) == defaults | ids | {"max_length": 128}


@pytest.mark.parametrize("family", ["llama", "phi"])
@pytest.mark.parametrize("shape", [Mesh(1, 8, 1), Mesh(2, 2, 2), Mesh(1, 2, 4)])
def test_every_mesh_reads_the_same_weights_into_the_sharding_of_the_table(tmp_path, family, shape):
    params, _ = saved(tmp_path, family)
    mesh = make_mesh(shape)
    loaded = load(tmp_path, mesh=mesh)[0]
    assert_same(jax.device_get(loaded), jax.device_get(params))
    wanted = param_shardings(mesh, params)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, loaded, wanted))


def test_a_shard_is_read_by_its_own_rows_and_nothing_else(tmp_path, monkeypatch):
    saved(tmp_path)
    read = {}
    rows = SafetensorsFolder.rows

    def record(self, name, start, stop):
        read.setdefault(name, set()).add((start, stop))
        return rows(self, name, start, stop)

    monkeypatch.setattr(SafetensorsFolder, "rows", record)
    load(tmp_path, mesh=make_mesh(Mesh(1, 4, 2)))
    # 6 query heads of 8 over 2 tensor shards: 24 rows each; columns are cut in memory.
    assert read["model.layers.1.self_attn.q_proj.weight"] == {(0, 24), (24, 48)}
    assert read["model.layers.1.mlp.gate_proj.weight"] == {(0, 40), (40, 80)}
    assert read["model.layers.1.mlp.down_proj.weight"] == {(i, i + 12) for i in (0, 12, 24, 36)}


def test_several_files_and_an_index_hold_the_same_model(tmp_path):
    config = tiny_config()
    params = random_params(config)
    save_hf(tmp_path / "m", params, config, ByteTokenizer(), max_shard_bytes=60_000)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "m").glob("model-*.safetensors"))
    assert len(files) == len(set(index["weight_map"].values())) > 3
    assert max(f.stat().st_size for f in files) < 70_000
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    assert_same(load(tmp_path / "m")[0], params)
    files[1].unlink()
    with pytest.raises(InputError, match=rf"shards are missing: {files[1].name}"):
        load(tmp_path / "m")


def test_checksums_find_every_flipped_bit_of_a_folder(tmp_path):
    params, config = saved(tmp_path / "plain")
    assert not (tmp_path / "plain" / CHECKSUMS).exists()
    folder, options = tmp_path / "m", {"checksums": True, "max_shard_bytes": 200_000}
    for _ in range(2):  # a folder with checksums is replaced like others
        save_hf(folder, params, config, ByteTokenizer(), overwrite=True, **options)
    names = sorted(file.name for file in folder.iterdir() if file.name != CHECKSUMS)
    command = ["sha256sum", "--check", "--strict", CHECKSUMS]
    checked = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert sorted(line.removesuffix(": OK") for line in checked.stdout.splitlines()) == names
    assert_same(load(folder)[0], params)
    for name in names:
        file, data = folder / name, (folder / name).read_bytes()
        file.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        with pytest.raises(
            InputError, match=rf"m/{name} is not .* lcjax.check .*m --write"
        ) as error:
            load(folder)
        assert "\n" not in str(error.value)
        file.unlink()
        with pytest.raises(InputError, match=rf"m/{name} is missing; copy the folder again"):
            load(folder)
        file.write_bytes(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("\xff\xfe", "is damaged: "),
        (64 * "0" + "  ../plain/config.json\n", "is damaged: .* no sum of a file below it"),
        (64 * "0" + "  /etc/passwd\n", "is damaged: .* no sum of a file below it"),
        (64 * "0", "is damaged: "),
    ],
)
def test_damaged_checksums_are_refused(tmp_path, text, words):
    saved(tmp_path)
    (tmp_path / CHECKSUMS).write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=f"{CHECKSUMS} {words}.*; copy the folder again"):
        load(tmp_path)


def test_separate_layers_are_written_like_stacked_ones(tmp_path):
    config = tiny_config()
    params = random_params(config)
    save_hf(tmp_path / "m", unstack_layers(params, config), config.replace(scan_layers=False))
    ByteTokenizer().save(tmp_path / "m")
    assert_same(load(tmp_path / "m")[0], params)


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [True, False])
def test_adapters_are_merged_layer_by_layer(tmp_path, stacked):
    config = tiny_config(lora=LoRA(rank=2, alpha=6.0, targets=("query", "out", "down")))
    rng = np.random.default_rng(0)
    params = random_params(config)
    attention, mlp = params["layers"]["attention"], params["layers"]["mlp"]
    for branch, a, b in (
        (attention["query"], (3, 48, 2), (3, 2, 6, 8)),
        (attention["out"], (3, 6, 8, 2), (3, 2, 48)),
        (mlp["down"], (3, 80, 2), (3, 2, 48)),
    ):
        branch |= {
            "lora_a": jnp.asarray(rng.normal(size=a)),
            "lora_b": jnp.asarray(rng.normal(size=b)),
        }
    tree = params if stacked else unstack_layers(params, config)
    save_hf(tmp_path / "m", tree, config, ByteTokenizer())
    loaded = load(tmp_path / "m")[0]
    merged = lcjax.models.lora.merge(params, config.lora)
    assert jax.tree.structure(loaded) == jax.tree.structure(merged)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), loaded, merged
    )


E2 = E2LLM(theta=1e4, original_length=32)


@pytest.mark.parametrize(
    ("rope", "layers", "is_warned"),
    [
        (Default(theta=1e4), (LayerKind(rope=E2),), True),
        (E2, (LayerKind(), LayerKind(rope=NoRotation())), True),
        (E2, (LayerKind(rope=Default(theta=1e4)),), False),
        (E2, (LayerKind(rope=NoRotation()),), False),
    ],
)
def test_a_rope_that_transformers_lacks_is_named_where_a_layer_has_it(
    tmp_path, rope, layers, is_warned
):
    config = tiny_config(rope=rope, layers=layers)
    params = unstack_layers(random_params(config), config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_hf(tmp_path / "m", params, config, ByteTokenizer())
    assert any("rope e2_llm as plain rope" in str(w.message) for w in caught) == is_warned


def test_learned_frequencies_travel_in_float32_under_their_published_names(tmp_path):
    rope = Clex(theta=1e4, original_length=64, max_factor=4, param_factor=2)
    config = tiny_config(rope=rope, param_dtype="bfloat16")
    params = random_params(config.replace(param_dtype="float32"))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params) | {"rope": params["rope"]}
    with pytest.warns(UserWarning, match=r"rope clex as plain rope .* up to 64 tokens"):
        save_hf(tmp_path / "m", params, config, ByteTokenizer())
    source = SafetensorsFolder(tmp_path / "m")
    name = "model.clex_layer.proj_func.ode_up_proj"
    assert source.tensors[name] == TensorInfo((4, 16), "float32")
    loaded, loaded_config, _ = load(tmp_path / "m")
    assert loaded_config == config
    assert_same(loaded, params)


def test_faults_of_all_tensors_are_listed_in_one_error(tmp_path):
    saved(tmp_path)
    edit_json(tmp_path / "config.json", num_hidden_layers=5, intermediate_size=72, vocab_size=300)
    with pytest.raises(InputError) as error:
        load(tmp_path)
    text = str(error.value)
    assert "missing: model.layers.3.input_layernorm.weight" in text
    assert "and 8 more" in text  # 2 layers of 9 tensors are missing
    assert "model.embed_tokens.weight is [264, 48], not [300, 48]" in text
    assert "\n" not in text


def test_unexpected_tensors_are_listed_but_rotary_tables_and_tied_copies_are_not(tmp_path):
    saved(tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True, num_hidden_layers=2)
    with pytest.raises(InputError, match=r"unexpected: model.layers.2.input_lay") as error:
        load(tmp_path)
    assert "lm_head" not in str(error.value)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_with_both_sizes(tmp_path):
    saved(tmp_path)
    edit_json(tmp_path / "config.json", vocab_size=100)
    with pytest.raises(InputError, match="259 ids but the model only 100"):
        load(tmp_path)
    with pytest.raises(InputError, match="259 ids but the model only 100"):
        config = tiny_config(vocab_size=100)
        save_hf(tmp_path / "x", random_params(config), config, ByteTokenizer())


def test_params_of_another_config_are_not_saved_under_it(tmp_path):
    config = tiny_config()
    with pytest.raises(InputError, match=r"params.layers/mlp/gate/kernel is .48, 80., and .* 72"):
        save_hf(tmp_path / "m", random_params(config), config.replace(mlp_width=72))
    with pytest.raises(InputError, match="lack layers/attention/query/bias"):
        save_hf(tmp_path / "m", random_params(config), config.replace(qkv_bias=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_save_leaves_the_old_model_and_no_half_one(tmp_path, monkeypatch, failure):
    params, config = saved(tmp_path / "m")
    write, calls = lcjax.checkpoints.hf_save.write_file, []

    def fail_on_the_second_file(*args):
        calls.append(args)
        if len(calls) == 2:
            raise failure
        write(*args)

    monkeypatch.setattr(lcjax.checkpoints.hf_save, "write_file", fail_on_the_second_file)
    other = random_params(config, seed=1)
    for target in ("m", "new"):
        calls.clear()
        with pytest.raises((InputError, KeyboardInterrupt)):
            save_hf(tmp_path / target, other, config, max_shard_bytes=60_000, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert_same(load(tmp_path / "m")[0], params)


def test_a_disk_without_room_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    usage = lcjax.checkpoints.hf_save.shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(lcjax.checkpoints.hf_save.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=r"the disk has 0.00 GB free"):
        saved(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_only_replaced_when_asked(tmp_path):
    saved(tmp_path / "m")
    with pytest.raises(InputError, match="exists and is not empty"):
        saved(tmp_path / "m")
    config = tiny_config("phi")
    save_hf(tmp_path / "m", random_params(config), config, ByteTokenizer(), overwrite=True)
    assert load_config(tmp_path / "m") == config
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


CONFIG, GENERATION, TOKENIZER = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
)


WRONG_VALUES = {
    CONFIG: dict(
        rms_norm_eps=[np.nan, np.inf, 1e30, "1e-5", True],
        tie_word_embeddings=["yes"],
        attention_bias=[1],
        eos_token_id=["2", [2, "3"]],
        bos_token_id=[1.5],
        dtype=["float7"],
        torch_dtype=[16],
        hidden_size=["48", 2**40],
        num_key_value_heads=["2"],
        head_dim=[[8]],
        vocab_size=[np.nan],
        rope_scaling=["yarn"],
        rope_parameters=[[1]],
        rope_theta=[np.nan],
        partial_rotary_factor=["half"],
        architectures=[5],
        model_type=[["llama"]],
        hidden_act=[{"a": 1}],
    ),
    GENERATION: dict(eos_token_id=["</s>"], pad_token_id=[{"id": 1}]),
    TOKENIZER: dict(
        chat_template=[5, [{"name": "default"}]],
        eos_token=[5],
        bos_token=[{"id": 1}],
        add_bos_token=["true"],
        model_max_length=["long"],
        added_tokens_decoder=[{"a": "b"}],
    ),
    "special_tokens_map.json": dict(eos_token=[["</s>"]]),
}


@pytest.mark.parametrize("file", WRONG_VALUES)
def test_a_value_of_another_type_is_named_with_its_file(tmp_path, file):
    saved(tmp_path)
    path = tmp_path / file
    text = path.read_text() if path.exists() else "{}"
    for key, values in WRONG_VALUES[file].items():
        for value in values:
            path.write_text(text)
            edit_json(path, **{key: value})
            with pytest.raises(InputError, match=rf"{file}: {key}=.* must be ") as error:
                load(tmp_path)
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", [CONFIG, GENERATION, TOKENIZER, "tokenizer.json", INDEX])
def test_a_file_that_is_no_json_object_is_named_in_one_line(tmp_path, file):
    saved(tmp_path)
    if file == INDEX:
        (tmp_path / SINGLE).rename(tmp_path / "model-00001-of-00001.safetensors")
    for text in ("[" * 100_000, '{"a":' * 100_000, "[]", "5", "", "\x00", "{'a"):
        (tmp_path / file).write_text(text)
        with pytest.raises(InputError, match=f"{file}: ") as error:
            load(tmp_path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_a_config_without_a_dtype_leaves_it_to_the_tensors(tmp_path, stored):
    params, config = saved(tmp_path, param_dtype=stored)
    edit_json(tmp_path / "config.json", dtype=None, torch_dtype=None)
    loaded, loaded_config, _ = load(tmp_path)
    assert loaded_config == config
    assert_same(loaded, params)
    assert load(tmp_path, param_dtype="float32")[1].param_dtype == "float32"


def test_tensors_of_several_dtypes_are_read_in_float32_unless_the_config_says_more(tmp_path):
    params, _ = saved(tmp_path, param_dtype="bfloat16")
    write_with_one_wide_matrix(tmp_path)
    assert load(tmp_path)[1].param_dtype == "bfloat16"
    edit_json(tmp_path / "config.json", dtype=None, torch_dtype=None)
    loaded, config, _ = load(tmp_path)
    assert config.param_dtype == "float32"
    assert_same(loaded, jax.tree.map(lambda x: x.astype(jnp.float32), params))


def write_with_one_wide_matrix(folder):
    source = SafetensorsFolder(folder)
    arrays = {n: source.rows(n, 0, info.shape[0]) for n, info in source.tensors.items()}
    arrays["lm_head.weight"] = arrays["lm_head.weight"].astype(np.float32)
    infos = {n: TensorInfo(a.shape, a.dtype.name) for n, a in arrays.items()}
    write_file(folder / SINGLE, infos, arrays.items())


def test_tied_embeddings_that_are_saved_twice_are_read_once(tmp_path):
    params, _ = saved(tmp_path, "tied")
    source = SafetensorsFolder(tmp_path)
    arrays = {n: source.rows(n, 0, info.shape[0]) for n, info in source.tensors.items()}
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    infos = {n: TensorInfo(a.shape, a.dtype.name) for n, a in arrays.items()}
    write_file(tmp_path / SINGLE, infos, arrays.items())
    assert_same(load(tmp_path)[0], params)


def saved_encoder(folder):
    """CEPE's encoder, whose class holds one bias as `lm_head.bias` and `lm_bias`."""
    return saved(folder, "tied", pattern=Bidirectional(), mlm_head=True)[0]


def write_biases(folder, layout, **biases):
    """Writes the weights of `folder` again in `layout`, with these as the only biases of the head.

    `__` in a name stands for its dot.
    """
    source = SafetensorsFolder(folder)
    arrays = {n: source.rows(n, 0, info.shape[0]) for n, info in source.tensors.items()}
    rest = {n: a for n, a in arrays.items() if n not in ("lm_head.bias", "lm_bias")}
    biases = {name.replace("__", "."): array for name, array in biases.items()}
    (folder / SINGLE).unlink()
    if layout == "torch":
        torch = pytest.importorskip("torch")
        state = {n: torch.tensor(a) for n, a in (rest | biases).items()}
        torch.save(state, folder / "pytorch_model.bin")
        return
    files = {SINGLE: rest | biases}
    if layout == "sharded":  # each bias in a file of its own
        parts = [rest, *({name: array} for name, array in biases.items())]
        files = {f"model-{i + 1:05}-of-{len(parts):05}.safetensors": p for i, p in enumerate(parts)}
        weight_map = {name: file for file, part in files.items() for name in part}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for file, part in files.items():
        infos = {n: TensorInfo(a.shape, a.dtype.name) for n, a in part.items()}
        write_file(folder / file, infos, part.items())


BOTH = ("lm_bias", "lm_head__bias")


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("single", BOTH[1:]),
        ("single", BOTH[:1]),
        *((x, BOTH) for x in ("single", "sharded", "torch")),
    ],
)
def test_a_tensor_of_two_names_is_read_under_either_and_under_both(tmp_path, layout, names):
    params = saved_encoder(tmp_path)
    bias = np.asarray(params["mlm"]["bias"])
    write_biases(tmp_path, layout, **dict.fromkeys(names, bias))
    assert_same(load(tmp_path, allow_pickle=True)[0], params)
    on_mesh = load(tmp_path, allow_pickle=True, mesh=make_mesh(Mesh(1, 8, 1)))[0]
    assert_same(jax.device_get(on_mesh), jax.device_get(params))


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        *(
            (layout, lambda x: np.concatenate([x[:-1], np.nextafter(x[-1:], np.float32(9))]))
            for layout in ("single", "sharded", "torch")
        ),
        ("single", lambda bias: bias.astype(np.float16)),
        ("single", lambda bias: bias[:-1]),
    ],
)
def test_two_names_with_different_values_are_refused(tmp_path, layout, change):
    bias = np.asarray(saved_encoder(tmp_path)["mlm"]["bias"])
    write_biases(tmp_path, layout, lm_head__bias=bias, lm_bias=change(bias))
    with pytest.raises(InputError, match=r"lm_head\.bias and lm_bias are two names") as error:
        load(tmp_path, allow_pickle=True)
    assert "remove the wrong one" in str(error.value) and "\n" not in str(error.value)


def test_a_tensor_without_any_of_its_names_is_missing_under_the_first(tmp_path):
    saved_encoder(tmp_path)
    write_biases(tmp_path, "single")
    with pytest.raises(InputError, match=r"missing: lm_head\.bias;"):
        load(tmp_path)


def test_a_name_of_another_model_is_unexpected(tmp_path):
    saved(tmp_path, "phi")
    write_biases(tmp_path, "single", lm_bias=np.zeros(264, np.float32))
    with pytest.raises(InputError, match=r"missing: lm_head\.bias; unexpected: lm_bias;"):
        load(tmp_path)


def test_a_run_folder_is_a_checkpoint_whose_config_and_tokenizer_are_cheap(tmp_path, monkeypatch):
    config = tiny_config(lora=LoRA(rank=2))
    lcjax.config.dump(config, tmp_path / "model.yaml")
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    ByteTokenizer().save(tmp_path / "tokenizer")
    assert load_config(tmp_path) == config.replace(lora=None)
    assert load_tokenizer(tmp_path).fingerprint == ByteTokenizer().fingerprint

    def load_run(folder, step, *, mesh, param_dtype):
        return folder, step, mesh, param_dtype

    monkeypatch.setattr("lcjax.checkpoints.run_folder.load_run", load_run)
    mesh = make_mesh(Mesh(fsdp=8))
    assert load(tmp_path, mesh=mesh, param_dtype="bfloat16") == (
        tmp_path,
        None,
        mesh,
        "bfloat16",
    )


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "a\ud800"])
def test_a_path_that_cannot_be_is_refused_on_the_way_in_and_out(tmp_path, name):
    params, config = saved(tmp_path / "model")
    for call in (
        lambda: load(name),
        lambda: load_config(name),
        lambda: load_tokenizer(name),
        lambda: save_hf(tmp_path / name, params, config),
    ):
        with pytest.raises(InputError, match="must be a path") as error:
            call()
        assert "\n" not in str(error.value)


def test_a_folder_of_an_installed_package_is_a_checkpoint(tmp_path, monkeypatch):
    folder = tmp_path / "somemodel" / "model"
    folder.mkdir(parents=True)
    (tmp_path / "somemodel" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    name = "package:somemodel/model"
    assert hub.find_checkpoint(name) == hub.find_encoder(name) == folder


def test_names_that_are_nowhere_get_an_answer_that_says_what_would_work(tmp_path):
    with pytest.raises(InputError, match=r"no such file or folder; give .*smollm2-135m-instruct"):
        load(tmp_path / "absent")
    with pytest.raises(InputError, match="package:nowhere/model: no package 'nowhere' is install"):
        load("package:nowhere/model")
    with pytest.raises(InputError, match="package:json/model: no such file or folder"):
        load("package:json/model")
    with pytest.raises(InputError, match="no such local path, and the hub did not give it"):
        load("nobody/never-downloaded-this")  # tests run with HF_HUB_OFFLINE=1
    with pytest.raises(InputError, match=r"config\.json: no such file; is this a Hugging Face"):
        load(tmp_path)
    with pytest.raises(InputError, match=r"methods\.1\.path=null: .* methods\.1\.preset for"):
        check_source(ModelSection(), "methods.1")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("small-q8_0.gguf", r"give the file itself, small-q8_0\.gguf"),
        ("consolidated.00.pth", "format of the model's authors"),
    ],
)
def test_folders_of_other_kinds_get_an_answer_that_fits(tmp_path, name, words):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=rf"config\.json: no such file; .*{words}"):
        load(tmp_path)


def test_a_tilde_is_the_home_folder_for_writing_as_for_reading(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    params, _ = saved("~/models/tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    for name in ("~/models/tiny", "file://~/models/tiny", tmp_path / "home/models/tiny"):
        assert_same(load(name)[0], params)
    assert to_path("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")
