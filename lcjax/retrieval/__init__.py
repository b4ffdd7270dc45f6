"""Retrieval: passages of a datastore, found by words or by vectors, for models that read them."""

from lcjax.retrieval.search import ExactIndex, FaissIndex, recall, top_k

__all__ = ["ExactIndex", "FaissIndex", "recall", "top_k"]
