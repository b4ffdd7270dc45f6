"""Position metadata of GGUF files: what is read, and what is refused by name."""

import dataclasses
import math

import gguf
import jax
import numpy as np
import pytest
from convert_support import random_params, tiny_config
from gguf_support import tensors_of, write_gguf

from lcjax.checkpoints import load, load_config
from lcjax.errors import InputError
from lcjax.rope import Default, Linear, Llama3, Yarn


def yarn(*more):
    """Adds the keys that every YaRN file has, and `more`."""
    basic = (
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
        lambda w: w.add_rope_scaling_factor(4.0),
        lambda w: w.add_rope_scaling_orig_ctx_len(16),
    )
    return lambda w: [add(w) for add in (*basic, *more)]


@pytest.mark.parametrize(
    ("add", "rope"),
    [
        (
            yarn(),
            Yarn(theta=5e4, factor=4.0, original_length=16),
        ),
        (
            lambda w: (
                w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
                w.add_rope_scaling_factor(4.0),
            ),
            Linear(theta=5e4, factor=4.0),
        ),
        (lambda w: w.add_float32("llama.rope.scale_linear", 4.0), Linear(theta=5e4, factor=4.0)),
        (  # llama.cpp does not scale then
            lambda w: (
                w.add_rope_scaling_type(gguf.RopeScalingType.NONE),
                w.add_rope_scaling_factor(4.0),
            ),
            Default(theta=5e4),
        ),
        (
            yarn(
                lambda w: w.add_rope_scaling_yarn_beta_fast(16.0),
                lambda w: w.add_rope_scaling_yarn_beta_slow(2.0),
                lambda w: w.add_rope_scaling_yarn_log_mul(0.0),
                lambda w: w.add_rope_scaling_finetuned(True),
            ),
            Yarn(theta=5e4, factor=4.0, original_length=16, beta_fast=16.0, beta_slow=2.0),
        ),
        (
            yarn(lambda w: w.add_rope_scaling_yarn_ext_factor(0.5)),
            Yarn(theta=5e4, factor=4.0, original_length=16, extrapolation=0.5),
        ),
        (  # without the ramp llama.cpp leaves out the factor of the logits, too
            yarn(lambda w: w.add_rope_scaling_yarn_ext_factor(0.0)),
            Yarn(
                theta=5e4, factor=4.0, original_length=16, extrapolation=0.0, attention_factor=1.0
            ),
        ),
        (
            yarn(lambda w: w.add_rope_scaling_yarn_attn_factor(0.1 * math.log(4) + 1)),
            Yarn(theta=5e4, factor=4.0, original_length=16),
        ),
        (
            yarn(lambda w: w.add_rope_scaling_attn_factors(0.5)),
            Yarn(
                theta=5e4,
                factor=4.0,
                original_length=16,
                attention_factor=0.5 * (0.1 * math.log(4) + 1),
            ),
        ),
    ],
)
def test_the_position_method_is_read(tmp_path, add, rope):
    config = tiny_config()
    write_gguf(tmp_path / "m.gguf", random_params(config), config, metadata=[add])
    read = load_config(tmp_path / "m.gguf").rope
    if getattr(rope, "attention_factor", None):  # the file's numbers are float32
        assert read.attention_factor == pytest.approx(rope.attention_factor, rel=1e-6)
        read = dataclasses.replace(read, attention_factor=rope.attention_factor)
    assert read == rope


@pytest.mark.parametrize(
    ("add", "words"),
    [
        (yarn(lambda w: w.add_rope_scaling_yarn_log_mul(0.1)), "yarn_log_multiplier=0.1"),
        (yarn(lambda w: w.add_rope_scaling_yarn_attn_factor(1.0)), "yarn_attn_factor=1.0"),
        (yarn(lambda w: w.add_float32("llama.rope.scaling.new", 2.0)), "rope.scaling.new=2.0"),
        (lambda w: w.add_rope_scaling_attn_factors(0.5), "rope.scaling.attn_factor=0.5"),
        (lambda w: w.add_float32("llama.rope.scaling.alpha", 50.0), "rope.scaling.alpha=50.0"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "type='longrope'"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "type='yarn'"),
    ],
)
def test_position_metadata_that_cannot_be_read_is_refused_by_name(tmp_path, add, words):
    config = tiny_config()
    write_gguf(tmp_path / "m.gguf", random_params(config), config, metadata=[add])
    with pytest.raises(InputError, match=rf"{words}.*cannot be read from GGUF") as error:
        load_config(tmp_path / "m.gguf")
    assert "\n" not in str(error.value)


def test_llama_3_frequencies_are_recognised_and_others_refused(tmp_path):
    rope = Llama3(
        theta=5e5, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192
    )
    config = tiny_config(head_dim=64, rope=rope)
    plain = 5e5 ** (-np.arange(32) / 32)
    divisors = (plain / rope.frequencies(64, 1)[0]).astype(np.float32)
    params = random_params(config)
    arrays = [*tensors_of(params, config, "llama")]
    write_gguf(tmp_path / "a.gguf", [*arrays, ("rope_freqs.weight", divisors)], config)
    loaded, loaded_config, _ = load(tmp_path / "a.gguf")
    assert loaded_config.rope == rope
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    write_gguf(tmp_path / "b.gguf", [*arrays, ("rope_freqs.weight", divisors**1.1)], config)
    with pytest.raises(InputError, match=r"rope_freqs\.weight .* not those of Llama-3"):
        load_config(tmp_path / "b.gguf")
