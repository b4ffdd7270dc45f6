"""Encoders: map texts to vectors; the score of a query and a passage is their product.

    encoder = open_encoder("path/to/all-MiniLM-L6-v2")
    scores = encoder.encode_queries(["what is a dog?"]) @ encoder.encode_passages(texts).T

`BertEncoder` reads the checkpoints of dense retrievers, `DecoderEncoder` pools the hidden states of
a language model, and `StaticEncoder` averages the vectors of a table. The re-rankers `CrossEncoder`
and `LateInteraction` (ColBERT) of `lcjax.retrieval.rerankers` score a query and a passage together.
"""

import abc
import copy
import functools
import hashlib
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from lcjax.checkpoints.bert_folder import POOLINGS, BertFolder, read_modules
from lcjax.checkpoints.families import FAMILIES
from lcjax.checkpoints.hf_files import check_folder_sums, read_hf_json
from lcjax.checkpoints.hub import find_encoder, is_run
from lcjax.errors import (
    InputError,
    check_arguments,
    check_integer,
    check_one_of,
    missing_extra,
    one_line,
    suggestion,
)
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.passages import join_title
from lcjax.generation.programs import without_rope
from lcjax.models.bert import MODEL_TYPES
from lcjax.models.decoder import Decoder
from lcjax.parallel.digest import weights_digest
from lcjax.parallel.sharding import Mesh, device_mesh, keep_rows
from lcjax.retrieval.rerankers import CrossEncoder, LateInteraction
from lcjax.retrieval.token_batches import (
    Batching,
    LengthLimit,
    LoadedBert,
    Pool,
    TokenBatch,
    TokenRow,
    check_texts,
    checkpoint_name,
    pair_row,
    text_row,
)
from lcjax.rope import Rotation

# Contriever and BEIR join the title and the text of a passage with a blank.
with_title = functools.partial(join_title, separator=" ")


class Encoder(abc.ABC):
    """Maps queries and passages to vectors; the score of two texts is the product of their vectors.

    A subclass defines `encode` and the attributes.

    Attributes:
      dim: size of a vector.
      name: name of the checkpoint in messages and tables.
      fingerprint: digest of everything that changes vectors, except for rounding: weights,
        tokenizer and settings.
      max_tokens: tokens of the longest text, special tokens included; None: no limit.
      pooling: method that reduces token vectors to one vector, such as mean or cls.
    """

    dim: int
    name: str
    fingerprint: str
    max_tokens: int | None
    pooling: str

    def encode_queries(self, texts: Sequence[str]) -> Float[np.ndarray, "n D"]:
        """Returns float32 vectors [n, D] of queries, in the order of `texts`."""
        return self.encode(check_texts("texts", texts), None, is_query=True)

    def encode_passages(
        self, texts: Sequence[str], titles: Sequence[str] | None = None
    ) -> Float[np.ndarray, "n D"]:
        """Returns float32 vectors [n, D] of passages, in the order of `texts`.

        Args:
          texts: the passages.
          titles: a title for each passage, which the encoder reads before the text in the format of
            its training; None: no titles.
        """
        texts = check_texts("texts", texts)
        if titles is not None and len(check_texts("titles", titles)) != len(texts):
            raise InputError(f"titles={len(titles)} must be as many as texts, {len(texts)}")
        return self.encode(texts, titles, is_query=False)

    @abc.abstractmethod
    def encode(
        self, texts: Sequence[str], titles: Sequence[str] | None, is_query: bool
    ) -> np.ndarray:
        """Returns float32 vectors [n, dim] of texts that `check_texts` has accepted; n may be 0."""


