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

# Fields that may change when a run resumes: speed, and the number of epochs.
_MUTABLE_FIELDS = ("threads", "prefetch", "repeat")


def make_loader(
    config: DataConfig,
    tokenizer,
    batch_size: int,
    *,
    rows: Sequence[int] | None = None,
    split: str = "train",
    landmarks: Landmarks | None = None,
) -> "Loader":
    """Returns an iterator over batches: dicts of arrays [B, T] for the rows of this process.

    T is `config.decoder_length`.

    - `tokens` int32: the text; 0 on padding.
    - `targets` int32: the token after `tokens[t]` in the same document. Targets are attached before
      documents are cut, so the last place of a row has its target, which is the first token of the
      next row. No prediction is lost or repeated at a cut, and none crosses a document boundary.
    - `segments` int32: 1, 2, ... for the documents of a row, 0 on padding. With
      `document_mask: false` 1 for all text of the row.
    - `positions` int32: from 0 in every segment. A document that continues in the next row starts
      there at 0 again, because that row cannot attend to the previous one.
    - `weights` float32: 1 where there is a target, 0 at ends of documents and on padding.

    With `config.chunks`, K chunks of Tc tokens that precede `tokens`:

    - `chunks` int32 [B, K, Tc]: the context; 0 on padding.
    - `chunk_mask` bool [B, K, Tc]: true where there is text that `chunks.noise` does not hide.
    - with `chunks.learned`, `chunk_targets` int32 and `chunk_weights` float32 [B, K, Tc]: `targets`
      and `weights` of the tokens in `chunks`.

    With a source of type teacher, for the K most probable next tokens of every place:

    - `teacher_ids` int32 [B, T, K] and `teacher_probabilities` float16 [B, T, K].
    - `teacher_rest` float16 [B, T]: the probability of all other tokens.

    Every process builds the same global batch and selects its rows. So the global batches do not
    depend on the number of processes, all processes end together, and a position saved with one
    number of processes resumes with another.

    Args:
      config: the section `data`.
      tokenizer: the model's tokenizer.
      batch_size: rows of the global batch.
      rows: indices of the rows of this process, from `lcjax.parallel.sharding.process_rows`; None:
        all.
      split: `train`, or `validation`, which reads the held-out documents once and in order. The
        last batch of a finite split is completed with padding.
      landmarks: landmark tokens to insert into the rows after they are cut. T is then
        `landmarks.row_length(config.length)`.

    Raises:
      InputError: a source cannot be read, or holds too few tokens for one batch.
    """
    indices = list(range(batch_size) if rows is None else rows)
    if not indices or not 0 <= min(indices) <= max(indices) < batch_size:
        raise InputError(
            f"rows={indices} must be some of 0 ... {batch_size - 1}, the rows of a batch"
        )
    corpora = open_split(config, split, tokenizer)
    tokenises = [Tokenise(config, tokenizer, corpus.source) for corpus in corpora]
    is_train = split == "train"
    _check_num_tokens(
        corpora,
        tokenises,
        required=batch_size * config.length if is_train else 1,
        repeat=config.repeat if is_train else 1,
    )
    build = mixed_rows if is_train else rows_in_order
    dataset = build(corpora, config, tokenises).map(make_batch_fields(config))
    if config.masking is not None:
        if landmarks is not None:
            raise InputError("data.masking hides tokens that landmarks attend to: leave it out")
        dataset = dataset.random_map(RandomMask(config.masking, tokenizer), seed=config.seed)
    if config.chunks is not None and config.chunks.noise is not None and is_train:
        dataset = dataset.random_map(HideContext(config.chunks.noise), seed=config.seed)
    batches = dataset.batch(batch_size, batch_fn=PadBatch(batch_size))
    batches = batches.map(lambda batch: {key: value[indices] for key, value in batch.items()})
    if landmarks is not None:
        if config.chunks is not None:
            raise InputError("data.chunks are no context of a model with landmarks: leave them out")
        landmarks.row_length(config.length)  # refuses lengths that cannot be, before any batch
        eos_ids = tuple(tokenizer.eos_ids)
        batches = batches.map(lambda batch: insert(batch, landmarks, eos_ids))
    batches = grain.experimental.ThreadPrefetchIterDataset(
        batches, prefetch_buffer_size=config.prefetch
    )
    return Loader(iter(batches), _identity(config, corpora, tokenizer, split, landmarks))


