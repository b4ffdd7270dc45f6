"""Options of patterns equal what they say, token by token in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.attention import DualChunk, SelfExtend, attend
from lcjax.rope import Default, Rotation

T, HEADS, KV_HEADS, SIZE = 40, 4, 2, 16
INV_FREQ = 100.0 ** -np.linspace(0, 1, SIZE // 2)
ROTATION = Rotation(jnp.asarray(INV_FREQ, jnp.float32))
TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}
AT = np.arange(T)
DISTANCE = np.subtract.outer(AT, AT)  # [T, S]


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=(1, T, n, SIZE)).astype(np.float32) for n in (HEADS, KV_HEADS, KV_HEADS)
    ]


@functools.partial(jax.jit, static_argnames="pattern")
def run(q, k, v, pattern, rotation=ROTATION):
    """The last q.shape[1] queries of a text of k.shape[1] tokens."""
    at = jnp.arange(k.shape[1])[None]
    mine = at[:, k.shape[1] - q.shape[1] :]
    return attend(
        q, k, v, pattern=pattern, rotation=rotation, q_positions=mine, k_positions=at, q_index=mine
    )


def logits(q, k, distance):
    """float64 [N, T, S] of q [T, N, H] and k [S, K, H], `distance` [T, S] apart."""
    angle = distance[..., None] * np.asarray(ROTATION.inv_freq, np.float64)
    cos, sin = np.cos(angle)[:, :, None], np.sin(angle)[:, :, None]
    a, b = np.split(q.astype(np.float64)[:, None], 2, -1)
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    keys = np.repeat(k.astype(np.float64), q.shape[1] // k.shape[1], 1)
    return np.einsum("tsnh,snh->nts", turned, keys) / np.sqrt(q.shape[-1])


def attended(x, v):
    """float64 [T, N, H]: the softmax of logits x [N, T, S], -inf where a key is not seen."""
    p = np.exp(x - x.max(-1, keepdims=True))
    values = np.repeat(v.astype(np.float64), len(x) // v.shape[1], 1)
    return np.einsum("nts,snh->tnh", p / p.sum(-1, keepdims=True), values)


def causal(x):
    return np.where(DISTANCE >= 0, x, -np.inf)


@pytest.mark.parametrize("base", [9, 30, 1000])
def test_queries_of_self_extend_grow_with_the_logarithm_of_the_keys_they_see(base):
    q, k, v = arrays()
    window, group = 8, 3
    far = np.subtract.outer(AT // group, AT // group) + window - window // group
    near = np.tri(T, T, -window) == 0
    x = logits(q[0], k[0], np.where(near, DISTANCE, far))
    growth = np.maximum(1, np.log(AT + 1) / np.log(base))
    pattern = SelfExtend(window=window, group=group, scale_base=base)
    got = run(q, k, v, pattern)[0]
    np.testing.assert_allclose(got, attended(causal(x * growth[:, None]), v[0]), **TOLERANCE)
    plain = run(q, k, v, SelfExtend(window=window, group=group))[0]
    first = min(base, T)  # query i sees i + 1 keys
    np.testing.assert_array_equal(got[:first], plain[:first])
    if base < T:
        assert np.abs(got - plain)[first:].max() > 1e-3


def test_the_scale_of_queries_comes_beside_that_of_the_rotation_row_by_row():
    q, k, v = (np.concatenate([x, x]) for x in arrays())
    scales = jnp.array([1.0, 1.5])[:, None, None, None]
    pattern = SelfExtend(window=8, group=3, scale_base=9)
    both = Rotation(jnp.stack([ROTATION.inv_freq] * 2), query_scale=scales)
    places = jnp.broadcast_to(jnp.arange(T), (2, T))
    got = attend(
        *map(jnp.asarray, (q, k, v)), pattern=pattern, rotation=both, q_positions=places,
        k_positions=places,
    )  # fmt: skip
    for row, scale in enumerate((1.0, 1.5)):
        alone = run(q[:1] * np.float32(scale), k[:1], v[:1], pattern)
        np.testing.assert_allclose(got[row], alone[0], **TOLERANCE)


@pytest.mark.parametrize("length", [10, 11, 40, 400])
def test_logits_of_dual_chunk_grow_with_the_length_of_the_request(length):
    q, k, v = arrays()
    pattern = DualChunk(chunk=12, local=4, train_length=10)
    assert pattern.depends_on_length and not DualChunk().depends_on_length
    piece, older = 8, 12
    inside, number = AT % piece, AT // piece
    apart = np.subtract.outer(number, number)
    stands = np.where(
        apart == 0,
        inside[:, None],
        np.where(apart == 1, np.minimum(inside + 8, 12)[:, None], older),
    )
    growth = max(1, 0.05 * np.log(length / 10) + 1)
    x = growth**2 * logits(q[0], k[0], stands - inside)
    rotation = pattern.at_length(Rotation(ROTATION.inv_freq, 1.0), length)
    got = run(q, k, v, pattern, rotation)[0]
    np.testing.assert_allclose(got, attended(causal(x), v[0]), **TOLERANCE)
    assert (growth > 1) == (rotation.scale != 1.0)


def test_the_growth_of_dual_chunk_multiplies_the_scale_of_the_rope():
    rotation = Default(theta=1e4).rotation(SIZE, 20)._replace(scale=1.25)
    grown = DualChunk(train_length=10).at_length(rotation, 20)
    assert grown.scale == pytest.approx(1.25 * (1 + 0.05 * np.log(2)))
    assert DualChunk().at_length(rotation, 20) is rotation
