"""Positions without rotations: biases of the logits and embeddings, alone, packed and cached."""

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.attention import (
    AttentionMetadata,
    Causal,
    Disentangled,
    DualChunk,
    LMInfinite,
    Longformer,
    Sliding,
    SparseTransformer,
    Streaming,
    TransformerXL,
)
from lcjax.checkpoints import config_to_hf
from lcjax.checkpoints.build import ModelSection, model_config
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.models import Decoder, preset
from lcjax.models import cache as cache_lib
from lcjax.models.decoder import sinusoids
from lcjax.rope import Yarn
from lcjax.rope.positions import E2Positions
from lcjax.rope.rotation import no_rotation
from lcjax.training.objective import language_model
from pallas_kernels import Alibi, RelativeBias, alibi_slopes

TINY = preset("tiny").replace(max_length=80, num_heads=6, num_kv_heads=2)
EVERY = pytest.mark.parametrize(
    "name", ["alibi", "sinusoidal", "t5", "transformer_xl", "deberta", "learned"]
)
FIRST, T, LONG = 20, 48, 80  # a rolling cache has 64 slots
SEGMENTS = np.array([[1] * FIRST + [2] * (T - FIRST), [2] * (T - FIRST) + [0] * FIRST])


def stored(name):
    with np.load(Path(__file__).parent.parent / "golden" / "attention.npz") as data:
        return data[name]


@functools.cache
def made(name, pattern=None):
    config = TINY.replace(position=name)
    model = Decoder(config if pattern is None else config.replace(pattern=pattern))
    params = jax.jit(Decoder(config).init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    return model, params["params"]


@functools.partial(jax.jit, static_argnums=0)
def read(model, params, tokens, segments=None, positions=None, cache=None):
    output = model.apply(
        {"params": params}, tokens, segments=segments, positions=positions, cache=cache
    )
    return output.hidden, output.cache


def tokens(rows=2, length=T):
    return np.random.default_rng(0).integers(0, 256, (rows, length))


@pytest.mark.slow_except("deberta")
@EVERY
def test_packed_documents_equal_separate_ones_and_order_matters(name):
    model, params = made(name)
    text = tokens()
    text[1, : T - FIRST] = text[0, FIRST:]
    out, _ = read(model, params, text, SEGMENTS)
    np.testing.assert_allclose(out[0, FIRST:], out[1, : T - FIRST], rtol=1e-4, atol=2e-5)
    text[0, [1, 2]] = text[0, [2, 1]]
    swapped, _ = read(model, params, text, SEGMENTS)
    assert np.abs(swapped[0, 5] - out[0, 5]).max() > 1e-4
    np.testing.assert_array_equal(swapped[1], out[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
def test_embeddings_count_in_the_document_as_given_positions_do(name):
    model, params = made(name)
    positions = np.concatenate([np.arange(FIRST), np.arange(T - FIRST)])
    given, _ = read(model, params, tokens(), SEGMENTS, np.stack([positions, np.arange(T)]))
    np.testing.assert_array_equal(given, read(model, params, tokens(), SEGMENTS)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        *[("alibi", None), ("alibi", Streaming(3, 6)), ("t5", Sliding(9))],
        ("learned", Sliding(9)),
        *[("transformer_xl", None), ("transformer_xl", Streaming(3, 6)), ("deberta", Sliding(9))],
        ("deberta", SparseTransformer(stride=4, heads="split")),
    ],
    ids=str,
)
def test_reading_in_steps_equals_reading_at_once(name, pattern):
    model, params = made(name, pattern)
    text, segments = tokens(2, LONG), np.ones((2, LONG), np.int32)
    segments[1, :5] = 0
    want, _ = read(model, params, text, segments)
    cache = cache_lib.create(model.config, 2, LONG, chunk=8)
    assert cache.bounds_length != model.config.pattern.is_bounded
    outs = []
    for start in range(0, LONG, 8):
        part = (x[:, start : start + 8] for x in (text, segments))
        out, cache = read(model, params, *part, None, cache)
        outs.append(out)
    real = segments != 0
    np.testing.assert_allclose(np.concatenate(outs, 1)[real], want[real], rtol=0, atol=5e-5)


@pytest.mark.slow_except("deberta")
@EVERY
def test_parameters_of_positions_are_trained(name):
    model, params = made(name)

    @jax.jit
    def gradients(params):
        def loss(params):
            out = model.apply({"params": params}, tokens(), segments=jnp.asarray(SEGMENTS)).hidden
            return jnp.sum(out[..., 0] ** 2)

        return jax.grad(loss)(params)

    found = gradients(params)
    if name == "transformer_xl":
        for key in ("content_bias", "position_bias", "position_key"):
            assert np.abs(found["layers"]["attention"][key]).max() > 1e-6
    found = found.get("position", {})
    shapes = {key: x.shape for key, x in found.items()}
    expected = {"t5": {"bias": (32, 6)}, "learned": {"embedding": (LONG, 64)}}
    expected["deberta"] = {"embedding": (512, 64)}
    assert shapes == expected.get(name, {})
    for x in found.values():
        assert np.isfinite(x).all() and np.abs(x).max() > 1e-6
    if name == "learned":  # rows past the longest document of the batch are not used
        assert np.abs(found["embedding"][: T - FIRST]).min(-1).max() > 0
        assert not found["embedding"][T - FIRST :].any()


def naive(q, k, v, bias, seen):
    """Attention of one row with `bias` [N, T, S] where `seen` [T, S], in float64."""
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2)[0] for x in (k, v))
    logits = np.einsum("tnh,snh->nts", q[0], k) / math.sqrt(q.shape[-1]) + bias
    p = np.exp(np.where(seen, logits, -np.inf))
    return np.einsum("nts,snh->tnh", p / p.sum(-1, keepdims=True), v)


