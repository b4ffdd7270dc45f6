"""Distillation: the released code's losses, gradients against float64, memory, meshes."""

import cepe_golden as golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.errors import InputError
from lcjax.models import head
from lcjax.models.distill import Distill, Teacher, distillation, divergence, largest_probabilities
from lcjax.models.loss import Projection, cross_entropy
from lcjax.parallel.sharding import Mesh, batch_sharding, make_mesh

MODES = ("drop", "renormalise", "rest", "smooth")

distilled = jax.jit(distillation, static_argnames=("config", "chunk", "mesh"))
likelihood = jax.jit(cross_entropy)
largest = jax.jit(largest_probabilities, static_argnums=2, static_argnames=("chunk", "mesh"))


@pytest.fixture(scope="module")
def student():
    """The student of the released code's case: its hidden states, and its head."""
    model, params = golden.model("distill")
    tokens = golden.arrays("distill")["input_ids"].astype(np.int32)

    @jax.jit
    def states(params):
        memory = model.apply({"params": params}, *golden.context("distill"), method="encode")
        return model.apply({"params": params}, tokens, memory=memory).hidden

    with jax.default_matmul_precision("highest"):
        return np.asarray(states(params)), head(params, model.config)


@pytest.mark.parametrize(
    ("mode", "field"),
    [("drop", "total_drop"), ("rest", "total_none"), ("smooth", "total_smooth_1e_6")],
)
def test_losses_equal_the_released_code(mode, field, student):
    io, (hidden, projection) = golden.arrays("distill"), student
    labels, p = io["labels"].astype(np.int32), io["distill_prob"]
    teacher = Teacher(io["distill_index"].astype(np.int32), p[..., :-1], p[..., -1])
    # The released code has the likelihood of all places but the last, and the teacher at all.
    weights = np.ones(labels[:, 1:].shape)
    nll, count = likelihood(hidden[:, :-1], projection, labels[:, 1:], weights)
    config, weights = Distill(mode=mode, top=10), np.ones(labels.shape)
    _, places, parts = distilled(hidden, projection, labels, weights, teacher, config, chunk=5)
    total = config.ce * nll / count + config.kl * parts["kl"] / places
    np.testing.assert_allclose(nll / count, io["ce"], atol=2e-5, rtol=0)
    np.testing.assert_allclose(total, io[field], atol=2e-5, rtol=0)


def inputs(batch=2, length=13, width=24, vocabulary=127, top=9, seed=0):
    """Student's states and kernel, and a teacher that is nearly sure of some tokens."""
    random = np.random.default_rng(seed)
    hidden = random.normal(size=(batch, length, width)).astype(np.float32)
    kernel = (random.normal(size=(width, vocabulary)) * 0.3).astype(np.float32)
    bias = random.normal(size=vocabulary).astype(np.float32)
    targets = random.integers(0, vocabulary, (batch, length)).astype(np.int32)
    weights = (random.random((batch, length)) < 0.7).astype(np.float32) * 1.5
    logits = random.normal(size=(batch, length, vocabulary)) * 4
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    ids = np.argsort(-p, axis=-1)[..., :top].astype(np.int32)
    p = np.take_along_axis(p, ids, -1)
    teacher = Teacher(ids, p.astype(np.float16), (1 - p.sum(-1)).astype(np.float16))
    return hidden, kernel, bias, targets, weights, teacher


def oracle(hidden, kernel, bias, targets, weights, teacher, config):
    """The same in one piece, by the formulas of the docstring and JAX's own derivatives."""
    log_q = jax.nn.log_softmax(hidden @ kernel + bias)
    nll = -jnp.take_along_axis(log_q, targets[..., None], -1)[..., 0]
    log_q = jnp.take_along_axis(log_q, teacher.ids, -1)
    p, rest = (x.astype(log_q.dtype) for x in teacher[1:])
    q, size = jnp.exp(log_q), p.shape[-1] + 1
    if config.mode == "renormalise":
        p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
    elif config.mode != "drop":
        p = jnp.concatenate([p, rest[..., None]], -1)
        q = jnp.concatenate([q, 1 - q.sum(-1, keepdims=True)], -1)
    if config.mode == "smooth":
        p, q = ((x + 1e-6) / (1 + size * 1e-6) for x in (p, q))
    kl = (p * (jnp.log(p) - jnp.log(q))).sum(-1)
    return (weights * (config.ce * nll + config.kl * kl)).sum()


@pytest.mark.parametrize(
    ("mode", "tied"), [*((mode, False) for mode in MODES), ("drop", True)], ids=str
)
def test_loss_and_gradients_equal_a_float64_oracle(mode, tied):
    hidden, kernel, bias, targets, weights, teacher = inputs()
    config = Distill(ce=0.7, kl=1.9, mode=mode, top=9)

    def ours(hidden, kernel, bias, weights):
        projection = Projection(kernel.T if tied else kernel, bias, tied)
        return (
            distillation(hidden, projection, targets, weights, teacher, config, chunk=4)[0] * 0.5
        )  # a cotangent that is not one

    arguments = hidden, kernel, bias, weights
    got = jax.jit(jax.value_and_grad(ours, argnums=(0, 1, 2, 3)))(*arguments)
    with jax.enable_x64():
        wide = [np.asarray(x, np.float64) for x in arguments]

        def theirs(hidden, kernel, bias, weights):
            return oracle(hidden, kernel, bias, targets, weights, teacher, config) * 0.5

        want = jax.jit(jax.value_and_grad(theirs, argnums=(0, 1, 2, 3)))(*wide)
        want = jax.tree.map(np.asarray, want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=5e-6), got, want)


