"""Sections of `model.memory` as a run folder stores them."""

import json

import pytest

from lcjax.errors import InputError
from lcjax.memory import (
    AutoCompressorSection,
    BeaconSection,
    CepeSection,
    MemorySection,
    QueryAware,
    Random,
    RetroSection,
    SharedLlmSection,
)

SECTIONS = [
    CepeSection(encoder="tiny-encoder", layers=1, output_share=0.5),
    SharedLlmSection(layers=2, chunk=64, ratios=(8, 4), policy=QueryAware()),
    SharedLlmSection(noise=None, policy=Random(), placement="top"),
    BeaconSection(chunk=64, ratio=8, ratios=(2, 4)),
    AutoCompressorSection(chunk=64, summary=4, gradient_segments=2),
    RetroSection(chunk=32, layers=(6, 9)),
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: type(section).__name__)
def test_a_section_survives_json(section):
    assert MemorySection.from_dict(json.loads(json.dumps(section.to_dict()))) == section


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "mine"},
        {"type": "cepe", "colour": 1},
        {"type": "shared_llm", "ratios": [8], "policy": {"type": "mine"}},
    ],
)
def test_unknown_settings_are_an_error_of_one_line(fields):
    with pytest.raises(InputError, match="cannot be read .*import the module that registers"):
        MemorySection.from_dict(fields)