def qkv(length=40, heads=6):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(1, length, n, 16)).astype(np.float32) for n in (heads, 2, 2)]


@functools.partial(jax.jit, static_argnums=0)
def attend(pattern, q, k, v, bias):
    at = jnp.arange(40)[None]
    metadata = AttentionMetadata(
        at, at, rotation=no_rotation(), row_indices=(None, None), bias=bias
    )
    return pattern.attend(q, k, v, metadata)[0]


def run(pattern, bias):
    return attend(pattern, *qkv(), bias)


AWAY = np.subtract.outer(np.arange(40), np.arange(40))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "seen", "distance"),
    [
        (Sliding(9), (AWAY >= 0) & (AWAY < 9), AWAY),
        # The first tokens seem to be as far away as the window reaches.
        (
            LMInfinite(window=9, sinks=3),
            (AWAY >= 0) & ((AWAY < 9) | (np.arange(40) < 3)),
            np.minimum(AWAY, 9),
        ),
        # The first tokens stand right before the recent ones, as in the cache.
        (
            Streaming(sinks=3, recent=6),
            (AWAY >= 0) & ((AWAY <= 6) | (np.arange(40) < 3)),
            np.where(AWAY <= 6, AWAY, np.minimum(AWAY, 9 - np.arange(40)[None])),
        ),
    ],
    ids=str,
)
def test_alibi_counts_the_distances_of_the_pattern(pattern, seen, distance):
    slopes = np.asarray(alibi_slopes(6))
    got = run(pattern, Alibi(jnp.asarray(slopes)))
    want = naive(*qkv(), -slopes[:, None, None] * distance, seen)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


def test_t5_adds_the_row_of_the_stored_bucket():
    table = np.random.default_rng(2).normal(size=(32, 6)).astype(np.float32)
    relative = stored("t5.buckets.relative_position")
    buckets = dict(zip(relative.tolist(), stored("t5.buckets.causal_32_128").tolist(), strict=True))
    bias = np.vectorize(lambda away: buckets[-away])(AWAY)
    got = run(Sliding(30), RelativeBias(jnp.asarray(table)))
    want = naive(*qkv(), np.moveaxis(table[bias], -1, 0), (AWAY >= 0) & (AWAY < 30))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


def relative_shift(x):
    """Transformer-XL's shift: columns of distances T - 1, ..., 0 become those of keys."""
    heads, t, _ = x.shape
    padded = np.concatenate([np.zeros((heads, t, 1)), x], -1)
    return padded.reshape(heads, t + 1, t)[:, 1:].reshape(heads, t, t)


