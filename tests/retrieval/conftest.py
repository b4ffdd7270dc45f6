"""Makes the support modules of tests/training importable, and programs compile quickly."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from training_support import quick_compilation


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Compiles quickly; returns the compilation cache, for processes that a test starts."""
    folder = str(tmp_path_factory.mktemp("xla"))
    with quick_compilation(folder):
        yield folder
