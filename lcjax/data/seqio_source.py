"""Sources of type seqio: documents, or rows with context chunks, of a Task or Mixture.

seqio and TensorFlow are imported only when such a source is opened or a converter is created.
"""

import contextlib
import difflib
import importlib
import os
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import grain
import numpy as np

from lcjax.data.chat import PromptAnswer
from lcjax.data.chunks import Chunks
from lcjax.data.data_config import SeqioSource, TextConfig
from lcjax.data.readers import decode, unit_hash
from lcjax.data.streams import StreamedCorpus, StreamedDataset, Tokenise
from lcjax.errors import InputError, check_one_of, install_command, one_line

# Two tokenizers count as equal if they give equal ids to these words, digits, scripts and code.
_PROBES = (
    "The quick brown fox doesn't jump over 1234567890 lazy dogs; it's 3.14 times too slow.",
    "Naïve café, Straße, Привет мир, 日本語のテキスト, 🙂 and \t two  spaces.",
    "def f(x, *y):\n    return x ** 2 != {'a': [1, 22, 333]}  # --- end",
)

Value = str | np.ndarray | PromptAnswer  # text, int32 ids, or a prompt and its answer


class SeqioCorpus(StreamedCorpus):
    """The documents of one split of a Task or Mixture of seqio, as a stream.

    A task is a TensorFlow pipeline, which can only be read in order. Its shuffling and mixing are
    deterministic for a seed, so the number of examples determines the position. A resumed run
    builds the pipeline again and skips that many examples, at the cost of reading them again.

    Examples have no names that are independent of their order. So a document belongs to the
    validation split if the hash of its content, a number in [0, 1), is below `holdout`.
    """

    def __init__(self, source: SeqioSource, config: TextConfig = TextConfig(), tokenizer=None):
        self.source, self._on_bad_text, self.start = source, config.on_bad_text, {"examples": 0}
        self._provider = _provider(source)
        self.is_mixture = isinstance(self._provider, import_seqio().seqio.Mixture)
        self._reads_ids = source.tokens or bool(source.converter)
        self._features = [f for f in (source.prompt, source.context, source.feature) if f]
        specs = self._pipeline().element_spec
        self._keys = [self._find_key(name, specs) for name in self._features]
        if tokenizer is not None:
            self._check_vocabulary(tokenizer)

    def __iter__(self) -> Iterator[tuple[str, Value]]:
        elements = self.read_elements(lambda document: document, self.start)
        return (document for document, _ in elements if document is not None)

    def elements(self, tokenise: Tokenise, **order: Any) -> grain.IterDataset:
        self._pipeline(**order)  # raises errors here, not in a thread
        return super().elements(tokenise, **order)

    def read_elements(
        self, tokenise: Tokenise, state: dict[str, int], **order: Any
    ) -> Iterator[tuple[Any, dict[str, int]]]:
        """Yields `tokenise(document)` (None for documents of the other split) and the state."""
        keys = self._keys
        examples = self._pipeline(**order).map(lambda example: tuple(example[key] for key in keys))
        for features, after in self._numbered(examples, state):
            location = f"{self._label}:{after['examples']}"
            values = [self._value(value, location) for value in features]
            document = PromptAnswer(*values) if self.source.prompt else values[-1]
            in_split = self.in_split(_content_hash(values[-1]))
            yield tokenise((location, document)) if in_split else None, after

    def rows(
        self, chunks: Chunks, length: int, bos_id: int | None, eos_id: int | None, **order: Any
    ) -> grain.IterDataset:
        """Returns the rows of the source's feature converter; arguments as in `context_chunks`."""
        features = {"context": self.source.context or None, "targets": self.source.feature}
        converter = context_chunks(chunks, length, bos_id=bos_id, eos_id=eos_id, **features)
        self._pipeline(**order)  # raises errors here, not in a thread

        def read(state: dict[str, int]) -> Iterator[tuple[dict[str, np.ndarray], dict[str, int]]]:
            examples = self._filter_split(self._pipeline(**order)).map(self._converter_features)
            rows = converter(examples, dict.fromkeys(converter.TASK_FEATURES, None))
            return self._numbered(rows, state)

        return StreamedDataset(read, self.start)

    def _check_vocabulary(self, tokenizer) -> None:
        """Raises an `InputError` if the ids of the task are not those of the tokenizer."""
        for feature in self._features if self._reads_ids else ():
            vocabulary = self._provider.output_features[feature].vocabulary
            if not _same_ids(vocabulary, tokenizer):
                way_out = "give a task with the model's vocabulary"
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

    def _value(self, value: bytes | np.ndarray, location: str) -> str | np.ndarray:
        if isinstance(value, bytes):
            return decode(value, location=location, on_bad_text=self._on_bad_text)
        return value.astype(np.int32)

    def _filter_split(self, examples: Any) -> Any:
        """Returns the examples of a `tf.data.Dataset` that belong to the split."""
        import tensorflow as tf

        def in_split(ids: np.ndarray) -> np.bool_:
            return np.bool_(self.in_split(_content_hash(ids.astype(np.int32))))

        if self._holdout == 0.0:
            return examples
        key = self._keys[-1]
        return examples.filter(
            lambda e: tf.ensure_shape(tf.numpy_function(in_split, [e[key]], tf.bool), [])
        )

    def _converter_features(self, example: dict) -> dict:
        """Returns the features that the converter reads, as int32."""
        import tensorflow as tf

        named = zip(self._features, self._keys, strict=True)
        return {name: tf.cast(example[key], tf.int32) for name, key in named}

    def _numbered(
        self, examples: Any, state: dict[str, int]
    ) -> Iterator[tuple[Any, dict[str, int]]]:
        """Yields the elements after `state` as NumPy arrays, each with the state after it.

        Their order depends only on the seed.
        """
        import tensorflow as tf

        options = tf.data.Options()
        options.deterministic = True
        examples = examples.skip(state["examples"]).with_options(options)
        numbered = enumerate(examples.as_numpy_iterator(), start=state["examples"] + 1)
        while True:
            try:
                number, element = next(numbered, (0, None))
            except tf.errors.OpError as error:
                raise InputError(f"{self._label}: {one_line(error)[:300]}") from error
            if element is None:
                return
            yield element, {"examples": number}

    def _pipeline(self, *, shuffle: bool = False, seed: int = 0, repeat: int | None = 1) -> Any:
        """Builds the task's `tf.data.Dataset`.

        Each iteration needs a new one, because a second iteration of a dataset has another order.
        """
        features, length = self._provider.output_features, self.source.task_length
        # Mixtures drop the pretokenized text by default.
        options = {"copy_pretokenized": True} if self.is_mixture else {}
        try:
            return self._provider.get_dataset(
                sequence_length=length and dict.fromkeys(features, length),
                split=self.source.split,
                use_cached=self.source.cached,
                shuffle=shuffle,
                seed=seed,
                num_epochs=repeat,
                trim_output_features=False,  # data.pack cuts whole documents into rows
                **options,
            )
        except (ValueError, TypeError, AssertionError) as error:
            reason = one_line(error)[:300]
            raise InputError(f"{self.source.name}: seqio raises: {reason}") from error

    def _find_key(self, name: str, specs: dict[str, Any]) -> str:
        """Returns the key of a feature's ids, or of its pretokenized text if text is read."""
        reads_ids = self._reads_ids
        keys = [name] if reads_ids else [f"{name}_pretokenized", name]
        for key in keys:
            spec = specs.get(key)
            if spec is not None and (
                spec.dtype.is_integer if reads_ids else spec.dtype == "string"
            ):
                if spec.shape.rank != int(reads_ids):
                    raise InputError(
                        f"{self.source.name}: feature {key} has {spec.shape.rank} axes; a document"
                        " is one text, or one list of ids"
                    )
                return key
        features = ", ".join(f"{key} ({spec.dtype.name})" for key, spec in sorted(specs.items()))
        other = "" if self.source.converter else f", or tokens: {str(not reads_ids).lower()}"
        raise InputError(
            f"{self.source.name} has no {'ids' if reads_ids else 'text'} in {' or '.join(keys)};"
            f" it has {features}: name another feature{other}"
        )


