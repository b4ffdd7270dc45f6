"""Grouped softmax against a float64 oracle that holds all scores."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from landmark_oracle import CASES, Case, assert_same, off, oracle, run

from pallas_kernels import causal, flash
from pallas_kernels.landmark import landmark_attention, older_blocks

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent.parent / "golden"


EVERY = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


@EVERY
def test_values_and_gradients_equal_the_oracle(case):
    *want, weights = oracle(case)
    np.testing.assert_allclose(weights.sum(-1).swapaxes(1, 2), np.isfinite(want[1]), rtol=1e-9)
    assert_same(run(case), want, case.loose)


@pytest.mark.parametrize("name", ["last queries of packed texts", "tiny documents, blocks of two"])
def test_the_dense_form_equals_the_oracle(name):
    assert_same(run(CASES[name], "reference"), oracle(CASES[name])[:3])


def test_values_and_gradients_equal_the_code_of_the_authors():
    name = "landmark.train_f7_t43"
    with np.load(GOLDEN / "attention.npz") as data:
        x = {key.split(".")[-1]: data[key] for key in data.files if key.startswith(name)}
    params = json.loads((GOLDEN / "attention.json").read_text())["cases"][name]["params"]
    block, size, length = params["block_size"], params["head_dim"], params["T"]
    landmarks = np.arange(length) % block == block - 1
    np.testing.assert_array_equal(x["is_landmark"][0], landmarks)
    angle = np.arange(length)[:, None] * params["rope_base"] ** -(np.arange(0, size, 2) / size)
    cos, sin = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))

    def turn(y):  # [B, N, T, H]
        a, b = jnp.split(y, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(q, k, v):
        arrays = (y.swapaxes(1, 2) for y in (turn(q), turn(k), v))
        return landmark_attention(*arrays, block)[0].swapaxes(1, 2)

    out, pull = jax.vjp(attention, *(jnp.asarray(x[n]) for n in ("q", "k", "v")))
    np.testing.assert_allclose(out, x["out"], rtol=1e-5, atol=2e-5)
    for got, n in zip(pull(jnp.asarray(x["cotangent"])), ("dq", "dk", "dv"), strict=True):
        np.testing.assert_allclose(got, x[n], rtol=1e-5, atol=1e-4)


def test_landmark_values_are_never_used_and_their_keys_are():
    case = Case()
    q, k, v = map(jnp.asarray, case.arrays()[:3])
    landmarks = jnp.arange(7, 64, 8)
    out, _ = landmark_attention(q, k, v, 8)
    other, _ = landmark_attention(q, k, v.at[:, landmarks].set(1e6), 8)
    np.testing.assert_array_equal(out, other)
    other, _ = landmark_attention(q, k.at[:, 7].add(1.0), v, 8)
    np.testing.assert_array_equal(out[:, :8], other[:, :8])
    assert np.all(np.any(out[:, 8:] != other[:, 8:], -1))


def test_a_text_of_one_block_is_ordinary_attention():
    q, k, v = map(jnp.asarray, Case(t=7).arrays()[:3])
    for x, y in zip(landmark_attention(q, k, v, 8), flash(q, k, v, causal()), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_sixteen_bits_stay_close_to_float32():
    case = Case(t=100, block=16)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in case.arrays()[:3])
    wide = tuple(x.astype(jnp.float32) for x in (q, k, v))

    @jax.jit
    def run(q, k, v):
        def loss(q, k, v):
            out, lse = landmark_attention(q, k, v, 16)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), (out, lse)

        return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

    gradients, (out, lse) = run(q, k, v)
    wanted, (want, want_lse) = run(*wide)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert off(out.astype(jnp.float32), want) < 5e-3 and off(lse, want_lse) < 5e-3
    for x, y in zip(gradients, wanted, strict=True):
        assert x.dtype == jnp.bfloat16 and off(x.astype(jnp.float32), y) < 1e-2


def test_only_older_blocks_that_are_given_are_seen():
    case = Case(t=64)
    q, k, v = map(jnp.asarray, case.arrays()[:3])
    numbers = jnp.broadcast_to(jnp.arange(64) // 8, (2, 64))
    out, lse = older_blocks(
        q, k[:, 16:40], v[:, 16:40], 8, scale=0.25, q_numbers=numbers,
        k_numbers=jnp.broadcast_to(jnp.arange(2, 5), (2, 3)),
    )  # fmt: skip
    assert np.all(np.isneginf(lse[:, :24])) and not np.asarray(out[:, :24]).any()
    # The third block is the only older one of the fourth: one softmax over its seven tokens.
    for i in (24, 31):
        x = jnp.einsum("bnh,bsnh->bns", q[:, i], jnp.repeat(k[:, 16:24], 2, 2)) * 0.25
        want = jnp.einsum(
            "bns,bsnh->bnh", jax.nn.softmax(x[..., :7]), jnp.repeat(v[:, 16:23], 2, 2)
        )
        np.testing.assert_allclose(out[:, i], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse[:, i], x[..., 7], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_padding_between_tokens_changes_nothing(implementation):
    case = Case(t=64, documents=3)
    index, segments = (np.maximum(x, 0) for x in case.rows())
    segments = np.maximum(segments, 1)  # every place a token, so that rows keep their number
    for i in range(64):
        starts = i == 0 or segments[:, i] != segments[:, i - 1]
        index[:, i] = np.where(starts, 0, index[:, i - 1] + 1)
    rng = np.random.default_rng(2)
    slots = np.stack([np.sort(rng.choice(100, 64, replace=False)) for _ in range(2)])

    def run(arrays, index, segments):
        def loss(q, k, v):
            out, lse = landmark_attention(
                q, k, v, 8, q_index=index, k_index=index, q_segments=segments,
                k_segments=segments, implementation=implementation,
            )  # fmt: skip
            is_token = segments != 0
            out = jnp.where(is_token[..., None, None], out, 0)
            return jnp.sum(jnp.sin(out)), (out, jnp.where(is_token[..., None], lse, 0))

        gradients, results = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
        return *results, *gradients

    def spread(x):
        out = np.asarray(rng.normal(size=(2, 100, *x.shape[2:])), x.dtype)
        out[np.arange(2)[:, None], slots] = x
        return out

    arrays = case.arrays()[:3]
    padding = np.zeros((2, 100), np.int32)
    padded_index, padded_segments = padding.copy(), padding.copy()
    np.put_along_axis(padded_index, slots, index, 1)
    np.put_along_axis(padded_segments, slots, segments, 1)
    alone = run(arrays, index, segments)
    padded = run([spread(x) for x in arrays], padded_index, padded_segments)
    for want, got in zip(alone, padded, strict=True):
        got = np.asarray(got)[np.arange(2)[:, None], slots]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_no_array_of_queries_times_keys_is_made():
    q = jax.ShapeDtypeStruct((1, 65_536, 2, 64), jnp.float32)

    def loss(q, k, v):
        return jnp.sum(landmark_attention(q, k, v, 64)[0])

    memory = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, q, q).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 16 * 65_536 * 2 * 64 * 4


def test_a_block_without_an_ordinary_token_raises_value_error():
    q = jnp.ones((1, 4, 1, 8))
    with pytest.raises(ValueError, match="block=1 must be an integer of at least 2"):
        landmark_attention(q, q, q, 1)
