"""Hopper kernels lower for CUDA without a GPU or its plugin, whatever the mask and the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal, everything, nvidia, prefix, window
from pallas_kernels.backends.mosaic_gpu import attention as _mosaic_gpu
from pallas_kernels.dispatch import Constant, Operands, Spec
from pallas_kernels.masks import (
    band,
    chunks,
    documents,
    keys_in,
    nothing,
    queries_in,
    random_blocks,
    since_chunk,
    stride,
    tail_of,
)
from pallas_kernels.tables import from_block_mask

MASKS = {
    "window or prefix": causal() & (window(70) | prefix(5)),
    "all arithmetic": ~band(3, 9) & stride(3) & chunks(50, shift=7) | tail_of(16, 3) & nothing(),
    "short lists": documents((0, 50, 90)) & (keys_in((3, 7)) | queries_in((5,))),
    "blocks and chunks": random_blocks(64, ((0,), (0, 1), (2,), (1, 3))) | since_chunk(32, 16, 48),
}


def lowered(mask, *, dtype="bfloat16", size=64, heads=(4, 2), operands=None, **options):
    """Text of the forward and of the backward program for CUDA."""
    (n, k), t = heads, 256
    q, key = (jax.ShapeDtypeStruct((2, t, h, size), dtype) for h in (n, k))
    lse = jax.ShapeDtypeStruct((2, t, n), "float32")
    operands, spec = operands or Operands(), Spec(mask, size**-0.5, **options)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        reason = _mosaic_gpu.unsupported(q, key, key, operands, spec)
        assert reason is None, reason
        calls = (
            (lambda *x: _mosaic_gpu.forward(*x, spec), (q, key, key)),
            (lambda *x: _mosaic_gpu.backward(*x, spec), (q, key, key, q, lse, q, lse)),
        )
        traced = [jax.jit(f).trace(*x, operands) for f, x in calls]
        return [x.lower(lowering_platforms=("cuda",)).as_text() for x in traced]


KERNELS = [(1, 0), (2, 0)]  # forward, and queries' gradients beside those of keys; no loop outside


def kernels(texts):
    """Calls of Mosaic kernels in each program, and loops around them."""
    return [(text.count("mosaic_gpu_v2"), text.count("stablehlo.while")) for text in texts]


def test_a_causal_mask_lowers_to_one_kernel_forward_and_two_backward():
    assert kernels(lowered(causal())) == KERNELS


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_of_scalars_lowers(name):
    assert kernels(lowered(MASKS[name], dtype="float16")) == KERNELS


@pytest.mark.slow
def test_places_documents_soft_cap_and_heads_of_128_lower():
    i32 = [jax.ShapeDtypeStruct((2, 256), "int32")] * 4
    assert kernels(lowered(causal(), size=128, operands=Operands(*i32), soft_cap=30.0)) == KERNELS


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 32, 72, 80, 96, 128])
def test_heads_of_any_size_up_to_128_lower_in_multiples_of_16(size):
    texts = lowered(causal() & window(9), size=size, soft_cap=30.0)
    assert kernels(texts) == KERNELS
    assert f"x{-(-size // 16) * 16}xbf16" in texts[0]


@pytest.mark.slow
@pytest.mark.parametrize("lists", [1, 2, 4])
def test_tables_per_head_lower(lists):
    visible = np.ones((1, lists, 4, 4), bool)
    table = from_block_mask(visible, full=visible, q_block=64, k_block=64)
    assert kernels(lowered(everything(), table=Constant(table))) == KERNELS
    traced = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), table)
    assert kernels(lowered(everything(), operands=Operands(table=traced))) == KERNELS


@pytest.mark.slow
def test_a_causal_mask_of_a_million_tokens_has_small_tables():
    q = jax.ShapeDtypeStruct((1, 2**20, 1, 64), jnp.bfloat16)
    for kernel, q_block in (("forward", 768), ("d_queries", 512)):
        tiles = nvidia.mosaic_gpu(kernel, 64, capped=False)
        table = _mosaic_gpu._table(tiles, q, q, Operands(), Spec(causal(), 1.0))
        assert (table.q_block, table.k_block) == (q_block, 512) and table.index.nbytes <= 2**24


@pytest.mark.parametrize(
    ("length", "size", "vectors", "groups"),
    [(4096, 64, 1, 3), (4096, 64, 2, 2), (4096, 128, 0, 2), (1024, 64, 0, 2), (140, 64, 0, 3),
     (70, 64, 0, 2), (64, 64, 0, 1)],
)  # fmt: skip
def test_three_warpgroups_where_registers_hold_a_step_and_rows_need_little_padding(
    length, size, vectors, groups
):
    q = jax.ShapeDtypeStruct((1, length, 1, size), jnp.bfloat16)
    tiles = nvidia.mosaic_gpu("forward", size, capped=False, vectors=vectors)
    tiling = _mosaic_gpu.make_tiling("forward", tiles, q, q, *_mosaic_gpu.blocks(tiles, q, q))
    assert tiling.groups == groups
    assert tiling.queries.padded <= max(17 / 16 * 128 * -(-length // 128), 128)


def test_blocks_of_a_given_table_are_cut_into_the_largest_tiles_that_divide_them():
    tiles = {b: _mosaic_gpu.tile_axis(4096, b, 192).tile for b in (64, 128, 192, 256, 384, 320)}
    assert tiles == {64: 64, 128: 128, 192: 192, 256: 128, 384: 192, 320: 64}
