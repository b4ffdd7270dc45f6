"""Attention patterns in `config.json`, as keys beside those of a model with full attention.

Landmark attention and Dual Chunk Attention have the keys of their released models. Patterns with
parameters of their own, which no released code reads, are one key.
"""

import dataclasses
import warnings
from typing import Any

import draccus

from lcjax.attention import Causal, DualChunk, Landmark, Pattern
from lcjax.config.decode import section as decode_section
from lcjax.errors import InputError
from lcjax.models.model_config import ModelConfig

RELEASED = (DualChunk, Landmark)  # patterns with keys of released models
_LANDMARK = "llama_with_landmark"  # the model type of Mohtashami & Jaggi 2023 and LCEG
_TOP_K = 5  # blocks that both codes retrieve in evaluation; no config states it
_LANDMARK_FIELDS = "lcjax_landmark"  # fields that the keys of the released code do not describe
_DUAL_CHUNK = "dual_chunk_attention_config"  # of Qwen2.5-1M; transformers ignores it, vLLM reads it
_DUAL_CHUNK_TYPES = ("qwen2", "qwen3")  # model types whose vLLM classes read it
_PATTERN = "lcjax_pattern"  # a pattern with parameters of its own


def plain_model(hf: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the `config.json` of the model with full attention; None if there is no pattern."""
    if hf.get("model_type") == _LANDMARK:
        return hf | {"model_type": "llama"}
    if hf.get(_PATTERN) is not None:
        return hf | {_PATTERN: None}
    if hf.get("model_type") in _DUAL_CHUNK_TYPES and hf.get(_DUAL_CHUNK):
        return hf | {_DUAL_CHUNK: None}
    return None


def read(hf: dict[str, Any], config: ModelConfig, where: str) -> Pattern:
    """Returns the pattern of a `config.json` for which `plain_model` is not None.

    Args:
      hf: the contents of the file.
      config: the model with full attention.
      where: name of the file, for error messages.
    """
    if hf.get("model_type") == _LANDMARK:
        return _landmark(hf, config.vocab_size, where)
    if hf.get(_PATTERN) is not None:
        return _with_parameters(hf[_PATTERN], where)
    return _dual_chunk(hf[_DUAL_CHUNK], config, where)


def is_beside_model(config: ModelConfig) -> bool:
    """Returns whether the pattern of a model is written as keys beside those of full attention."""
    pattern = config.pattern
    is_new = bool(pattern.parameters) and config.patterns == (pattern,)
    return isinstance(pattern, RELEASED) or is_new


def write(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """Returns the keys of a pattern for which `is_beside_model` is true.

    Args:
      config: the model with the pattern.
      model_type: that of the model with full attention.

    Raises:
      InputError: no released code has the pattern in such a model.
    """
    pattern = config.pattern
    if isinstance(pattern, DualChunk):
        return _dual_chunk_keys(config, model_type)
    if not isinstance(pattern, Landmark):
        return {_PATTERN: draccus.encode(pattern, Pattern)}
    keys = _landmark_keys(pattern)
    if model_type != "llama":
        raise InputError(
            f"there is no Landmark checkpoint of model_type={model_type!r}, only of llama; keep the"
            " run folder instead"
        )
    return keys


def _landmark(hf: dict[str, Any], vocab_size: int, where: str) -> Landmark:
    """Returns the pattern of Landmark's keys; absent ones default as in the released config class.

    Raises:
      InputError: `mem_id` is absent (no token is the landmark by default), or a key is invalid.
    """
    token = hf.get("mem_id")
    if type(token) is not int or not 0 <= token < vocab_size:
        raise InputError(
            f"{where}: mem_id={token!r} must be the id of the landmark token, below "
            f"vocab_size={vocab_size}; the released models have 32001"
        )
    fields, extra = _released_landmark(hf), hf.get(_LANDMARK_FIELDS) or {}
    if "top_k" not in extra and fields["top_k"] < 1:
        raise InputError(
            f"{where}: train_context_length={fields['train_length']} must hold 3 blocks of "
            f"mem_freq + 1 = {fields['block']} tokens, one of them retrieved"
        )
    try:
        return Landmark(**fields | extra)
    except TypeError:
        raise InputError(
            f"{where}: {_LANDMARK_FIELDS}={extra!r:.200} is not as this version writes it; copy"
            " config.json again from where the model was saved"
        ) from None


def _released_landmark(hf: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of the pattern that the released code computes from these keys."""
    block, length = hf.get("mem_freq", 50) + 1, hf.get("train_context_length", 512)
    return {
        "block": block,
        "top_k": min(_TOP_K, length // block - 2),
        "train_length": length,
        "token": hf["mem_id"],
        "loss": "predict" if hf.get("include_landmark_in_loss", True) else "skip",
    }


def _landmark_keys(pattern: Landmark) -> dict[str, Any]:
    """Returns the keys of `config.json` that are not Llama's.

    They are the keys of the released code, and one of lcjax if that code would compute another
    pattern from them.
    """
    if pattern.token is None:
        raise InputError("model.pattern.token is not set: a checkpoint names its landmark token")
    hf = {
        "model_type": _LANDMARK,
        "mem_id": pattern.token,
        "mem_freq": pattern.block - 1,
        "train_context_length": pattern.train_length,
        "include_landmark_in_loss": pattern.loss == "predict",
    }
    fields = {field.name: field.default for field in dataclasses.fields(Landmark)}
    read = fields | _released_landmark(hf)
    written = {name: getattr(pattern, name) for name in fields}
    extra = {name: value for name, value in written.items() if value != read[name]}
    return hf | ({_LANDMARK_FIELDS: extra} if extra else {})


def _dual_chunk(section: Any, config: ModelConfig, where: str) -> DualChunk:
    """Returns the pattern of `dual_chunk_attention_config`; absent keys default as in vLLM."""
    if not isinstance(section, dict) or config.patterns != (Causal(),):
        raise InputError(
            f"{where}: {_DUAL_CHUNK}={section!r:.60} must be an object, in a model whose layers all"
            " see the whole text; remove it for full attention"
        )
    if section.get("sparse_attention_config") and section.get("sparse_attention_enabled", True):
        warnings.warn(
            f"{where}: {_DUAL_CHUNK}.sparse_attention_config is left out: lcjax computes all of the"
            " attention that vLLM approximates with it",
            stacklevel=3,
        )
    return DualChunk(
        chunk=section.get("chunk_size", 8192),
        local=section.get("local_size", 1024),
        train_length=section.get("original_max_position_embeddings") or None,
        growth="linear",
    )


def _dual_chunk_keys(config: ModelConfig, model_type: str) -> dict[str, Any]:
    pattern = config.pattern
    known = model_type in _DUAL_CHUNK_TYPES and pattern.growth == "linear"
    if not known or config.patterns != (pattern,):
        raise InputError(
            f"transformers has no {model_type} model with model.pattern={pattern}; vLLM"
            f" has it for all layers, with growth=linear, in {' and '.join(_DUAL_CHUNK_TYPES)};"
            " keep the run folder instead"
        )
    sizes = {"chunk_size": pattern.chunk, "local_size": pattern.local}
    sizes["original_max_position_embeddings"] = pattern.train_length or 0
    return {_DUAL_CHUNK: sizes}


def _with_parameters(section: Any, where: str) -> Pattern:
    """Returns a pattern with parameters of its own, as `write` writes it."""
    try:
        return decode_section(Pattern, section, _PATTERN)
    except InputError as error:
        raise InputError(f"{where}: {error}; restore the file, or remove the key") from None
