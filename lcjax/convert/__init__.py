"""Checkpoints in and out, without torch: Hugging Face folders, GGUF files, tokenizers."""

from lcjax.convert.load import load
from lcjax.convert.tokenizer import TextStream, Tokenizer

__all__ = ["TextStream", "Tokenizer", "load"]
