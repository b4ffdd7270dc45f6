"""Reads and writes checkpoints without torch: Hugging Face folders, GGUF files, tokenizers."""

from lcjax.checkpoints.hf_save import config_to_hf, save_hf
from lcjax.checkpoints.hub import find_checkpoint
from lcjax.checkpoints.load import config_from_hf, load, load_config, load_tokenizer
from lcjax.checkpoints.tokenizer import ByteTokenizer, TextStream, Tokenizer, check_vocabulary

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
    "find_checkpoint",
    "save_hf",
]
