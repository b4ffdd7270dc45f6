"""From documents to batches: tokenise, shuffle, repeat, pack, mix, batch, with an exact position.

Everything between the documents and the batch is grain's: packing, mixing, shuffling, prefetch.
"""

import json
from dataclasses import asdict
from typing import Any

import grain
import numpy as np

from lcjax.data.config import DataConfig
from lcjax.data.corpus import Corpus, all_empty, open_split
from lcjax.errors import InputError

Batch = dict[str, np.ndarray]
_PACKERS = {
    "first_fit": grain.experimental.FirstFitPackIterDataset,
    "best_fit": grain.experimental.BestFitPackIterDataset,
}
# These change how fast batches come, never which.
_SPEED = ("threads", "prefetch")


def make_loader(
    config: DataConfig,
    tokenizer,
    batch_size: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
    split: str = "train",
) -> "Loader":
    """Batches of this process as dicts of arrays [B, T], B = batch_size / process_count.

    - `tokens` int32: the text; 0 where there is padding.
    - `targets` int32: the token after `tokens[t]` in the same document. It was attached before
      the document was cut, so the last place of a row has its target in the next row: no
      prediction is lost at a cut, none is made twice, and none crosses into another document.
    - `segments` int32: 1, 2, ... for the documents of a row, 0 for padding. With
      `document_mask: false` 1 for all text of the row.
    - `positions` int32: from 0 in every segment; a document that goes on in the next row starts
      there at 0 again, because that row cannot see the part before.
    - `weights` float32: 1 where there is a target, 0 at ends of documents and on padding.

    Every process builds the same global batch and keeps its own consecutive rows, so that the
    global batches do not depend on the number of processes, all processes end together, and a
    position saved with one number of processes resumes with another.

    `split="validation"` reads the held-out documents once, in order; its last batch is filled up
    with padding, as is the last of a finite training run.
    """
    _check_processes(batch_size, process_index, process_count)
    corpora = open_split(config, split)
    tokenise = Tokenise(config, tokenizer)
    repeat = config.repeat if split == "train" else 1
    needed = batch_size * config.length if split == "train" else 1
    _require_tokens(corpora, tokenise, needed=needed, repeat=repeat)
    if split == "train":
        rows = _mixed_rows(corpora, config, tokenise)
    else:
        sources = [grain.MapDataset.source(corpus) for corpus in corpora]
        rows = _pack(grain.MapDataset.concatenate(sources).map(tokenise), config, shuffle=False)
    batches = rows.map(_Fields(config.document_mask)).batch(
        batch_size, batch_fn=_PadBatch(batch_size)
    )
    share = batch_size // process_count
    own = slice(process_index * share, (process_index + 1) * share)
    batches = batches.map(lambda batch: {key: value[own] for key, value in batch.items()})
    batches = grain.experimental.ThreadPrefetchIterDataset(
        batches, prefetch_buffer_size=config.prefetch
    )
    return Loader(iter(batches), _identity(config, corpora, tokenizer, split))


class Loader(grain.DatasetIterator):
    """An iterator over batches whose position can be saved and restored exactly.

    It is a grain iterator: `get_state` / `set_state` give and take a JSON-ready dict, and orbax
    saves and loads it as a checkpointable. The state also says which text and settings it belongs
    to; with others it is refused, since the same position would mean other batches. The batch
    size may change: reading goes on at the row after the last one seen.
    """

    def __init__(self, batches: grain.DatasetIterator, identity: dict[str, Any]):
        super().__init__(batches)
        self._identity = identity

    def __next__(self) -> Batch:
        return next(self._parent)

    def get_state(self) -> dict[str, Any]:
        # The round trip detaches the state from grain's live objects and makes tuples lists, so
        # that it is the same before and after it was written to a file.
        state = {"identity": self._identity, "position": self._parent.get_state()}
        return json.loads(json.dumps(state))

    def set_state(self, state: dict[str, Any]) -> None:
        for key, value in self._identity.items():
            saved = state["identity"].get(key)
            if saved != value:
                raise InputError(
                    f"{key} was {saved} when the position in the data was saved and is {value}"
                    " now: restore it, or start the data anew"
                )
        self._parent.set_state(_slices_as_tuples(state["position"]))


class Tokenise:
    """(name, text) -> {"pair": int32 [n, 2]}: each token of a document beside the one after it.

    The last token has none: -1. None for a document that is left out.
    """

    def __init__(self, config: DataConfig, tokenizer):
        self._tokenizer, self._least = tokenizer, config.min_document_tokens
        # A tokenizer may have a BOS that its model never saw before a text (chat templates do).
        expected = getattr(tokenizer, "add_bos", tokenizer.bos_id is not None)
        wanted = expected if config.add_bos is None else config.add_bos
        self._bos = _special("bos", wanted, tokenizer.bos_id)
        self._eos = _special("eos", config.add_eos, next(iter(tokenizer.eos_ids), None))
        # grain's fitting packers want every document to fit a row.
        whole = config.pack != "concat"
        self._limit = config.length if whole and config.overlong != "split" else None
        self._drop = config.overlong == "drop"

    def __call__(self, document: tuple[str, str]) -> dict[str, np.ndarray] | None:
        text = document[1]
        ids = self._tokenizer.encode(text) if text.strip() else []
        if len(ids) < self._least:
            return None
        tokens = np.array([*self._bos, *ids, *self._eos], np.int32)
        pair = np.stack([tokens, np.append(tokens[1:], np.int32(-1))], axis=1)
        if self._limit is not None and len(pair) > self._limit:
            return None if self._drop else {"pair": pair[: self._limit]}
        return {"pair": pair}


