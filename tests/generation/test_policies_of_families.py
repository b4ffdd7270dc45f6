"""Cache policies in other architectures, with every RoPE method: what is kept, and what is read."""

import jax
import numpy as np
import pytest
from cache_policy_support import TINY, held_tokens, read_session, text
from kv_cache_golden import head_file
from rope_examples import rope_examples
from tiny_lm import sharp_decoder

from lcjax.attention import Channels, KeepAll, Kivi, Quest, Sliding
from lcjax.attention.policies import DuoAttention, Knorm, SnapKV, StreamingCache
from lcjax.generation.language_model import LanguageModel
from lcjax.models import LayerKind
from lcjax.models.experts import Experts
from lcjax.models.layers import scale_by_position
from lcjax.rope import NoRotation

LENGTH, NEW, KEPT, WINDOW = 60, 6, 20, 3
# The newest KEPT tokens stay: a window of KEPT and the token itself.
NEWEST = StreamingCache(tokens=KEPT, sinks=0, every=1)
ARCHITECTURES = {
    "gemma2": TINY.replace(
        attention_soft_cap=2.0, attention_scale=0.4, norm_place="both", norm_plus_one=True
    ),
    "olmo2": TINY.replace(qk_norm="all", norm_place="after"),
    "qwen3": TINY.replace(qk_norm="head", head_dim=32, num_heads=6),
    "phi": TINY.replace(
        block="parallel", norm="layer", gated_mlp=False, qkv_bias=True, rotary_fraction=0.5
    ),
    "cohere": TINY.replace(block="parallel", norm="layer", norm_bias=False, qk_norm="each"),
    "ministral3": TINY.replace(query_scale=0.7, query_scale_length=16),
    "nope": TINY.replace(rope=NoRotation()),
    "gpt-oss": TINY.replace(
        head_dim=32,
        attention_sinks=True,
        experts=Experts(count=4, top_k=2, bias=True, swiglu_limit=2.0),
    ),
    "llama4": TINY.replace(
        qk_norm="unscaled",
        experts=Experts(4, 1, scores="sigmoid", normalize=False, weighted="input", shared_width=32),
    ),
    "mixtral": TINY.replace(experts=Experts(count=4, top_k=2)),
} | {
    name: TINY.replace(rope=rope, max_length=16)
    for name, rope in rope_examples(theta=1e4, length=16).items()
}
QUICK = ("gemma2", "gpt-oss", "yarn-0")
EVERY = pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in ARCHITECTURES
    ],
)


def model(config):
    """Its sinks, if it has any, are as great as the logits of keys."""
    lm = sharp_decoder(config.replace(scan_layers=False))

    def raised(path, x):
        return np.linspace(2, 6, len(x), dtype=x.dtype) if "sinks" in str(path[-1]) else x

    params = jax.tree_util.tree_map_with_path(raised, lm.params)
    return LanguageModel(lm.model, params, lm.tokenizer)


