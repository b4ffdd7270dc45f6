"""Fixtures that the runs of a file share: quick compilation and a corpus."""

import dataclasses

import pytest
from training_support import quick_compilation, write_corpus

from lcjax.training import estimate, loop


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


@pytest.fixture(scope="module")
def traced_once():
    """Runs that differ in what they save and when they stop have one step."""
    steps, begin = {}, loop.jitted_step

    def step(config, objective, mesh, state, *, halt_after):
        settings = dataclasses.replace(config.train, save_every=1, export=True, on_nan="stop")
        key = settings, config.model, mesh, halt_after
        if key not in steps:
            steps[key] = begin(config, objective, mesh, state, halt_after=halt_after)
        return steps[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "jitted_step", step)
        yield
