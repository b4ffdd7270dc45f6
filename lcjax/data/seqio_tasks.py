"""Registers the sources of a `data:` section as Tasks and Mixtures of seqio, for other programs.

    register("my_books", DataConfig(path="books", length=4096), tokenizer)
    seqio.get_mixture_or_task("my_books")

`lcjax.data.seqio_corpora` registers the training mixtures of the papers.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lcjax.checkpoints import Tokenizer, load_tokenizer
from lcjax.data.corpus import check_sources
from lcjax.data.data_config import ChatSource, DataConfig, SeqioSource, Source
from lcjax.data.loader import make_loader
from lcjax.data.seqio_source import import_seqio
from lcjax.errors import InputError


def register(name: str, config: DataConfig, tokenizer: Tokenizer | str) -> list[str]:
    """Registers a Task for each source of `config`, and the Mixture `name` of them by weight.

    An example is one row, with its token ids (int32, without padding) as feature `targets`. With
    `config.chunks` the targets are the decoder's tokens, and the feature `context` holds the tokens
    before them, for `lcjax.data.seqio_source.context_chunks`. Rows are of equal length, so the
    rates of the Mixture are shares of the tokens. A Task reads the documents once, in an order that
    depends on the seed; seqio repeats them.

    Args:
      name: name of the Mixture.
      config: the sources, and how they become rows.
      tokenizer: a tokenizer, or the name of one, which is opened when the first row is read.

    Returns:
      The names of the Tasks: `name`_0, `name`_1, ... in the order of the sources.

    Raises:
      InputError: a Task cannot represent one of the sources.
    """
    seqio, _ = import_seqio()
    sources = config.resolved_sources()
    for i, source in enumerate(sources):
        _check(i, source, config)

    @functools.cache
    def get_tokenizer() -> Tokenizer:
        return load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer

    feature = seqio.Feature(_vocabulary(get_tokenizer), add_eos=False)
    tasks = [f"{name}_{i}" for i in range(len(sources))]
    for task, source in zip(tasks, sources, strict=True):
        splits = ["train", "validation"] if config.holdout else ["train"]
        seqio.TaskRegistry.add(
            task,
            seqio.FunctionDataSource(_reader(config, source, get_tokenizer), splits=splits),
            preprocessors=[],
            output_features=dict.fromkeys(_features(config), feature),
        )
    rates = [(task, source.weight) for task, source in zip(tasks, sources, strict=True)]
    seqio.MixtureRegistry.add(name, rates)
    return tasks


def _features(config: DataConfig) -> tuple[str, ...]:
    """Returns the features of an example; `context` holds the tokens before the decoder's."""
    has_context = config.chunks is not None and config.chunks.text == "before"
    return ("context", "targets") if has_context else ("targets",)


def _check(i: int, source: Source, config: DataConfig) -> None:
    if isinstance(source, SeqioSource):
        raise InputError(
            f"data.sources.{i} is a Task of seqio already: {source.task}; leave it out"
        )
    if isinstance(source, ChatSource) and source.learn != "all":
        raise InputError(
            f"data.sources.{i} learns its answers only, which features of a Task cannot express:"
            " set learn: all, or leave it out"
        )
    if config.masking is not None:
        raise InputError("data.masking hides tokens row by row, not in a Task: leave it out")


def _reader(config: DataConfig, source: Source, tokenizer: Callable[[], Tokenizer]) -> Callable:
    """Returns the function from split, shuffle and seed to a dataset, for seqio."""
    _, tf = import_seqio()
    signature = dict.fromkeys(_features(config), tf.TensorSpec([None], tf.int32))

    def read(split: str, shuffle_files: bool, seed: int | None = None) -> Any:
        order = {"shuffle": shuffle_files, "seed": int(seed or 0) % 2**32, "repeat": 1}
        source_config = replace(config, path="", sources=[source], **order)
        check_sources(source_config)  # TensorFlow would wrap an error of the generator
        rows = functools.partial(_examples, source_config, tokenizer(), split)
        return tf.data.Dataset.from_generator(rows, output_signature=signature)

    return read


def _examples(
    config: DataConfig, tokenizer: Tokenizer, split: str
) -> Iterator[dict[str, np.ndarray]]:
    with contextlib.closing(make_loader(config, tokenizer, 1, split=split)) as loader:
        for batch in loader:
            example = {"targets": batch["tokens"][batch["segments"] > 0]}
            if "context" in _features(config):
                example["context"] = batch["chunks"][batch["chunk_mask"]]
            yield example


def _vocabulary(tokenizer: Callable[[], Tokenizer]) -> Any:
    """Returns a `seqio.Vocabulary` with the ids of a tokenizer."""
    seqio, tf = import_seqio()

    class TokenizerVocabulary(seqio.Vocabulary):
        @property
        def bos_id(self):
            return tokenizer().bos_id

        @property
        def eos_id(self):
            return next(iter(tokenizer().eos_ids), None)

        @property
        def unk_id(self):
            return getattr(tokenizer(), "unk_id", None)

        @property
        def _base_vocab_size(self):
            return tokenizer().vocab_size

        def _encode(self, s):
            return list(tokenizer().encode(s))

        def _decode(self, ids):
            return tokenizer().decode(list(ids))

        def _encode_tf(self, s):
            def encode(text):
                text = np.asarray(text, object).item()  # bytes; an array of bytes in eager mode
                return np.array(self._encode(text.decode()), np.int32)

            s = tf.convert_to_tensor(s)
            return tf.ensure_shape(tf.numpy_function(encode, [s], tf.int32), [None])

        def _decode_tf(self, ids):
            def decode(ids):
                return self._decode(ids.tolist()).encode()

            return tf.ensure_shape(tf.numpy_function(decode, [ids], tf.string), [])

        def __eq__(self, other):
            return isinstance(other, type(self)) and other.fingerprint == self.fingerprint

        __hash__ = object.__hash__

        @property
        def fingerprint(self):
            return tokenizer().fingerprint

    return TokenizerVocabulary()
