"""Published architectures by name, for training from random weights and for cost estimates."""

import difflib

from lcjax.attention import Bidirectional, Sliding
from lcjax.errors import InputError
from lcjax.models.config import ModelConfig
from lcjax.rope import Default, Llama3


def _llama2(width, mlp_width, layers, heads):
    return ModelConfig(32_000, width, mlp_width, layers, heads, heads, 128, 4_096)


def _encoder(vocab, width, mlp_width, layers, heads, length):
    """A bidirectional Llama for masked language modelling: a vocabulary, and [MASK] after it."""
    return ModelConfig(
        *(vocab, width, mlp_width, layers, heads, heads, width // heads, length),
        norm_epsilon=1e-6,
        tie_embeddings=True,
        mlm_head=True,
        pattern=Bidirectional(),
    )


PRESETS = {
    # A model for tests and dry runs: every part of a Llama, trained in seconds on a laptop.
    "tiny": ModelConfig(259, 64, 160, 2, 4, 2, 16, 128),
    # Llamas that learn to read code byte by byte in minutes on a laptop, for small studies.
    "llama-400k": ModelConfig(259, 96, 256, 3, 3, 3, 32, 128),
    "llama-1m": ModelConfig(259, 128, 352, 4, 4, 4, 32, 128),
    "smollm2-135m": ModelConfig(
        *(49_152, 576, 1_536, 30, 9, 3, 64, 8_192),
        tie_embeddings=True,
        rope=Default(theta=100_000.0),
    ),
    # The encoder of CEPE: Llama-2's vocabulary and [MASK] (arXiv 2402.16617, sec. 2.1).
    "cepe-encoder": _encoder(32_001, 1_024, 4_096, 24, 16, 512),
    # For SmolLM2-135M: a third of its size, two fifths of that embeddings.
    "smollm2-encoder": _encoder(49_153, 384, 1_536, 12, 6, 512),
    "tiny-encoder": _encoder(260, 32, 80, 2, 2, 64),
    "llama2-7b": _llama2(4_096, 11_008, 32, 32),
    "llama2-13b": _llama2(5_120, 13_824, 40, 40),
    "llama3.1-8b": ModelConfig(
        *(128_256, 4_096, 14_336, 32, 32, 8, 128, 131_072),
        rope=Llama3(theta=500_000.0, factor=8.0, original_length=8_192),
    ),
    "mistral-7b": ModelConfig(
        *(32_000, 4_096, 14_336, 32, 32, 8, 128, 32_768), pattern=Sliding(window=4_096)
    ),
    "phi-2": ModelConfig(
        *(51_200, 2_560, 10_240, 32, 32, 32, 80, 2_048),
        norm="layer",
        activation="gelu_tanh",
        block="parallel",
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        rotary_fraction=0.4,
    ),
}


def preset(name: str) -> ModelConfig:
    """The architecture of that name; an unknown name is an error that lists the near ones."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS) or sorted(PRESETS)
        raise InputError(f"model.preset={name!r} is not known; try {', '.join(near)}")
    return PRESETS[name]


# Checkpoints of the hub whose architecture is a preset, for whoever may not download them.
HUB = {
    "HuggingFaceTB/SmolLM2-135M": "smollm2-135m",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
    "meta-llama/Llama-2-7b-hf": "llama2-7b",
    "meta-llama/Llama-2-7b-chat-hf": "llama2-7b",
    "meta-llama/Llama-2-13b-hf": "llama2-13b",
    "meta-llama/Llama-2-13b-chat-hf": "llama2-13b",
    "meta-llama/Llama-3.1-8B": "llama3.1-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-8b",
    "microsoft/phi-2": "phi-2",
    "hyen/LLaMA-MLM-Large": "cepe-encoder",
}
