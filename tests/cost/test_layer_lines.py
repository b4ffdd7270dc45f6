"""Lines about layers: which settings reach which of them."""

import jax

from lcjax.attention import Sliding
from lcjax.attention.policies import SnapKV
from lcjax.cost import cache_bytes, generation_memory, layer_lines
from lcjax.cost.resources import attention_flops, read_cache_bytes
from lcjax.cost.roofline import cut_work
from lcjax.memory.cepe import Cepe
from lcjax.models import preset
from lcjax.models.cache import create
from lcjax.models.mixer import GatedDeltaNet
from lcjax.models.model_config import LayerKind
from lcjax.parallel.sharding import Mesh
from lcjax.rope import NoRotation, Yarn

MIXER = GatedDeltaNet(key_heads=1, value_heads=2, key_dim=8, value_dim=8)


def test_a_line_says_what_reaches_each_kind_of_layers():
    kinds = (
        LayerKind(mixer=MIXER, repeat=2),
        LayerKind(),
        LayerKind(pattern=Sliding(16), rope=NoRotation()),
    )
    config = preset("tiny").replace(
        num_layers=8, layers=kinds, rope=Yarn(factor=4.0), cache=SnapKV(ratio=0.5)
    )
    mixed, attention, local = layer_lines(config, 128)
    assert mixed.startswith("layers 0-1, 4-5 (4): gated_delta_net (key_heads=1, ")
    assert "no pattern, position or cache policy applies; a state of fixed size" in mixed
    assert attention.startswith("layers 2, 6 (2): ") and "rope yarn (factor=4)" in attention
    assert "cache of 64 of 128 tokens by snapkv" in attention
    assert "sliding (window=16); rope none; cache of 16 of 128 tokens" in local
    assert "to which snapkv does not apply" in local


def test_the_bytes_of_all_lines_are_those_of_the_cache():
    config = preset("llama3-8b").replace(layers=(LayerKind(), LayerKind(pattern=Sliding(4096))))
    sizes = [float(line.split(", ")[-1].split()[0]) for line in layer_lines(config, 131_072)]
    assert abs(sum(sizes) - cache_bytes(config, 131_072) / 1e9) < 0.01 * sum(sizes)


def test_layers_with_heads_of_several_sizes_are_counted_one_by_one():
    local = LayerKind(3, pattern=Sliding(16), head_dim=24, num_kv_heads=4, rotary_fraction=0.25)
    config = preset("tiny").replace(num_layers=8, layers=(local, LayerKind(num_kv_heads=1)))
    first, second = layer_lines(config, 128)
    assert "4 heads over 4 of 24" in first and "cache of 16 of 128 tokens" in first
    assert "rope default (theta=10000) of 0.25 of the channels; cache" in first
    assert "4 heads over 1 of 16" in second and "cache of 128 of 128 tokens" in second
    # Layers, keys and values, slots, heads, channels, bytes of float32
    sizes = 6 * 2 * 16 * 4 * 24 * 4, 2 * 2 * 128 * 1 * 16 * 4
    assert cache_bytes(config, 128) == sum(sizes)
    for line, size in zip((first, second), sizes, strict=True):
        assert line.endswith(f"{size / 1e9:.3g} GB a text")
    cache = create(config, 3, 128, chunk=1)
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))
    mesh = Mesh(fsdp=1)
    assert generation_memory(config, 128, 3, mesh, chunk=1).cache == arrays
    assert read_cache_bytes(config, 128) == sum(sizes)
    # A query of a local layer sees 16 keys at the end of the text.
    flops = 4 * 4 * (6 * 24 * 16 + 2 * 16 * 128)
    assert attention_flops(config, 128, 1) == flops
    halves = cut_work(config.replace(cache=SnapKV(ratio=0.5)), 1, 128, Mesh(tensor=2, fsdp=1))
    assert halves.bytes == sizes[0] / 2 + sizes[1]  # one head cannot be shared


def test_layers_that_read_a_context_are_apart():
    config = preset("tiny").replace(num_layers=4)
    config = config.replace(memory=Cepe(states=preset("tiny-encoder"), layers=1))
    others, reader = layer_lines(config, 64)
    assert others.startswith("layers 0-2 (3): ") and "does not read the context" in others
    assert reader.startswith("layers 3 (1): ") and reader.endswith("; reads the context")
