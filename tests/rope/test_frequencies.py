"""Frequencies of every method against the authors' arrays and the printed numbers of papers."""

import math

import jax
import numpy as np
import pytest
from rope_golden import arrays, cos_sin_tolerance, document, fixed_cases, make_rope

from lcjax.errors import InputError
from lcjax.rope import E2LLM, NTK, Default, DynamicNTK, Linear, Llama3, LongRope, Yarn, rotate

turn = jax.jit(rotate)


def by_id(case):
    return case["id"]


@pytest.mark.parametrize("case", fixed_cases(), ids=by_id)
def test_frequencies_equal_the_authors_code(case):
    length = case.get("seq_len", 8192)
    inv_freq, scale = make_rope(case).frequencies(case["head_dim"], length)
    assert inv_freq.dtype == np.float32
    np.testing.assert_allclose(inv_freq, arrays()[f"{case['id']}/inv_freq"], rtol=1e-6)
    np.testing.assert_allclose(inv_freq, arrays()[f"{case['id']}/inv_freq64"], rtol=1e-6)
    assert scale == pytest.approx(case["attention_scaling"], rel=1e-6)


@pytest.mark.parametrize("case", fixed_cases(), ids=by_id)
def test_rotating_a_unit_vector_gives_the_authors_cos_and_sin(case):
    inv_freq, scale = make_rope(case).frequencies(case["head_dim"], case.get("seq_len", 8192))
    half = case["head_dim"] // 2
    positions = np.asarray(case["positions"])
    x = np.repeat([1, 0], half).astype(np.float32) * np.ones((1, len(positions), 1, 1), np.float32)
    cos_sin = np.asarray(turn(x, positions[None], inv_freq, scale))[0, :, 0]
    tolerance = cos_sin_tolerance(scale, positions, inv_freq)
    for name, ours in (("cos", cos_sin[:, :half]), ("sin", cos_sin[:, half:])):
        assert (np.abs(ours - arrays()[f"{case['id']}/{name}"]) <= tolerance).all(), name


# d = 128, theta = 1e4, printed to seven digits
PAIRS = (0, 1, 8, 16, 20, 21, 30, 40, 46, 63)
PRINTED = {
    "default": "1 8.659643e-1 3.162278e-1 1e-1 5.623413e-2 4.869675e-2 1.333521e-2 3.162278e-3 "
    "1.333521e-3 1.154782e-4",
    "linear 8": "1.25e-1 1.082455e-1 3.952847e-2 1.25e-2 7.029267e-3 6.087094e-3 1.666902e-3 "
    "3.952847e-4 1.666902e-4 1.443477e-5",
    "ntk 57": "1 8.121364e-1 1.892482e-1 3.581488e-2 1.558043e-2 1.265343e-2 1.944774e-3 "
    "2.427498e-4 6.965185e-5 2.025933e-6",
    "yarn 16": "1 8.659643e-1 3.162278e-1 1e-1 5.623413e-2 4.694086e-2 8.526844e-3 "
    "8.817890e-4 8.334509e-5 7.217387e-6",
}
ROPES = {
    "default": Default(theta=1e4),
    "linear 8": Linear(theta=1e4, factor=8.0),
    "ntk 57": NTK(theta=1e4, alpha=57.0),
    "yarn 16": Yarn(theta=1e4, factor=16.0, original_length=4096),
}


@pytest.mark.parametrize("name", PRINTED)
def test_frequencies_have_the_printed_values(name):
    inv_freq, _ = ROPES[name].frequencies(128, 4096)
    printed = np.array(PRINTED[name].split(), np.float64)
    np.testing.assert_allclose(inv_freq[list(PAIRS)], printed, rtol=1e-6)


def test_llama3_blends_only_the_middle_pairs():
    rope = Llama3(theta=5e5, factor=8.0, original_length=8192)
    inv_freq, _ = rope.frequencies(128, 1)
    plain, _ = Default(theta=5e5).frequencies(128, 1)
    np.testing.assert_allclose(inv_freq[:29], plain[:29], rtol=1e-7)
    np.testing.assert_allclose(inv_freq[35:], plain[35:] / 8, rtol=1e-7)
    expected = [2.166571e-3, 1.371894e-3, 5.248462e-4, 1.785078e-4]
    np.testing.assert_allclose(inv_freq[[29, 30, 32, 34]], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "theta, head_dim, length, low, high",
    [(1e4, 128, 4096, 20, 46), (5e5, 64, 4096, 7, 16), (1e6, 128, 32768, 23, 40)],
)
def test_yarn_changes_pairs_between_its_bounds(theta, head_dim, length, low, high):
    rope = Yarn(theta=theta, factor=8.0, original_length=length)
    inv_freq, _ = rope.frequencies(head_dim, 1)
    divisor = Default(theta=theta).frequencies(head_dim, 1)[0].astype(np.float64) / inv_freq
    np.testing.assert_allclose(divisor[: low + 1], 1, rtol=1e-6)
    np.testing.assert_allclose(divisor[high:], 8, rtol=1e-6)
    inside = divisor[low : high + 1]
    assert (np.diff(inside) > 0).all()


