"""MSA: its indexer, its choice and its divergence, against the authors' numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_golden as golden
from chosen_support import check_generation
from tiny_lm import generated, ids, sharp_lm

from lcjax.attention import MSA
from lcjax.attention.base import Features
from lcjax.attention.chosen_blocks import complete_blocks
from lcjax.attention.on_devices import DocumentTokens
from lcjax.generation.sampling import Sampling
from lcjax.rope import Rotation
from pallas_kernels import gather


@pytest.fixture
def no_ties(monkeypatch):
    """The authors' code chooses among scores that are nearly equal, too."""
    monkeypatch.setattr(gather, "TIE", 2.0**-22)


def test_choices_are_those_of_transformers(no_ties):
    params, x = golden.params("msa.indexer"), golden.arrays("msa.indexer")
    heads, size, block, rotary = (params[n] for n in ("heads", "index_dim", "block", "rope_dim"))
    parameters = {
        "block_query": x["wq"].reshape(-1, heads, size),
        "block_key": x["wk"],
        "block_query_norm_scale": x["norm_q"],
        "block_key_norm_scale": x["norm_k"],
    }
    pattern = MSA(block=block, top_k=params["topk"], head_dim=size)
    frequencies = params["rope_base"] ** -(np.arange(0, rotary, 2) / rotary)
    rows, length = x["hidden"].shape[:2]
    metadata = golden.metadata({"cu_seqlens": [0, length]})
    metadata = metadata.replace(rotation=Rotation(jnp.asarray(frequencies, jnp.float32)))
    hidden = jnp.asarray(x["hidden"])
    features = pattern.features(
        {name: jnp.asarray(array) for name, array in parameters.items()},
        hidden,
        None,
        None,
        metadata,
    )
    places = jnp.broadcast_to(jnp.arange(length), (rows, length))
    tokens = DocumentTokens(places, places, None)
    blocks = complete_blocks(tokens, block)
    chosen = pattern._choose(features.queries["index"], features.keys["index"], tokens, blocks)
    listed = np.zeros((rows, heads, length, -(-length // block) + 1), bool)
    numbers = np.where(chosen < blocks.numbers.shape[1], chosen, listed.shape[-1] - 1)
    np.put_along_axis(listed, numbers, True, -1)
    current = np.broadcast_to(
        (np.arange(length) // block)[None, None, :, None], (rows, heads, length, 1)
    )
    np.put_along_axis(listed, current, True, -1)
    np.testing.assert_array_equal(listed[..., :-1], x["chosen"])


def test_attention_and_divergence_are_those_of_the_report(no_ties):
    params, x = golden.params("msa.kl"), golden.arrays("msa.kl")
    length = x["q"].shape[1]
    metadata = golden.metadata({"cu_seqlens": [0, length]})
    pattern = MSA(block=params["block"], top_k=params["topk"], head_dim=params["head_dim"])
    index = jnp.asarray(x["qi"]).swapaxes(1, 2)
    features = Features({"index": index}, {"index": jnp.asarray(x["ki"])[:, :, None]}, {})
    q, k, v = (jnp.asarray(x[name]) for name in "qkv")
    out = jax.jit(lambda features: pattern.attend(q, k, v, metadata.replace(features=features)))
    np.testing.assert_allclose(out(features), x["out"], rtol=1e-5, atol=2e-6)

    @functools.partial(jax.jit)
    @jax.value_and_grad
    def loss(features):
        return pattern.divergence(q, k, metadata.replace(features=features)).mean()

    value, gradient = loss(features)
    np.testing.assert_allclose(value, x["loss"], rtol=1e-5)
    dqi = gradient.queries["index"].swapaxes(1, 2)
    np.testing.assert_allclose(dqi, x["dqi"], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(gradient.keys["index"][:, :, 0], x["dki"], rtol=1e-4, atol=1e-7)


def test_generation_equals_reading_the_text_again():
    check_generation(sharp_lm(pattern=MSA(block=8, top_k=2, head_dim=16)))


def test_the_first_stage_generates_as_full_attention():
    prompts, options = [ids(1, 45), ids(2, 30)], Sampling(max_new_tokens=8, min_new_tokens=8)
    dense = sharp_lm(pattern=MSA(block=4, top_k=2, head_dim=16, dense=True))
    assert generated(dense, prompts, options) == generated(sharp_lm(), prompts, options)
