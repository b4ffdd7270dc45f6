"""Fixtures that the runs of a file share: quick compilation and a corpus."""

import pytest
from training_support import quick_compilation, write_corpus

from lcjax.training import estimate


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Compiles quickly; returns the compilation cache, for processes that a test starts.

    Runs skip the estimate of their memory too, which traces the model three more times.
    """
    folder = str(tmp_path_factory.mktemp("xla"))
    with quick_compilation(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "of_run", lambda *_: [])
        yield folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))