def test_yarn_upper_bound_may_lie_past_the_last_pair():
    """Published code cuts the bound at d - 1, not d/2 - 1: the slowest pair is blended here."""
    rope = Yarn(theta=1e4, factor=4.0, original_length=131072)
    plain, _ = Default(theta=1e4).frequencies(128, 1)
    ramp = (63 - 45) / (70 - 45)  # bounds 45.03 and 69.11, rounded outwards
    last = rope.frequencies(128, 1)[0][-1]
    assert last / plain[-1] == pytest.approx(ramp / 4 + 1 - ramp, rel=1e-6)


@pytest.mark.parametrize("factor, pair, ratio", [(8.0, 36, 2.30), (16.0, 38, 3.04)])
def test_yarn_ramps_differ_as_published_code_from_the_paper(factor, pair, ratio):
    index, _ = Yarn(theta=1e4, factor=factor, original_length=4096).frequencies(128, 1)
    turns, _ = Yarn(theta=1e4, factor=factor, original_length=4096, ramp="frequency").frequencies(
        128, 1
    )
    assert index[pair] / turns[pair] == pytest.approx(ratio, abs=0.01)
    np.testing.assert_array_equal(index[:20], turns[:20])
    np.testing.assert_array_equal(index[46:], turns[46:])


def test_yarn_frequency_ramp_is_llama3_with_the_bounds_of_yarn():
    yarn = Yarn(theta=5e5, factor=8.0, original_length=8192, ramp="frequency")
    llama = Llama3(
        theta=5e5, factor=8.0, original_length=8192, low_freq_factor=1.0, high_freq_factor=32.0
    )
    np.testing.assert_allclose(yarn.frequencies(128, 1)[0], llama.frequencies(128, 1)[0], rtol=1e-6)


def test_llama3_with_equal_bounds_is_a_step():
    """As transformers computes it for Llama 4 Scout, whose bounds are both 1."""
    plain, _ = Llama3(theta=5e5, factor=1.0, original_length=8192).frequencies(128, 1)
    rope = Llama3(theta=5e5, factor=16.0, original_length=8192, high_freq_factor=1.0)
    is_long = 2 * math.pi / plain > 8192  # the wavelength
    assert 0 < is_long.sum() < 64
    want = np.where(is_long, plain / 16, plain)
    np.testing.assert_allclose(rope.frequencies(128, 1)[0], want, rtol=1e-6)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"factor": 1.0}, 1.0),
        ({"factor": 8.0}, 0.1 * math.log(8) + 1),
        ({"factor": 8.0, "attention_factor": 0.7}, 0.7),
        ({"factor": 8.0, "mscale": 2.0}, 0.1 * math.log(8) + 1),
        (
            {"factor": 8.0, "mscale": 2.0, "mscale_all_dim": 0.5},
            (0.2 * math.log(8) + 1) / (0.05 * math.log(8) + 1),
        ),
    ],
)
def test_yarn_attention_factor_follows_its_options(options, expected):
    _, scale = Yarn(theta=1e4, original_length=4096, **options).frequencies(64, 1)
    assert scale == pytest.approx(expected, rel=1e-12)


def test_yarn_extrapolation_of_zero_is_interpolation():
    rope = Yarn(theta=1e4, factor=8.0, original_length=4096, extrapolation=0.0)
    linear = Linear(theta=1e4, factor=8.0)
    np.testing.assert_allclose(rope.frequencies(64, 1)[0], linear.frequencies(64, 1)[0], rtol=1e-6)


@pytest.mark.parametrize(
    "factor, min_length, alphas",
    [
        (2.0, None, {4096: 1, 8192: 3, 16384: 7, 131072: 63}),
        (4.0, 32768, {4096: 29, 32768: 29, 65536: 61, 131072: 125}),
        (8.0, 65536, {4096: 121, 65536: 121, 131072: 249}),
    ],
)
def test_dynamic_ntk_strength_follows_the_request(factor, min_length, alphas):
    rope = DynamicNTK(theta=1e4, factor=factor, original_length=4096, min_length=min_length)
    for length, alpha in alphas.items():
        assert rope.alpha(length) == alpha
        same = NTK(theta=1e4, alpha=float(alpha)).frequencies(128, 1)[0]
        np.testing.assert_array_equal(rope.frequencies(128, length)[0], same)


def test_dynamic_ntk_remembers_no_request():
    rope = DynamicNTK(theta=1e4, factor=2.0, original_length=4096)
    first, _ = rope.frequencies(128, 4096)
    rope.frequencies(128, 65536)
    np.testing.assert_array_equal(rope.frequencies(128, 4096)[0], first)
    assert rope.frequencies(128, 4097)[0][-1] < first[-1]


