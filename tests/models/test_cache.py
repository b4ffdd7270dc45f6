"""Rolling caches: how many slots, which token stands where, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.attention import Causal, LMInfinite, ShiftedSparse, Sliding, Streaming
from lcjax.errors import InputError
from lcjax.models import Decoder, preset
from lcjax.models import cache as cache_lib
from lcjax.rope import DynamicNTK

TINY = preset("tiny").replace(num_layers=1)
extend = jax.jit(cache_lib.extend)


@pytest.mark.parametrize(
    ("pattern", "length", "chunk", "slots"),
    [
        (Causal(), 10_000, 16, 10_000),
        (Sliding(100), 10_000, None, 10_000),  # nobody said how much is read at once
        (Sliding(100), 10_000, 16, 128),
        (Sliding(100), 10_000_000, 16, 128),  # the text grows, the cache does not
        (Sliding(100), 120, 16, 120),  # a full cache is the smaller one
        (LMInfinite(window=100, sinks=50), 10_000, 43, 192),
        (Streaming(sinks=4, recent=2044, stride=2048), 10**6, 4096, 8192),
        (ShiftedSparse(group=8), 10_000, 16, 10_000),  # generates under full attention
    ],
    ids=str,
)
def test_a_cache_holds_the_visible_keys_of_a_chunk(pattern, length, chunk, slots):
    kind, found = pattern.for_inference().layer_cache.fit(length, chunk)
    assert found == slots
    assert kind.keeps_all == (slots == length)


def test_tokens_go_round_the_ring_behind_the_sinks_and_padding_goes_nowhere():
    config = TINY.replace(pattern=LMInfinite(window=9, sinks=2))
    cache = cache_lib.create(config, 2, 1000, chunk=8)
    assert cache.capacity == 64
    for start in range(0, 160, 8):
        at = start + np.arange(8)
        segments = np.stack([np.ones(8), at >= 13]).astype(np.int32)  # 13 tokens of padding
        positions = np.maximum(np.stack([at, at - 13]), 0)
        cache, (view,) = extend(cache, segments, positions)
    (slots,) = cache.slots
    assert cache.tokens.tolist() == [160, 147] and int(cache.filled) == 160
    for row, tokens in enumerate((160, 147)):
        assert slots.segments[row].all()
        kept = sorted(slots.index[row].tolist())
        assert kept == [0, 1, *range(tokens - 62, tokens)]
        np.testing.assert_array_equal(slots.positions[row], slots.index[row])
        np.testing.assert_array_equal(slots.index[row, view.write_slots[row]], view.new.index[row])


def test_more_tokens_at_once_than_the_ring_allows_raise_input_error():
    cache = cache_lib.create(TINY.replace(pattern=Sliding(30)), 1, 1000, chunk=8)
    assert cache.capacity == 64
    jax.eval_shape(extend, cache, None, np.zeros((1, 35)))
    with pytest.raises(InputError, match="36 tokens at once .* 64 slots; read at most 35, or"):
        jax.eval_shape(extend, cache, None, np.zeros((1, 36)))


def test_a_rotation_that_depends_on_the_length_has_to_be_given_with_a_rolling_cache():
    rope = DynamicNTK(theta=1e4, factor=2.0, original_length=16)
    config = TINY.replace(pattern=Sliding(30), rope=rope)
    cache = cache_lib.create(config, 1, 1000, chunk=8)
    with pytest.raises(InputError, match="dynamic_ntk depends on the length .* give rotation="):
        Decoder(config).apply({"params": {}}, jnp.zeros((1, 8), jnp.int32), cache=cache)