class BertEncoder(Encoder):
    """An encoder that pools the token vectors of a BERT: DPR, Contriever, MiniLM, GTE, BGE, E5.

    Pooling and normalisation are properties of a checkpoint. The table in docs/retrieval.md lists
    them for known families.
    """

    def __init__(
        self,
        query: LoadedBert,
        passage: LoadedBert,
        pool: Pool,
        *,
        prefixes: tuple[str, str],
        name: str,
        max_tokens: int,
        on_long: str,
        batch_tokens: int | None,
    ):
        """Combines loaded parts; use `load` to open a checkpoint."""
        self.query, self.passage, self.pool, self.prefixes = query, passage, pool, prefixes
        self.dim, self.name = passage.model.config.width, name
        self.pooling, self.normalize, self.max_tokens = pool.pooling, pool.normalize, max_tokens
        # DPR reads a title as the first text of a pair, with one token type for both, and a text
        # without a title as a single text. Other encoders read the title and the text as one text.
        self.reads_pairs = passage.folder.is_dpr
        self._limit = LengthLimit(max_tokens, on_long, name)
        self._batching = Batching(max_tokens, batch_tokens, passage.model.mesh)
        settings = {"pooling": pool.pooling, "normalize": pool.normalize, "prefixes": prefixes}
        self._sides = [side.fingerprint(**settings, max=max_tokens) for side in (query, passage)]

    @property
    def fingerprint(self) -> str:
        values = self._sides
        if self.reads_pairs != self.passage.folder.is_dpr:  # a DPR in training
            values = [*values, {"reads_pairs": self.reads_pairs}]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]

    @classmethod
    @check_arguments
    def load(
        cls,
        folder: str | Path,
        *,
        query_folder: str | Path | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        max_tokens: int | None = None,
        on_long: str = "truncate",
        dtype: str = "float32",
        mesh: Mesh | jax.sharding.Mesh | None = None,
        batch_tokens: int | None = None,
        allow_pickle: bool = False,
    ) -> "BertEncoder":
        """Opens a BERT checkpoint of transformers or sentence-transformers.

        Args:
          folder: path or hub id. With separate encoders (DPR), the encoder of passages, or a folder
            with the subfolders `query` and `passage`, as a training writes it.
          query_folder: path or hub id of a separate encoder of queries; None: `folder` encodes
            queries, too.
          pooling: mean, cls or max over the last hidden states; None: the setting of the folder.
          normalize: whether vectors have unit length; None: the setting of the folder, or False if
            it has none.
          query_prefix: text before every query ("query: " for E5); None: the prefix of the folder.
          passage_prefix: text before every passage; None: the prefix of the folder.
          max_tokens: tokens of the longest text, at most the limit of the folder; None: this limit.
          on_long: "truncate" reads the first tokens of longer texts and warns; "error" raises an
            InputError.
          dtype: dtype of weights and activations. Pooling and vectors are float32.
          mesh: mesh whose devices share the texts; None: one device.
          batch_tokens: tokens of a batch, padding included; None: a size that suits the platform.
          allow_pickle: whether `.bin` files are read (with a restricted reader).

        Raises:
          InputError: the folder is not a BERT encoder, lacks a setting that no argument gives,
            contradicts an argument, or holds NaN.
        """
        mesh = device_mesh(mesh)
        path = find_encoder(folder, allow_pickle=allow_pickle)
        name = checkpoint_name(folder)
        if query_folder is None and has_two_encoders(path):
            check_folder_sums(path)
            folder, query_folder = path / "passage", path / "query"
        folders = [
            BertFolder(find_encoder(path, allow_pickle=allow_pickle), allow_pickle=allow_pickle)
            for path in (folder, query_folder)
            if path is not None
        ]
        passage = folders[0]
        pool = _pool_of(passage, pooling, normalize)
        longest = min(one.max_tokens for one in folders)
        if max_tokens is not None:
            check_integer("max_tokens", max_tokens, 3, "of this encoder", most=longest)
        if len({one.config.width for one in folders}) > 1:
            widths = " and ".join(str(one.config.width) for one in folders)
            raise InputError(f"query_folder={query_folder}: vectors of {widths} numbers do not fit")
        loaded = [LoadedBert.load(one, pool, dtype=dtype, mesh=mesh) for one in folders]
        modules = folders[-1].modules, passage.modules
        defaults = modules[0] and modules[0].query_prefix, modules[1] and modules[1].passage_prefix
        prefixes = [
            (default or "") if prefix is None else prefix
            for prefix, default in zip((query_prefix, passage_prefix), defaults)
        ]
        check_texts("query_prefix, passage_prefix", prefixes)
        return cls(
            loaded[-1],
            loaded[0],
            pool,
            prefixes=tuple(prefixes),
            name=name,
            max_tokens=longest if max_tokens is None else max_tokens,
            on_long=on_long,
            batch_tokens=batch_tokens,
        )

    def encode(
        self, texts: Sequence[str], titles: Sequence[str] | None, is_query: bool
    ) -> np.ndarray:
        bert = self.query if is_query else self.passage
        limit, vectors = copy.copy(self._limit), np.empty((len(texts), self.dim), np.float32)

        def rows(part: slice) -> list[TokenRow]:
            heads = None if titles is None else titles[part]
            return self.token_rows(texts[part], heads, is_query, limit)

        self._batching.run(bert.apply, rows, vectors)
        limit.warn()
        return vectors

    def token_rows(
        self,
        texts: Sequence[str],
        titles: Sequence[str] | None,
        is_query: bool,
        limit: LengthLimit,
    ) -> list[TokenRow]:
        """Returns the tokens that the model reads: prefix, title and text between special tokens.

        Args:
          texts: queries or passages.
          titles: titles of passages; None: no titles.
          is_query: whether the texts are queries.
          limit: limit to which long texts are cut; counts the texts that it cuts.
        """
        tokenizer = (self.query if is_query else self.passage).folder.tokenizer
        prefix, bodies = self.prefixes[not is_query], list(texts)
        has_pairs = titles is not None and self.reads_pairs
        if titles is not None and not has_pairs:
            bodies = [with_title(*pair) for pair in zip(titles, bodies)]
        ids = tokenizer.encode([prefix + body for body in bodies])
        heads = tokenizer.encode(list(titles)) if has_pairs else [[]] * len(ids)
        return [
            pair_row(tokenizer, limit, head, one)._replace(second=None)
            if head
            else text_row(tokenizer, limit.cut(one, 2))
            for head, one in zip(heads, ids)
        ]


