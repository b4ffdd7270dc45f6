"""Options of patterns equal what they say, token by token in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.attention import AttentionMetadata, DualChunk, LMInfinite, SelfExtend
from lcjax.attention.cache import FullCache, RingCache
from lcjax.rope import Default, Rotation
from lcjax.rope.rotation import no_rotation
from pallas_kernels import Alibi, alibi_slopes, gather

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
    return pattern.attend(q, k, v, AttentionMetadata(mine, at, rotation=rotation, q_index=mine))


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


@pytest.mark.slow_except("9")  # with 30 fewer queries grow, with 1000 none
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
    scales = np.float32([1.0, 1.5])[:, None, None, None]
    pattern = SelfExtend(window=8, group=3, scale_base=9)
    both = Rotation(np.stack([INV_FREQ] * 2).astype(np.float32), query_scale=scales)
    places = np.stack([AT, AT])
    got = jax.jit(lambda *x: pattern.attend(*x, AttentionMetadata(places, places, rotation=both)))(
        q, k, v
    )
    for row, scale in enumerate((1.0, 1.5)):
        alone = run(q[:1] * np.float32(scale), k[:1], v[:1], pattern)
        np.testing.assert_allclose(got[row], alone[0], **TOLERANCE)


@pytest.mark.parametrize(
    ("length", "growth"),
    [(10, "square"), (11, "square"), (40, "square"), (400, "square"), (40, "linear")],
)
def test_logits_of_dual_chunk_grow_with_the_length_of_the_request(length, growth):
    q, k, v = arrays()
    pattern = DualChunk(chunk=12, local=4, train_length=10, growth=growth)
    assert pattern.depends_on_length and not DualChunk().depends_on_length
    piece, older = 8, 12
    inside, number = AT % piece, AT // piece
    apart = np.subtract.outer(number, number)
    stands = np.where(
        apart == 0,
        inside[:, None],
        np.where(apart == 1, np.minimum(inside + 8, 12)[:, None], older),
    )
    log = np.log(length / 10)
    factor = {"square": (0.05 * log + 1) ** 2, "linear": 0.1 * log + 1}[growth]
    x = factor * logits(q[0], k[0], stands - inside)
    rotation = pattern.at_length(ROTATION, length)
    got = run(q, k, v, pattern, rotation)[0]
    np.testing.assert_allclose(got, attended(causal(x), v[0]), **TOLERANCE)
    assert (length == 10) == (rotation == ROTATION)


def test_the_growth_of_dual_chunk_multiplies_the_scale_of_the_rope():
    rotation = Default(theta=1e4).rotation(SIZE, 20)._replace(scale=1.25)
    grown = DualChunk(train_length=10).at_length(rotation, 20)
    assert grown.scale == pytest.approx(1.25 * (1 + 0.05 * np.log(2)))
    assert DualChunk().at_length(rotation, 20) is rotation


CHOOSING = LMInfinite(window=9, sinks=3, top_k=4)


def chosen_by_lm_infinite(q, k, pattern):
    """float64 logits [N, T, S] of all that is seen, with the best keys chosen one by one."""
    window, sinks = pattern.window, pattern.sinks
    place = window // 2 if pattern.top_k_position is None else pattern.top_k_position
    x = logits(q, k, np.where(np.arange(T) < sinks, np.minimum(DISTANCE, window), DISTANCE))
    middle = logits(q, k, np.full((T, T), place))
    for i in range(T):
        first, last = sinks, i - window  # the keys between sinks and window
        for head in range(len(x)):
            x[head, i, first : max(last + 1, first)] = -np.inf
            if i - window + 1 >= sinks + pattern.top_k:
                best = first + np.argsort(-middle[head, i, first : last + 1])[: pattern.top_k]
                x[head, i, best] = middle[head, i, best]
    return causal(x)


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(CHOOSING, marks=pytest.mark.slow),  # shorter texts are compared below
        LMInfinite(window=6, sinks=1, top_k=2, top_k_position=11),
    ],
    ids=str,
)
def test_every_query_of_lm_infinite_sees_the_best_keys_beyond_the_window(pattern):
    q, k, v = arrays()
    x = chosen_by_lm_infinite(q[0], k[0], pattern)
    want, got = attended(x, v[0]), run(q, k, v, pattern)[0]
    np.testing.assert_allclose(got, want, **TOLERANCE)
    plain = run(q, k, v, LMInfinite(window=pattern.window, sinks=pattern.sinks))[0]
    most = pattern.window + pattern.sinks + pattern.top_k
    np.testing.assert_allclose(got[: most - 1], plain[: most - 1], rtol=1e-6, atol=1e-6)
    assert (np.abs(got - plain)[most - 1 :].max((1, 2)) > 1e-3).all()
    assert (np.isfinite(x).sum(-1)[:, most - 1 :] == most).all()
    last = run(q[:, -1:], k, v, pattern)[0]
    np.testing.assert_allclose(last, want[-1:], **TOLERANCE)


def test_a_text_too_short_to_choose_from_is_read_as_without():
    q, k, v = (x[:, :15] for x in arrays())
    np.testing.assert_array_equal(
        run(q, k, v, CHOOSING), run(q, k, v, LMInfinite(window=9, sinks=3))
    )


@pytest.mark.parametrize("length", [16, pytest.param(18, marks=pytest.mark.slow)])
def test_a_text_just_long_enough_to_choose_from_is_chosen_from(length):
    q, k, v = arrays()
    want = attended(chosen_by_lm_infinite(q[0], k[0], CHOOSING), v[0])[:length]
    got = run(*(x[:, :length] for x in (q, k, v)), CHOOSING)[0]
    np.testing.assert_allclose(got, want, **TOLERANCE)


def test_queries_choose_alike_whether_many_or_one_go_at_a_time(monkeypatch):
    q, k, v = arrays()
    want = run(q, k, v, CHOOSING)
    monkeypatch.setattr(gather, "BUDGET", 1)
    got = run(q, k, v, LMInfinite(window=9, sinks=3, top_k=4, top_k_position=4))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_what_lm_infinite_chooses_has_the_gradient_of_a_fixed_choice():
    q, k, v = arrays()
    seen = np.isfinite(chosen_by_lm_infinite(q[0], k[0], CHOOSING))
    middle = (DISTANCE >= 9) & (np.arange(T) >= 3)
    place = np.where(middle, 4, np.minimum(DISTANCE, 9))

    def dense(q, k, v):
        angle = place[..., None, None] * ROTATION.inv_freq
        a, b = jnp.split(q[0][:, None], 2, -1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
        keys, values = (jnp.repeat(x[0], HEADS // KV_HEADS, 1) for x in (k, v))
        x = jnp.einsum("tsnh,snh->nts", turned, keys, precision="highest") / 4
        p = jax.nn.softmax(jnp.where(seen, x, -1e30), -1)
        return jnp.einsum("nts,snh->tnh", p, values, precision="highest")

    weights = np.random.default_rng(5).normal(size=(T, HEADS, SIZE)).astype(np.float32)
    losses = (
        lambda *x: jnp.sum(run(*x, CHOOSING)[0] * weights),
        lambda *x: jnp.sum(dense(*x) * weights),
    )
    got, want = (jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v) for loss in losses)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_chosen_keys_of_a_model_with_alibi_have_the_bias_of_their_distance():
    q, k, v = arrays()
    bias = Alibi(jnp.asarray(alibi_slopes(HEADS), jnp.float32))
    metadata = AttentionMetadata(AT[None], AT[None], rotation=no_rotation(), bias=bias)
    got = jax.jit(lambda *x: CHOOSING.attend(*x, metadata))(q, k, v)[0]
    x = np.einsum("tnh,snh->nts", q[0], np.repeat(k[0], 2, 1).astype(np.float64)) / 4
    slopes = np.asarray(bias.slopes, np.float64)[:, None, None]
    near = x - slopes * np.minimum(DISTANCE, 9)
    rank = np.full(x.shape, T)
    middle = (DISTANCE >= 9) & (np.arange(T) >= 3)
    for i in range(9 + 3 + 4 - 1, T):
        rank[:, i, 3 : i - 8] = np.argsort(np.argsort(-x[:, i, 3 : i - 8], -1), -1)
    seen = np.where(middle, np.where(rank < 4, x - slopes * 4, -np.inf), near)
    np.testing.assert_allclose(got, attended(causal(seen), v[0]), **TOLERANCE)


def test_a_cache_keeps_everything_that_can_be_chosen():
    assert CHOOSING.layer_cache == FullCache() and CHOOSING.moves_keys
    plain = LMInfinite(window=9, sinks=3)
    assert plain.layer_cache == RingCache(sinks=3, recent=9)
    assert plain.is_position_based and not CHOOSING.is_position_based
