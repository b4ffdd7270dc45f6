"""Compiled for TPU, a decoding step reads the cache as it lies: nothing of its size is copied."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed: pip install -e '.[aot]'", allow_module_level=True)

from test_tpu_compile import (  # noqa: F401 (_environment is a fixture)
    LONG,
    TOPOLOGIES,
    _environment,
    arrays,
    place,
)

from lcjax.attention import Exact, Fp8, Int8, KeepAll, Sliding
from lcjax.cost import compilers
from lcjax.cost.chips import Topology
from lcjax.generation.session import _step_in_place, lower_read
from lcjax.models import Decoder
from lcjax.models.cache import abstract_cache
from lcjax.models.model_config import PRESETS
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.rope import Rotation
from pallas_kernels import (
    Alibi,
    causal,
    chunk_distance,
    chunks,
    keys_in,
    prefix,
    queries_in,
    random_blocks,
    since_chunk,
    stride,
    tail_of,
    window,
)
from pallas_kernels.backends.tpu import attention as _tpu
from pallas_kernels.backends.tpu import decode as _tpu_decode
from pallas_kernels.dispatch import Operands, Spec

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("enable_xla_optimizations")]  # the compiler


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


@pytest.mark.parametrize(
    ("queries", "heads", "kv_heads", "size", "dtype"),
    [
        (16, 32, 4, 64, "bfloat16"),
        (16, 8, 1, 16, "float32"),
        (128, 4, 4, 128, "float32"),
        (1, 64, 1, 256, "float32"),
        (2, 5, 5, 80, "bfloat16"),
    ],
)
def test_steps_of_up_to_128_rows_fit_into_vmem(queries, heads, kv_heads, size, dtype):
    q, k = (2, queries, heads, size), (2, 32768, kv_heads, size)
    q, k = arrays("v5e", q, k, dtype=dtype)
    q_index, segments = arrays("v5e", (2, queries), (2, 32768), dtype="int32")
    (slopes,) = arrays("v5e", (heads,), dtype="float32")
    operands = Operands(q_index, segments, q_index, segments, Alibi(slopes))
    spec = Spec(causal() & window(5000), 0.1, soft_cap=30.0)
    assert _tpu_decode.fits(q, k, k, operands, spec)
    traced = jax.jit(lambda q, k, v, x: _tpu.forward(q, k, v, x, spec)).trace(q, k, k, operands)
    assert "lcjax_decode" in traced.lower(lowering_platforms=("tpu",)).compile().as_text()


@pytest.mark.parametrize("queries", [1, 256])
@pytest.mark.parametrize(
    "mask",
    [
        causal() & chunks(1000),
        chunk_distance(1000, 1, 1, shift=500),
        causal() & stride(7) & ~tail_of(64, 8),
        causal() & since_chunk(512, 1000, 1000) | prefix(4),
        random_blocks(512, ((0,), (0, 1))) & queries_in((3, 5)) | keys_in((7,)),
    ],
    ids=["chunks", "chunk before", "strides", "streaming", "lists"],
)
def test_masks_compile_whether_they_divide_or_look_up(mask, queries):
    q, k = arrays("v5e", (1, queries, 8, 128), (1, 4096, 8, 128))
    (place,) = arrays("v5e", (1, queries), dtype="int32")
    traced = jax.jit(lambda q, k, x: _tpu.forward(q, k, k, Operands(x), Spec(mask, 0.1)))
    assert traced.trace(q, k, place).lower(lowering_platforms=("tpu",)).compile()


@pytest.mark.parametrize("preset", ["llama3.1-8b", "smollm2-135m"])
@pytest.mark.parametrize("storage", [Exact(), Int8(), Fp8()], ids=["exact", "int8", "fp8"])
def test_a_decoding_step_of_a_model_copies_no_cache(preset, storage):
    config = PRESETS[preset].replace(num_layers=2, scan_layers=False, vocab_size=512)
    config = config.replace(cache=KeepAll(storage))
    config = config.replace(dtype="bfloat16", param_dtype="bfloat16")
    model, tokens = Decoder(config), jnp.zeros((1, 8), jnp.int32)
    half = config.rotary_dim // 2
    given = (
        jax.eval_shape(lambda: model.init(jax.random.key(0), tokens)["params"]),
        abstract_cache(config, 1, LONG),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        jax.ShapeDtypeStruct((1, 1), jnp.int32),
        jax.eval_shape(lambda: Rotation(jnp.ones((1, half)), jnp.ones((1, 1, 1)))),
    )
    where = place("v5e")
    params, cache, token, at, rotation = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), given
    )
    traced = _step_in_place.trace(model, params, cache, token, None, at, rotation, None, None)
    compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    elements = cache.layers[0]["keys"].size
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))
    memory = compiled.memory_analysis()
    assert compiled.as_text().count("lcjax_decode") >= 2
    assert made(compiled, elements) == []
    assert memory.alias_size_in_bytes >= nbytes  # written in place
    assert memory.temp_size_in_bytes < 2**22


def test_a_cache_that_is_read_in_another_order_would_be_found():
    def reads(keys):
        return jnp.cumsum(keys.swapaxes(1, 2), axis=2)

    (keys,) = arrays("v5e", (1, 4, 32768, 128))
    compiled = jax.jit(reads).trace(keys).lower(lowering_platforms=("tpu",)).compile()
    assert made(compiled, 4 * 32768 * 128)


@pytest.mark.parametrize(("rows", "window"), [(8, 1024), (16, 100)])
def test_prompts_under_a_window_are_read_in_any_number_of_rows(rows, window):
    """The keys of the cache and of the chunk are not as many as a power of two."""
    topology = Topology.parse("v5e:1x1")
    config = PRESETS["smollm2-135m"].replace(num_layers=2, pattern=Sliding(window=window))
    config = config.replace(dtype="bfloat16", param_dtype="bfloat16")
    mesh = make_mesh(Mesh(fsdp=1), compilers.devices(topology))
    assert lower_read(config, mesh, rows, 32_768, 4_096).compile()
