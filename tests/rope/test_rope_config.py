"""Ropes and training positions as sections of YAML files and flags of the command line."""

from dataclasses import dataclass, field

import draccus
import jax
import pytest
from argument_types import check_other_types
from draccus.utils import DraccusException

from lcjax.errors import InputError
from lcjax.rope import (
    E2LLM,
    NTK,
    Clex,
    ClexPositions,
    DynamicNTK,
    E2Positions,
    LongRope,
    NoRotation,
    PlainPositions,
    Positions,
    Rope,
    Yarn,
    from_hf,
    stack_rotations,
)


@dataclass(frozen=True)
class Section:
    rope: Rope | None = None
    positions: Positions = field(default_factory=PlainPositions)


@pytest.mark.parametrize(
    "text, rope",
    [
        ({"type": "yarn", "factor": 8}, Yarn(factor=8.0)),
        ({"type": "ntk", "alpha": 29, "theta": 1e4}, NTK(alpha=29.0, theta=1e4)),
        (
            {"type": "dynamic_ntk", "factor": 4, "min_length": 32768},
            DynamicNTK(factor=4.0, min_length=32768),
        ),
        (
            {"type": "longrope", "short_factor": [1, 2], "long_factor": [2, 3.5]},
            LongRope(short_factor=(1.0, 2.0), long_factor=(2.0, 3.5)),
        ),
        ({"type": "clex", "act": "tanh"}, Clex(act="tanh")),
        ({"type": "e2_llm"}, E2LLM()),
    ],
)
def test_a_yaml_section_becomes_a_rope_and_back(text, rope):
    section = draccus.decode(Section, {"rope": text})
    assert section.rope == rope
    assert draccus.decode(Section, draccus.encode(section)) == section


def test_flags_choose_and_set_a_rope():
    section = draccus.parse(Section, args=["--rope.type=yarn", "--rope.factor=8"])
    assert section == Section(rope=Yarn(factor=8.0))
    assert draccus.parse(Section, args=[]).rope is None


def test_a_flag_changes_one_field_of_a_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("rope:\n  type: yarn\n  factor: 8\n  ramp: frequency\n")
    section = draccus.parse(Section, config_path=file, args=["--rope.factor=16"])
    assert section.rope == Yarn(factor=16.0, ramp="frequency")


def test_positions_are_plain_unless_chosen():
    assert draccus.decode(Section, {}).positions == PlainPositions()
    chosen = draccus.decode(Section, {"positions": {"type": "e2_llm", "max_scale": 10}})
    assert chosen.positions == E2Positions(max_scale=10)
    section = draccus.parse(Section, args=["--positions.type=clex", "--positions.min_factor=2"])
    assert section.positions == ClexPositions(min_factor=2)


@pytest.mark.parametrize(
    "text, message",
    [
        ({"type": "yarn"}, "Missing required field.*`factor` for Yarn"),
        ({"type": "yarn", "facter": 8}, "`facter` are not valid for Yarn"),
        ({"type": "yarn", "factor": "x"}, "Couldn't parse 'x' into a float"),
    ],
)
def test_misspelt_sections_are_rejected(text, message):
    with pytest.raises(DraccusException, match=message):
        draccus.decode(Section, {"rope": text})


@pytest.mark.parametrize(
    "method",
    [
        Yarn(factor=2.0, original_length=64, theta=1e4),
        NoRotation(),
        Clex(max_factor=4, original_length=64, theta=1e4),
    ],
)
def test_arguments_of_other_types_are_input_errors(method):
    params = method.init(jax.random.key(0), 16)
    check_other_types(method.init, "head_dim", key=jax.random.key(0))
    check_other_types(method.resolve)
    check_other_types(method.extended_length)
    check_other_types(method.to_hf)
    check_other_types(method.frequencies, head_dim=16, length=128, params=params)
    check_other_types(method.rotation, head_dim=16, length=128, params=params)
    check_other_types(stack_rotations)
    check_other_types(from_hf)
    if not isinstance(method, NoRotation):  # which reads no argument
        with pytest.raises(InputError, match="length='x' must be of type int"):
            method.rotation(16, "x")
