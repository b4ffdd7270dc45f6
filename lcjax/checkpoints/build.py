"""Builds models: the `model:` section of a config, and the decoder that it describes.

Training and evaluation build their models here; `lcjax.generation` reads and writes text.
"""

import dataclasses
from typing import Any, TypedDict

import jax

from lcjax import checkpoints
from lcjax.attention import CacheMethod, Pattern
from lcjax.checkpoints import ByteTokenizer, Tokenizer, check_vocabulary
from lcjax.config import check_choices
from lcjax.errors import InputError, PositiveInt, Seed, check_fields
from lcjax.memory import Memory, MemorySection
from lcjax.models import (
    PRESETS,
    Decoder,
    LayerKind,
    ModelConfig,
    arrange_layers,
    preset,
)
from lcjax.models.cache import check_cache
from lcjax.models.decoder import (
    missing_of_patterns,
    random_params,
    with_learned_rope,
    with_pattern_parameters,
)
from lcjax.models.encoder import encoder_config, encoder_params
from lcjax.models.model_config import ContextParallel, Dtype, PositionEncoding
from lcjax.models.remat import Remat
from lcjax.models.weight_storage import WeightStorage
from lcjax.parallel.sharding import device_mesh
from lcjax.rope import Rope


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """The `model:` section: where the weights come from, and the method on top of them."""

    path: str | None = None  # HF folder, .gguf, run folder, hub id, or smollm2-135m-instruct
    base: str | None = None  # base model of the adapters in path; null: the one that they name
    preset: str | None = None  # instead of path: an architecture with random weights
    rope: Rope | None = None  # RoPE method; null: the checkpoint's own
    pattern: Pattern | None = None  # attention pattern; null: the checkpoint's own
    # Kinds of layers, from the first layer on; the list repeats. Each entry is for `repeat` layers,
    # with its pattern and rope, or those above where it has none; null: the checkpoint's own.
    layers: tuple[LayerKind, ...] | None = None
    # Which tokens layers keep while texts are read and generated; null: all that patterns need
    cache: CacheMethod | None = None
    memory: MemorySection | None = None  # context outside the window; null: the checkpoint's own
    # Number of first layers of path that become a memory's encoder, to be trained with
    # data.masking; null: the model is unchanged.
    encoder_layers: int | None = None
    # With a preset, instead of rotations: alibi, t5, transformer_xl, deberta, sinusoidal or learned
    position: PositionEncoding | None = None
    dtype: Dtype | None = None  # of activations; null: bfloat16 on accelerators, float32 on CPU
    param_dtype: Dtype | None = None  # of weights; null: the checkpoint's own
    # Codes of 8 or 4 bits in place of the matrices of layers, which are then not trained (QLoRA):
    # int8 or nf4; null: floats
    weights: WeightStorage | None = None
    # What the backward pass recomputes instead of storing it: none, full (all but the inputs of
    # layers), attention (as full, but not attention), dots (all but the results of matrix products
    # and attention: nearly free) or offload (as attention, and host memory keeps what is not
    # recomputed). Or a place for each result that is kept: input=host,attention=device,product=host
    remat: Remat = "dots"
    # Attention over mesh.context: ring, all_to_all over heads, usp (groups of context_group devices
    # exchange heads, in a ring of groups), all_gather of keys, or auto
    context_parallel: ContextParallel = "auto"
    context_group: PositiveInt | None = None  # null: the neighbours that can share the heads
    tokenizer: str | None = None  # path of another tokenizer; null: the checkpoint's own
    seed: Seed = 0  # of random weights, and of a learned rope's new weights

    def __post_init__(self):
        check_choices("model", self)
        for kind in self.layers if isinstance(self.layers, list | tuple) else ():
            if not isinstance(kind, LayerKind):
                raise InputError(
                    f"model.layers={kind!r:.60} must hold instances of LayerKind; pass"
                    " [lcjax.models.LayerKind(repeat=5, pattern=...), lcjax.models.LayerKind()]"
                )
        check_fields("model", self)
        if self.path is not None and self.preset is not None:
            raise InputError(
                f"model.path={self.path!r} and model.preset={self.preset!r}: give only one"
            )
        for field in ("memory", "encoder_layers") if self.weights is not None else ():
            if getattr(self, field) is not None:
                raise InputError(
                    f"model.weights stores matrices that are not trained, and model.{field} adds"
                    " some to be trained; leave one of the two out"
                )
        if self.base is not None and self.path is None:
            raise InputError(f"model.base={self.base!r}: give the adapters' folder as model.path")
        if self.encoder_layers is not None and (self.path is None or self.memory is not None):
            raise InputError(
                f"model.encoder_layers={self.encoder_layers} makes an encoder of the checkpoint"
                " model.path, without a memory of its own; set one, leave model.memory out"
            )


