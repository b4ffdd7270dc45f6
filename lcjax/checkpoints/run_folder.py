"""A run folder of train.py as a model: trained parameters over their base, adapters merged.

A run notes in `base.json` what its checkpoints leave out: which parameters they hold, and where
the frozen rest came from.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from lcjax import config as config_lib
from lcjax.checkpoints.orbax_io import load_state
from lcjax.checkpoints.tokenizer import Tokenizer
from lcjax.errors import InputError
from lcjax.files import write_whole
from lcjax.memory.config import from_note
from lcjax.models import lora
from lcjax.models.config import ModelConfig
from lcjax.models.initial import abstract_params, random_params, with_learned_rope
from lcjax.parallel.offload import fetched
from lcjax.parallel.sharding import Mesh, make_mesh
from lcjax.tree import flatten, split, union

MODEL_CONFIG, BASE = "model.yaml", "base.json"


@dataclasses.dataclass(frozen=True)
class Base:
    """What `base.json` says."""

    path: str | None  # the checkpoint that the run began with; none: random weights
    param_dtype: str | None  # that it was read in; none: its own
    seed: int  # of random weights and of learned frequencies
    trained: tuple[str, ...]  # paths of the parameters in the run's checkpoints
    average: bool  # whether they hold a running average of the weights too
    frozen: str | None = None  # fingerprint of all other parameters; none: there are none
    base: str | None = None  # the checkpoint under `path`, where that holds adapters
    memory: dict | None = None  # the section model.memory, where the run added one

    @classmethod
    def read(cls, folder: Path) -> "Base":
        file = folder / BASE
        if not file.exists():
            raise InputError(f"{folder} is no run folder: it has no {BASE}")
        note = json.loads(file.read_text(encoding="utf-8"))
        try:
            return cls(**note | {"trained": tuple(note["trained"])})
        except (KeyError, TypeError):
            raise InputError(
                f"{file} is not as this version writes it: it has {', '.join(note)}; start the"
                " run's own command again, which completes it"
            ) from None

    def write(self, folder: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1)
        write_whole(folder / BASE, text + "\n")  # other processes may be reading the note


def run_config(folder: Path) -> ModelConfig:
    """Returns the config of the model that a run trains, with its adapters."""
    return config_lib.parse(ModelConfig, ["--config", str(folder / MODEL_CONFIG)])


def load_run(
    folder: str | Path,
    step: int | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
    param_dtype: str | None = None,
) -> tuple[dict, ModelConfig, Tokenizer]:
    """(parameters, config, tokenizer) of the run's newest readable checkpoint, or of `step`.

    The running average of the weights is taken where the run kept one. Adapters are merged, so the
    config has none. What was frozen is read again from the base model and must be unchanged. Sums
    are taken in float32 and rounded once, to `param_dtype`: by default the base model's.
    """
    from lcjax.checkpoints.load import load_tokenizer

    folder = Path(folder)
    base = Base.read(folder)
    config = run_config(folder)
    mesh = mesh if mesh is not None else make_mesh(Mesh(fsdp=1), jax.local_devices()[:1])
    trained, rest = split(abstract_params(config, mesh), set(base.trained).__contains__)
    kind = "ema" if base.average else "params"
    params = load_state(folder, {kind: _abstract_wide(trained)}, step=step)[kind]
    if rest:
        params = union(params, _frozen(folder, base, config, mesh))
    config = config.replace(param_dtype=param_dtype or config.param_dtype)
    if config.lora is not None:
        params = lora.merge(params, config.lora, dtype=config.param_dtype)
        config = config.replace(lora=None)
    _round(params, config.param_dtype)
    return params, config, load_tokenizer(folder / "tokenizer")


def _abstract_wide(tree: dict) -> dict:
    """Float32, as training holds what it trains, whatever the base is stored in."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), tree
    )


def _frozen(folder: Path, base: Base, config: ModelConfig, mesh: jax.sharding.Mesh) -> dict:
    """The frozen parameters, made or read again as they were for the run, and checked."""
    from lcjax.checkpoints.load import load

    if base.path is None:
        bare = config if base.memory is None else config.replace(memory=None)
        params = random_params(bare.replace(lora=None), base.seed, mesh)
    else:
        params, _, _ = load(base.path, base=base.base, mesh=mesh, param_dtype=base.param_dtype)
        params = with_learned_rope(params, config, base.seed)
    if base.memory is not None:
        from lcjax.checkpoints.memory import add_memory

        params = add_memory(params, config, from_note(base.memory), base.seed, mesh)
    frozen = split(params, set(base.trained).__contains__)[1]
    check_frozen(folder, dataclasses.replace(base, frozen=fingerprint(frozen)))
    return frozen


def _round(params: dict, dtype: str) -> None:
    """Casts `params` in place, so that each leaf is let go before the next is cast.

    All but learned frequencies, which half precision would ruin.
    """
    for name, child in params.items():
        if not isinstance(child, dict):
            params[name] = child.astype(dtype)
        elif name != "rope":
            _round(child, dtype)


def check_frozen(folder: Path, base: Base) -> None:
    """Refuses to put trained weights on another base than the one they were trained on."""
    file = folder / BASE
    if file.exists() and json.loads(file.read_text(encoding="utf-8"))["frozen"] != base.frozen:
        raise InputError(
            f"model.path={base.path} has other weights than when the run in {folder} began;"
            " put the old ones back, or start another run.folder"
        )


def fingerprint(params: dict) -> str | None:
    """A digest of the values: equal for equal weights, however they are sharded; none of nothing.

    Sums of the raw bits modulo 2^32, one per array, so that 7B weights take one pass on their
    devices and nothing is copied to the host.
    """

    @jax.jit
    def checksum(leaf):
        leaf = fetched(leaf)  # alone: the device need not have room for all that waits on its host
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
        return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)

    flat = dict(sorted(flatten(params).items()))
    if not flat:
        return None
    sums = jax.device_get(jax.tree.map(checksum, flat))
    digest = hashlib.sha256()
    for path, total in sums.items():
        digest.update(f"{path} {flat[path].shape} {flat[path].dtype} {int(total)}\n".encode())
    return digest.hexdigest()[:32]
