"""Documents of a Task or Mixture from seqio's registries, as a stream with an exact position.

A task is a TensorFlow pipeline that can only be read in order. Its own shuffling and mixing, with
the seed of the data, are deterministic, so the number of examples read is the whole position: to
resume, the pipeline is built again and that many examples are skipped, which costs reading them
again. seqio and TensorFlow are imported only where a source of this type is opened.
"""

import contextlib
import copy
import difflib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import grain
import numpy as np

from lcjax.data.chat import PromptAnswer
from lcjax.data.chunks import Chunks
from lcjax.data.config import SeqioSource
from lcjax.data.readers import decode, unit_hash
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


# Tokenizers that give the same ids here, words, digits, spaces, scripts and code, are the same.
_PROBES = (
    "The quick brown fox doesn't jump over 1234567890 lazy dogs; it's 3.14 times too slow.",
    "Naïve café, Straße, Привет мир, 日本語のテキスト, 🙂 and \t two  spaces.",
    "def f(x, *y):\n    return x ** 2 != {'a': [1, 22, 333]}  # --- end",
)


Value = str | np.ndarray | PromptAnswer  # text, int32 ids, or what is read beside what is learned


class SeqioCorpus:
    """The documents of one split, or one side of the validation split within it.

    A stream has no names that stay the same in every order, so a document is held out for
    validation when the hash of its content, a number in [0, 1), is below `holdout`.
    """

    count = size = None  # known only after reading everything

    def __init__(self, source: SeqioSource, *, on_bad_text: str = "error"):
        self.source, self._on_bad_text = source, on_bad_text
        self._holdout, self._side = 0.0, "train"
        self._provider = _provider(source)
        self.is_mixture = isinstance(self._provider, import_seqio()[0].Mixture)
        self._tokens = source.tokens or bool(source.converter)
        self._features = [f for f in (source.prompt, source.context, source.feature) if f]
        specs = self._pipeline(shuffle=False, seed=0, repeat=1).element_spec
        self._keys = [self._find_key(name, specs) for name in self._features]

    def split(self, holdout: float, which: str) -> "SeqioCorpus":
        """The documents held out for validation, or the others."""
        side = copy.copy(self)
        side._holdout, side._side = holdout, which
        return side

    def __iter__(self) -> Iterator[tuple[str, Value]]:
        """(name, value) of every document once, in the order of the task's source."""
        return (document for document in self.read() if document is not None)

    def read(self, *, skip: int = 0, **order: Any) -> Iterator[tuple[str, Value] | None]:
        """The examples after the first `skip`; None for one of the other side of the split."""
        examples = self._pipeline(**order)
        keys = self._keys
        examples = examples.map(lambda example: tuple(example[key] for key in keys)).skip(skip)
        for number, found in enumerate(self._numpy(examples), start=skip + 1):
            where = f"{self._label}:{number}"
            values = [self._value(value, where) for value in found]
            document = PromptAnswer(*values) if self.source.prompt else values[-1]
            yield (where, document) if self._belongs(values[-1]) else None

    def rows(self, convert: Callable[..., Any], **order: Any) -> grain.IterDataset:
        """The rows that the feature converter `convert(context=, targets=)` makes of examples."""
        context, targets = self.source.context or None, self.source.feature
        converter = convert(context=context, targets=targets)
        self._pipeline(**order)  # refused here, not in a thread

        def read(skip: int) -> Iterator[dict[str, np.ndarray]]:
            examples = self._held(self._pipeline(**order)).map(self._ids)
            rows = converter(examples, dict.fromkeys(converter.TASK_FEATURES, None))
            return self._numpy(rows.skip(skip))

        return _Elements(read, lambda row: row)

    def elements(self, tokenise: Callable, **order: Any) -> grain.IterDataset:
        """What `tokenise` makes of the documents, as a grain dataset."""
        self._pipeline(**order)  # refused here, not in a thread
        return _Elements(lambda skip: self.read(skip=skip, **order), tokenise)

    def check_vocabulary(self, tokenizer) -> None:
        """Token ids can only be taken over when the task and the model agree about them."""
        for feature in self._features if self._tokens else ():
            vocabulary = self._provider.output_features[feature].vocabulary
            if not _agree(vocabulary, tokenizer):
                way_out = "give a task of the model's own"
                if not self.source.converter:
                    way_out = "set tokens: false to read its text instead"
                raise InputError(
                    f"{self.source.name}: feature {feature} has the vocabulary"
                    f" {type(vocabulary).__name__} of {vocabulary.vocab_size} ids, which is not the"
                    f" model's of {tokenizer.vocab_size}: {way_out}"
                )

    @property
    def _label(self) -> str:
        return f"{self.source.name}[{self.source.split}]"

    def _value(self, value: bytes | np.ndarray, where: str) -> str | np.ndarray:
        if isinstance(value, bytes):
            return decode(value, location=where, on_bad_text=self._on_bad_text)
        return value.astype(np.int32)

    def _belongs(self, document: str | np.ndarray) -> bool:
        if self._holdout == 0.0:
            return True
        data = document.encode() if isinstance(document, str) else document.tobytes()
        return (unit_hash(data) < self._holdout) == (self._side == "validation")

    def _held(self, examples: Any) -> Any:
        """The examples of this side of the split, as a `tf.data.Dataset`."""
        import tensorflow as tf

        def belongs(ids: np.ndarray) -> np.bool_:
            return np.bool_(self._belongs(ids.astype(np.int32)))

        if self._holdout == 0.0:
            return examples
        key = self._keys[-1]
        return examples.filter(
            lambda e: tf.ensure_shape(tf.numpy_function(belongs, [e[key]], tf.bool), [])
        )

    def _ids(self, example: dict) -> dict:
        """The features of a converter, and their dtype."""
        import tensorflow as tf

        named = zip(self._features, self._keys, strict=True)
        return {name: tf.cast(example[key], tf.int32) for name, key in named}

    def _numpy(self, examples: Any) -> Iterator[Any]:
        """The elements as NumPy arrays, in an order that the seed alone decides."""
        import tensorflow as tf

        options = tf.data.Options()
        options.deterministic = True
        iterator = examples.with_options(options).as_numpy_iterator()
        while True:
            try:
                found = next(iterator, None)
            except tf.errors.OpError as error:
                raise InputError(f"{self._label}: {_line(error)}") from error
            if found is None:
                return
            yield found

    def _pipeline(self, *, shuffle: bool = False, seed: int = 0, repeat: int | None = 1) -> Any:
        """The task's `tf.data.Dataset`.

        Built anew for each reading: one that is read twice has another order the second time.
        """
        features, length = self._provider.output_features, self.source.task_length
        # Mixtures drop the text behind the ids unless asked not to.
        more = {"copy_pretokenized": True} if self.is_mixture else {}
        try:
            return self._provider.get_dataset(
                sequence_length=length and dict.fromkeys(features, length),
                split=self.source.split,
                use_cached=self.source.cached,
                shuffle=shuffle,
                seed=seed,
                num_epochs=repeat,
                trim_output_features=False,  # documents come whole; rows are cut by data.pack
                **more,
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise InputError(f"{self.source.name}: seqio refuses it: {_line(error)}") from error

    def _find_key(self, name: str, specs: dict[str, Any]) -> str:
        """Where a feature is read: ids, or the text that they were made from."""
        tokens = self._tokens
        wanted = [name] if tokens else [f"{name}_pretokenized", name]
        for key in wanted:
            spec = specs.get(key)
            if spec is not None and (spec.dtype.is_integer if tokens else spec.dtype == "string"):
                if spec.shape.rank != int(tokens):
                    raise InputError(
                        f"{self.source.name}: feature {key} has {spec.shape.rank} axes; a document"
                        " is one text, or one list of ids"
                    )
                return key
        known = ", ".join(f"{key} ({spec.dtype.name})" for key, spec in sorted(specs.items()))
        other = "" if self.source.converter else f", or tokens: {str(not tokens).lower()}"
        raise InputError(
            f"{self.source.name} has no {'ids' if tokens else 'text'} in {' or '.join(wanted)};"
            f" it has {known}: name another feature{other}"
        )


class _Elements(grain.IterDataset):
    """An endless or finite stream that can be entered anywhere."""

    def __init__(self, read: Callable[[int], Iterator], tokenise: Callable):
        super().__init__()
        self._read, self._tokenise = read, tokenise

    def __iter__(self) -> grain.DatasetIterator:
        return _ElementsIterator(self._read, self._tokenise)


class _ElementsIterator(grain.DatasetIterator):
    def __init__(self, read: Callable[[int], Iterator], tokenise: Callable):
        super().__init__()
        self._read, self._tokenise = read, tokenise
        self._examples, self._stream = 0, None

    def __next__(self) -> dict[str, np.ndarray]:
        if self._stream is None:
            self._stream = self._read(self._examples)
        for document in self._stream:
            self._examples += 1
            element = None if document is None else self._tokenise(document)
            if element is not None:
                return element
        raise StopIteration

    def get_state(self) -> dict[str, int]:
        return {"examples": self._examples}

    def set_state(self, state: dict[str, int]) -> None:
        self._examples, self._stream = int(state["examples"]), None


def _agree(vocabulary: Any, tokenizer: Any) -> bool:
    """Whether a task's vocabulary gives the ids of the tokenizer."""
    if isinstance(vocabulary, import_seqio()[0].PassThroughVocabulary):  # of an unnamed tokenizer
        return vocabulary.vocab_size == tokenizer.vocab_size
    return vocabulary.vocab_size <= tokenizer.vocab_size and all(
        list(vocabulary.encode(text)) == tokenizer.encode(text) for text in _PROBES
    )


def _provider(source: SeqioSource) -> Any:
    """The Task or Mixture that the source names."""
    seqio, _ = import_seqio()
    if source.module:
        try:
            importlib.import_module(source.module)
        except ModuleNotFoundError as error:
            raise InputError(
                f"{source.name}: module={source.module} cannot be imported: {error}; give a module"
                " on the PYTHONPATH that registers the task"
            ) from error
    names = sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
    if source.task not in names:
        near = difflib.get_close_matches(source.task, names, n=3, cutoff=0.4)
        raise InputError(
            f"{source.name}: no Task or Mixture of that name is registered"
            + (f"; did you mean {' or '.join(near)}?" if near else "")
            + f" (module={source.module or 'none'} is what registers it)"
        )
    provider = seqio.get_mixture_or_task(source.task)
    if source.split not in provider.splits:
        raise InputError(
            f"{source.name}: split={source.split} is not one of {', '.join(provider.splits)}"
        )
    uncached = [t.name for t in seqio.get_subtasks(provider) if not t.supports_caching]
    if source.cached and uncached:
        raise InputError(
            f"{source.name}: cached=true, but {', '.join(uncached)} has no step that is cached"
            " (CacheDatasetPlaceholder): set cached: false"
        )
    return provider


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " ..."
