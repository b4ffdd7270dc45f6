"""seqio Tasks and Mixtures of the sources of a `data:` section, for programs that read those.

    register("my_books", DataConfig(path="books", length=4096), tokenizer)
    seqio.get_mixture_or_task("my_books")

`lcjax.data.seqio_corpora` does so for the papers' mixtures.
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

    An example is one row: its token ids (int32, without padding) as feature `targets`; with
    `config.chunks` those of the decoder, and the context before them as `context`, which
    `lcjax.data.seqio_source.context_chunks` cuts. Rows are of equal length, so the rates of the
    Mixture are shares of the tokens, which they are not where examples are documents. Rows end with
    the data: documents are read once, in another order for each seed; epochs are seqio's.

    `tokenizer` may be the name of one, which is then opened when the first row is read.

    Returns:
      The names of the Tasks: `name`_0, `name`_1, ... in the order of the sources.
    """
    seqio, _ = import_seqio()
    sources = config.resolved_sources()
    for i, source in enumerate(sources):
        _check(i, source, config)

    @functools.cache
    def get() -> Tokenizer:
        return load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer

    feature = seqio.Feature(_vocabulary(get), add_eos=False)
    names = ("context", "targets") if _in_two(config) else ("targets",)
    tasks = [f"{name}_{i}" for i in range(len(sources))]
    for task, source in zip(tasks, sources, strict=True):
        splits = ["train", "validation"] if config.holdout else ["train"]
        seqio.TaskRegistry.add(
            task,
            seqio.FunctionDataSource(_reader(config, source, get), splits=splits),
            preprocessors=[],
            output_features=dict.fromkeys(names, feature),
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


def _in_two(config: DataConfig) -> bool:
    """Whether rows have a context of their own, not the decoder's tokens once more."""
    return config.chunks is not None and config.chunks.text == "before"


def _check(i: int, source: Source, config: DataConfig) -> None:
    if isinstance(source, SeqioSource):
        raise InputError(
            f"data.sources.{i} is a Task of seqio already: {source.task}; leave it out"
        )
    if isinstance(source, ChatSource) and source.learn != "all":
        raise InputError(
            f"data.sources.{i} learns its answers only, which features of a Task cannot say: set"
            " learn: all, or leave it out"
        )
    if config.masking is not None:
        raise InputError("data.masking hides tokens row by row, not in a Task: leave it out")


def _reader(config: DataConfig, source: Source, tokenizer: Callable[[], Tokenizer]) -> Callable:
    """seqio's function of split, shuffle and seed to a dataset."""
    _, tf = import_seqio()
    names = ("context", "targets") if _in_two(config) else ("targets",)
    signature = dict.fromkeys(names, tf.TensorSpec([None], tf.int32))

    def read(split: str, shuffle_files: bool, seed: int | None = None) -> Any:
        order = {"shuffle": shuffle_files, "seed": int(seed or 0) % 2**32, "repeat": 1}
        one = replace(config, path="", sources=[source], **order)
        check_sources(one)  # refused here, where an error is still one of Python's
        rows = functools.partial(_examples, one, tokenizer(), split)
        return tf.data.Dataset.from_generator(rows, output_signature=signature)

    return read


def _examples(
    config: DataConfig, tokenizer: Tokenizer, split: str
) -> Iterator[dict[str, np.ndarray]]:
    with contextlib.closing(make_loader(config, tokenizer, 1, split=split)) as loader:
        for batch in loader:
            example = {"targets": batch["tokens"][batch["segments"] > 0]}
            if _in_two(config):
                example["context"] = batch["chunks"][batch["chunk_mask"]]
            yield example


def _vocabulary(tokenizer: Callable[[], Tokenizer]) -> Any:
    """A `seqio.Vocabulary` with the ids of a tokenizer."""
    seqio, tf = import_seqio()

    class Ids(seqio.Vocabulary):
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
                text = np.asarray(text, object).item()  # bytes; outside a graph in an array
                return np.array(self._encode(text.decode()), np.int32)

            s = tf.convert_to_tensor(s)
            return tf.ensure_shape(tf.numpy_function(encode, [s], tf.int32), [None])

        def _decode_tf(self, ids):
            def decode(ids):
                return self._decode(ids.tolist()).encode()

            return tf.ensure_shape(tf.numpy_function(decode, [ids], tf.string), [])

        def __eq__(self, other):
            mine = isinstance(other, type(self))
            return mine and other.fingerprint == self.fingerprint

        __hash__ = object.__hash__

        @property
        def fingerprint(self):
            return tokenizer().fingerprint

    return Ids()


# Shares of RedPajama's sets in CEPE's rows across all documents (Yen et al. 2024, app. A).
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
    """CEPE's rows of 4,096 + 4,096 tokens, those of `cepe_filter` and `cepe_cat` 2:1.

    Yen et al. 2024 (arXiv 2402.16617), sec. 3.1. `folder`/redpajama is RedPajama (v1), tokenised
    with its sets as labels.
    """
    return _cepe([*cepe_filter(folder).sources, *cepe_cat(folder).sources])


def cepe_filter(folder: str = "data") -> DataConfig:
    """Rows inside long documents, 4,096 apart: ArXiv and books, half each (train-filter)."""
    place = str(Path(folder, "redpajama"))
    rows = {"pack": "windows", "stride": 4096}
    return _cepe([TokenSource(place, 1.0, labels=[label], **rows) for label in ("arxiv", "book")])


def cepe_cat(folder: str = "data") -> DataConfig:
    """Rows across all documents of a set, 4,096 apart (train-cat)."""
    place = str(Path(folder, "redpajama"))
    pairs = REDPAJAMA.items()
    return _cepe([TokenSource(place, share, labels=[label], stride=4096) for label, share in pairs])


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
    """SlimPajama, up-sampled by length when it was tokenised, in rows cut anywhere.

    Fu et al. 2024 (arXiv 2402.10171), sec. 3, as the LCEG study has it (Lu et al. 2024, arXiv
    2409.12181): BOS before every document, no EOS, no document mask.
    """
    source = TokenSource(str(Path(folder, "slimpajama_upsampled")), rows=True)
    return DataConfig(
        sources=[source], length=length, document_mask=False, add_bos=True, add_eos=False
    )
