"""Learning rates at known points, clipping, decay by path, and the average of the weights."""

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lcjax.checkpoints.build import ModelSection
from lcjax.errors import InputError
from lcjax.training import optim
from lcjax.training.train_config import Rate, RunSection, TrainConfig, TrainSection
from lcjax.tree import flatten, nest


def rates(*steps, **settings):
    schedule = jax.jit(optim.schedule(TrainSection(**settings)))
    return [float(schedule(step)) for step in steps]


def test_warmup_rises_by_equal_steps_and_the_first_update_already_moves():
    actual = rates(0, 1, 3, 4, steps=10, warmup_steps=4, lr=8e-3, schedule="constant")
    np.testing.assert_allclose(actual, [2e-3, 4e-3, 8e-3, 8e-3], rtol=1e-6)


def test_cosine_is_halfway_in_the_middle_and_ends_at_its_floor():
    settings = {"steps": 100, "warmup_steps": 20, "lr": 1.0, "min_lr": 0.1, "schedule": "cosine"}
    actual = rates(20, 60, 100, **settings)
    np.testing.assert_allclose(actual, [1.0, 0.55, 0.1], rtol=1e-6)


def test_linear_falls_to_its_floor():
    actual = rates(0, 25, 50, steps=50, warmup_steps=0, lr=2.0, min_lr=0.5, schedule="linear")
    np.testing.assert_allclose(actual, [2.0, 1.5, 1.0], rtol=1e-6)


def test_lceg_warms_up_logarithmically_and_decays_linearly_to_zero():
    settings = {"steps": 120, "warmup_steps": 20, "lr": 2e-5, "schedule": "lceg"}
    actual = rates(0, 9, 19, 20, 70, 120, **settings)
    warm = 2e-5 * math.log(10) / math.log(20)
    np.testing.assert_allclose(actual, [0, warm, 2e-5, 2e-5, 1e-5, 0], rtol=1e-5, atol=1e-12)


def test_updates_equal_optax_adamw_with_clipping():
    settings = {"betas": (0.8, 0.95), "eps": 1e-3, "no_decay": (), "lr": 0.01}
    ours = optim.optimizer(TrainSection(weight_decay=0.1, clip=0.5, **settings))
    theirs = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(0.01, 0.8, 0.95, 1e-3, weight_decay=0.1)
    )
    params = {
        "a": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)},
        "b": np.ones(4, np.float32),
    }
    rng = np.random.default_rng(0)

    @jax.jit
    def step(grads, params, state, expected, reference):
        updates, state = ours.update(grads, state, params)
        params = optim.apply(params, updates, jnp.float32(0.01))
        updates, reference = theirs.update(grads, reference, expected)
        return params, state, optax.apply_updates(expected, updates), reference

    expected, (state, reference) = params, jax.jit(lambda p: (ours.init(p), theirs.init(p)))(params)
    for _ in range(3):
        grads = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)
        params, state, expected, reference = step(grads, params, state, expected, reference)
    for actual, target in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, target, rtol=1e-6)


def test_a_gradient_above_the_clip_norm_is_scaled_to_it():
    train = TrainSection(clip=0.5, weight_decay=0.0)
    params = {"w": {"kernel": np.zeros(2, np.float32)}}

    @jax.jit
    def updated(grads):
        return optim.optimizer(train).update(grads, optim.optimizer(train).init(params), params)

    for norm, clipped in ((50.0, 0.5), (0.4, 0.4)):
        _, state = updated({"w": {"kernel": np.float32([0.6 * norm, 0.8 * norm])}})
        # Adam's update hardly depends on the scale of gradients, its first moment does.
        first_moment = state[1].mu["w"]["kernel"]
        np.testing.assert_allclose(first_moment, 0.1 * clipped * np.array([0.6, 0.8]), rtol=1e-5)


def test_rates_multiply_the_final_update_of_their_first_matching_rule():
    params = {"rope": {"up": jnp.ones(2)}, "head": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}}
    grads = jax.tree.map(lambda p: 3.0 * p, params)
    settings = {"weight_decay": 0.5, "clip": None}
    plain, scaled = (
        optim.optimizer(TrainSection(**settings, rates=rates)).update(
            grads, optim.optimizer(TrainSection(**settings, rates=rates)).init(params), params
        )[0]
        for rates in ((), (Rate("rope", 0.25), Rate("bias", 2.0), Rate("head", 3.0)))
    )
    np.testing.assert_allclose(scaled["rope"]["up"], 0.25 * plain["rope"]["up"])
    np.testing.assert_allclose(scaled["head"]["bias"], 2 * plain["head"]["bias"])
    # 1 from Adam, 0.5 from the decay: a rate is of both
    np.testing.assert_allclose(scaled["head"]["kernel"], 3 * 1.5, rtol=1e-5)


