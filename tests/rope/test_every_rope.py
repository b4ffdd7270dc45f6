"""What every RoPE type must do, whatever its formula: each joins through its `examples`."""

import copy
import dataclasses
import json
import re
import sys
from pathlib import Path

import draccus
import jax
import numpy as np
import pytest
from rope_examples import HEAD_DIM, library_ropes, rope_examples

import lcjax.rope
from lcjax import config
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.rope import Default, NoRotation, Rope
from lcjax.training.train_config import TrainConfig

ROOT = Path(__file__).parents[2]
ROPES = rope_examples(theta=1e4, length=16)
EVERY = pytest.mark.parametrize("name", ROPES)
BEYOND = 64  # a request that is longer than the trained length of every example


def frequencies(rope, length):
    """The frequencies as an array, and the scale."""
    inv_freq, scale = rope.frequencies(HEAD_DIM, length, rope.init(jax.random.key(0), HEAD_DIM))
    return np.asarray(inv_freq), scale


def test_every_type_has_examples():
    assert {rope.type for rope in ROPES.values()} == library_ropes().keys()


@EVERY
def test_an_example_is_a_section_of_a_config(name):
    rope = ROPES[name]
    encoded = draccus.encode(rope, Rope)
    assert encoded["type"] == rope.type == name.rpartition("-")[0]
    assert draccus.decode(Rope, encoded) == rope


