"""seqio's converter for decoders with context chunks: examples of a task become training rows.

    converter = context_chunks(Chunks(16, 256), 4096, context="context")
    dataset = seqio.get_dataset(mixture, {"context": 4096, "targets": 4096},
                                feature_converter=converter, dataset_split="train")

seqio and TensorFlow are imported when a converter is made.
"""

import contextlib
import os
from typing import Any, ClassVar

from lcjax.data.chunks import Chunks
from lcjax.errors import InputError


def context_chunks(
    chunks: Chunks,
    length: int,
    *,
    targets: str = "targets",
    context: str | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
) -> Any:
    """A `seqio.FeatureConverter` whose rows have the fields of `lcjax.data.make_loader`.

    The text of an example is its feature `context` (nothing if None), then `targets`, with `bos_id`
    before the targets and `eos_id` behind them where they are not there yet. The decoder reads the
    targets, `length` tokens at a time, each time with the tokens right before these as chunks: so
    an example of no more than `length` tokens is one row, and of a longer one no token is lost. The
    first row of a text without context has none. Ids are int32 of one vocabulary:

        tokens, targets, segments, positions int32 [length], weights float32 [length]
        chunks int32 [K, Tc], chunk_mask bool [K, Tc]    as `lcjax.data.chunks.split` makes them

    Every token of the targets but the first is learned, with `bos_id` that one as well.
    """
    seqio, tf = import_seqio()
    if length < 1:
        raise InputError(f"length={length} must be 1 or more: tokens that the decoder reads")
    spec = seqio.FeatureConverter.FeatureSpec
    plain = ("tokens", "targets", "segments", "positions")
    rows = _Rows(tf, chunks, length, bos_id, eos_id)

    class ContextChunks(seqio.FeatureConverter):
        TASK_FEATURES: ClassVar = {
            name: spec(tf.int32) for name in filter(None, (context, targets))
        }
        MODEL_FEATURES: ClassVar = {name: spec(tf.int32) for name in plain} | {
            "weights": spec(tf.float32),
            "chunks": spec(tf.int32, rank=2),
            "chunk_mask": spec(tf.bool, rank=2),
        }
        PACKING_FEATURE_DTYPES: ClassVar = {}

        def _convert_features(self, ds, task_feature_lengths):
            return ds.flat_map(lambda e: rows(e[context] if context else None, e[targets]))

        def get_model_feature_lengths(self, task_feature_lengths):
            return dict.fromkeys((*plain, "weights"), length) | {
                "chunks": chunks.count,
                "chunk_mask": chunks.count,
            }

    # Lengths of the output are fixed below; of the input there is no limit.
    return ContextChunks(pack=False, apply_length_check=False)


class _Rows:
    """The rows of one example, as a `tf.data.Dataset`."""

    def __init__(
        self, tf: Any, chunks: Chunks, length: int, bos_id: int | None, eos_id: int | None
    ):
        self._tf, self._chunks, self._length = tf, chunks, length
        self._bos_id, self._eos_id = bos_id, eos_id

    def __call__(self, context: Any, targets: Any) -> Any:
        tf, length = self._tf, self._length
        context = tf.zeros([0], tf.int32) if context is None else context
        ids = self._marked(targets)
        # The last token has no successor: in a row of its own it would teach nothing.
        count = (tf.maximum(tf.size(ids) - 1, 0) + length - 1) // length

        def row(start):
            here, after = (ids[at : at + length] for at in (start, start + 1))
            text = here if self._chunks.text == "same" else self._before(context, ids, start)
            return self._chunked(text) | {
                "tokens": self._padded(here),
                "targets": self._padded(after),
                "segments": self._padded(tf.ones_like(here)),
                "positions": self._padded(tf.range(tf.size(here))),
                "weights": tf.cast(self._padded(tf.ones_like(after)), tf.float32),
            }

        return tf.data.Dataset.from_tensor_slices(tf.range(count) * length).map(row)

    def _marked(self, ids: Any) -> Any:
        """The targets with BOS and EOS."""
        tf = self._tf
        for mark, first in ((self._bos_id, True), (self._eos_id, False)):
            if mark is None:
                continue
            end = ids[:1] if first else ids[-1:]
            missing = tf.logical_not(tf.reduce_all(end == mark))  # an empty text stays empty
            put = tf.cast(missing, tf.int32)
            ids = tf.pad(ids, [[put, 0] if first else [0, put]], constant_values=mark)
        return ids

    def _before(self, context: Any, ids: Any, start: Any) -> Any:
        tf, most = self._tf, self._chunks.tokens
        return tf.concat([context[-most:], ids[tf.maximum(start - most, 0) : start]], 0)

    def _chunked(self, text: Any) -> dict[str, Any]:
        tf, shape = self._tf, [self._chunks.count, self._chunks.length]
        text = text[-self._chunks.tokens :]
        front = [[self._chunks.tokens - tf.size(text), 0]]
        return {
            "chunks": tf.reshape(tf.pad(text, front), shape),
            "chunk_mask": tf.reshape(tf.pad(tf.ones_like(text, tf.bool), front), shape),
        }

    def _padded(self, values: Any) -> Any:
        tf = self._tf
        values = tf.pad(values, [[0, self._length - tf.size(values)]])
        return tf.ensure_shape(values, [self._length])


def import_seqio() -> tuple[Any, Any]:
    """The modules seqio and tensorflow."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # pages about missing GPU libraries
    try:
        import seqio
        import tensorflow as tf
    except ImportError as error:
        raise InputError(
            "data.sources of type seqio need `pip install 'lcjax[seqio]'`, which brings TensorFlow"
            f" (2.4 GB): {error}"
        ) from None
    # TensorFlow would take all memory of the GPUs; once in use, it is the caller who decided.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    return seqio, tf