def test_the_parts_are_the_sums_and_without_a_divergence_it_is_the_likelihood():
    hidden, kernel, bias, targets, weights, teacher = inputs()
    projection = Projection(kernel, bias)
    total, count, parts = distilled(
        hidden, projection, targets, weights, teacher, Distill(ce=0.7, kl=1.9, top=9)
    )
    np.testing.assert_allclose(total, 0.7 * parts["ce"] + 1.9 * parts["kl"], rtol=1e-6)
    nll, same = likelihood(hidden, projection, targets, weights)
    np.testing.assert_allclose(parts["ce"], nll, rtol=1e-6)
    assert count == same
    alone = distilled(hidden, projection, targets, weights, teacher, Distill(kl=0.0, top=9))[0]
    np.testing.assert_allclose(alone, nll, rtol=1e-6)


def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient_to_leave_it():
    hidden, kernel, bias, targets, _, _ = inputs()
    projection = Projection(kernel, bias)
    exact = largest(hidden, projection, 127, chunk=5)
    weights = np.ones(targets.shape)

    def loss(hidden, mode):
        config = Distill(ce=0.0, kl=1.0, mode=mode, top=127)
        return distillation(hidden, projection, targets, weights, exact, config)[0]

    for mode in ("drop", "renormalise"):
        value, grad = jax.jit(jax.value_and_grad(loss), static_argnums=1)(hidden, mode)
        assert abs(value) < 2e-3 * weights.size and np.abs(grad).max() < 2e-3  # half precision


def test_fewer_probabilities_than_are_stored_count_as_if_no_others_had_been():
    hidden, kernel, bias, targets, weights, teacher = inputs()
    fewer = Teacher(
        teacher.ids[..., :4],
        teacher.probabilities[..., :4],
        teacher.rest.astype(np.float32) + teacher.probabilities[..., 4:].sum(-1, dtype=np.float32),
    )
    config = Distill(mode="smooth", top=4)
    found, want = (
        distilled(hidden, Projection(kernel, bias), targets, weights, one, config)[0]
        for one in (teacher, fewer)
    )
    np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_padding_and_certainty_give_no_nan(mode):
    p = np.array([[[0.0, 0, 0], [1, 0, 0]]])  # padding, and a teacher that is certain
    teacher = Teacher(np.array([[[0, 1, 2]] * 2]), p, np.zeros((1, 2)))
    log_q = np.array([[[0.0, -200, -200], [-300, -200, 0.0]]])
    value, grad = jax.jit(jax.value_and_grad(lambda x: divergence(x, teacher, mode).sum()))(log_q)
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_logits_of_a_long_text_never_exist():
    hidden = jax.ShapeDtypeStruct((1, 8192, 32), jnp.float32)
    kernel = jax.ShapeDtypeStruct((32, 4001), jnp.float32)
    targets, weights = np.zeros((1, 8192), np.int32), np.ones((1, 8192), np.float32)
    teacher = Teacher(targets[..., None].repeat(3, -1), weights[..., None].repeat(3, -1), weights)

    def loss(hidden, kernel):
        return distillation(
            hidden, Projection(kernel), targets, weights, teacher, Distill(top=3), chunk=64
        )[0]

    memory = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, kernel).compile()
    assert memory.memory_analysis().temp_size_in_bytes < 8192 * 4001 * 4 / 8


def test_on_a_mesh_every_device_goes_through_its_own_rows():
    hidden, kernel, bias, targets, weights, teacher = inputs(batch=8, vocabulary=64)
    mesh = make_mesh(Mesh(2, 2, 2))

    def grads(arguments, mesh):
        def total(hidden, kernel, bias):
            projection, config = Projection(kernel, bias), Distill(mode="smooth", top=9)
            options = {"chunk": 4, "mesh": mesh}
            return distillation(hidden, projection, *arguments[1:], config, **options)[0]

        return jax.value_and_grad(total, (0, 1, 2))(arguments[0], kernel, bias)

    arguments = hidden, targets, weights, teacher
    spread = jax.device_put(arguments, batch_sharding(mesh))
    actual, expected = (
        jax.jit(grads, static_argnums=1)(*x) for x in ((spread, mesh), (arguments, None))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 2e-5), actual, expected)
    whole = largest(hidden, Projection(kernel, bias), 5)
    parts = largest(spread[0], Projection(kernel, bias), 5, mesh=mesh, chunk=4)
    jax.tree.map(np.testing.assert_array_equal, parts, whole)


def test_what_is_stored_are_the_largest_probabilities_and_the_rest():
    hidden, kernel, bias, *_ = inputs()
    actual = largest(hidden, Projection(kernel, bias), 9, chunk=5)
    p = np.exp(hidden @ kernel + bias)
    p /= p.sum(-1, keepdims=True)
    want = -np.sort(-p, axis=-1)[..., :9]
    assert actual.probabilities.dtype == actual.rest.dtype == np.float16
    np.testing.assert_allclose(actual.probabilities, want, rtol=1e-3)
    np.testing.assert_allclose(np.take_along_axis(p, np.asarray(actual.ids), -1), want, rtol=1e-6)
    np.testing.assert_allclose(actual.rest, 1 - want.sum(-1), atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"ce": 0.0, "kl": 0.0}, r"leave nothing to learn; raise one"),
        (
            {"mode": "reverse"},
            r"train.distill.mode='reverse' must be one of drop, renormalise, rest",
        ),
    ],
)
def test_settings_that_cannot_be_raise_input_error(fields, match):
    with pytest.raises(InputError, match=match) as caught:
        Distill(**fields)
    assert "\n" not in str(caught.value)


def test_more_probabilities_than_are_stored_raise_input_error():
    hidden, kernel, bias, targets, weights, teacher = inputs()
    with pytest.raises(InputError, match=r"top=50 is more than the 9 .* stored; set it to 9"):
        distillation(hidden, Projection(kernel, bias), targets, weights, teacher)
