"""What the runs of a file share: programs that compile quickly, and a corpus."""

import pytest
from training_support import quick_compilation, write_corpus


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Quick compilation; the folder with the programs, for processes that a test starts."""
    folder = str(tmp_path_factory.mktemp("xla"))
    with quick_compilation(folder):
        yield folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))
