"""Reads stored tensors into the parameter tree, shard by shard.

A source is a file (or several) of named tensors, of which rows of the leading axis can be read.
Each device's shard of each leaf is read separately: only the bytes that this process holds are
read, and besides the model itself, the host never holds more than one shard of one leaf.
"""

import functools
import itertools
import json
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from lcjax.checkpoints import hf_names
from lcjax.checkpoints.families import FAMILIES
from lcjax.checkpoints.nearest_family import family_of
from lcjax.errors import InputError
from lcjax.models.model_config import ModelConfig
from lcjax.models.weight_storage import WeightStorage, is_stored, kernel_shapes, quantise_kernel
from lcjax.parallel.device_memory import check_fits, host_shardings
from lcjax.parallel.sharding import param_shardings
from lcjax.tree import lookup, nest

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NUMBERED = re.compile(r"-\d+-of-(\d+)$")
_ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.[qk]_(proj|norm)\.(weight|bias)")
_ROWS = 4_096  # rows of two tensors that are compared at a time
# The bits of infinity without its sign, shifted left by one; those of NaN are larger.
_INFINITY = {"float32": 0xFF00_0000, "float16": 0xF800, "bfloat16": 0xFF00}
_PART = 2**18  # numbers that are tested at a time, few enough for the CPU's cache


class TensorInfo(NamedTuple):
    """Shape and dtype of a stored tensor, from the index of its file."""

    shape: tuple[int, ...]
    dtype: str  # only "float32", "float16" and "bfloat16" can be read with `rows`


class WeightSource(Protocol):
    """Named tensors in a file or folder."""

    path: str
    tensors: dict[str, TensorInfo]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns rows `start:stop` of the leading axis."""
        ...


def shard_files(folder: Path, single: str, index: str, loose: list[Path]) -> list[Path]:
    """Returns the weight files of a folder, looked up in the same order as transformers does.

    Args:
      folder: the folder of the checkpoint.
      single: name of the file of an unsharded checkpoint.
      index: name of the JSON file that lists the shards.
      loose: files to read if neither exists. Names such as `model-00001-of-00003` give the number
        of files, which is checked.

    Raises:
      InputError: the index is damaged or a shard is missing.
    """
    if (folder / single).is_file():
        return [folder / single]
    if not (folder / index).is_file():
        totals = [int(m[1]) for file in loose if (m := _NUMBERED.search(file.stem))]
        if totals and len(loose) < max(totals):
            raise InputError(
                f"{folder}: {max(totals) - len(loose)} of {max(totals)} shards are missing beside "
                f"{loose[0].name}, and so is {index}; download them"
            )
        return loose
    try:
        values = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()
        outside = sorted({name for name in values if Path(name).name != name})
        names = sorted(set(values))
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise InputError(
            f"{folder / index}: not an index of shards ({error}); download it again"
        ) from error
    if outside:
        raise InputError(f"{folder / index}: names files outside its folder: {', '.join(outside)}")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise InputError(
            f"{folder}: {len(missing)} of {len(names)} shards are missing: "
            f"{', '.join(missing[:10])}; download them"
        )
    return [folder / name for name in names]


class Rows(NamedTuple):
    """Rows of a stored tensor that form a tensor of the model, or a part of one."""

    name: str  # of the stored tensor
    start: int = 0
    count: int | None = None  # None: all
    expert: int | None = None  # index into the first axis of a tensor [E, rows, ...]
    part: str | None = None  # half of an axis (`hf_names.part_index`); None: all

    def info(self, source: WeightSource) -> TensorInfo:
        """Returns shape and dtype of these rows."""
        info = source.tensors[self.name]
        shape = info.shape if self.expert is None else info.shape[1:]
        if self.part is not None:
            axis = hf_names.part_axis(self.part, len(shape))
            shape = *shape[:axis], shape[axis] // 2, *shape[axis + 1 :]
        return info._replace(shape=shape if self.count is None else (self.count, *shape[1:]))

    def read(self, source: WeightSource, start: int, stop: int) -> np.ndarray:
        """Reads rows `start:stop` of these rows."""
        start, stop = self.start + start, self.start + stop
        if self.part is not None:
            index = hf_names.part_index(self.part, source.tensors[self.name].shape)
            return source.rows(self.name, start, stop)[index]
        if self.expert is None:
            return source.rows(self.name, start, stop)
        return source.rows(self.name, self.expert, self.expert + 1)[0, start:stop]


class RenamedSource:
    """A source whose tensors are rows of another source's tensors, concatenated if several."""

    def __init__(self, source: WeightSource, stored: dict[str, list[Rows]]):
        self.path, self._source, self._stored = source.path, source, stored
        self.tensors = {name: self._info(pieces) for name, pieces in stored.items()}

    def _info(self, pieces: list[Rows]) -> TensorInfo:
        first, *rest = (piece.info(self._source) for piece in pieces)
        if not rest:
            return first
        rows = first.shape[0] + sum(info.shape[0] for info in rest)
        return first._replace(shape=(rows, *first.shape[1:]))

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        pieces = self._stored[name]
        if len(pieces) == 1:
            return pieces[0].read(self._source, start, stop)
        parts, offset = [], 0
        for piece in pieces:
            size = piece.info(self._source).shape[0]
            first, last = max(start - offset, 0), min(stop - offset, size)
            if first < last:
                parts.append(piece.read(self._source, first, last))
            offset += size
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class HalvesSource:
    """A source of a family with `interleaved` rotations, in the library's order of channels.

    Queries, keys and their norms have other rows than those of the source, whole heads at a time;
    norms that are stored with an axis for heads have other columns.
    """

    def __init__(self, source: WeightSource, order: np.ndarray):
        self.path, self.tensors = source.path, source.tensors
        self._source, self._order = source, order

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        if not _ROTATED.fullmatch(name):
            return self._source.rows(name, start, stop)
        size = len(self._order)
        if "norm" in name and len(self.tensors[name].shape) == 2:
            return self._source.rows(name, start, stop)[:, self._order]
        first, last = start // size * size, -(-stop // size) * size
        block = self._source.rows(name, first, last)
        block = block.reshape(-1, size, *block.shape[1:])[:, self._order]
        return block.reshape(last - first, *block.shape[2:])[start - first : stop - first]


