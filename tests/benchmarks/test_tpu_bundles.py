"""The compiled TPU kernels do not need more instructions than they did."""

import importlib.util
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed: pip install -e '.[aot]'", allow_module_level=True)

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "tpu_bundles.py"
SPEC = importlib.util.spec_from_file_location("tpu_bundles", FILE)
tpu_bundles = importlib.util.module_from_spec(SPEC)
sys.modules["tpu_bundles"] = tpu_bundles  # dataclasses look themselves up
SPEC.loader.exec_module(tpu_bundles)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "generation", "forward", "backward"),
    [
        ("causal", "v5e", 150_252, 315_392),
        ("window", "v6e", 49_920, 92_460),
        ("window of 512", "v5e", 33_728, 74_400),  # smaller blocks
    ],
)
def test_bundles_of_the_visited_blocks_do_not_grow(case, generation, forward, backward):
    found = tpu_bundles.counts(case, generation, "ours")
    assert 0.5 * forward < found["forward"]["total"] <= 1.01 * forward
    assert 0.5 * backward < found["backward"]["total"] <= 1.01 * backward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("one query, heads of 64", {"lcjax_decode": 525}),
        ("Landmark, blocks of 64", {"lcjax_landmark_forward": 4403, "lcjax_landmark_d_all": 5416}),
        (
            "gated delta rule",
            {"lcjax_delta_rule_forward": 6898, "lcjax_delta_rule_backward": 12347},
        ),
    ],
)
def test_bundles_of_kernels_without_a_peer_do_not_grow(case, expected):
    _, kernels = tpu_bundles.compiled(case, "v5e", "ours")
    for name, bundles in expected.items():
        largest = max(region.bundles for region in kernels[name])
        assert 0.5 * bundles < largest <= 1.01 * bundles
