"""The gated delta rule in chunks equals its recurrence in float64, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_rule_cases import (
    NAMES,
    WIDE,
    B,
    K,
    N,
    T,
    V,
    assert_agree,
    both,
    inputs,
    layout,
    on_one_device,
    oracle,
    rule,
    weak_after_strong,
    wide,
)
from jax.sharding import AxisType

from pallas_kernels import gated_delta_rule
from pallas_kernels.delta_rule import GROUP_TOKENS

CASES = {
    "random": ("random", False, False),
    "packed": ("random", False, True),
    "equal keys": ("equal keys", False, False),
    "strong decays": ("strong decays", False, True),
    "only strong decays": ("only strong decays", False, False),
    "channels": ("random", True, False),
    "channels packed": ("strong decays", True, True),
    "channels, equal keys": ("equal keys", True, False),
}


@pytest.mark.slow_except("packed-32", "strong decays-64", "equal keys-64", "channels packed-16")
@pytest.mark.parametrize("chunk", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("name", CASES)
def test_chunks_of_any_size_equal_the_recurrence_in_float64(name, chunk):
    kind, per_channel, is_packed = CASES[name]
    run = rule(is_packed, chunk=chunk)
    actual = both(run, inputs(kind, per_channel), jnp.float32)
    assert_agree(actual, oracle(kind, per_channel, is_packed))


@pytest.mark.slow
@pytest.mark.parametrize("per_channel", [False, True])
def test_several_groups_of_chunks_equal_the_recurrence(per_channel):
    t = 2 * GROUP_TOKENS + 100
    actual = both(rule(), inputs("random", per_channel, t), jnp.float32)
    assert_agree(actual, oracle("random", per_channel, False, t))


def test_a_decay_of_minus_infinity_forgets_all():
    q, k, v, log_decay, beta, state = (jnp.asarray(x, jnp.float32) for x in inputs())
    cut = log_decay.at[:, 40].set(-jnp.inf)
    value = jax.jit(lambda g: gated_delta_rule(q, k, v, g, beta, state=state)[0])
    known = value(log_decay.at[:, 40].set(-1e4))
    np.testing.assert_array_equal(value(cut), known)
    slopes = jax.jit(jax.grad(lambda g: value(g).sum()))(cut)
    assert np.all(np.isfinite(slopes)) and not np.any(slopes[:, 40])


def test_weak_decays_after_a_strong_one_keep_their_digits():
    """A difference of sums from the chunk's start would round them to multiples of 2^-7."""
    arrays, expected = weak_after_strong()
    assert_agree(both(rule(), arrays, jnp.float32), expected)


def run_alone(arrays, rows, start, stop, state=None):
    part = [jnp.asarray(x[rows, start:stop], jnp.float32) for x in arrays[:5]]
    return gated_delta_rule(*part, state=state)


def test_packed_documents_equal_separate_ones():
    arrays = inputs()
    initial = jnp.asarray(arrays[5], jnp.float32)
    out, last = jax.jit(rule(True))(*(jnp.asarray(x, jnp.float32) for x in arrays))
    row, pieces = slice(1, 2), [(0, 20), (20, 23), (23, 64), (64, 77)]
    for i, (start, stop) in enumerate(pieces):
        alone, state = run_alone(arrays, row, start, stop, initial[row] if i == 0 else None)
        np.testing.assert_allclose(out[row, start:stop], alone, atol=2e-6)
    np.testing.assert_allclose(last[row], state, atol=2e-6)


def test_padding_changes_nothing_and_has_output_0():
    arrays = [np.asarray(x, np.float32) for x in inputs(t=20)]
    out, last = gated_delta_rule(*arrays[:5], state=arrays[5])
    pads = [(0, 0), (9, 11)]
    padded = [np.pad(x, pads + [(0, 0)] * (x.ndim - 2), constant_values=-3) for x in arrays[:5]]
    segments = np.pad(np.full((B, 20), 4), pads)
    actual, state = gated_delta_rule(*padded, state=arrays[5], segments=segments, chunk=16)
    np.testing.assert_allclose(actual[:, 9:29], out, atol=2e-6)
    np.testing.assert_allclose(state, last, atol=2e-6)
    assert not np.any(actual[:, :9]) and not np.any(actual[:, 29:])
    nothing, state = gated_delta_rule(*padded, state=arrays[5], segments=np.zeros_like(segments))
    np.testing.assert_array_equal(state, arrays[5])
    assert not np.any(nothing)


@pytest.mark.parametrize("per_channel", [False, True])
def test_calls_that_continue_a_state_equal_one_call(per_channel):
    arrays = [jnp.asarray(x, jnp.float32) for x in inputs(per_channel=per_channel, t=40)]
    out, last = gated_delta_rule(*arrays[:5], state=arrays[5])
    state, parts = arrays[5], []
    for start, stop in [(0, 33), (33, 38), (38, 39), (39, 40)]:
        part = [x[:, start:stop] for x in arrays[:5]]
        piece, state = gated_delta_rule(*part, state=state)
        parts.append(piece)
    np.testing.assert_allclose(np.concatenate(parts, 1), out, atol=2e-6)
    np.testing.assert_allclose(state, last, atol=2e-6)