class Settings(TypedDict, total=False):
    """The fields of `ModelSection` as keywords, for editors."""

    path: str | None
    base: str | None
    preset: str | None
    rope: Rope | None
    pattern: Pattern | None
    layers: tuple[LayerKind, ...] | None
    cache: CacheMethod | None
    memory: MemorySection | None
    encoder_layers: int | None
    position: str | None
    dtype: str | None
    param_dtype: str | None
    weights: WeightStorage | None
    remat: str
    context_parallel: str
    context_group: int | None
    tokenizer: str | None
    seed: int


def model_config(section: ModelSection, config: ModelConfig) -> ModelConfig:
    """Returns `config` with the method, dtypes and rematerialization of `section`.

    Raises:
      InputError: the method is not defined for this model, or a file of it is missing, damaged or
        made for another model.
    """
    if section.encoder_layers is not None:
        config = encoder_config(config, section.encoder_layers)
    changes: dict[str, Any] = {
        name: getattr(section, name) for name in ("remat", "context_parallel", "context_group")
    }
    if section.rope is not None:
        changes |= {"rope": resolve_rope(section.rope, config), "extended_length": None}
    if section.pattern is not None:
        changes["pattern"] = section.pattern
    if section.cache is not None:
        changes["cache"] = section.cache
    if section.layers is not None:
        kinds = tuple(
            kind if kind.rope is None
            else dataclasses.replace(kind, rope=resolve_rope(kind.rope, config))
            for kind in section.layers
        )  # fmt: skip
        changes["layers"] = kinds if section.path is None else config.kinds_with(kinds)
    if section.position is not None:
        if section.path is not None and section.position != config.position:
            raise InputError(
                f"model.position={section.position}: the weights of {section.path} were trained"
                f" with position={config.position}; leave it out, or train others (model.preset)"
            )
        changes["position"] = section.position
    if section.param_dtype is not None:
        changes["param_dtype"] = section.param_dtype
    if section.weights is not None:
        changes["weights"] = section.weights
    on_cpu = jax.default_backend() == "cpu"
    changes["dtype"] = section.dtype or ("float32" if on_cpu else "bfloat16")
    if section.memory is not None:
        changes["memory"] = _memory(section.memory, config)
    config = config.replace(**changes)
    check_cache(config)
    return config


def planned_config(section: ModelSection) -> ModelConfig | None:
    """Returns the config of the model that `build` makes; None if only loading shows it.

    Raises:
      InputError: as `model_config`.
    """
    try:
        named = section.path is None
        config = preset(section.preset) if named else checkpoints.load_config(section.path)
    except InputError:
        return None
    return model_config(section, config)


def _memory(section: MemorySection, config: ModelConfig) -> Memory:
    """Returns the memory that this section adds to a decoder with `config`."""
    if config.memory is not None:
        raise InputError(
            "model.memory: this checkpoint has a memory already; leave the section out"
        )
    name = section.encoder
    if name is None or name in PRESETS:
        return section.memory(config, name and preset(name))
    return section.memory(
        config, checkpoints.load_config(checkpoints.find_checkpoint(name, weights=False))
    )


def resolve_rope(rope: Rope, config: ModelConfig) -> Rope:
    """Fills the unset fields of `rope` with the checkpoint's RoPE base and trained length."""
    length = getattr(config.rope, "original_length", None) or config.max_length
    return rope.resolve(theta=config.rope.theta, length=length)


def untrained_rope(rope: Rope, config: ModelConfig, params: dict) -> Rope:
    """Calls `resolve_rope` for weights that will not be trained further.

    Raises:
      InputError: `rope` is learned, and `params` have no weights for it.
    """
    if rope.learned and "rope" not in params:
        raise InputError(
            f"rope type {rope.type} is learned, and this checkpoint has no weights for it; train"
            " it first, or load a checkpoint that has them"
        )
    return resolve_rope(rope, config)


def check_trained(config: ModelConfig, params: dict) -> None:
    """Raises an InputError if `params` lack parameters of the patterns of `config`."""
    if missing := sorted(missing_of_patterns(params, config)):
        kinds = (type(x) for x in config.patterns if x.parameters)
        names = " and ".join(dict.fromkeys(map(Pattern.get_choice_name, kinds)))
        raise InputError(
            f"model.pattern.type={names} has parameters of its own, and these weights lack"
            f" {missing[0]}; train them first (train.trainable=[pattern]), or load a checkpoint"
            " that has them, without another model.pattern"
        )


