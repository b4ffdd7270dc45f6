"""A packed batch has the same loss and gradients on one device and on any mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.attention import Pattern, Sliding, SparseTransformer
from lcjax.errors import InputError
from lcjax.models import Decoder, LayerKind, ModelConfig, tiles
from lcjax.models.cache import abstract_cache
from lcjax.parallel.context import Heads, strategy
from lcjax.parallel.sharding import Mesh, batch_sharding, make_mesh, param_shardings
from lcjax.rope import Default, NoRotation
from lcjax.rope.positions import E2Positions, PlainPositions
from lcjax.training.objective import language_model

B, T = 8, 64
# data, fsdp, tensor, context
MESHES = [(8, 1, 1, 1), (2, 2, 2, 1), (1, 2, 1, 4), (1, 1, 1, 8)]
PATTERNS = {
    "causal": {},
    "sliding": {"window": 11},
    "s2": {"group": 16},
    "lm_infinite": {"window": 10, "sinks": 3},
    "self_extend": {"window": 8, "group": 4},
    "landmark": {"block": 8, "top_k": None},
}


pytestmark = pytest.mark.usefixtures("compiled_once")


def config(pattern="causal", **changes):
    return ModelConfig(
        vocab_size=61, width=32, mlp_width=48, num_layers=2, num_heads=8, num_kv_heads=2,
        head_dim=8, max_length=64, remat="dots", context_parallel="ring",
        pattern=Pattern.get_choice_class(pattern)(**PATTERNS[pattern]),
    ).replace(**changes)  # fmt: skip


def batch(seed=0):
    """Rows of several documents and some padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 61, (B, T + 1))
    segments, positions = np.zeros((B, T), int), np.zeros((B, T), int)
    for row in range(B):
        ends = np.sort(rng.choice(np.arange(4, T - 2), 2, replace=False))
        for n, (start, stop) in enumerate(zip([0, ends[0]], ends)):
            segments[row, start:stop] = n + 1
            positions[row, start:stop] = np.arange(stop - start)
    return {
        "tokens": tokens[:, :-1].astype(np.int32),
        "targets": tokens[:, 1:].astype(np.int32),
        "segments": segments.astype(np.int32),
        "positions": positions.astype(np.int32),
        "weights": (segments > 0).astype(np.float32),
    }


def plain(model):
    """The model on one device, with all tokens of a layer at once and nothing on the host."""
    return model.replace(context_parallel="ring", context_group=None, remat="dots")


@functools.cache
def start(model):
    init = jax.jit(lambda: Decoder(model).init(jax.random.key(0), jnp.zeros((1, T), jnp.int32)))
    return init()["params"]


@functools.cache
def loss_and_gradients(model, shape, places=PlainPositions()):
    mesh = None if shape is None else make_mesh(Mesh(*shape))
    objective = language_model(model, places, mesh=mesh)
    params = start(plain(model))
    data = batch()
    if mesh is not None:
        params = jax.device_put(params, param_shardings(mesh, params))
        data = jax.device_put(data, batch_sharding(mesh))

    def mean(params, data):
        loss, weights, _ = objective(params, {}, data, jax.random.key(1))
        return loss / weights

    return jax.device_get(jax.jit(jax.value_and_grad(mean))(params, data))


