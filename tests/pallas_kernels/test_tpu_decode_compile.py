"""Compiled for TPU, a decoding step reads the cache as it lies: nothing of its size is copied."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed: pip install lcjax[aot]", allow_module_level=True)

from test_tpu_compile import LONG, TOPOLOGIES, _environment, arrays  # noqa: F401 (a fixture)

from pallas_kernels import Alibi, _tpu, causal, window
from pallas_kernels.backends import Operands, Spec

pytestmark = pytest.mark.slow  # the compiler


def step(q, new_key, new_value, keys, values, place, segments, spec, bias=None):
    """Writes a token's key and value into a donated cache [B, K, S, H], and attends over it."""
    at = (0, 0, place[0, 0], 0)
    keys = jax.lax.dynamic_update_slice(keys, new_key, at)
    values = jax.lax.dynamic_update_slice(values, new_value, at)
    operands = Operands(place, None, segments[:, :1], segments, bias)
    out, lse = _tpu.forward(q, keys.swapaxes(1, 2), values.swapaxes(1, 2), operands, spec)
    return out, lse, keys, values


def compile_step(generation, batch, heads, kv_heads, length, size, spec, *, dtype, **options):
    """(the compiled step, bytes of the keys)."""
    cache, new = (batch, kv_heads, length, size), (batch, kv_heads, 1, size)
    q, *news = arrays(generation, (batch, 1, heads, size), new, new, dtype=dtype)
    kept = arrays(generation, cache, cache, dtype=dtype)
    places = arrays(generation, (batch, 1), (batch, length), dtype="int32")
    jitted = jax.jit(lambda *x: step(*x, spec, **options), donate_argnums=(3, 4))
    traced = jitted.trace(q, *news, *kept, *places)
    compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    return compiled, batch * kv_heads * length * size * jnp.dtype(dtype).itemsize


# What makes an array in memory: all but names for what is there, and writing in place.
MADE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = [a-z]+\d+\[([\d,]+)\]\S* ([\w-]+)\(")
FREE = {"parameter", "bitcast", "get-tuple-element", "dynamic-update-slice"}


def made(compiled, elements):
    """Operations of the optimised program whose result has as many elements as the keys."""
    found = []
    for line in compiled.as_text().splitlines():
        match = MADE.match(line)
        if match and match[3] not in FREE:
            size = 1
            for n in match[2].split(","):
                size *= int(n)
            if size >= elements:
                found.append(line.strip())
    return found


@pytest.mark.parametrize("kv_heads", [32, 8])
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_131072_tokens_of_llama_heads_are_not_copied(generation, kv_heads):
    shape = (1, 32, kv_heads, LONG, 128)
    compiled, size = compile_step(generation, *shape, Spec(causal(), 0.1), dtype="bfloat16")
    memory = compiled.memory_analysis()
    assert "lcjax_decode" in compiled.as_text()
    assert made(compiled, size // 2) == []
    assert memory.alias_size_in_bytes >= 2 * size  # written in place
    assert memory.temp_size_in_bytes < 2**21


@pytest.mark.parametrize(
    ("size", "length", "batch", "dtype"),
    [
        (64, 32768, 1, "bfloat16"),  # kept turned by XLA: half of each lane would be empty
        (80, 4096, 2, "bfloat16"),
        (192, 8192, 2, "bfloat16"),
        (96, 16384, 1, "float32"),
        (256, 33792, 1, "float32"),  # the last block is cut off
    ],
)
def test_heads_of_any_size_are_not_padded(size, length, batch, dtype):
    spec = Spec(causal() & window(5000), 0.1, soft_cap=30.0)
    (slopes,) = arrays("v5e", (8,), dtype="float32")
    bias = Alibi(jnp.ones(slopes.shape))
    shape = (batch, 8, 4, length, size)
    compiled, own = compile_step("v5e", *shape, spec, dtype=dtype, bias=bias)
    assert made(compiled, own // jnp.dtype(dtype).itemsize) == []
    assert compiled.memory_analysis().temp_size_in_bytes < 2**21


def test_a_cache_that_is_read_in_another_order_would_be_found():
    def reads(keys):
        return jnp.cumsum(keys.swapaxes(1, 2), axis=2)

    (keys,) = arrays("v5e", (1, 4, 32768, 128))
    compiled = jax.jit(reads).trace(keys).lower(lowering_platforms=("tpu",)).compile()
    assert made(compiled, 4 * 32768 * 128)
