"""What every registered pattern must do, whatever it is: each joins through its `examples`."""

import dataclasses
import functools

import draccus
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.attention import AttentionMetadata, Pattern, order_indices
from lcjax.models import Decoder, preset
from lcjax.models import cache as cache_lib
from lcjax.rope import Rotation

PATTERNS = {
    f"{name}-{number}": pattern
    for name, choice in Pattern.get_known_choices().items()
    for number, pattern in enumerate(
        draccus.decode(Pattern, {"type": name, **fields}) for fields in choice.examples
    )
    if pattern.is_causal  # no causal attention, and one choice per row: tests of their own
}
EVERY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in PATTERNS]
)
T, HEADS, KV_HEADS, SIZE = 48, 6, 2, 16  # three query heads to a key head: halves cut a group
ROTATION = Rotation(jnp.asarray(100.0 ** -np.linspace(0, 1, 6), jnp.float32), 1.1, 0.9)
FIRST, SECOND = 20, 28  # two documents that fill a row
# Rows: both packed, each alone with padding behind it, each alone with padding before it.
SEGMENTS = np.array(
    [
        [1] * FIRST + [2] * SECOND,
        [1] * FIRST + [0] * SECOND,
        [2] * SECOND + [0] * FIRST,
        [0] * SECOND + [1] * FIRST,
        [0] * FIRST + [2] * SECOND,
    ],
    np.int32,
)
PARTS = ((slice(0, FIRST), 1), (slice(FIRST, None), 2))


def rows():
    """q, k, v and hidden states of SEGMENTS: the same two documents, and noise where padding is."""
    rng = np.random.default_rng(1)
    arrays = []
    for heads in (HEADS, KV_HEADS, KV_HEADS, 1):
        x = rng.normal(size=(len(SEGMENTS), T, heads, SIZE)).astype(np.float32)
        for part, document in PARTS:
            for row in range(1, len(SEGMENTS)):
                if document in SEGMENTS[row]:
                    x[row, SEGMENTS[row] == document] = x[0, part]
        arrays.append(jnp.asarray(x))
    return arrays


COTANGENT = jnp.asarray(np.random.default_rng(2).normal(size=(5, T, HEADS, SIZE)), jnp.float32)


@functools.partial(jax.jit, static_argnames=("pattern", "implementation"))
def run(q, k, v, hidden, pattern, implementation=None):
    """The output, and the gradients of q, k and v for COTANGENT: one program for all tests."""
    segments = jnp.asarray(SEGMENTS)
    index = order_indices(segments)
    metadata = AttentionMetadata(
        index,
        index,
        rotation=ROTATION,
        q_index=index,
        k_index=index,
        q_segments=segments,
        k_segments=segments,
        row_indices=(None, None),
        implementation=implementation,
    )
    features = pattern.features(parameters(pattern), hidden[:, :, 0], q, k, metadata)
    metadata = metadata.replace(features=features)
    out, backward = jax.vjp(lambda *x: pattern.attend(*x, metadata), q, k, v)
    return out, backward(COTANGENT)


def parameters(pattern):
    """Random parameters of a layer."""
    rng, sizes = np.random.default_rng(4), {"D": SIZE, "N": HEADS, "K": KV_HEADS, "H": SIZE}
    return {
        name: jnp.asarray(rng.normal(size=one.shape(sizes | pattern.sizes)), jnp.float32)
        for name, one in pattern.parameters.items()
    }


@EVERY
def test_packed_padded_and_single_documents_are_the_same(name):
    out = np.asarray(run(*rows(), PATTERNS[name])[0])
    for part, document in PARTS:
        for row in range(1, len(SEGMENTS)):
            here = SEGMENTS[row] == document
            if here.any():
                np.testing.assert_allclose(out[row, here], out[0, part], rtol=1e-5, atol=2e-6)
    assert not out[SEGMENTS == 0].any()


@EVERY
def test_changing_a_token_changes_nothing_before_it(name):
    arrays, at = rows(), 30  # inside the second document, in the row where both are packed
    before = np.asarray(run(*arrays, PATTERNS[name])[0])[0]
    after = np.asarray(run(*(x.at[:, at].add(1.0) for x in arrays), PATTERNS[name])[0])[0]
    np.testing.assert_array_equal(before[:at], after[:at])
    assert np.all(np.any(before[at] != after[at], -1))


@EVERY
def test_backends_agree_in_values_and_gradients(name):
    out, gradients = run(*rows(), PATTERNS[name])
    want, wanted = run(*rows(), PATTERNS[name], "reference")
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=2e-6)
    for x, y in zip(gradients, wanted, strict=True):
        assert np.isfinite(x).all() and not x[SEGMENTS == 0].any()
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5)


@EVERY
def test_equal_patterns_share_one_compiled_call(name):
    arrays, pattern = rows(), PATTERNS[name]
    run(*arrays, pattern)
    before = run._cache_size()
    run(*(x + 1 for x in arrays), dataclasses.replace(pattern))
    assert run._cache_size() == before


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_a_choice_of_a_config(name):
    pattern = PATTERNS[name]
    encoded = draccus.encode(pattern, Pattern)
    assert encoded["type"] == name.rpartition("-")[0]
    assert draccus.decode(Pattern, encoded) == pattern


LENGTH, CHUNK, PADDING = 96, 8, 5  # more tokens than a rolling cache of the examples has slots
CONFIG = preset("tiny").replace(num_layers=2, num_heads=4, num_kv_heads=2)


@functools.cache
def decoder_params(config):
    model = Decoder(config)
    return jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


@functools.partial(jax.jit, static_argnums=0)
def read(model, params, tokens, segments, positions, cache):
    output = model.apply(
        {"params": params}, tokens, segments=segments, positions=positions, cache=cache
    )
    return output.hidden, output.cache


@EVERY
def test_reading_in_steps_equals_reading_at_once(name):
    config = CONFIG.replace(pattern=PATTERNS[name])
    inference = config.pattern.for_inference()
    at_once, in_steps = Decoder(CONFIG.replace(pattern=inference)), Decoder(config)
    tokens = np.random.default_rng(3).integers(0, 256, (2, LENGTH))
    segments = np.ones((2, LENGTH), np.int32)
    segments[1, :PADDING] = 0
    positions = np.maximum(np.cumsum(segments, 1) - 1, 0)
    params = decoder_params(config if inference.parameters else CONFIG)
    want, _ = read(at_once, params, tokens, segments, positions, None)
    cache = cache_lib.create(config, 2, LENGTH, chunk=CHUNK)
    slots, outs = cache.capacity, []
    for start in range(0, LENGTH, CHUNK):
        part = (x[:, start : start + CHUNK] for x in (tokens, segments, positions))
        out, cache = read(in_steps, params, *part, cache)
        outs.append(out)
    real = segments != 0
    np.testing.assert_allclose(np.concatenate(outs, 1)[real], want[real], rtol=0, atol=5e-5)
    # What a new token cannot see is given up: the cache does not grow with the text.
    assert slots == cache.capacity == (64 if inference.is_bounded else LENGTH)
    assert cache.kinds[0].rotated != inference.moves_keys
