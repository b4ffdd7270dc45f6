"""What is read from optimised HLO: copies of an argument, float32 products, cycles, kernels."""

import jax
import jax.numpy as jnp
import pytest

from lcjax.cost import hlo

CACHE = "bf16[2,64,8]{2,1,0:T(8,128)(2,1)}"  # 2 x 64 x 128 lanes x 2 bytes with padding
PADDED = 2 * 64 * 128 * 2
OTHER = "bf16[2,64,8]{1,2,0:T(8,128)(2,1)}"  # 2 x 8 x 128 x 2 bytes


def entry(*lines, before=""):
    """A module whose entry has the parameter %cache, the path of which is `cache.layers[0]`."""
    lines = (f'%cache = {CACHE} parameter(0), metadata={{op_name="cache.layers[0]"}}', *lines)
    body = "\n".join(f"  {line}" for line in lines)
    return hlo.Module(
        f"HloModule m\n{before}\nENTRY %main (c: bf16[2]) -> bf16[2] {{\n{body}\n}}\n"
    )


def copies(*lines, before=""):
    return hlo.copies(entry(*lines, before=before), "cache.layers")


def test_a_copy_in_another_layout_is_counted_with_the_padding_of_its_tiles():
    result = copies(
        f'%a = {OTHER} copy(%cache), metadata={{op_name="jit(f)/Decoder/layers_3/attend/x"}}',
        f"ROOT %b = {CACHE} copy(%a)",
    )
    assert (result.count, result.bytes) == (2, PADDED + 2 * 8 * 128 * 2)
    assert result.names == ("b", "layers/attend/x")


@pytest.mark.parametrize(
    "line",
    [
        f"ROOT %a = {CACHE} dynamic-update-slice(%cache, %new, %zero, %at, %zero)",
        f"ROOT %a = {CACHE} bitcast(%cache)",
        "ROOT %a = f32[2,4,64]{2,1,0} dot(%cache, %q), lhs_contracting_dims={2}",
        'ROOT %a = f32[4,8]{1,0} custom-call(%cache, %q), custom_call_target="tpu_custom_call"',
        f"ROOT %a = {CACHE} copy(%other)",
    ],
)  # fmt: skip
def test_updates_in_place_and_reads_are_no_copies(line):
    assert copies(line) == hlo.Copies()


def test_a_copy_of_the_same_layout_between_memories_is_staged():
    fast = CACHE.replace("(2,1)}", "(2,1)S(1)}")
    result = copies(
        f"%s = ({fast}, {CACHE}, u32[]{{:S(2)}}) copy-start(%cache)",
        f"%d = {fast} copy-done(%s)",
        f"ROOT %u = {fast} dynamic-update-slice(%d, %new, %zero, %at, %zero)",
    )
    assert result == hlo.Copies(staged=PADDED)


def fusion(inside):
    return f"\n%part (p: bf16[2]) -> bf16[2] {{\n  %p = {CACHE} parameter(0)\n{inside}\n}}\n"


def test_a_fusion_that_rewrites_the_argument_is_one_copy():
    call = f"ROOT %f = {CACHE} fusion(%cache), kind=kLoop, calls=%part"
    changed = f"  %z = {CACHE} convert(%p)\n  ROOT %r = {CACHE} multiply(%z, %z)"
    assert copies(call, before=fusion(changed)).count == 1
    updated = f"  ROOT %r = {CACHE} dynamic-update-slice(%p, %n, %i, %i, %i)"
    assert copies(call, before=fusion(updated)).count == 0
    product = f"  %t = {OTHER} copy(%p)\n  ROOT %r = f32[2,64,64]{{2,1,0}} convolution(%t, %p)"
    assert copies(call, before=fusion(product)).count == 0


def test_a_copy_in_a_loop_counts_as_often_as_the_loop_runs():
    before = f"""
%body (t: (s32[], bf16[2])) -> (s32[], bf16[2]) {{
  %t = (s32[], {CACHE}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %c = {CACHE} get-tuple-element(%t), index=1
  %o = {OTHER} copy(%c)
  ROOT %r = (s32[], {CACHE}) tuple(%i, %c)
}}
"""
    loop = (
        f"%t = (s32[], {CACHE}) tuple(%zero, %cache)",
        f"%w = (s32[], {CACHE}) while(%t), condition=%cond, body=%body, "
        'backend_config={"known_trip_count":{"n":"5"}}',
        f"%k = {CACHE} get-tuple-element(%w), index=1",
        f"ROOT %e = {OTHER} copy(%k)",
    )
    assert copies(*loop, before=before).count == 6


