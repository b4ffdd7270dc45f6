"""Peak memory of the host: it rises with use, and it can be started again."""

from pathlib import Path

import numpy as np
import pytest

from lcjax.evaluation import measure


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux only")
def test_measure_gives_a_peak_that_rises_with_use_and_starts_again():
    measure.reset_peak()
    before = measure.peak_bytes()
    block = np.ones(10_000_000)
    high = measure.peak_bytes()
    assert high - before > 0.7 * block.nbytes
    size = block.nbytes
    del block
    measure.reset_peak()
    assert high - measure.peak_bytes() > 0.7 * size
