"""Reads the model of a run folder of train.py: trained parameters over their base, merged.

`base.json` in the folder lists the parameters that its checkpoints hold, and describes where the
frozen parameters, which they omit, come from.
"""

import dataclasses
import json
import typing
from dataclasses import MISSING
from pathlib import Path

import jax
import jax.numpy as jnp

from lcjax import config as config_lib
from lcjax.checkpoints.hub import find_checkpoint, is_run, trains_retriever
from lcjax.checkpoints.orbax_io import load_state
from lcjax.checkpoints.tokenizer import Tokenizer
from lcjax.errors import InputError
from lcjax.files import FolderSums, read_sealed, seal, write_whole
from lcjax.memory import MemorySection
from lcjax.models import lora
from lcjax.models.decoder import abstract_params
from lcjax.models.model_config import ModelConfig
from lcjax.models.weight_storage import dequantise_params, quantise_params
from lcjax.parallel.digest import weights_digest
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.storage import StorageError, to_path
from lcjax.tree import flatten, split, union

MODEL_CONFIG, BASE = "model.yaml", "base.json"


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """The base model of a run: its frozen parameters, as `base.json` describes them."""

    path: str | None  # the checkpoint that the run started from; None: random weights
    param_dtype: str | None  # the dtype that it was loaded with; None: the checkpoint's own
    seed: int  # of random weights and of learned frequencies
    trained: tuple[str, ...]  # paths of the parameters in the run's checkpoints
    average: bool  # whether the checkpoints hold a running average of the weights, too
    frozen: str | None = None  # digest of all other parameters; None: there are none
    base: str | None = None  # the base of the adapters in `path`; None: no adapters, or their own
    memory: dict | None = None  # the section model.memory; None: the run added no memory
    encoder_layers: int | None = None  # model.encoder_layers

    @classmethod
    def read(cls, folder: Path) -> "BaseModel":
        """Reads the file of a run folder.

        Raises:
          InputError: the file is absent, or differs from what `write` wrote. A file of older
            versions has no checksum.
        """
        file = folder / BASE
        if not file.exists():
            raise InputError(f"{folder} is no run folder: it has no {BASE}")
        way_out = "remove it and start the command of the run again, which writes it"
        fields = read_sealed(file, way_out)
        types = typing.get_type_hints(cls) | {"trained": list}
        required = {field.name for field in dataclasses.fields(cls) if field.default is MISSING}
        if not (
            required <= fields.keys() <= types.keys()
            and all(isinstance(value, types[name]) for name, value in fields.items())
            and all(isinstance(path, str) for path in fields["trained"])
        ):
            raise InputError(f"{file} is damaged, or of another version; {way_out}")
        return cls(**fields | {"trained": tuple(fields["trained"])})

    def write(self, folder: Path) -> None:
        # Written whole, as other processes may be reading it.
        write_whole(folder / BASE, json.dumps(seal(dataclasses.asdict(self)), indent=1) + "\n")


def run_config(folder: Path) -> ModelConfig:
    """Returns the config of the model that a run trains, with its adapters."""
    path, way_out = folder / MODEL_CONFIG, "restore it from a copy, or train again"
    if not path.is_file() and trains_retriever(folder):
        raise InputError(
            f"{folder}: this run trains an encoder, not a language model; open it with"
            " lcjax.retrieval.open_encoder"
        )
    FolderSums(folder, way_out).check_small(MODEL_CONFIG, "tokenizer/")
    try:
        return config_lib.parse(ModelConfig, ["--config", str(path)], is_stored=True)
    except (StorageError, config_lib.UnknownTypeError):
        raise
    except InputError as error:
        raise InputError(f"{path} is not as a training wrote it ({error}); {way_out}") from None


