"""Where a model comes from: the `model:` section of a config, and the decoder that it names.

Training and evaluation read this part alone; text is read and written in `lcjax.generation`.
"""

import dataclasses
from typing import Any, TypedDict

import jax

from lcjax import checkpoints
from lcjax.attention import Pattern
from lcjax.checkpoints import ByteTokenizer, Tokenizer, check_vocabulary
from lcjax.config import check_instance
from lcjax.errors import InputError, random_seed
from lcjax.memory import Memory, MemorySection
from lcjax.models import PRESETS, Decoder, ModelConfig, preset, unstack_layers
from lcjax.models.config import check_choice
from lcjax.models.decoder import random_params, with_learned_rope
from lcjax.models.encoder import encoder_config, encoder_params
from lcjax.rope import Rope


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """The `model:` section: where the weights come from, and the method on top of them."""

    path: str | None = None  # HF folder, .gguf, run folder, hub id, or smollm2-135m-instruct
    base: str | None = None  # where path holds adapters: what they go on; null: what they name
    preset: str | None = None  # instead of path: an architecture with random weights
    rope: Rope | None = None  # position method; null: the checkpoint's own
    pattern: Pattern | None = None  # attention pattern; null: the checkpoint's own
    memory: MemorySection | None = None  # a context beside the window; null: the checkpoint's own
    # An encoder for a memory out of the first so many layers of path, to be trained with
    # data.masking; null: the model as it is.
    encoder_layers: int | None = None
    # With a preset, instead of rotations: alibi, t5, sinusoidal or learned.
    position: str | None = None
    dtype: str | None = None  # of activations; null: bfloat16 on accelerators, float32 on CPU
    param_dtype: str | None = None  # of weights; null: the checkpoint's own
    # What a training step computes again instead of keeping it: none, full (all but the inputs of
    # layers), attention (as full, but not attention) or dots (all but the results of products and
    # attention: nearly free).
    remat: str = "dots"
    context_parallel: str = "ring"  # attention over mesh.context: ring, or all_to_all over heads
    tokenizer: str | None = None  # path of another tokenizer; null: the checkpoint's own
    seed: int = 0  # of random weights, and of what a learned rope adds to a checkpoint

    def __post_init__(self):
        for field, base in (("rope", Rope), ("pattern", Pattern), ("memory", MemorySection)):
            check_instance(f"model.{field}", getattr(self, field), base)
        if self.path is not None and self.preset is not None:
            raise InputError(
                f"model.path={self.path!r} and model.preset={self.preset!r}: give only one"
            )
        if self.base is not None and self.path is None:
            raise InputError(f"model.base={self.base!r}: give the adapters' folder as model.path")
        if self.encoder_layers is not None and (self.path is None or self.memory is not None):
            raise InputError(
                f"model.encoder_layers={self.encoder_layers} makes an encoder of the checkpoint"
                " model.path, without a memory of its own; set one, leave model.memory out"
            )
        random_seed("model.seed", self.seed)
        # Here and not only in ModelConfig: a checkpoint takes minutes to read.
        for field in ("dtype", "param_dtype", "remat", "context_parallel"):
            value = getattr(self, field)
            if value is not None or field in ("remat", "context_parallel"):
                check_choice(field, value)


class Settings(TypedDict, total=False):
    """The fields of `ModelSection` as keywords, for editors."""

    path: str | None
    base: str | None
    preset: str | None
    rope: Rope | None
    pattern: Pattern | None
    memory: MemorySection | None
    encoder_layers: int | None
    position: str | None
    dtype: str | None
    param_dtype: str | None
    remat: str
    context_parallel: str
    tokenizer: str | None
    seed: int


def resolve(section: ModelSection, config: ModelConfig) -> ModelConfig:
    """`config` with the method and the numerics of `section`."""
    if section.encoder_layers is not None:
        config = encoder_config(config, section.encoder_layers)
    changes: dict[str, Any] = {
        "remat": section.remat, "context_parallel": section.context_parallel
    }  # fmt: skip
    if section.rope is not None:
        changes["rope"] = resolve_rope(section.rope, config)
    if section.pattern is not None:
        changes["pattern"] = section.pattern
    if section.position is not None:
        if section.path is not None and section.position != config.position:
            raise InputError(
                f"model.position={section.position}: the weights of {section.path} were trained"
                f" with position={config.position}; leave it out, or train others (model.preset)"
            )
        changes["position"] = section.position
    if section.param_dtype is not None:
        changes["param_dtype"] = section.param_dtype
    on_cpu = jax.default_backend() == "cpu"
    changes["dtype"] = section.dtype or ("float32" if on_cpu else "bfloat16")
    if section.memory is not None:
        changes["memory"] = _memory(section.memory, config)
    return config.replace(**changes)


