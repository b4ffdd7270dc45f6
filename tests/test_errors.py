"""Checks of numbers in configs, and what an error says of names near to a wrong one."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from lcjax import retrieval
from lcjax.checkpoints import ByteTokenizer, Tokenizer
from lcjax.checkpoints.build import ModelSection
from lcjax.config import RunFolder
from lcjax.data import DataConfig, make_loader
from lcjax.errors import (
    InputError,
    check_arguments,
    check_integer,
    check_seed,
    install_command,
    one_line,
    suggestion,
)
from lcjax.parallel.sharding import Mesh
from lcjax.training.train_config import Profile, TrainSection


@pytest.mark.parametrize("value", [1, 2**31 - 1, np.int64(5)])
def test_whole_numbers_of_int32_pass(value):
    check_integer("steps", value, 1)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (0, "steps=0 must be a whole number of at least 1; raise it"),
        (2**31, "steps=2147483648 must be a whole number of at most 2147483647"),
        (2**150, "steps=an integer of 151 bits must be a whole number of at most"),
        (-(2**150), "steps=an integer of 151 bits must be a whole number of at least 1"),
        (True, "steps=True must be"),
        (2.0, "steps=2.0 must be"),
        ("2", "steps='2' must be"),
        (None, "steps=None must be"),
    ],
)
def test_other_values_are_errors_of_one_line(value, match):
    with pytest.raises(InputError, match=match):
        check_integer("steps", value, 1, "raise it")


def test_the_message_of_an_error_is_one_line_and_never_empty():
    assert one_line(ValueError("a\n\n  b ")) == "a b"
    assert one_line(TimeoutError("\n")) == "TimeoutError"
    assert str(InputError("a/b\n c: no such file")) == "a/b c: no such file"


def test_seeds_have_32_bits():
    check_seed("seed", 2**32 - 1)
    with pytest.raises(InputError, match="seed=4294967296 must be .* at most 4294967295"):
        check_seed("seed", 2**32)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TrainSection(steps=2**70), "train.steps=.* at most 2147483647"),
        (lambda: TrainSection(seed=2**64), "train.seed=.* at most 4294967295"),
        (
            lambda: TrainSection(steps=11, warmup_steps=0, profile=Profile(start=10, steps=3)),
            "train.profile.start=10 with steps=3 ends after train.steps=11",
        ),
        (
            lambda: TrainSection(batch_size=2**31 - 1, accumulation=2),
            "accumulation=2 must divide train.batch_size=2147483647; nearest: 1",
        ),
        (lambda: TrainSection(batch_size=12, accumulation=5), "nearest: 4"),
        (lambda: Mesh(tensor=-3), "mesh.tensor=-3 must be a whole number of at least 1; -1 takes"),
        (lambda: Mesh(data=-1), r"mesh=\[-1, -1, 1, 1, 1\] .* only one size may be -1"),
    ],
)
def test_settings_out_of_bounds_are_errors(make, match):
    with pytest.raises(InputError, match=match):
        make()


def test_hints_install_the_packages_of_an_extra_as_lcjax_is_on_no_index(monkeypatch):
    requires = ["grain>=0.2", "bm25s>=0.3,<1 ; extra == 'search'", 'jax[tpu]; extra == "tpu"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requires)
    assert install_command("search") == "pip install 'bm25s>=0.3,<1'"
    assert install_command("tpu") == "pip install 'jax[tpu]'"
    assert install_command("new") == "pip install -e '.[new]'"  # installed before it was there


def test_of_many_names_only_those_near_to_a_wrong_one_are_said():
    known = [f"task_{number}" for number in range(9)] + [f"other_{number}" for number in range(90)]
    said = suggestion("tsak_1", known)
    assert said.startswith("did you mean task_1? or task_") and said.endswith("; 99 are known")
    assert "other" not in said and "other_89" in suggestion("nothing like it", known)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: DataConfig(path=5), "data.path=5 must be of type str"),
        (lambda: DataConfig(sources="a.txt"), "data.sources='a.txt' must be of type list"),
        (lambda: DataConfig(sources=[None]), r"data.sources=\[None\] must be"),
        (lambda: DataConfig(chunks=5), "data.chunks=5 must be of type lcjax.data.chunks.Chunks"),
        (lambda: DataConfig(holdout=None), "data.holdout=None must be a number 0 <= x < 1"),
        (lambda: ModelSection(path=[]), r"model.path=\[\] must be of type str | None"),
        (lambda: ModelSection(layers=5), "model.layers=5 must be of type tuple"),
        (lambda: RunFolder(folder=None), "run.folder=None must be of type str"),
    ],
)
def test_values_of_other_types_than_a_field_declares_are_errors_of_one_line(make, match):
    with pytest.raises(InputError, match=match):
        make()


def test_paths_and_numbers_of_numpy_are_strings_and_numbers(tmp_path):
    assert DataConfig(path=tmp_path, holdout=np.float32(0)).path == tmp_path


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: make_loader(None, ByteTokenizer(), 2), "config=None must be of type DataConfig"),
        (lambda: make_loader(DataConfig(), 5, 2), "tokenizer=5 must be of type Tokenizer"),
        (lambda: make_loader(DataConfig(), ByteTokenizer(), "2"), "batch_size='2' must be of"),
        (lambda: retrieval.build(None), "config=None must be of type BuildConfig"),
        (lambda: retrieval.SparseIndex.build("text"), "texts='text' must be of type"),
        (lambda: retrieval.SparseIndex.build([1]), r"texts=\[1\] must be of type"),
    ],
)
def test_arguments_of_other_types_than_a_function_declares_are_errors_of_one_line(call, match):
    with pytest.raises(InputError, match=match):
        call()


def test_checked_arguments_may_be_arrays_paths_iterators_and_classes_of_the_same_methods():
    @check_arguments
    def function(
        rows: Sequence[int],
        path: str,
        x: np.ndarray,
        texts: Iterable[str],
        t: Tokenizer,
        *more: int,
    ):
        return 1

    fake = type("Fake", (ByteTokenizer,), {})()
    assert function(np.arange(3), Path("a"), jnp.ones(2), iter("ab"), fake, "x") == 1
