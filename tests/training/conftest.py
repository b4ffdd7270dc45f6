"""What the runs of a file share: programs that compile quickly, and a corpus."""

import pytest
from training_support import quick_compilation, write_corpus

from lcjax.training import estimate


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Quick compilation; the folder with the programs, for processes that a test starts.

    Runs do not say what memory they need either: that takes three more traces of the model.
    """
    folder = str(tmp_path_factory.mktemp("xla"))
    with quick_compilation(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "of_run", lambda *_: [])
        yield folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))