def test_longrope_switches_after_the_trained_length_and_keeps_its_scale():
    rope = LongRope(
        theta=1e4, short_factor=(1.0, 2.0), long_factor=(3.0, 4.0), original_length=4096, factor=16
    )
    plain = Default(theta=1e4).frequencies(4, 1)[0]
    at, scale_at = rope.frequencies(4, 4096)
    beyond, scale_beyond = rope.frequencies(4, 4097)
    np.testing.assert_allclose(plain / at, [1, 2], rtol=1e-6)
    np.testing.assert_allclose(plain / beyond, [3, 4], rtol=1e-6)
    assert scale_at == scale_beyond == pytest.approx(1.154701, rel=1e-6)


@pytest.mark.parametrize("case", document()["e2_llm_positions"]["inference_scale"])
def test_e2_scale_is_the_number_of_trained_lengths_in_the_request(case):
    rope = E2LLM(theta=1e4, original_length=case["L"])
    assert rope.scale(case["total_len"]) == case["g"]
    plain = Default(theta=1e4).frequencies(64, 1)[0]
    inv_freq, _ = rope.frequencies(64, case["total_len"])
    np.testing.assert_allclose(inv_freq * np.float32(case["g"]), plain, rtol=1e-6)


def test_e2_with_a_fixed_scale_is_interpolation_at_every_length():
    rope = E2LLM(theta=1e4, factor=8.0, original_length=4096)
    assert not rope.depends_on_length
    assert E2LLM().depends_on_length
    for length in (1, 4096, 32768):
        np.testing.assert_array_equal(
            rope.frequencies(64, length)[0], Linear(theta=1e4, factor=8.0).frequencies(64, 1)[0]
        )


def test_two_ropes_in_one_process_give_two_results():
    first, _ = Default(theta=1e4).frequencies(64, 1)
    second, _ = Default(theta=5e5).frequencies(64, 1)
    assert first[0] == second[0] == 1
    assert (first[1:] > second[1:]).all()


def test_open_fields_are_filled_from_the_checkpoint_and_set_ones_stay():
    rope = Yarn(factor=8.0).resolve(theta=1e4, length=4096)
    assert rope == Yarn(theta=1e4, factor=8.0, original_length=4096)
    assert rope.resolve(theta=5e5, length=8192) == rope
    assert Default().resolve(theta=1e4, length=4096) == Default(theta=1e4)
    # an extension by min_length is the user's choice, never the checkpoint's
    assert DynamicNTK(factor=2.0).resolve(theta=1e4, length=64).min_length is None


@pytest.mark.parametrize(
    "rope, field",
    [
        (Default(), "theta"),
        (Yarn(theta=1e4, factor=8.0), "original_length"),
        (DynamicNTK(theta=1e4, factor=2.0), "original_length"),
        (E2LLM(theta=1e4), "original_length"),
        (LongRope(theta=1e4, short_factor=(1.0,) * 16, long_factor=(1.0,) * 16, factor=2.0),
         "original_length"),
    ],
    ids=lambda value: getattr(value, "type", value),
)  # fmt: skip
def test_unresolved_fields_are_named(rope, field):
    with pytest.raises(InputError, match=rf"^rope\.{field}=None .*resolve") as error:
        rope.frequencies(32, 100)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Linear(factor=0.5), r"rope\.factor=0\.5 must be .* x >= 1; .*\(rope linear\)"),
        (lambda: Yarn(factor=8.0, beta_fast=1.0), r"rope\.beta_fast=1\.0 .* above beta_slow=1\.0"),
        (lambda: Llama3(high_freq_factor=0.5), r"rope\.high_freq_factor=0\.5 .* low_freq_factor"),
        (
            lambda: LongRope(short_factor=(1.0, 1.0), long_factor=(1.0,)),
            r"rope\.long_factor=.* as many numbers as short_factor, 2",
        ),
        (
            lambda: LongRope(
                theta=1e4, short_factor=(1.0,), long_factor=(1.0,), original_length=8
            ).frequencies(8, 1),
            r"rope\.short_factor has 1 numbers for 8 rotary channels: longrope needs 4",
        ),
        (lambda: Default(theta=1e4).frequencies(5, 1), r"rotary channels=5 must be even"),
        (lambda: NTK(theta=1e4, alpha=2.0).frequencies(2, 1), r"rotary channels=2 .* at least 4"),
        (
            lambda: DynamicNTK(theta=1e4, factor=2.0, original_length=8).frequencies(8, 0),
            r"length=0 must be the number of tokens",
        ),
    ],
)
def test_bad_values_get_one_line_that_names_them(make, message):
    with pytest.raises(InputError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "rope", [Linear(factor=1), NTK(alpha=1), E2LLM(factor=1), DynamicNTK(factor=0.1)], ids=str
)
def test_values_at_their_limits_are_those_of_a_model_that_is_not_extended(rope):
    rope = rope.resolve(theta=1e4, length=8)
    np.testing.assert_allclose(rope.frequencies(4, 1)[0], [1.0, 1e-2], rtol=1e-6)
