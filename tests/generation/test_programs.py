"""Programs of inference on a CPU read 16-bit weights as they are stored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax import LanguageModel, Sampling
from lcjax.attention import Landmark
from lcjax.checkpoints import ByteTokenizer
from lcjax.generation import programs, scoring, session
from lcjax.models import Decoder, ModelConfig, preset
from lcjax.models import cache as cache_lib
from lcjax.models.decoder import random_params
from lcjax.models.loss import product_of_few_rows
from lcjax.retrieval import DecoderEncoder
from lcjax.retrieval import encoder as encoder_lib
from lcjax.rope import Clex, Default, DynamicNTK, Linear, Yarn

CONFIG = ModelConfig(
    **dict(vocab_size=384, width=256, mlp_width=704, num_layers=6, num_heads=4, num_kv_heads=2),
    **dict(head_dim=64, max_length=512, tie_embeddings=False, scan_layers=False),
)


def model(dtype, param_dtype="bfloat16"):
    config = CONFIG.replace(dtype=dtype, param_dtype=param_dtype)
    return Decoder(config), random_params(config, 0)


def arguments(decoder, params, tokens):
    shape, config = (1, tokens), decoder.config
    rng = np.random.default_rng(0)
    return (
        *(decoder, params, cache_lib.create(config, 1, 64)),
        jnp.asarray(rng.integers(0, 384, shape), jnp.int32),
        *(None, jnp.broadcast_to(jnp.arange(tokens), shape), config.rotation(64), None, None),
    )


@pytest.mark.slow
@pytest.mark.skipif(not programs._option_is_known(), reason="this XLA does not have the option")
@pytest.mark.parametrize("tokens", [1, 2, 48])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_copy_of_the_weights_in_float32_exists(dtype, tokens):
    decoder, params = model(dtype)
    inputs = arguments(decoder, params, tokens)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    def temporaries(program):
        return program.lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    program = session._step_to_new_cache._for(*inputs)
    assert temporaries(program) < weights / 4
    if dtype == "float32" and tokens == 48:
        assert program is session._step_to_new_cache._from_16_bits
        assert (
            temporaries(session._step_to_new_cache._default) > weights
        )  # else the option is not needed
    else:
        assert program is session._step_to_new_cache._default


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 48])
def test_logits_are_those_of_the_same_weights_in_float32(tokens):
    decoder, params = model("float32")
    wide = Decoder(decoder.config.replace(param_dtype="float32"))
    logits, cache = session._step_to_new_cache(*arguments(decoder, params, tokens))
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    want, want_cache = session._step_to_new_cache(*arguments(wide, exact, tokens))
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-5)
    for x, y in zip(jax.tree.leaves(cache), jax.tree.leaves(want_cache), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_weights_in_float32_and_other_platforms_have_the_default_program(monkeypatch):
    assert (
        session._step_in_place._for(*arguments(*model("float32", "float32"), 48))
        is session._step_in_place._default
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert (
        session._step_in_place._for(*arguments(*model("bfloat16"), 48))
        is session._step_in_place._default
    )


def test_an_xla_without_the_option_has_the_default_program(monkeypatch):
    monkeypatch.setattr(programs, "_IN_THE_PRODUCT", {"xla_cpu_no_such_option": "1"})
    assert not programs._option_is_known.__wrapped__()
    monkeypatch.setattr(programs, "_option_is_known", lambda: False)
    decoder = Decoder(CONFIG.replace(dtype="float32", param_dtype="bfloat16"))
    inputs = decoder, None, None, np.zeros((1, 48), np.int32)
    assert session._step_in_place._for(*inputs) is session._step_in_place._default


def test_landmarks_of_decoding_steps_count_as_rows(monkeypatch):
    monkeypatch.setattr(programs, "_option_is_known", lambda: True)
    steps = {}
    for name, pattern in (("plain", None), ("landmarks", Landmark(block=8, token=3))):
        config = CONFIG.replace(dtype="float32", param_dtype="bfloat16")
        config = config if pattern is None else config.replace(pattern=pattern)
        decoder = Decoder(config)
        for rows in (8, 9, 16, 17):
            inputs = decoder, None, None, np.zeros(rows, np.int32)
            steps[name, rows] = (
                session._step_in_place._for(*inputs) is session._step_in_place._default
            )
    assert [rows for (name, rows), few in steps.items() if few] == [8, 9, 16, 8]


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("weights_dtype", ["bfloat16", "float16"])
def test_products_of_few_rows_are_exact_and_have_gradients(rows, axis, weights_dtype):
    rng = np.random.default_rng(rows)
    scales = 10.0 ** rng.integers(-6, 6, (rows, 1, 1))
    x = (rng.normal(size=(rows, 1, 300)) * scales).astype(np.float32)
    shape = (300, 40) if axis == 0 else (40, 300)
    kernel = rng.normal(size=shape).astype(jnp.dtype(weights_dtype)).astype(np.float32)

    def product(x, kernel):
        return x @ (kernel if axis == 0 else kernel.T)

    def product_of_wide(x, kernel):
        return product(*(y.astype(jnp.float32) for y in (x, kernel)))

    @functools.partial(jax.jit, static_argnums=2)
    def of_few(x, kernel, product=product):
        return product_of_few_rows(product, x, kernel, weights_dtype=weights_dtype, axis=axis)

    wide = x.astype(np.float64), kernel.astype(np.float64)
    exact, size = product(*wide), product(*map(np.abs, wide))
    assert of_few(x, kernel).dtype == jnp.float32
    assert np.all(np.abs(of_few(x, kernel) - exact) <= 3e-6 * size)
    half = rng.normal(size=(rows, 1, 300)).astype(np.float16)  # the sum of two in bfloat16
    got = of_few(half, kernel.astype(np.float16), product_of_wide)
    wide = half.astype(np.float64), kernel.astype(np.float64)
    assert np.all(np.abs(got - product(*wide)) <= 2e-5 * product(*map(np.abs, wide)))
    # 16-bit activations: one rounding of the result, as elsewhere
    low = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    got, want = of_few(*low), jax.jit(product)(*low)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (got, want)), rtol=0.02, atol=0)

    @jax.jit
    def gradients(*arrays):
        return tuple(
            jax.grad(lambda *arrays, function=function: jnp.sin(function(*arrays)).sum(), (0, 1))(
                *arrays
            )
            for function in (of_few, product)
        )

    for got, want in zip(*gradients(x / scales.astype(np.float32), kernel), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_scores_are_those_without_the_option(monkeypatch):
    config = CONFIG.replace(dtype="bfloat16", param_dtype="bfloat16")
    lm = LanguageModel(Decoder(config), random_params(config, 3), ByteTokenizer())
    tokens = np.random.default_rng(2).integers(0, 384, (2, 40))
    scores = lm.nll(tokens)
    monkeypatch.setattr(programs, "_option_is_known", lambda: False)
    np.testing.assert_allclose(scores, lm.nll(tokens), atol=0.05)  # bfloat16 rounds other sums


@pytest.mark.parametrize(
    "shape, one_device, outputs, repeated",
    [
        ((1, 1, 64), True, 48, True),
        ((64,), True, 48, True),
        ((2, 1, 64), True, 48, False),
        ((1, 1, 64), False, 48, False),
        ((1, 1, 64), True, 160_000, False),
    ],
)
def test_a_gpu_multiplies_one_row_as_eight(shape, one_device, outputs, repeated, monkeypatch):
    rng = np.random.default_rng(0)
    x, kernel = (rng.normal(size=s).astype(jnp.bfloat16) for s in (shape, (64, outputs)))

    def product(x, kernel):
        return jnp.matmul(x, kernel)

    def of_few(x, kernel):
        options = {"weights_dtype": "bfloat16", "one_device": one_device}
        return product_of_few_rows(product, x, kernel, **options)

    text = jax.jit(of_few).trace(x, kernel).lower(lowering_platforms=("cuda",)).as_text()
    rows = "x".join(map(str, (8, *shape)))
    assert (f"tensor<{rows}xbf16>" in text) == repeated

    def as_on_a_gpu(*x, cpu, default, cuda=None):
        return (cuda or default)(*x)

    monkeypatch.setattr(jax.lax, "platform_dependent", as_on_a_gpu)

    @jax.jit
    def with_gradients(x, kernel, dy):
        pairs = (jax.vjp(function, x, kernel) for function in (of_few, product))
        return [(y, *pull(dy)) for y, pull in pairs]

    dy = rng.normal(size=(*shape[:-1], outputs)).astype(jnp.bfloat16)
    for got, want in zip(*with_gradients(x, kernel, dy), strict=True):
        assert got.shape == want.shape
        got, want = (np.asarray(y, np.float32) for y in (got, want))
        assert np.linalg.norm(got - want) < 0.01 * np.linalg.norm(want)


@pytest.mark.parametrize(
    "rope", [Default(theta=10_000.0), Clex(theta=10_000.0, original_length=64, max_factor=4)]
)
def test_all_rope_methods_share_the_compiled_programs(rope):
    config = preset("tiny").replace(rope=rope, num_layers=1)
    params = random_params(config, 0)
    assert ("rope" in params) == rope.learned
    lm = LanguageModel(Decoder(config), params, ByteTokenizer())
    programs_of = session._step_in_place, scoring._score_rows, encoder_lib._apply_decoder
    tokens = np.random.default_rng(0).integers(0, 256, (1, 90))

    def use(lm):
        lm.generate(tokens.tolist(), Sampling(max_new_tokens=3))
        DecoderEncoder(lm).encode(["a text"], None, True)
        return lm.nll(tokens), [program._cache_size() for program in programs_of]

    scores, sizes = use(lm)
    ropes = Linear(factor=2.0), Yarn(factor=8.0), DynamicNTK(original_length=32, factor=2.0)
    for other in ropes:
        other_scores, other_sizes = use(lm.with_method(rope=other))
        assert other_sizes == sizes and abs(other_scores - scores).max() > 1e-4
    assert use(lm.with_method(length=2 * config.max_length))[1] == sizes


def test_the_config_of_the_decoder_has_the_rope_of_the_method():
    lm = LanguageModel(Decoder(preset("tiny")), random_params(preset("tiny"), 0), ByteTokenizer())
    for rope in (Linear(factor=2.0), Yarn(factor=4.0), DynamicNTK(factor=2.0)):
        other = lm.with_method(rope=rope)
        assert other.config is other.model.config and type(other.config.rope) is type(rope)
        assert other.model.config.rotation(300).equals(other.rotation(300))
        assert not other.rotation(300).equals(lm.rotation(300))


def test_a_program_makes_no_rotation_of_its_own():
    decoder, tokens = Decoder(preset("tiny")), np.zeros((1, 4), np.int32)
    other = Decoder(preset("tiny").replace(rope=Linear(factor=2.0), extended_length=4096))
    static = programs.without_rope(decoder)
    assert static == programs.without_rope(other)
    assert static.config.replace(rope=decoder.config.rope) == decoder.config
    with pytest.raises(TypeError, match="takes the rotation as an argument"):
        static.config.rotation(64)
    with pytest.raises(TypeError, match="takes the rotation as an argument"):
        jax.eval_shape(lambda: static.init_with_output(jax.random.key(0), tokens))
