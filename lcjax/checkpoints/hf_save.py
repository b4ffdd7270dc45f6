"""Writes a folder that transformers opens with the same logits.

transformers has no form of CLEX or of an E2-LLM scale that follows the length, and reads them as
plain rope; writing them shows a warning. Another warning is shown for settings of CEPE and
SharedLLM that the released code has no key for.

The folder is complete or absent (`lcjax.files.atomic_folder`). Tensors pass through the host one at
a time. To a URL, one shard at a time is written by way of a temporary file.
"""

import collections
import functools
import itertools
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lcjax.checkpoints import hf_names
from lcjax.checkpoints.hf_config import announced_length, decoder_to_hf
from lcjax.checkpoints.safetensors_io import INDEX, SINGLE, nbytes, write_file
from lcjax.checkpoints.tokenizer import (
    GENERATION,
    TOKENIZER_FILES,
    Tokenizer,
    check_vocabulary,
    generation_config,
    token_ids,
)
from lcjax.checkpoints.weights import DTYPES, TensorInfo, all_finite
from lcjax.errors import InputError, check_integer, check_one_of, check_type
from lcjax.files import (
    CHECKSUMS,
    FolderFormat,
    atomic_folder,
    check_destination,
    check_path,
    read_json,
    write_hf_json,
)
from lcjax.memory.cepe import encoder_to_hf
from lcjax.models.lora import LoRA, merge
from lcjax.models.model_config import ModelConfig
from lcjax.models.weight_storage import WeightStorage, dequantise_kernel
from lcjax.parallel import distributed
from lcjax.parallel.device_memory import is_offloaded, to_device
from lcjax.storage import URLPath, to_path
from lcjax.tree import lookup

_SHARD = "[0-9]" * 5
HF_FOLDER = FolderFormat(
    name="a model folder",
    files=(
        *("config.json", GENERATION, *TOKENIZER_FILES, SINGLE, INDEX),
        *(f"model-{_SHARD}-of-{_SHARD}.safetensors", CHECKSUMS),
    ),
    config="config.json",
    # transformers 4 writes torch_dtype, transformers 5 dtype, and both their version.
    keys=frozenset({"architectures", "model_type", "dtype", "torch_dtype"}),
    foreign_keys=frozenset({"transformers_version"}),
)
_SHARD_BYTES = 5_000_000_000
_MARGIN = 2**24  # bytes beside the weights: tokenizer, configs, headers
_Row = tuple[str, hf_names.Entry, int | None]  # a tensor, and its layer if it has one
KernelReader = Callable[[hf_names.Entry, int | None], jax.Array]  # of a leaf's layer, if stacked