def has_two_encoders(path: Path) -> bool:
    """Returns whether a folder holds an encoder of queries and an encoder of passages."""
    return all((path / name / "config.json").is_file() for name in ("query", "passage"))


def _pool_of(folder: BertFolder, pooling: str | None, normalize: bool | None) -> Pool:
    """Returns the pooling of the folder, or that of the arguments if the folder has no settings."""
    modules = folder.modules
    if modules is None:
        if pooling is None:
            raise InputError(
                f"{folder.path}: has no modules.json that says how token vectors are pooled; pass"
                " pooling='mean', 'cls' or 'max' and normalize=True or False as the model was"
                " trained (Contriever: mean, False)"
            )
        check_one_of("pooling", pooling, POOLINGS)
        return Pool(pooling, bool(normalize))
    for key, value in (("pooling", pooling), ("normalize", normalize)):
        trained = getattr(modules, key)
        if value is not None and value != trained:
            raise InputError(
                f"{key}={value!r}: {folder.path} was trained with {trained!r}; leave it out"
            )
    return Pool(modules.pooling, modules.normalize)


def model_fingerprint(lm: LanguageModel) -> str:
    """Returns a digest of everything that determines a model's states.

    These are the weights, the tokenizer, the positions, the RoPE method and the pattern, and the
    length of the model if it changes the rotation.
    """
    config = lm.config
    values = [weights_digest(lm.params), lm.tokenizer.fingerprint]
    values += [repr(x) for x in (config.position, config.rope, config.pattern, *config.layers)]
    # The length replaces the rotation, whose last bits may differ between devices.
    follows = lm.depends_on_length and lm.length is not None
    if follows and not lm.rotation(lm.length).equals(config.rotation(1, lm.params.get("rope"))):
        values.append(lm.length)
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


