"""The emulator of PTX, on kernels written by hand.

Compiled ones are in tests/pallas_kernels/test_mosaic_gpu_emulated.py.
"""

import random
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from tools.ptx import matrix
from tools.ptx.arithmetic import LANE, THREADS, TYPES, WARP, Fault, Registers, compute
from tools.ptx.host import Launch, launch_of
from tools.ptx.machine import run
from tools.ptx.memory import BUFFER, SHARED, Memory, Tiles
from tools.ptx.program import operands, parse

# Brings 128 numbers, adds one to each, and takes them away.
ADD_ONE = """
.visible .entry add_one(
	.param .u64 add_one_param_0,
	.param .align 64 .b8 add_one_param_1[128]
)
.maxntid 128, 1, 1
{
	.reg .b32 %r<20>;
	ld.param::entry.b64 	%rd1, [add_one_param_0];
	mov.b64 	%rd2, add_one_param_1;
	mov.u32 	%r1, %tid.x;
	setp.eq.b32 	%p1, %r1, 0;
	mov.b64 	%rd3, __dynamic_shmem__0;
	cvt.u32.u64 	%r2, %rd3;
	add.s32 	%r3, %r2, 512;
	// begin inline asm
	@%p1 mbarrier.init.shared.b64 [%r3], 128;
	// end inline asm
	fence.mbarrier_init.release.cluster;
	bar.sync 	0;
	mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 4;
	mov.b32 	%r4, 0;
	@%p1 cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd2, {%r4} ], [%r3];
	{
	.reg .pred       P1;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 P1, [%r3], %r4, 989680;
	@P1 bra.uni DONE;
	bra.uni     LAB_WAIT;
	DONE:
	}
	shl.b32 	%r5, %r1, 2;
	add.s32 	%r6, %r2, %r5;
	ld.shared.b32 	%r7, [%r6];
	add.f32 	%r8, %r7, 0f3F800000;
	st.shared.b32 	[%r6], %r8;
	fence.proxy.async.shared::cta;
	@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 512;
	cp.async.bulk.commit_group;
	cp.async.bulk.wait_group 0;
	ret;
$L__func_end0:
}
"""  # noqa: E501
LATE = pytest.mark.parametrize("late", [False, True])


def add_one(numbers, late, **options):
    tiles = Tiles(0, 4, [len(numbers)], [1], 0, [128])
    launch = Launch({0: 2 * BUFFER}, [tiles], (1, 1, 1), THREADS, 1024)
    return run(ADD_ONE, launch, [numbers], [((128,), np.float32)], late=late, **options)[0]


@LATE
@pytest.mark.parametrize("count", [128, 100])
def test_kernels_compute_and_boxes_are_padded_with_zeros(late, count):
    numbers = np.random.default_rng(count).normal(size=count).astype(np.float32)
    expected = np.pad(numbers, (0, 128 - count)) + np.float32(1)
    np.testing.assert_array_equal(add_one(numbers, late), expected)


@pytest.mark.parametrize(
    ("without", "fault"),
    [
        ("fence.proxy", "reads what threads wrote, without a fence"),
        ("fence.mbarrier_init", "before it is visible"),
        ("wait", "the kernel ends with copies under way|without a fence"),
        ("cp.async.bulk.wait_group", "copies under way"),
        ("cp.async.bulk.tensor", "all wait for ever"),
        ("mbarrier.arrive", "all wait for ever"),
        ("setp", "%p1"),
    ],
)
def test_emulator_rejects_undefined_behaviour(without, fault):
    with pytest.raises((Fault, KeyError, ValueError), match=fault):
        add_one(np.ones(128, np.float32), True, without=without)


def test_tensor_maps_that_no_driver_takes_are_rejected():
    for tiles in (
        Tiles(0, 2, [64, 64], [60, 1], 128, [8, 64]),  # rows of 120 bytes
        Tiles(0, 2, [64, 64], [64, 1], 64, [8, 64]),  # 128 bytes shuffled over 64
        Tiles(0, 4, [512], [1], 0, [512]),
    ):
        with pytest.raises(Fault, match="no driver takes"):
            tiles.check()


