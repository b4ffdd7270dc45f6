"""Registers the sources of a `data:` section as Tasks and Mixtures of seqio, for other programs.

    register("my_books", DataConfig(path="books", length=4096), tokenizer)
    seqio.get_mixture_or_task("my_books")

Also the training mixtures of the papers as `data:` sections, over folders that `prepare` wrote.
Importing `lcjax.data.seqio_corpora` registers them.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lcjax.checkpoints import Tokenizer, load_tokenizer
from lcjax.data.chunks import Chunks
from lcjax.data.config import ChatSource, DataConfig, SeqioSource, Source, TokenSource
from lcjax.data.corpus import check_sources
from lcjax.data.loader import make_loader
from lcjax.data.prepare import TOKENIZER
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


def register_papers(folder: str = "data") -> None:
    """Registers the training mixtures of the papers, over folders that `prepare` wrote.

    The names are `lcjax_cepe_filter`, `lcjax_cepe_cat`, `lcjax_cepe` (2:1 of these two) and
    `lcjax_slimpajama_upsampled`. No file is opened before the first row is read.

    Args:
      folder: folder that holds the folders `redpajama` and `slimpajama_upsampled`.
    """
    for name, make_config, corpus in (
        ("cepe_filter", cepe_filter, "redpajama"),
        ("cepe_cat", cepe_cat, "redpajama"),
        ("slimpajama_upsampled", slimpajama_upsampled, "slimpajama_upsampled"),
    ):
        register(f"lcjax_{name}", make_config(folder), str(Path(folder, corpus, TOKENIZER)))
    seqio, _ = import_seqio()
    seqio.MixtureRegistry.add("lcjax_cepe", [("lcjax_cepe_filter", 2.0), ("lcjax_cepe_cat", 1.0)])


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


# Shares of RedPajama's sets in CEPE's rows across documents (Yen et al. 2024, app. A).
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
    """Returns CEPE's rows of 4,096 + 4,096 tokens: `cepe_filter` and `cepe_cat`, 2:1.

    Yen et al. 2024 (arXiv 2402.16617), sec. 3.1. The folder `folder`/redpajama holds RedPajama
    (v1), tokenised with its sets as labels.
    """
    return _cepe([*cepe_filter(folder).sources, *cepe_cat(folder).sources])


def cepe_filter(folder: str = "data") -> DataConfig:
    """Returns rows within long documents of ArXiv and books, half each (train-filter)."""
    path = str(Path(folder, "redpajama"))
    rows = {"pack": "windows", "stride": 4096}
    return _cepe([TokenSource(path, 1.0, labels=[label], **rows) for label in ("arxiv", "book")])


def cepe_cat(folder: str = "data") -> DataConfig:
    """Returns rows across all documents of each set (train-cat)."""
    path = str(Path(folder, "redpajama"))
    pairs = REDPAJAMA.items()
    return _cepe([TokenSource(path, share, labels=[label], stride=4096) for label, share in pairs])


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
    """Returns rows of SlimPajama, which `prepare` up-sampled by length, cut anywhere.

    Fu et al. 2024 (arXiv 2402.10171), sec. 3, as in the LCEG study (Lu et al. 2024, arXiv
    2409.12181): BOS before every document, no EOS, no document mask.
    """
    source = TokenSource(str(Path(folder, "slimpajama_upsampled")), rows=True)
    return DataConfig(
        sources=[source], length=length, document_mask=False, add_bos=True, add_eos=False
    )
