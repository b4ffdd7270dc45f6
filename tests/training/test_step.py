"""One update: accumulation, microbatches, guard, averages, meshes, adapters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.errors import InputError
from lcjax.models import Decoder, LayerKind, ModelConfig
from lcjax.models import lora as lora_lib
from lcjax.models.lora import LoRA
from lcjax.parallel.digest import weights_digest
from lcjax.parallel.sharding import Mesh, batch_sharding, make_mesh, param_shardings
from lcjax.rope import E2LLM, Clex, Default, NoRotation
from lcjax.rope.positions import Bf16Positions, ClexPositions, E2Positions, PlainPositions
from lcjax.training import optim
from lcjax.training.objective import language_model
from lcjax.training.state import abstract_state, init_state, new_adapters
from lcjax.training.step import accumulate, make_eval_step, microbatches, train_step
from lcjax.training.train_config import TrainSection, trainable
from lcjax.tree import flatten, split, union

CONFIG = ModelConfig(40, 16, 24, 2, 2, 2, 8, 32)
ONE = Mesh(fsdp=1)
PLAIN = language_model(CONFIG, PlainPositions())
LORA = dataclasses.replace(CONFIG, lora=LoRA(rank=4))
losses = jax.jit(
    lambda config, *args: language_model(config, PlainPositions())(*args), static_argnums=0
)


pytestmark = pytest.mark.usefixtures("compiled_once")


def one_device():
    return make_mesh(ONE, jax.devices()[:1])


@functools.cache
def random_params(config=CONFIG):
    init = jax.jit(lambda key: Decoder(config).init(key, jnp.zeros((1, 8), jnp.int32))["params"])
    return init(jax.random.key(0))


def random_batch(seed, rows=8, length=16):
    """Rows of two documents, with padding of different length in each row."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, CONFIG.vocab_size, (rows, length + 1))
    filled = np.arange(length) < rng.integers(length // 2, length + 1, (rows, 1))
    second = np.arange(length) >= 6
    segments = np.where(filled, 1 + second, 0)
    positions = np.where(filled, np.arange(length) - 6 * second, 0)
    return {
        "tokens": jnp.asarray(np.where(filled, tokens[:, :-1], 0), jnp.int32),
        "targets": jnp.asarray(tokens[:, 1:], jnp.int32),
        "segments": jnp.asarray(segments, jnp.int32),
        "positions": jnp.asarray(positions, jnp.int32),
        "weights": jnp.asarray(filled & (np.arange(length) != 5), jnp.float32),
    }


@functools.cache
def compiled(config, settings):
    step = functools.partial(
        train_step,
        objective=language_model(config, settings.positions),
        optimizer=optim.optimizer(settings),
        schedule=optim.schedule(settings),
        accumulation=settings.accumulation,
        ema_decay=settings.ema,
        halt_after=2,
    )
    return jax.jit(step, donate_argnums=0)


def train(mesh, batches, *, params=None, frozen=None, config=CONFIG):
    """(final state, info of each step) of a few steps on `mesh`; two bad ones in a row halt."""
    settings = TrainSection(
        lr=1e-2, warmup_steps=0, schedule="constant", batch_size=8, accumulation=2, ema=0.9
    )
    params = random_params() if params is None else params
    params = jax.device_put(jax.tree.map(jnp.copy, params), param_shardings(mesh, params))
    state = init_state(params, optim.optimizer(settings), mesh, seed=0, ema=True)
    infos, num_nonfinite, step = [], jnp.int32(0), compiled(config, settings)
    for batch in batches:
        batch = jax.device_put(batch, batch_sharding(mesh))
        state, info = step(state, frozen or {}, batch, num_nonfinite)
        num_nonfinite = info["num_nonfinite"]
        infos.append(jax.device_get(info))
    return state, infos


def many_steps(settings, batches):
    """(final state, infos, values before the last step) under `settings`."""
    mesh, params = one_device(), jax.tree.map(jnp.copy, random_params())
    state = init_state(params, optim.optimizer(settings), mesh, seed=0, ema=True)
    step = functools.partial(
        train_step, objective=PLAIN, optimizer=optim.optimizer(settings),
        schedule=optim.schedule(settings), ema_decay=0.9, spike=settings.spike,
    )  # fmt: skip
    step, infos = jax.jit(step, donate_argnums=0), []
    for batch in batches:
        if len(infos) == len(batches) - 1:
            before = jax.tree.map(np.array, values(state))
        state, info = step(state, {}, batch)
        infos.append(jax.device_get(info))
    return state, infos, before


QUICK = TrainSection(lr=1e-3, warmup_steps=0, schedule="constant", batch_size=8)


def calm_and_wild():
    """(batches of which the last has an unusual gradient, how many times as long it is)."""
    calm, wild = random_batch(0), random_batch(1)
    wild = wild | {"targets": (wild["targets"] + wild["tokens"]) % CONFIG.vocab_size}
    batches = [calm] * 21 + [wild]
    last = many_steps(QUICK, batches)[1][-1]
    return batches, last["grad_norm"] / last["grad_norm_ema"]


@pytest.mark.slow
def test_a_gradient_much_longer_than_usual_changes_nothing_but_the_count():
    batches, jump = calm_and_wild()
    assert jump > 1.1
    settings = dataclasses.replace(QUICK, spike=float(1 + (jump - 1) / 2))
    after, infos, before = many_steps(settings, batches)
    assert infos[-1]["spike"] and infos[-1]["finite"] and infos[-1]["num_nonfinite"] == 0
    assert after.skipped == 1 and after.step == 22
    jax.tree.map(np.testing.assert_array_equal, values(after), before)
    assert not any(info["spike"] for info in infos[:-1])
    # It counts for the average, or gradients that have grown for good would stop the run.
    assert after.grad_norm_ema > infos[-1]["grad_norm_ema"]


@pytest.mark.slow
def test_a_gradient_that_is_not_long_enough_is_taken():
    batches, jump = calm_and_wild()
    patient = dataclasses.replace(QUICK, spike=float(jump * 2))
    assert not many_steps(patient, batches)[1][-1]["spike"]


def test_the_norm_has_a_running_average_that_a_spike_enters_clipped():
    """The loss is slope * w, so the gradient norm of every step is its batch's slope."""
    settings = dataclasses.replace(QUICK, spike=3.0)
    optimizer = optim.optimizer(settings)
    params = {"w": {"kernel": jnp.ones(1)}}
    state = init_state(params, optimizer, one_device(), seed=0, ema=False)
    step = functools.partial(
        train_step, objective=lambda params, _, batch, key: (
            (batch["slope"] * params["w"]["kernel"]).sum(), batch["weights"].sum(), {}
        ),
        optimizer=optimizer, schedule=optim.schedule(settings), spike=settings.spike,
        halt_after=99,
    )  # fmt: skip
    step = jax.jit(step)
    slopes = np.random.default_rng(0).uniform(1, 2, 24)
    slopes[[4, 20, 22]] = 9.0, 8.0, np.nan  # while the average is not reliable; a spike; no number
    average, num_skipped = 0.0, 0
    for number, slope in enumerate(slopes):
        state, info = step(state, {}, {"slope": jnp.float32([slope]), "weights": jnp.ones(1)})
        np.testing.assert_allclose(info["grad_norm_ema"], average, rtol=1e-5)
        is_spike = number >= 20 and slope > 3 * average
        assert info["spike"] == is_spike == (number == 20)
        num_skipped += is_spike or np.isnan(slope)
        if not np.isnan(slope):
            norm = min(slope, 3 * average) if number >= 20 else slope
            average = norm if number == 0 else 0.98 * average + 0.02 * norm
        np.testing.assert_allclose(state.grad_norm_ema, average, rtol=1e-5)
        assert state.skipped == num_skipped


sums = jax.jit(accumulate, static_argnums=(0, 5))


def assert_close(actual, expected, **tolerance):
    actual, expected = flatten(actual), flatten(expected)
    assert actual.keys() == expected.keys()
    for path, leaf in actual.items():
        np.testing.assert_allclose(leaf, expected[path], err_msg=path, **tolerance)


def test_accumulation_equals_one_large_batch():
    count = 2
    batch, key = random_batch(0), jax.random.key(0)
    loss, tokens, grads, _ = sums(PLAIN, random_params(), {}, batch, key, 1)
    shares = batch["weights"].reshape(8 // count, count, -1).sum((0, 2))
    assert len(set(shares.tolist())) > 1  # microbatches of unequal weight, the hard case
    loss_parts, tokens_parts, grads_parts, _ = sums(PLAIN, random_params(), {}, batch, key, count)
    np.testing.assert_allclose(loss_parts, loss, rtol=1e-6)
    assert tokens_parts == tokens == batch["weights"].sum()
    assert_close(grads_parts, grads, rtol=2e-4, atol=1e-7)


def test_the_loss_is_the_mean_over_all_weights_of_the_batch():
    batch = random_batch(1)
    nll, weights = total(random_params(), batch)
    loss, tokens, *_ = sums(PLAIN, random_params(), {}, batch, jax.random.key(0), 2)
    np.testing.assert_allclose(loss, nll / weights, rtol=1e-6)
    assert tokens == weights


def test_microbatches_take_rows_with_a_stride():
    rows = microbatches({"x": jnp.arange(8)}, 2)["x"]
    np.testing.assert_array_equal(rows, [[0, 2, 4, 6], [1, 3, 5, 7]])


def test_a_batch_of_padding_changes_nothing():
    batch = random_batch(0) | {"weights": jnp.zeros((8, 16))}
    state, (info,) = train(one_device(), [batch])
    assert info["loss"] == 0 and info["finite"]
    assert_close(state.params, random_params(), rtol=0)


@pytest.mark.slow
def test_two_by_two_by_two_devices_have_the_losses_of_one():
    batches = [random_batch(seed) for seed in range(2)]
    _, one = train(one_device(), batches)
    state, eight = train(make_mesh(Mesh(2, 2, 2)), batches)
    for a, b in zip(one, eight, strict=True):
        np.testing.assert_allclose(b["loss"], a["loss"], rtol=1e-5)
        np.testing.assert_allclose(b["grad_norm"], a["grad_norm"], rtol=1e-4)
    kernel = state.params["layers"]["mlp"]["up"]["kernel"]
    assert len({str(shard.index) for shard in kernel.addressable_shards}) == 4  # fsdp x tensor


@pytest.mark.slow
def test_moments_lie_where_their_parameters_lie():
    mesh = make_mesh(Mesh(2, 2, 2))
    state, _ = train(mesh, [random_batch(0)])
    for path, moment in flatten(state.opt_state[1].mu).items():
        assert moment.sharding == flatten(state.params)[path].sharding, path


def test_the_average_of_weights_is_decayed_after_every_step():
    first, second = (train(one_device(), [random_batch(i) for i in range(n)])[0] for n in (1, 2))
    params = jax.device_get((random_params(), first.params, second.params))
    expected = jax.tree.map(lambda p, q, r: 0.9 * (0.9 * p + 0.1 * q) + 0.1 * r, *params)
    assert_close(second.ema, expected, rtol=1e-5, atol=1e-7)


def test_a_step_that_is_not_finite_only_counts():
    bad = random_batch(1)
    bad["weights"] = bad["weights"].at[0, 0].set(jnp.inf)
    good, _ = train(one_device(), [random_batch(0)])
    state, infos = train(one_device(), [random_batch(0), bad])
    assert [bool(info["finite"]) for info in infos] == [True, False]
    assert int(state.step) == 2 and int(state.skipped) == 1
    assert_close(state.params, good.params, rtol=0)
    assert_close(state.ema, good.ema, rtol=0)
    assert int(state.opt_state[1].count) == 1


def test_after_as_many_bad_steps_as_allowed_nothing_changes_any_more():
    """The loop hears of a bad step when the next one has begun."""
    good, bad = random_batch(0), random_batch(1)
    bad["weights"] = bad["weights"].at[0, 0].set(jnp.inf)
    alone, _ = train(one_device(), [good, bad])
    # One bad step is skipped; the second in a row halts, and the good one after it is not taken.
    state, infos = train(one_device(), [good, bad, bad, good])
    assert [int(info["num_nonfinite"]) for info in infos] == [0, 1, 2, 3]
    assert (int(state.step), int(state.skipped)) == (2, 1)
    jax.tree.map(np.testing.assert_array_equal, values(state), values(alone))
    # A good step in between starts the count anew.
    state, infos = train(one_device(), [good, bad, good, bad])
    assert [int(info["num_nonfinite"]) for info in infos] == [0, 1, 0, 1]
    assert (int(state.step), int(state.skipped)) == (4, 2)


def values(state):
    return state.params, state.opt_state, state.ema


def test_validation_takes_no_more_rows_at_once_than_training_and_sums_the_same():
    row_counts, batch = [], random_batch(2)

    def watched(trained, frozen, micro, key):
        row_counts.append(micro["tokens"].shape[0])
        return PLAIN(trained, frozen, micro, key)

    actual = jax.jit(make_eval_step(watched, accumulation=4))(random_params(), {}, batch)
    nll, tokens = total(random_params(), batch)
    assert set(row_counts) == {2}
    np.testing.assert_allclose(actual["nll"], nll, rtol=1e-6)
    assert actual["tokens"] == tokens


def test_the_state_to_restore_into_is_that_of_a_new_run():
    mesh, optimizer = make_mesh(Mesh(2, 2, 2)), optim.optimizer(TrainSection())
    half = jax.tree.map(lambda leaf: np.asarray(leaf, jnp.bfloat16), random_params())
    half = jax.device_put(half, param_shardings(mesh, half))
    expected = abstract_state(half, optimizer, mesh, seed=3, ema=True)
    state = init_state(half, optimizer, mesh, seed=3, ema=True)
    assert jax.tree.structure(expected) == jax.tree.structure(state)
    for shape, leaf in zip(jax.tree.leaves(expected), jax.tree.leaves(state), strict=True):
        assert (shape.shape, shape.dtype, shape.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)
    assert all(leaf.dtype == jnp.float32 for leaf in flatten(state.params).values())


def total(params, batch):
    """(sum of losses, sum of weights) of the plain model."""
    return losses(CONFIG, params, {}, batch, jax.random.key(0))[:2]


@functools.cache
def lora_setup():
    params = union(random_params(), new_adapters(Decoder(LORA).init, one_device(), seed=0))
    return split(params, trainable(flatten(params), ("lora",)))


def test_new_adapters_leave_the_loss_as_it_was():
    trained, frozen = lora_setup()
    batch, key = random_batch(0), jax.random.key(0)
    adapted = losses(LORA, trained, frozen, batch, key)[0]
    np.testing.assert_allclose(adapted, total(random_params(), batch)[0], rtol=1e-6)


def test_training_adapters_changes_only_adapters_and_merging_keeps_the_loss():
    trained, frozen = lora_setup()
    before = weights_digest(frozen)
    batches = [random_batch(seed) for seed in range(3)]
    state, infos = train(one_device(), batches, params=trained, frozen=frozen, config=LORA)
    assert infos[-1]["loss"] != infos[0]["loss"] and weights_digest(frozen) == before
    assert all("lora_" in path for path in flatten(state.params))
    assert state.opt_state[1].mu.keys() == trained.keys() == {"layers"}
    for path, leaf in flatten(state.params).items():
        assert np.abs(np.asarray(leaf) - np.asarray(flatten(trained)[path])).max() > 0, path
    adapted = losses(LORA, state.params, frozen, batches[0], jax.random.key(0))[0]
    merged = jax.jit(lora_lib.merge, static_argnums=1)(union(state.params, frozen), LORA.lora)
    assert flatten(merged).keys() == flatten(random_params()).keys()
    np.testing.assert_allclose(total(merged, batches[0])[0], adapted, rtol=1e-5)


def test_an_adapter_step_computes_no_gradient_of_frozen_weights():
    trained, frozen = lora_setup()
    objective = language_model(LORA, PlainPositions())
    # The result of a product with a weight's shape, [D, F] or the head's [D, V], is its gradient.
    gradients = ["-> tensor<16x24xf32>", "-> tensor<16x40xf32>"]

    def products(*args):
        text = sums.lower(objective, *args, random_batch(0), jax.random.key(0), 1).as_text()
        lines = [line for line in text.splitlines() if "dot_general" in line]
        return [any(shape in line for line in lines) for shape in gradients]

    assert products(union(trained, frozen), {}) == [True, True]
    assert products(trained, frozen) == [False, False]


def test_the_gradient_norm_that_is_reported_is_that_of_the_whole_batch():
    batch = random_batch(3)
    grads = sums(PLAIN, random_params(), {}, batch, jax.random.key(0), 1)[2]
    _, (info,) = train(one_device(), [batch])
    norm = np.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in flatten(grads).values()))
    np.testing.assert_allclose(info["grad_norm"], norm, rtol=1e-5)


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (E2LLM(theta=1e4, original_length=32), E2Positions(max_scale=4)),
        (Clex(theta=1e4, original_length=8, max_factor=4), ClexPositions()),
    ],
)
def test_sampled_positions_reach_the_gradient(rope, positions):
    config = dataclasses.replace(CONFIG, rope=rope)
    params = jax.eval_shape(
        lambda key: Decoder(config).init(key, jnp.zeros((1, 8), jnp.int32))["params"],
        jax.random.key(0),
    )
    objective = language_model(config, positions)
    loss, _, grads, _ = jax.eval_shape(
        lambda *args: accumulate(objective, *args, 2),
        params,
        {},
        random_batch(0),
        jax.random.key(0),
    )
    assert loss.shape == ()
    assert flatten(grads).keys() == flatten(params).keys()


def test_sampled_positions_raise_input_error_where_layers_have_a_rope_of_their_own():
    e2 = dataclasses.replace(CONFIG, rope=E2LLM(theta=1e4, original_length=32))
    mixed = (LayerKind(), LayerKind(rope=Default(theta=1e4)))
    with pytest.raises(InputError, match=r"positions.type=e2_llm .* rope of their own"):
        language_model(e2.replace(layers=mixed), E2Positions(max_scale=4))
    with pytest.raises(InputError, match=r"positions.type=clex .* rope of their own"):
        language_model(CONFIG.replace(layers=mixed), ClexPositions())
    language_model(CONFIG.replace(layers=mixed), Bf16Positions())
    without = (LayerKind(), LayerKind(rope=NoRotation()))
    language_model(e2.replace(layers=without), E2Positions(max_scale=4))