def in_halves(source: WeightSource, config: ModelConfig) -> WeightSource:
    """Returns the tensors of a checkpoint with the rotary pairs of the library.

    Args:
      source: the tensors, with adapters merged in.
      config: the config that the checkpoint states; patterns and ropes may be others.
    """
    order = hf_names.checkpoint_order(config)
    return source if order is None else HalvesSource(source, order)


# Multimodal models: the prefixes of the text part, and the modules that only images and sounds use.
_TEXT_PARTS = {"language_model.": "", "model.language_model.": "model."}
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector"
    r"|vision_embedder|embed_vision|audio_tower|embed_audio)\."
)


def text_weights(source: WeightSource) -> WeightSource:
    """Returns the tensors of a multimodal model's text part, named as in a text-only model."""
    stored = {}
    others = [name for name in source.tensors if _OTHER_PARTS.match(name)]
    for name in (name for name in source.tensors if not _OTHER_PARTS.match(name)):
        prefix = next((prefix for prefix in _TEXT_PARTS if name.startswith(prefix)), None)
        renamed = name if prefix is None else _TEXT_PARTS[prefix] + name.removeprefix(prefix)
        stored[renamed] = [Rows(name)]
    if others:
        warnings.warn(
            f"{source.path}: left out {len(others)} tensors of the image encoder, such as"
            f" {others[0]}: lcjax reads the text part of this model",
            stacklevel=4,
        )
    return RenamedSource(source, stored)


