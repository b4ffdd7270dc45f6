"""Retrieval: searches a datastore of passages by words or by vectors, and trains encoders."""

from lcjax.retrieval.build_store import BuildConfig, build, read_documents
from lcjax.retrieval.chunks import ChunksConfig, WindowsConfig, write_chunks, write_windows
from lcjax.retrieval.datastore import Datastore, EncoderSection
from lcjax.retrieval.encoder import (
    BertEncoder,
    DecoderEncoder,
    Encoder,
    StaticEncoder,
    open_encoder,
)
from lcjax.retrieval.end_to_end import LSR, Marginal
from lcjax.retrieval.faiss_index import FaissIndex, RefinedIndex, recall
from lcjax.retrieval.knn_lm import KnnLM, TokenConfig, TokenStore, build_tokens
from lcjax.retrieval.passages import Chunking, Document, Passage
from lcjax.retrieval.questions import QuestionKind, QuestionsConfig, write_questions
from lcjax.retrieval.rerankers import CrossEncoder, LateInteraction
from lcjax.retrieval.retriever import Hit, Reranker, Retriever, check
from lcjax.retrieval.search import ExactIndex, top_k
from lcjax.retrieval.sparse import Sparse, SparseIndex
from lcjax.retrieval.training import Contrastive

__all__ = [
    "BertEncoder",
    "BuildConfig",
    "Chunking",
    "ChunksConfig",
    "Contrastive",
    "CrossEncoder",
    "Datastore",
    "DecoderEncoder",
    "Document",
    "Encoder",
    "EncoderSection",
    "ExactIndex",
    "FaissIndex",
    "Hit",
    "KnnLM",
    "LSR",
    "LateInteraction",
    "Marginal",
    "Passage",
    "RefinedIndex",
    "Reranker",
    "QuestionKind",
    "QuestionsConfig",
    "Retriever",
    "Sparse",
    "SparseIndex",
    "StaticEncoder",
    "TokenConfig",
    "TokenStore",
    "WindowsConfig",
    "build",
    "build_tokens",
    "check",
    "open_encoder",
    "read_documents",
    "recall",
    "top_k",
    "write_chunks",
    "write_questions",
    "write_windows",
]
