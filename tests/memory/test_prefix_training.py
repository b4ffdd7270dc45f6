"""Memories that stand before the text: what is trained, saved and read back, and what they cost."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from memory_support import assert_trained_alike_on, batch, gradients, tiny_model
from safetensors.numpy import save_file
from tiny_lm import text

from lcjax import checkpoints, cost
from lcjax.checkpoints.safetensors_io import SafetensorsFolder
from lcjax.checkpoints.weights import read_params
from lcjax.errors import InputError
from lcjax.memory import AutoCompressorSection, BeaconSection, MemorySection
from lcjax.models import Decoder, preset
from lcjax.models.lora import LoRA
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.rope.positions import E2Positions, PlainPositions
from lcjax.training.objective import language_model
from lcjax.training.state import new_adapters
from lcjax.training.step import accumulate
from lcjax.tree import flatten, union

BEACON = BeaconSection(chunk=16, ratio=8, ratios=(4, 8))
SUMMARY = AutoCompressorSection(chunk=16, summary=3)
BOTH = pytest.mark.parametrize("section", [BEACON, SUMMARY], ids=["beacon", "auto_compressor"])


@pytest.mark.slow
def test_beacons_alone_are_trained_and_ratios_are_drawn_anew_for_each_step():
    model, params = tiny_model(BEACON)
    loss, grads = gradients(model.config, params, ("memory",), batch(2))
    flat = flatten(grads)
    assert {path for path in flat if "attention/memory/" not in path} == {"encoder/embedding"}
    assert len(flat) == 5 and all(np.abs(leaf).max() > 0 for leaf in flat.values())
    again, other = (
        gradients(model.config, params, ("memory",), batch(2), seed=s)[0] for s in (0, 1)
    )
    assert again == loss != other


@pytest.mark.slow
def test_learned_windows_are_learned_as_one_text_where_nothing_is_condensed():
    model, params = tiny_model(dataclasses.replace(BEACON, ratio=0, ratios=()))
    own, rows = batch(2), np.ones((2, 48), np.int32)
    rows[0, :5] = 0
    whole = np.concatenate([own["chunks"].reshape(2, 32), own["tokens"]], 1)
    targets, weights = text(7, 2, 48), np.float32(rows)
    weights[1, 20:40] = 0  # what is learned is said token by token
    place = np.maximum(np.cumsum(rows, 1, dtype=np.int32) - 1, 0)
    names = {"tokens": whole, "targets": targets, "weights": weights}
    plain = names | {"segments": rows, "positions": place}
    own |= {"targets": targets[:, 32:], "weights": weights[:, 32:]}
    own |= {f"chunk_{n}": names[n][:, :32].reshape(2, 2, 16) for n in ("targets", "weights")}

    def mean(config, params, batch):
        objective = language_model(config, PlainPositions())
        loss, count, *_ = jax.jit(
            lambda p: accumulate(objective, p, {}, batch, jax.random.key(0), 1)
        )(params)
        return float(loss), float(count)

    bare = dict(params, layers=dict(params["layers"]))
    bare["layers"]["attention"] = dict(params["layers"]["attention"])
    del bare["encoder"], bare["layers"]["attention"]["memory"]
    found = mean(model.config, params, own)
    assert found == pytest.approx(mean(model.config.replace(memory=None), bare, plain), abs=2e-5)
    assert found[1] == weights.sum()


@pytest.mark.slow
def test_summaries_and_adapters_are_trained_together():
    model, params = tiny_model(SUMMARY)
    config = model.config.replace(lora=LoRA(2, targets=("query", "value")))
    mesh = make_mesh(Mesh(fsdp=1), jax.devices()[:1])
    params = union(params, new_adapters(Decoder(config).init, mesh, seed=0))
    _, grads = gradients(config, params, ("memory", "lora"), batch(2))
    flat = flatten(grads)
    assert flat.pop("encoder/embedding").any() and len(flat) == 4
    assert all(leaf.any() for path, leaf in flat.items() if path.endswith("lora_b"))


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("sizes", [(8, 1, 1, 1), (2, 2, 2, 1)], ids=lambda s: "x".join(map(str, s)))
def test_loss_and_gradients_are_the_same_on_any_mesh(section, sizes):
    assert_trained_alike_on(sizes, section, ("memory",), batch(8))


def test_texts_that_are_cut_over_devices_raise_input_error():
    model, params = tiny_model(SUMMARY)
    with pytest.raises(InputError, match="mesh.context=4: .*windows .* set mesh.context=1"):
        gradients(model.config, params, ("memory",), batch(2), make_mesh(Mesh(2, 1, 1, 4)))


def test_tokens_that_are_moved_in_training_raise_input_error():
    with pytest.raises(InputError, match="train.positions.type=e2_llm changes the positions"):
        language_model(tiny_model(SUMMARY)[0].config, E2Positions())


@pytest.mark.parametrize("section", [BEACON, SUMMARY], ids=["beacon", "auto_compressor"])
def test_a_saved_folder_is_read_back_bit_for_bit(section, tmp_path):
    model, params = tiny_model(section)
    checkpoints.save_hf(tmp_path / "model", params, model.config)
    config = checkpoints.load_config(tmp_path / "model")
    assert config.memory == model.config.memory
    source = SafetensorsFolder(tmp_path / "model")
    found = read_params(source, config)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, found, params)
    names = {"model.beacon_embed_tokens.weight", "model.layers.1.self_attn.beacon_o_proj.weight"}
    names = names if section is BEACON else {"embed_summary.weight"}
    assert names < set(source.tensors)


def test_a_note_that_was_not_written_here_raises_input_error():
    hf = checkpoints.config_to_hf(tiny_model(SUMMARY)[0].config)
    for wrong in ({"type": "lstm"}, {"type": "beacon", "window": 3}, "beacon", ["beacon"], 3):
        with pytest.raises(InputError, match="config.json: lcjax_memory=.*auto_compressor, beacon"):
            checkpoints.config_from_hf(hf | {"lcjax_memory": wrong})
    for ratios in (2, "2"):
        with pytest.raises(InputError, match="ratios=.?2.? must be a list of whole numbers"):
            note = {"type": "beacon", "chunk": 8, "ratio": 4, "ratios": ratios}
            checkpoints.config_from_hf(hf | {"lcjax_memory": note})


# Fields that the released code adds to a Llama's config.json: LlamaConfig of FlagEmbedding at
# 0ad0dee after the command of docs/training.md, and train.py of AutoCompressors at 80352a4.
RELEASED = {
    "beacon": {
        "beacon_window": 16, "beacon_stride": [16], "beacon_stride_mix": "step-random",
        "beacon_attn": "step-expansion", "beacon_attend_previous": True, "beacon_ratio": [4, 8],
        "beacon_ratio_mix": "step-random", "beacon_param": ["q", "k", "v", "o"],
        "retrieval_method": None, "retrieval_topk": None,
    },
    "auto_compressor": {
        "summary_length": 3, "accumulate_summary": True, "segment_gradient_checkpointing": False,
    },
}  # fmt: skip
# Their modules by the paths of our parameters.
MODULES = {
    "attention/query": "self_attn.q_proj", "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj", "attention/out": "self_attn.o_proj",
    "mlp/gate": "mlp.gate_proj", "mlp/up": "mlp.up_proj", "mlp/down": "mlp.down_proj",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attention/memory/query": "self_attn.beacon_q_proj",
    "attention/memory/key": "self_attn.beacon_k_proj",
    "attention/memory/value": "self_attn.beacon_v_proj",
    "attention/memory/out": "self_attn.beacon_o_proj",
}  # fmt: skip


def save_released(folder, kind, params, config) -> None:
    """Writes a folder as the released code saves it: its names, matrices as [out, in]."""
    token = {"beacon": "model.beacon_embed_tokens", "auto_compressor": "embed_summary"}[kind]
    tensors = {
        "model.embed_tokens.weight": params["embed"]["embedding"],
        "model.norm.weight": params["final_norm"]["scale"],
        f"{token}.weight": params["encoder"]["embedding"],
    }
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = params["head"]["kernel"].T
    for path, leaf in flatten(params["layers"]).items():
        module, _, leaf_name = path.rpartition("/")
        inputs = 2 if module.endswith("/out") else 1  # axes of the input
        for layer, x in enumerate(np.asarray(leaf)):
            x = x if leaf_name == "scale" else x.reshape(np.prod(x.shape[:inputs]), -1).T
            tensors[f"model.layers.{layer}.{MODULES[module]}.weight"] = x
    folder.mkdir()
    save_file(
        {key: np.ascontiguousarray(x) for key, x in tensors.items()}, folder / "model.safetensors"
    )
    hf = checkpoints.config_to_hf(config.replace(memory=None)) | RELEASED[kind]
    (folder / "config.json").write_text(json.dumps(hf))


@pytest.mark.filterwarnings("ignore:.*beacon_ratio=")
@BOTH
def test_a_folder_of_the_released_code_is_read_as_the_same_model(section, tmp_path):
    model, params = tiny_model(section)
    kind, memory = section.get_choice_name(type(section)), model.config.memory
    save_released(tmp_path / "model", kind, params, model.config)
    config = checkpoints.load_config(tmp_path / "model")
    # Half of the trained length, as no field has the tokens of a segment.
    chunk = memory.chunk if section is BEACON else 64
    assert config.memory == dataclasses.replace(memory, chunk=chunk)
    restored = read_params(SafetensorsFolder(tmp_path / "model"), config)
    assert jax.tree.structure(restored) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, restored, params)


def released(name, **changes):
    hf = checkpoints.config_to_hf(tiny_model(SUMMARY)[0].config)
    hf.pop("lcjax_memory")
    return checkpoints.config_from_hf(hf | RELEASED[name] | changes).memory


def test_one_of_several_released_ratios_is_chosen_with_a_warning():
    with pytest.warns(
        UserWarning, match=r"beacon_ratio=\[2, 32, 64\] with .*='adapt-1024'.* by 32,"
    ):
        memory = released(
            "beacon", beacon_window=64, beacon_stride=[64], beacon_ratio=[2, 32, 64],
            beacon_ratio_mix="adapt-1024",
        )  # fmt: skip
    assert (memory.chunk, memory.ratio, memory.ratios) == (64, 32, (2, 32, 64))
    assert released("beacon", beacon_ratio=[4]).ratio == 4
    assert released("beacon", beacon_ratio=[4], beacon_window=0) is None
    assert released("auto_compressor", summary_length=0) is None


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("beacon", {"beacon_pos": "interleave"}, "beacon_pos='interleave' is a field of the newer"),
        ("beacon", {"beacon_attn": "segmentation"}, "beacon_attn='segmentation' .*step-expansion"),
        ("beacon", {"beacon_stride": [8]}, r"beacon_stride=\[8\] is not supported, only \[16\]"),
        ("beacon", {"beacon_param": ["q"]}, r"beacon_param=\['q'\] is not supported"),
        ("beacon", {"beacon_attend_previous": False}, "beacon_attend_previous=False"),
        ("beacon", {"retrieval_method": "bm25"}, "retrieval_method='bm25'.*type=beacon"),
        ("beacon", {"beacon_ratio": 8}, "beacon_ratio=8 must be a list"),
        ("beacon", {"beacon_ratio": [8, -1]}, "beacon_ratio=-1 must be a whole number"),
        ("auto_compressor", {"accumulate_summary": False}, "accumulate_summary=False.*type=auto_"),
        ("auto_compressor", {"summary_length": 2.5}, "summary_length=2.5 must be a whole number"),
    ],
)
def test_what_the_released_code_computes_otherwise_raises_input_error(name, changes, words):
    with pytest.raises(InputError, match=f"config.json: {words}"):
        released(name, **changes)


@BOTH
def test_a_note_of_a_section_is_read_back(section):
    assert MemorySection.from_dict(section.to_dict()) == section


def test_what_a_context_costs():
    def costs(section):
        config = tiny_model(section)[0].config
        found, alone = (cost.estimate(config, 16, context=c) for c in ((2, 16), None))
        return (
            found.matmul_flops - alone.matmul_flops,
            found.attention_flops - alone.attention_flops,
        )

    attention, mlp = 2 * 64 * 16 * (4 + 2 + 2 + 4), 2 * 3 * 64 * 160  # of a token in a layer
    # Two windows, of which 4 beacons each are computed, and 2 are read.
    matmul, pairs = costs(BEACON)
    assert matmul == 2 * (2 * 20 / 16) * (attention + mlp)
    layers = 2 * 4 * 4 * 16
    assert pairs == pytest.approx(layers * (2 * 20 * (8.5 + 0.5 * 2) / 16 + 2 * 2))
    matmul, pairs = costs(SUMMARY)
    assert matmul == 2 * (2 * 22 / 16) * (attention + mlp)
    assert pairs == pytest.approx(layers * (2 * 22 * (8.5 + 0.5 * 3) / 16 + 2 * 3))


@pytest.mark.slow
@BOTH
def test_memory_of_training_and_of_reading_is_estimated(section):
    config = tiny_model(section)[0].config

    def activations(chunks):
        trained = functools.partial(cost.training_memory, config, 16, 1, Mesh(fsdp=1))
        return trained(context=(chunks, 16)).activations

    assert activations(2) < activations(4)
    inference = config.for_inference()
    found = cost.generation_memory(inference, 64, 2, Mesh(fsdp=1), context=(5, 16)).context
    num_bytes = inference.memory.num_slots(16) * (2 * 2 * 2 * 16 * 4 + 1)
    assert found == 2 * 5 * num_bytes


def test_defaults_fit_the_papers_models():
    for section in (BeaconSection(), AutoCompressorSection()):
        memory = section.memory(preset("llama2-7b"))
        preset("llama2-7b").replace(memory=memory)
        assert dataclasses.is_dataclass(memory) and memory.max_chunk_size == section.chunk
