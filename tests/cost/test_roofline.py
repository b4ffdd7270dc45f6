"""The least work of a program, counted by hand, and the bound that follows from it."""

import pytest

from lcjax.attention import Random, Sliding
from lcjax.cost import resources
from lcjax.cost.chips import CHIPS
from lcjax.cost.resources import MemoryEstimate
from lcjax.cost.roofline import Work, cut_work, inference_work, training_work
from lcjax.models import LayerKind, preset
from lcjax.models.mixer import GatedDeltaNet
from lcjax.parallel.sharding import Mesh

LLAMA = preset("llama2-7b").replace(dtype="bfloat16", param_dtype="bfloat16")
LAYERS = 32 * (4 * 4_096**2 + 3 * 4_096 * 11_008)  # weights of all matrices
HEAD = 4_096 * 32_000
NORMS = (2 * 32 + 1) * 4_096


def test_a_decoding_step_reads_the_weights_and_the_cache_once():
    work = inference_work(LLAMA, 8, 4_096, 1, Mesh(fsdp=1))
    attention = 32 * 4 * 4_096 * 4_096
    assert work.flops == 8 * (2 * (LAYERS + HEAD) + attention)
    cache = 32 * 2 * 4_096 * 4_096 * 2
    assert work.bytes == 2 * (LAYERS + HEAD + NORMS) + 8 * (cache + 4 * 32_000)
    seconds, binds = work.bound(CHIPS["v5e"])
    assert binds == "bytes" and seconds == work.bytes / CHIPS["v5e"].bandwidth


def test_a_prompt_has_logits_of_its_last_token_only():
    work = inference_work(LLAMA, 1, 4_096, 4_096, Mesh(fsdp=1))
    attention = 32 * 4 * 4_096 * (4_096 + 1) / 2
    assert work.flops == pytest.approx(4_096 * (2 * LAYERS + attention) + 2 * HEAD, rel=1e-4)
    assert work.bound(CHIPS["v5e"])[1] == "FLOPs"


def test_tensor_splits_weights_and_cache_and_fsdp_splits_rows():
    whole = inference_work(LLAMA, 8, 4_096, 1, Mesh(fsdp=1))
    norms = 2 * NORMS  # which every device has
    split = inference_work(LLAMA, 8, 4_096, 1, Mesh(fsdp=1, tensor=4))
    assert split.flops == whole.flops / 4
    assert split.bytes == (whole.bytes - norms) / 4 + norms
    rows = inference_work(LLAMA, 8, 4_096, 1, Mesh(fsdp=4))
    weights = 2 * (LAYERS + HEAD) + norms  # gathered: each device multiplies all of them
    assert rows.bytes == weights + (whole.bytes - weights) / 4


def test_a_window_bounds_the_keys_that_are_read():
    model = preset("tiny").replace(pattern=Sliding(window=32))
    assert resources.visible_keys(model, 512, last=1) == 32
    short, long = (inference_work(model, 1, length, 1, Mesh(fsdp=1)) for length in (64, 512))
    assert short == long
    prompt = resources.read_cache_bytes(model, 512, tokens=16)
    assert prompt == resources.read_cache_bytes(model, 512) * (32 + 15) / 32


def test_states_are_read_and_written_by_a_step_and_left_alone_by_a_cut():
    kinds = LayerKind(mixer=GatedDeltaNet(2, 6, 16, 8)), LayerKind()
    model = preset("tiny").replace(num_layers=4, layers=kinds)
    plain = model.replace(layers=(), num_layers=2)  # its layers with attention
    state = 4 * (6 * 16 * 8 + 3 * (2 * 2 * 16 + 6 * 8))  # float32: the state, inputs of 4 taps

    def cached(config, **axes):  # bytes, without those of weights and logits
        mesh = Mesh(fsdp=1, **axes)
        weights = resources.per_device(config, mesh.shape)
        read = sum(size for path, (_, size) in weights.items() if path != "embed/embedding")
        logits = 4 * config.vocab_size // mesh.tensor
        return inference_work(config, 1, 512, 1, mesh).bytes - read - logits

    assert cached(model) == cached(plain) + 2 * 2 * state
    assert cached(model, tensor=2) == cached(plain, tensor=2) + 2 * state
    cut = cut_work(model.replace(cache=Random(tokens=64)), 3, 512, Mesh(fsdp=1))
    assert cut == cut_work(plain.replace(cache=Random(tokens=64)), 3, 512, Mesh(fsdp=1))


def test_an_update_reads_weights_for_each_microbatch():
    model = preset("tiny").replace(dtype="bfloat16")
    memory = MemoryEstimate(weights=400, gradients=400, optimizer=800, activations=1_000)
    one, two = (
        training_work(model, 1e6, memory, Mesh(fsdp=2), accumulation=count) for count in (1, 2)
    )
    assert one.flops == two.flops == 5e5
    weights = sum(leaf.size for leaf in resources.parameter_shapes(model).values())
    table = model.vocab_size * model.width  # not multiplied: the head has its own weights
    read = 2 * 2 * (weights - table)
    assert one.bytes == read + 2 * 1_000 + 4 * 400 + 2 * 800
    assert two.bytes - one.bytes == read + 2 * 1_000 + 2 * 400


def test_the_larger_time_is_the_bound():
    chip = CHIPS["v5e"]
    assert Work(chip.peak, chip.bandwidth / 2).bound(chip) == (1.0, "FLOPs")
    assert Work(chip.peak / 2, 2 * chip.bandwidth).bound(chip) == (2.0, "bytes")
    assert Work(chip.peak, 0, 2 * chip.network).bound(chip) == (2.0, "network")
    assert Work(chip.peak, 0, 2e9).bound(CHIPS["t4"])[1] == "FLOPs"  # its network is unknown