def wrapped(value: int, kind: str) -> int:
    bits = 8 * np.dtype(TYPES[kind]).itemsize
    value &= 2**bits - 1
    return value - 2**bits if kind[0] == "s" and value >= 2 ** (bits - 1) else value


WHOLE = {
    "add.s32": lambda x, y: x + y,
    "sub.u64": lambda x, y: x - y,
    "mul.lo.s32": lambda x, y: x * y,
    "mul.lo.s16": lambda x, y: x * y,
    "mul.hi.s32": lambda x, y: x * y >> 32,
    "mul.hi.u32": lambda x, y: x * y >> 32,
    "shr.s32": lambda x, y: x >> min(y % 2**32, 31),
    "shr.u32": lambda x, y: x >> y % 2**32 if y % 2**32 < 32 else 0,
    "shr.u16": lambda x, y: x >> y % 2**32 if y % 2**32 < 16 else 0,
    "shl.b64": lambda x, y: x << y % 2**32 if y % 2**32 < 64 else 0,
    "div.s32": lambda x, y: abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1),
    "rem.s32": lambda x, y: abs(x) % abs(y) * (-1 if x < 0 else 1),
    "min.u32": min,
    "max.s64": max,
    "xor.b32": lambda x, y: x ^ y,
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_are_those_of_python(name):
    draw, (*_, kind) = random.Random(name), name.split(".")
    pairs = [(draw.randrange(-(2**40), 2**40), draw.randrange(1, 80)) for _ in range(THREADS)]
    pairs[0], pairs[1] = (-(2**31) + 1, 7), (2**31 - 1, 31)
    values = [[wrapped(x, kind) for x in one] for one in pairs]
    registers = Registers({})
    for register, column in zip(("%rd1", "%rd2"), zip(*values, strict=True), strict=True):
        registers.write(register, np.array([x % 2**64 for x in column], np.uint64))
    found = compute(tuple(name.split(".")), ("%r0", "%rd1", "%rd2"), registers.read)
    expected = [wrapped(WHOLE[name](x, y), kind) for x, y in values]
    assert [int(x) for x in found] == expected


@pytest.mark.parametrize(
    "text", ["add.cc.u32", "mul.sat.f32", "add.f64", "setp.lt.xor.s32", "cvt.rz.s32.f32"]
)
def test_what_is_not_known_is_not_guessed(text):
    registers = Registers({})
    assert compute(tuple(text.split(".")), ("%r1", "1", "2", "%p1"), registers.read) is None


def test_comparisons_are_joined_with_predicates():
    registers = Registers({"%p1": LANE < 16})
    joined = compute(("setp", "lt", "and", "u32"), ("%p2", "1", "2", "%p1"), registers.read)
    np.testing.assert_array_equal(joined, LANE < 16)
    joined = compute(("setp", "gt", "or", "u32"), ("%p2", "1", "2", "%p1"), registers.read)
    np.testing.assert_array_equal(joined, LANE < 16)


