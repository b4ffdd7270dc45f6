"""Checkpoints of Landmark attention: a Llama folder whose config.json says more.

The released models (Mohtashami & Jaggi 2023; LCEG) keep Llama's tensors. Their vocabulary has two
more tokens, [PAD] and <landmark>, whose rows began as the mean of the others. Weights of the first
release are differences to the original model, enlarged in the same way.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lcjax.attention import Causal
from lcjax.attention.landmark import Landmark
from lcjax.convert import hf_config
from lcjax.errors import InputError
from lcjax.models.config import ModelConfig

MODEL_TYPE = "llama_with_landmark"
_TOP_K = 5  # blocks that are retrieved in the papers' evaluations; no config names it


def config_from_hf(hf: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """As `lcjax.convert.hf_config.config_from_hf`, which reads every other model type."""
    if hf.get("model_type") != MODEL_TYPE:
        return hf_config.config_from_hf(hf, where)
    config = hf_config.config_from_hf(hf | {"model_type": "llama"}, where)
    return config.replace(pattern=_pattern(hf, config.vocab_size, where))


def _pattern(hf: dict[str, Any], vocab_size: int, where: str) -> Landmark:
    """Absent keys have the values of the released config class; no token is the usual one."""
    token = hf.get("mem_id")
    if type(token) is not int or not 0 <= token < vocab_size:
        raise InputError(
            f"{where}: mem_id={token!r} must be the id of the landmark token, below "
            f"vocab_size={vocab_size}; the released models have 32001"
        )
    every, length = hf.get("mem_freq", 50), hf.get("train_context_length", 512)
    for key, value in (("mem_freq", every), ("train_context_length", length)):
        if type(value) is not int or value < 1:
            raise InputError(f"{where}: {key}={value!r} must be a whole number, 1 or more")
    if length // (every + 1) < 3:
        raise InputError(
            f"{where}: train_context_length={length} must hold 3 blocks of mem_freq + 1 = "
            f"{every + 1} tokens, one of them retrieved"
        )
    return Landmark(
        block=every + 1,
        top_k=min(_TOP_K, length // (every + 1) - 2),
        train_length=length,
        token=token,
        loss="predict" if hf.get("include_landmark_in_loss", True) else "skip",
    )


def config_to_hf(config: ModelConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """As `lcjax.convert.hf_config.config_to_hf`; what the released code reads beside it."""
    pattern = config.pattern
    if not isinstance(pattern, Landmark):
        return hf_config.config_to_hf(config, dtype=dtype)
    if pattern.token is None:
        raise InputError("model.pattern.token is not set: a checkpoint names its landmark token")
    plain = hf_config.config_to_hf(config.replace(pattern=Causal()), dtype=dtype)
    if plain["model_type"] != "llama":
        raise InputError(
            f"there is no Landmark checkpoint of model_type={plain['model_type']!r}, only of llama;"
            " keep the run folder instead"
        )
    return plain | {
        "model_type": MODEL_TYPE,
        "mem_id": pattern.token,
        "mem_freq": pattern.block - 1,
        "train_context_length": pattern.train_length,
        "include_landmark_in_loss": pattern.loss == "predict",
    }


def with_new_tokens(params: dict, config: ModelConfig, count: int = 2) -> tuple[dict, ModelConfig]:
    """Parameters and config with `count` more tokens, whose rows are the mean of all others."""
    embedding = params["embed"]["embedding"]
    params = params | {"embed": {"embedding": _extended(embedding, 0, count)}}
    if not config.tie_embeddings:
        axes = {"kernel": 1, "bias": 0}
        head = {name: _extended(x, axes[name], count) for name, x in params["head"].items()}
        params["head"] = head
    return params, config.replace(vocab_size=config.vocab_size + count)


def _extended(x: jax.Array, axis: int, count: int) -> jax.Array:
    mean = x.astype(jnp.float32).mean(axis, keepdims=True).astype(x.dtype)
    return jnp.concatenate([x, jnp.repeat(mean, count, axis)], axis)


def add_difference(base: dict, difference: dict) -> dict:
    """The model of a released difference: `base` is the original one with its new tokens.

    Sums are rounded once, to the dtype of `base`.
    """
    shapes = {
        name: {jax.tree_util.keystr(path): x.shape for path, x in jax.tree.leaves_with_path(tree)}
        for name, tree in (("base", base), ("difference", difference))
    }
    for key in shapes["base"].keys() | shapes["difference"].keys():
        found = [shapes[name].get(key) for name in ("base", "difference")]
        if found[0] != found[1]:
            raise InputError(
                f"{key} is {found[0]} in the original model and {found[1]} in the difference; give "
                "the model that the difference was made from, with its new tokens"
            )

    def add(x, y):
        return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)

    return jax.tree.map(add, base, difference)