def with_base_prefix(source: WeightSource, config: ModelConfig) -> WeightSource:
    """Returns the tensors under `model.` if a class without or with another prefix saved them.

    transformers' base classes (AutoModel; Qwen3-Embedding) save `layers.0...`, and wrappers such as
    torch.compile add a prefix to all names.

    Raises:
      InputError: a base class saved them, without the head that the config requires.
    """
    embeddings = [
        name for name in source.tensors if name.endswith(EMBEDDING.removeprefix("model."))
    ]
    if len(embeddings) != 1 or embeddings == [EMBEDDING]:
        return source
    prefix = embeddings[0].removesuffix(EMBEDDING.removeprefix("model."))
    outer = prefix.removesuffix("model.")

    def rename(name: str) -> str:
        if name.startswith("lm_") or not name.startswith(prefix):
            return name.removeprefix(outer)
        return f"model.{name.removeprefix(prefix)}"

    stored = {rename(name): [Rows(name)] for name in source.tensors}
    if HEAD not in stored and not config.tie_embeddings:
        raise InputError(
            f"{source.path}: it has {embeddings[0]} and no {HEAD}, so a base class (AutoModel)"
            " saved these weights, without a head; set tie_word_embeddings=true in config.json if"
            " the embedding is the head, or give the weights of the whole language model"
        )
    return RenamedSource(source, stored)


def with_published_names(source: WeightSource, config: ModelConfig) -> WeightSource:
    """Returns the tensors under the names of published checkpoints (`Family.synonyms`)."""
    synonyms = FAMILIES[family_of(config).name].synonyms
    if not synonyms:
        return source
    expected = {name for entry in hf_names.entries(config) for name in entry.names}

    def rename(name: str) -> str:
        pairs = ((a, b) for pair in synonyms for a, b in (pair, pair[::-1]))
        others = (name.replace(f".{a}.", f".{b}.") for a, b in pairs)
        if name in expected:
            return name
        return next((x for x in others if x in expected and x not in source.tensors), name)

    return RenamedSource(source, {rename(name): [Rows(name)] for name in source.tensors})