def assert_as_on_one_device(model, shape, **options):
    loss, grads = loss_and_gradients(model, shape, **options)
    expected, expected_grads = loss_and_gradients(plain(model), None, **options)
    assert loss == pytest.approx(expected, rel=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_mesh_equals_one_device(pattern, shape):
    assert_as_on_one_device(config(pattern), shape)


EXCHANGES = {
    "ring": {}, "all_to_all": {}, "usp": {"context_group": 2}, "all_gather": {}, "auto": {}
}  # fmt: skip


@pytest.mark.slow_except("causal-all_to_all", "landmark-usp", "lm_infinite-all_gather")
@pytest.mark.parametrize("method", EXCHANGES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_exchange_has_the_loss_of_one_device(pattern, method, monkeypatch):
    """Also with layers that compute tiles of tokens, and keep their results in host memory."""
    monkeypatch.setitem(tiles._BYTES, "cpu", 20_000)
    options = {"context_parallel": method, "remat": "offload", **EXCHANGES[method]}
    assert_as_on_one_device(config(pattern, **options), (1, 1, 2, 4))


LAYERS = {
    "local": (LayerKind(pattern=Sliding(11), rope=Default(theta=100.0)), LayerKind()),
    "dense": (LayerKind(pattern=SparseTransformer(stride=8)), LayerKind(rope=NoRotation())),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("layers", LAYERS)
def test_layers_that_differ_are_cut_as_on_one_device(layers, shape):
    assert_as_on_one_device(config(layers=LAYERS[layers]), shape)


@pytest.mark.slow
def test_sampled_positions_and_biases_are_cut_along():
    assert_as_on_one_device(config(), (2, 1, 1, 4), places=E2Positions(original_length=T))
    assert_as_on_one_device(config(position="alibi"), (2, 1, 2, 2))
    assert_as_on_one_device(config(position="t5"), (1, 1, 2, 4))
    assert_as_on_one_device(config(position="transformer_xl"), (1, 2, 2, 2))
    assert_as_on_one_device(config(position="deberta"), (1, 1, 2, 4))


def test_tokens_are_reordered_only_where_that_balances_work():
    mesh = make_mesh(Mesh(1, 2, 1, 4))

    def order(pattern, **changes):
        return Decoder(config(pattern, **changes), mesh).token_order(T)

    assert sorted(order("causal")) == list(range(T))
    assert order("causal", layers=LAYERS["local"]) is None
    assert sorted(order("causal", layers=LAYERS["dense"])) == list(range(T))
    assert order("sliding") is None and order("landmark") is None
    assert order("causal", context_parallel="all_to_all") is None
    assert sorted(order("causal", context_parallel="all_gather")) == list(range(T))
    assert sorted(order("causal", context_parallel="usp", context_group=2)) == list(range(T))
    assert Decoder(config(), make_mesh(Mesh(8, 1, 1, 1))).token_order(T) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "causal",
        "inf_llm",
        "moba",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("lm_infinite", "vertical_slash", "inf_llm_v2", "nsa")
        ),
    ],
)
def test_kernels_of_a_training_and_a_decoding_step_are_split_by_hand(pattern):
    """Lowered for TPUs on eight devices: the compiler cannot split a kernel by itself."""
    fields = {"vertical_slash": {}, "inf_llm": {"window": 16, "sinks": 4, "block": 8, "top_k": 2}}
    fields["moba"] = {"block": 32, "top_k": 2}
    fields["nsa"] = {"block": 32, "top_k": 3, "window": 16}
    fields["inf_llm_v2"] = fields["moba"] | {"local": 0, "dense_len": 96}
    chosen = Pattern.get_choice_class(pattern)(**PATTERNS.get(pattern, fields.get(pattern)))
    model = config(head_dim=32, dtype="bfloat16").replace(pattern=chosen)
    mesh = make_mesh(Mesh(1, 4, 2, 1))
    decoder, shape = Decoder(model, mesh), (8, 128)
    params = jax.eval_shape(
        lambda: Decoder(model).init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    )
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)

    def score(params, tokens):
        hidden = decoder.apply({"params": params}, tokens).hidden
        return hidden.astype(jnp.float32).sum()

    def lower(run, *arguments):
        return jax.jit(run).trace(*arguments).lower(lowering_platforms=("tpu",)).as_text()

    if chosen.is_causal and pattern != "inf_llm":
        assert "tpu_custom_call" in lower(jax.grad(score), params, tokens)
    cache = abstract_cache(model, 8, 256, chunk=128)

    def step(params, tokens, cache):
        return decoder.apply({"params": params}, tokens, cache=cache)

    for length in (1, 128):
        assert lower(step, params, jax.ShapeDtypeStruct((8, length), jnp.int32), cache)


def test_heads_devices_and_links_decide_what_is_exchanged():
    def chosen(devices, heads, keys=8, length=2**20, choice="auto", group=None):
        sizes = Mesh(fsdp=1, context=devices)
        plan = strategy(choice, sizes, Heads(heads, keys, 128), length, group)
        return plan.method, plan.group

    assert chosen(8, 32) == ("all_to_all", 1)
    assert chosen(64, 32) == ("usp", 32)
    assert chosen(16, 12) == ("usp", 4)
    assert chosen(8, 9, keys=3, length=65_536) == ("all_gather", 1)
    assert chosen(8, 9, keys=3) == ("ring", 1)
    assert chosen(1, 9) == ("ring", 1)
    assert chosen(8, 32, choice="usp", group=4) == ("usp", 4)
    assert chosen(8, 32, choice="all_gather") == ("all_gather", 1)
    for choice, group, message in (
        ("usp", None, "no number of the 8 devices"), ("all_to_all", None, "use usp, ring"),
        ("usp", 3, "context_group=3 must divide"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            chosen(8, 9, choice=choice, group=group)
