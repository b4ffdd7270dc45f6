"""Batches of rows for this process, from an iterator with an exact, restorable position."""

import atexit
import functools
import json
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import grain
import numpy as np

from lcjax.attention.landmark.tokens import Landmarks, insert
from lcjax.data.chunks import HideContext
from lcjax.data.config import DataConfig, Masking
from lcjax.data.corpus import Documents, all_empty, corpus_identity, open_split
from lcjax.data.rows import Batch, PadBatch, Tokenise, make_batch_fields, mixed_rows, rows_in_order
from lcjax.errors import InputError

# Fields that may change at a resume: how fast batches come, and after how many they end.
_FREE = ("threads", "prefetch", "repeat")


def make_loader(
    config: DataConfig,
    tokenizer,
    batch_size: int,
    *,
    rows: Sequence[int] | None = None,
    split: str = "train",
    landmarks: Landmarks | None = None,
) -> "Loader":
    """Batches of this process as dicts of arrays [B, T], B = the number of its rows.

    T is `config.decoder_length`.

    - `tokens` int32: the text; 0 where there is padding.
    - `targets` int32: the token after `tokens[t]` in the same document. It was attached before
      the document was cut, so the last place of a row has its target in the next row: no
      prediction is lost at a cut, none is made twice, and none crosses into another document.
    - `segments` int32: 1, 2, ... for the documents of a row, 0 for padding. With
      `document_mask: false` 1 for all text of the row.
    - `positions` int32: from 0 in every segment; a document that goes on in the next row starts
      there at 0 again, because that row cannot see the part before.
    - `weights` float32: 1 where there is a target, 0 at ends of documents and on padding.

    With `config.chunks`, of K chunks of Tc tokens, which come before those of `tokens`:

    - `chunks` int32 [B, K, Tc]: the context; 0 where there is padding.
    - `chunk_mask` bool [B, K, Tc]: true where there is text that `chunks.noise` does not hide.
    - with `chunks.learned`, `chunk_targets` int32 and `chunk_weights` float32 [B, K, Tc]: as
      `targets` and `weights`, of the tokens in `chunks`.

    Every process builds the same global batch of `batch_size` rows and keeps its own: `rows`, from
    `lcjax.parallel.sharding.process_rows`, or all. So the global batches do not depend on the
    number of processes, all processes end together, and a position saved with one number of
    processes resumes with another.

    Rows of a source of type teacher have, of the K most probable next tokens of every place,
    `teacher_ids` int32 [B, T, K], `teacher_probabilities` float16 [B, T, K], and `teacher_rest`
    float16 [B, T], the probability of all others.

    `split="validation"` reads the held-out documents once, in order; its last batch is filled up
    with padding, as is the last of a finite training run.

    `landmarks` are put into the rows once they are cut, which makes them longer
    (`Landmarks.row_length`): T is `config.length` ordinary tokens and what closes their blocks.
    """
    own = list(range(batch_size) if rows is None else rows)
    if not own or not 0 <= min(own) <= max(own) < batch_size:
        raise InputError(f"rows={own} must be some of 0 ... {batch_size - 1}, the rows of a batch")
    corpora = open_split(config, split, tokenizer)
    tokenises = [Tokenise(config, tokenizer, corpus.source) for corpus in corpora]
    repeat = config.repeat if split == "train" else 1
    needed = batch_size * config.length if split == "train" else 1
    _require_tokens(corpora, tokenises, needed=needed, repeat=repeat)
    build = mixed_rows if split == "train" else rows_in_order
    packed = build(corpora, config, tokenises).map(make_batch_fields(config))
    if config.masking is not None:
        if landmarks is not None:
            raise InputError("data.masking hides tokens that landmarks look at: leave it out")
        packed = packed.random_map(Mask(config.masking, tokenizer), seed=config.seed)
    if config.chunks is not None and config.chunks.noise is not None and split == "train":
        packed = packed.random_map(HideContext(config.chunks.noise), seed=config.seed)
    batches = packed.batch(batch_size, batch_fn=PadBatch(batch_size))
    batches = batches.map(lambda batch: {key: value[own] for key, value in batch.items()})
    if landmarks is not None:
        if config.chunks is not None:
            raise InputError("data.chunks are no context of a model with landmarks: leave them out")
        landmarks.row_length(config.length)  # refuses lengths that cannot be, before any batch
        ends = tuple(tokenizer.eos_ids)
        batches = batches.map(lambda batch: insert(batch, landmarks, ends))
    batches = grain.experimental.ThreadPrefetchIterDataset(
        batches, prefetch_buffer_size=config.prefetch
    )
    return Loader(iter(batches), _identity(config, corpora, tokenizer, split, landmarks))


