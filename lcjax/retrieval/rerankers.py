"""Re-rankers: models that score a query and a passage together, to rank few passages again."""

import copy
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from lcjax.checkpoints.bert_folder import BertFolder
from lcjax.checkpoints.hub import find_encoder
from lcjax.checkpoints.tokenizer import check_text
from lcjax.errors import InputError, check_arguments, check_integer
from lcjax.files import read_json
from lcjax.parallel.sharding import Mesh, device_mesh
from lcjax.retrieval.token_batches import (
    Batching,
    Classify,
    LengthLimit,
    LoadedBert,
    Project,
    TokenRow,
    check_texts,
    checkpoint_name,
    pair_row,
    text_row,
)


class CrossEncoder:
    """A cross-encoder: a linear layer over the [CLS] state of [CLS] query [SEP] passage [SEP].

    The score is the logit. sentence-transformers may return its sigmoid, which has the same order.
    """

    def __init__(self, bert: LoadedBert, batching: Batching, limit: LengthLimit):
        """Combines loaded parts; use `load` to open a checkpoint."""
        self._bert, self._batching, self._limit = bert, batching, limit
        self.name, self.max_tokens = limit.name, limit.max_tokens
        self.fingerprint = bert.fingerprint(kind="cross", max=limit.max_tokens)

    @classmethod
    @check_arguments
    def load(
        cls,
        folder: str | Path,
        *,
        max_tokens: int | None = None,
        on_long: str = "truncate",
        dtype: str = "float32",
        mesh: Mesh | jax.sharding.Mesh | None = None,
        batch_tokens: int | None = None,
        allow_pickle: bool = False,
    ) -> "CrossEncoder":
        """Opens a folder of `BertForSequenceClassification` with one label.

        The arguments are those of `BertEncoder.load`; `max_tokens` counts both texts.
        """
        mesh = device_mesh(mesh)
        path = find_encoder(folder, allow_pickle=allow_pickle)
        files = BertFolder(path, allow_pickle=allow_pickle)
        if max_tokens is not None:
            check_integer("max_tokens", max_tokens, 5, "of this encoder", most=files.max_tokens)
        limit = LengthLimit(max_tokens or files.max_tokens, on_long, checkpoint_name(folder))
        batching = Batching(limit.max_tokens, batch_tokens, mesh, "score")
        head = files.head("classifier", 1, bias=True)
        options = {"head_params": head, "pooler": True, "dtype": dtype, "mesh": mesh}
        return cls(LoadedBert.load(files, Classify(), **options), batching, limit)

    def score(self, query: str, passages: Sequence[str]) -> np.ndarray:
        """Returns float32 scores [n] of passages; larger is better."""
        check_text(query)
        passages = check_texts("passages", passages)
        limit, scores = copy.copy(self._limit), np.empty(len(passages), np.float32)
        tokenizer = self._bert.folder.tokenizer
        (query_ids,) = tokenizer.encode([query])

        def rows(part: slice) -> list[TokenRow]:
            ids = tokenizer.encode(list(passages[part]))
            return [pair_row(tokenizer, limit, query_ids, x) for x in ids]

        self._batching.run(self._bert.apply, rows, scores)
        limit.warn()
        return scores


