"""Layers that do not all read the memory: in groups they compute what they do one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memory_support import assert_close
from tiny_lm import text

from lcjax.memory import Cepe, SharedLlmSection
from lcjax.models import Decoder, layer_groups, preset
from lcjax.models import cache as cache_lib
from lcjax.models.layers import Offloaded
from lcjax.models.lora import LoRA
from lcjax.parallel.sharding import Mesh, make_mesh, param_shardings
from lcjax.tree import flatten, nest, split

FIVE = preset("tiny").replace(num_layers=5, width=32, mlp_width=48, head_dim=8)


def shared(**fields):
    fields = {"layers": 2, "chunk": 8, "ratios": (2, 1), "noise": None} | fields
    return FIVE.replace(memory=SharedLlmSection(**fields).memory(FIVE))


def cepe(layers):
    states = FIVE.replace(num_layers=1, tie_embeddings=True, max_length=8)
    return FIVE.replace(memory=Cepe(states, layers))


@functools.cache
def random(config):
    """Parameters that all matter, those of adapters and of what reads included."""
    shapes = jax.eval_shape(Decoder(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    numbers = np.random.default_rng(0)

    def one(leaf):
        spread = 0.2 * numbers.standard_normal(leaf.shape) + (len(leaf.shape) == 1)
        return spread.astype(leaf.dtype)

    return jax.tree.map(one, shapes["params"])


def lengths(config, params):
    """Of the scans over layers, the first one first."""
    tokens, chunks = text(0, 2, 6), text(1, 2, 2, 8)

    def decode(params):
        model, there = Decoder(config), np.ones(chunks.shape, bool)
        memory = model.apply({"params": params}, chunks, there, method="encode")
        return lambda params: model.apply({"params": params}, tokens, memory=memory).hidden

    found = jax.make_jaxpr(lambda params: decode(params)(params))(params)
    return [e.params["length"] for e in found.jaxpr.eqns if e.primitive.name == "scan"][1:]


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradients(config, mesh, own, frozen):
    tokens, chunks = text(0, 8, 6), text(1, 8, 2, 8)
    mask = jnp.ones(chunks.shape, bool).at[0, 0, :3].set(False)

    def loss(own):
        params = nest(flatten(own) | flatten(frozen))
        model = Decoder(config, mesh)
        memory = model.apply({"params": params}, chunks, mask, method="encode")
        hidden = model.apply({"params": params}, tokens, memory=memory).hidden
        return (hidden * jnp.cos(jnp.arange(hidden.size).reshape(hidden.shape))).sum(), hidden

    (_, hidden), grads = jax.value_and_grad(loss, has_aux=True)(own)
    return hidden, grads


def assert_alike(found, wanted):
    """Up to the order of float32 sums, whose rounding grows with what is summed."""
    assert_close(found, wanted, 1e-5 * np.abs(wanted).max())


CASES = {
    "bottom": (shared().replace(remat="dots"), [2, 3]),
    "top": (shared(placement="top", layers=3), [2, 3]),
    "interleaved, adapters": (shared(placement="interleaved").replace(lora=LoRA(2)), [2]),
    "cepe": (cepe(3).replace(remat="full"), [2, 3]),
}


@pytest.mark.parametrize(("config", "wanted"), CASES.values(), ids=CASES)
def test_neighbours_that_are_alike_are_one_compiled_layer(config, wanted):
    params, apart = random(config), config.replace(scan_layers=False)
    assert jax.tree.structure(params) == jax.tree.structure(random(apart))
    assert lengths(config, params) == wanted and lengths(apart, params) == []


@pytest.mark.parametrize("config", [shared(), cepe(3)], ids=["shared_llm", "cepe"])
def test_adapters_are_for_the_decoder_and_not_for_what_reads_or_encodes_the_memory(config):
    params = random(config.replace(lora=LoRA(2, targets=("query", "out"))))
    adapters = {path.split("/")[1] for path in flatten(params) if "/lora_" in path}
    assert adapters == {"attention"}


def test_texts_come_out_the_same():
    config = shared().replace(num_layers=3)
    tokens, chunks = text(0, 2, 6), text(1, 2, 2, 8)

    @jax.jit
    def both(params):
        def hidden(config):
            model, there = Decoder(config), jnp.ones(chunks.shape, bool)
            memory = model.apply({"params": params}, chunks, there, method="encode")
            return model.apply({"params": params}, tokens, memory=memory).hidden

        return hidden(config), hidden(config.replace(scan_layers=False))

    assert lengths(config, random(config)) == [2]
    assert_close(*both(random(config)), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("config", [config for config, _ in CASES.values()], ids=CASES)
def test_gradients_are_those_of_layers_one_by_one(config):
    params, apart = random(config), config.replace(scan_layers=False)
    (hidden, grads), others = (gradients(c, None, params, {}) for c in (config, apart))
    assert_close(hidden, others[0], 1e-5)
    jax.tree.map(assert_alike, grads, others[1])
    assert all(np.abs(leaf).max() > 0 for path, leaf in flatten(grads).items() if "layers_" in path)


def mixed():
    """A model in bfloat16 of which two layers are trained and so float32."""
    config = shared(placement="top").replace(param_dtype="bfloat16")
    own, frozen = split(random(config), lambda path: path.startswith(("layers_1/", "layers_2/")))
    return config, jax.tree.map(lambda leaf: leaf.astype(np.float32), own), frozen


def test_layers_of_another_precision_are_a_run_of_their_own():
    config, own, frozen = mixed()
    # And the first layer alone.
    assert lengths(config, nest(flatten(own) | flatten(frozen))) == [2, 2]


@pytest.mark.slow
def test_gradients_of_layers_of_another_precision_are_the_same():
    config, *params = mixed()
    found, wanted = (
        gradients(c, None, *params) for c in (config, config.replace(scan_layers=False))
    )
    jax.tree.map(assert_alike, found, wanted)


@pytest.mark.slow
def test_groups_on_a_mesh_compute_the_same():
    config = shared()
    own, frozen = split(random(config), lambda path: "memory/" in path or "layers_4" in path)
    wanted = gradients(config, None, own, frozen)
    mesh = make_mesh(Mesh(2, 2, 2, 1))
    own, frozen = (jax.device_put(tree, param_shardings(mesh, tree)) for tree in (own, frozen))
    found = gradients(config, mesh, own, frozen)
    jax.tree.map(assert_alike, found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("config", [shared(), cepe(3)], ids=["shared_llm", "cepe"])
def test_a_cache_is_filled_layer_by_layer_with_the_same_numbers(config):
    params, tokens, chunks = random(config), text(0, 2, 6), text(1, 2, 2, 8)

    @jax.jit
    def both(params):
        model = Decoder(config)
        memory = model.apply(
            {"params": params}, chunks, jnp.ones(chunks.shape, bool), method="encode"
        )
        whole = model.apply({"params": params}, tokens, memory=memory).hidden
        cache, parts = cache_lib.create(config, 2, 6), []
        for part in (tokens[:, :4], tokens[:, 4:5], tokens[:, 5:]):
            output = model.apply({"params": params}, part, memory=memory, cache=cache)
            hidden, cache = output.hidden, output.cache
            parts.append(hidden)
        return whole, jnp.concatenate(parts, 1)

    assert_close(*both(params), 1e-5)


def test_groups_end_where_readers_shapes_or_dtypes_change_and_at_offloaded_layers():
    plain, other = {"a": np.zeros(2)}, {"a": np.zeros(3)}
    away = {"a": Offloaded(np.zeros(2))}
    reads = [True, True, False, False, False, False, False]
    layers = [plain, plain, plain, plain, other, away, away]
    found = [(0, 2), (2, 4), (4, 5), (5, 6), (6, 7)]
    groups = layer_groups.group_layers(layers, reads)
    assert [(group.start, group.stop) for group, _ in groups] == found
    layers = [plain, {"a": np.zeros(2, np.float32)}]
    assert layer_groups.group_layers(layers, [True] * 2) == layer_groups.one_group_per_layer(2)
