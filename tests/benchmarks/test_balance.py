"""`benchmarks.gpu.balance`, and the order of the programs of the Hopper kernels."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.gpu import balance
from pallas_kernels import causal
from pallas_kernels.backends.mosaic_gpu import attention
from pallas_kernels.dispatch import Operands, Spec

program = pytest.importorskip("pallas_kernels.backends.mosaic_gpu.program")


def spec_of(kernel, batch, tokens, heads, key_heads, size=64):
    q, k = (jax.ShapeDtypeStruct((batch, tokens, n, size), "bfloat16") for n in (heads, key_heads))
    call = Operands(), Spec(causal(), 1.0)
    table = attention._table(attention._tiles(kernel, q, k, *call), q, k, *call)
    return attention._kernel_spec(kernel, q, k, k, *call, table)


@pytest.mark.parametrize(("heads", "key_heads", "interleaved"), [(6, 2, 3), (16, 16, 8), (4, 4, 1)])
def test_every_tile_of_every_row_and_head_has_a_program(heads, key_heads, interleaved):
    spec = spec_of("forward", 2, 1000, heads, key_heads)
    spec = dataclasses.replace(spec, interleaved=interleaved)
    count = spec.tiling.queries.count
    index = np.indices(program.grid(spec, heads, count, 2)).astype(np.int32)
    programs = program.of_queries(spec, tuple(index))
    places = {tuple(map(int, x)) for x in zip(*(np.ravel(x) for x in programs), strict=True)}
    group = heads // key_heads
    assert places == {
        (b, n, n // group, i) for b in range(2) for n in range(heads) for i in range(count)
    }


@pytest.mark.parametrize(
    ("call", "interleaved"),
    [((1, 4096, 16, 16), 8), ((1, 4096, 12, 12), 6), ((2, 4096, 16, 16), 4), ((8, 4096, 4, 4), 1),
     ((1, 65536, 16, 16), 2), ((1, 65536, 16, 2), 8), ((1, 2**18, 4, 4), 1)],
)  # fmt: skip
def test_programs_of_heads_alternate_as_far_as_their_keys_fit_the_cache(call, interleaved):
    assert spec_of("forward", *call).interleaved == interleaved


def test_the_balance_is_1_where_all_multiprocessors_end_together():
    assert balance.balance([3] * 264) == 1.0
    assert balance.balance([1] * 132 + [33] * 4) == pytest.approx((132 + 132) / (132 * 34))


def test_causal_programs_of_few_heads_are_balanced():
    for kernel in balance.KERNELS:
        assert balance.balance(balance.steps(kernel, 1, 4096, 16, 16, 128)) > 0.97


@pytest.mark.parametrize(
    ("call", "expected"),
    [((1, 16384, 4, 1), True), ((1, 1024, 32, 8), True), ((1, 4096, 32, 8), False),
     ((8, 4096, 32, 8), False), ((1, 200, 2, 1), False), ((1, 1024, 8, 8), False),
     ((1, 49152, 32, 1), False)],
)  # fmt: skip
def test_dk_and_dv_have_a_program_per_query_head_where_programs_would_be_few(call, expected):
    assert spec_of("d_keys", *call).per_query_head == expected


def test_query_heads_of_a_key_head_have_programs_for_the_same_keys():
    spec = spec_of("d_keys", 1, 8192, 4, 2)
    assert spec.per_query_head
    index = np.indices(program.grid(spec, 4, spec.tiling.keys.count, 1)).astype(np.int32)
    programs = program.of_keys(spec, tuple(index))
    assert {(int(n), int(k)) for n, k in zip(programs.head.ravel(), programs.key_head.ravel())} == {
        (0, 0), (1, 0), (2, 1), (3, 1)
    }  # fmt: skip