def _content_hash(document: str | np.ndarray) -> float:
    return unit_hash(document if isinstance(document, str) else document.tobytes())


def _same_ids(vocabulary: Any, tokenizer: Any) -> bool:
    """Returns whether a vocabulary gives the same ids as the tokenizer, tested on `_PROBES`."""
    # A PassThroughVocabulary has ids of an unknown tokenizer, so only its size can be compared.
    if isinstance(vocabulary, import_seqio().seqio.PassThroughVocabulary):
        return vocabulary.vocab_size == tokenizer.vocab_size
    return vocabulary.vocab_size <= tokenizer.vocab_size and all(
        list(vocabulary.encode(text)) == tokenizer.encode(text) for text in _PROBES
    )


def _provider(source: SeqioSource) -> Any:
    """Returns the registered Task or Mixture of a source."""
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
        matches = difflib.get_close_matches(source.task, names, n=3, cutoff=0.4)
        raise InputError(
            f"{source.name}: no Task or Mixture of that name is registered"
            + (f"; did you mean {' or '.join(matches)}?" if matches else "")
            + f" (module={source.module or 'none'} should register it)"
        )
    provider = seqio.get_mixture_or_task(source.task)
    check_one_of(f"{source.name}: split", source.split, provider.splits)
    uncached = [t.name for t in seqio.get_subtasks(provider) if not t.supports_caching]
    if source.cached and uncached:
        raise InputError(
            f"{source.name}: cached=true, but {', '.join(uncached)} has no step with a cache"
            " (CacheDatasetPlaceholder): set cached: false"
        )
    return provider


