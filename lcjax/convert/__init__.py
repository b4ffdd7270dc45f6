"""Checkpoints in and out, without torch: Hugging Face folders, GGUF files, tokenizers."""

from lcjax.convert.hf_save import save_hf
from lcjax.convert.leading import config_from_hf, config_to_hf
from lcjax.convert.load import load, load_config, load_tokenizer, resolve
from lcjax.convert.tokenizer import TextStream, Tokenizer, check_vocabulary
from lcjax.convert.tokenizer_bytes import ByteTokenizer

__all__ = [
    "ByteTokenizer",
    "TextStream",
    "Tokenizer",
    "check_vocabulary",
    "config_from_hf",
    "config_to_hf",
    "load",
    "load_config",
    "load_tokenizer",
    "resolve",
    "save_hf",
]
