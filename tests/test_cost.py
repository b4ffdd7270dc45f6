"""Costs against counts made by hand, and against the model itself."""

import jax
import jax.numpy as jnp
import pytest

from lcjax import cost
from lcjax.attention import Sliding
from lcjax.lora import LoRA
from lcjax.models import Decoder, ModelConfig, preset
from lcjax.training.partition import NAMED_RULES, matcher


def test_llama2_7b_has_its_published_size_and_cache():
    found = cost.estimate(preset("llama2-7b"), 4096)
    assert found.parameters == 6_738_415_616
    assert found.kv_cache_bytes == 2 * 32 * 4096 * 4096 * 4  # keys and values, layers, T, width


def test_parameters_equal_those_of_an_initialised_model():
    config = preset("tiny")
    params = Decoder(config).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    found = cost.estimate(config, 64)
    assert found.parameters == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert found.parameter_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_forward_flops_are_two_per_weight_and_four_per_visible_pair():
    config = ModelConfig(100, 16, 32, 3, 4, 2, 8, 64)
    found = cost.estimate(config, 64)
    layer = 16 * 4 * 8 + 2 * 16 * 2 * 8 + 4 * 8 * 16 + 3 * 16 * 32
    assert found.matmul_flops == 2 * (3 * layer + 16 * 100)
    assert found.attention_flops == pytest.approx(3 * 4 * 4 * 8 * (64 + 1) / 2)


def test_training_every_weight_costs_three_times_forward():
    found = cost.estimate(preset("tiny"), 128)
    assert found.training_flops == pytest.approx(3 * found.forward_flops)


def test_training_adapters_costs_about_two_thirds_of_training_everything():
    config = preset("llama2-7b").replace(lora=LoRA())
    adapters = cost.estimate(config, 16, trained=matcher(("lora",), ""))
    everything = cost.estimate(config, 16)
    assert 0.66 < adapters.training_flops / everything.training_flops < 0.68
    assert adapters.trained_parameters == 32 * 4 * 2 * 8 * 4096
    assert "lora" in NAMED_RULES


@pytest.mark.parametrize("length", [7, 256, 1000])
def test_causal_queries_see_half_of_the_keys(length):
    seen = cost.visible_keys(preset("tiny"), length)
    assert seen == pytest.approx((length + 1) / 2, rel=2e-3)


def test_a_window_bounds_what_is_seen():
    config = preset("tiny").replace(pattern=Sliding(window=10))
    exact = (sum(range(1, 10)) + 10 * 191) / 200
    assert cost.visible_keys(config, 200) == exact


def test_tied_embeddings_are_counted_once_and_used_twice():
    config = ModelConfig(100, 16, 32, 1, 2, 2, 8, 64)
    tied = cost.estimate(config.replace(tie_embeddings=True), 8)
    free = cost.estimate(config, 8)
    assert free.parameters - tied.parameters == 1600
    assert free.forward_flops == tied.forward_flops


class Device:
    def __init__(self, kind):
        self.device_kind = kind


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GB200", 2500),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("cpu", None),
    ],
)
def test_peaks_are_found_by_device_kind(kind, tera):
    assert cost.peak_flops(Device(kind)) == (tera and tera * 1e12)


def test_a_cpu_is_measured_as_one_machine():
    peak, source = cost.machine_peak("float32")
    assert 1e8 < peak < 1e14 and "measured float32" in source