class RandomMask:
    """Masks tokens of a row; targets and weights remain at masked places only."""

    def __init__(self, config: Masking, tokenizer: Any):
        self._rate = config.rate
        self._mask_id = tokenizer.vocab_size if config.token is None else config.token
        names = ("bos_id", "pad_id", "unk_id")  # tokenizers need not have all of them
        special = {getattr(tokenizer, name, None) for name in names} | {*tokenizer.eos_ids}
        self._never = sorted((special | {self._mask_id, *config.keep}) - {None})

    def __call__(
        self, row: dict[str, np.ndarray], random: np.random.Generator
    ) -> dict[str, np.ndarray]:
        tokens = row["tokens"]
        # One random number for every place, so that the text does not change the masked places.
        is_masked = random.random(tokens.shape) < self._rate
        is_masked &= (row["segments"] > 0) & ~np.isin(tokens, self._never)
        return row | {
            "tokens": np.where(is_masked, np.int32(self._mask_id), tokens),
            "targets": np.where(is_masked, tokens, 0),
            "weights": is_masked.astype(np.float32),
        }


class Loader(grain.DatasetIterator):
    """An iterator over batches whose position can be saved and restored exactly.

    It is a grain iterator: `get_state` and `set_state` return and take a JSON-ready dict, and orbax
    saves and loads it as a checkpointable. The state contains the identity of the text and of the
    settings; `set_state` refuses another identity, since the position would give other batches. The
    batch size may change: reading resumes at the row after the last batch.
    """

    def __init__(self, batches: grain.DatasetIterator, identity: dict[str, Any]):
        super().__init__(batches)
        self._identity = identity
        # grain's reading threads must end before Python unloads its modules.
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    def __next__(self) -> Batch:
        self._assert_not_closed()
        return next(self._parent)

    def close(self) -> None:
        """Ends the threads that read ahead; the loader gives no more batches."""
        if not self._closed:
            super().close()
            self._parents = ()
            atexit.unregister(self._at_exit)

    def get_state(self) -> dict[str, Any]:
        # The round trip detaches the state from grain's live objects and turns tuples into lists,
        # so a state is equal before and after it is written to a file.
        state = {"identity": self._identity, "position": self._parent.get_state()}
        return json.loads(json.dumps(state))

    def set_state(self, state: dict[str, Any]) -> None:
        for key, value in self._identity.items():
            saved = state["identity"].get(key)
            if saved != value:
                raise InputError(
                    f"{key} was {saved} when the position in the data was saved and is {value}"
                    " now: restore it, or start the data again"
                )
        try:
            self._parent.set_state(_slices_as_tuples(state["position"]))
        except IndexError:
            raise InputError(
                "the saved position lies after the end of the data: raise data.repeat"
            ) from None


def _close(reference: weakref.ref) -> None:
    if (loader := reference()) is not None:
        loader.close()


def _check_num_tokens(
    corpora: list[Documents], tokenises: list[Tokenise], *, required: int, repeat: int | None
) -> None:
    """Raises an `InputError` where the text has fewer than `required` tokens.

    Otherwise the loader would loop for ever, or fill a batch with copies. Reads no more documents
    than the check needs.
    """
    epochs, total = repeat or 1, 0
    for corpus, tokenise in zip(corpora, tokenises, strict=True):
        num_tokens = 0
        for tokens in tokenise.counts(corpus):
            num_tokens += tokens
            if num_tokens and (total + num_tokens) * epochs >= required:
                break
        if num_tokens == 0:
            raise all_empty([corpus], tokenise.reason_empty)
        total += num_tokens
    # One pass over a mixture ends with its smallest task, so it does not count all tokens.
    is_endless = repeat is None and any(corpus.is_mixture for corpus in corpora)
    if total * epochs < required and not is_endless:
        raise InputError(
            f"data holds {total:,} tokens, too few for one batch of {required:,} (batch size x"
            f" data.length): give more text, lower one of these, or read it several times with"
            f" data.repeat={-(-required // total)} or more"
        )


def _identity(
    config: DataConfig,
    corpora: list[Documents],
    tokenizer,
    split: str,
    landmarks: Landmarks | None,
) -> dict[str, Any]:
    """Returns everything that determines the batches and their order."""
    fields = {f"data.{k}": v for k, v in asdict(config).items() if k not in _MUTABLE_FIELDS}
    # The location of the text may change, its content may not.
    del fields["data.path"], fields["data.sources"]
    fields |= corpus_identity(corpora)
    fields["tokenizer"] = tokenizer.fingerprint
    fields["split"] = split
    fields["landmarks"] = None if landmarks is None else asdict(landmarks)
    return fields


def _slices_as_tuples(state: Any) -> Any:
    """Restores the tuples in the state of grain's concat packer, which JSON turns into lists.

    It compares slices with the tuple (-1, -1), which means that no remainder exists. The list
    [-1, -1] would count as a remainder, and the next document would be lost (grain 0.2.18).
    """
    if isinstance(state, dict):
        return {
            key: {k: tuple(v) for k, v in value.items()}
            if key == "remainder_slices"
            else _slices_as_tuples(value)
            for key, value in state.items()
        }
    return [_slices_as_tuples(item) for item in state] if isinstance(state, list) else state
