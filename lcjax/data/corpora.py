"""The training mixtures of the papers as `data:` sections, over folders that `prepare` wrote."""

from pathlib import Path

from lcjax.data.chunks import Chunks
from lcjax.data.config import DataConfig
from lcjax.data.sources import Source, TokenSource

# Shares of RedPajama's sets in CEPE's rows across all documents (Yen et al. 2024, app. A).
REDPAJAMA = {
    "arxiv": 0.025,
    "book": 0.045,
    "c4": 0.15,
    "common_crawl": 0.67,
    "github": 0.045,
    "stackexchange": 0.02,
    "wikipedia": 0.045,
}


def cepe(folder: str = "data") -> DataConfig:
    """CEPE's rows of 4,096 + 4,096 tokens, those of `cepe_filter` and `cepe_cat` 2:1.

    Yen et al. 2024 (arXiv 2402.16617), sec. 3.1. `folder`/redpajama is RedPajama (v1), tokenised
    with its sets as labels.
    """
    return _cepe([*cepe_filter(folder).sources, *cepe_cat(folder).sources])


def cepe_filter(folder: str = "data") -> DataConfig:
    """Rows inside long documents, 4,096 apart: ArXiv and books, half each (train-filter)."""
    place = str(Path(folder, "redpajama"))
    rows = {"pack": "windows", "stride": 4096}
    return _cepe([TokenSource(place, 1.0, labels=[label], **rows) for label in ("arxiv", "book")])


def cepe_cat(folder: str = "data") -> DataConfig:
    """Rows across all documents of a set, 4,096 apart (train-cat)."""
    place = str(Path(folder, "redpajama"))
    pairs = REDPAJAMA.items()
    return _cepe([TokenSource(place, share, labels=[label], stride=4096) for label, share in pairs])


def _cepe(sources: list[Source]) -> DataConfig:
    return DataConfig(
        sources=sources,
        length=8192,
        chunks=Chunks(count=16, length=256),
        document_mask=False,
        add_bos=True,
        add_eos=True,
    )


def slimpajama_upsampled(folder: str = "data", length: int = 32768) -> DataConfig:
    """SlimPajama, up-sampled by length when it was tokenised, in rows cut anywhere.

    Fu et al. 2024 (arXiv 2402.10171), sec. 3, as the LCEG study has it (Lu et al. 2024, arXiv
    2409.12181): BOS before every document, no EOS, no document mask.
    """
    source = TokenSource(str(Path(folder, "slimpajama_upsampled")), rows=True)
    return DataConfig(
        sources=[source], length=length, document_mask=False, add_bos=True, add_eos=False
    )