def weights_of_last_queries(lm, ids, layer):
    """Softmax weights [N, WINDOW, T] in float64 of the last queries of a text in a layer."""
    config, positions = lm.config, np.arange(len(ids))[None]
    _, state = lm.model.apply(
        {"params": lm.params},
        np.array([ids]),
        rotation=lm.rotation(LENGTH + NEW),
        capture_intermediates=lambda _, method: method == "project",
        mutable=["intermediates"],
    )
    q, k, _ = state["intermediates"][f"layers_{layer}"]["attention"]["project"][0]
    if config.query_scale:
        q = scale_by_position(q, positions, config.query_scale, config.query_scale_length)
    rotation = lm.rotation(LENGTH + NEW).of_kind(config.kind_by_layer[layer])
    q, k = (np.asarray(rotation.rotate(x, positions), np.float64)[0] for x in (q, k))
    k = np.repeat(k, config.num_heads // config.num_kv_heads, axis=1)
    logits = np.einsum("qnh,knh->nqk", q[-WINDOW:], k) / np.sqrt(config.head_dim)
    if config.attention_soft_cap is not None:
        logits = config.attention_soft_cap * np.tanh(logits / config.attention_soft_cap)
    logits[:, ~np.tri(WINDOW, len(ids), len(ids) - WINDOW, dtype=bool)] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def assert_keeps_what_is_attended_to(lm, layer):
    """The heads of a layer keep the window, and the keys with most weight of its queries."""
    ids = text(1, LENGTH)
    cut = lm.with_method(cache=SnapKV(tokens=KEPT, window=WINDOW, pool=1))
    held = held_tokens(read_session(cut, [ids], NEW).cache)
    weights = weights_of_last_queries(lm, ids, layer).mean(1)[:, :-WINDOW]
    last = set(range(LENGTH - WINDOW, LENGTH))
    for head, mean in enumerate(
        weights.reshape(lm.config.num_kv_heads, -1, LENGTH - WINDOW).mean(1)
    ):
        best = np.argsort(-mean)
        edge = mean[best[[KEPT - WINDOW - 1, KEPT - WINDOW]]]
        assert edge[0] - edge[1] > 1e-6  # no tie decides
        assert held[layer, 0, head] == last | set(best[: KEPT - WINDOW].tolist())


@EVERY
def test_the_keys_that_the_last_queries_attend_to_stay(name):
    assert_keeps_what_is_attended_to(model(ARCHITECTURES[name]), layer=1)


@EVERY
def test_the_newest_tokens_give_the_numbers_of_a_window_of_as_many(name):
    # One layer, since the window of the second layer reaches further back.
    lm = model(ARCHITECTURES[name].replace(num_layers=1))
    methods = lm.with_method(pattern=Sliding(window=KEPT + 1)), lm.with_method(cache=NEWEST)
    sessions = [read_session(method, [text(1, LENGTH)], NEW) for method in methods]
    for step, token in enumerate(text(2, NEW)):
        token, position = np.array([token], np.int32), np.array([[LENGTH + step]])
        expected, actual = (session.read(token, None, position) for session in sessions)
        np.testing.assert_allclose(actual, expected, atol=1e-4)


@pytest.mark.parametrize(
    "kinds",
    [
        (LayerKind(1, Sliding(window=16)), LayerKind(1)),  # Gemma 3
        pytest.param((LayerKind(1, rope=NoRotation()), LayerKind(1)), marks=pytest.mark.slow),
        pytest.param((LayerKind(1), LayerKind(1, rope=NoRotation())), marks=pytest.mark.slow),
    ],
    ids=["window", "nope first", "nope last"],
)
def test_layers_that_differ_keep_what_their_own_queries_attend_to(kinds):
    assert_keeps_what_is_attended_to(model(TINY.replace(layers=kinds)), layer=1)


@pytest.mark.parametrize(
    "cache",
    [
        DuoAttention(head_file([[0.9, 0.1], [0.2, 0.8]]), sinks=30, recent=70, every=4),
        pytest.param(KeepAll(Kivi(bits=4, residual=64)), marks=pytest.mark.slow),
        pytest.param(Quest(tokens=96, share="sum"), marks=pytest.mark.slow),
        pytest.param(Knorm(ratio=0.0, channels=Channels(ratio=0.01)), marks=pytest.mark.slow),
    ],
    ids=lambda cache: type(cache).__name__,
)
def test_learned_sinks_share_the_softmax_whatever_the_cache_keeps(cache):
    """Caches that have room for the whole text, in their own arrays, give its logits."""
    lm = model(ARCHITECTURES["gpt-oss"])
    without = LanguageModel(
        lm.model.clone(config=lm.config.replace(attention_sinks=False)), lm.params, lm.tokenizer
    )
    ids = text(1, LENGTH)
    expected = lm.logits(np.array([ids]))[0, -1]
    assert np.abs(without.logits(np.array([ids]))[0, -1] - expected).max() > 0.1
    session = read_session(lm.with_method(cache=cache), [ids[:-1]], NEW)
    actual = session.read(np.array(ids[-1:], np.int32), None, np.array([[LENGTH - 1]]))[0]
    np.testing.assert_allclose(actual, expected, atol=1e-4)
