"""Offloading changes no number and no checkpoint, and needs less memory of the device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from installed_compilers import needs_libtpu
from training_support import quick_compilation, tiny, write_corpus

from lcjax import checkpoints, cost
from lcjax import config as config_lib
from lcjax.cost.chips import Topology
from lcjax.cost.compilers import devices
from lcjax.cost.program import program_cost
from lcjax.errors import InputError
from lcjax.models import Decoder, ModelConfig, preset
from lcjax.models.layers import box_offloaded, unbox_offloaded
from lcjax.models.lora import LoRA
from lcjax.parallel.device_memory import host_shardings, is_offloaded, to_host
from lcjax.parallel.sharding import Mesh, batch_sharding, make_mesh, param_shardings, replicated
from lcjax.rope.positions import PlainPositions
from lcjax.training import TrainConfig, compile_only, optim, run
from lcjax.training.objective import language_model
from lcjax.training.state import init_state, state_shardings
from lcjax.training.step import accumulate, train_step
from lcjax.training.train_config import EvalSection, TrainSection, trainable
from lcjax.tree import flatten, nest, split

CONFIG = ModelConfig(40, 16, 24, 2, 2, 2, 8, 32, remat="full")
ONE, EIGHT = Mesh(fsdp=1), Mesh(data=2, fsdp=2, tensor=2)
SETTINGS = TrainSection(
    lr=1e-2, warmup_steps=0, schedule="constant", batch_size=8, ema=0.9, weight_decay=0.1, clip=0.5
)


def batch(seed, rows=8, length=16):
    tokens = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (rows, length + 1))
    places = np.broadcast_to(np.arange(length), (rows, length))
    return {
        "tokens": jnp.asarray(tokens[:, :-1], jnp.int32),
        "targets": jnp.asarray(tokens[:, 1:], jnp.int32),
        "segments": jnp.ones((rows, length), jnp.int32),
        "positions": jnp.asarray(places, jnp.int32),
        "weights": jnp.ones((rows, length), jnp.float32),
    }


def offload_all(tree):
    return nest({path: to_host(path, leaf) for path, leaf in flatten(tree).items()})


def steps(offload, *, config=CONFIG, shape=ONE, rules=("all",), accumulation=2, bad=(), count=2):
    """(final state, losses of the updates, the last batch, the step's frozen weights)."""
    mesh = make_mesh(shape, None if shape == EIGHT else jax.devices()[:1])
    init = jax.jit(lambda key: Decoder(config).init(key, jnp.zeros((1, 8), jnp.int32))["params"])
    params = init(jax.random.key(0))
    params = jax.device_put(params, param_shardings(mesh, params))
    params, frozen = split(params, trainable(flatten(params), rules))
    if offload == "parameters":
        params, frozen = offload_all(params), offload_all(frozen)
    optimizer = optim.optimizer(SETTINGS)
    state = init_state(params, optimizer, mesh, seed=0, ema=True, offload=offload)
    objective = language_model(config, PlainPositions(), mesh=mesh)
    step = functools.partial(
        train_step, objective=objective, optimizer=optimizer, schedule=optim.schedule(SETTINGS),
        accumulation=accumulation, ema_decay=SETTINGS.ema, halt_after=99,
    )  # fmt: skip
    layout = state_shardings(state, mesh, offload), replicated(mesh)
    step, losses = jax.jit(step, donate_argnums=0, out_shardings=layout), []
    for number in range(count):
        rows = batch(number)
        if number in bad:
            rows["weights"] = rows["weights"].at[0, 0].set(jnp.inf)
        state, info = step(state, frozen, jax.device_put(rows, batch_sharding(mesh)))
        losses.append(float(info["loss"]))
    return state, losses


def on_host(tree):
    return {path for path, leaf in flatten(tree).items() if is_offloaded(leaf)}


def assert_same_numbers(resident, offloaded):
    """Bit for bit, after several updates."""
    np.testing.assert_array_equal(resident[1], offloaded[1])
    expected, actual = (
        jax.device_get((s.params, s.opt_state, s.ema, s.step, s.skipped))
        for s, _ in (resident, offloaded)
    )
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def toy(trained, frozen, batch, key):
    """A loss of all weights, so small that its step is compiled at once."""
    weights = flatten(unbox_offloaded(box_offloaded(trained)))
    loss = sum(jnp.sum(jnp.sin(leaf * (i + 2))) for i, leaf in enumerate(weights.values()))
    return loss * batch["scale"].mean(), batch["weights"].sum(), {}


def toy_steps(offload):
    mesh, keys = make_mesh(ONE, jax.devices()[:1]), iter(jax.random.split(jax.random.key(0), 4))
    shapes = {
        "embed/embedding": (5, 4),
        "final_norm/scale": (4,),
        "layers/mlp/up/kernel": (3, 4, 6),
        "layers/mlp_norm/scale": (3, 4),
    }
    params = nest({path: jax.random.normal(next(keys), shape) for path, shape in shapes.items()})
    params = jax.device_put(params, param_shardings(mesh, params))
    params = offload_all(params) if offload == "parameters" else params
    optimizer = optim.optimizer(SETTINGS)
    state = init_state(params, optimizer, mesh, seed=0, ema=True, offload=offload)
    step = functools.partial(
        train_step, objective=toy, optimizer=optimizer, schedule=optim.schedule(SETTINGS),
        ema_decay=SETTINGS.ema, halt_after=99,
    )  # fmt: skip
    layout = state_shardings(state, mesh, offload), replicated(mesh)
    step, losses = jax.jit(step, donate_argnums=0, out_shardings=layout), []
    for scale in (1.0, jnp.inf, 3.0):  # the second one is skipped
        rows = {"weights": jnp.ones((2, 2)), "scale": jnp.full((2, 2), scale)}
        state, info = step(state, {}, rows)
        losses.append(float(info["loss"]))
    return state, losses


def test_offloaded_updates_equal_updates_on_the_device():
    resident, moments, weights = map(toy_steps, ("none", "optimizer", "parameters"))
    assert_same_numbers(resident, moments)
    assert_same_numbers(resident, weights)
    assert (int(resident[0].step), int(resident[0].skipped)) == (3, 1)
    large = {"embed/embedding", "layers/mlp/up/kernel"}
    for (state, _), params, average in ((resident, 0, 0), (moments, 0, 1), (weights, 1, 1)):
        assert on_host(state.params) == (large if params else set())
        for tree in (state.ema, state.opt_state[1].mu, state.opt_state[1].nu):
            assert on_host(tree) == (large if average else set())


@pytest.mark.slow
def test_weights_on_the_host_change_no_loss_and_no_gradient(tmp_path):
    init = jax.jit(lambda key: Decoder(CONFIG).init(key, jnp.zeros((1, 8), jnp.int32))["params"])
    objective = language_model(CONFIG, PlainPositions())
    with quick_compilation(tmp_path):
        params, summed = init(jax.random.key(0)), jax.jit(accumulate, static_argnums=(0, 5))
        resident, offloaded = (
            summed(objective, weights, {}, batch(0), jax.random.key(0), 1)[::2]
            for weights in (params, offload_all(params))
        )
    assert not on_host(offloaded[1])
    jax.tree.map(np.testing.assert_array_equal, offloaded, resident)


@pytest.mark.slow
def test_weights_on_the_host_change_no_number():
    resident, offloaded = steps("none", accumulation=1), steps("parameters", accumulation=1)
    assert_same_numbers(resident, offloaded)
    state, large = offloaded[0], {p for p in flatten(resident[0].params) if "norm" not in p}
    for tree in (state.params, state.ema, state.opt_state[1].mu, state.opt_state[1].nu):
        assert on_host(tree) == large
    assert not any(on_host(tree) for tree in (resident[0].params, resident[0].ema))


@pytest.mark.slow
def test_moments_on_the_host_change_no_number():
    resident, offloaded = steps("none"), steps("optimizer")
    assert_same_numbers(resident, offloaded)
    assert not on_host(offloaded[0].params) and on_host(offloaded[0].ema)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {"shape": EIGHT}),
        ({"scan_layers": False}, {"accumulation": 1}),
        ({"tie_embeddings": True, "remat": "dots"}, {"accumulation": 1}),
        # One embedding alone would be divided by Adam's corrections where a model's parameters
        # together are multiplied by their inverse: the compiler's choice, and a last bit.
        ({"lora": LoRA(rank=2)}, {"rules": ("lora", "embeddings", "norms")}),
        ({"remat": "attention"}, {"bad": (1,), "count": 3}),
    ],
)
def test_offloading_is_exact_on_meshes_and_other_models(changes, options):
    results = [
        steps(offload, config=CONFIG.replace(**changes), **options)
        for offload in ("none", "parameters")
    ]
    assert_same_numbers(*results)
    assert int(results[1][0].skipped) == len(options.get("bad", ()))