def test_a_padded_step_of_generation_keeps_the_state_of_its_row():
    arrays = [jnp.asarray(x[:, :1], jnp.float32) for x in inputs()[:5]]
    state = jnp.asarray(inputs()[5], jnp.float32)
    out, after = gated_delta_rule(*arrays, state=state, segments=np.array([[3], [0]]))
    known, expected = gated_delta_rule(*arrays, state=state)
    np.testing.assert_array_equal(out[0], known[0])
    np.testing.assert_array_equal(after[0], expected[0])
    assert not np.any(out[1])
    np.testing.assert_array_equal(after[1], state[1])


def test_a_step_of_generation_is_the_recurrence_without_matrices_of_a_chunk():
    arrays = [jnp.asarray(x[:, :1], jnp.float32) for x in inputs()[:5]]
    state = jnp.asarray(inputs()[5], jnp.float32)
    program = jax.jit(functools.partial(gated_delta_rule, state=state)).lower(*arrays)
    assert "while" not in program.as_text()
    assert program.as_text().count("dot_general") == 2


@pytest.mark.parametrize("t", [2, 64])
def test_bfloat16_inputs_are_summed_in_float32(t):
    arrays = inputs(t=t, seed=4)
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in arrays[:3]]
    rest = [jnp.asarray(x, jnp.float32) for x in arrays[3:]]
    out, state = gated_delta_rule(*rounded, *rest[:2], state=rest[2])
    exact = [x.astype(jnp.float32) for x in rounded]
    known, last = gated_delta_rule(*exact, *rest[:2], state=rest[2])
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    # CPUs multiply float32 operands exactly, so only the output is rounded.
    np.testing.assert_array_equal(out, known.astype(jnp.bfloat16))
    np.testing.assert_allclose(state, last, atol=1e-6)


def test_values_equal_transformers():
    torch = pytest.importorskip("torch")
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    arrays = [np.array(x, np.float32) for x in inputs()]
    actual = gated_delta_rule(*map(jnp.asarray, arrays[:5]), state=jnp.asarray(arrays[5]))
    q, *rest, state = map(torch.tensor, arrays)
    options = {"initial_state": state, "output_final_state": True}
    for reference in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
        # It scales queries by K ** -0.5.
        out, last = reference(q * K**0.5, *rest, **options)
        np.testing.assert_allclose(actual[0], out, atol=2e-5)
        np.testing.assert_allclose(actual[1], last, atol=2e-5)


def test_values_of_decays_of_channels_equal_transformers():
    torch = pytest.importorskip("torch")
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    arrays = [np.array(x, np.float32) for x in inputs(per_channel=True)]
    actual = gated_delta_rule(*map(jnp.asarray, arrays[:5]), state=jnp.asarray(arrays[5]))
    q, *rest, state = map(torch.tensor, arrays)
    options = {"initial_state": state, "output_final_state": True}
    out, last = kimi.recurrent_kimi_delta_attention(q * K**0.5, *rest, **options)
    np.testing.assert_allclose(actual[0], out, atol=2e-5)
    np.testing.assert_allclose(actual[1], last, atol=2e-5)


LAYOUTS = {
    "two": dict(length=2),
    "eight": dict(length=8),
    "all axes": dict(rows=2, heads=2, length=2),
    "rows and heads": dict(rows=2, heads=4),
    "more devices than heads": dict(heads=8),
}


@pytest.mark.slow_except(
    "eight-False-True", "two-True-True", "two-False-False", "all axes-False-True"
)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_length_over_devices_equals_one_device(name, per_channel, is_packed):
    run = wide(is_packed, layout=layout(**LAYOUTS[name]))
    actual = both(run, inputs("random", per_channel, WIDE), jnp.float32)
    assert_agree(actual, on_one_device(per_channel, is_packed), bound=4e-6)


def test_a_step_of_generation_is_computed_by_all_devices_of_a_split_length():
    arrays = [jnp.asarray(x[:, :1], jnp.float32) for x in inputs()[:5]]
    state = jnp.asarray(inputs()[5], jnp.float32)
    actual = gated_delta_rule(*arrays, state=state, layout=layout(length=8))
    for a, b in zip(actual, gated_delta_rule(*arrays, state=state), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("with_layout", [False, True])
def test_axes_of_the_kind_explicit(with_layout):
    explicit = layout(2, 2, 2, AxisType.Explicit)
    arrays = [jnp.asarray(x, jnp.float32) for x in inputs(t=WIDE)]
    known = gated_delta_rule(*arrays[:5], state=arrays[5])
    spec = jax.P("rows", None, "heads"), jax.P("rows", "heads")
    split = [
        jax.device_put(x, jax.NamedSharding(explicit.mesh, spec[i == 5]))
        for i, x in enumerate(arrays)
    ]
    run = functools.partial(gated_delta_rule, layout=explicit if with_layout else None)
    actual = jax.jit(lambda *x: run(*x[:5], state=x[5]))(*split)
    length = "length" if with_layout else None
    assert jax.typeof(actual[0]).sharding.spec == jax.P("rows", length, "heads", None)
    assert jax.typeof(actual[1]).sharding.spec == jax.P("rows", "heads", None, None)
    for a, b in zip(actual, known, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, atol=2e-6)


@pytest.mark.parametrize("per_channel", [False, True])
def test_programs_of_64_bits_keep_their_dtype_and_sum_in_float32(per_channel):
    arrays = inputs(per_channel=per_channel, t=16)
    known = gated_delta_rule(*(jnp.asarray(x, jnp.float32) for x in arrays[:5]))
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in arrays[:5]]
        segments = jnp.ones((B, 16), jnp.int64)
        run = functools.partial(gated_delta_rule, segments=segments, layout=layout(length=2))
        out, state = run(*wide)
        assert out.dtype == jnp.float64 and state.dtype == jnp.float32
        np.testing.assert_allclose(out, known[0], atol=2e-6)


