"""The TPU compiler accepts every kernel, for the generations that it knows, without a TPU.

Needs the compiler alone (`pip install -e '.[aot]'`). What it checks and interpreters do not: that
blocks fit into VMEM and tables into scalar memory, alignment, and which operations exist.
"""

import functools
import importlib.util
import os

import jax
import numpy as np
import pytest
from jax.experimental import topologies

from pallas_kernels import causal, everything, key_bits, prefix, window
from pallas_kernels.backends.tpu import attention as _tpu
from pallas_kernels.backends.tpu import delta_rule as _tpu_delta_rule
from pallas_kernels.backends.tpu import landmark as _tpu_landmark
from pallas_kernels.biases import Alibi, RelativeBias
from pallas_kernels.dispatch import Constant, Operands, Spec
from pallas_kernels.landmark import older_spec
from pallas_kernels.tables import from_block_mask

# The compiler: two minutes together.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("enable_xla_optimizations")]

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
LONG = 131072
SINKS = causal() & (window(4096) | prefix(64))
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no question to a cloud's metadata server
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no device is opened, so other processes do not matter
}

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed: pip install -e '.[aot]'", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def _environment():
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name)
        else:
            os.environ[name] = value


@functools.cache
def place(generation):
    name = TOPOLOGIES[generation]
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def arrays(generation, *shapes, dtype="bfloat16"):
    where = place(generation)
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape in shapes]