class DecoderEncoder(Encoder):
    """An encoder that pools hidden states of a language model; needs no encoder checkpoint."""

    @check_arguments
    def __init__(
        self,
        lm: LanguageModel,
        *,
        layer: int | None = None,
        pooling: str = "mean",
        normalize: bool = True,
        max_tokens: int | None = None,
        on_long: str = "truncate",
        batch_tokens: int | None = None,
        name: str = "decoder",
    ):
        """Wraps a language model; its weights are shared, not copied.

        Args:
          lm: the language model. The mean leaves out the BOS token, because its hidden state is
            many times larger than the others.
          layer: layer whose output is pooled, counted from 1; the output of the last layer is
            pooled after the final norm. None: the middle layer.
          pooling: mean, or last (the state of the last token).
          normalize: whether vectors have unit length.
          max_tokens: tokens of the longest text; None: the trained length.
          on_long, batch_tokens: as in `BertEncoder.load`.
          name: name of the encoder in messages and tables.
        """
        config = lm.config
        if layer is None:
            layer = max(config.num_layers // 2, 1)
        check_integer("layer", layer, 1, most=config.num_layers)
        check_one_of("pooling", pooling, ("mean", "last"))
        max_tokens = config.max_length if max_tokens is None else max_tokens
        check_integer("max_tokens", max_tokens, 2)
        config.check_length(max_tokens)
        if not config.is_position_based or config.pattern.inserts_tokens:
            names = " or ".join(type(pattern).__name__ for pattern in config.patterns)
            raise InputError(
                f"pattern {names} chooses keys by their content; an encoder needs one whose visible"
                " keys depend on positions alone: with_method(pattern=...)"
            )
        self._lm, self._layer = lm, layer
        self._pool = Pool(pooling, normalize, skip=int(lm.tokenizer.add_bos))
        self.dim, self.name, self.pooling, self.max_tokens = config.width, name, pooling, max_tokens
        self._limit = LengthLimit(max_tokens, on_long, name)
        self._batching = Batching(max_tokens, batch_tokens, lm.mesh)
        values = [model_fingerprint(lm), layer, max_tokens, repr(self._pool)]
        self.fingerprint = hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]

    def encode(
        self, texts: Sequence[str], titles: Sequence[str] | None, is_query: bool
    ) -> np.ndarray:
        lm, limit = self._lm, copy.copy(self._limit)
        vectors = np.empty((len(texts), self.dim), np.float32)

        def rows(part: slice) -> list[TokenRow]:
            bodies = texts[part]
            if titles is not None:
                bodies = [with_title(*pair) for pair in zip(titles[part], bodies)]
            ids = (limit.cut(lm.encode(body), 0) for body in bodies)
            return [TokenRow(one or lm.tokenizer.eos_ids[:1] or [0], len(one)) for one in ids]

        def apply(batch: TokenBatch) -> jax.Array:
            rotation = lm.rotations(batch.lengths)
            model = without_rope(lm.model)  # which has a program for all RoPE methods
            return _apply_decoder(model, self._layer, self._pool, lm.params, rotation, batch)

        self._batching.run(apply, rows, vectors)
        limit.warn()
        return vectors


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _apply_decoder(
    model: Decoder, layer: int, pool: Pool, params: dict, rotation: Rotation, batch: TokenBatch
) -> jax.Array:
    """Pools the output of a layer; XLA drops the layers after it."""
    batch = TokenBatch(*(keep_rows(jnp.asarray(x), model.mesh) for x in batch))
    name = f"layers_{layer - 1}"
    segments = (jnp.arange(batch.tokens.shape[1]) < batch.lengths[:, None]).astype(jnp.int32)
    output, state = model.apply(
        {"params": params},
        batch.tokens,
        segments=segments,
        rotation=rotation,
        capture_intermediates=lambda module, method: module.name == name,
        mutable=["intermediates"],
    )
    hidden = output.hidden
    if layer < model.config.num_layers:
        hidden, _ = state["intermediates"][name]["__call__"][0]
    return pool(None, {}, hidden, batch)