def test_gradients_stay_on_the_device():
    """Made in the scan over layers, they would be sent to the host and back for the update."""
    shapes = jax.eval_shape(
        lambda key: Decoder(CONFIG).init(key, jnp.zeros((1, 8), jnp.int32))["params"],
        jax.random.key(0),
    )
    mesh = make_mesh(EIGHT)
    layout = host_shardings(shapes, param_shardings(mesh, shapes))
    params = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, layout
    )
    objective = language_model(CONFIG, PlainPositions(), mesh=mesh)
    traced = jax.jit(accumulate, static_argnums=(0, 5)).trace(
        objective, params, {}, batch(0), jax.random.key(0), 2
    )
    text = str(traced.jaxpr)
    assert "MemorySpace.Device" in text and "MemorySpace.Host" not in text


def test_unsupported_offloading_raises_input_error():
    with pytest.raises(InputError, match="set model.remat to full, attention, dots or offload"):
        config_lib.parse(TrainConfig, ["--train.offload=parameters", "--model.remat=none"])
    with pytest.raises(InputError, match="train.offload.*optimizer"):
        config_lib.parse(TrainConfig, ["--train.offload=true"])


@pytest.mark.slow
def test_the_estimate_counts_the_memory_of_a_device():
    llama, mesh = preset("llama2-7b").replace(remat="full"), Mesh(fsdp=4)
    none, moments, weights = (
        cost.training_memory(llama, 512, 4, mesh, offload=offload)
        for offload in ("none", "optimizer", "parameters")
    )
    layer, outside = 202_383_360, 2 * 32_000 * 4096  # numbers; vectors are left out
    assert moments.weights == none.weights and moments.gradients == weights.gradients
    assert moments.optimizer == pytest.approx(8 * (outside + 2 * layer) / 4, rel=0.01)
    assert weights.weights == pytest.approx(4 * (outside + 2 * layer) / 4, rel=0.01)
    assert (none.host, weights.host) == (0, pytest.approx(12 * 6_738_415_616 / 4, rel=0.01))
    assert str(weights).endswith("20.2 GB on its host")


