"""What a pattern refuses: one line that names the key, the value, the rule and the way out."""

import numpy as np
import pytest

from lcjax.attention import (
    AttentionMetadata,
    Causal,
    Chunked,
    DualChunk,
    LMInfinite,
    Pattern,
    ReRoPE,
    SelfExtend,
    ShiftedSparse,
    Sliding,
    Streaming,
)
from lcjax.errors import InputError

REFUSED = [
    (LMInfinite, {"top_k_position": 9}, "pattern.top_k_position=9 needs pattern.top_k; set both"),
    (DualChunk, {"chunk": 12, "local": 12}, "pattern.local=12 must be below pattern.chunk=12"),
    (ShiftedSparse, {"group": 8, "fraction": 0.5}, "pattern.group=8 and pattern.fraction=0.5"),
    (ShiftedSparse, {"group": 7, "wrap": True}, "pattern.group=7 must be even .*nearest: 6, 8"),
]


@pytest.mark.parametrize(("pattern", "fields", "message"), REFUSED, ids=str)
def test_a_field_out_of_range_raises_input_error(pattern, fields, message):
    with pytest.raises(InputError, match=message) as error:
        pattern(**fields)
    assert "\n" not in str(error.value)


def _places(length, heads=4):
    positions = np.arange(length)[None]
    return AttentionMetadata(positions, positions, num_heads=heads)


@pytest.mark.parametrize(
    ("pattern", "length", "heads", "message"),
    [
        (
            ShiftedSparse(group=3000),
            8192,
            4,
            "group=3000 must divide the length 8192; .*2048, 4096",
        ),
        (ShiftedSparse(group=100), 60, 4, "group=100 must divide the length 60; .*groups: 60"),
        (ShiftedSparse(), 6, 4, "fraction=0.25 of 6 tokens .* must divide .*groups: 2"),
        (ShiftedSparse(), 7, 4, "fraction=0.25 of 7 tokens .* must divide .*groups: 7"),
        (ShiftedSparse(group=4), 8, 1, "half of the heads and needs 2; there is 1"),
        (ShiftedSparse(group=4, wrap=True), 8, 4, "has no passes"),
    ],
    ids=str,
)
def test_groups_that_do_not_fit_name_the_nearest_that_do(pattern, length, heads, message):
    with pytest.raises(InputError, match=message) as error:
        pattern.passes(_places(length, heads))
    assert "\n" not in str(error.value)


def test_only_the_training_pattern_changes_for_inference():
    for name, choice in Pattern.get_known_choices().items():
        pattern = choice(**choice.examples[0])
        expected = Causal() if name == "s2" else pattern
        assert pattern.for_inference() == expected


def _seen(pattern, length):
    """bool [T, S]: the union of the passes, which must not overlap."""
    places = _places(length)
    at = np.arange(length)
    seen = [np.asarray(p.mask.element(at[:, None], at[None])) for p in pattern.passes(places)]
    assert np.sum(seen, 0).max() == 1
    return np.any(seen, 0)


@pytest.mark.parametrize(
    "pattern",
    [Causal(), ReRoPE(5), SelfExtend(window=5, group=3), DualChunk(chunk=7, local=3)],
    ids=str,
)
def test_full_patterns_see_every_key_once(pattern):
    np.testing.assert_array_equal(_seen(pattern, 40), np.tri(40, dtype=bool))


@pytest.mark.parametrize(
    "pattern",
    [
        Sliding(7),
        Chunked(7),
        LMInfinite(window=6, sinks=3),
        Streaming(sinks=3, recent=5),
        Streaming(sinks=3, recent=5, stride=4, first=15),
        Streaming(sinks=0, recent=4, stride=7, first=2),
    ],
    ids=str,
)
def test_a_rolling_cache_holds_every_visible_key(pattern):
    sinks, recent = pattern.layer_cache.sinks, pattern.layer_cache.recent
    at = np.arange(60)
    behind = at[:, None] - at[None]
    kept = (behind >= 0) & ((behind < recent) | (at < sinks)[None])
    seen = _seen(pattern, 60)
    assert not (seen & ~kept).any()
    # And no more than some query needs: one slot less would lose a key.
    assert behind[seen & (at >= sinks)[None]].max() == recent - 1


def test_streaming_with_stride_1_sees_sinks_recent_tokens_and_itself():
    seen = _seen(Streaming(sinks=2, recent=5), 30)
    np.testing.assert_array_equal(seen.sum(1), np.minimum(np.arange(30) + 1, 2 + 5 + 1))
    near, far = Streaming(sinks=2, recent=5).passes(_places(30))
    # From the last query sink 0 is S + R tokens away, however long the text (sec. 3.2).
    assert int(far.q_positions[0, -1]) == 2 + 5
    assert int(near.q_positions[0, -1]) == 29
