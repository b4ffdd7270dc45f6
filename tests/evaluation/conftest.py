"""What these tests share; their support modules are importable from the folders below, too."""

import shutil
import sys
from pathlib import Path

import pytest
from evaluation_support import config_in, only_the_run

sys.path.insert(0, str(Path(__file__).parents[1] / "retrieval"))  # retrieval_support


@pytest.fixture
def config(tmp_path):
    """A run to come. Files whose tests read a finished one have a `config` of their own."""
    return config_in(tmp_path)


@pytest.fixture
def copied(config, tmp_path):
    """The folder of a finished run, to be changed."""
    return Path(shutil.copytree(config.run.folder, tmp_path / "first"))


@pytest.fixture
def undrawn():
    """For one test where others of its file draw."""
    with only_the_run():
        yield


@pytest.fixture(scope="module")
def quick():
    """For files in which no test draws."""
    with only_the_run():
        yield