class _SplitOverlong(grain.experimental.FlatMapTransform):
    """Pieces of at most a row; their targets still reach into the next piece."""

    def __init__(self, length: int):
        self._length = length

    def flat_map(self, element):
        pair = element["pair"]
        return [{"pair": pair[i : i + self._length]} for i in range(0, len(pair), self._length)]


class _Fields:
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


class _PadBatch:
    """Stacks rows; missing ones of the last batch become rows of padding."""

    def __init__(self, batch_size: int):
        self._batch_size = batch_size

    def __call__(self, rows: list[Batch]) -> Batch:
        return grain.experimental.batch_and_pad(rows, batch_size=self._batch_size)


def _mixed_rows(corpora: list[Corpus], config: DataConfig, tokenise) -> grain.IterDataset:
    """Each source packed for itself, then rows drawn by weight: shares hold in tokens.

    Mixing documents instead would give sources of long documents more than their share.
    """
    streams = []
    for i, corpus in enumerate(corpora):
        docs = grain.MapDataset.source(corpus)
        if config.shuffle:
            docs = docs.shuffle(seed=_derived_seed(config.seed, i))
        docs = docs.repeat(config.repeat).map(tokenise)
        streams.append(_pack(docs, config, shuffle=config.shuffle))
    rows = streams[0]
    if len(streams) > 1:
        weights = [corpus.source.weight for corpus in corpora]
        rows = grain.IterDataset.mix(streams, weights)
    if config.shuffle_rows > 1:
        rows = grain.experimental.WindowShuffleIterDataset(
            rows, window_size=config.shuffle_rows, seed=config.seed
        )
    return rows


def _pack(docs: grain.MapDataset, config: DataConfig, *, shuffle: bool) -> grain.IterDataset:
    # grain's own default of 500 documents ahead would be gigabytes of books.
    read = grain.ReadOptions(config.threads, prefetch_buffer_size=4 * config.threads)
    pieces = docs.to_iter_dataset(read)
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


def _require_tokens(
    corpora: list[Corpus], tokenise: Tokenise, *, needed: int, repeat: int | None
) -> None:
    """Stops at once, rather than looping for ever or training on copies, when text is short.

    Reads only until there is enough.
    """
    epochs, total = repeat or 1, 0
    for corpus in corpora:
        found = 0
        for i in range(len(corpus)):
            element = tokenise(corpus[i])
            found += len(element["pair"]) if element else 0
            if found and (total + found) * epochs >= needed:
                break
        if found == 0:
            raise all_empty([corpus])
        total += found
    if total * epochs < needed:
        raise InputError(
            f"data holds {total:,} tokens, too few for one batch of {needed:,} (batch size x"
            f" data.length): give more text, lower one of these, or read it several times with"
            f" data.repeat={-(-needed // total)} or more"
        )


def _identity(config: DataConfig, corpora: list[Corpus], tokenizer, split: str) -> dict[str, Any]:
    """What the order of the batches depends on."""
    fields = {f"data.{k}": v for k, v in asdict(config).items() if k not in _SPEED}
    # Where the text lies may change, what it is may not.
    del fields["data.path"], fields["data.sources"]
    fields["data weights"] = [corpus.source.weight for corpus in corpora]
    fields["number of documents"] = [len(corpus) for corpus in corpora]
    fields["bytes of text"] = [corpus.size for corpus in corpora]
    fields["tokenizer"] = tokenizer.fingerprint
    fields["split"] = split
    return fields


def _slices_as_tuples(state: Any) -> Any:
    """Undoes what JSON does to the state of grain's concat packer.

    It compares slices with the tuple (-1, -1) for "nothing left over"; as a list [-1, -1] that
    looks like a left-over, and the next document is lost (grain 0.2.18).
    """
    if isinstance(state, dict):
        return {
            key: {k: tuple(v) for k, v in value.items()}
            if key == "remainder_slices"
            else _slices_as_tuples(value)
            for key, value in state.items()
        }
    return [_slices_as_tuples(item) for item in state] if isinstance(state, list) else state


def _special(name: str, wanted: bool | None, token: int | None) -> list[int]:
    if wanted and token is None:
        raise InputError(f"data.add_{name}=true, but the tokenizer has no {name.upper()} token")
    return [] if wanted is False or token is None else [token]


def _derived_seed(seed: int, index: int) -> int:
    """Another seed per source; grain adds the epoch to it, so neighbours must not be close."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])


def _check_processes(batch_size: int, index: int, count: int) -> None:
    if batch_size < 1 or batch_size % count:
        raise InputError(
            f"batch size {batch_size} must be a positive multiple of the {count} processes;"
            f" nearest: {max(count, batch_size // count * count)}"
        )
    if not 0 <= index < count:
        raise InputError(f"process_index={index} must lie in 0 ... {count - 1}")