def test_vmap_and_forward_mode_equal_the_calls_one_by_one():
    arrays = [jnp.asarray(x, jnp.float32) for x in inputs(t=20)]
    run = functools.partial(rule(), *arrays[:1])
    many = jax.vmap(lambda k: run(k, *arrays[2:])[0])(jnp.stack([arrays[1], -arrays[1]]))
    np.testing.assert_allclose(many[0], run(*arrays[1:])[0], atol=1e-6)
    along = jnp.ones_like(arrays[1])
    slope = jax.jvp(lambda k: run(k, *arrays[2:])[0].sum(), (arrays[1],), (along,))[1]
    known = jax.grad(lambda k: run(k, *arrays[2:])[0].sum())(arrays[1]).sum()
    np.testing.assert_allclose(slope, known, rtol=1e-4)


def test_the_backward_pass_keeps_states_of_groups_only(enable_xla_optimizations):
    """An automatic derivative of chunks would keep their matrices and states for all tokens."""
    t, n, size = 4096, 2, 64
    like = jax.ShapeDtypeStruct((1, t, n, size), jnp.float32)
    scalar = jax.ShapeDtypeStruct((1, t, n), jnp.float32)
    loss = jax.grad(lambda *x: gated_delta_rule(*x)[0].sum(), (0, 1, 2, 3, 4))
    program = jax.jit(loss).lower(like, like, like, scalar, scalar).compile()
    array, states = 4 * t * n * size, 4 * t // GROUP_TOKENS * n * size * size
    # Four arrays of the inputs' size in another layout or of cotangents.
    assert program.memory_analysis().temp_size_in_bytes < 4 * array + states + 3 * 2**20


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "chunk=48 must be a power of 2", {"chunk": 48}),
        (ValueError, "beta has shape .* must be", {"beta": jnp.ones((B, 3, N))}),
        (ValueError, "log_decay has shape", {"log_decay": jnp.ones((B, T, N, K + 1))}),
        (ValueError, "state has shape", {"state": jnp.ones((B, N, V, K))}),
        (ValueError, "segments has shape", {"segments": jnp.ones((B, 3), int)}),
        (TypeError, "segments is float32, must be integers", {"segments": jnp.ones((B, T))}),
        (TypeError, "layout is a str", {"layout": "length"}),
        (TypeError, "v is int32", {"v": jnp.ones((B, T, N, V), int)}),
    ],
)
def test_wrong_arguments_raise_errors_that_name_the_argument(error, message, change):
    arrays = dict(zip(NAMES, (jnp.asarray(x, jnp.float32) for x in inputs()), strict=True))
    with pytest.raises(error, match=message):
        gated_delta_rule(**(arrays | change))


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("heads", "channels"), [(0, 4), (2, 0), (0, 0)])
@pytest.mark.parametrize("t", [0, 1, 3])
def test_no_heads_or_no_key_channels_raise_value_error(t, heads, channels, per_channel):
    q, v = jnp.ones((1, t, heads, channels)), jnp.ones((1, t, heads, 5))
    log_decay = jnp.zeros(q.shape if per_channel else q.shape[:3])
    with pytest.raises(ValueError, match="neither its heads nor its key channels may be 0"):
        gated_delta_rule(q, q, v, log_decay, jnp.ones(q.shape[:3]))


def test_a_length_that_devices_cannot_share_raises_value_error():
    arrays = [jnp.asarray(x, jnp.float32) for x in inputs()[:5]]
    with pytest.raises(ValueError, match="77 .* cannot be split over the 8 devices.*80"):
        gated_delta_rule(*arrays, layout=layout(length=8))


def test_without_tokens_the_state_is_unchanged():
    arrays = [jnp.asarray(x[:, :0], jnp.float32) for x in inputs()[:5]]
    state = jnp.asarray(inputs()[5], jnp.float32)
    out, after = gated_delta_rule(*arrays, state=state, segments=jnp.zeros((B, 0), int))
    assert out.shape == (B, 0, N, V)
    np.testing.assert_array_equal(after, state)
