"""Numbers that no position method can use: non-finite, of another type, or out of range."""

import dataclasses
import typing

import numpy as np
import pytest

from lcjax.attention import Pattern
from lcjax.errors import InputError
from lcjax.rope import (
    NTK,
    Linear,
    LongRope,
    Positions,
    Rope,
    Yarn,
    from_hf,
)

NOT_NUMBERS = [float("nan"), float("inf"), -float("inf"), np.float32("inf"), True, "2", 10**400]


def number_fields(registry):
    """(class, name of a field of numbers, whether it holds a tuple of them) of all choices."""
    fields = []
    for cls in registry.get_known_choices().values():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
            if {int, float} & set(kinds):
                label = f"{cls.__name__}.{field.name}"
                fields.append(pytest.param(cls, field.name, Ellipsis in kinds, id=label))
    return fields


def make(cls, **fields):
    """An instance whose other required fields are 2, or (2.0, 2.0)."""
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING:
            kinds = typing.get_args(typing.get_type_hints(cls)[field.name])
            fields.setdefault(field.name, (2.0, 2.0) if Ellipsis in kinds else 2)
    return cls(**fields)


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize("cls, name, is_tuple", number_fields(Rope))
def test_number_fields_of_ropes_hold_finite_numbers(cls, name, is_tuple, value):
    for wrong in [value, (value, 1.0)] if is_tuple else [value]:
        with pytest.raises(InputError, match=rf"^rope\.{name}=.* must .*finite") as error:
            make(cls, **{name: wrong})
        assert len(str(error.value)) < 200 and "\n" not in str(error.value)


@pytest.mark.parametrize("cls, name, is_tuple", number_fields(Rope))
def test_number_fields_of_ropes_are_none_only_where_the_default_is(cls, name, is_tuple):
    field = cls.__dataclass_fields__[name]
    if field.default is None:
        make(cls, **{name: None})
        return
    with pytest.raises(InputError, match=rf"^rope\.{name}=None .* must .*finite"):
        make(cls, **{name: None})


@pytest.mark.parametrize("value", [*NOT_NUMBERS[:-1], 2.5], ids=repr)
@pytest.mark.parametrize(
    "cls, name, is_tuple", [*number_fields(Positions), *number_fields(Pattern)]
)
def test_number_fields_of_positions_and_patterns_hold_numbers(cls, name, is_tuple, value):
    with pytest.raises(InputError, match=rf"(positions|pattern)\.{name}\b.* must "):
        make(cls, **{name: (value,) if is_tuple else value})


def test_numpy_numbers_and_whole_numbers_are_numbers():
    rope = Yarn(theta=10_000, factor=np.float32(4), original_length=np.int64(64))
    expected = Yarn(theta=1e4, factor=4.0, original_length=64).frequencies(16, 1)
    np.testing.assert_array_equal(rope.frequencies(16, 1)[0], expected[0])


@pytest.mark.parametrize("value", [1e30, -1e30, 2**70, np.float64(1e300)], ids=repr)
@pytest.mark.parametrize("cls, name, is_tuple", number_fields(Rope))
def test_number_fields_of_ropes_are_bounded(cls, name, is_tuple, value):
    with pytest.raises(InputError, match=rf"^rope\.{name}=.* must be ") as error:
        make(cls, **{name: (value, 1.0) if is_tuple else value})
    assert len(str(error.value)) < 200 and "\n" not in str(error.value)


OUT_OF_RANGE = [
    Yarn(theta=1e4, factor=2.0, original_length=64, attention_factor=1e9),
    Yarn(theta=1e4, factor=2.0, original_length=64, attention_factor=1e-300),
    Yarn(theta=1e4, factor=2.0, original_length=64, mscale=-1e9, mscale_all_dim=1.0),
    # the denominator of the attention factor is 0
    Yarn(theta=1e4, factor=np.exp(10.0), original_length=64, mscale=1.0, mscale_all_dim=-1.0),
    LongRope(
        theta=1e4, short_factor=(1.0,) * 16, long_factor=(1e-300,) * 16, original_length=64,
        factor=2.0,
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rope", OUT_OF_RANGE, ids=lambda rope: rope.type)
def test_frequencies_and_scales_that_float32_cannot_hold_raise_input_error(rope):
    with pytest.raises(InputError, match=rf"^rope {rope.type} with theta=.* in float32") as error:
        rope.rotation(32, 1000)
    assert "\n" not in str(error.value)


def test_large_but_usable_numbers_stay_allowed():
    for rope in (
        Yarn(theta=1e12, factor=1e6, original_length=64),
        NTK(theta=1e12, alpha=1e6),
        Linear(theta=1e4, factor=2**31 - 1),
    ):
        inv_freq, scale = rope.frequencies(32, 1)
        assert np.all(inv_freq > 0) and np.isfinite(scale)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400, "8"])
@pytest.mark.parametrize(
    "kind, key",
    [
        ("linear", "factor"),
        ("yarn", "beta_fast"),
        ("clex", "max_factor"),
        ("default", "rope_theta"),
    ],
)
def test_hugging_face_configs_without_finite_numbers_raise_input_error(kind, key, value):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "max_factor": 4, key: value}
    with pytest.raises(InputError, match=rf"^rope_parameters\.{key}=.* finite number") as error:
        from_hf({"rope_parameters": rope, "max_position_embeddings": 64})
    assert "\n" not in str(error.value)
