"""From stored tensors to the parameter tree, shard by shard.

A source is a file (or several) of named tensors that can hand out rows of its leading axis. Each
device's shard of each leaf is read on its own: only the bytes that this process holds are read, and
the host never has more than one shard of one leaf beside the model itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import ml_dtypes
import numpy as np

from lcjax.checkpoints import hf_names
from lcjax.errors import InputError
from lcjax.models.config import ModelConfig
from lcjax.models.stacking import unstack_layers
from lcjax.parallel.offload import host_shardings
from lcjax.tree import lookup, nest, union

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_ROWS = 4_096  # rows of two tensors that are compared at a time


class TensorInfo(NamedTuple):
    """What a file's index says about one tensor."""

    shape: tuple[int, ...]
    dtype: str  # "float32", "float16" or "bfloat16": what `rows` returns; else not readable


class Source(Protocol):
    """Named tensors in a file or folder."""

    path: str
    tensors: dict[str, TensorInfo]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start:stop` of the leading axis."""
        ...


class _Renamed:
    """A source with the tensors `stored`: {name: name in `source`}."""

    def __init__(self, source: Source, stored: dict[str, str]):
        self.path, self._source, self._stored = source.path, source, stored
        self.tensors = {name: source.tensors[other] for name, other in stored.items()}

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._source.rows(self._stored[name], start, stop)


def resolve_aliases(source: Source, config: ModelConfig) -> Source:
    """Returns `source` with one name for each tensor: the one in the table of names.

    Raises:
      InputError: if the source stores a tensor under several names with different values.
    """
    stored = {name: name for name in source.tensors}
    for entry in hf_names.entries(config):
        for name, others in zip(entry.names, entry.aliases, strict=True):
            present = [n for n in (name, *others) if n in source.tensors]
            for copy in present[1:]:
                _check_equal(source, present[0], copy)
            for n in present:
                del stored[n]
            if present:
                stored[name] = present[0]
    unchanged = stored.keys() == source.tensors.keys()
    return source if unchanged else _Renamed(source, stored)


def _check_equal(source: Source, name: str, alias: str) -> None:
    """Compares two tensors bit by bit, some rows at a time."""
    info = source.tensors[name]
    same = info == source.tensors[alias]
    if same and info.dtype in DTYPES and info.shape:  # `check` refuses all others
        count = info.shape[0]
        same = all(
            source.rows(name, start, min(start + _ROWS, count)).tobytes()
            == source.rows(alias, start, min(start + _ROWS, count)).tobytes()
            for start in range(0, count, _ROWS)
        )
    if not same:
        raise InputError(
            f"{source.path}: {name} and {alias} are two names of one tensor, but differ in value,"
            " shape or type; remove the wrong one from the checkpoint (the released model computes"
            f" with {name})"
        )


def check(source: Source, config: ModelConfig) -> None:
    """Lists every missing, unexpected and mis-shaped tensor in one error."""
    expected = {name: e.tensor_shape for e in hf_names.entries(config) for name in e.names}
    present = {name: source.tensors[name] for name in expected if name in source.tensors}
    faults = {
        "missing": [name for name in expected if name not in present],
        "wrong shape": [
            f"{name} is {list(info.shape)}, not {list(expected[name])}"
            for name, info in present.items()
            if info.shape != expected[name]
        ],
        "not float32, float16 or bfloat16": [
            f"{name} is {info.dtype}" for name, info in present.items() if info.dtype not in DTYPES
        ],
        "unexpected": [
            name for name in source.tensors if name not in expected and not _ignorable(name, config)
        ],
    }
    if text := describe_faults(faults):
        raise InputError(
            f"{source.path}: tensors do not fit the model its config describes; {text}; check that"
            " config and weights belong together"
        )


def describe_faults(faults: dict[str, list[str]], limit: int = 10) -> str:
    """Lists the first items of every kind of fault for an error; empty if there are none."""
    return "; ".join(
        f"{kind}: {', '.join(items[:limit])}"
        + (f" and {len(items) - limit} more" if len(items) > limit else "")
        for kind, items in faults.items()
        if items
    )


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Tables that the config determines, and the second copy of tied embeddings."""
    tables = ("rotary_emb.inv_freq", "rope_freqs.weight", "attn.bias", "attn.masked_bias")
    return name.endswith(tables) or (name == "lm_head.weight" and config.tie_embeddings)


def read_params(
    source: Source,
    config: ModelConfig,
    *,
    mesh: jax.sharding.Mesh | None = None,
    host: bool = False,
    progress: Callable[[int], Any] | None = None,
) -> dict:
    """The parameter tree in `config.param_dtype`, on `mesh` as the sharding table says.

    With `host` they go to the memory of the mesh's hosts (`lcjax.parallel.offload.host_shardings`).
    Without a mesh everything goes to the default device. `progress` is told the bytes of each leaf.
    """
    source = resolve_aliases(source, config)
    check(source, config)
    table = hf_names.entries(config)
    shapes = nest({e.path: jax.ShapeDtypeStruct(e.shape, _dtype(e, config)) for e in table})
    shardings = _shardings(mesh, shapes)
    if host:
        shardings = host_shardings(shapes, shardings)
    leaves = {}
    for entry in table:
        leaves[entry.path] = jax.make_array_from_callback(
            entry.shape,
            lookup(shardings, entry.path),
            lambda index, entry=entry: _read_block(source, entry, index, _dtype(entry, config)),
        )
        if progress:
            progress(leaves[entry.path].nbytes)
    return nest(leaves)


def spread_layers(params: dict, config: ModelConfig) -> dict:
    """Of a model whose layers are not all alike: one branch per layer, with what it has alone."""
    alone = {name: branch for name, branch in params.items() if name.startswith("layers_")}
    rest = {name: branch for name, branch in params.items() if name not in alone}
    return union(unstack_layers(rest, config), alone)


def stored_dtype(source: Source, config: ModelConfig) -> str:
    """The dtype that all matrices of the model are stored in; float32 when they differ."""
    names = [n for e in hf_names.entries(config) if not e.path.startswith("rope/") for n in e.names]
    infos = [source.tensors[name] for name in names if name in source.tensors]
    kinds = {info.dtype for info in infos if len(info.shape) > 1}
    return kinds.pop() if len(kinds) == 1 and kinds <= set(DTYPES) else "float32"


def _dtype(entry: hf_names.Entry, config: ModelConfig) -> np.dtype:
    """Learned frequencies stay in float32: half precision turns far positions by whole circles."""
    name = "float32" if entry.path.startswith("rope/") else config.param_dtype
    return DTYPES[name]


def _shardings(mesh: jax.sharding.Mesh | None, shapes: dict) -> dict:
    if mesh is None:
        one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.tree.map(lambda _: one, shapes)
    from lcjax.parallel.sharding import param_shardings

    return param_shardings(mesh, shapes)


def _read_block(
    source: Source, entry: hf_names.Entry, index: tuple[slice, ...], dtype: np.dtype
) -> np.ndarray:
    """`leaf[index]`: reads the rows it needs of each layer's tensor."""
    layers = range(len(entry.names))
    if entry.stacked:
        layers, index = layers[index[0]], index[1:]
    bounds = [range(size)[part] for size, part in zip(_layer_shape(entry), index, strict=True)]
    view_bounds = [bounds[i] for i in np.argsort(entry.order)]
    out = np.empty((len(layers), *(len(b) for b in bounds)), dtype)
    for slot, layer in enumerate(layers):
        out[slot] = _read_layer(source, entry, entry.names[layer], view_bounds)
    return out if entry.stacked else out[0]


def _layer_shape(entry: hf_names.Entry) -> tuple[int, ...]:
    return entry.shape[1:] if entry.stacked else entry.shape


def _read_layer(
    source: Source, entry: hf_names.Entry, name: str, bounds: list[range]
) -> np.ndarray:
    first = bounds[0]
    step = entry.tensor_shape[0] // entry.view[0]  # rows of the tensor per unit of the view
    rows = source.rows(name, first.start * step, first.stop * step)
    block = rows.reshape(len(first), *entry.view[1:])
    rest = tuple(slice(b.start, b.stop) for b in bounds[1:])
    return block[(slice(None), *rest)].transpose(entry.order)