@pytest.mark.parametrize(
    "pattern", [Causal(), Sliding(9), Longformer(window=4, dilation=2)], ids=str
)
def test_transformer_xls_logits_are_those_of_its_shifted_products(pattern):
    rng, width = np.random.default_rng(3), 32
    u, v_bias = rng.normal(size=(2, 6, 16))
    w = rng.normal(size=(width, 6, 16)) / math.sqrt(width)
    leaves = (np.moveaxis(x, -2, -1).astype(np.float32) for x in (u, v_bias, w))
    got = run(pattern, TransformerXL(*leaves))
    q, k, v = (x.astype(np.float64) for x in qkv())
    # As the authors compute it: embeddings of the distances 39, 38, ..., 0, then the shift.
    angle = np.outer(np.arange(39, -1, -1), 10_000.0 ** -(np.arange(0, width, 2) / width))
    keys = np.einsum("sd,dnh->snh", np.concatenate([np.sin(angle), np.cos(angle)], -1), w)
    terms = relative_shift(np.einsum("tnh,snh->nts", q[0] + v_bias, keys))
    mask = pattern.passes(AttentionMetadata(jnp.arange(40)[None], jnp.arange(40)[None]))[0].mask
    seen = np.asarray(mask.element(np.arange(40)[:, None], np.arange(40)[None]))
    want = naive(q + u, k, v, terms / 4, seen)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


def test_transformer_xl_counts_the_distances_of_the_pattern():
    leaves = [jnp.asarray(np.random.default_rng(3).normal(size=shape), jnp.float32)
              for shape in ((16, 6), (16, 6), (32, 16, 6))]  # fmt: skip
    got = run(Streaming(sinks=3, recent=6), TransformerXL(*leaves))
    u, v_bias, w = (np.moveaxis(np.asarray(x, np.float64), -1, 0) for x in leaves)
    q, k, v = (x.astype(np.float64) for x in qkv())
    away = np.where(AWAY <= 6, AWAY, np.minimum(AWAY, 9 - np.arange(40)[None]))
    angle = away[..., None] * 10_000.0 ** -(np.arange(0, 32, 2) / 32)
    waves = np.concatenate([np.sin(angle), np.cos(angle)], -1)
    terms = np.einsum("tnh,ndh,tsd->nts", q[0] + v_bias, w, waves)
    seen = (AWAY >= 0) & ((AWAY <= 6) | (np.arange(40) < 3))
    np.testing.assert_allclose(got, naive(q + u, k, v, terms / 4, seen), rtol=1e-5, atol=2e-5)


@pytest.mark.slow
def test_disentangled_terms_have_gradients_of_their_formula_and_no_kernel():
    rng = np.random.default_rng(4)
    bias = Disentangled(*(jnp.asarray(rng.normal(size=(16, 16, 6)), jnp.float32) for _ in "kq"), 20)
    q, k, v = map(jnp.asarray, qkv())
    at = jnp.arange(40)[None]
    metadata = AttentionMetadata(at, at, rotation=no_rotation(), row_indices=(None, None))
    bucket = bias.buckets(jnp.asarray(AWAY))

    def dense(q, k, v, bias):
        k, v = (jnp.repeat(x, 3, 2) for x in (k, v))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k)
        logits += jnp.einsum("btnh,tshn->bnts", q, bias.keys[bucket])
        logits += jnp.einsum("bsnh,tshn->bnts", k, bias.queries[bucket])
        weights = jax.nn.softmax(jnp.where(AWAY >= 0, logits / math.sqrt(48), -jnp.inf))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    def ours(q, k, v, bias):
        return Causal().attend(q, k, v, metadata.replace(bias=bias))

    def loss(function):
        return lambda *args: jnp.sum(jnp.sin(function(*args)))

    want = jax.value_and_grad(loss(dense), argnums=(0, 1, 2, 3))(q, k, v, bias)
    got = jax.value_and_grad(loss(ours), argnums=(0, 1, 2, 3))(q, k, v, bias)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), got, want)
    with pytest.raises(InputError, match="implementation=triton has no terms .* use xla"):
        Causal().attend(q, k, v, metadata.replace(bias=bias, implementation="triton"))
    with pytest.raises(TypeError, match="no rule moves Disentangled"):
        Streaming(sinks=3, recent=6).attend(q, k, v, metadata.replace(bias=bias))


@pytest.mark.parametrize("kind", ["causal_32_128", "causal_32_256", "bidirectional_32_128"])
def test_buckets_equal_the_stored_ones(kind):
    relative, distance = stored("t5.buckets.relative_position"), int(kind.rpartition("_")[2])
    bias = RelativeBias(jnp.zeros((32, 1)), distance, kind.startswith("bi"))
    got = bias.buckets(jnp.zeros(1, jnp.int32), jnp.asarray(relative))[0]
    np.testing.assert_array_equal(got, stored(f"t5.buckets.{kind}"))


