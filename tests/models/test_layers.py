"""Layers that differ in pattern or rope compute what a stack of their own blocks does."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_lm import text

from lcjax.attention import Causal, Landmark, LMInfinite, Longformer, Sliding, SparseTransformer
from lcjax.attention.policies import SnapKV
from lcjax.errors import InputError
from lcjax.memory import BeaconSection, SharedLlmSection
from lcjax.models import Decoder, LayerKind, layer_groups, preset
from lcjax.models import cache as cache_lib
from lcjax.models.decoder import SequentialBlock, random_params
from lcjax.models.layers import (
    Attention,
    LayerInputs,
    Linear,
    Norm,
    Projections,
    norm_of_rotated,
)
from lcjax.models.lora import LoRA
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.rope import Clex, Default, DynamicNTK, NoRotation, Yarn, stack_rotations
from lcjax.tree import flatten

SIX = preset("tiny").replace(num_layers=6, width=32, mlp_width=48, head_dim=8)
LOCAL = Sliding(window=5)
DENSE = SparseTransformer(stride=4)
MIXES = {
    # GPT-3: dense and locally banded sparse layers in turn.
    "gpt3": (LayerKind(), LayerKind(pattern=DENSE)),
    "longformer": tuple(LayerKind(2, Longformer(window)) for window in (3, 6, 12)),
    # Gemma 3: the local layers fix window and base.
    "two bases": (LayerKind(2, LOCAL, Default(theta=100.0)), LayerKind()),
    "no positions": (LayerKind(3), LayerKind(rope=NoRotation())),
    "moved keys": (LayerKind(pattern=LMInfinite(window=6, sinks=2)), LayerKind(2)),
    # Gemma 4: the local layers fix the sizes of their heads, too.
    "sizes of heads": (
        LayerKind(
            *(2, LOCAL, Default(theta=100.0)), head_dim=12, num_kv_heads=1, rotary_fraction=0.5
        ),
        LayerKind(),
    ),
    "sizes of heads, one rope": (LayerKind(2, head_dim=6), LayerKind(num_kv_heads=4)),
}
EVERY = pytest.mark.parametrize("layers", MIXES.values(), ids=MIXES)


def mixed(layers, **changes):
    return SIX.replace(layers=layers, **changes)


@functools.cache
def params(layers=()):
    """Of layers one by one, with weights large enough that patterns matter."""
    apart = random_params(mixed(layers, scan_layers=False), 0)
    return jax.tree.map(lambda x: np.asarray(x) * (2 if x.ndim > 1 else 1), apart)


def assert_close(x, y, atol=2e-5):
    np.testing.assert_allclose(x, y, atol=atol, rtol=1e-4)


@functools.partial(jax.jit, static_argnums=0)
def read(config, params, tokens, rotation=None, cache=None):
    output = Decoder(config).apply({"params": params}, tokens, rotation=rotation, cache=cache)
    return output.hidden, output.cache


def hidden_states(*inputs):
    return read(*inputs)[0]


@functools.partial(jax.jit, static_argnums=0)
def block(config, params, x, positions, rotation):
    inputs = LayerInputs(positions, None, rotation)
    return SequentialBlock(config).apply({"params": params}, x, inputs, None)[0]


@pytest.mark.slow_except("moved keys", "two bases", "no positions", "sizes of heads")
@EVERY
def test_a_mixed_model_is_the_stack_of_its_blocks(layers):
    config, tokens, weights = mixed(layers), text(0, 2, 24), params(layers)
    x = weights["embed"]["embedding"][tokens]
    positions = np.broadcast_to(np.arange(24), (2, 24))
    cycle = [kind for kind in layers for _ in range(kind.repeat)]
    for index in range(6):
        kind = vars(cycle[index % len(cycle)])
        single = SIX.replace(**{name: x for name, x in kind.items() if x and name != "repeat"})
        rotation = single.rope.rotation(int(single.head_dim * single.rotary_fraction), 24)
        x = block(single, weights[f"layers_{index}"], x, positions, rotation)
    expected = Norm(SIX).apply({"params": weights["final_norm"]}, x)
    assert_close(hidden_states(config, weights, tokens), expected)
    plain = tuple(dataclasses.replace(x, pattern=None, rope=None) for x in layers)
    if plain != layers:
        plain = hidden_states(mixed(plain, scan_layers=False), weights, tokens)
        assert np.abs(expected - plain).max() > 0.1


BASE = Default(theta=100.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"pattern": LOCAL, "rope": BASE},
        *(
            pytest.param(fields, marks=pytest.mark.slow)
            for fields in ({}, {"pattern": LOCAL}, {"rope": BASE})
        ),
    ],
    ids=str,
)
def test_layers_of_one_kind_are_the_model_of_that_kind_bit_by_bit(fields):
    layers, tokens = (LayerKind(4, **fields),), text(0, 2, 24)
    config, plain = mixed(layers), SIX.replace(**fields)
    weights = random_params(plain, 0)
    shapes = jax.eval_shape(lambda: random_params(config, 0))
    assert config.stacked and jax.tree.structure(weights) == jax.tree.structure(shapes)
    for rotation in (None, config.rotation(30)):
        other = None if rotation is None else plain.rotation(30)
        np.testing.assert_array_equal(
            hidden_states(config, weights, tokens, rotation),
            hidden_states(plain, weights, tokens, other),
        )


@pytest.mark.slow_except("two bases", "sizes of heads")
@EVERY
def test_a_cache_of_mixed_layers_equals_prefill(layers):
    config, tokens = mixed(layers), text(0, 2, 34)
    cache = cache_lib.create(config, 2, 80, chunk=8)
    rotation, parts = config.rotation(34), []
    for start, stop in ((0, 8), (8, 16), (16, 17), (17, 18), (18, 26), (26, 34)):
        out, cache = read(config, params(layers), tokens[:, start:stop], rotation, cache)
        parts.append(out)
    whole = hidden_states(config, params(layers), tokens, rotation)
    assert_close(np.concatenate(parts, 1), whole)


def nbytes(cache):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


def test_a_cache_of_mostly_local_layers_is_small_and_describes_each_layout_once():
    layers = (LayerKind(5, Sliding(window=32)), LayerKind())
    mix, full = (cache_lib.create(SIX.replace(layers=x), 2, 4096, chunk=16) for x in (layers, ()))
    assert [slots.index.shape[1] for slots in mix.slots] == [64, 4096]
    assert mix.kind_by_layer == (0, 0, 0, 0, 0, 1) and full.kind_by_layer == (0,) * 6
    assert nbytes(mix.layers) == nbytes(full.layers) * (4096 + 5 * 64) // (6 * 4096)
    assert nbytes(mix) < nbytes(full) / 4
    assert mix.capacity == 4096 and mix.bounds_length


@pytest.mark.slow_except("two bases", "sizes of heads")
@EVERY
def test_gradients_of_scanned_periods_are_those_of_layers_one_by_one(layers):
    tokens = text(0, 2, 24)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(config, params):
        def loss(params):
            hidden = Decoder(config).apply({"params": params}, tokens).hidden
            return (hidden * jnp.cos(jnp.arange(hidden.size).reshape(hidden.shape))).sum()

        return jax.grad(loss)(params)

    scanned = gradients(mixed(layers, remat="dots"), params(layers))
    apart = gradients(mixed(layers, scan_layers=False), params(layers))
    jax.tree.map(lambda x, y: assert_close(x, y, 2e-5 * np.abs(y).max()), scanned, apart)


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        ("aaaaab" * 4, [(24, 6)]),
        ("aaaaab" * 4 + "aa", [(24, 6), (2, 1)]),
        ("aabbcc", [(2, 1), (2, 1), (2, 1)]),
        ("aaaaaa", [(6, 1)]),
        ("ab", [(1, 1), (1, 1)]),
        ("caaaaab" + "aaaaab", [(1, 1), (12, 6)]),
        ("aaaaaabaabaa", [(6, 1), (6, 3)]),
    ],
)
def test_layers_are_grouped_by_the_period_that_covers_most(kinds, groups):
    weights = [{"a": np.zeros(2)}] * len(kinds)
    found = layer_groups.group_layers(weights, kinds)
    assert [(len(layers), period) for layers, period in found] == groups
    assert [index for layers, _ in found for index in layers] == [*range(len(kinds))]


@pytest.mark.parametrize(("layers", "kinds"), [((), 1), (MIXES["two bases"], 2)])
def test_layers_of_one_kind_that_read_a_cache_are_traced_once(layers, kinds, monkeypatch):
    config, traced, call = mixed(layers, scan_layers=False), [], SequentialBlock.__call__
    weights = params()

    def counted(block, *inputs):
        traced.append(block)
        return call(block, *inputs)

    monkeypatch.setattr(SequentialBlock, "__call__", counted)
    cache = cache_lib.create(config, 2, 80, chunk=8)
    jax.eval_shape(Decoder(config).apply, {"params": weights}, text(0, 2, 8), cache=cache)
    assert len(traced) == kinds


def test_a_method_of_the_model_changes_the_layers_that_fix_none():
    config = mixed(MIXES["two bases"]).replace(rope=Yarn(theta=1e4, factor=4.0, original_length=64))
    assert [config.layer(i).rope.type for i in range(6)] == ["default", "default", "yarn"] * 2
    assert [config.layer(i).pattern for i in range(6)] == [LOCAL, LOCAL, Causal()] * 2
    assert config.layer(2).layers == () and SIX.layer(3) == SIX


def test_rows_of_a_rope_that_follows_the_length_have_the_rotations_that_they_have_alone():
    rope = DynamicNTK(theta=1e4, factor=2.0, original_length=8)
    config, tokens = mixed((LayerKind(rope=rope, pattern=LOCAL), LayerKind())), text(0, 2, 24)
    rotations = [config.rotation(length) for length in (24, 40)]
    assert config.depends_on_length and not SIX.depends_on_length
    both = hidden_states(config, params(), tokens, stack_rotations(rotations))
    for row, rotation in enumerate(rotations):
        one = slice(row, row + 1)
        assert_close(both[one], hidden_states(config, params(), tokens[one], rotation))
    assert np.abs(rotations[0].kinds[0].inv_freq - rotations[1].kinds[0].inv_freq).max() > 0
    assert (
        stack_rotations(rotations).rows(np.array([1])).kinds[0].inv_freq
        == rotations[1].kinds[0].inv_freq
    ).all()


def test_a_rotation_without_those_of_layers_that_fix_a_rope_raises_input_error():
    config = mixed(MIXES["two bases"])
    with pytest.raises(
        InputError, match=r"rotation: layers .* give model.config.rotation\(length\)"
    ):
        hidden_states(config, params(), text(0, 1, 4), SIX.rotation(4))


@pytest.mark.parametrize(
    "rope", [Default(theta=100.0), Yarn(theta=100.0, factor=4.0, original_length=8)]
)
def test_a_share_of_frequencies_is_that_of_a_head_that_rotates_whole(rope):
    """Gemma 4: the other channels are those of frequency 0, in both halves of a head."""
    config = SIX.replace(head_dim=14, rope=rope, rotary_fraction=0.5, rotary_share="frequencies")
    whole, scale = rope.frequencies(14, 24)
    turned = config.rotation(24)
    np.testing.assert_array_equal(turned.inv_freq, [*whole[:3], 0, 0, 0, 0])  # int(0.5 * 14 // 2)
    assert turned.scale == scale
    x = np.random.default_rng(0).normal(size=(1, 5, 2, 14)).astype(np.float32)
    y = np.asarray(turned.rotate(x, np.arange(20, 25)[None]), np.float64)
    angle = np.arange(20, 25)[:, None] * np.asarray(whole[:3], np.float64)
    pairs = x[..., :7] + 1j * np.asarray(x[..., 7:], np.float64)
    pairs[..., :3] *= np.exp(1j * angle)[None, :, None]
    np.testing.assert_allclose(y[..., :7] + 1j * y[..., 7:], scale * pairs, atol=1e-5)

    # In layers, each with the share of its kind
    kinds = LayerKind(head_dim=6, rotary_fraction=1.0), LayerKind(rope=NoRotation()), LayerKind()
    mix = config.replace(layers=kinds)
    first, second, third = mix.rotation(24).kinds
    np.testing.assert_array_equal(first.inv_freq, rope.frequencies(6, 24)[0])
    assert second.inv_freq.shape == (0,)
    np.testing.assert_array_equal(third.inv_freq, turned.inv_freq)


REFUSED = {
    "landmark below": (
        {"layers": (LayerKind(2, LOCAL), LayerKind(pattern=Landmark(block=8, token=258)))},
        "landmark .* model.pattern.type=landmark, and leave model.layers out",
    ),
    "landmark above": (
        {"layers": MIXES["two bases"], "pattern": Landmark(block=8, token=258)},
        "landmark .* leave model.layers out",
    ),
    "learned": (
        {"layers": (LayerKind(rope=Clex(original_length=64)), LayerKind())},
        "rope type clex is learned for a whole model; set model.rope.type=clex",
    ),
    "prefix": (
        {"layers": (LayerKind(), LayerKind(rope=NoRotation())), "memory": BeaconSection(chunk=16)},
        "model.memory.type=beacon .* leave model.layers out",
    ),
    "shared": (
        {
            "layers": (LayerKind(), LayerKind(rope=NoRotation())),
            "memory": SharedLlmSection(layers=2, chunk=8, ratios=(2, 1)),
        },
        "shared_llm has one rotation .* leave rope out of model.layers",
    ),
    "memory of several sizes": (
        {
            "layers": (LayerKind(head_dim=4), LayerKind()),
            "memory": SharedLlmSection(layers=2, chunk=8, ratios=(2, 1)),
        },
        "model.memory is not defined for models whose layers have a head_dim of their own",
    ),
    "learned for other channels": (
        {"layers": (LayerKind(head_dim=4), LayerKind()), "rope": Clex(original_length=64)},
        "model.rope.type=clex is learned for 8 rotary channels, and some model.layers have 4",
    ),
    "alibi": (
        {"layers": (LayerKind(pattern=LMInfinite(window=9)), LayerKind()), "position": "t5"},
        "model.position=t5 is not defined under pattern",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_combinations_that_make_no_sense_raise_input_error(changes, message):
    if "memory" in changes:
        changes = changes | {"memory": changes["memory"].memory(SIX)}
    with pytest.raises(InputError, match=message) as error:
        SIX.replace(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repeat": 0}, "layers.repeat=0"),
        ({"pattern": "sliding"}, "layers.pattern='sliding' must be an instance"),
        ({"rope": {"type": "none"}}, "layers.rope=.* lcjax.rope.NoRotation"),
    ],
)
def test_entries_with_wrong_values_raise_input_error(fields, message):
    with pytest.raises(InputError, match=message):
        LayerKind(**fields)


def exact_product(x, factor):
    return (x.astype(jnp.float32) * np.float32(factor)).astype(x.dtype)


# Factors that bfloat16 does not hold, for all that a layer multiplies by a number.


def test_the_factor_of_the_residual_is_not_rounded_by_itself():
    y = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, 32)), jnp.bfloat16)
    block = SequentialBlock(SIX.replace(dtype="bfloat16", residual_scale=0.2203))
    got = block.apply({}, "mlp_after_norm", y, method="added")
    np.testing.assert_array_equal(got, exact_product(y, 0.2203))


def test_the_factor_of_attention_is_not_rounded_by_itself():
    config = SIX.replace(dtype="bfloat16")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, 32)), jnp.bfloat16)
    params = Projections(config).init(jax.random.key(0), x, method="project")
    plain, *_ = Projections(config).apply(params, x, method="project")
    scaled = Projections(config.replace(attention_scale=144**-0.5))
    got, *_ = scaled.apply(params, x, method="project")
    np.testing.assert_array_equal(got, exact_product(plain, 144**-0.5 * 8**0.5))


def test_the_factor_of_an_adapter_is_not_rounded_by_itself():
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(2, 9, 32)), jnp.bfloat16)
    params = {"kernel": (32, 16), "lora_a": (32, 3), "lora_b": (3, 16)}
    params = {name: jnp.asarray(random.normal(size=size)) for name, size in params.items()}
    params["kernel"] *= 0  # what is left is the update

    def update(alpha):
        config = SIX.replace(dtype="bfloat16", lora=LoRA(rank=3, alpha=alpha))
        return Linear((32,), (16,), config, name="query").apply({"params": params}, x)

    np.testing.assert_array_equal(update(7.0), exact_product(update(3.0), 7 / 3))


@pytest.mark.parametrize("rows", [False, True])
def test_a_norm_of_rotated_heads_is_that_of_the_heads_after_their_rotation(rows):
    x = np.random.default_rng(0).normal(size=(2, 9, 3, 8)).astype(np.float32) * 0.1
    positions = np.arange(9)[None].repeat(2, 0)
    rotation = Yarn(theta=1e4, factor=8.0, original_length=4).rotation(8, 32)
    assert rotation.scale > 1.2
    if rows:  # one rotation for each
        rotation = stack_rotations([rotation, Default(theta=1e3).rotation(8, 32)])
    turned = rotation.rotate(x, positions)
    want = turned / np.sqrt(np.square(turned).mean(-1, keepdims=True) + 0.01)
    got = rotation.rotate(norm_of_rotated(x, rotation.scale, 0.01), positions)
    np.testing.assert_allclose(got, want, atol=1e-6)
    config = SIX.replace(qk_norm="unscaled", rope=NoRotation())
    hidden = np.ones((1, 9, 32), np.float32)
    params = Projections(config).init(jax.random.key(0), hidden, method="project")
    assert set(params["params"]) == {"query", "key", "value"}
    with pytest.raises(InputError, match="rotary_fraction=0.5 is not defined for qk_norm=unscal"):
        SIX.replace(qk_norm="unscaled", rotary_fraction=0.5)


ROTATED = SIX.replace(num_layers=1, num_heads=8, num_kv_heads=8, qk_norm="rotated")


def scaled_params(config):
    """Random parameters whose norms have different scales, between 0.5 and 4."""

    def scaled(path, x):
        spread = np.linspace(-0.5, 2, x.shape[-1], dtype=np.float32)
        spread = spread if "key_norm" in str(path) else spread[::-1]
        return x + spread if "_norm" in str(path) else x

    return jax.tree_util.tree_map_with_path(scaled, random_params(config, 0))


@pytest.mark.parametrize("plus_one", [False, True])
def test_scales_of_a_norm_after_the_rotation_multiply_rotated_heads(plus_one):
    rope = Yarn(theta=1e4, factor=4.0, original_length=16)
    config = ROTATED.replace(rope=rope, norm_plus_one=plus_one, scan_layers=False)
    tree, tokens = scaled_params(config), np.random.default_rng(0).integers(0, 256, (1, 23))
    x = tree["embed"]["embedding"][tokens]
    layer = {
        k: np.asarray(v, np.float64) for k, v in flatten(tree["layers_0"]["attention"]).items()
    }
    rotation, ones = config.rotation(23), int(plus_one)

    def normed(name):
        y = np.einsum("btd,dnh->btnh", np.asarray(x, np.float64), layer[f"{name}/kernel"])
        half = np.asarray(rotation.inv_freq, np.float64)
        angle = np.arange(23)[:, None, None] * half
        a, b = np.split(y, 2, -1)
        cos, sin = rotation.scale * np.cos(angle), rotation.scale * np.sin(angle)
        y = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
        y /= np.sqrt((y**2).mean(-1, keepdims=True) + config.norm_epsilon)
        return y * (ones + layer[f"{name}_norm/scale"])

    q, k, v = normed("query"), normed("key"), np.einsum(
        "btd,dnh->btnh", np.asarray(x, np.float64), layer["value/kernel"]
    )  # fmt: skip
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(config.head_dim)
    weights = np.exp(logits - logits.max(-1, keepdims=True)) * np.tri(23)
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bnts,bsnh,nhd->btd", weights, v, layer["out/kernel"])
    inputs = LayerInputs(np.arange(23)[None], None, rotation)
    params = {"params": tree["layers_0"]["attention"]}
    actual, _ = Attention(config).apply(params, x, inputs, None)
    np.testing.assert_allclose(actual, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.slow_except("rows")
@pytest.mark.parametrize("mesh", [None, Mesh(tensor=2, context=4, fsdp=1)], ids=["rows", "mesh"])
def test_norms_after_the_rotation_have_the_rotation_of_each_row(mesh):
    config = ROTATED.replace(rope=DynamicNTK(factor=4.0, original_length=8, theta=1e4))
    tree, tokens = scaled_params(config), np.random.default_rng(0).integers(0, 256, (2, 24))
    rotations = [config.rotation(length) for length in (12, 24)]
    expected = np.concatenate(
        [hidden_states(config, tree, tokens[i : i + 1], rotations[i]) for i in range(2)]
    )
    rotation, options = stack_rotations(rotations), {}
    if mesh is None:
        options["cache"] = cache_lib.create(config, 2, 24)
    model = Decoder(config, mesh and make_mesh(mesh))
    apply = jax.jit(
        lambda tree: model.apply({"params": tree}, tokens, rotation=rotation, **options)
    )
    assert_close(apply(tree).hidden, expected)


def test_what_a_norm_after_the_rotation_does_not_support_raises_input_error():
    for changes, words in (
        ({"norm": "layer"}, "norm=layer is not defined for qk_norm=rotated"),
        ({"rotary_fraction": 0.5}, "rotary_fraction=0.5 is not defined for qk_norm=rotated"),
        ({"cache": SnapKV(tokens=64)}, "policies that evict tokens .* qk_norm=rotated"),
    ):
        with pytest.raises(InputError, match=words):
            ROTATED.replace(**changes)


def test_a_cpu_sums_gradients_of_a_norm_without_an_axis_of_1():
    # XLA takes 20 to 50 times as long for sums of products whose first axis is 1.
    layer = Norm(SIX)
    x = np.random.default_rng(0).standard_normal((1, 24, SIX.width)).astype(np.float32)
    params = layer.init(jax.random.key(0), x)

    def backward(params, x, d_y):
        return jax.vjp(layer.apply, params, x)[1](d_y)

    text = jax.jit(backward).lower(params, x, x).compile().as_text()
    shapes = dict(re.findall(r"%?([\w.-]+) = f32\[([\d,]*)\]", text))
    summed = [shapes[name] for name in re.findall(r" reduce\(%?([\w.-]+)", text)]
    assert len(summed) >= 3  # the variance, the gradients of the scale and of x
    assert not [shape for shape in summed if shape.startswith("1,")]
