"""GPU kernels lowered for CUDA without a GPU, and compiled where the plugin's wheels are there."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    Scaled,
    causal,
    chunk_distance,
    dispatch,
    documents,
    everything,
    keys_in,
    prefix,
    random_blocks,
    since_chunk,
    stride,
    tail_of,
    window,
)
from pallas_kernels.backends.triton import attention as _triton
from pallas_kernels.backends.triton import landmark as _triton_landmark
from pallas_kernels.biases import Alibi
from pallas_kernels.dispatch import Constant, Operands, Spec
from pallas_kernels.landmark import landmark_attention, older_spec
from pallas_kernels.tables import from_block_mask

pytestmark = pytest.mark.slow  # half a minute together

LONG = 131072
MASKS = [
    chunk_distance(7, 1, None, 3), since_chunk(5, 8, 11), stride(3) & causal(), tail_of(9, 4),
    documents([0, 11, 30]), keys_in(range(0, 60, 7)), random_blocks(16, [[0, 1], [], [2, 0]]),
    ~window(9) | prefix(4),
]  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def h100():
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def lowered(f, *args):
    """Number of Triton kernels in the program for CUDA; a loop would run one of them many times."""
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" not in text
    return text.count("@__gpu$xla.gpu.triton")


def both(q, k, v, operands, spec, module=_triton):
    """Kernels of the forward and of the backward pass."""
    assert module.unsupported(q, k, v, operands, spec) is None
    lse = array(*q.shape[:3], dtype="float32")
    out = array(*q.shape[:3], v.shape[3], dtype=q.dtype)
    saved = (q, k, v, out, lse, out, lse, operands)
    return (
        lowered(lambda q, k, v, x: module.forward(q, k, v, x, spec), q, k, v, operands),
        lowered(lambda *x: module.backward(*x, spec), *saved),
    )


def test_131072_tokens_are_one_kernel_forward_and_two_backward():
    q = array(1, LONG, 32, 128)
    assert both(q, q, q, Operands(), Spec(causal() & (window(4096) | prefix(64)), 0.1)) == (1, 2)


@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 256])
def test_every_feature_lowers_with_tables_computed_on_the_device(size):
    q, k, v = array(2, 1000, 8, size), array(2, 900, 2, size), array(2, 900, 2, 64)
    places = [array(2, n, dtype="int32") for n in (1000, 900, 1000, 900)]
    operands = Operands(*places, Alibi(array(8, dtype="float32")))
    assert both(q, k, v, operands, Spec(causal(), 0.1, soft_cap=30.0)) == (1, 2)


def test_keys_that_each_query_chooses_lower():
    q, k = array(1, 4096, 32, 128), array(1, LONG, 8, 128)
    operands = Operands(key_bits=array(1, 4096, LONG // 32, dtype="uint32"))
    assert both(q, k, k, operands, Spec(everything(), 0.1)) == (1, 2)


def test_tables_per_query_head_lower():
    visible = np.random.default_rng(0).random((1, 8, 8, 16)) < 0.3
    table = Constant(from_block_mask(visible, q_block=128, k_block=64))
    q, k = array(1, 1024, 8, 64, dtype="float32"), array(1, 1024, 2, 64, dtype="float32")
    assert both(q, k, k, Operands(), Spec(everything(), 0.1, None, table)) == (1, 2)


def test_decoding_a_long_cache_is_one_kernel_and_reads_the_cache_as_it_lies():
    spec, operands = Spec(causal(), 0.1), Operands(array(4, 1, dtype="int32"))

    def step(q, keys, values, x):
        return _triton.forward(q, keys.swapaxes(1, 2), values.swapaxes(1, 2), x, spec)

    cache = array(4, 8, LONG, 128)
    traced = jax.jit(step).trace(array(4, 1, 32, 128), cache, cache, operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "@__gpu$xla.gpu.triton" in line)
    assert call.count("4x8x131072x128xbf16") == 2  # swapped twice, which the compiler drops


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
def test_decoding_a_cache_of_codes_is_one_kernel_that_reads_codes(codes):
    spec, operands = Spec(causal(), 0.1), Operands(array(4, 1, dtype="int32"))
    cache = Scaled(array(4, 8, LONG, 128, dtype=codes), array(4, 8, LONG, 1, dtype="float32"))

    def step(q, keys, values, x):
        k, v = jax.tree.map(lambda part: part.swapaxes(1, 2), (keys, values))
        assert _triton.unsupported(q, k, v, x, spec) is None
        reason = _triton.unsupported(jnp.zeros((4, 40, 32, 128), q.dtype), k, v, x, spec)
        assert "at most 64 rows share a key head" in reason
        return _triton.forward(q, k, v, x, spec)

    traced = jax.jit(step).trace(array(4, 1, 32, 128), cache, cache, operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "@__gpu$xla.gpu.triton" in line)
    name = {"int8": "i8", "float8_e4m3fn": "f8E4M3FN"}[codes]
    assert call.count(f"4x8x131072x128x{name}") == 2


def older(t, block, size, traced):
    """Kernels of both passes of grouped softmax over older blocks."""
    count = t // block
    q, k = array(2, t, 8, size), array(2, count * block, 2, size)
    places = [array(2, n, dtype="int32") if traced else None for n in (t, count, t, count)]
    operands, spec = Operands(*places), older_spec(block, 0.1)
    return both(q, k, k, operands, spec, _triton_landmark)


@pytest.mark.parametrize("traced", [False, True])
def test_grouped_softmax_over_131072_tokens_is_one_kernel_forward_and_two_backward(traced):
    assert older(LONG, 64, 128, traced) == (1, 2)


@pytest.mark.parametrize(("block", "size"), [(2, 32), (51, 80), (33, 128)])
def test_grouped_softmax_lowers_for_blocks_of_any_size(block, size):
    assert older(1000, block, size, traced=block % 2 == 1) == (1, 2)


def test_landmark_attention_is_kernels_alone(monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: "cuda")
    q, index = array(1, 512, 2, 64), array(1, 512, dtype="int32")

    def loss(q, k, v, index):
        places = dict(q_index=index, k_index=index, q_segments=index, k_segments=index)
        out, lse = landmark_attention(q, k, v, 64, implementation="triton", **places)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    assert lowered(jax.grad(loss, (0, 1, 2)), q, q, q, index) == 6


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
def test_every_atom_lowers(mask):
    q = array(1, 128, 1, 32)
    index = Operands(array(1, 128, dtype="int32"))  # traced: no block is known
    assert lowered(lambda q, x: _triton.forward(q, q, q, x, Spec(mask, 0.1)), q, index) == 1


@pytest.mark.parametrize("folder", ["cuda_nvcc", "cu13"])
def test_the_assembler_of_either_cuda_is_found(folder, tmp_path, monkeypatch):
    from benchmarks.gpu.compile import toolkit

    assembler = tmp_path / "nvidia" / folder / "bin" / "ptxas"
    assembler.parent.mkdir(parents=True)
    assembler.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert toolkit() == tmp_path / "nvidia" / folder


def compiled(*options):
    """The finished process of `benchmarks.gpu.compile`."""
    if importlib.util.find_spec("jax_plugins") is None or not any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13)
    ):
        pytest.skip("the CUDA plugin is not installed: pip install jax-cuda12-plugin[with-cuda]")
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.compile", *options],
        capture_output=True, text=True, timeout=3600, cwd=ROOT,
    )  # fmt: skip


def test_compiled_kernels_stay_within_the_table():
    done = compiled("--check")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_a_decoding_step_makes_its_block_table_once_for_all_layers():
    done = compiled("--layers")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    counts = list(map(int, re.findall(r"layers \d: (\d+) kernels", done.stdout)))
    # Three of a layer merge its 16 parts, and four its 64; others make the block table.
    for (one, two, four), merging in ((counts[:3], 3), (counts[3:], 4)):
        assert one > 10 and two - one <= merging and four - one == 3 * (two - one)