class StaticEncoder(Encoder):
    """An encoder that averages a fixed vector of each token: the distilled tables of model2vec.

    It has no layers to compute, so it is fast on a CPU.
    """

    def __init__(self, model: Any, name: str = "model2vec"):
        """Wraps a `model2vec.StaticModel`."""
        self._model, self.name, self.pooling = model, name, "mean"
        self.dim, self.max_tokens = int(model.dim), None
        digest = hashlib.sha256(np.ascontiguousarray(model.embedding).tobytes())
        for array in (model.weights, model.token_mapping):
            digest.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
        digest.update(f"{bool(model.normalize)} {model.tokenizer.to_str()}".encode())
        self.fingerprint = digest.hexdigest()[:16]

    @classmethod
    @check_arguments
    def load(cls, folder: str | Path) -> "StaticEncoder":
        """Opens a folder of model2vec, which needs the extra `retrieval`.

        Raises:
          InputError: model2vec is not installed, or the folder is not a static model.
        """
        try:
            from model2vec import StaticModel
        except ImportError as error:
            raise missing_extra("a static encoder", "model2vec", "retrieval", error) from None
        path = find_encoder(folder)
        try:
            return cls(StaticModel.from_pretrained(path), checkpoint_name(folder))
        except Exception as error:  # model2vec lets the exceptions of its file readers through
            reason = one_line(error)[:200]
            raise InputError(f"{path}: not a folder of model2vec ({reason})") from error

    def encode(
        self, texts: Sequence[str], titles: Sequence[str] | None, is_query: bool
    ) -> np.ndarray:
        if not len(texts):
            return np.empty((0, self.dim), np.float32)
        if titles is not None:
            texts = [with_title(*pair) for pair in zip(titles, texts)]
        # An average can read texts of any length.
        options = {"max_length": None, "use_multiprocessing": False}
        return np.asarray(self._model.encode(list(texts), **options), np.float32)


@check_arguments
def open_encoder(
    path_or_name: str | Path, **options: Any
) -> Encoder | CrossEncoder | LateInteraction:
    """Opens an encoder or re-ranker; the files of the folder determine its class.

    The folder may hold a model2vec table, ColBERT (`linear.weight`), a cross-encoder
    (`classifier.weight`), another BERT, or a language model. A language model may also be a `.gguf`
    file, a run folder, or the name of an installed wheel.

    Args:
      path_or_name: a path or hub id.
      **options: arguments of the class's `load`; for a language model those of `DecoderEncoder`,
        `mesh` and `allow_pickle`.

    Raises:
      InputError: no class can read the folder, or its class has no such option.
    """
    path = find_encoder(path_or_name, allow_pickle=bool(options.get("allow_pickle")))
    kind = encoder_class(path, bool(options.get("allow_pickle")))
    signature = inspect.signature(DecoderEncoder if kind is DecoderEncoder else kind.load)
    known = [n for n in signature.parameters if n not in ("lm", "folder")]
    if kind is DecoderEncoder:
        known += ["mesh", "allow_pickle"]
    for name in options:
        if name not in known:
            guess = suggestion(name, known)
            raise InputError(
                f"{name} is no option of a {kind.__name__}, which {path} holds; {guess}"
            )
    if kind is not DecoderEncoder:
        return kind.load(path_or_name, **options)
    load = {key: options.pop(key) for key in ("mesh", "allow_pickle") if key in options}
    lm = LanguageModel.load(str(path_or_name), **load)
    return DecoderEncoder(lm, **{"name": checkpoint_name(path_or_name)} | options)


def encoder_class(path: Path, allow_pickle: bool) -> type:
    """Returns the class that reads an encoder's folder, without reading the weights.

    Raises:
      InputError: no class can read the folder.
    """
    if path.is_file() or is_run(path):
        return DecoderEncoder
    if has_two_encoders(path):
        return BertEncoder
    if modules := read_modules(path):
        return StaticEncoder if modules[0][0] == "StaticEmbedding" else BertEncoder
    file = path / "config.json"
    model_type = read_hf_json(file, {"model_type": "bert"}).get("model_type")
    if model_type not in MODEL_TYPES:
        # "llama_with_landmark" is a Llama, and a config of CEPE may have no model_type.
        if model_type is None or model_type.startswith(tuple(FAMILIES)):
            return DecoderEncoder
        raise InputError(
            f"{file}: model_type={model_type!r:.40} is neither a BERT ({', '.join(MODEL_TYPES)})"
            f" nor a decoder that lcjax reads ({', '.join(FAMILIES)})"
        )
    tensors = BertFolder(path, allow_pickle=allow_pickle).source.tensors
    for name, kind in (("classifier", CrossEncoder), ("linear", LateInteraction)):
        if f"{name}.weight" in tensors:
            return kind
    return BertEncoder
