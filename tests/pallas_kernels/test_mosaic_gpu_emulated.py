"""Hopper kernels as compiled, executed by an emulator of PTX: `tools.ptx.emulate`."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from mosaic_gpu_cases import CASES

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow  # two minutes together


def emulate(*options):
    """Of the command, in a process of its own: exit code and output."""
    if importlib.util.find_spec("jax_plugins") is None or not any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13)
    ):
        pytest.skip("the CUDA plugin is not installed: pip install jax-cuda12-plugin[with-cuda]")
    command = [sys.executable, "-m", "tools.ptx.emulate", *options]
    found = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=ROOT)
    return found.returncode, found.stdout + found.stderr[-2000:]


def test_compiled_kernels_compute_the_formulas_in_every_order_of_work():
    code, said = emulate()
    assert code == 0, said[-5000:]
    assert said.count("\nok ") == len(CASES)


@pytest.mark.parametrize(
    ("without", "fault"),
    [
        ("fence.proxy.async", "without a fence"),
        ("wgmma.wait_group", "with products or copies under way"),
        ("mbarrier.arrive.release", "all wait for ever"),
    ],
)
def test_a_kernel_without_its_synchronization_fails(without, fault):
    """What the test above would say if a kernel forgot it."""
    code, said = emulate("--only", "queries before every key", "--without", without)
    assert code == 1 and fault in said, said[-3000:]
