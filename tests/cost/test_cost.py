"""Costs against counts made by hand, and against the model itself."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from lcjax import cost
from lcjax.attention import DSA, AdaptiveHeads, Bidirectional, Causal, Quest, Random, Sliding
from lcjax.errors import InputError
from lcjax.generation import session
from lcjax.memory.cepe import Cepe
from lcjax.models import Decoder, LayerKind, ModelConfig, preset
from lcjax.models import cache as cache_lib
from lcjax.models.decoder import random_params
from lcjax.models.experts import Experts
from lcjax.models.layers import is_of_pattern
from lcjax.models.lora import LoRA
from lcjax.models.mixer import GatedDeltaNet
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.training.train_config import NAMED_RULES, matcher


def test_llama2_7b_has_its_published_size_and_cache():
    found = cost.estimate(preset("llama2-7b"), 4096)
    assert found.parameters == 6_738_415_616
    assert found.kv_cache_bytes == 2 * 32 * 4096 * 4096 * 4  # keys and values, layers, T, width


def test_parameters_equal_those_of_an_initialised_model():
    config = preset("tiny")
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    init = jax.jit(Decoder(config).init, compiler_options=quick)
    params = init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    found = cost.estimate(config, 64)
    assert found.parameters == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert found.parameter_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_forward_flops_are_two_per_weight_and_four_per_visible_pair():
    config = ModelConfig(100, 16, 32, 3, 4, 2, 8, 64)
    found = cost.estimate(config, 64)
    layer = 16 * 4 * 8 + 2 * 16 * 2 * 8 + 4 * 8 * 16 + 3 * 16 * 32
    assert found.matmul_flops == 2 * (3 * layer + 16 * 100)
    assert found.attention_flops == pytest.approx(3 * 4 * 4 * 8 * (64 + 1) / 2)


def test_a_mixture_costs_what_the_experts_of_a_token_cost():
    experts = Experts(count=6, top_k=2, width=20)
    config = ModelConfig(100, 16, 32, 3, 4, 2, 8, 64, experts=experts)
    found = cost.estimate(config, 64)
    attention, expert, router = 16 * 4 * 8 + 2 * 16 * 2 * 8 + 4 * 8 * 16, 3 * 16 * 20, 16 * 6
    norms, tables = 16 * 7, 2 * 16 * 100
    assert found.parameters == 3 * (attention + router + 6 * expert) + norms + tables
    assert found.active_parameters == 3 * (attention + router + 2 * expert) + norms + tables
    assert found.matmul_flops == 2 * (3 * (attention + router + 2 * expert) + 16 * 100)
    assert found.training_flops == pytest.approx(3 * found.forward_flops)
    dense = cost.estimate(config.replace(experts=None), 64)
    assert dense.active_parameters == dense.parameters
    alone, spread = (
        cost.generation_memory(config, 64, 16, Mesh(1, 1, 2, 1, expert)) for expert in (1, 2)
    )
    assert spread.weights < 0.6 * alone.weights  # norms and routers are on all devices
    shared = dataclasses.replace(experts, shared_width=28, shared_gate=True)
    both = cost.estimate(config.replace(experts=shared), 64)
    added = 3 * (3 * 16 * 28 + 16)  # of all tokens
    assert both.parameters == found.parameters + added
    assert both.active_parameters == found.active_parameters + added
    assert both.matmul_flops == found.matmul_flops + 2 * added


@pytest.mark.slow
def test_rows_that_devices_of_the_expert_axis_exchange_are_in_the_memory_of_training():
    config = ModelConfig(100, 16, 32, 3, 4, 2, 8, 64, experts=Experts(6, 2, 20))
    two, four = (cost.training_memory(config, 64, rows, Mesh(1, 1, 1, 1, 2)) for rows in (8, 16))
    alone = cost.training_memory(config, 64, 4, Mesh(1, 1, 1, 1, 1))
    assert alone.activations < two.activations < four.activations


def test_published_mixtures_have_their_sizes():
    mixtral = ModelConfig(32_000, 4_096, 14_336, 32, 32, 8, 128, 32_768, experts=Experts(8))
    found = cost.estimate(mixtral, 16)
    assert (found.parameters, found.active_parameters) == (46_702_792_704, 12_879_925_248)
    experts = Experts(128, 8, width=768)
    qwen3 = ModelConfig(
        151_936, 2_048, 6_144, 48, 32, 4, 128, 40_960, qk_norm="head", experts=experts
    )
    found = cost.estimate(qwen3, 16)
    assert (found.parameters, found.active_parameters) == (30_532_122_624, 3_353_032_704)
    experts = Experts(60, 4, width=1_408, shared_width=5_632, shared_gate=True)
    sizes = 151_936, 2_048, 5_632, 24, 16, 16, 128, 8_192
    found = cost.estimate(ModelConfig(*sizes, qkv_bias=True, experts=experts), 16)
    assert (found.parameters, found.active_parameters) == (14_315_784_192, 2_689_173_504)
    # Llama 4 Maverick: 17B active and 400B total parameters; every second layer is dense.
    experts, kinds = (
        Experts(128, 1, 8_192, shared_width=8_192),
        (LayerKind(dense=True), LayerKind()),
    )
    sizes = 202_048, 5_120, 16_384, 48, 40, 8, 128, 1_048_576
    found = cost.estimate(ModelConfig(*sizes, experts=experts, layers=kinds), 16)
    assert (found.parameters, found.active_parameters) == (400_711_848_960, 17_184_691_200)


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


def test_an_indexer_that_is_trained_alone_needs_no_logits_and_one_teacher():
    config, length = preset("tiny"), 96
    layers, width = config.num_layers, config.width
    heads, size, index = config.num_heads, config.head_dim, 2 * 16
    dense = config.replace(pattern=DSA(heads=2, head_dim=16, top_k=8, dense=True))
    alone = cost.estimate(dense, length, trained=is_of_pattern)
    plain, keys = cost.estimate(config, length), (length + 1) / 2
    logits = 2 * width * config.vocab_size
    projections = layers * 2 * width * (index + 16 + 2)
    choice, teacher = layers * 2 * index * keys, layers * 2 * heads * size * keys
    assert alone.forward_flops == plain.forward_flops - logits + projections + choice
    backward = 2 * choice + projections
    assert alone.training_flops == pytest.approx(alone.forward_flops + teacher + backward)
    both = cost.estimate(dense, length)
    assert both.forward_flops == plain.forward_flops + projections + choice
    assert both.training_flops == pytest.approx(3 * both.forward_flops + teacher)


@pytest.mark.parametrize("length", [7, 256, 1000])
def test_causal_queries_see_half_of_the_keys(length):
    seen = cost.visible_keys(preset("tiny"), length)
    assert seen == pytest.approx((length + 1) / 2, rel=2e-3)


def test_a_window_bounds_the_visible_keys():
    config = preset("tiny").replace(pattern=Sliding(window=10))
    exact = (sum(range(1, 10)) + 10 * 191) / 200
    assert cost.visible_keys(config, 200) == exact


def test_tied_embeddings_are_counted_once_and_used_twice():
    config = ModelConfig(100, 16, 32, 1, 2, 2, 8, 64)
    tied = cost.estimate(config.replace(tie_embeddings=True), 8)
    free = cost.estimate(config, 8)
    assert free.parameters - tied.parameters == 1600
    assert free.forward_flops == tied.forward_flops


ENCODER = ModelConfig(100, 8, 24, 2, 2, 2, 4, 64, pattern=Bidirectional())
READER = ModelConfig(100, 16, 32, 3, 4, 2, 8, 64, memory=Cepe(ENCODER, 3))
CONTEXT = 4, 8  # for 16 tokens of text: two of context for each


def test_a_context_costs_its_encoder_its_projections_and_attention_to_all_of_it():
    alone, plain = cost.estimate(READER, 16), cost.estimate(READER.replace(memory=None), 16)
    assert alone.forward_flops == plain.forward_flops
    found = cost.estimate(READER, 16, context=CONTEXT)
    encoder = 2 * (4 * 8 * 2 * 4 + 3 * 8 * 24)
    keys, around = 3 * 2 * 8 * 2 * 8, 3 * 2 * 16 * 4 * 8
    assert found.matmul_flops - plain.matmul_flops == 2 * (2 * (encoder + keys) + around)
    within, across = 2 * 2 * 4 * 2 * 4 * 8, 3 * 4 * 4 * 8 * 32
    assert found.attention_flops - plain.attention_flops == within + across
    assert found.training_flops == pytest.approx(3 * found.forward_flops)


def test_a_frozen_encoder_has_no_backward_pass():
    whole = matcher(("/memory/", "encoder/"), "")
    found, frozen = (
        cost.estimate(READER, 16, trained=rule, context=CONTEXT)
        for rule in (whole, lambda path: "/memory/" in path)
    )
    assert frozen.forward_flops == found.forward_flops and found.idle_flops == 0
    encoder = 2 * 2 * (4 * 8 * 2 * 4 + 3 * 8 * 24)
    within, keys = 2 * 2 * 4 * 2 * 4 * 8, 3 * 2 * 8 * 2 * 8
    assert frozen.idle_flops == 2 * (2 * encoder / 2 + 2 * keys) + 2 * within
    less = found.weight_gradient_flops - frozen.weight_gradient_flops
    assert less == 2 * encoder
    assert found.training_flops - frozen.training_flops == less + frozen.idle_flops


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
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("Tesla T4", 65),
        ("NVIDIA T400 4GB", None),
        ("Tesla V100-SXM2-16GB", 125),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("cpu", None),
    ],
)
def test_peaks_are_found_by_device_kind(kind, tera):
    assert cost.peak_flops(Device(kind)) == (tera and tera * 1e12)


@pytest.mark.parametrize(
    ("kind", "giga"),
    [
        ("NVIDIA H100 80GB HBM3", 3_350),
        ("NVIDIA H100 PCIe", 2_000),
        ("NVIDIA H200", 4_800),
        ("NVIDIA A100-SXM4-80GB", 2_039),
        ("NVIDIA A100-SXM4-40GB", 1_555),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40", None),
        ("TPU v5 lite", 819),
        ("TPU v5p", 2_765),
        ("TPU v6 lite", 1_640),
        ("cpu", None),
    ],
)
def test_bandwidths_of_memory_are_found_by_device_kind(kind, giga):
    assert cost.peak_bandwidth(Device(kind)) == (giga and giga * 1e9)


def test_a_cpu_is_measured_as_one_machine():
    peak, source = cost.machine_peak("float32")
    assert 1e8 < peak < 1e14 and "measured float32" in source


LLAMA = preset("llama2-7b").replace(dtype="bfloat16", remat="full")


@pytest.mark.slow
def test_training_state_takes_sixteen_bytes_a_weight_split_over_the_mesh():
    found = cost.training_memory(LLAMA, 512, 8, Mesh(data=1, fsdp=4, tensor=2))
    share = 6_738_415_616 / 8
    assert found.weights == pytest.approx(4 * share, rel=1e-3)  # norms are whole on every device
    assert found.gradients == pytest.approx(4 * share, rel=1e-3)
    assert found.optimizer == pytest.approx(8 * share, rel=1e-3)
    averaged = cost.training_memory(LLAMA, 512, 8, Mesh(1, 4, 2), average=True)
    assert averaged.optimizer == pytest.approx(12 * share, rel=1e-3)
    assert "per device (weights 3.4 + gradients 3.4 + optimizer 6.7" in str(found)


@pytest.mark.slow
def test_frozen_weights_have_no_gradient_and_no_moments():
    config = LLAMA.replace(lora=LoRA())
    found = cost.training_memory(config, 512, 1, Mesh(fsdp=1), trained=matcher(("lora",), ""))
    assert (
        found.gradients
        == 4 * cost.estimate(config, 16, trained=matcher(("lora",), "")).trained_parameters
    )
    assert found.optimizer == 2 * found.gradients < found.weights / 100


@pytest.mark.slow
def test_activations_grow_with_the_rows_of_a_device_and_shrink_with_recomputing():
    config = preset("tiny").replace(num_layers=8)

    def activations(remat, rows, mesh, length=1024):
        changed = config.replace(remat=remat)
        return cost.training_memory(changed, length, rows, mesh, platform="gpu").activations

    one = Mesh(fsdp=1)
    full, dots, none = (activations(remat, 1, one) for remat in ("full", "dots", "none"))
    assert 3 * full < none and full < dots < none
    for several in (activations("none", 4, one), activations("none", 1, one, length=4096)):
        assert several == pytest.approx(4 * none, rel=5e-3)
    spread = Mesh(data=4, fsdp=1)
    assert activations("none", 4, spread) == none
    # A row more is one more on every device.
    assert activations("none", 5, spread) == activations("none", 2, one)


def test_products_of_16_bits_are_kept_in_16_bits():
    config = preset("tiny").replace(num_layers=8, remat="dots")

    def activations(dtype):
        changed = config.replace(dtype=dtype)
        return cost.training_memory(changed, 1024, 1, Mesh(fsdp=1)).activations

    assert activations("bfloat16") < 0.6 * activations("float32")


@pytest.mark.slow
def test_a_context_takes_memory_with_its_own_tokens_and_with_those_that_read_it():
    def activations(context):
        return cost.training_memory(READER, 16, 1, Mesh(fsdp=1), context=context).activations

    once, twice = activations(CONTEXT), activations((8, 8))
    # A layer keeps at least keys and values of the context, float32, and its states are kept once.
    assert twice - once > 32 * 4 * (3 * 2 * 2 * 8 + 8)
    assert once - activations(None) > twice - once  # the text keeps its queries of the context


def test_weights_and_cache_are_those_that_lie_on_a_device():
    shape = Mesh(data=2, fsdp=2, tensor=2)
    mesh, config = make_mesh(shape), preset("tiny")
    params = random_params(config, 0, mesh)
    cache = cache_lib.create(config, 8, 256, mesh=mesh)

    def on_one(tree):
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    found = cost.generation_memory(config, 256, 6, shape, platform="cpu")  # filled up to 8 rows
    assert found.weights == on_one(params)
    assert found.cache == on_one(cache.layers)
    assert found == cost.generation_memory(config, 256, 8, mesh)
    assert found.total == found.weights + found.cache + found.activations


def test_a_llama_needs_its_weights_and_half_a_megabyte_of_cache_for_every_token():
    config = LLAMA.replace(param_dtype="bfloat16")
    found = cost.generation_memory(config, 32_768, 1, Mesh(fsdp=1))
    assert found.weights == 2 * 6_738_415_616
    assert found.cache == 32_768 * 2 * 32 * 4096 * 2
    assert found.activations < 2**30


@pytest.mark.parametrize(
    "changes",
    [
        {"mlp_width": 1024},
        {"experts": Experts(count=8, top_k=2)},
        {"layers": (LayerKind(mixer=GatedDeltaNet(4, 8, 64, 64)), LayerKind())},
    ],
    ids=["mlp", "experts", "mixer"],
)
def test_reading_a_prompt_has_the_memory_that_the_cpu_compiler_gives_it(
    changes, enable_xla_optimizations
):
    config = preset("tiny").replace(width=256, num_heads=8, head_dim=64, num_layers=2, **changes)
    mesh = make_mesh(Mesh(fsdp=1), jax.devices()[:1])
    compiled = session.lower_read(config, mesh, 2, 2048, 512).compile().memory_analysis()
    memory = cost.generation_memory(config, 2048, 2, mesh, chunk=512)
    arguments = compiled.argument_size_in_bytes
    assert memory.weights + memory.cache == pytest.approx(arguments, rel=0.01)
    assert 0.75 < memory.activations / compiled.temp_size_in_bytes < 1.5


def test_a_context_that_was_read_is_kept_beside_the_cache():
    plain = cost.generation_memory(READER, 64, 3, Mesh(fsdp=1))
    found = cost.generation_memory(READER, 64, 3, Mesh(fsdp=1), context=(5, 8))
    one_layer = 2 * READER.num_kv_heads * READER.head_dim * 4
    assert found.context == 3 * 5 * 8 * (ENCODER.width * 4 + 1 + one_layer)
    assert plain.context == 0 and found.total == plain.total + found.context


def test_memory_wants_to_know_how_many_devices_there_are():
    with pytest.raises(InputError, match="write how many devices lie along each axis"):
        cost.generation_memory(preset("tiny"), 16, 1, Mesh())


MIXED = preset("tiny").replace(
    num_layers=6, layers=(LayerKind(2, pattern=Sliding(window=10)), LayerKind())
)


def test_costs_of_layers_that_differ_are_sums_over_layers():
    local, full = (MIXED.replace(pattern=p, layers=()) for p in (Sliding(window=10), Causal()))
    mean = (4 * cost.visible_keys(local, 200) + 2 * cost.visible_keys(full, 200)) / 6
    assert cost.visible_keys(MIXED, 200) == pytest.approx(mean)
    mixed, local, full = (cost.estimate(config, 200) for config in (MIXED, local, full))
    assert mixed.kv_cache_bytes == (4 * local.kv_cache_bytes + 2 * full.kv_cache_bytes) / 6
    assert mixed.attention_flops == pytest.approx(
        (4 * local.attention_flops + 2 * full.attention_flops) / 6
    )
    assert mixed.matmul_flops == full.matmul_flops and mixed.parameters == full.parameters


def test_the_cache_at_the_end_of_a_prompt_has_what_stays():
    config = preset("tiny")
    full = cost.cache_bytes(config, 512)
    pair = 2 * config.head_dim * config.compute_dtype().itemsize  # a key and its value
    slot = config.num_layers * config.num_kv_heads * (pair + 4)  # with its order index
    heads = AdaptiveHeads(most=1.5)
    for cache, expected in (
        (Random(ratio=0.75), 128 * slot),
        (Random(tokens=100, every=8), 100 * slot),
        (Random(tokens=100, chunk=64), 100 * slot),
        (Random(ratio=0.75, heads=heads), 192 * slot),
        (Random(ratio=0), full),
        (Random(tokens=512), full),
        (Quest(tokens=64, page=16, exact_layers=0), full * (1 + 1 / 16)),
    ):
        evicting = config.replace(cache=cache)
        assert cost.cache_bytes(evicting, 512) == expected, cache
        assert cost.estimate(evicting, 512).kv_cache_bytes == expected
    sliding = config.replace(pattern=Sliding(window=32), cache=Random(ratio=0.5))
    assert cost.cache_bytes(sliding, 512) == full * 32 / 512  # the window's cache is left alone


@pytest.mark.parametrize(("share", "read"), [("max", 64), ("none", 128)])
def test_a_step_of_quest_reads_the_bounds_of_all_pages(share, read):
    plain = preset("tiny").replace(num_layers=3)  # two query heads for each key head
    quest = plain.replace(cache=Quest(tokens=64, page=16, exact_layers=1, share=share))
    slots = 512 + 2 * (read + 512 / 16)  # a page has as many bounds as one token has numbers
    full = cost.resources.read_cache_bytes(plain, 512)
    assert cost.resources.read_cache_bytes(quest, 512) == full * slots / (3 * 512)
    assert cost.visible_keys(quest, 512, 1) == (512 + 2 * (64 + 512 / 16)) / 3
    assert cost.visible_keys(quest, 512, 16) == cost.visible_keys(plain, 512, 16)
    assert cost.resources.read_cache_bytes(quest, 512, 16) == full


def test_the_cache_of_layers_that_differ_is_the_one_that_is_created():
    cache = cache_lib.create(MIXED, 2, 4096, chunk=16)
    found = cost.generation_memory(MIXED, 4096, 2, Mesh(fsdp=1), chunk=16)
    assert found.cache == sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))


ONE = Mesh(fsdp=1).shape
DELTA = GatedDeltaNet(key_heads=3, value_heads=6, key_dim=16, value_dim=24)


def test_a_mixer_may_be_the_widest_part_of_a_layer():
    model = preset("tiny")  # attention and its MLP have fewer channels
    mixed = model.replace(layers=(LayerKind(mixer=DELTA), LayerKind()))
    plain, wide = (cost.generation_memory(x, 512, 2, Mesh(fsdp=1)) for x in (model, mixed))
    channels = 6 * (2 * 16 + 3 * 24)
    widest = 2 * max(model.mlp_width, (model.num_heads + model.num_kv_heads) * model.head_dim)
    assert channels > widest
    assert wide.activations - plain.activations == 4 * 2 * 512 * (channels - widest)
    split = cost.generation_memory(mixed, 512, 2, Mesh(fsdp=1, tensor=3))
    assert wide.activations - split.activations == 4 * 2 * 512 * (
        channels - max(channels // 3, widest)
    )
    assert cost.resources.state_bytes(mixed, 3) == cost.resources.state_bytes(mixed) / 3


def test_experts_hold_rows_of_their_tokens_at_their_widest_moment():
    experts = Experts(count=6, top_k=3, width=8)  # narrower than the tokens
    config = ModelConfig(100, 64, 32, 3, 4, 2, 8, 64, experts=experts)
    found = cost.generation_memory(config, 64, 2, Mesh(fsdp=1))
    pairs = 2 * 64 * 3
    rows = 16 * (6 + (pairs - 6) // 16)  # blocks of 16
    held = (rows + pairs) * 64 + 2 * 64 * 3 * 64  # outputs, by expert and by token; hidden states
    assert found.activations == 4 * held + 4 * 2 * 100


@pytest.mark.parametrize(
    ("devices", "heads"), [(1, (3, 6)), (3, (1, 2)), (2, (3, 3)), (6, (1, 1)), (4, (3, 6))]
)
def test_devices_share_the_heads_of_values_that_they_divide(devices, heads):
    part = DELTA.split(devices)
    assert (part.key_heads, part.value_heads) == heads
    local = cost.resources._local_config(
        preset("tiny").replace(layers=(LayerKind(mixer=DELTA), LayerKind())),
        Mesh(fsdp=1, tensor=devices).shape,
    )
    assert [layer.mixer for layer, _ in local.layer_counts] == [part, None]


def test_scans_over_separate_layers_copy_their_weights():
    def copied_and_all(config):
        sizes = {path: size for path, (_, size) in cost.resources.per_device(config, ONE).items()}
        layers = sum(size for path, size in sizes.items() if path.startswith("layers"))
        return cost.resources._stacked_bytes(config, sizes), layers

    kinds = LayerKind(3, Sliding(8)), LayerKind()
    config = preset("tiny").replace(num_layers=7, layers=kinds)
    copied, layers = copied_and_all(config)  # 3, and 3 after the other one
    assert copied == layers * 6 / 7
    copied, layers = copied_and_all(config.replace(num_layers=8))  # two periods
    assert copied == layers
    pair = config.replace(num_layers=2, layers=(LayerKind(1, Sliding(8)), LayerKind()))
    for alone in (pair, config.replace(layers=()), config.replace(scan_layers=False)):
        assert copied_and_all(alone)[0] == 0


def test_an_update_on_a_gpu_holds_the_state_twice():
    config = preset("tiny").replace(num_layers=1, vocab_size=8192)
    memory = cost.training_memory(config, 16, 1, Mesh(fsdp=1), platform="gpu")
    state = memory.weights + memory.optimizer
    assert memory.activations == state and memory.total == 2 * state + memory.gradients
    parts = cost.training_memory(config, 16, 1, Mesh(fsdp=1), platform="gpu", accumulates=True)
    assert parts.total == memory.total
