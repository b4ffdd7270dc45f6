"""Checkpoints of CEPE: a Llama folder with an encoder inside, and the encoder's own folder.

Published as hyen/CEPE-LLaMA-2-7B, hyen/CEPED-LLaMA-2-Chat-7B (class LlamaForCausalContextLM) and
hyen/LLaMA-MLM-Large (LlamaForMLM); names and fields are those of the released code
(princeton-nlp/CEPE).
"""

from typing import Any

from lcjax.attention import Bidirectional, Causal
from lcjax.checkpoints import hf_config
from lcjax.errors import InputError
from lcjax.memory import Cepe
from lcjax.models.config import ModelConfig

DECODER, ENCODER = "LlamaForCausalContextLM", "LlamaForMLM"


def config_from_hf(hf: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """As `lcjax.checkpoints.hf_config.config_from_hf`, which reads all other checkpoints."""
    if ENCODER in (hf.get("architectures") or ()):
        return _encoder_from_hf(hf, where)
    if not hf.get("do_cross_attention"):
        return hf_config.config_from_hf(hf, where)
    config = hf_config.config_from_hf(hf, where)
    inner = hf.get("encoder_config")
    if not isinstance(inner, dict):
        raise InputError(f"{where}: encoder_config={inner!r} must be the config of the encoder")
    encoder = _encoder_from_hf(inner, f"{where}: encoder_config")
    width = hf.get("encoder_hidden_size", encoder.width)
    unread = {"num_cross_attn_hidden_states": 1, "encode_mode": "context_only"}
    for key, only in unread.items():
        if hf.get(key, only) != only:
            raise InputError(f"{where}: {key}={hf[key]!r} is not supported; supported: {only}")
    if width != encoder.width:
        raise InputError(
            f"{where}: encoder_hidden_size={width}, but the encoder's hidden_size is"
            f" {encoder.width}; correct one of them"
        )
    memory = Cepe(states=encoder, layers=hf.get("num_cross_attn_layers") or config.num_layers)
    return config.replace(memory=memory)


def _encoder_from_hf(hf: dict[str, Any], where: str) -> ModelConfig:
    plain = hf | {"model_type": hf.get("model_type") or "llama", "tie_word_embeddings": True}
    config = hf_config.config_from_hf(plain, where)
    return config.replace(pattern=Bidirectional(), mlm_head=True)


def config_to_hf(config: ModelConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """As `lcjax.checkpoints.hf_config.config_to_hf`; what the released code reads beside it."""
    if config.mlm_head:
        return _encoder_to_hf(config, dtype) | {"architectures": [ENCODER]}
    if config.memory is None:
        return hf_config.config_to_hf(config, dtype=dtype)
    encoder = config.memory.states
    return hf_config.config_to_hf(config.replace(memory=None), dtype=dtype) | {
        "architectures": [DECODER],
        "is_decoder": True,
        "do_cross_attention": True,
        "num_cross_attn_layers": config.memory.layers,
        "num_cross_attn_hidden_states": 1,
        "encoder_hidden_size": encoder.width,
        "encoder_config": _encoder_to_hf(encoder, dtype),
        "encoder_is_model": True,
        "train_encoder": True,
        "encode_mode": "context_only",
        "train_batch_mode": "none",
        "offload_hidden_states": False,
        "lm_loss_cof": 1.0,
        "kl_loss_cof": 1.0,
        "kl_loss_mode": "drop",  # the released default cannot be read by the released code
    }


def _encoder_to_hf(config: ModelConfig, dtype: str | None) -> dict[str, Any]:
    plain = config.replace(pattern=Causal(), mlm_head=False)
    return hf_config.config_to_hf(plain, dtype=dtype) | {"is_decoder": False, "pad_token_id": 0}