def test_norms_and_biases_are_not_decayed():
    train = TrainSection(weight_decay=0.5, clip=None)
    params = {
        "layers": {"mlp_norm": {"scale": jnp.ones(2)}, "mlp": {"up": {"kernel": jnp.ones(2)}}},
        "head": {"bias": jnp.ones(2), "kernel": jnp.ones(2)},
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optim.optimizer(train).update(zeros, optim.optimizer(train).init(params), params)
    assert float(updates["layers"]["mlp_norm"]["scale"].sum()) == 0
    assert float(updates["head"]["bias"].sum()) == 0
    np.testing.assert_allclose(updates["layers"]["mlp"]["up"]["kernel"], 0.5)
    np.testing.assert_allclose(updates["head"]["kernel"], 0.5)


def test_average_follows_its_formula_also_for_bfloat16_weights():
    ema, params = {"w": jnp.float32([1.0])}, {"w": jnp.bfloat16([2.0])}
    average = jax.jit(lambda ema: optim.average(ema, params, 0.999))
    for _ in range(3):
        ema = average(ema)
    np.testing.assert_allclose(ema["w"], 2 - 0.999**3, rtol=1e-6)
    assert ema["w"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"batch_size": 8, "accumulation": 3}, "nearest: 2"),
        ({"steps": 10, "warmup_steps": 11}, "train.warmup_steps=11"),
        ({"trainable": ("(",)}, r"train.trainable: rule '\('"),
        ({"no_decay": ("[",)}, r"train.no_decay: rule '\['"),
    ],
)
def test_impossible_settings_name_key_and_value(settings, named):
    with pytest.raises(InputError, match=named):
        TrainSection(**settings)


def test_a_rule_of_a_rate_that_is_no_expression_raises_input_error():
    with pytest.raises(InputError, match=r"^train.rates: rule '\('"):
        Rate("(", 1.0)


@pytest.mark.parametrize("key", ["dtype", "param_dtype"])
def test_float16_raises_input_error(key):
    file_says_so = {"model": ModelSection(preset="tiny", **{key: "float16"})}
    with pytest.raises(InputError, match=rf"^model.{key}='float16' cannot be trained") as error:
        TrainConfig(**file_says_so)
    assert "bfloat16" in str(error.value) and "\n" not in str(error.value)


def test_a_run_without_a_folder_raises_input_error():
    with pytest.raises(InputError, match="run.folder is empty: name one, such as"):
        RunSection(folder="")


@pytest.mark.parametrize("should_update", [True, False])
@pytest.mark.parametrize("groups", [["layers", "norm"], ["layers_0", "layers_1", "norm"]])
def test_layers_are_updated_one_after_another_in_the_shapes_of_a_layer(should_update, groups):
    layer = {"up/kernel": (4, 6), "norm/scale": (4,)}
    shapes = {f"{group}/{name}": layer[name] for group in groups[:-1] for name in layer}
    stacks = {
        path: (3, *shape) if groups[0] == "layers" else shape for path, shape in shapes.items()
    }
    shapes["norm/scale"] = stacks["norm/scale"] = (4,)
    rng = np.random.default_rng(0)
    params = nest({path: np.ones(shape, np.float32) for path, shape in stacks.items()})
    grads = nest(
        {path: rng.normal(size=shape).astype(np.float32) for path, shape in stacks.items()}
    )
    updated = set()

    def update(old, grads):
        params, count, average = old
        for tree in (params, grads, average):
            updated.add(tuple((path, leaf.shape) for path, leaf in sorted(flatten(tree).items())))
        params = jax.tree.map(operator.sub, params, grads)
        return params, count + 1, jax.tree.map(operator.add, average, grads)

    @jax.jit
    def layerwise(should_update, old, grads):
        return optim.layerwise_update(update, should_update, old, grads)

    old = params, np.int32(7), grads
    new = layerwise(should_update, old, grads)
    assert updated == {
        tuple(item for item in sorted(shapes.items()) if item[0].startswith(f"{group}/"))
        for group in groups
    }
    jax.tree.map(np.testing.assert_array_equal, new, update(old, grads) if should_update else old)
