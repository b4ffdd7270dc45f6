"""Checkpoints of Landmark attention: a Llama folder whose config.json says more.

The released models (Mohtashami & Jaggi 2023; LCEG) keep Llama's tensors. Their vocabulary has two
more tokens, [PAD] and <landmark>, whose rows began as the mean of the others.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lcjax.attention import Causal
from lcjax.attention.landmark.pattern import Landmark
from lcjax.attention.landmark.tokens import Landmarks
from lcjax.checkpoints import hf_config
from lcjax.checkpoints.tokenizer import Tokenizer, write_json
from lcjax.checkpoints.tokenizer_hf import hf_tokenizer, read_json
from lcjax.errors import InputError, whole_number
from lcjax.models.config import ModelConfig
from lcjax.parallel.offload import fetched
from lcjax.parallel.sharding import param_shardings

MODEL_TYPE = "llama_with_landmark"
NAMES = ("[PAD]", "<landmark>")  # of the two more tokens
_TOP_K = 5  # blocks that both codes retrieve when they evaluate; no config names it


def config_from_hf(hf: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """As `lcjax.checkpoints.hf_config.config_from_hf`, which reads every other model type."""
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
        whole_number(f"{where}: {key}", value, 1)
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
    """As `lcjax.checkpoints.hf_config.config_to_hf`; what the released code reads beside it."""
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


def with_landmark(
    params: dict, config: ModelConfig, tokenizer: Tokenizer, mesh: jax.sharding.Mesh | None = None
) -> tuple[dict, ModelConfig, Tokenizer]:
    """What a model with the pattern landmark needs to begin: a row and a name of its token.

    Nothing changes where the model has a row for `pattern.token`. Else this has to be the second
    token after the vocabulary, as in the released models: [PAD] comes before it.
    """
    landmarks = Landmarks.read_by(config.pattern)
    rows = config.vocab_size
    if landmarks is None or landmarks.token < rows:
        return params, config, tokenizer
    if landmarks.token != rows + 1 or tokenizer.vocab_size != rows:
        raise InputError(
            f"model.pattern.token={landmarks.token} is beyond the {rows} rows of the model and the "
            f"{tokenizer.vocab_size} ids of its tokenizer; give {rows + 1}, before which [PAD] is "
            "added, if both are as many, else an unused id of the vocabulary"
        )
    few = fetched({name: params[name] for name in ("embed", "head") if name in params})

    def grow(few):
        return with_new_tokens(few, config)[0]

    # On the mesh at once: eager sums over the vocabulary would gather it on every device.
    layout = None if mesh is None else param_shardings(mesh, jax.eval_shape(grow, few))
    few = jax.jit(grow, out_shardings=layout)(few)
    named = with_names(tokenizer, NAMES)
    return params | few, config.replace(vocab_size=rows + len(NAMES)), named


def with_names(tokenizer: Tokenizer, names: Sequence[str]) -> Tokenizer:
    """The tokenizer with special tokens after its vocabulary; the first one pads if none did."""
    first = tokenizer.vocab_size
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    flags |= {"special": True}
    new = {first + i: {"content": name} | flags for i, name in enumerate(names)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save(folder)
        if (folder / "tokenizer.json").is_file():
            values = read_json(folder / "tokenizer.json")
            listed = values.get("added_tokens") or []
            more = [{"id": index} | token for index, token in new.items()]
            write_json(folder / "tokenizer.json", values | {"added_tokens": listed + more})
        settings = read_json(folder / "tokenizer_config.json")
        listed = settings.get("added_tokens_decoder") or {}
        listed |= {str(index): token for index, token in new.items()}
        write_json(folder / "tokenizer_config.json", settings | {"added_tokens_decoder": listed})
        pad = first if tokenizer.pad_id is None else tokenizer.pad_id
        ids = {"bos": tokenizer.bos_id, "eos": list(tokenizer.eos_ids), "pad": pad}
        ids = {f"{key}_token_id": value for key, value in ids.items()}
        write_json(folder / "generation_config.json", ids)
        return hf_tokenizer(folder)


def _extended(x: jax.Array, axis: int, count: int) -> jax.Array:
    mean = x.astype(jnp.float32).mean(axis, keepdims=True).astype(x.dtype)
    return jnp.concatenate([x, jnp.repeat(mean, count, axis)], axis)
