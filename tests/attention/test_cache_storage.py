"""Stored keys and values: codes of the released formulas, and attention over them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kv_cache_golden import golden

from lcjax.attention import AttentionMetadata, Causal
from lcjax.attention.cache import Tokens
from lcjax.attention.cache_storage import Fp8, Int8, LayerShape, TurboQuant, pack, unpack
from lcjax.attention.kivi import Kivi, KiviCache
from lcjax.errors import InputError
from pallas_kernels import decode

CASES = {
    "int8.token_head": Int8(),
    "fp8.token_head": Fp8(),
    "turboquant.k4v4_nc": TurboQuant(),
    "turboquant.k3v3": TurboQuant(key_bits=3, value_bits=3, corrects_norm=False),
}


@pytest.mark.parametrize("name", CASES)
def test_codes_and_attention_are_those_of_the_formulas(name):
    storage, (_, arrays) = CASES[name], golden()
    q, k, v = (jnp.asarray(arrays[f"{name}.{part}"]) for part in "qkv")
    stored = storage.encode(k, v)
    codes = {"k": stored["keys"], "v": stored["values"]}
    if isinstance(storage, TurboQuant):
        bits = {"k": storage.key_bits, "v": storage.value_bits}
        codes = {part: unpack(words, bits[part], k.shape[-1]) for part, words in codes.items()}
        np.testing.assert_array_equal(stored["key_norm"], arrays[f"{name}.k_norm"])
    for part in codes:
        if f"{name}.{part}_codes" in arrays:
            expected = arrays[f"{name}.{part}_codes"].astype("f")
            np.testing.assert_array_equal(codes[part].astype("f"), expected)
    for part, values in zip("kv", storage.decode(stored)):
        np.testing.assert_allclose(values, arrays[f"{name}.{part}_read"], rtol=1e-5, atol=1e-5)
    out = jax.jit(lambda q, *pair: decode(q, *pair)[0])(q.swapaxes(1, 2), *storage.read(stored))
    np.testing.assert_allclose(out.swapaxes(1, 2), arrays[f"{name}.out"], atol=2e-6)


@pytest.mark.parametrize("storage", CASES.values(), ids=CASES)
def test_equal_numbers_and_zeros_are_read_as_they_are(storage):
    x = jnp.zeros((2, 3, 32)).at[1].set(0.5)
    _, values = storage.decode(storage.encode(x, x))
    np.testing.assert_allclose(values, x, atol=1e-6)
    assert all(np.isfinite(y).all() for y in storage.decode(storage.encode(x, x)))


@pytest.mark.parametrize("storage", CASES.values(), ids=CASES)
def test_shapes_are_those_of_the_codes(storage):
    shapes = storage.arrays(LayerShape(4, 2, 64, jnp.dtype("bfloat16")), 5)
    x = jnp.ones((2, 5, 64), jnp.bfloat16)
    assert {n: (y.shape, y.dtype) for n, y in storage.encode(x, x).items()} == {
        name: (y.shape, y.dtype) for name, y in shapes.items()
    }
    assert tuple(shapes) == storage.names


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_packed_codes_are_unpacked(bits):
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, 64))
    words = pack(jnp.asarray(codes), bits)
    assert words.shape == (3, 2 * bits)
    np.testing.assert_array_equal(unpack(words, bits, 64), codes)


# KIVI


def read_kivi(storage, calls, *, padding=(), dtype="float32"):
    """Reads tokens in calls of q, k, v [B, heads, T, H]; returns the arrays and the last output.

    `padding` has the columns of padding before each call, in the first of two equal rows.
    """
    (kv_heads, size), heads = calls[0][1].shape[1::2], calls[0][0].shape[1]
    shape, rows = LayerShape(heads, kv_heads, size, jnp.dtype(dtype)), 2 if padding else 1
    kind, slots = KiviCache(storage).fit(sum(x[1].shape[2] for x in calls), None)
    arrays = {
        name: jnp.zeros((rows, *x.shape), x.dtype) for name, x in kind.arrays(shape, slots).items()
    }
    tokens = jnp.zeros(rows, jnp.int32)
    for number, call in enumerate(calls):
        segments = np.ones((rows, call[0].shape[2]), np.int32)
        if padding:
            before = padding[number]
            early = [np.pad(x, [(0, 0), (0, 0), (before, 0), (0, 0)]) for x in call]
            late = [np.pad(x, [(0, 0), (0, 0), (0, before), (0, 0)]) for x in call]
            call = [np.concatenate(pair) for pair in zip(early, late)]
            segments = np.pad(segments, [(0, 0), (before, 0)])
            segments[1] = segments[1, ::-1]
        out, arrays, tokens = _attend(kind, arrays, tokens, segments, *call)
    return arrays, np.asarray(out)


@functools.partial(jax.jit, static_argnums=0)
def _attend(kind, arrays, tokens, segments, *qkv):
    q, k, v = (x.swapaxes(1, 2) for x in qkv)
    index = tokens[:, None] + jnp.cumsum(segments, axis=1, dtype=jnp.int32) - 1
    view = kind.reserve((), Tokens(segments, index, index), 0)
    metadata = view.update_metadata(AttentionMetadata(index, index))
    out, arrays = kind.attend(arrays, q, k, v, Causal(), view, metadata)
    return out.swapaxes(1, 2), arrays, tokens + segments.sum(1)


KIVI = {
    "kivi.b2": Kivi(bits=2, residual=64),
    "kivi.b4": Kivi(bits=4, residual=32),
}


@pytest.mark.parametrize("name", ["kivi.b2", pytest.param("kivi.b4", marks=pytest.mark.slow)])
def test_kivi_codes_packs_and_reads_as_the_released_code(name):
    storage, (_, arrays) = KIVI[name], golden()
    q, k, v = (arrays[f"{name}.{part}"] for part in "qkv")
    # A last token that no query sees, so that the output is that of the tokens before.
    hidden = -100 * q.reshape(1, 2, 2, 1, -1).sum(2)
    queries = np.zeros((*q.shape[:2], k.shape[2], q.shape[3]), np.float32)
    stored, _ = read_kivi(storage, [(queries, k, v)])
    _, out = read_kivi(storage, [(queries, k, v), (q, hidden, v[:, :, :1])])
    np.testing.assert_allclose(out, arrays[f"{name}.out"], atol=2e-5)
    for part, name_of_part in (("k", "keys"), ("v", "values")):
        packed = arrays[f"{name}.{part}_packed"]
        np.testing.assert_array_equal(stored[name_of_part][:, :, : packed.shape[2]], packed)
        coded = arrays[f"{name}.{part}_codes"].shape[2]
        read = storage.decode(stored)["kv".index(part)][:, :, :coded]
        np.testing.assert_allclose(
            read, arrays[f"{name}.{part}_read"][:, :, :coded], rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("bits", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_kivi_has_one_state_for_any_calls_and_padding(bits):
    storage, rng = Kivi(bits=bits, residual=32), np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, n, 84, 32)).astype("f") for n in (4, 2, 2))
    parts = ([84], [42, *[1] * 42], [42, 42])
    states = []
    for sizes in parts:
        ends = np.cumsum(sizes)
        calls = [[x[:, :, e - n : e] for x in (q, k, v)] for n, e in zip(sizes, ends)]
        states.append(read_kivi(storage, calls)[0])
    padded, outs = read_kivi(storage, calls, padding=[5, 5])
    alone = read_kivi(storage, calls)[1]
    np.testing.assert_allclose(outs[0, :, 5:], alone[0], atol=1e-5)
    np.testing.assert_allclose(outs[1, :, :-5], alone[0], atol=1e-5)
    for name, x in states[0].items():  # what is beyond the last token was never written
        for other in (*(state[name] for state in states[1:]), *np.split(padded[name], 2)):
            np.testing.assert_array_equal(other, x)
    ample, out = read_kivi(Kivi(bits=bits, residual=96), calls)
    assert not np.any(ample["values"]) and 1e-3 < np.abs(out - alone).max() < 1.0


def test_a_large_number_is_clipped_and_not_infinite():
    """A cast to float8 beyond its range is no number, so rounding must not pass the largest one."""
    x = jnp.array([[449.0, -1e30, 3e38], [1.1, 449.0, -449.0]])
    for storage in (Fp8(), Int8()):
        codes, scale = storage.quantise(x)
        values = codes.astype(jnp.float32) * scale
        assert (np.abs(values - x) <= np.abs(x).max(-1, keepdims=True) / 16).all()


def test_bad_settings_say_what_to_write():
    with pytest.raises(InputError, match="model.cache.storage.key_bits=5"):
        TurboQuant(key_bits=5)
    with pytest.raises(InputError, match="group=32 must be a multiple of 32 .* residual=48"):
        Kivi(residual=48)
    with pytest.raises(InputError, match="head_dim=48 must be 32, 64"):
        TurboQuant().arrays(LayerShape(4, 2, 48, jnp.dtype("float32")), 5)
