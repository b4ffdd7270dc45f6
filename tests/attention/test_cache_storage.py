"""Stored keys and values: codes of the released formulas, and attention over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kv_cache_golden import golden

from lcjax.attention.cache_storage import Fp8, Int8, Storage, TurboQuant, pack, unpack
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
    from lcjax.attention.cache import LayerShape

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


def test_a_large_number_is_clipped_and_not_infinite():
    """A cast to float8 beyond its range is no number, so rounding must not pass the largest one."""
    x = jnp.array([[449.0, -1e30, 3e38], [1.1, 449.0, -449.0]])
    for storage in (Fp8(), Int8()):
        codes, scale = storage.quantise(x)
        values = codes.astype(jnp.float32) * scale
        assert (np.abs(values - x) <= np.abs(x).max(-1, keepdims=True) / 16).all()


def test_bad_settings_say_what_to_write():
    from lcjax.attention.cache import LayerShape

    with pytest.raises(InputError, match="model.cache.storage.key_bits=5"):
        TurboQuant(key_bits=5)
    with pytest.raises(InputError, match="head_dim=48 must be 32, 64"):
        TurboQuant().arrays(LayerShape(4, 2, 48, jnp.dtype("float32")), 5)
    assert Storage.get_choice_name(Int8) == "int8"