class Mask:
    """A batch -> the same with targets at masked places only: what stood there."""

    def __init__(self, config: Masking, tokenizer: Any):
        self._rate = config.rate
        self._token = tokenizer.vocab_size if config.token is None else config.token
        names = ("bos_id", "pad_id", "unk_id")  # a tokenizer need not tell all of them
        special = {getattr(tokenizer, name, None) for name in names} | {*tokenizer.eos_ids}
        self._never = sorted((special | {self._token, *config.keep}) - {None})

    def __call__(
        self, row: dict[str, np.ndarray], random: np.random.Generator
    ) -> dict[str, np.ndarray]:
        tokens = row["tokens"]
        # One number for every place, so that what is chosen depends on nothing but its place.
        chosen = random.random(tokens.shape) < self._rate
        chosen &= (row["segments"] > 0) & ~np.isin(tokens, self._never)
        return row | {
            "tokens": np.where(chosen, np.int32(self._token), tokens),
            "targets": np.where(chosen, tokens, 0),
            "weights": chosen.astype(np.float32),
        }


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
        # grain's reading threads must end before Python takes its modules down.
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    def __next__(self) -> Batch:
        self._assert_not_closed()
        return next(self._parent)

    def close(self) -> None:
        """Ends the threads that read ahead; no batch comes after it."""
        if not self._closed:
            super().close()
            self._parents = ()
            atexit.unregister(self._at_exit)

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
        try:
            self._parent.set_state(_slices_as_tuples(state["position"]))
        except IndexError:
            raise InputError(
                "the saved position lies behind the end of the data: raise data.repeat"
            ) from None


def _close(loader: weakref.ref) -> None:
    if (alive := loader()) is not None:
        alive.close()


def _require_tokens(
    corpora: list[Documents], tokenises: list[Tokenise], *, needed: int, repeat: int | None
) -> None:
    """Stops at once, rather than looping for ever or training on copies, when text is short.

    Reads only until there is enough.
    """
    epochs, total = repeat or 1, 0
    for corpus, tokenise in zip(corpora, tokenises, strict=True):
        found = 0
        for tokens in tokenise.counts(corpus):
            found += tokens
            if found and (total + found) * epochs >= needed:
                break
        if found == 0:
            raise all_empty([corpus], tokenise.reason_empty)
        total += found
    # One pass over a mixture ends with its smallest task: that is not all that it holds.
    endless = repeat is None and any(corpus.is_mixture for corpus in corpora)
    if total * epochs < needed and not endless:
        raise InputError(
            f"data holds {total:,} tokens, too few for one batch of {needed:,} (batch size x"
            f" data.length): give more text, lower one of these, or read it several times with"
            f" data.repeat={-(-needed // total)} or more"
        )


def _identity(
    config: DataConfig,
    corpora: list[Documents],
    tokenizer,
    split: str,
    landmarks: Landmarks | None,
) -> dict[str, Any]:
    """What the order of the batches depends on."""
    fields = {f"data.{k}": v for k, v in asdict(config).items() if k not in _FREE}
    # Where the text lies may change, what it is may not.
    del fields["data.path"], fields["data.sources"]
    fields |= corpus_identity(corpora)
    fields["tokenizer"] = tokenizer.fingerprint
    fields["split"] = split
    fields["landmarks"] = None if landmarks is None else asdict(landmarks)
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
