"""Biases by distance: buckets and slopes of the published models, gradients of the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Alibi, RelativeBias, alibi_slopes


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (16, 40), (32, 256), (12, 100)])
def test_buckets_are_those_of_transformers(buckets, max_distance, bidirectional):
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    place = np.arange(-300, 301)
    expected = t5.T5Attention._relative_position_bucket(
        torch.from_numpy(place), bidirectional, buckets, max_distance
    ).numpy()
    bias = RelativeBias(jnp.zeros((buckets, 1)), max_distance, bidirectional)
    np.testing.assert_array_equal(bias.buckets(np.zeros(1, np.int32), place)[0], expected)
    starts = [
        np.min(-place[(expected == b) & (place <= 0)]) for b in range(len(bias.thresholds) + 1)
    ]
    assert list(bias.thresholds) == starts[1:]


def test_slopes_are_those_of_the_paper_also_for_other_numbers_of_heads():
    np.testing.assert_allclose(alibi_slopes(8), 0.5 ** np.arange(1, 9))
    between = 0.5 ** np.array([0.5, 1.5, 2.5, 3.5])
    np.testing.assert_allclose(alibi_slopes(12), [*0.5 ** np.arange(1, 9), *between], rtol=1e-6)


@pytest.mark.parametrize(
    "bias",
    [
        Alibi(jnp.asarray([0.5, 0.1, 2.0])),
        RelativeBias(
            jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32), 30, True
        ),
    ],
    ids=["slopes", "table"],
)
def test_gradients_are_those_of_the_logits(bias):
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.integers(0, 60, (2, n)), jnp.int32) for n in (7, 11))
    logits, pull = jax.vjp(lambda bias: bias.logits(q, k), bias)
    assert logits.shape == (2, 3, 7, 11)
    d_logits = jnp.asarray(rng.normal(size=logits.shape), jnp.float32)
    (expected,), found = pull(d_logits), bias.gradient(q, k, d_logits)
    assert jax.tree.structure(found) == jax.tree.structure(bias)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, expected
    )
    shared = bias.gradient(q[:1], k[:1], d_logits)
    alone = bias.gradient(q[:1], k[:1], d_logits.sum(0, keepdims=True))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), shared, alone)


def test_tables_without_room_for_their_distances_raise_value_error():
    with pytest.raises(ValueError, match="32 buckets a direction with max_distance=16"):
        RelativeBias(jnp.zeros((32, 2)), max_distance=16).logits(jnp.arange(3), jnp.arange(3))