class LateInteraction:
    """ColBERT (Khattab & Zaharia 2020, arXiv 2004.12832): a unit vector for each token.

    The score is the sum over query tokens of the largest product with a token of the passage.
    Queries are padded with [MASK] to `query_tokens`. The masks attend to the query, and the query
    does not attend to them unless the checkpoint has `attend_to_mask_tokens`. Vectors of a
    passage's punctuation are dropped, unless the checkpoint has `mask_punctuation: false`.
    """

    def __init__(
        self,
        bert: LoadedBert,
        *,
        markers: tuple[int, int],
        query_tokens: int,
        max_tokens: int,
        attend_to_masks: bool,
        drop_punctuation: bool,
        name: str,
        on_long: str,
        batch_tokens: int | None,
    ):
        """Combines loaded parts; use `load` to open a checkpoint."""
        self._bert, self._markers, self._attend_to_masks = bert, markers, attend_to_masks
        self.name, self.query_tokens, self.max_tokens = name, query_tokens, max_tokens
        self.dim = bert.head_params["kernel"].shape[1]
        self._limits = [LengthLimit(n, on_long, name) for n in (query_tokens, max_tokens)]
        self._batchings = [
            Batching(n, batch_tokens, bert.model.mesh) for n in (query_tokens, max_tokens)
        ]
        tokenizer = bert.folder.tokenizer
        symbols = tokenizer.encode(list(string.punctuation)) if drop_punctuation else []
        self._punctuation = np.array([ids[0] for ids in symbols if ids], np.int32)
        self.fingerprint = bert.fingerprint(
            kind="colbert",
            sizes=(query_tokens, max_tokens),
            options=(attend_to_masks, drop_punctuation, *markers),
        )

    @classmethod
    @check_arguments
    def load(
        cls,
        folder: str | Path,
        *,
        query_tokens: int | None = None,
        max_tokens: int | None = None,
        on_long: str = "truncate",
        dtype: str = "float32",
        mesh: Mesh | jax.sharding.Mesh | None = None,
        batch_tokens: int | None = None,
        allow_pickle: bool = False,
    ) -> "LateInteraction":
        """Opens a folder of ColBERT: BERT and `linear.weight`, with its `artifact.metadata`.

        Args:
          folder: a path or hub id.
          query_tokens: tokens of a query, [MASK] included; None: the setting of the folder, or 32.
          max_tokens: tokens of a passage; None: the setting of the folder, or 220.
          on_long, dtype, mesh, batch_tokens, allow_pickle: as in `BertEncoder.load`.
        """
        mesh = device_mesh(mesh)
        path = find_encoder(folder, allow_pickle=allow_pickle)
        files = BertFolder(path, allow_pickle=allow_pickle)
        file = path / "artifact.metadata"
        settings = read_json(file, {})
        if settings.get("similarity", "cosine") != "cosine":
            raise InputError(f"{file}: similarity={settings['similarity']!r:.40} must be 'cosine'")
        sizes = []
        for key, default, value in (
            ("query_tokens", settings.get("query_maxlen", 32), query_tokens),
            ("max_tokens", settings.get("doc_maxlen", 220), max_tokens),
        ):
            value = min(default, files.max_tokens) if value is None else value
            check_integer(key, value, 4, "of this encoder", most=files.max_tokens)
            sizes.append(value)
        markers = []
        for key, default in (("query_token_id", "[unused0]"), ("doc_token_id", "[unused1]")):
            token = str(settings.get(key, default))
            markers.append(files.tokenizer.token_id(token))
            if markers[-1] is None:
                raise InputError(
                    f"{path}: the tokenizer has no {token}, the marker {key} of ColBERT"
                )
        head = files.head("linear", bias=False)
        options = {"head_params": head, "dtype": dtype, "mesh": mesh}
        return cls(
            LoadedBert.load(files, Project(), **options),
            markers=tuple(markers),
            query_tokens=sizes[0],
            max_tokens=sizes[1],
            attend_to_masks=bool(settings.get("attend_to_mask_tokens", False)),
            drop_punctuation=bool(settings.get("mask_punctuation", True)),
            name=checkpoint_name(folder),
            on_long=on_long,
            batch_tokens=batch_tokens,
        )

    def encode_queries(self, texts: Sequence[str]) -> Float[np.ndarray, "n T E"]:
        """Returns float32 token vectors [n, query_tokens, dim] of queries."""
        texts = check_texts("texts", texts)
        out = np.empty((len(texts), self.query_tokens, self.dim), np.float32)
        limit, tokenizer = copy.copy(self._limits[0]), self._bert.folder.tokenizer

        def rows(part: slice) -> list[TokenRow]:
            ids = tokenizer.encode(list(texts[part]))
            return [
                self._query_row(text_row(tokenizer, limit.cut(x, 3), self._markers[0])) for x in ids
            ]

        self._batchings[0].run(self._bert.apply, rows, out)
        limit.warn()
        return out

    def _query_row(self, row: TokenRow) -> TokenRow:
        masks = [self._bert.folder.tokenizer.mask_id] * (self.query_tokens - len(row.tokens))
        visible = self.query_tokens if self._attend_to_masks else row.num_visible
        return TokenRow([*row.tokens, *masks], visible)

    def encode_passages(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns float32 token vectors [tokens, dim] of each passage, without punctuation."""
        texts = check_texts("texts", texts)
        out: list[Any] = [None] * len(texts)
        limit, tokenizer = copy.copy(self._limits[1]), self._bert.folder.tokenizer
        tokens: list[Sequence[int]] = []

        def rows(part: slice) -> list[TokenRow]:
            ids = tokenizer.encode(list(texts[part]))
            token_rows = [text_row(tokenizer, limit.cut(x, 3), self._markers[1]) for x in ids]
            tokens.extend(row.tokens for row in token_rows)
            return token_rows

        self._batchings[1].run(self._bert.apply, rows, out)
        limit.warn()
        return [
            vectors[: len(ids)][~np.isin(ids, self._punctuation)]
            for vectors, ids in zip(out, tokens)
        ]

    def score(self, query: str, passages: Sequence[str]) -> np.ndarray:
        """Returns float32 scores [n] of passages; larger is better."""
        (vectors,) = self.encode_queries([query])
        scores = [(vectors @ passage.T).max(1).sum() for passage in self.encode_passages(passages)]
        return np.array(scores, np.float32)