def context_chunks(
    chunks: Chunks,
    length: int,
    *,
    targets: str = "targets",
    context: str | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
) -> Any:
    """Returns a `seqio.FeatureConverter` whose rows have the fields of `lcjax.data.make_loader`.

        converter = context_chunks(Chunks(16, 256), 4096, context="context")
        dataset = seqio.get_dataset(mixture, {"context": 4096, "targets": 4096},
                                    feature_converter=converter, dataset_split="train")

    The text of an example is its feature `context`, followed by its feature `targets`. Each row has
    `length` tokens of the targets for the decoder, and the tokens right before them as chunks. So
    an example of up to `length` tokens is one row, and no token of a longer one is lost. All target
    tokens except the first are learned; with `bos_id` the first one is learned, too.

    Args:
      chunks: number, length and text of the chunks.
      length: number of tokens that the decoder reads in a row.
      targets: feature that the decoder reads.
      context: feature whose text precedes the targets; None: the first row has no context.
      bos_id: token to put before the targets unless they begin with it; None: no token.
      eos_id: token to put after the targets unless they end with it; None: no token.

    Returns:
      The converter. Its rows have these fields, with ids of one vocabulary:
        tokens, targets, segments, positions: int32 [length]; weights: float32 [length].
        chunks: int32 [K, Tc]; chunk_mask: bool [K, Tc], as in `lcjax.data.chunks.cut_context`.

    Raises:
      InputError: seqio is not installed.
    """
    seqio, tf = import_seqio()
    if length < 1:
        raise InputError(f"length={length} must be 1 or more: tokens that the decoder reads")
    spec = seqio.FeatureConverter.FeatureSpec
    integers = ("tokens", "targets", "segments", "positions")
    make_rows = _Rows(tf, chunks, length, bos_id, eos_id)

    class ContextChunks(seqio.FeatureConverter):
        TASK_FEATURES: ClassVar = {
            name: spec(tf.int32) for name in filter(None, (context, targets))
        }
        MODEL_FEATURES: ClassVar = {name: spec(tf.int32) for name in integers} | {
            "weights": spec(tf.float32),
            "chunks": spec(tf.int32, rank=2),
            "chunk_mask": spec(tf.bool, rank=2),
        }
        PACKING_FEATURE_DTYPES: ClassVar = {}

        def _convert_features(self, ds, task_feature_lengths):
            return ds.flat_map(lambda e: make_rows(e[context] if context else None, e[targets]))

        def get_model_feature_lengths(self, task_feature_lengths):
            return dict.fromkeys((*integers, "weights"), length) | {
                "chunks": chunks.count,
                "chunk_mask": chunks.count,
            }

    # `_Rows` fixes the lengths of the output; the length of the input has no limit.
    return ContextChunks(pack=False, apply_length_check=False)


