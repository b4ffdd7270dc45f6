"""Retrieval: passages of a datastore, found by words or by vectors, for models that read them."""

from lcjax.retrieval.build_store import BuildConfig, build, finish, read_documents
from lcjax.retrieval.datastore import Datastore, EncoderSection
from lcjax.retrieval.passages import Chunking, Document, Passage
from lcjax.retrieval.retriever import Hit, Reranker, Retriever, check
from lcjax.retrieval.search import ExactIndex, FaissIndex, recall, top_k
from lcjax.retrieval.sparse import Sparse, SparseIndex

__all__ = [
    "BuildConfig",
    "Chunking",
    "Datastore",
    "Document",
    "EncoderSection",
    "ExactIndex",
    "FaissIndex",
    "Hit",
    "Passage",
    "Reranker",
    "Retriever",
    "Sparse",
    "SparseIndex",
    "build",
    "check",
    "finish",
    "read_documents",
    "recall",
    "top_k",
]