def _memory(section: MemorySection, config: ModelConfig) -> Memory:
    """What a decoder's config gets with this section."""
    if config.memory is not None:
        raise InputError(
            "model.memory: this checkpoint has a memory already; leave the section out"
        )
    name = section.encoder
    if name is None or name in PRESETS:
        return section.memory(config, name and preset(name))
    return section.memory(config, checkpoints.load_config(checkpoints.resolve(name, weights=False)))


def resolve_rope(rope: Rope, config: ModelConfig) -> Rope:
    """Fills what `rope` leaves open with the base and the trained length of the checkpoint."""
    length = getattr(config.rope, "original_length", None) or config.max_length
    return rope.resolve(theta=config.rope.theta, length=length)


def untrained_rope(rope: Rope, config: ModelConfig, params: dict) -> Rope:
    """`resolve_rope` for weights that are used as they are.

    Raises:
      InputError: `rope` is learned, and `params` have no arrays of it.
    """
    if rope.learned and "rope" not in params:
        raise InputError(
            f"rope type {rope.type} is learned, and this checkpoint has no weights for it; train"
            " it first, or load a checkpoint that has them"
        )
    return resolve_rope(rope, config)


def check_source(section: ModelSection) -> None:
    """Refuses a section that names no model, or one that is not there; reads no weights."""
    if section.path is None and section.preset is None:
        raise InputError(
            "model.path=null: give a checkpoint (an HF folder, a .gguf file, a hub id, or"
            " smollm2-135m-instruct), or model.preset for random weights"
        )
    if section.preset is not None:
        preset(section.preset)
    for key in ("path", "base", "tokenizer"):
        if (name := getattr(section, key)) is not None:
            _check_there(f"model.{key}", name)
    encoder = section.memory and section.memory.encoder
    if encoder is not None and encoder not in PRESETS:
        _check_there("model.memory.encoder", encoder)


def _check_there(key: str, name: str) -> None:
    try:
        checkpoints.resolve(name, weights=False)
    except InputError as error:
        raise InputError(f"{key}={error}") from None


def build(
    section: ModelSection, mesh: jax.sharding.Mesh | None = None, *, host: bool = False
) -> tuple[Decoder, dict, Tokenizer]:
    """The decoder, its parameters and the tokenizer of a `model:` section, on `mesh` if given.

    With `host` the weights of a checkpoint go into the memory of the mesh's hosts, if they need
    nothing done to them before.
    """
    check_source(section)
    if section.path is not None:
        params, config, tokenizer = checkpoints.load(
            section.path,
            base=section.base,
            mesh=mesh,
            param_dtype=section.param_dtype,
            host=host and section.memory is None and section.encoder_layers is None,
        )
        config = resolve(section, config)
        if section.encoder_layers is not None:
            params = encoder_params(params, config, mesh)
        params = with_learned_rope(params, config, section.seed)
    else:
        config = resolve(section, preset(section.preset))
        plain = config.replace(memory=None)
        params, tokenizer = random_params(plain, section.seed, mesh), ByteTokenizer()
    if section.memory is not None:
        params = add_memory(params, config, section.memory, section.seed, mesh)
    if section.tokenizer is not None:
        tokenizer = checkpoints.load_tokenizer(section.tokenizer)
        check_vocabulary(tokenizer, config.vocab_size, f"model.tokenizer={section.tokenizer}")
    return Decoder(config, mesh), params, tokenizer


def add_memory(
    params: dict,
    config: ModelConfig,
    section: MemorySection,
    seed: int,
    mesh: jax.sharding.Mesh | None = None,
) -> dict:
    """Returns `params` with the initial weights of the memory that `resolve` gave `config`.

    Args:
      params: of the decoder.
      config: of the decoder, its memory included.
      section: the `model.memory` section.
      seed: of the model; random weights of an encoder have the next one.
      mesh: the devices of the new weights.
    """
    if not config.stacked and "layers" in params:
        params = unstack_layers(params, config)
    encoder = None
    if section.encoder in PRESETS:
        encoder_config = config.memory.encoder_config.replace(param_dtype=config.param_dtype)
        encoder = random_params(encoder_config, seed + 1, mesh)
    elif section.encoder is not None:
        encoder, _, _ = checkpoints.load(section.encoder, mesh=mesh, param_dtype=config.param_dtype)
    return section.init_params(params, config, encoder, mesh)