@pytest.mark.parametrize(("span", "width"), [(32, 8), (64, 32), (128, 64)])
@pytest.mark.parametrize("in_registers", [False, True])
def test_products_are_those_of_matrices(span, width, in_registers):
    """Tiles that the copy engine brings, shuffled, are what the matrix unit reads."""
    rng, inner = np.random.default_rng(span + width), span // 2
    a, b = (rng.normal(size=(n, inner)).astype(ml_dtypes.bfloat16) for n in (64, width))
    memory = Memory([x.view(np.uint8).reshape(-1) for x in (a, b)], np.zeros(2**15, np.uint8), 1)
    memory.barriers[0] = SimpleNamespace(copied=lambda size: None)
    starts = SHARED, SHARED + 64 * span
    for i, (x, start) in enumerate(zip((a, b), starts, strict=True)):
        memory.copy_in(
            Tiles(i, 2, list(x.shape), [inner, 1], span, list(x.shape)), [0, 0], start, 0
        )
    code = {128: 1, 64: 2, 32: 3}[span]
    registers, words = Registers({}), ("wgmma", f"m64n{width}k16", "f32", "bf16", "bf16")
    sums, names = [f"%r{i}" for i in range(width // 2)], [f"%r{i}" for i in range(200, 204)]
    for name in sums:
        registers.write(name, np.full(THREADS, 0.5, np.float32))
    for k in range(0, inner, 16):
        fields = [(start + 2 * k) >> 4 | 8 * span >> 4 << 32 | code << 62 for start in starts]
        for name, field in zip(("%rd1", "%rd2"), fields, strict=True):
            registers.write(name, np.full(THREADS, field, np.uint64))
        for i, name in enumerate(names):
            row, column = 16 * WARP + LANE // 4 + 8 * (i % 2), k + 2 * (LANE % 4) + 8 * (i // 2)
            pair = np.stack([a[row, column], a[row, column + 1]], 1)
            registers.write(name, pair.view(np.uint32)[:, 0])
        first, turned = (f"{{{', '.join(names)}}}", "0") if in_registers else ("%rd1", "0, 0")
        text = f"1, {{{', '.join(sums)}}}, {first}, %rd2, p, 1, 1, {turned}"
        matrix.product(words, operands(text), registers, memory)()
    found = np.zeros((64, width), np.float32)
    for i, name in enumerate(sums):
        row = 16 * WARP + LANE // 4 + 8 * ((i // 2) % 2)
        found[row, 8 * (i // 4) + 2 * (LANE % 4) + i % 2] = registers.read(name, "f32")
    expected = 0.5 + a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_program_is_instructions_and_labels():
    program = parse(ADD_ONE.replace("ret;", "$L__1:\n\t@!%p1 bra $L__1;\n\tret;"))
    assert (program.name, program.threads) == ("add_one", 128)
    jump = program.code[program.labels["$L__1"]]
    assert (jump.guard, jump.wanted, str(jump)) == ("%p1", False, "bra $L__1")
    assert any(x.words == ("wait",) for x in program.code)


def test_the_launch_is_read_from_the_host_function():
    log = """IR Dump Before ConvertToLLVMPass: x
  func.func @f(%arg0: !llvm.ptr loc(unknown), %a: !llvm.ptr loc("a"), %b: !llvm.ptr loc("b")) -> i32 {
    %1 = llvm.mlir.constant(1 : i64) : i64
    %2 = llvm.mlir.constant(64 : i64) : i64
    %3 = llvm.mlir.constant(256 : i32) : i32
    %4 = llvm.load %b : !llvm.ptr -> !llvm.ptr
    %5 = llvm.getelementptr %b[1] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %6 = llvm.load %5 : !llvm.ptr -> !llvm.ptr
    %7 = builtin.unrealized_conversion_cast %6 : !llvm.ptr to memref<64xbf16>
    %8 = memref.transpose %7 (d0) -> (d0) : memref<64xbf16> to memref<64xbf16>
    %9 = llvm.alloca %1 x !llvm.array<128 x i8> : (i64) -> !llvm.ptr
    %10 = llvm.alloca %1 x i64 : (i64) -> !llvm.ptr
    llvm.store %2, %10 : i64, !llvm.ptr
    %11 = llvm.alloca %1 x i64 : (i64) -> !llvm.ptr
    llvm.store %1, %11 : i64, !llvm.ptr
    call @mosaic_gpu_init_tma_desc(%9, %8, %1, %1, %10, %11, %2, %10) : (x) -> () loc(#loc1)
    %12 = llvm.alloca %1 x !llvm.struct<(ptr, array<128 x i8>)> : (i32) -> !llvm.ptr
    %13 = llvm.getelementptr %12[0, 0] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<(ptr)>
    llvm.store %4, %13 : !llvm.ptr, !llvm.ptr
    %14 = llvm.trunc %2 : i64 to i32
    %15 = call @mosaic_gpu_launch_kernel(%arg0, %14, %1, %1, %1, %1, %1, %3, %1, %1, %3, %1, %a, %12) : (x) -> i32
IR Dump Before ReconcileUnrealizedCastsPass"""  # noqa: E501
    tiles = Tiles(1, 2, [64], [1], 64, [64])
    assert launch_of(log) == Launch({0: BUFFER}, [tiles], (64, 1, 1), 256, 256)
