"""From documents to rows: tokenise, shuffle, repeat, pack and mix, all of it grain's but the map.

A row travels as one array `pair` [T, 2], each token beside its target, so that a packer moves both
together and the target of a token never depends on where a row was cut.
"""

import itertools

import grain
import numpy as np

from lcjax.data.config import DataConfig
from lcjax.data.corpus import Corpus
from lcjax.data.opening import Documents
from lcjax.errors import InputError

Batch = dict[str, np.ndarray]
_PACKERS = {
    "first_fit": grain.experimental.FirstFitPackIterDataset,
    "best_fit": grain.experimental.BestFitPackIterDataset,
}


class Tokenise:
    """(name, text) -> {"pair": int32 [n, 2]}: each token of a document beside the one after it.

    The last token has none: -1. None for a document that is left out. In place of the text may
    stand its token ids, with BOS and EOS or without.
    """

    def __init__(self, config: DataConfig, tokenizer):
        self._tokenizer, self._least = tokenizer, config.min_document_tokens
        # A tokenizer may have a BOS that its model never saw before a text (chat templates do).
        wanted = tokenizer.add_bos if config.add_bos is None else config.add_bos
        self._bos = _special("bos", wanted, tokenizer.bos_id)
        self._eos = _special("eos", config.add_eos, next(iter(tokenizer.eos_ids), None))
        # grain's fitting packers want every document to fit a row.
        whole = config.pack != "concat"
        self._limit = config.length if whole and config.overlong != "split" else None
        self._drop = config.overlong == "drop"

    def __call__(self, document: tuple[str, str | np.ndarray]) -> dict[str, np.ndarray] | None:
        text = document[1]
        if isinstance(text, str):
            ids = self._tokenizer.encode(text) if text.strip() else []
        else:
            ids = self._without_specials(text.tolist())
        if len(ids) < self._least:
            return None
        tokens = np.array([*self._bos, *ids, *self._eos], np.int32)
        pair = np.stack([tokens, np.append(tokens[1:], np.int32(-1))], axis=1)
        if self._limit is not None and len(pair) > self._limit:
            return None if self._drop else {"pair": pair[: self._limit]}
        return {"pair": pair}

    def _without_specials(self, ids: list[int]) -> list[int]:
        """Ids less the BOS and EOS that are added here."""
        first, last = ids[:1] == self._bos, ids[-1:] == self._eos
        return ids[int(first and bool(self._bos)) : len(ids) - int(last and bool(self._eos))]


class _SplitOverlong(grain.experimental.FlatMapTransform):
    """Pieces of at most a row; their targets still reach into the next piece."""

    def __init__(self, length: int):
        self._length = length

    def flat_map(self, element):
        pair = element["pair"]
        return [{"pair": pair[i : i + self._length]} for i in range(0, len(pair), self._length)]


class Fields:
    """grain's packed row -> the fields of a training batch."""

    def __init__(self, document_mask: bool):
        self._document_mask = document_mask

    def __call__(self, row: dict[str, np.ndarray]) -> Batch:
        segments, positions = row["pair_segment_ids"], row["pair_positions"]
        tokens, targets = row["pair"][:, 0], row["pair"][:, 1]
        text = segments > 0
        if not self._document_mask:
            segments = text.astype(np.int32)
            positions = np.where(text, np.arange(len(text), dtype=np.int32), 0)
        return {
            "tokens": np.ascontiguousarray(tokens),
            "targets": np.maximum(targets, 0),
            "segments": segments,
            "positions": positions,
            "weights": (text & (targets >= 0)).astype(np.float32),
        }


class PadBatch:
    """Stacks rows; missing ones of the last batch become rows of padding."""

    def __init__(self, batch_size: int):
        self._batch_size = batch_size

    def __call__(self, rows: list[Batch]) -> Batch:
        return grain.experimental.batch_and_pad(rows, batch_size=self._batch_size)


def mixed_rows(corpora: list[Documents], config: DataConfig, tokenise) -> grain.IterDataset:
    """Each source packed for itself, then rows drawn by weight: shares hold in tokens.

    Mixing documents instead would give sources of long documents more than their share.
    """
    streams = []
    for i, corpus in enumerate(corpora):
        seed = _derived_seed(config.seed, i)
        if not isinstance(corpus, Corpus):
            pieces = corpus.elements(
                tokenise, shuffle=config.shuffle, seed=seed, repeat=config.repeat
            )
        else:
            docs = grain.MapDataset.source(corpus)
            docs = docs.shuffle(seed=seed) if config.shuffle else docs
            pieces = read_ahead(docs.repeat(config.repeat).map(tokenise), config)
        streams.append(pack(pieces, config, shuffle=config.shuffle))
    rows = streams[0]
    if len(streams) > 1:
        weights = [corpus.source.weight for corpus in corpora]
        rows = grain.IterDataset.mix(streams, weights)
    if config.shuffle_rows > 1:
        rows = grain.experimental.WindowShuffleIterDataset(
            rows, window_size=config.shuffle_rows, seed=_derived_seed(config.seed, len(corpora))
        )
    return rows


def rows_in_order(corpora: list[Documents], config: DataConfig, tokenise):
    """All documents once, source after source."""
    parts = []
    for kind, group in itertools.groupby(corpora, key=type):
        if kind is not Corpus:
            parts += [corpus.elements(tokenise) for corpus in group]
        else:
            docs = grain.MapDataset.concatenate([grain.MapDataset.source(c) for c in group])
            parts.append(read_ahead(docs.map(tokenise), config))
    if len(parts) > 1:
        parts = [grain.experimental.InterleaveIterDataset(parts, cycle_length=1)]
    return pack(parts[0], config, shuffle=False)


def read_ahead(docs: grain.MapDataset, config: DataConfig) -> grain.IterDataset:
    # grain's own default of 500 documents ahead would be gigabytes of books.
    read = grain.ReadOptions(config.threads, prefetch_buffer_size=4 * config.threads)
    return docs.to_iter_dataset(read)


def pack(pieces: grain.IterDataset, config: DataConfig, *, shuffle: bool) -> grain.IterDataset:
    """Rows of the elements of `pieces`, cut or fitted as `config.pack` says."""
    size = {"pair": config.length}
    if config.pack == "concat":
        return grain.experimental.ConcatThenSplitIterDataset(pieces, length_struct=size)
    if config.overlong == "split":
        pieces = grain.experimental.FlatMapIterDataset(pieces, _SplitOverlong(config.length))
    return _PACKERS[config.pack](
        pieces,
        length_struct=size,
        num_packing_bins=config.packing_bins,
        seed=config.seed,
        shuffle_bins=shuffle,
    )


def _special(name: str, wanted: bool | None, token: int | None) -> list[int]:
    if wanted and token is None:
        raise InputError(f"data.add_{name}=true, but the tokenizer has no {name.upper()} token")
    return [] if wanted is False or token is None else [token]


def _derived_seed(seed: int, index: int) -> int:
    """Another seed per source; grain adds the epoch to it, so neighbours must not be close."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0]) >> 1
