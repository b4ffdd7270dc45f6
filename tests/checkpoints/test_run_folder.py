"""Run folders as models: what opening one holds in memory."""

import json
import re
import weakref

import jax.numpy as jnp
import pytest
from convert_support import tiny_config

import lcjax.config
from lcjax import checkpoints
from lcjax.checkpoints import ByteTokenizer, run_folder
from lcjax.checkpoints.load import identity
from lcjax.checkpoints.run_folder import BASE, MODEL_CONFIG, BaseModel, check_frozen, load_run
from lcjax.errors import InputError
from lcjax.models.decoder import abstract_params
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.tree import flatten, nest


class Leaf:
    """Stands for an array and counts how many uncast ones are alive whenever one is cast."""

    uncast: weakref.WeakSet
    alive: list[int]

    def __init__(self):
        Leaf.uncast.add(self)

    def astype(self, dtype):
        Leaf.alive.append(len(Leaf.uncast))
        return jnp.zeros((), dtype)


def test_weights_are_cast_one_leaf_at_a_time(tmp_path, monkeypatch):
    Leaf.uncast, Leaf.alive = weakref.WeakSet(), []
    config = tiny_config()
    paths = tuple(flatten(abstract_params(config, make_mesh(Mesh(fsdp=8)))))
    lcjax.config.dump(config, tmp_path / MODEL_CONFIG)
    BaseModel(path=None, param_dtype=None, seed=0, trained=paths, average=False).write(tmp_path)
    assert (tmp_path / BASE).exists()
    ByteTokenizer().save(tmp_path / "tokenizer")

    def load_state(*_, **__):
        return {"params": nest({path: Leaf() for path in paths})}

    monkeypatch.setattr(run_folder, "load_state", load_state)
    params, loaded, _ = load_run(tmp_path, param_dtype="bfloat16")
    assert loaded.param_dtype == "bfloat16"
    assert {leaf.dtype.name for leaf in flatten(params).values()} == {"bfloat16"}
    assert Leaf.alive == list(range(len(paths), 0, -1))


def test_a_step_of_a_run_is_a_model(tmp_path, monkeypatch):
    config, steps = tiny_config(), []
    paths = tuple(flatten(abstract_params(config, make_mesh(Mesh(fsdp=8)))))
    lcjax.config.dump(config, tmp_path / MODEL_CONFIG)
    BaseModel(path=None, param_dtype=None, seed=0, trained=paths, average=False).write(tmp_path)
    ByteTokenizer().save(tmp_path / "tokenizer")
    (tmp_path / "config.yaml").write_text("")
    for step in (5, 10):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "checkpoints" / str(step) / "weights").write_text(f"of step {step}")

    def load_state(folder, *_, step):
        steps.append((folder, step))
        return {"params": nest({path: jnp.zeros(()) for path in paths})}

    monkeypatch.setattr(run_folder, "load_state", load_state)
    five, ten = (tmp_path / "checkpoints" / name for name in ("5", "10"))
    for path in (tmp_path, five):
        assert checkpoints.load(path)[1].num_layers == config.num_layers
        assert checkpoints.load_config(path) == config
        assert checkpoints.load_tokenizer(path).vocab_size == ByteTokenizer().vocab_size
    assert steps == [(tmp_path, None), (tmp_path, 5)]
    assert identity(tmp_path) == identity(ten) != identity(five)


BASE_FIELDS = {"path": None, "param_dtype": None, "seed": 0, "trained": ["a"], "average": True}


@pytest.mark.parametrize(
    "change",
    [
        *(dict.fromkeys(BASE_FIELDS, ...), {"trained": ...}, {"trained": "a"}, {"trained": [1]}),
        *({"seed": "0"}, {"average": None}, {"frozen": 3}, {"unknown": 1}, {"memory": []}),
        {"sha256": None, "average": 1},
    ],
    ids=str,
)
def test_a_description_of_the_base_that_is_not_as_written_is_one_line(tmp_path, change):
    base = BaseModel(**BASE_FIELDS | {"trained": ("a",)})
    base.write(tmp_path)
    assert BaseModel.read(tmp_path) == base
    changed = json.loads((tmp_path / BASE).read_text()) | change
    changed = {key: value for key, value in changed.items() if value is not ...}
    (tmp_path / BASE).write_text(json.dumps(changed))
    for read in (BaseModel.read, lambda folder: check_frozen(folder, base)):
        with pytest.raises(
            InputError, match=rf"{re.escape(str(tmp_path))}/base.json is (damaged|not as)"
        ):
            read(tmp_path)


def test_a_changed_description_of_the_base_is_found_by_its_checksum(tmp_path):
    base = BaseModel(**BASE_FIELDS | {"trained": ("a",)})
    base.write(tmp_path)
    text = (tmp_path / BASE).read_text()
    (tmp_path / BASE).write_text(text.replace("true", "false"))
    with pytest.raises(InputError, match="is not as it was written: another SHA-256 sum; remove"):
        BaseModel.read(tmp_path)
    older = {key: value for key, value in json.loads(text).items() if key != "sha256"}
    (tmp_path / BASE).write_text(json.dumps(older))
    assert BaseModel.read(tmp_path) == base