@EVERY
def test_frequencies_are_float32_one_for_each_pair(name):
    for length in (1, 16, 17, 33, BEYOND):
        inv_freq, scale = frequencies(ROPES[name], length)
        assert inv_freq.dtype == np.float32 and isinstance(scale, float)
        assert inv_freq.shape == (0 if isinstance(ROPES[name], NoRotation) else HEAD_DIM // 2,)
        assert np.all(np.isfinite(inv_freq) & (inv_freq > 0)) and scale > 0


@EVERY
def test_trained_lengths_of_examples_are_exceeded_in_the_tests(name):
    assert (getattr(ROPES[name], "original_length", None) or 16) in (16, 32)
    assert ROPES[name].extended_length(16) >= 16


@EVERY
def test_only_types_that_state_it_depend_on_the_length(name):
    rope = ROPES[name]
    lengths = (1, 16, 17, 32, 33, BEYOND) if rope.depends_on_length else (1, BEYOND, 100_000)
    rotations = [frequencies(rope, length) for length in lengths]
    differ = {(*inv_freq.tolist(), scale) for inv_freq, scale in rotations}
    assert (len(differ) > 1) == rope.depends_on_length


@EVERY
def test_frequencies_do_not_depend_on_earlier_requests(name):
    rope = ROPES[name]
    first, scale = frequencies(rope, 16)
    frequencies(rope, BEYOND)
    again, same_scale = frequencies(rope, 16)
    np.testing.assert_array_equal(again, first)
    assert same_scale == scale


@EVERY
def test_equal_ropes_share_compiled_programs(name):
    # A rope is part of the static configuration: programs are found by its hash and equality.
    other = copy.deepcopy(ROPES[name])
    assert other == ROPES[name] and hash(other) == hash(ROPES[name])


@EVERY
def test_values_of_a_checkpoint_fill_only_what_is_null(name):
    unresolved = rope_examples()[name]
    resolved = unresolved.resolve(theta=5e5, length=24)
    for field in dataclasses.fields(unresolved):
        before, after = getattr(unresolved, field.name), getattr(resolved, field.name)
        assert after == before or (before is None and after in (5e5, 24))
    assert resolved.resolve(theta=1e4, length=16) == resolved


@EVERY
def test_learned_types_have_arrays_and_others_none(name):
    params = ROPES[name].init(jax.random.key(0), HEAD_DIM)
    assert bool(params) == ROPES[name].learned


def test_the_package_imports_and_exports_every_type():
    for cls in library_ropes().values():
        assert getattr(lcjax.rope, cls.__name__) is cls and cls.__name__ in lcjax.rope.__all__
    for file in (ROOT / "lcjax" / "rope").glob("[!_]*.py"):
        assert f"lcjax.rope.{file.stem}" in sys.modules


def test_only_the_package_lists_all_types():
    """Code that needs all types reads the registry, so that a new one needs no change to it."""
    names = [rf"\b{cls.__name__}\b|[\"']{name}[\"']" for name, cls in library_ropes().items()]
    for folder in ("lcjax", "benchmarks", "pallas_kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            if file != ROOT / "lcjax" / "rope" / "__init__.py":
                text = file.read_text(encoding="utf-8")
                assert not all(re.search(pattern, text) for pattern in names), file


def test_the_table_of_positions_names_every_type():
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    table = text.partition("\n## Positions\n\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| [^|]* \| `(\w+)`", table, re.MULTILINE)) == library_ropes().keys()


# The file of a user: a type that divides fast pairs more than slow ones, and no Hugging Face form.
OF_A_USER = """
from dataclasses import dataclass

import numpy as np

from lcjax.rope import Default, Rope


@Rope.register_subclass("tapered")
@dataclass(frozen=True, kw_only=True)
class Tapered(Rope):
    factor: float  # of the fastest pair
    power: float = 1.0
    original_length: int | None = None  # trained length; null: the checkpoint's

    examples = ({"factor": 3.0, "original_length": 16},)
    depends_on_length = True

    def __post_init__(self):
        super().__post_init__()
        self.require(self.factor >= 1, "factor", "be 1 or more")

    def compute(self, head_dim, length):
        plain, scale = Default(theta=self.get_resolved("theta")).frequencies(head_dim, length)
        ratio = max(1.0, self.check_length(length) / self.get_resolved("original_length"))
        strength = np.linspace(1, 0, head_dim // 2) ** self.power
        return plain / (min(ratio, self.factor) ** strength), scale
"""


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    """The file of a user, whose type and module are forgotten after the test."""
    monkeypatch.setattr(Rope, "_choice_registry", Rope.get_known_choices().copy())
    file = tmp_path / "tapered_rope.py"
    file.write_text(OF_A_USER)
    yield file
    sys.modules.pop(file.stem, None)


def test_a_type_in_the_file_of_a_user_is_trained_read_saved_and_loaded(user_file, tmp_path):
    flags = [f"--import={user_file}", "--model.preset=tiny", "--model.rope.type=tapered"]
    section = config.parse(TrainConfig, [*flags, "--model.rope.factor=3"]).model
    cls = Rope.get_choice_class("tapered")
    assert section.rope == cls(factor=3.0)
    with pytest.raises(InputError, match=r"rope\.factor=0\.5 \(tapered\) must be 1 or more"):
        config.parse(TrainConfig, [*flags, "--model.rope.factor=0.5"])

    trained = LanguageModel.load(section)
    assert trained.config.rope == cls(factor=3.0, theta=10_000.0, original_length=128)  # tiny's
    plain = trained.with_method(rope=Default())
    lm = trained.with_method(rope=cls(factor=3.0, original_length=32))
    assert lm.config.rope == cls(factor=3.0, theta=10_000.0, original_length=32)
    tokens = np.arange(3, 67)[None]
    scores = lm.nll(tokens)
    assert np.abs(scores - plain.nll(tokens)).max() > 1e-3  # longer than 32 tokens
    np.testing.assert_array_equal(lm.nll(tokens[:, :32]), plain.nll(tokens[:, :32]))

    with pytest.warns(UserWarning, match="rope tapered as plain rope"):
        lm.save(tmp_path / "model")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert written["rope_parameters"]["rope_type"] == "default"
    assert written["lcjax_rope"]["type"] == "tapered"
    loaded = LanguageModel.load(tmp_path / "model")
    assert loaded.config.rope == lm.config.rope
    np.testing.assert_array_equal(loaded.nll(tokens), scores)
    Rope.get_known_choices().pop("tapered")
    with pytest.raises(InputError, match=r"lcjax_rope.type='tapered' .* add --import FILE.py"):
        LanguageModel.load(tmp_path / "model")
