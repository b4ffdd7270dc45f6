"""Run folders as models: what opening one holds in memory."""

import weakref

import jax.numpy as jnp
from convert_support import tiny_config

import lcjax.config
from lcjax.checkpoints import ByteTokenizer, run_folder
from lcjax.checkpoints.run_folder import BASE, MODEL_CONFIG, Base, load_run
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
    Base(path=None, param_dtype=None, seed=0, trained=paths, average=False).write(tmp_path)
    assert (tmp_path / BASE).exists()
    ByteTokenizer().save(tmp_path / "tokenizer")

    def load_state(*_, **__):
        return {"params": nest({path: Leaf() for path in paths})}

    monkeypatch.setattr(run_folder, "load_state", load_state)
    params, loaded, _ = load_run(tmp_path, param_dtype="bfloat16")
    assert loaded.param_dtype == "bfloat16"
    assert {leaf.dtype.name for leaf in flatten(params).values()} == {"bfloat16"}
    assert Leaf.alive == list(range(len(paths), 0, -1))
