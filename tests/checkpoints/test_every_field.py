"""Every field of position methods, patterns and memories is read back as it was saved, or refused.

The fields come from the classes, so a new one is tested as soon as it is there.
"""

import dataclasses
import json
import typing

import pytest
from convert_support import tiny_config
from hypothesis import given
from hypothesis import strategies as st
from rope_examples import HEAD_DIM, rope_examples

from lcjax.attention import Causal, Chunked, DualChunk, Landmark, Pattern, Sliding
from lcjax.attention.landmark.pattern import LOSSES, SELECT
from lcjax.checkpoints import config_from_hf, config_to_hf
from lcjax.checkpoints.families import FAMILIES
from lcjax.errors import InputError
from lcjax.memory import (
    AutoCompressorSection,
    BeaconSection,
    CepeSection,
    Memory,
    QueryAware,
    Random,
    RetroSection,
    SharedLlmSection,
)
from lcjax.memory.context_tree import Policy, Tree
from lcjax.models import LayerKind, ModelConfig, preset
from lcjax.rope import Linear, NoRotation, Rope

# What a field may be changed to, by its type; the classes refuse what they cannot have.
VALUES = {
    int: (1, 2, 3, 4, 5, 8, 9, 16, 24, 32, 48, 128),
    float: (0.25, 0.5, 1.5, 2.0, 6.0, 20.0, 1e5),
    bool: (False, True),
    type(None): (None,),
    str: (
        *("per_token_and_head", "per_head_and_chunk", "predict", "skip", "drop"),
        *("square", "linear", "strided", "fixed", "merged", "split", "silu", "tanh"),
        *("index", "frequency", "bottom", "top", "interleaved", "paper", "released", "none"),
    ),
    tuple: (
        *((), (1,), (2,), (4,), (1, 2), (2, 4), (8, 2, 1), (1.5, 2.0, 3.0, 4.0)),
        (1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0),  # one for each pair of 16 rotary channels
    ),
    Tree: (Tree((8, 2), 5.0), Tree((4, 2, 1), None), Tree((4, 2, 1), 2.5)),
    Policy: (QueryAware(), Random()),
}


def library_choices(registry):
    """The choices of a registry without those that other tests have registered."""
    choices = registry.get_known_choices().items()
    return {name: kind for name, kind in choices if kind.__module__.startswith("lcjax.")}


def fields_of(starts):
    return [
        pytest.param(start, field.name, id=f"{name}.{field.name}")
        for name, start in starts.items()
        for field in dataclasses.fields(start)
    ]


def others(start, name):
    """Copies of `start` with other values of one field."""
    hint, value = typing.get_type_hints(type(start))[name], getattr(start, name)
    kinds = [hint] if typing.get_origin(hint) is tuple else typing.get_args(hint) or [hint]
    values = [x for kind in kinds for x in VALUES.get(typing.get_origin(kind) or kind, ())]
    # The other examples of the class have the values of options that no other class has.
    values += [x[name] for x in getattr(start, "examples", ()) if name in x]
    if hint is ModelConfig:
        changes = {"rope": Linear(theta=1e4, factor=3.0)}, {"num_layers": 1}, {"num_layers": 2}
        values = [value.replace(**change) for change in changes]
    for other in values:
        if other != value:
            try:
                yield dataclasses.replace(start, **{name: other})
            except (InputError, TypeError):
                continue


def number_saved(configs):
    """The number of configs that can be saved; all of these are read back as they are."""
    count = 0
    for config in configs:
        try:
            hf = config_to_hf(config)
        except InputError:
            continue
        loaded = config_from_hf(json.loads(json.dumps(hf)))
        family = FAMILIES.get(hf["model_type"])
        if family and family.interleaved:  # such a family is always stated
            config = config.replace(family=hf["model_type"])
        assert loaded == config.replace(pattern=config.pattern.for_inference())
        count += 1
    return count


def models_under(family, patterns):
    """Models under each pattern, but those whose files are missing."""
    for pattern in patterns:
        try:
            yield tiny_config(family, pattern=pattern)
        except InputError as error:
            assert "pattern.file" in str(error)


