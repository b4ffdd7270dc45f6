"""Documents of a Task or Mixture from seqio's registries, as a stream with an exact position.

A task is a TensorFlow pipeline that can only be read in order. Its own shuffling and mixing, with
the seed of the data, are deterministic, so the number of examples read is the whole position: to
resume, the pipeline is built again and that many examples are skipped, which costs reading them
again. seqio and TensorFlow are imported only where a source of this type is opened.
"""

import copy
import difflib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np

from lcjax.data.chat_files import Plain
from lcjax.data.config import SeqioSource
from lcjax.data.readers import decode, unit_hash
from lcjax.data.seqio_chunks import import_seqio
from lcjax.errors import InputError

# Tokenizers that give the same ids here, words, digits, spaces, scripts and code, are the same.
_PROBES = (
    "The quick brown fox doesn't jump over 1234567890 lazy dogs; it's 3.14 times too slow.",
    "Naïve café, Straße, Привет мир, 日本語のテキスト, 🙂 and \t two  spaces.",
    "def f(x, *y):\n    return x ** 2 != {'a': [1, 22, 333]}  # --- end",
)


Value = str | np.ndarray | Plain  # text, int32 ids, or what is read beside what is learned


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
        self.mixes = isinstance(self._provider, import_seqio()[0].Mixture)
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
            document = Plain(*values) if self.source.prompt else values[-1]
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
            return decode(value, where=where, on_bad_text=self._on_bad_text)
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
        more = {"copy_pretokenized": True} if self.mixes else {}
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