def test_the_argument_of_a_compiled_program_is_followed():
    def update(cache, x):
        return jax.lax.dynamic_update_slice(cache, x, (0, 4, 0))

    def transpose(cache, x):
        cache = update(cache, x)
        return cache, cache.transpose(0, 2, 1) + 1

    shapes = jax.ShapeDtypeStruct((4, 64, 32), jnp.float32), jnp.ones((4, 1, 32))
    for function, is_copied in ((update, False), (transpose, True)):
        text = jax.jit(function, donate_argnums=0).lower(*shapes).compile().as_text()
        module = hlo.Module(text)
        assert hlo.has_argument(module, "cache") and not hlo.has_argument(module, "caches")
        assert (hlo.copies(module, "cache").count > 0) == is_copied


def test_products_of_float32_are_counted_by_scope_and_others_are_not():
    before = """
%part (a: bf16[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  %m = f32[8,8]{1,0} convolution(%b, %b), metadata={op_name="jit(f)/layers_7/rope/dot_general"}
  ROOT %n = f32[8,8]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}
"""
    module = entry(
        "ROOT %f = f32[8,8]{1,0} fusion(%x, %y), kind=kOutput, calls=%part", before=before
    )
    assert hlo.float32_products(module) == {"layers/rope/dot_general": 1}


def test_a_kernel_that_is_fused_with_the_write_of_its_result_is_counted():
    before = """
%part (p: bf16[2]) -> bf16[4,2] {
  %lcjax_forward.1 = bf16[2]{0} custom-call(%p), custom_call_target="tpu_custom_call"
  ROOT %w = bf16[4,2]{1,0} dynamic-update-slice(%all, %lcjax_forward.1, %i)
}
"""
    module = entry("ROOT %f = bf16[4,2]{1,0} fusion(%cache), calls=%part", before=before)
    assert hlo.kernels(module) == {"lcjax_forward": 1}


def test_cycles_and_kernels_are_summed_over_the_program():
    module = entry(
        '%f.1 = f32[8] fusion(%x), backend_config={"estimated_cycles":"100"}',
        '%f.2 = f32[8] fusion(%x), backend_config={"estimated_cycles":"20"}',
        '%lcjax_decode.3 = f32[8] custom-call(%x), custom_call_target="tpu_custom_call"',
        'ROOT %c = f32[8] custom-call(%x), custom_call_target="ConcatBitcast"',
    )
    assert hlo.estimated_cycles(module) == 120
    assert hlo.kernels(module) == {"lcjax_decode": 1}
    assert hlo.launches(module) == 4


def test_products_in_loops_count_in_every_iteration():
    def function(x, w):
        def body(x, w):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(body, x, w)[0] @ w[0].T

    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((48, 80), (7, 80, 80)))
    module = hlo.Module(jax.jit(function).lower(x, w).compile().as_text())
    assert hlo.product_flops(module) == 8 * 2 * 48 * 80 * 80


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        # Batches are a dimension of which each output reads one input.
        (
            "%y = f32[8,16,32] convolution(%a, %b), window={size=8 stride=7 pad=0_0 lhs_dilate=8},"
            " dim_labels=0bf_0io->0bf",
            2 * 8 * 16 * 32 * 64,
        ),
        # A true convolution: at the edges 2 of 3 taps are of the input.
        (
            "%y = f32[8,16,32] convolution(%a, %c), window={size=3 pad=1_1},"
            " dim_labels=0bf_0io->0bf",
            2 * 16 * 32 * 64 * (6 * 3 + 2 * 2),
        ),
        (
            "%y = f32[16,8,16] dot(%a, %a), lhs_batch_dims={}, lhs_contracting_dims={0,2}",
            2 * 16 * 8 * 16 * 8 * 64,
        ),
        (
            '%y = (f32[16,8,16], s8[64]) custom-call(%a, %a), custom_call_target="__cublas$gemm",'
            ' backend_config={"lhs_contracting_dimensions":["2"]}',
            2 * 16 * 8 * 16 * 64,
        ),
        ('%y = f32[16] custom-call(%a), custom_call_target="tpu_custom_call"', 0),
    ],
    ids=["batches", "taps", "dot", "cublas", "kernel"],
)
def test_products_have_two_flops_for_each_pair_of_numbers(line, flops):
    arguments = ("a = f32[8,16,64]", "b = f32[8,64,32]", "c = f32[3,64,32]")
    lines = [f"%{x} parameter({i})" for i, x in enumerate(arguments)]
    assert hlo.product_flops(entry(*lines, line)) == flops
