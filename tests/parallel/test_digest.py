"""The digest of weights knows every value and its place, and not the devices that hold it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lcjax.cost import parameter_shapes
from lcjax.models import preset
from lcjax.parallel import digest
from lcjax.parallel.device_memory import host_shardings, is_offloaded
from lcjax.parallel.digest import weights_digest
from lcjax.parallel.sharding import Mesh, make_mesh, param_shardings
from lcjax.tree import flatten, nest

MESH = make_mesh(Mesh(data=2, fsdp=2, tensor=2))
RNG = np.random.default_rng(0)
PARAMS = nest(
    {
        path: jnp.asarray(RNG.standard_normal(leaf.shape, np.float32))
        for path, leaf in parameter_shapes(preset("tiny")).items()
    }
)
PATH = "layers/mlp/up/kernel"


def changed(change, path=PATH):
    return nest({p: change(x) if p == path else x for p, x in flatten(PARAMS).items()})


def test_a_digest_does_not_depend_on_devices_or_memory():
    layout = param_shardings(MESH, PARAMS)
    shardings = [layout, host_shardings(PARAMS, layout), jax.sharding.NamedSharding(MESH, jax.P())]
    copies = [jax.device_put(PARAMS, sharding) for sharding in shardings]
    copies += [jax.tree.map(np.asarray, PARAMS), jax.tree.map(jnp.copy, PARAMS)]
    assert {weights_digest(copy) for copy in copies} == {weights_digest(PARAMS)}
    assert len(flatten(copies[0])[PATH].sharding.device_set) == 8
    assert is_offloaded(flatten(copies[1])[PATH])


def test_a_sharded_array_is_hashed_where_it_lies():
    leaf = flatten(jax.device_put(PARAMS, param_shardings(MESH, PARAMS)))[PATH]
    text = digest._checksum.lower(leaf).compile().as_text()
    assert "all-reduce" in text
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.at[0, 1, 2].add(1e-6),
        lambda x: x.at[0, 1, 2].set(-x[0, 1, 2]),
        lambda x: x[:, ::-1],
        lambda x: x[:, :, ::-1],
        lambda x: x[::-1],
        lambda x: x.at[0, 0, :2].set(x[0, 0, 1::-1]),
        lambda x: x.reshape(x.shape[0], x.shape[2], x.shape[1]),
        lambda x: x.astype(jnp.bfloat16),
        lambda x: jax.lax.bitcast_convert_type(x, jnp.int32),
        lambda x: jnp.zeros_like(x),
    ],
    ids=[
        "value",
        "sign",
        "rows",
        "columns",
        "layers",
        "two_neighbours",
        "shape",
        "dtype",
        "type_of_equal_bits",
        "zeros",
    ],
)
def test_a_digest_changes_with_values_and_their_order(change):
    found = weights_digest(changed(change))
    assert found != weights_digest(PARAMS) and len(found) == 32 and int(found, 16)


def test_a_digest_changes_with_names_and_an_empty_tree_has_none():
    flat = flatten(PARAMS)
    renamed = nest({path.replace("up", "gate_and_up"): x for path, x in flat.items()})
    assert weights_digest(renamed) != weights_digest(PARAMS)
    backwards = nest(dict(reversed(flat.items())))
    assert weights_digest(backwards) == weights_digest(PARAMS)
    assert weights_digest({}) is None and weights_digest({"head": {}}) is None
