"""Retrieval: passages of a datastore, found by words or by vectors, for models that read them."""

from lcjax.retrieval.encoder import (
    BertEncoder,
    DecoderEncoder,
    Encoder,
    StaticEncoder,
    open_encoder,
)
from lcjax.retrieval.pairs import CrossEncoder, LateInteraction

__all__ = [
    "BertEncoder",
    "CrossEncoder",
    "DecoderEncoder",
    "Encoder",
    "LateInteraction",
    "StaticEncoder",
    "open_encoder",
]