@pytest.mark.parametrize("code", ["slopes", "slopes_mpt"])
def test_slopes_equal_the_stored_ones_for_every_number_of_heads(code):
    counts, slopes = stored("alibi.slopes.n_heads"), stored(f"alibi.slopes.{code}")
    for heads, expected in zip(counts, slopes, strict=True):
        np.testing.assert_allclose(alibi_slopes(int(heads)), expected[:heads], rtol=1e-6)


def test_sinusoids_equal_the_stored_ones_and_are_added_to_scaled_embeddings():
    want = stored("basic.sinusoidal.pe")
    waves = jax.jit(sinusoids, static_argnums=1)
    np.testing.assert_allclose(waves(np.arange(20), 16), want, rtol=1e-5, atol=2e-5)
    assert jax.eval_shape(lambda: sinusoids(jnp.arange(3), 5)).shape == (3, 5)
    model, x = Decoder(TINY.replace(position="sinusoidal")), np.ones((1, 4, 64), np.float32)
    add = functools.partial(model.apply, {"params": {}}, method=lambda m, *a: m.position(*a))
    got = jax.jit(add)(x, np.arange(4)[None], None)
    np.testing.assert_allclose(got[0], 8 * x[0] + waves(np.arange(4), 64), rtol=1e-5)


@pytest.mark.slow
def test_a_table_of_positions_ends():
    model, params = made("learned")
    with pytest.raises(InputError, match="81 tokens are more than the 80 positions"):
        read(model, params, tokens(1, 81))
    lm = LanguageModel.load(ModelSection(preset="tiny", position="learned"))
    with pytest.raises(InputError, match="128 positions .* position=learned"):
        lm.generate([[1] * 100])
    # What is traced cannot be refused: it must not look like a number.
    out, _ = read(model, params, tokens(2, 8), None, np.array([range(72, 80), range(76, 84)]))
    assert np.isfinite(out[0]).all() and np.isnan(out[1, 4:]).all()
    with pytest.raises(InputError, match="positions of type float32 have no row"):
        read(model, params, tokens(1, 8), None, jnp.arange(8.0)[None])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TINY.replace(position="none"), "model.position='none' must be one of rope, alibi"),
        (
            lambda: TINY.replace(position="t5", pattern=LMInfinite()),
            "model.position=t5 is not defined under pattern LMInfinite.*takes rope, alibi",
        ),
        (
            lambda: TINY.replace(position="transformer_xl", width=63),
            "needs an even model.width; it is 63",
        ),
        (lambda: TINY.replace(position="learned", pattern=DualChunk()), "position=learned is not"),
        (
            lambda: TINY.replace(position="alibi", rope=Yarn(factor=2.0)),
            "rope.type=yarn turns queries and keys, which a model with position=alibi does not",
        ),
        (lambda: run(DualChunk(), Alibi(jnp.ones(6))), "DualChunk.* takes no bias of the logits"),
        (lambda: config_to_hf(TINY.replace(position="alibi")), "no llama model .*position='alibi'"),
        (
            lambda: language_model(TINY.replace(position="t5"), E2Positions()),
            "train.positions.type=e2_llm spreads tokens .* model.position=t5 has none",
        ),
    ],
)
def test_invalid_combinations_raise_input_error(make, message):
    with pytest.raises(InputError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_bias_that_no_rule_moves_is_an_error_of_the_program():
    pattern, at = Streaming(), jnp.arange(4)[None]
    bias = RelativeBias(jnp.zeros((32, 6)))
    q, k, v = (jnp.asarray(x) for x in qkv(4))
    metadata = AttentionMetadata(at, at, bias=bias)
    with pytest.raises(TypeError, match="no rule moves RelativeBias"):
        pattern.attend(q, k, v, metadata)


@pytest.mark.slow
def test_the_positions_that_a_checkpoint_was_trained_with_stay():
    section = ModelSection(path="x", position="alibi")
    with pytest.raises(InputError, match="weights of x were trained with position=rope"):
        model_config(section, TINY)
    assert model_config(ModelSection(preset="tiny", position="t5"), TINY).position == "t5"