def check_source(section: ModelSection, key: str = "model") -> None:
    """Raises an InputError if a section names no model, or a missing one; reads no weights.

    `key` is the place of the section in the config, for error messages.
    """
    if section.path is None and section.preset is None:
        raise InputError(
            f"{key}.path=null: give a checkpoint (an HF folder, a .gguf file, a hub id, or"
            f" smollm2-135m-instruct), or {key}.preset for random weights"
        )
    if section.preset is not None:
        preset(section.preset)
    for field in ("path", "base", "tokenizer"):
        if (name := getattr(section, field)) is not None:
            _check_there(f"{key}.{field}", name)
    encoder = section.memory and section.memory.encoder
    if encoder is not None and encoder not in PRESETS:
        _check_there(f"{key}.memory.encoder", encoder)


def _check_there(key: str, name: str) -> None:
    try:
        checkpoints.find_checkpoint(name, weights=False)
    except InputError as error:
        raise InputError(f"{key}={error}") from None


def build(
    section: ModelSection,
    mesh: jax.sharding.Mesh | None = None,
    *,
    host: bool = False,
    scan_layers: bool = True,
) -> tuple[Decoder, dict, Tokenizer]:
    """Returns the decoder, its parameters and the tokenizer of a `model:` section.

    Args:
      section: the `model:` section.
      mesh: the devices that share the parameters; None: the default device.
      host: whether the weights of a checkpoint are placed in the memory of the mesh's hosts.
        Ignored for sections that change the weights: a memory, an encoder or kinds of layers.
      scan_layers: whether the model stacks and scans its layers; False for inference.
    """
    check_source(section)
    planned_config(section)  # raises errors of the method before weights are read
    mesh = device_mesh(mesh)
    if section.path is not None:
        params, config, tokenizer = checkpoints.load(
            section.path,
            base=section.base,
            mesh=mesh,
            param_dtype=section.param_dtype,
            weights=section.weights,
            host=host and section.memory is section.encoder_layers is section.layers is None,
            # Memories and encoders are initialised from stacked layers.
            scan_layers=scan_layers or not (section.memory is section.encoder_layers is None),
        )
        config = model_config(section, config)
        if not scan_layers:  # nothing will train them
            check_trained(config, params)
    else:
        config = model_config(section, preset(section.preset))
        params, tokenizer = None, ByteTokenizer()
    params = init_params(section, config, params, mesh)
    if config.scan_layers and not scan_layers:
        config = config.replace(scan_layers=False)
        params = arrange_layers(params, config)
    if section.tokenizer is not None:
        tokenizer = checkpoints.load_tokenizer(section.tokenizer)
        check_vocabulary(tokenizer, config.vocab_size, f"model.tokenizer={section.tokenizer}")
    return Decoder(config, mesh), params, tokenizer


def init_params(
    section: ModelSection,
    config: ModelConfig,
    params: dict | None,
    mesh: jax.sharding.Mesh | None = None,
) -> dict:
    """Returns the initial parameters of a section's model, on `mesh` if given.

    Args:
      section: the `model:` section. Its seed is used for random weights, and seed + 1 for random
        weights of a memory's encoder.
      config: the config of the model, as `model_config` returns it.
      params: the parameters of the checkpoint `section.path`, to which the caller keeps no other
        reference; None: random weights.
      mesh: the devices.
    """
    if params is None:
        params = random_params(config.replace(memory=None), section.seed, mesh)
    elif section.encoder_layers is not None:
        params = encoder_params(params, config, mesh)
    params = arrange_layers(with_learned_rope(params, config, section.seed), config)
    params = with_pattern_parameters(params, config, section.seed, mesh)
    return params if section.memory is None else _add_memory(section, config, params, mesh)


def _add_memory(
    section: ModelSection, config: ModelConfig, params: dict, mesh: jax.sharding.Mesh | None
) -> dict:
    """Returns `params` with the initial weights of the memory."""
    name = section.memory.encoder
    encoder = None
    if name in PRESETS:
        encoder_config = config.memory.encoder_config.replace(param_dtype=config.param_dtype)
        encoder = random_params(encoder_config, section.seed + 1, mesh)
    elif name is not None:
        encoder, _, _ = checkpoints.load(name, mesh=mesh, param_dtype=config.param_dtype)
    return section.memory.init_params(params, config, encoder, mesh)