def compiled(f, *args):
    """The memory that the compiled program needs, and the program before compilation as text."""
    (kind,) = {x.sharding._device_assignment[0].device_kind for x in jax.tree.leaves(args)}
    device = jax.sharding.AbstractDevice(kind, 1, "tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(f).trace(*args).lower(lowering_platforms=("tpu",))
    return lowered.compile().memory_analysis(), lowered.as_text()


def compile_both(generation, b, t, s, heads, kv_heads, size, spec, operands, dtype="bfloat16"):
    """Compiles the forward and the backward pass; yields (memory, text) of each."""
    q, k = (b, t, heads, size), (b, s, kv_heads, size)
    q, k, lse = *arrays(generation, q, k, dtype=dtype), *arrays(generation, q[:3], dtype="float32")
    assert _tpu.unsupported(q, k, k, operands, spec) is None
    yield compiled(lambda q, k, v, x: _tpu.forward(q, k, v, x, spec), q, k, k, operands)
    saved = (q, k, k, q, lse, q, lse)
    yield compiled(lambda *x: _tpu.backward(*x, spec), *saved, operands)


@pytest.mark.parametrize("mask", [causal(), SINKS], ids=["causal", "window or prefix"])
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_131072_tokens_of_llama_2_7b_heads_compile(generation, mask):
    heads, size = 32, 128
    spec = Spec(mask, size**-0.5)
    shape = (1, LONG, LONG, heads, heads, size)
    kernels = []
    for memory, text in compile_both(generation, *shape, spec, Operands()):
        kernels.append(text.count("tpu_custom_call"))
        assert "stablehlo.while" not in text
        # Copies of a few operands in the kernels' order: nothing that grows with T squared.
        assert memory.temp_size_in_bytes < 6 * LONG * heads * size * 2
    assert kernels == [1, 1 if generation in ("v5e", "v6e") else 2]  # 128 MB of VMEM hold dq


@pytest.mark.parametrize(
    ("generation", "length", "size", "dtype"),
    [("v5p", 49_152, 128, "bfloat16"), ("v5e", 65_536, 256, "bfloat16"),
     ("v6e", 98_304, 64, "float32"), ("v5e", 45_056, 256, "float32")],
)  # fmt: skip
def test_the_longest_dq_that_is_said_to_fit_into_vmem_compiles(generation, length, size, dtype):
    shape = (1, length, length, 1, 1, size)
    spec = Spec(causal() & window(4096), 0.1)
    _, (_, text) = compile_both(generation, *shape, spec, Operands(), dtype=dtype)
    assert text.count("tpu_custom_call") == 1


SIZES = [("v4", 128), ("v5e", 64), ("v5e", 128), ("v5p", 64), ("v6e", 128)]


@pytest.mark.parametrize(("generation", "size"), SIZES)
def test_131072_tokens_with_a_bias_by_buckets_compile(generation, size):
    (table,) = arrays(generation, (32, 32), dtype="float32")
    operands, spec = Operands(bias=RelativeBias(table)), Spec(causal(), size**-0.5)
    shape = (1, LONG, LONG, 32, 32, size)
    kernels = [
        text.count("tpu_custom_call")
        for _, text in compile_both(generation, *shape, spec, operands)
    ]
    assert kernels == [1, 2]  # nothing of the bias is computed outside of them


@pytest.mark.parametrize(("generation", "size"), SIZES)
def test_keys_that_each_query_chooses_of_131072_compile(generation, size):
    heads, kv_heads, queries = 32, 8, 4096
    (bits,) = arrays(generation, (1, queries, key_bits.num_words(LONG)), dtype="uint32")
    shape = (1, queries, LONG, heads, kv_heads, size)
    operands, spec = Operands(key_bits=bits), Spec(everything(), size**-0.5)
    # Copies of keys, values, a few arrays like q, and bits in the kernels' order, with heads of 128
    copies = 2 * (2 * LONG * kv_heads + 4 * queries * heads) * 128 + 2 * 4 * bits.size
    assert copies < queries * LONG * 2  # less than the logits of one head
    for memory, text in compile_both(generation, *shape, spec, operands):
        assert text.count("tpu_custom_call") in (1, 2)
        assert memory.temp_size_in_bytes < copies


@pytest.mark.parametrize("bias", ["slopes", "buckets"])
def test_documents_places_and_biases_compile_with_tables_computed_on_the_device(bias):
    b, t, heads = 2, 2048, 8
    i32 = arrays("v5e", *[(b, t)] * 4, dtype="int32")
    slopes, table = arrays("v5e", (heads,), (32, heads), dtype="float32")
    bias = Alibi(slopes) if bias == "slopes" else RelativeBias(table, 128, bidirectional=True)
    spec = Spec(SINKS, 0.1, soft_cap=30.0)
    shape = (b, t, t, heads, 2, 80)
    for _, text in compile_both("v5e", *shape, spec, Operands(*i32, bias)):
        assert "stablehlo.while" not in text  # one kernel walks all batch rows and heads


@pytest.mark.parametrize("bias", ["slopes", "buckets"])
def test_large_heads_of_float32_fit_into_vmem(bias):
    spec = Spec(SINKS, 0.1, soft_cap=30.0)
    slopes, table = arrays("v5e", (2,), (32, 2), dtype="float32")
    bias = Alibi(slopes) if bias == "slopes" else RelativeBias(table, 128, bidirectional=True)
    i32 = arrays("v5e", *[(1, 2048)] * 4, dtype="int32")
    shape = (1, 2048, 2048, 2, 1, 256)
    operands = Operands(*i32, bias)
    assert len(list(compile_both("v5e", *shape, spec, operands, dtype="float32"))) == 2


def test_decoding_against_a_long_cache_compiles():
    q, k = arrays("v5e", (4, 1, 32, 128), (4, LONG, 8, 128))
    operands = Operands(*arrays("v5e", (4, 1), dtype="int32"))
    spec = Spec(causal(), 0.1)
    memory, text = compiled(lambda q, k, v, x: _tpu.forward(q, k, v, x, spec), q, k, k, operands)
    assert text.count("tpu_custom_call") == 1 and "stablehlo.while" not in text
    assert memory.temp_size_in_bytes < 3 * 4 * LONG * 8 * 128 * 2  # keys and values in order


def test_tables_of_many_heads_are_cut_to_the_size_of_scalar_memory():
    heads, blocks = 32, LONG // 512
    visible = np.broadcast_to(np.tri(blocks, dtype=bool), (1, heads, blocks, blocks))
    table = Constant(from_block_mask(visible, q_block=512, k_block=512))
    spec = Spec(everything(), 0.1, None, table)
    q = (1, LONG, heads, 64)
    q, lse = *arrays("v5e", q), *arrays("v5e", q[:3], dtype="float32")
    saved = (q, q, q, q, lse, q, lse)
    _, text = compiled(lambda *x: _tpu.backward(*x, Operands(), spec)[0], *saved)
    lists = heads * blocks * (blocks + 1) // 2 * 4
    assert lists > 2**22 and text.count("tpu_custom_call") >= lists // 2**19


def compile_landmark(generation, shape, block, operands, dtype="bfloat16"):
    """Compiles grouped softmax forward and backward; yields (memory, text) of each."""
    keys = (shape[0], shape[1] // block * block, *shape[2:])
    q, k = arrays(generation, shape, keys, dtype=dtype)
    (lse,) = arrays(generation, shape[:3], dtype="float32")
    spec = older_spec(block, 0.1)
    assert _tpu_landmark.unsupported(q, k, k, operands, spec) is None
    yield compiled(lambda q, k, v, x: _tpu_landmark.forward(q, k, v, x, spec), q, k, k, operands)
    saved = (q, k, k, q, lse, q, lse)
    yield compiled(lambda *x: _tpu_landmark.backward(*x, spec), *saved, operands)


@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_grouped_softmax_of_131072_tokens_of_llama_2_7b_heads_compiles(generation):
    shape, kernels = (1, LONG, 32, 128), []
    for memory, text in compile_landmark(generation, shape, 64, Operands()):
        kernels.append(text.count("tpu_custom_call"))
        assert "stablehlo.while" not in text
        # Operands in the kernels' order, keys also turned, and nothing of queries times blocks.
        assert memory.temp_size_in_bytes < 5 * LONG * 32 * 128 * 2
    # Backward, dq of a key head fits into the VMEM of these generations.
    assert kernels == [1, 1 if generation in ("v5e", "v6e") else 2]


@pytest.mark.parametrize("block", [51, 1000])
def test_grouped_softmax_of_packed_documents_and_large_heads_compiles(block):
    count = 2048 // block
    operands = Operands(*arrays("v5e", *[(2, 2048), (2, count)] * 2, dtype="int32"))
    shape = (2, 2048, 4, 256)
    for _, text in compile_landmark("v5e", shape, block, operands, dtype="float32"):
        assert "stablehlo.while" not in text


def compile_delta_rule(generation, shape, value_size, dtype="bfloat16"):
    """Compiles the gated delta rule forward and backward; yields (memory, text) of each."""
    b, t, n, size = shape
    q, v = arrays(generation, shape, (b, t, n, value_size), dtype=dtype)
    groups = -(-t // _tpu_delta_rule.GROUP)
    shapes = (b, t, n), (b, n, size, value_size), (b, n, groups, size, value_size)
    gate, state, states = arrays(generation, *shapes, dtype="float32")
    assert _tpu_delta_rule.unsupported(q, q, v, gate) is None
    forward = functools.partial(_tpu_delta_rule.forward, keep_states=True)
    yield compiled(forward, q, q, v, gate, gate, state)
    yield compiled(_tpu_delta_rule.backward, q, q, v, gate, gate, states, v, state)


@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_the_gated_delta_rule_of_131072_tokens_of_qwen3_next_heads_compiles(generation):
    shape = 1, LONG, 32, 128
    for memory, text in compile_delta_rule(generation, shape, 128):
        assert text.count("tpu_custom_call") == 1 and "stablehlo.while" not in text
        # Copies of inputs and outputs in the kernels' order, and none of matrices of chunks.
        assert memory.temp_size_in_bytes < 8 * LONG * 32 * 128 * 2


@pytest.mark.parametrize(
    ("generation", "sizes", "dtype"),
    [("v4", (256, 256), "float32"), ("v4", (128, 128), "float32"), ("v5p", (256, 128), "bfloat16"),
     ("v5e", (96, 80), "bfloat16"), ("v6e", (64, 64), "float32")],
)  # fmt: skip
def test_the_gated_delta_rule_of_other_heads_fits_into_vmem(generation, sizes, dtype):
    shape = 2, 1000, 6, sizes[0]
    assert len(list(compile_delta_rule(generation, shape, sizes[1], dtype))) == 2