@pytest.mark.slow
def test_a_run_saves_resumes_scores_and_exports_offloaded_arrays(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    results = {}
    for offload in ("none", "parameters"):
        config = tiny(
            tmp_path / offload, corpus, offload=offload, steps=4, ema=0.9, save_every=2,
            data={"holdout": 0.1},
        )  # fmt: skip
        config = config.replace(eval=EvalSection(every=2, batches=1))
        if offload != "none":  # its first half as a run of its own, from whose end it goes on
            half = dataclasses.replace(config.train, steps=2, schedule="constant")
            run(config.replace(train=half))
            config = config.replace(
                run=dataclasses.replace(config.run, accept=("train.steps", "train.schedule"))
            )
        constant = dataclasses.replace(config.train, schedule="constant")
        metrics = run(config.replace(train=constant))
        params, *_ = checkpoints.load(tmp_path / offload / "model")
        results[offload] = metrics["loss"], metrics["validation_loss"], params
    (loss, validation, params), (other_loss, other_validation, other_params) = results.values()
    np.testing.assert_allclose((other_loss, other_validation), (loss, validation), rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), other_params, params)


@pytest.mark.slow
@needs_libtpu
def test_the_tpu_compiler_keeps_one_offloaded_layer_on_the_device(enable_xla_optimizations):
    topology = Topology.parse("v5e:2x2")
    mesh = make_mesh(Mesh(), devices(topology))
    model = ModelConfig(512, 1024, 2816, 16, 8, 8, 128, 512, dtype="bfloat16", remat="full")
    results = {}
    for offload in ("none", "parameters"):
        config = config_lib.parse(
            TrainConfig,
            [
                *("--model.preset=tiny", "--data.length=512", "--train.batch_size=4"),
                f"--train.offload={offload}",
            ],
        )
        results[offload] = program_cost(compile_only.lower(config, model, mesh), topology.chip)
    weights = cost.estimate(model, 512).parameters  # the bytes of a float32 copy on 4 devices
    none, offloaded = results.values()
    assert none.host == 0 and offloaded.host == pytest.approx(3 * weights, rel=0.02)
    assert none.peak_memory - offloaded.peak_memory > 2.5 * weights
    assert offloaded.arguments < 0.02 * weights
