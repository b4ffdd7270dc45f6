"""Hugging Face configs: what is read, what is written, and that transformers computes the same."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from rope_examples import HEAD_DIM, rope_examples

from lcjax.errors import InputError
from lcjax.rope import (
    E2LLM,
    NTK,
    Clex,
    Default,
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    NoRotation,
    Rope,
    Yarn,
    from_hf,
)

HEAD = 32
SHORT = tuple(1 + 0.02 * j for j in range(HEAD // 2))
LONG = tuple(1 + 4.0 * j for j in range(HEAD // 2))

# Values of published models and options that the examples of the types do not have.
ROPES = (
    Default(theta=1e4),
    Linear(theta=1e4, factor=8.0),
    NTK(theta=1e4, alpha=29.0),
    DynamicNTK(theta=1e4, factor=2.0, original_length=64),
    DynamicNTK(theta=1e4, factor=4.0, original_length=64, min_length=512),
    DynamicNTK(theta=1e4, factor=4.0, original_length=64, min_length=32),
    Yarn(theta=5e5, factor=8.0, original_length=256),
    Yarn(theta=1e4, factor=8.0, original_length=256, truncate=False, beta_fast=16.0),
    Yarn(theta=1e4, factor=4.0, original_length=131072),
    Yarn(theta=1e4, factor=8.0, original_length=256, mscale=1.0, mscale_all_dim=0.7),
    Yarn(theta=1e4, factor=8.0, original_length=256, attention_factor=1.1),
    Yarn(theta=1e4, factor=8.0, original_length=256, ramp="frequency"),
    Yarn(theta=1e4, factor=8.0, original_length=256, extrapolation=0.5),
    LongRope(theta=1e4, short_factor=SHORT, long_factor=LONG, original_length=64, factor=16.0),
    LongRope(
        theta=1e4, short_factor=SHORT, long_factor=LONG, original_length=64, attention_factor=1.2
    ),
    Llama3(theta=5e5, factor=8.0, original_length=128),
    Clex(theta=1e4, original_length=64, max_factor=8, param_factor=2, act="tanh", log_scale=True),
    E2LLM(theta=1e4, original_length=64),
    E2LLM(theta=1e4, factor=8.0, original_length=64),
    NoRotation(),
)
OPEN = (
    Default(),
    Linear(factor=8.0),
    DynamicNTK(factor=2.0),
    Yarn(factor=8.0),
    Llama3(),
    LongRope(short_factor=SHORT, long_factor=LONG),
    Clex(),
    E2LLM(),
)


def cases(*ropes, without=()):
    """(rope, rotary channels): `ropes` and the examples of all types, except of `without`."""
    named = [(rope.type, rope, HEAD) for rope in ropes]
    named += [(key, rope, HEAD_DIM) for key, rope in rope_examples(theta=1e4, length=16).items()]
    params = [pytest.param(*case, id=key) for key, *case in named if type(case[0]) not in without]
    return pytest.mark.parametrize(("rope", "head"), params)


@cases(*ROPES, *OPEN)
def test_export_then_import_is_the_identity(rope, head):
    entries = json.loads(json.dumps(rope.to_hf(head)))
    assert from_hf(entries) == rope
    # and under either spelling alone
    for other in ("rope_scaling", "rope_parameters"):
        assert from_hf({k: v for k, v in entries.items() if k != other or v is None}) == rope


@cases(*ROPES)
def test_import_survives_a_config_that_transformers_wrote_again(rope, head, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = hf_config(transformers, rope, head)
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert from_hf(written) == rope
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    again.save_pretrained(tmp_path)
    assert from_hf(json.loads((tmp_path / "config.json").read_text())) == rope


def hf_config(transformers, rope, head):
    model = {
        "hidden_size": 4 * head,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "vocab_size": 8,
    }
    return transformers.LlamaConfig(**{**model, **rope.to_hf(head)})


def hf_frequencies(config, length):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        function = LlamaRotaryEmbedding.compute_default_rope_parameters
    else:
        function = ROPE_INIT_FUNCTIONS[kind]
    inv_freq, scale = function(config, device="cpu", seq_len=length)
    return inv_freq.numpy(), scale


# A family exports layers without positions as `no_rope_layers`.
@cases(*ROPES, without=[NoRotation])
def test_transformers_computes_the_same_frequencies_from_the_export(rope, head):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = hf_config(transformers, rope, head)
    params = rope.init(jax.random.key(0), head)
    if isinstance(rope, Clex):  # log_scale changes queries, and no frequencies
        rope = dataclasses.replace(rope, log_scale=False)
    limit = rope.hf_limit  # beyond it transformers reads plain rope
    lengths = (1, 16, 17, 32, 33, 64, 65, 300, 512, 513, 4096)
    lengths = [n for n in lengths if limit is None or n <= limit]
    assert lengths or type(rope).hf_rope is Rope.hf_rope
    for length in lengths:
        inv_freq, scale = rope.frequencies(head, length, params)
        theirs, their_scale = hf_frequencies(config, length)
        np.testing.assert_allclose(inv_freq, theirs, rtol=1e-6, err_msg=str(length))
        assert scale == pytest.approx(their_scale, rel=1e-6)


def test_transformers_rotates_phi_channels_the_same():
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rope = Yarn(theta=1e4, factor=4.0, original_length=2048)
    config = transformers.PhiConfig(
        hidden_size=160, num_attention_heads=2, partial_rotary_factor=0.4, **rope.to_hf(HEAD)
    )
    theirs, scale = hf_frequencies(config, 1)
    inv_freq, our_scale = rope.frequencies(int(80 * 0.4), 1)
    np.testing.assert_allclose(inv_freq, theirs, rtol=1e-6)
    assert our_scale == pytest.approx(scale)


@cases(*ROPES)
def test_both_spellings_are_written(rope, head):
    entries = rope.to_hf(head)
    parameters, scaling = entries["rope_parameters"], entries["rope_scaling"]
    assert parameters["rope_theta"] == entries["rope_theta"]
    if parameters["rope_type"] == "default":
        assert scaling is None
        return
    assert scaling["type"] == parameters["rope_type"]
    assert scaling["factor"] == parameters["factor"] if "factor" in parameters else True
    if scaling["type"] in ("linear", "dynamic"):
        assert set(scaling) == {"type", "factor"}, "transformers before 4.43 takes no more"


PHI3 = {
    "rope_theta": 10000.0,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "su", "short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0]},
}


@pytest.mark.parametrize(
    "config, rope",
    [
        ({}, Default()),
        ({"rope_theta": 1e4, "rope_scaling": None}, Default(theta=1e4)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Default(theta=5e5)),
        ({"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 8}},
         Linear(theta=1e4, factor=8.0)),
        ({"rope_theta": 1e4, "max_position_embeddings": 4096,
          "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
         DynamicNTK(theta=1e4, factor=4.0, original_length=4096)),
        ({"max_position_embeddings": 32768, "rope_parameters": {
            "rope_type": "yarn", "factor": None, "rope_theta": 1e4, "beta_fast": None,
            "original_max_position_embeddings": 4096}},
         Yarn(theta=1e4, factor=8.0, original_length=4096)),
        ({"max_position_embeddings": 2048, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
         Yarn(theta=1e4, factor=4.0, original_length=2048)),
        ({"rope_theta": 5e5, "max_position_embeddings": 131072, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
         Llama3(theta=5e5, factor=8.0, original_length=8192)),
        (PHI3,
         LongRope(theta=1e4, short_factor=(1.0, 1.1), long_factor=(2.0, 3.0),
                  original_length=4096, factor=32.0)),
        ({"max_position_embeddings": 4096, "log_scale": True, "rope_scaling": {
            "type": "clex", "max_factor": 16, "param_factor": 1, "factor": 1}},
         Clex(original_length=4096, max_factor=16, log_scale=True)),
        ({"max_position_embeddings": 4096, "rope_theta": 1e4, "rope_scaling": {
            "type": "clex", "max_factor": 32, "param_factor": 2, "act": "tanh", "time_dt": 0.1,
            "factor": 1}},
         Clex(theta=1e4, original_length=4096, max_factor=32, param_factor=2, act="tanh",
              time_dt=0.1)),
    ],
)  # fmt: skip
def test_published_configs_are_read(config, rope):
    assert from_hf(config) == rope


def test_the_trained_length_of_longrope_is_also_a_top_level_key():
    rope = LongRope(theta=1e4, short_factor=(1.0, 1.1), long_factor=(2.0, 3.0))
    assert "original_max_position_embeddings" not in rope.to_hf(4)
    entries = dataclasses.replace(rope, original_length=4096).to_hf(4)
    assert entries["original_max_position_embeddings"] == 4096


def test_a_loader_resolves_missing_fields():
    rope = from_hf({"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert rope.resolve(theta=1e4, length=2048) == Linear(theta=1e4, factor=2.0)


def test_rope_parameters_that_contradict_lcjax_rope_raise_input_error():
    entries = NTK(theta=1e4, alpha=29.0).to_hf(HEAD)
    entries["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    with pytest.raises(InputError, match=r"^lcjax_rope \(type ntk\) .* changed since; delete"):
        from_hf(entries)
    del entries["lcjax_rope"]
    assert from_hf(entries).type == "linear"


@pytest.mark.parametrize(
    "config, message",
    [
        ({"rope_scaling": {"type": "mrope"}}, r"rope_type='mrope' .* known: clex, default"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_parameters\.factor=None .* type linear"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, r"rope_parameters\.factor='x'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0.5}},
            r"rope\.factor=0\.5 must be a number x >= 1; .*\(rope linear\)",
        ),
        (
            {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3"}},
            r"rope_parameters\.factor=None .* rope type llama3",
        ),
        ({"rope_scaling": {"type": "longrope"}}, r"rope_parameters\.short_factor=None"),
        ({"rope_theta": "big"}, r"rope_parameters\.rope_theta='big'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5}},
            r"rope_parameters\.rope_theta=5 is beside rope_scaling, .* top of the config; write it",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"full_attention"),
        ({"lcjax_rope": {"type": "nkt"}}, r"lcjax_rope\.type='nkt' .* known: .*ntk"),
        ({"lcjax_rope": {"type": "ntk", "beta": 1}}, r"lcjax_rope has unknown keys beta"),
        ({"lcjax_rope": {"type": "ntk"}}, r"lcjax_rope of type ntk lacks alpha"),
    ],
)
def test_configs_that_cannot_be_read_are_one_line(config, message):
    with pytest.raises(InputError, match=message) as error:
        from_hf(config)
    assert "\n" not in str(error.value)


def test_export_of_methods_that_depend_on_head_dim_requires_it():
    for rope in (ROPES[2], ROPES[4], ROPES[11]):
        with pytest.raises(InputError, match=r"call to_hf\(head_dim=\.\.\.\)"):
            rope.to_hf()
    with pytest.raises(InputError, match=r"rope\.theta=None \(ntk\)"):
        NTK(alpha=2.0).to_hf(HEAD)


def test_a_method_without_a_hugging_face_form_is_exported_as_plain_rope_and_read_back(monkeypatch):
    monkeypatch.setattr(Rope, "_choice_registry", Rope.get_known_choices().copy())

    @Rope.register_subclass("halved")
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Halved(Rope):
        by: float = 2.0

    rope = Halved(theta=1e4, by=3.0)
    exported = json.loads(json.dumps(rope.to_hf()))
    assert exported["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4}
    assert from_hf(exported) == rope and rope.hf_limit == 0  # so `save_hf` warns
    Rope.get_known_choices().pop("halved")
    with pytest.raises(InputError, match=r"lcjax_rope.type='halved' .* add --import FILE.py"):
        from_hf(exported)