class _Rows:
    """Converts an example to a `tf.data.Dataset` of its rows."""

    def __init__(
        self, tf: Any, chunks: Chunks, length: int, bos_id: int | None, eos_id: int | None
    ):
        self._tf, self._chunks, self._length = tf, chunks, length
        self._bos_id, self._eos_id = bos_id, eos_id

    def __call__(self, context: Any, targets: Any) -> Any:
        tf, length = self._tf, self._length
        context = tf.zeros([0], tf.int32) if context is None else context
        ids = self._with_special(targets)
        # The last token has no target, so it does not begin another row.
        count = (tf.maximum(tf.size(ids) - 1, 0) + length - 1) // length

        def row(start):
            tokens, next_tokens = (ids[i : i + length] for i in (start, start + 1))
            text = tokens if self._chunks.text == "same" else self._before(context, ids, start)
            return self._chunk_fields(text) | {
                "tokens": self._pad(tokens),
                "targets": self._pad(next_tokens),
                "segments": self._pad(tf.ones_like(tokens)),
                "positions": self._pad(tf.range(tf.size(tokens))),
                "weights": tf.cast(self._pad(tf.ones_like(next_tokens)), tf.float32),
            }

        return tf.data.Dataset.from_tensor_slices(tf.range(count) * length).map(row)

    def _with_special(self, ids: Any) -> Any:
        """Adds BOS and EOS if they are missing."""
        tf = self._tf
        for token, is_bos in ((self._bos_id, True), (self._eos_id, False)):
            if token is None:
                continue
            end = ids[:1] if is_bos else ids[-1:]
            missing = tf.logical_not(tf.reduce_all(end == token))  # an empty text stays empty
            count = tf.cast(missing, tf.int32)
            ids = tf.pad(ids, [[count, 0] if is_bos else [0, count]], constant_values=token)
        return ids

    def _before(self, context: Any, ids: Any, start: Any) -> Any:
        tf, size = self._tf, self._chunks.tokens
        return tf.concat([context[-size:], ids[tf.maximum(start - size, 0) : start]], 0)

    def _chunk_fields(self, text: Any) -> dict[str, Any]:
        tf, shape = self._tf, [self._chunks.count, self._chunks.length]
        text = text[-self._chunks.tokens :]
        padding = [[self._chunks.tokens - tf.size(text), 0]]
        return {
            "chunks": tf.reshape(tf.pad(text, padding), shape),
            "chunk_mask": tf.reshape(tf.pad(tf.ones_like(text, tf.bool), padding), shape),
        }

    def _pad(self, values: Any) -> Any:
        tf = self._tf
        values = tf.pad(values, [[0, self._length - tf.size(values)]])
        return tf.ensure_shape(values, [self._length])


class SeqioModules(NamedTuple):
    """The modules that the reader imports when it is used."""

    seqio: Any
    tensorflow: Any


def import_seqio() -> SeqioModules:
    """Returns the modules seqio and tensorflow."""
    # Hides pages of warnings about GPU libraries.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        import seqio
        import tensorflow as tf
    except ImportError as error:
        raise InputError(
            f"data.sources of type seqio need {install_command('seqio')}, which brings TensorFlow"
            f" (2.4 GB): {error}"
        ) from None
    # TensorFlow would allocate all GPU memory. This fails where the caller already uses its GPUs.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    return SeqioModules(seqio, tf)
