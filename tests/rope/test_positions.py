"""Training positions of E2-LLM and CLEX: the formulas, their ranges, their packing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rope_golden import document

from lcjax.errors import InputError
from lcjax.rope import (
    E2LLM,
    Bf16Positions,
    Clex,
    ClexPositions,
    Default,
    DynamicNTK,
    E2Positions,
    Linear,
    PlainPositions,
    Yarn,
)
from lcjax.rope.positions import _draw_sorted, clex_positions, e2_max_offset, e2_positions

E2 = E2LLM(theta=1e4, original_length=64)
CLEX = Clex(theta=1e4, original_length=16, max_factor=4, time_dt=0.25)


def counted(rows, length):
    return np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))


@functools.partial(jax.jit, static_argnames=("rope", "head_dim"), static_argnums=0)
def sample(positions, key, counted, *, rope, head_dim=8, params=None):
    return positions.sample(key, counted, rope=rope, head_dim=head_dim, params=params)


draw_sorted = jax.jit(_draw_sorted, static_argnums=(1, 3))
of_clex = jax.jit(clex_positions, static_argnums=(1, 3))


@pytest.mark.parametrize("case", document()["e2_llm_positions"]["cases"])
def test_e2_positions_are_those_of_the_formula(case):
    scale, offset = np.array([case["g"]]), np.array([case["t"]])
    assert int(e2_max_offset(scale, case["L"], case["R"])[0]) == case["t_max"]
    out = jax.jit(e2_positions)(np.array([case["index"]]), scale, offset)
    np.testing.assert_allclose(out[0], case["position"], rtol=1e-6)
    last = jax.jit(e2_positions)(np.array([[case["R"] - 1]]), scale, offset)
    np.testing.assert_allclose(last, case["max_scaled_position"], rtol=1e-6)


def test_e2_rows_draw_their_own_scale_and_offset_over_the_whole_range():
    length, rows = 16, 2000
    drawn = sample(E2Positions(max_scale=8), jax.random.key(0), counted(rows, length), rope=E2)
    positions, rotation = (np.asarray(x) for x in (drawn[0], drawn[1].inv_freq))
    scale = np.rint(1 / positions[:, 1])
    assert set(scale) == set(range(1, 9))
    np.testing.assert_allclose(positions[:, :4] * scale[:, None], counted(rows, 4), atol=1e-5)
    offset = np.rint(positions[:, 4] * scale) - 4
    assert offset.min() == 0
    assert (offset <= scale * 64 - length).all()
    assert (offset[scale == 8] > 0.95 * (8 * 64 - length)).any()
    assert positions.max() < 64, "never past the trained length"
    assert positions.max() > 62
    np.testing.assert_array_equal(rotation, Default(theta=1e4).frequencies(8, 1)[0])


def test_e2_ablations_fix_the_scale_or_leave_offsets_out():
    def drawn(**options):
        sampled = sample(E2Positions(**options), jax.random.key(0), counted(500, 16), rope=E2)
        positions = np.asarray(sampled[0])
        scale = np.rint(1 / positions[:, 1])
        return scale, np.rint(positions[:, 4] * scale) - 4

    scale, offset = drawn(min_scale=2, max_scale=2)
    assert set(scale) == {2} and set(range(2 * 64 - 16 + 1)) >= set(offset)
    assert offset.max() > 100
    scale, offset = drawn(max_scale=8, offsets=False)
    assert set(scale) == set(range(1, 9)) and set(offset) == {0}
    with pytest.raises(InputError, match="min_scale=3 .* must not exceed max_scale=2"):
        E2Positions(min_scale=3, max_scale=2)


def test_e2_documents_of_a_packed_row_start_at_zero():
    packed = np.array([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]])
    positions, _ = sample(E2Positions(window=6), jax.random.key(3), packed, rope=E2)
    np.testing.assert_array_equal(positions[0, :6], positions[0, 6:])
    assert positions[0, 0] == 0


def test_e2_needs_a_plain_rope_and_a_trained_length():
    positions = counted(1, 8)
    with pytest.raises(InputError, match=r"positions\.type=e2_llm .* rope\.type=yarn"):
        E2Positions().sample(jax.random.key(0), positions, rope=Yarn(factor=2.0), head_dim=8)
    with pytest.raises(InputError, match=r"positions\.original_length=None"):
        E2Positions().sample(jax.random.key(0), positions, rope=Default(theta=1e4), head_dim=8)
    with pytest.raises(
        InputError, match=r"positions\.max_scale=0 must be a whole number of at least 1"
    ):
        E2Positions(max_scale=0)
    method, rope = E2Positions(original_length=64), Linear(theta=1e4, factor=2.0)
    out, _ = sample(method, jax.random.key(0), positions, rope=rope)
    assert out.shape == (1, 8)


def test_plain_positions_stay_and_the_rope_sees_the_row_length():
    rope = DynamicNTK(theta=1e4, factor=2.0, original_length=8)
    positions, rotation = sample(PlainPositions(), jax.random.key(0), counted(2, 32), rope=rope)
    np.testing.assert_array_equal(positions, counted(2, 32))
    np.testing.assert_array_equal(rotation.inv_freq, rope.frequencies(8, 32)[0])


@pytest.mark.parametrize("length", [8, 16, 64])
def test_clex_positions_cover_the_longer_context(length):
    params = CLEX.init(jax.random.key(0), 8)
    scale = max(1, length // 16)
    options = {"rope": CLEX, "params": params}
    table, seen = np.asarray(CLEX.table(params)), set()
    for seed in range(30):
        drawn = sample(ClexPositions(), jax.random.key(seed), counted(2, length), **options)
        (row, other), rotation = np.asarray(drawn[0]), drawn[1]
        np.testing.assert_array_equal(row, other)
        factor = round((row[-1] + 1) * scale / length)
        np.testing.assert_allclose(rotation.inv_freq, table[factor - 1], rtol=1e-5)
        assert rotation.query_scale == 1.0
        assert row[0] == 0
        assert row[-1] == length * factor // scale - 1
        units = row[1:-1] * scale
        np.testing.assert_array_equal(units, np.rint(units))
        assert (np.diff(row[:-1]) > 0).all()
        assert units.min() >= 1
        assert units.max() <= length * factor - 2
        seen.add(factor)
    assert seen == {1, 2, 3, 4}


def test_clex_factor_1_at_the_trained_length_counts_every_position():
    drawn = draw_sorted(jax.random.key(0), 14, 14, 4 * 16 - 2)
    np.testing.assert_array_equal(of_clex(drawn, 16, 1, 16), np.arange(16))


def test_clex_last_position_can_fall_short_as_published():
    drawn = np.array([*range(29), 189])  # the largest draw for n t = 192
    row = np.asarray(of_clex(drawn, 32, 6, 8))
    assert row[-2:].tolist() == [47.5, 47.0]


def test_clex_draws_are_uniform_and_distinct():
    draw = jax.jit(jax.vmap(lambda key: _draw_sorted(key, 6, jnp.int32(12), 40)))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 4000)))
    assert (np.diff(drawn, axis=1) > 0).all()
    share = np.bincount(drawn.ravel(), minlength=12) / 4000
    assert len(share) == 12
    np.testing.assert_allclose(share, 0.5, atol=0.05)


def test_clex_training_reaches_the_network_with_gradients():
    params = CLEX.init(jax.random.key(0), 8)

    def loss(params, key):
        method, options = ClexPositions(min_factor=2), {"rope": CLEX, "params": params}
        positions, rotation = sample(method, key, counted(1, 16), **options)
        return jnp.sum(jnp.cos(positions[..., None] * rotation.inv_freq))

    grads = jax.jit(jax.grad(loss))(params, jax.random.key(1))
    assert np.abs(grads["down"]).max() > 0
    assert not np.any(grads["inv_freq"])


def test_clex_positions_need_a_clex_rope_with_room():
    with pytest.raises(InputError, match=r"positions\.type=clex needs rope\.type=clex"):
        ClexPositions().sample(jax.random.key(0), counted(1, 8), rope=E2, head_dim=8)
    with pytest.raises(InputError, match=r"positions\.max_factor=9 .* rope\.max_factor=4"):
        ClexPositions(max_factor=9).sample(
            jax.random.key(0), counted(1, 8), rope=CLEX, head_dim=8, params={}
        )
    with pytest.raises(InputError, match=r"row length=2 must be 3 or more"):
        ClexPositions().sample(jax.random.key(0), counted(1, 2), rope=CLEX, head_dim=8, params={})


def test_the_same_key_gives_the_same_positions():
    for positions, rope, params in (
        (E2Positions(), E2, None),
        (ClexPositions(min_factor=2), CLEX, CLEX.init(jax.random.key(0), 8)),
    ):
        options = {"rope": rope, "params": params}
        first, second, other = (
            sample(positions, jax.random.key(seed), counted(2, 12), **options)[0]
            for seed in (5, 5, 6)
        )
        np.testing.assert_array_equal(first, second)
        assert (np.asarray(first) != np.asarray(other)).any()


def test_bf16_positions_are_the_1153_rows_that_the_published_training_had():
    torch = pytest.importorskip("torch")
    rope = Linear(theta=1e4, factor=8.0)
    positions, rotation = Bf16Positions().sample(
        jax.random.key(0), counted(1, 32_768), rope=rope, head_dim=128
    )
    row = np.asarray(positions[0])
    assert len(set(row.tolist())) == 1153
    np.testing.assert_array_equal(row, torch.arange(32_768.0).bfloat16().float())
    published = torch.tensor(rope.frequencies(128, 32_768)[0]).bfloat16().float()
    np.testing.assert_array_equal(rotation.inv_freq, published)
    plain, _ = PlainPositions().sample(
        jax.random.key(0), counted(1, 32_768), rope=rope, head_dim=128
    )
    assert len(set(np.asarray(plain[0]).tolist())) == 32_768


@pytest.mark.slow
def test_bf16_positions_may_leave_frequencies_and_have_other_bits():
    rope = Yarn(theta=1e4, factor=4.0, original_length=128)
    sample = Bf16Positions(frequencies=False, bits=4).sample(
        jax.random.key(0), counted(2, 512), rope=rope, head_dim=32
    )
    assert len(set(np.asarray(sample[0][1]).tolist())) == 57
    np.testing.assert_array_equal(sample[0][0, :17], np.arange(17))
    np.testing.assert_array_equal(sample[0][0, 17:20], [16, 18, 20])
    np.testing.assert_array_equal(sample[1].inv_freq, rope.frequencies(32, 512)[0])
    assert sample[1].scale == rope.frequencies(32, 512)[1]
    whole, _ = Bf16Positions(bits=24).sample(
        jax.random.key(0), counted(1, 512), rope=rope, head_dim=32
    )
    np.testing.assert_array_equal(whole[0], np.arange(512))