def load_run(
    folder: str | Path,
    step: int | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
    param_dtype: str | None = None,
) -> tuple[dict, ModelConfig, Tokenizer]:
    """Returns parameters, config and tokenizer of the newest readable checkpoint, or of `step`.

    The parameters are the running average of the weights if the run computed one. Adapters are
    merged, so the config has none. Frozen parameters are read again from the base model and must be
    unchanged. Adapters are added in float32 and the result is rounded once, to `param_dtype`; None:
    the dtype of the base model. Of a run with `model.weights`, adapters are added to the weights
    that its codes were made from, as in its export.
    """
    from lcjax.checkpoints.load import load_tokenizer

    folder = to_path(folder)
    base = BaseModel.read(folder)
    config = run_config(folder)
    mesh = mesh if mesh is not None else make_mesh(Mesh(fsdp=1), jax.local_devices()[:1])
    trained, rest = split(abstract_params(config, mesh), set(base.trained).__contains__)
    kind = "ema" if base.average else "params"
    params = load_state(folder, {kind: _abstract_wide(trained)}, step=step)[kind]
    if rest:
        params = union(params, _frozen(folder, base, config, mesh))
    config = config.replace(param_dtype=param_dtype or config.param_dtype, weights=None)
    if config.lora is not None:
        params = lora.merge(params, config.lora, dtype=config.param_dtype)
        config = config.replace(lora=None)
    _round(params, config.param_dtype)
    return params, config, load_tokenizer(folder / "tokenizer")


def _abstract_wide(tree: dict) -> dict:
    """Returns the tree in float32, as training stores it, whatever the dtype of the base."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), tree
    )


def _frozen(folder: Path, base: BaseModel, config: ModelConfig, mesh: jax.sharding.Mesh) -> dict:
    """Returns the frozen parameters, initialised or read again as for the run, and checked."""
    from lcjax.checkpoints.build import ModelSection, init_params
    from lcjax.checkpoints.load import load

    section = ModelSection(
        path=base.path,
        base=base.base,
        seed=base.seed,
        encoder_layers=base.encoder_layers,
        memory=base.memory and MemorySection.from_dict(base.memory),
    )
    params = None
    if base.path is not None:
        params, _, _ = load(base.path, base=base.base, mesh=mesh, param_dtype=base.param_dtype)
    storage, config = config.weights, config.replace(lora=None, weights=None)
    # Random weights are initialised as codes, by the program of the run: others may round in
    # another way.
    is_random = base.path is None
    initial = config.replace(weights=storage) if is_random else config
    params = init_params(section, initial, params, mesh)
    frozen = split(params, set(base.trained).__contains__)[1]
    is_stored = storage is None or is_random
    stored = frozen if is_stored else quantise_params(dict(frozen), storage, mesh)
    check_frozen(folder, dataclasses.replace(base, frozen=weights_digest(stored)))
    if storage is not None and not has_kernels(base.path):
        wide = config.replace(param_dtype="float32")  # rounded once, after adapters are added
        return dequantise_params(stored, storage, flatten(abstract_params(wide, mesh)))
    return frozen


def has_kernels(path: str | None) -> bool:
    """Returns whether adapters on codes can be merged into the floats that the codes stand for.

    They can if each kernel can be read from `path` by itself: from a checkpoint, but not from a run
    folder or random weights (None).
    """
    return path is not None and not is_run(find_checkpoint(path))


def _round(params: dict, dtype: str) -> None:
    """Casts `params` in place, so that each leaf is freed before the next is cast.

    Learned frequencies stay in float32: half precision would ruin them.
    """
    for name, child in params.items():
        if not isinstance(child, dict):
            params[name] = child.astype(dtype)
        elif name != "rope":
            _round(child, dtype)


def check_frozen(folder: Path, base: BaseModel) -> None:
    """Raises an InputError if the base weights are not those that the run was trained from."""
    if (folder / BASE).exists() and BaseModel.read(folder).frozen != base.frozen:
        raise InputError(
            f"model.path={base.path} has other weights than when the run in {folder} began;"
            " put the old ones back, or start another run.folder"
        )
