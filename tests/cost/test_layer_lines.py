"""Lines about layers: which settings reach which of them."""

from lcjax.attention import Sliding
from lcjax.attention.policies import SnapKV
from lcjax.cost import cache_bytes, layer_lines
from lcjax.memory.cepe import Cepe
from lcjax.models import preset
from lcjax.models.mixer import GatedDeltaNet
from lcjax.models.model_config import LayerKind
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


def test_layers_that_read_a_context_are_apart():
    config = preset("tiny").replace(num_layers=4)
    config = config.replace(memory=Cepe(states=preset("tiny-encoder"), layers=1))
    others, reader = layer_lines(config, 64)
    assert others.startswith("layers 0-2 (3): ") and "does not read the context" in others
    assert reader.startswith("layers 3 (1): ") and reader.endswith("; reads the context")