SAVED_PATTERNS = {
    "s2": Pattern.get_choice_class("s2")(),  # of training: the model is saved without it
    "sliding": Sliding(7),
    "chunked": Chunked(7),  # a Llama 4 without experts
    "landmark": Landmark(block=8, top_k=2, train_length=64, token=9),
    "dual_chunk": DualChunk(chunk=16, local=4, growth="linear"),
}
PATTERNS = {
    name: SAVED_PATTERNS.get(name) or kind(**kind.examples[0])
    for name, kind in library_choices(Pattern).items()
}


@pytest.mark.parametrize(("pattern", "name"), fields_of(PATTERNS))
def test_every_field_of_patterns(pattern, name):
    family = "qwen2" if isinstance(pattern, DualChunk) else "llama"
    saved = number_saved(models_under(family, others(pattern, name)))
    is_known = Pattern.get_choice_name(type(pattern)) in SAVED_PATTERNS
    is_known |= bool(pattern.for_inference().parameters)  # beside the plain model
    # vLLM has one kind of growth only.
    assert bool(saved) == (is_known and name != "growth")


@given(
    block=st.integers(2, 70),
    top_k=st.none() | st.integers(1, 9),
    select=st.sampled_from(SELECT),
    spare=st.integers(0, 600),
    token=st.integers(0, 263),
    loss=st.sampled_from(LOSSES),
)
def test_every_landmark_pattern(block, top_k, select, spare, token, loss):
    length = (top_k or 0) * block + 2 * block + spare
    pattern = Landmark(block, top_k, select, length, token, loss)
    assert number_saved([tiny_config(pattern=pattern)]) == 1


def test_a_pattern_of_some_layers_is_not_saved_as_that_of_all():
    pattern = SAVED_PATTERNS["dual_chunk"]
    for layers in ((LayerKind(), LayerKind(pattern=Sliding(8))), (LayerKind(pattern=Causal()),)):
        with pytest.raises(InputError, match="vLLM has it for all layers"):
            config_to_hf(tiny_config("qwen2", pattern=pattern, layers=layers))


def test_an_encoder_that_is_no_bidirectional_one_is_not_saved_as_one():
    encoder = preset("tiny-encoder")
    assert number_saved([encoder]) == 1
    with pytest.raises(InputError, match=r"in both directions only, .*Sliding\(window=8\)"):
        config_to_hf(encoder.replace(pattern=Sliding(8)))


SECTIONS = {
    "cepe": CepeSection(encoder="tiny-encoder"),
    "shared_llm": SharedLlmSection(layers=1, chunk=16, ratios=(4, 2, 1)),
    "beacon": BeaconSection(chunk=16, ratio=4, ratios=(2, 4)),
    "auto_compressor": AutoCompressorSection(chunk=16, summary=3),
    "retro": RetroSection(encoder_layers=1, chunk=4, neighbour_tokens=16),
}
MEMORIES = {
    name: section.memory(preset("tiny"), section.encoder and preset(section.encoder))
    for name, section in SECTIONS.items()
}


def test_every_memory_has_a_case():
    assert MEMORIES.keys() == library_choices(Memory).keys()


def with_memory(memories):
    """Models with those of the memories that fit."""
    for memory in memories:
        try:
            yield preset("tiny").replace(memory=memory)
        except InputError:
            continue


@pytest.mark.parametrize(("memory", "name"), fields_of(MEMORIES))
def test_every_field_of_memories(memory, name):
    assert number_saved(with_memory([memory])) == 1
    assert number_saved(with_memory(others(memory, name)))


# What is null is filled with the checkpoint's own values.
ROPES = {
    name.removesuffix("-0"): rope
    for name, rope in rope_examples(theta=1e4, length=64).items()
    if name.endswith("-0")
}


def test_every_position_method_has_a_case():
    assert ROPES.keys() == library_choices(Rope).keys()


@pytest.mark.parametrize(("rope", "name"), fields_of(ROPES))
def test_every_field_of_position_methods(rope, name):
    assert number_saved([tiny_config(rope=rope, head_dim=HEAD_DIM)]) == 1
    ropes = [other for other in others(rope, name) if getattr(other, name) is not None]
    saved = number_saved(tiny_config(rope=other, head_dim=HEAD_DIM) for other in ropes)
    assert bool(saved) == (rope != NoRotation())  # which has no base