def config_to_hf(config: ModelConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """Returns the `config.json` of a model, including its memory.

    Args:
      config: the config of the model.
      dtype: dtype of the weights; None: the config's `param_dtype`.
    """
    write = functools.partial(decoder_to_hf, dtype=dtype)
    if config.mlm_head:
        return encoder_to_hf(config, write)
    return write(config) if config.memory is None else config.memory.to_hf(config, write)


def check_exportable(config: ModelConfig) -> None:
    """Raises an InputError if a run could not export its model at the end of training."""
    try:
        config_to_hf(config)
    except InputError as error:
        raise InputError(f"train.export=true: {error}; or set train.export=false") from None


def save_hf(
    folder: str | Path,
    params: dict,
    config: ModelConfig,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: str | None = None,
    kernels: KernelReader | None = None,
    max_shard_bytes: int = _SHARD_BYTES,
    overwrite: bool = False,
    checksums: bool = False,
    progress: Callable[[int], Any] | None = None,
) -> Path:
    """Writes config, weights and tokenizer; returns the folder.

    Args:
      folder: the folder to create.
      params: stacked or one branch per layer; LoRA adapters are merged.
      config: the config of the model.
      tokenizer: the tokenizer to save; None: no tokenizer is written.
      dtype: dtype of the stored weights; None: the config's `param_dtype`.
      kernels: reads the floats of kernels that `params` have as codes (`model.weights`), from
        `load.kernel_reader`; None: codes are dequantised.
      max_shard_bytes: size above which the weights are split into several files.
      overwrite: whether to replace a folder that this function wrote; a folder with any other file
        is never replaced.
      checksums: whether to add the SHA-256 sums of all files (`lcjax.files.CHECKSUMS`). Those of
        small files are compared whenever the folder is loaded, all by `python -m lcjax.check`.
      progress: called with the number of bytes of each tensor after it is gathered.
    """
    check_path("folder", folder)
    folder = to_path(folder)
    check_type("params", params, dict)
    check_type("config", config, ModelConfig)
    check_type("progress", progress, Callable, type(None))
    dtype = config.param_dtype if dtype is None else dtype
    check_one_of("dtype", dtype, DTYPES)
    check_integer("max_shard_bytes", max_shard_bytes, 1, most=2**63)
    hf = config_to_hf(config, dtype=dtype)
    if tokenizer is not None:
        check_vocabulary(tokenizer, config.vocab_size, str(folder))
        hf |= token_ids(tokenizer)
    weights = WeightStream(
        params, hf_names.entries(config), dtype, lora=config.lora,
        fused=hf_names.fused_modules(config), storage=config.weights, kernels=kernels,
        progress=progress,
    )  # fmt: skip
    if not distributed.is_main_process():
        weights.gather()
        return folder
    check_destination(folder, HF_FOLDER, overwrite)
    _warn_of_plain_rope(config, folder)
    _warn_of_other_memory(config, folder)
    check_space(folder, weights.nbytes)
    with atomic_folder(folder, HF_FOLDER, overwrite, checksums=checksums) as partial:
        if tokenizer is not None:
            tokenizer.save(partial)
            write_hf_json(partial / GENERATION, generation_config(tokenizer))
            _announce_length(partial, config)
        weights.write(partial, max_shard_bytes)
        write_hf_json(partial / "config.json", hf)
    return folder


def _check_finite(name: str, tensor: np.ndarray, leaf: np.ndarray) -> None:
    """Raises an InputError if a tensor to be written holds NaN or infinity."""
    if tensor.size == 0 or all_finite(tensor):
        return
    is_large = np.isfinite(np.asarray(leaf, np.float32)).all()
    problem = f"numbers beyond {tensor.dtype}" if is_large else "NaN or infinity"
    way_out = "save it in float32" if is_large else "save weights from before they diverged"
    raise InputError(f"{name} holds {problem}, so the model cannot be saved; {way_out}")


def _announce_length(folder: Path, config: ModelConfig) -> None:
    """Raises the lengths in the files of the tokenizer to that of an extended model."""
    length = announced_length(config)
    file = folder / "tokenizer_config.json"
    settings = read_json(file)
    is_extended = length > config.max_length or config.extended_length is not None
    if is_extended and settings.get("model_max_length", 0) < length:
        write_hf_json(file, settings | {"model_max_length": length})
    defaults = read_json(folder / GENERATION)
    if is_extended and defaults.get("max_length") == config.max_length:  # as Llama-2 has it
        write_hf_json(folder / GENERATION, defaults | {"max_length": length})


class WeightStream:
    """The tensors of a model under Hugging Face's names, passed through the host one at a time."""

    def __init__(
        self,
        params: dict,
        table: Sequence[hf_names.Entry],
        dtype: str,
        *,
        lora: LoRA | None,
        fused: tuple[str, ...] = (),
        storage: WeightStorage | None = None,
        kernels: KernelReader | None = None,
        progress: Callable[[int], Any] | None = None,
    ):
        """Plans the tensors; reads nothing yet.

        Args:
          params: as in `save_hf`.
          table: the leaves to write, each under its names and its aliases.
          dtype: dtype of the stored weights.
          lora: settings of the adapters in `params`, which are merged; None: there are none.
          fused: matrices that are written together, from `hf_names.FUSED`.
          storage: how `params` store kernels; None: as floats.
          kernels: as in `save_hf`.
          progress: as in `save_hf`.
        """

        def stored_name(name):
            whole, _ = hf_names.part_of(name) or (name, "")
            return hf_names.fused_name(whole, fused) or whole

        self._tensors: dict[str, TensorInfo] = {}
        groups: list[tuple[list[str], list[_Row]]] = []
        for name, group in itertools.groupby(
            _in_layer_order(table), lambda row: stored_name(row[0])
        ):
            rows = list(group)
            entries = [entry for _, entry, _ in rows]
            names = hf_names.expert_names(name, entries[0].num_experts)
            if part := hf_names.part_of(rows[0][0]):
                shape = list(entries[0].tensor_shape)
                shape[hf_names.part_axis(part[1], len(shape))] *= len(rows)
                shape = tuple(shape)
            else:
                count = sum(entry.tensor_shape[0] for entry in entries) // len(names)
                shape = count, *entries[0].tensor_shape[1:]
            self._tensors |= dict.fromkeys(names, TensorInfo(shape, entries[0].dtype(dtype)))
            groups.append((names, rows))
        leaf = functools.partial(_leaf, params, lora, storage, kernels, DTYPES[dtype])
        self._arrays = self._read(leaf, groups, progress)
        self.nbytes = sum(map(nbytes, self._tensors.values()))

    def _read(
        self,
        read: KernelReader,
        groups: list[tuple[list[str], list[_Row]]],
        progress: Callable[[int], Any] | None,
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the tensors; those of a group are the rows of its entries, in equal parts.

        Entries with a part of an axis are joined there. `read` reads one layer of a leaf.
        """
        for names, rows in groups:
            parts, dtype = [], DTYPES[self._tensors[names[0]].dtype]
            for _, entry, layer in rows:
                leaf = distributed.gather(read(entry, layer))
                with np.errstate(over="ignore"):  # `_check_finite` raises
                    tensor = np.ascontiguousarray(entry.to_tensor(leaf), dtype)
                _check_finite(names[0], tensor, leaf)
                parts.append(tensor)
                if progress:
                    progress(parts[-1].nbytes)
            if hf_names.part_of(rows[0][0]):
                array = np.empty(self._tensors[names[0]].shape, dtype)
                for (name, *_), part in zip(rows, parts, strict=True):
                    array[hf_names.part_index(hf_names.part_of(name)[1], array.shape)] = part
                yield names[0], array
                continue
            array = parts[0]
            if len(parts) > 1:
                groups = rows[0][1].groups
                parts = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
                array = np.concatenate(parts, 1).reshape(-1, *array.shape[1:])
            yield from zip(names, np.split(array, len(names)), strict=True)

    def gather(self) -> None:
        """Takes part in gathering all tensors; for the processes that do not write."""
        collections.deque(self._arrays, maxlen=0)

    def write(self, folder: Path, max_shard_bytes: int = _SHARD_BYTES) -> None:
        """Writes one file, or several shards and an index."""
        shards = _shards(self._tensors, max_shard_bytes)
        for file, names in shards.items():
            chosen = {name: self._tensors[name] for name in names}
            write_file(folder / file, chosen, itertools.islice(self._arrays, len(names)))
        if len(shards) > 1:
            weight_map = {name: file for file, names in shards.items() for name in names}
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}
            write_hf_json(folder / INDEX, index)


def _warn_of_plain_rope(config: ModelConfig, folder: Path) -> None:
    for rope in {layer.rope for layer, _ in config.layer_counts}:
        if (limit := rope.hf_limit) is None:
            continue
        same = f"gives the same logits up to {limit} tokens" if limit else "gives other logits"
        warnings.warn(
            f"{folder}: transformers will read rope {rope.type} as plain rope and {same}; "
            "lcjax reads the method itself from this folder",
            stacklevel=3,
        )


def _warn_of_other_memory(config: ModelConfig, folder: Path) -> None:
    if config.memory and (misread := config.memory.unsupported_by_released_code()) is not None:
        warnings.warn(
            f"{folder}: the released code will read model.memory.{misread}; lcjax reads what was"
            " trained from this folder",
            stacklevel=3,
        )


def _in_layer_order(table: Sequence[hf_names.Entry]) -> list[_Row]:
    """Lists all tensors by layer, so that loaders read files from front to back."""
    ordered = []
    for stacked, group in itertools.groupby(table, lambda entry: entry.stacked):
        entries = list(group)
        layers = sorted({layer for e in entries for layer in e.layers}) if stacked else [None]
        ordered += [
            (name, e, layer)
            for layer in layers
            for e in entries
            if layer is None or layer in e.layers
            for name in e.spellings(layer)
        ]
    return ordered


def _shards(tensors: dict[str, TensorInfo], limit: int) -> dict[str, list[str]]:
    """Maps file names to tensors, in order; a single tensor above the limit gets its own file."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, info in tensors.items():
        if groups[-1] and size + nbytes(info) > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes(info)
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {f"model-{i + 1:05}-of-{count:05}.safetensors": g for i, g in enumerate(groups)}


def check_space(folder: Path, num_bytes: int) -> None:
    """Raises an InputError unless the disk has space for `num_bytes` of weights.

    For a URL, the disk of temporary files is checked, which holds one shard at a time.
    """
    parent = folder.absolute().parent
    if isinstance(folder, URLPath):
        parent, num_bytes = Path(tempfile.gettempdir()), min(num_bytes, _SHARD_BYTES)
    num_bytes += _MARGIN
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}; name another folder") from None
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise InputError(
            f"{folder}: the model takes {num_bytes / 1e9:.2f} GB, but the disk has"
            f" {free / 1e9:.2f} GB free; make room, choose another disk, or save in bfloat16"
        )


def _leaf(
    params: dict,
    lora: LoRA | None,
    storage: WeightStorage | None,
    kernels: KernelReader | None,
    dtype: np.dtype,
    entry: hf_names.Entry,
    layer: int | None,
) -> jax.Array:
    """Returns one layer of a leaf, with its adapter merged in.

    A stored kernel is read by `kernels`, or dequantised to float32 if an adapter is added, else to
    `dtype`.
    """
    path, stacked = entry.path, "layers" in params or not entry.path.startswith("layers/")
    if layer is not None and not stacked:
        path = path.replace("layers/", f"layers_{layer}/", 1)
    parent, _, last = path.rpartition("/")
    try:
        siblings = lookup(params, parent)
        module = {k: v for k, v in siblings.items() if k == last or k.startswith("lora_")}
        if layer is not None and stacked:
            module = jax.tree.map(lambda x: _row(x, layer), module)
        if storage is not None and isinstance(module[last], dict):
            if kernels is not None:
                module[last] = kernels(entry, layer)
            else:
                wide = np.float32 if "lora_a" in module else dtype
                path = path.replace("layers/", "layers_0/", 1)  # a layer by itself
                arrays = to_device(module[last])
                module[last] = dequantise_kernel(storage, path, arrays, entry.layer_shape, wide)
        module = to_device(module)
        leaf = module[last]
    except (KeyError, TypeError) as error:  # TypeError: an array in place of a subtree
        raise InputError(
            f"params lack {path}, which the config requires; save the config of this model"
        ) from error
    if leaf.shape != entry.layer_shape:
        raise InputError(
            f"params.{path} is {list(leaf.shape)}, and the config requires"
            f" {list(entry.layer_shape)};"
            " save the config of this model"
        )
    if last == "kernel" and "lora_a" in module:
        if lora is None:
            raise InputError(f"params have an adapter at {parent} but model.lora is not set")
        return merge(module, lora)[last]
    return leaf


def _row(stack: jax.Array, layer: int) -> jax.Array:
    """Returns one layer of a stack; copies only this layer of an offloaded stack to the device."""
    return _fetched_row(stack, layer) if is_offloaded(stack) else stack[layer]


@jax.jit
def _fetched_row(stack: jax.Array, layer: int) -> jax.Array:
    return to_device(jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False))
