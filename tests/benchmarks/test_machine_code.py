"""`benchmarks.gpu.machine_code` on a piece of machine code as nvdisasm writes it."""

import pytest

from benchmarks.gpu import compile, machine_code
from benchmarks.gpu.machine_code import PEAK, barriers, loops, parse, predicted, units

# A step of 64 x 64 scores: waits for its tile, multiplies, tests elements if it has to. The wait
# itself stands behind the program's end and jumps back into the loop.
CODE = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR10], R18 ;
        /*0020*/              @!P1 BRA `(.L_x_4) ;
.L_x_2:
        /*0030*/                   WARPGROUP.ARRIVE ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R120, gdesc[UR52], RZ, !UPT, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/              @!P2 BRA `(.L_x_3) ;
        /*0070*/                   LDS.64 R18, [R8+0x20] ;
        /*0080*/                   ISETP.GT.AND P2, PT, R18.reuse, R7.reuse, PT ;
        /*0090*/                   FSEL R120, R120, -INF , !P2 ;
.L_x_3:
        /*00a0*/                   FFMA R18, R120, 0.12751743197441101074, -R10.reuse ;
        /*00b0*/                   MUFU.EX2 R18, R18 ;
        /*00c0*/                   LDS.128 R20, [R8] ;
        /*00d0*/                   IMAD.MOV.U32 R21, RZ, RZ, R18 ;
        /*00e0*/                   F2FP.BF16.F32.PACK_AB R24, R21, R18 ;
        /*00f0*/                   HGMMA.64x128x16.F32.BF16 R88, R24, gdesc[UR16].tnspB, R88, gsb0 ;
        /*0100*/               @P3 BRA `(.L_x_1) ;
        /*0110*/                   EXIT ;
.L_x_4:
        /*0120*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R3+URZ], R0 ;
        /*0130*/              @!P1 BRA `(.L_x_4) ;
        /*0140*/                   BRA `(.L_x_2) ;
"""


def test_a_loop_is_counted_without_its_element_test():
    (found,) = loops(parse(CODE))
    instructions, masked = found
    assert masked == 3 and len(instructions) == 13 and barriers(instructions) == 1
    assert units(instructions, brought=256) == {
        "tensor": 32 + 64,  # 64 rows by 64 and by 128 columns
        "shared": (256 + 2 * 16 * (64 + 64) + 2 * 16 * 128 + 4 * 32 * 16) / 128,
        "special": 8,
        "float": 1 + 2,
        "integer": 2,
        "issue": 13,
    }


def test_predictions_are_bound_by_the_slowest_unit():
    clocks = dict.fromkeys(machine_code.UNITS, 0) | {"tensor": 300, "special": 100, "issue": 50}
    assert predicted(clocks) == pytest.approx((PEAK, PEAK * 3 / 4))
    assert predicted(clocks | {"shared": 600}) == pytest.approx((PEAK / 2, PEAK / 3))
    assert pytest.approx(989, abs=1) == PEAK


def test_a_missing_disassembler_names_the_package(monkeypatch, capsys):
    monkeypatch.setattr(machine_code, "disassembler", lambda: None)
    monkeypatch.setattr("sys.argv", ["machine_code"])
    assert machine_code.main() == 1
    assert "pip install nvidia-cuda-nvdisasm" in capsys.readouterr().out


def test_serialised_products_and_spills_are_faults():
    good = {"spilled": 0, "serialised": 0, "registers": 168, "shared": 1024, "wgmma": 16, "mma": 0}
    assert compile.faults("forward", good, good) == []
    for what in ("spilled", "serialised"):
        (fault,) = compile.faults("forward", good | {what: 1}, good)
        assert what in fault