def resolve_names(source: WeightSource, table: Sequence[hf_names.Entry]) -> WeightSource:
    """Returns `source` with the names of `table`: no aliases, no fused tensors.

    The matrices of all experts are one tensor, whether they are stored one by one or in one array.

    Raises:
      InputError: the source stores a tensor under several names with different values.
    """
    as_is = {name: [Rows(name)] for name in source.tensors}
    stored = dict(as_is)
    for entry in table:
        for name, others in zip(entry.names, entry.aliases, strict=True):
            present = [n for n in (name, *others) if n in source.tensors]
            for copy in present[1:]:
                _check_equal(source, present[0], copy)
            for n in present:
                del stored[n]
            if present:
                stored[name] = [Rows(present[0])]
    expected = {name: entry for entry in table for name in entry.names}
    for name, info in source.tensors.items():
        parts = hf_names.parts_of(name)
        if not parts or name in expected or not all(part in expected for part in parts):
            continue
        groups = expected[parts[0]].groups
        sizes = [expected[part].tensor_shape[0] for part in parts]
        if info.shape[:1] != (sum(sizes),):
            continue
        del stored[name]
        ends = itertools.accumulate(size // groups for size in sizes)
        for part, size, end in zip(parts, sizes, ends, strict=True):
            size //= groups
            starts = range(end - size, info.shape[0], info.shape[0] // groups)
            stored[part] = [Rows(name, start, size) for start in starts]
    stored |= _parts_of_equal_size(source, expected)
    for name in expected:
        whole, part = hf_names.part_of(name) or ("", "")
        if whole in source.tensors and len(source.tensors[whole].shape) > 1:
            stored.pop(whole, None)
            stored[name] = [Rows(whole, part=part)]
    for name, pieces in _expert_tensors(source, table).items():
        for piece in pieces:
            stored.pop(piece.name, None)
        stored[name] = pieces
    return source if stored == as_is else RenamedSource(source, stored)


def _parts_of_equal_size(
    source: WeightSource, expected: dict[str, hf_names.Entry]
) -> dict[str, list[Rows]]:
    """Returns the parts of joined tensors that are stored as equal parts of the whole.

    transformers reads them so too. All but the last have as many rows, as `torch.chunk` makes them.
    """
    tensors = {}
    fused = [form.parts for form in hf_names.FUSED.values() if form.saved_in_equal_parts]
    for first, parts in ((name, parts) for parts in fused for name in expected):
        names = [first.replace(parts[0], part) for part in parts]
        if f".{parts[0]}." not in first or not expected.keys() & source.tensors.keys() >= {*names}:
            continue
        stored = [source.tensors[name].shape for name in names]
        sizes = [expected[name].tensor_shape[0] for name in names]
        total = sum(sizes)
        size = -(-total // len(names))
        equal = [min(size, total - size * i) for i in range(len(names))]
        if [shape[:1] for shape in stored] != [(rows,) for rows in equal] or sizes == equal:
            continue
        for name, rows, stop in zip(names, sizes, itertools.accumulate(sizes), strict=True):
            pieces = tensors[name] = []
            for i, other in enumerate(names):
                low, high = max(stop - rows, i * size), min(stop, (i + 1) * size)
                if low < high:
                    pieces.append(Rows(other, low - i * size, high - low))
    return tensors


def _expert_tensors(source: WeightSource, table: Iterable[hf_names.Entry]) -> dict[str, list[Rows]]:
    """Returns the expert tensors whose parts are all present, as pieces of stored tensors."""
    tensors = {}
    for entry in table:
        if entry.path not in hf_names.STATE_DICT:
            continue
        form, part, parts = hf_names.STATE_DICT[entry.path]
        for name, layer in zip(entry.names, entry.layers, strict=True):
            if hf_names.part_of(name):
                continue
            names = hf_names.expert_names(name, entry.num_experts)
            together = f"model.layers.{layer}.{form}"
            if "*" not in name:
                together = name if name in source.tensors else together
                pieces = [Rows(together)] if together in source.tensors else []
            elif together in source.tensors:
                size = entry.tensor_shape[0] // entry.num_experts
                whole = entry.num_experts, parts * size, *entry.tensor_shape[1:]
                fits = source.tensors[together].shape == whole
                experts = range(entry.num_experts if fits else 0)
                pieces = [Rows(together, part * size, size, expert) for expert in experts]
            else:
                shape = entry.tensor_shape[0] // entry.num_experts, *entry.tensor_shape[1:]
                infos = [source.tensors.get(expert) for expert in names]
                fits = all(info and info.shape == shape for info in infos)
                pieces = [Rows(expert) for expert in names] if fits else []
            if pieces:
                tensors[name] = pieces
    return tensors


def _check_equal(source: WeightSource, name: str, alias: str) -> None:
    """Raises an InputError unless two tensors are equal."""
    if source.tensors[name] != source.tensors[alias] or not _equal(source, name, alias):
        raise InputError(
            f"{source.path}: {name} and {alias} are two names of one tensor, but differ in value,"
            " shape or type; remove the wrong one from the checkpoint (the released model computes"
            f" with {name})"
        )


def _equal(source: WeightSource, *names: str) -> bool:
    """Returns whether two tensors have equal numbers; reads some rows at a time."""
    infos = [source.tensors[name] for name in names]
    if infos[0].shape != infos[1].shape:
        return False
    if not infos[0].shape or any(info.dtype not in DTYPES for info in infos):
        return True  # unreadable: `check_tensors` raises
    count = infos[0].shape[0]
    for start in range(0, count, _ROWS):
        blocks = (source.rows(name, start, min(start + _ROWS, count)) for name in names)
        first, second = (block.astype(np.float32).tobytes() for block in blocks)
        if first != second:
            return False
    return True


def as_stored(source: WeightSource, config: ModelConfig) -> tuple[WeightSource, ModelConfig]:
    """Returns a model with its head tied to its embedding only if the stored tensors allow it.

    As transformers 5 does it: a head that differs from the embedding is read as the head, whatever
    the config says, and a head without an embedding is both.
    """
    if HEAD not in source.tensors or not config.tie_embeddings or config.mlm_head:
        return source, config
    if EMBEDDING not in source.tensors:
        stored = {EMBEDDING if name == HEAD else name: [Rows(name)] for name in source.tensors}
        return RenamedSource(source, stored), config
    if not _equal(source, EMBEDDING, HEAD):
        warnings.warn(
            f"{source.path}: {HEAD} differs from {EMBEDDING}, so it is read as a head of its own,"
            " although config.json ties the two; set tie_word_embeddings=false there",
            stacklevel=4,
        )
        config = config.replace(tie_embeddings=False)
    return source, config


def check_tensors(
    source: WeightSource, table: Sequence[hf_names.Entry], *, is_tied: bool = False
) -> None:
    """Raises an InputError that lists every missing, unexpected and mis-shaped tensor.

    With `is_tied`, the head may be stored beside the embedding that it equals.
    """
    expected = _expected(source, table)
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
            name
            for name in source.tensors
            if name not in expected and not _ignorable(name, is_tied)
        ],
    }
    if text := describe_faults(faults):
        raise InputError(
            f"{source.path}: tensors do not fit the model its config describes; {text}; check that"
            " config and weights belong together"
        )


def _expected(source: WeightSource, table: Sequence[hf_names.Entry]) -> dict[str, tuple]:
    """Returns the expected shapes by name; experts that were not joined are listed one by one."""
    expected = {}
    for entry in table:
        for name in entry.names:
            if "*" not in name or name in source.tensors:
                expected[name] = entry.tensor_shape
                continue
            rows, *rest = entry.tensor_shape
            names = hf_names.expert_names(name, entry.num_experts)
            expected |= dict.fromkeys(names, (rows // len(names), *rest))
    return expected


def describe_faults(faults: dict[str, list[str]], limit: int = 10) -> str:
    """Lists the first items of every kind of fault, for an error; empty if there are none."""
    return "; ".join(
        f"{kind}: {', '.join(items[:limit])}"
        + (f" and {len(items) - limit} more" if len(items) > limit else "")
        for kind, items in faults.items()
        if items
    )


def _ignorable(name: str, is_tied: bool) -> bool:
    """Returns whether a tensor is not needed.

    It is a table that the config determines, a tied head's copy, or a part of the layers with which
    Qwen predicts several tokens at once, which transformers leaves out as well.
    """
    tables = ("rotary_emb.inv_freq", "rope_freqs.weight", "attn.bias", "attn.masked_bias")
    is_copy = name == "lm_head.weight" and is_tied
    return name.endswith(tables) or name.startswith("mtp.") or is_copy


def without_unread_keys(source: WeightSource, config: ModelConfig) -> WeightSource:
    """Returns the tensors but projections of keys in layers that read the keys of others.

    Published checkpoints have them, and transformers leaves them out.
    """
    readers = [i for i, source in enumerate(config.key_sources) if source != i]
    parts = "|".join(("k_proj", "v_proj", "k_norm", "v_norm"))
    unread = re.compile(rf"model\.layers\.({'|'.join(map(str, readers))})\.self_attn\.({parts})\.")
    if not readers or not any(map(unread.match, source.tensors)):
        return source
    names = (name for name in source.tensors if not unread.match(name))
    return RenamedSource(source, {name: [Rows(name)] for name in names})


def read_params(
    source: WeightSource,
    config: ModelConfig,
    *,
    mesh: jax.sharding.Mesh | None = None,
    host: bool = False,
    progress: Callable[[int], Any] | None = None,
) -> dict:
    """Returns the parameter tree in `config.param_dtype`, with layers stacked if `config.stacked`.

    Args:
      source: the stored tensors.
      config: the config of the model.
      mesh: the devices that the parameters are sharded over (`parallel.sharding`); None: the
        default device.
      host: whether they are placed in the memory of the mesh's hosts
        (`parallel.device_memory.host_shardings`).
      progress: called with the number of bytes of each leaf after it is read.

    Raises:
      InputError: the tensors do not fit the config, they need more memory than is free, or one
        holds NaN or infinity.
    """
    table = hf_names.entries(config)
    source = resolve_names(source, table)
    check_tensors(source, table, is_tied=config.tie_embeddings)
    leaves = []
    for entry in table:  # an encoder's layers are equal, and stay stacked
        is_apart = entry.path.startswith("layers/") and not config.stacked
        leaves += entry.by_layer() if is_apart else [entry]
    options = {"storage": config.weights, "mesh": mesh, "host": host, "progress": progress}
    return read_leaves(source, leaves, config.param_dtype, **options)


def read_leaves(
    source: WeightSource,
    table: Sequence[hf_names.Entry],
    param_dtype: str,
    *,
    storage: WeightStorage | None = None,
    mesh: jax.sharding.Mesh | None = None,
    host: bool = False,
    progress: Callable[[int], Any] | None = None,
) -> dict:
    """Returns the tree of the leaves in `table`, whose tensors `check_tensors` has checked.

    With a `storage`, matrices of layers are read and quantised one by one, so memory holds their
    codes and one matrix. The other options and the errors are those of `read_params`.
    """
    dtypes = {entry.path: DTYPES[entry.dtype(param_dtype)] for entry in table}
    quantised = {e.path for e in table if storage is not None and is_stored(e.path)}
    shapes = nest({
        e.path: kernel_shapes(storage, e.path, e.shape)
        if e.path in quantised
        else jax.ShapeDtypeStruct(e.shape, dtypes[e.path])
        for e in table
    })  # fmt: skip
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: device, shapes)
    else:
        shardings = param_shardings(mesh, shapes)
    on_device = shardings
    if host:
        shardings = host_shardings(shapes, shardings)
    check_fits(
        jax.tree.map(lambda x, sharding: x.update(sharding=sharding), shapes, shardings),
        f"{source.path}: its weights in {param_dtype if storage is None else storage.name}",
        "read them as bfloat16 (param_dtype) or as codes (model.weights), spread them over more"
        " devices (mesh), or take a smaller model",
    )
    leaves = {}
    for entry in table:
        if entry.path in quantised:
            where = lookup(on_device, entry.path)
            arrays = _read_codes(source, entry, dtypes[entry.path], storage, where, mesh)
            leaves[entry.path] = jax.device_put(arrays, lookup(shardings, entry.path))
        else:
            leaves[entry.path] = jax.make_array_from_callback(
                entry.shape,
                lookup(shardings, entry.path),
                lambda index, entry=entry: _read_block(source, entry, index, dtypes[entry.path]),
            )
        if progress:
            progress(sum(leaf.nbytes for leaf in jax.tree.leaves(leaves[entry.path])))
    return nest(leaves)


def _read_codes(
    source: WeightSource,
    entry: hf_names.Entry,
    dtype: np.dtype,
    storage: WeightStorage,
    shardings: dict[str, jax.sharding.Sharding],
    mesh: jax.sharding.Mesh | None,
) -> dict[str, jax.Array]:
    """Returns the arrays of a kernel; each layer is read, quantised and freed before the next."""
    stacks: dict[str, jax.Array] = {}
    for layer, one in enumerate(entry.by_layer()):
        kernel = read_kernel(source, one, dtype, mesh)
        arrays = quantise_kernel(storage, one.path, kernel, mesh)
        del kernel
        if not entry.stacked:
            return arrays
        if not stacks:
            stacks = _empty_stacks(arrays, len(entry.names), shardings)
        # Waiting keeps two matrices from being on the device at a time.
        stacks = jax.block_until_ready(_put_layer(stacks, arrays, layer))
    return stacks


def read_kernel(
    source: WeightSource,
    entry: hf_names.Entry,
    dtype: np.dtype,
    mesh: jax.sharding.Mesh | None = None,
) -> jax.Array:
    """Returns the leaf of an entry that is not stacked; on a mesh, each shard is read by itself."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shape = jax.ShapeDtypeStruct(entry.layer_shape, dtype)
    where = device if mesh is None else param_shardings(mesh, nest({entry.path: shape}))
    return jax.make_array_from_callback(
        entry.layer_shape,
        where if mesh is None else lookup(where, entry.path),
        lambda index: _read_block(source, entry, index, dtype),
    )


def _empty_stacks(
    arrays: dict[str, jax.Array], layers: int, shardings: dict[str, jax.sharding.Sharding]
) -> dict[str, jax.Array]:
    shapes = {name: ((layers, *x.shape), x.dtype) for name, x in arrays.items()}
    return jax.jit(
        lambda: {name: jnp.zeros(*shape) for name, shape in shapes.items()}, out_shardings=shardings
    )()


@functools.partial(jax.jit, donate_argnums=0)
def _put_layer(
    stacks: dict[str, jax.Array], arrays: dict[str, jax.Array], layer: int
) -> dict[str, jax.Array]:
    return jax.tree.map(lambda stack, x: stack.at[layer].set(x), stacks, arrays)


def read_tensor(source: WeightSource, name: str) -> np.ndarray:
    """Returns a whole tensor in float32.

    Raises:
      InputError: it is absent, not of a float dtype, a scalar, or holds NaN or infinity.
    """
    info = source.tensors.get(name)
    if info is None or info.dtype not in DTYPES or not info.shape:
        problem = "is missing" if info is None else f"is {info.dtype} {list(info.shape)}"
        raise InputError(f"{source.path}: {name} {problem}; check that config and weights fit")
    tensor = np.ascontiguousarray(source.rows(name, 0, info.shape[0]), dtype=np.float32)
    if tensor.size and not all_finite(tensor):
        raise InputError(f"{source.path}: {name} holds NaN or infinity; use another checkpoint")
    return tensor


def stored_dtype(source: WeightSource, config: ModelConfig) -> str:
    """Returns the dtype in which all matrices of the model are stored; float32 if they differ."""
    names = [n for e in hf_names.entries(config) if not e.path.startswith("rope/") for n in e.names]
    infos = [source.tensors[name] for name in names if name in source.tensors]
    kinds = {info.dtype for info in infos if len(info.shape) > 1}
    return kinds.pop() if len(kinds) == 1 and kinds <= set(DTYPES) else "float32"


def _read_block(
    source: WeightSource, entry: hf_names.Entry, index: tuple[slice, ...], dtype: np.dtype
) -> np.ndarray:
    """Returns `leaf[index]`; reads only the rows that it needs of each layer's tensor."""
    layers = range(len(entry.names))
    if entry.stacked:
        layers, index = layers[index[0]], index[1:]
    bounds = [range(size)[part] for size, part in zip(entry.layer_shape, index, strict=True)]
    first, *rest = (bounds[i] for i in np.argsort(entry.order))  # axes of the view
    step = entry.tensor_shape[0] // entry.view[0]  # rows of the tensor per unit of the view
    inner = tuple(slice(bound.start, bound.stop) for bound in rest)
    out = np.empty((len(layers), *map(len, bounds)), dtype)
    for slot, layer in enumerate(layers):
        rows = source.rows(entry.names[layer], first.start * step, first.stop * step)
        block = rows.reshape(len(first), *entry.view[1:])
        with np.errstate(over="ignore"):
            out[slot] = block[(slice(None), *inner)].transpose(entry.order)
        if not all_finite(out[slot]):
            overflows = np.isfinite(rows.astype(np.float32)).all()
            problem = f"numbers beyond {dtype}" if overflows else "NaN or infinity"
            way_out = "read it as float32" if overflows else "use another checkpoint"
            raise InputError(f"{source.path}: {entry.names[layer]} holds {problem}; {way_out}")
        del rows, block  # frees memory first: the next layer's experts may be one large tensor
    return out if entry.stacked else out[0]


def all_finite(array: np.ndarray) -> bool:
    """Returns whether a contiguous array of one of `DTYPES` holds neither NaN nor infinity.

    Bits are compared as integers, which NumPy does at 7 to 14 GB/s for all three types: 10 seconds
    for 70B parameters in bfloat16, a small part of the time in which they are read.
    """
    bits = array.reshape(-1).view(f"u{array.dtype.itemsize}")
    parts = (bits[start : start + _PART] for start in range(0, bits.size, _PART))
    return all((part << 1).max() < _INFINITY[array.dtype.name] for part in parts)
