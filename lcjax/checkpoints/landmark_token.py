"""Adds the landmark token to a model: a row of its tables and a name in its tokenizer.

The vocabulary of the released models (Mohtashami & Jaggi 2023; LCEG) has two more tokens than
Llama's, [PAD] and <landmark>, whose rows were initialised with the mean of the others.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from lcjax.checkpoints.tokenizer import GENERATION, Tokenizer, generation_config
from lcjax.checkpoints.tokenizer_files import hf_tokenizer
from lcjax.errors import InputError
from lcjax.files import read_json, write_hf_json
from lcjax.models.model_config import ModelConfig
from lcjax.parallel.device_memory import to_device
from lcjax.parallel.sharding import param_shardings

NAMES = ("[PAD]", "<landmark>")  # the two added tokens


def with_new_tokens(params: dict, config: ModelConfig) -> tuple[dict, ModelConfig]:
    """Adds the two tokens to parameters and config; their rows are the mean of all others."""
    count = len(NAMES)
    if config.layer_embedding is not None:
        raise InputError(
            "model.pattern.type=landmark adds tokens, which the embeddings of each layer of this"
            " model (layer_embedding) have no rows for; take another pattern"
        )
    params = params | {"embed": {"embedding": _extended(params["embed"]["embedding"], 0, count)}}
    if not config.tie_embeddings:
        axes = {"kernel": 1, "bias": 0}
        head = {name: _extended(x, axes[name], count) for name, x in params["head"].items()}
        params["head"] = head
    return params, config.replace(vocab_size=config.vocab_size + count)


def with_landmark(
    params: dict, config: ModelConfig, tokenizer: Tokenizer, mesh: jax.sharding.Mesh | None = None
) -> tuple[dict, ModelConfig, Tokenizer]:
    """Adds the landmark token to a model with the pattern landmark if it has no row for it.

    `pattern.token` must then be the second id after the vocabulary, as in the released models; the
    first one is [PAD]. Other models are returned unchanged.
    """
    landmarks = config.pattern.inserted_tokens
    rows = config.vocab_size
    if landmarks is None or landmarks.token < rows:
        return params, config, tokenizer
    if landmarks.token != rows + 1 or tokenizer.vocab_size != rows:
        raise InputError(
            f"model.pattern.token={landmarks.token} exceeds the model's {rows} embedding rows (its "
            f"tokenizer has {tokenizer.vocab_size} ids); use {rows + 1} if both numbers are equal "
            "([PAD] and the landmark token are then added), otherwise an unused id"
        )
    tables = to_device({name: params[name] for name in ("embed", "head") if name in params})

    def grow(tables):
        return with_new_tokens(tables, config)[0]

    # Jitted with output shardings: eager means over the vocabulary would gather it on each device.
    shardings = None if mesh is None else param_shardings(mesh, jax.eval_shape(grow, tables))
    tables = jax.jit(grow, out_shardings=shardings)(tables)
    tokenizer = with_names(tokenizer, NAMES)
    return params | tables, config.replace(vocab_size=rows + len(NAMES)), tokenizer


def with_names(tokenizer: Tokenizer, names: Sequence[str]) -> Tokenizer:
    """Adds special tokens after the vocabulary; the first pads if there is no padding token yet."""
    first = tokenizer.vocab_size
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    flags |= {"special": True}
    new = {first + i: {"content": name} | flags for i, name in enumerate(names)}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tokenizer.save(folder)
        file = folder / "tokenizer.json"
        if file.is_file():
            values = read_json(file)
            tokens = values.get("added_tokens") or []
            tokens += [{"id": index} | token for index, token in new.items()]
            write_hf_json(file, values | {"added_tokens": tokens})
        file = folder / "tokenizer_config.json"
        settings = read_json(file)
        decoder = settings.get("added_tokens_decoder") or {}
        decoder |= {str(index): token for index, token in new.items()}
        write_hf_json(file, settings | {"added_tokens_decoder": decoder})
        pad = first if tokenizer.pad_id is None else tokenizer.pad_id
        ids = {"bos": tokenizer.bos_id, "eos": list(tokenizer.eos_ids), "pad": pad}
        ids = {f"{key}_token_id": value for key, value in ids.items()}
        write_hf_json(folder / GENERATION, generation_config(tokenizer) | ids)
        return hf_tokenizer(folder)


def _extended(x: jax.Array, axis: int, count: int) -> jax.Array:
    mean = x.astype(jnp.float32).mean(axis, keepdims=True).astype(x.dtype)
    return jnp.concatenate([x, jnp.repeat(mean, count, axis)], axis)
