"""From stored tensors to the parameter tree, shard by shard.

A source is a file (or several) of named tensors that can hand out rows of its leading axis. Each
device's shard of each leaf is read on its own: only the bytes that this process holds are read, and
the host never has more than one shard of one leaf beside the model itself.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import jax
import ml_dtypes
import numpy as np

from lcjax.convert import hf_names
from lcjax.errors import InputError
from lcjax.models.config import ModelConfig
from lcjax.models.stacking import unstack_layers
from lcjax.offload import host_shardings
from lcjax.tree import lookup, nest, union

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


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


def check(source: Source, config: ModelConfig) -> None:
    """Lists every missing, unexpected and mis-shaped tensor in one error."""
    wanted = {name: e.tensor_shape for e in hf_names.entries(config) for name in e.names}
    missing = [name for name in wanted if name not in source.tensors]
    extra = [n for n in source.tensors if n not in wanted and not _ignorable(n, config)]
    shaped = [
        f"{name} is {list(source.tensors[name].shape)}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in source.tensors and source.tensors[name].shape != shape
    ]
    odd = [
        f"{name} is {source.tensors[name].dtype}"
        for name in wanted
        if name in source.tensors and source.tensors[name].dtype not in DTYPES
    ]
    faults = [
        f"{kind}: {listed(items)}"
        for kind, items in (
            ("missing", missing),
            ("wrong shape", shaped),
            ("not float32, float16 or bfloat16", odd),
            ("unexpected", extra),
        )
        if items
    ]
    if faults:
        raise InputError(
            f"{source.path}: tensors do not fit the model its config describes; "
            f"{'; '.join(faults)}; check that config and weights belong together"
        )


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Tables that the config determines, and the second copy of tied embeddings."""
    tables = ("rotary_emb.inv_freq", "rope_freqs.weight", "attn.bias", "attn.masked_bias")
    return name.endswith(tables) or (name == "lm_head.weight" and config.tie_embeddings)


def listed(items: Iterable[str], limit: int = 10) -> str:
    """The first items of a list for an error message, and how many more there are."""
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def read_params(
    source: Source,
    config: ModelConfig,
    *,
    mesh: jax.sharding.Mesh | None = None,
    host: bool = False,
    progress: Callable[[int], Any] | None = None,
) -> dict:
    """The parameter tree in `config.param_dtype`, on `mesh` as the sharding table says.

    With `host` they go to the memory of the mesh's hosts, as `lcjax.offload.host_shardings` says.
    Without a mesh everything goes to the default device. `progress` is told the bytes of each leaf.
    """
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
    from lcjax.sharding import param_shardings

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
