"""Published adapters: `peft` folders, and LongLoRA's with their second file.

`adapter_config.json` and `adapter_model.safetensors` (or `.bin`) hold low-rank updates of matrices
and, where embeddings or heads were trained, whole tensors. LongLoRA (arXiv 2309.12307) adds
`trainable_params.bin`: embeddings and norms, whole, without `peft`'s prefix of their names.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.checkpoints.safetensors_io import SafetensorsFolder
from lcjax.checkpoints.tokenizer_hf import read_json
from lcjax.checkpoints.torch_pickle import TorchFolder, pickles
from lcjax.checkpoints.weights import DTYPES, Source
from lcjax.errors import InputError

CONFIG, ADAPTERS, TRAINABLE = "adapter_config.json", "adapter_model", "trainable_params"
_PREFIX = "base_model.model."
_WRAPPERS = ("default", "modules_to_save", "base_layer")  # parts of a name that peft puts in
_MATRIX = re.compile(r"(.+)\.lora_([AB])(?:\.weight)?")
# These start from a base whose weights they have changed, which the adapters do not carry.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclasses.dataclass(frozen=True)
class LowRank:
    """The update scale * B A of one matrix [out, in]."""

    a: np.ndarray  # float32 [r, in]
    b: np.ndarray  # float32 [out, r]
    scale: float

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.scale * (self.b[start:stop] @ self.a)


@dataclasses.dataclass(frozen=True)
class Adapters:
    """What a folder of adapters holds, by the names of the base's tensors."""

    path: str
    low_rank: dict[str, LowRank]
    whole: dict[str, tuple[Source, str]]  # the file and the name of the tensor in it
    trainable: bool  # whether it has LongLoRA's second file
    saved_modules: tuple[str, ...]  # peft's modules_to_save: copies beside the base's own


def is_adapter_folder(folder: Path, has_model: bool) -> bool:
    return not has_model and (folder / CONFIG).is_file()


def base_named_by(folder: Path) -> str | None:
    """The base that the adapters were trained on, as their config names it."""
    name = read_json(folder / CONFIG).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def read_adapters(folder: Path, *, allow_pickle: bool = False) -> Adapters:
    """Reads the low-rank matrices, and where whole tensors lie."""
    settings = _settings(folder)
    first = _file(folder, ADAPTERS, allow_pickle)
    if first is None:
        raise InputError(
            f"{folder}: {CONFIG} is there, but no {ADAPTERS}.safetensors or .bin; download it"
        )
    second = _file(folder, TRAINABLE, allow_pickle)
    halves: dict[str, dict[str, np.ndarray]] = {}
    whole: dict[str, tuple[Source, str]] = {}
    unknown = []
    for source in filter(None, (first, second)):
        for stored, info in source.tensors.items():
            name = _plain(stored)
            match = _MATRIX.fullmatch(name)
            if info.dtype not in DTYPES:
                unknown.append(f"{stored} ({info.dtype})")
            elif match and len(info.shape) == 2:
                matrix = source.rows(stored, 0, info.shape[0]).astype(np.float32)
                halves.setdefault(match[1], {})[match[2]] = matrix
            elif "lora_" in name:
                unknown.append(stored)
            else:
                whole[name] = source, stored
    if unknown:
        raise InputError(
            f"{folder}: {len(unknown)} tensors are not of plain LoRA ({', '.join(unknown[:5])}); "
            "merge them with peft (merge_and_unload, save_pretrained) and give the result"
        )
    low_rank = {f"{m}.weight": _pair(folder, settings, m, h) for m, h in halves.items()}
    if not low_rank and not whole:
        raise InputError(f"{folder}: its files hold no adapters; download them again")
    saved = tuple(settings.get("modules_to_save") or ())
    return Adapters(str(folder), low_rank, whole, second is not None, saved)


def _settings(folder: Path) -> dict[str, Any]:
    """`adapter_config.json`, if it describes something that can be added to a matrix."""
    file = folder / CONFIG
    settings = read_json(file)
    start = settings.get("init_lora_weights")
    refused = {
        "peft_type": settings.get("peft_type", "LORA") != "LORA",
        "use_dora": bool(settings.get("use_dora")),
        "fan_in_fan_out": bool(settings.get("fan_in_fan_out")),
        "init_lora_weights": isinstance(start, str) and start.lower().startswith(_CHANGE_THE_BASE),
    }
    for key, wrong in refused.items():
        if wrong:
            raise InputError(
                f"{file}: {key}={settings[key]!r} is not supported, only plain LoRA is; merge the "
                "adapters with peft (merge_and_unload, save_pretrained) and give the result"
            )
    for key in ("r", "lora_alpha"):
        if not _is_positive(settings.get(key)):
            raise InputError(
                f"{file}: {key}={settings.get(key)!r} must be a number above 0; restore the file "
                "that was published with the adapters"
            )
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = settings.get(key) or {}
        if not isinstance(patterns, dict) or not all(map(_is_positive, patterns.values())):
            raise InputError(
                f"{file}: {key}={patterns!r} must give numbers above 0 by the names of modules; "
                "restore the file that was published with the adapters"
            )
    return settings


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _file(folder: Path, stem: str, allow_pickle: bool) -> Source | None:
    """`stem`.safetensors, or else `stem`.bin where pickles are allowed."""
    safe, pickled = folder / f"{stem}.safetensors", folder / f"{stem}.bin"
    if safe.is_file():
        return SafetensorsFolder(folder, [safe])
    if not pickled.is_file():
        return None
    if not allow_pickle:
        raise pickles(str(folder), [pickled.name])
    return TorchFolder(folder, [pickled])


def _plain(stored: str) -> str:
    """The base's name of a tensor: without `peft`'s prefix and the parts it puts in."""
    parts = stored.removeprefix(_PREFIX).split(".")
    return ".".join(part for part in parts if part not in _WRAPPERS)


def _pair(folder: Path, settings: dict, module: str, halves: dict[str, np.ndarray]) -> LowRank:
    """A and B of one module, with the scale alpha / r, or alpha / sqrt(r) (rsLoRA)."""
    if len(halves) < 2:
        only = "A" if "A" in halves else "B"
        raise InputError(f"{folder}: {module} has lora_{only} only; download it again")
    a, b = halves["A"], halves["B"]
    rank = _of_module(folder, settings, "rank_pattern", module, settings["r"])
    if a.shape[0] != rank or b.shape[1] != rank:
        raise InputError(
            f"{folder}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, but "
            f"{CONFIG} says r={rank}; take both files from one training"
        )
    alpha = _of_module(folder, settings, "alpha_pattern", module, settings["lora_alpha"])
    return LowRank(a, b, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))


def _of_module(folder: Path, settings: dict, key: str, module: str, default: float) -> float:
    """The first value whose pattern is the end of the module's name, as `peft` looks it up."""
    for pattern, value in (settings.get(key) or {}).items():
        try:
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        except re.error as error:
            raise InputError(f"{folder / CONFIG}: {key}: {pattern!r}: {error}; mend it") from error
    return default
