"""SeerAttention-R: its gates, the attention to blocks that they learn, and what tokens read."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sparse_golden as golden
from chosen_support import CONFIG, MESHES, check_devices, check_generation, check_steps
from tiny_lm import sharp_lm

from lcjax.attention import AttentionMetadata, SeerAttentionR
from lcjax.attention.base import Features, rotate_qk
from lcjax.attention.pages import PagedCache
from lcjax.models import Decoder
from lcjax.rope.rotation import Rotation
from pallas_kernels import gather

CASE = "seer.decode"
SMALL = SeerAttentionR(block=8, top_k=3, gate_dim=8)


def case():
    """The pattern, unrotated queries and keys, and metadata with their features."""
    params, x = golden.params(CASE), golden.arrays(CASE)
    pattern = SeerAttentionR(block=params["block"], top_k=2, gate_dim=params["gate_dim"])
    kv_heads, _, gate = x["wk"].shape
    parameters = {
        "token_gate_query": x["wq"].reshape(-1, *x["wq"].shape[2:]),
        "token_gate_key": x["wk"].reshape(kv_heads, 3, -1, gate),
        "token_gate_query_norm": x["norm_q"],
        "token_gate_key_norm": x["norm_k"],
    }
    parameters = {name: jnp.asarray(x) for name, x in parameters.items()}
    q, k = (jnp.asarray(x[name]) for name in "qk")
    size = params["head_dim"]
    frequencies = params["rope_base"] ** -(np.arange(0, size, 2) / size)
    at = jnp.arange(q.shape[1])[None]
    metadata = AttentionMetadata(
        at, at, rotation=Rotation(jnp.asarray(frequencies, jnp.float32)), q_index=at, k_index=at
    )
    features = pattern.features(parameters, q, q, k, metadata)
    return pattern, q, k, metadata.replace(features=features), x


def past_blocks(length, block):
    """Which blocks are complete before the own one of each token [T, C]."""
    return np.arange(length // block) < np.arange(length)[:, None] // block


def test_the_blocks_that_are_read_have_the_best_gates_of_the_authors(monkeypatch):
    monkeypatch.setattr(gather, "TIE", 2.0**-22)
    pattern, q, k, metadata, x = case()
    length, block = q.shape[1], pattern.block
    values = jnp.broadcast_to(jnp.eye(length)[:, None], (1, length, k.shape[2], length))
    attend = jax.jit(functools.partial(pattern.attend, metadata=metadata))
    out = attend(q, k, values)[0].reshape(length, k.shape[2], -1, length)
    past = past_blocks(length, block)
    gates = np.where(past, x["gate"][0, ..., : past.shape[1]], -np.inf)  # [K, T, C]
    best = gates.argmax(-1)
    numbers = np.arange(length) // block
    chosen = (numbers == best[..., None]) & past.any(1)[:, None]
    read = (chosen | (numbers == numbers[:, None])) & np.tri(length, dtype=bool)
    np.testing.assert_array_equal(out > 0, read.swapaxes(0, 1)[:, :, None].repeat(2, 2))


def test_the_divergence_is_that_of_the_authors_over_past_blocks():
    """Theirs has the own block, too: its gate knows the tokens behind the query."""
    pattern, q, k, metadata, x = case()
    length = q.shape[1]
    rotated, keys = rotate_qk(q, k, metadata)
    logits = np.einsum("TKGH,SKH->KGTS", rotated[0].reshape(length, 2, 2, -1), keys[0])
    logits = np.where(np.tri(length, dtype=bool), logits / np.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    count = -(-length // pattern.block)
    padded = np.pad(weights.max(1), [(0, 0), (0, 0), (0, count * pattern.block - length)])
    target = padded.reshape(*padded.shape[:2], count, -1).max(-1)
    target /= target.sum(-1, keepdims=True)
    np.testing.assert_allclose(target, x["target"][0], rtol=1e-4, atol=1e-6)
    past = past_blocks(length, pattern.block)
    target, gate = (x[name][0, ..., : past.shape[1]].astype(float) for name in ("target", "gate"))
    target = np.where(past, target, 0)
    gate = np.where(past, np.exp(np.where(past, gate, 0)), 0)
    pair = [x / np.maximum(x.sum(-1, keepdims=True), 1e-30) for x in (target, gate)]
    target, gate = (np.where(past, x, 1) for x in pair)
    want = np.where(past, target * np.log(target / gate), 0).sum(-1).mean(0)
    apart = jax.jit(functools.partial(pattern.divergence, metadata=metadata))(q, k)[0]
    np.testing.assert_allclose(apart, want, rtol=1e-3, atol=1e-6)
    assert want[2 * pattern.block :].mean() > 0.1 and not apart[: pattern.block].any()


def params_of(config):
    init = jax.jit(Decoder(config).init)
    params = init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    # Larger gates choose blocks that do not depend on rounding.
    return jax.tree.map_with_path(
        lambda path, x: 20 * x if "token_gate" in str(path[-1]) else x, params
    )


@pytest.mark.parametrize(
    "pattern", [SMALL, pytest.param(replace(SMALL, block=5, top_k=2), marks=pytest.mark.slow)]
)
def test_reading_in_parts_equals_reading_at_once(pattern):
    config = CONFIG.replace(pattern=pattern)
    check_steps(config, params_of(config), PagedCache, [(21, 42, 55)])


def test_generation_equals_reading_the_text_again():
    check_generation(sharp_lm(pattern=SMALL))


@pytest.mark.slow
@MESHES
def test_eight_devices_compute_what_one_computes(mesh):
    config = CONFIG.replace(pattern=SMALL)
    check_devices(config, params_of(config), mesh, first=27)


def test_a_text_shorter_than_a_block_teaches_nothing():
    q, k = jnp.ones((1, 5, 4, 16)), jnp.ones((1, 5, 2, 16))
    at = jnp.arange(5)[None]
    parameters = {"token_gate_key": jnp.ones((2, 3, 16, 8)), "token_gate_key_norm": jnp.ones(8)}
    features = Features({"gate": jnp.ones((1, 5, 2, 8))}, {}, parameters)
    metadata = AttentionMetadata(at, at, features=features)
    assert not np.any(jax.jit(lambda q, k: SMALL.divergence(q, k, metadata))(q, k))
