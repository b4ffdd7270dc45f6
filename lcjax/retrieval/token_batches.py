"""Batched application of a BERT or decoder to texts: token rows, batches and output heads."""

import dataclasses
import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from lcjax.checkpoints.bert_folder import BertFolder, BertTokenizer
from lcjax.checkpoints.tokenizer import check_text
from lcjax.errors import InputError, OneOf, Range, check_fields, check_one_of
from lcjax.generation.session import round_up_to_bucket
from lcjax.models.bert import Bert, BertConfig
from lcjax.parallel import distributed
from lcjax.parallel.digest import weights_digest
from lcjax.parallel.sharding import keep_rows, padding_rows
from lcjax.storage import to_path

DTYPES = ("float32", "bfloat16")
_ON_LONG = ("truncate", "error")
_TEXTS_AT_ONCE = 16_384  # texts tokenised and sorted by length together; bounds the memory
_PROGRESS_TEXTS = 200  # least number of texts with a progress bar
_BATCH_TOKENS = {"cpu": 4_096}  # tokens of a batch by platform; others: _ACCELERATOR_TOKENS
_ACCELERATOR_TOKENS = 65_536
_IN_FLIGHT = 2  # batches that the devices compute while the host reads earlier results


# Batches


class TokenRow(NamedTuple):
    """The tokens of one input of a model."""

    tokens: Sequence[int]
    num_visible: int  # number of first tokens to which all tokens attend
    second: int | None = None  # index of the first token of a pair's second text; None: one text


class TokenBatch(NamedTuple):
    """Token rows that are computed together, padded on the right."""

    tokens: Int[Array, "B T"]
    lengths: Int[Array, " B"]  # tokens without padding
    num_visible: Int[Array, " B"]
    second: Int[Array, " B"]  # T for rows with one text


@dataclasses.dataclass(frozen=True)
class Batching:
    """Groups token rows into batches of few shapes and computes them.

    Rows are sorted by length. Lengths are padded to four sizes an octave, and the numbers of rows
    of incomplete batches to powers of two, so that few programs are compiled.
    """

    max_tokens: int  # tokens of the longest row
    # Padding included; None: a size that suits the platform
    batch_tokens: Annotated[int, Range(1, hint="None suits the platform")] | None = None
    mesh: jax.sharding.Mesh | None = None
    label: str = "encode"  # of the progress bar

    def __post_init__(self):
        check_fields("", self)

    def run(
        self,
        apply: Callable[[TokenBatch], jax.Array],
        rows: Callable[[slice], Sequence[TokenRow]],
        out: np.ndarray | list,
    ) -> None:
        """Writes the result of every row into `out`, in the order of the rows.

        Shows a progress bar on a terminal for 200 rows or more.

        Args:
          apply: computes the results [B, ...] of a batch on the devices.
          rows: returns the token rows of a slice of the texts.
          out: array or list with one entry for each row.
        """
        disable = True if len(out) < _PROGRESS_TEXTS else None
        with tqdm(total=len(out), unit="text", desc=self.label, disable=disable) as bar:
            running: list[tuple[list[int], jax.Array]] = []

            def collect() -> None:
                indices, values = running.pop(0)
                for index, value in zip(indices, distributed.gather(values)):
                    out[index] = value
                bar.update(len(indices))

            for start in range(0, len(out), _TEXTS_AT_ONCE):
                for indices, batch in self._batches(rows(slice(start, start + _TEXTS_AT_ONCE))):
                    running.append(([start + index for index in indices], apply(batch)))
                    if len(running) > _IN_FLIGHT:
                        collect()
            while running:
                collect()

    def _batches(self, rows: Sequence[TokenRow]) -> Iterator[tuple[list[int], TokenBatch]]:
        """Yields the indices of rows and their batch, the longest rows first."""
        by_width: dict[int, list[int]] = {}
        for index in sorted(range(len(rows)), key=lambda index: -len(rows[index].tokens)):
            width = round_up_to_bucket(len(rows[index].tokens), per_octave=4, least=16)
            by_width.setdefault(min(width, self.max_tokens), []).append(index)
        limit = self.batch_tokens
        if limit is None:
            limit = _BATCH_TOKENS.get(jax.default_backend(), _ACCELERATOR_TOKENS)
            limit *= 1 if self.mesh is None else self.mesh.size
        for width, indices in by_width.items():
            most = 1 << (max(limit // width, 1).bit_length() - 1)
            for start in range(0, len(indices), most):
                group = indices[start : start + most]
                count = min(most, 1 << (len(group) - 1).bit_length())
                count += padding_rows(self.mesh, count)
                yield group, pad_rows([rows[index] for index in group], count, width)


def pad_rows(rows: Sequence[TokenRow], count: int, width: int) -> TokenBatch:
    """Returns a batch of `count` rows of `width` tokens; rows beyond `rows` hold one token."""
    tokens = np.zeros((count, width), np.int32)
    lengths, visible = np.ones(count, np.int32), np.ones(count, np.int32)
    second = np.full(count, width, np.int32)
    for number, row in enumerate(rows):
        lengths[number], visible[number] = len(row.tokens), row.num_visible
        tokens[number, : len(row.tokens)] = row.tokens
        second[number] = width if row.second is None else row.second
    return TokenBatch(tokens, lengths, visible, second)


# Output heads on hidden states. Instances are static arguments of jitted functions.


def _unit(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Divides `x` by its Euclidean norm; a zero vector stays zero, with a finite gradient."""
    return x / jnp.sqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-24))


@dataclasses.dataclass(frozen=True)
class Pool:
    """Pools hidden states to one float32 vector for each text."""

    pooling: str  # mean, cls, max over all tokens, or last
    normalize: bool
    skip: int = 0  # number of first tokens that `mean` and `max` leave out

    def __call__(
        self, bert: Bert | None, head: dict, hidden: Float[Array, "B T D"], batch: TokenBatch
    ) -> Float[Array, "B D"]:
        x = hidden.astype(jnp.float32)
        place = jnp.arange(x.shape[1])[None, :, None]
        lengths = batch.lengths[:, None, None]
        is_text = (place < lengths) & (place >= jnp.minimum(self.skip, lengths - 1))
        if self.pooling == "mean":
            x = jnp.where(is_text, x, 0).sum(1) / is_text.sum(1)
        elif self.pooling == "max":
            x = jnp.where(is_text, x, -jnp.inf).max(1)
        elif self.pooling == "last":
            x = jnp.take_along_axis(x, lengths - 1, axis=1)[:, 0]
        else:
            x = x[:, 0]
        return _unit(x) if self.normalize else x


@dataclasses.dataclass(frozen=True)
class Classify:
    """Computes one logit for each pair: a linear layer over the pooled first token."""

    def __call__(self, bert: Bert, head: dict, hidden: jax.Array, batch: TokenBatch) -> jax.Array:
        pooled = bert.pooled(hidden).astype(jnp.float32)
        return _project(pooled, head["kernel"])[:, 0] + head["bias"][0]


@dataclasses.dataclass(frozen=True)
class Project:
    """Computes a unit vector for each token: a linear layer without bias."""

    def __call__(self, bert: Bert, head: dict, hidden: jax.Array, batch: TokenBatch) -> jax.Array:
        return _unit(_project(hidden.astype(jnp.float32), head["kernel"]))


def _project(x: Float[Array, "... D"], kernel: Float[Array, "D E"]) -> Float[Array, "... E"]:
    return jnp.matmul(x, kernel, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply_bert(model: Bert, head: Pool | Classify | Project, params, head_params, batch):
    """Applies `head` to the hidden states of a batch."""
    batch = TokenBatch(*(keep_rows(jnp.asarray(x), model.mesh) for x in batch))
    types = (jnp.arange(batch.tokens.shape[1]) >= batch.second[:, None]).astype(jnp.int32)

    def forward(bert: Bert) -> jax.Array:
        hidden = bert(batch.tokens, token_types=types, lengths=batch.num_visible)
        return head(bert, head_params, hidden, batch)

    return model.apply({"params": params}, method=forward)


@dataclasses.dataclass
class LoadedBert:
    """A BERT with its tokenizer and head, ready to read rows of tokens."""

    folder: BertFolder
    model: Bert
    params: dict
    head: Pool | Classify | Project
    head_params: dict
    digest: str  # of the weights before they are rounded to another dtype

    @classmethod
    def load(
        cls,
        folder: BertFolder,
        head: Pool | Classify | Project,
        *,
        head_params: dict | None = None,
        pooler: bool = False,
        dtype: str,
        mesh: jax.sharding.Mesh | None,
    ) -> "LoadedBert":
        check_one_of("dtype", dtype, DTYPES)
        config: BertConfig = folder.config.replace(pooler=pooler)
        params = folder.params(config, mesh)
        head_params = {name: jnp.asarray(x) for name, x in (head_params or {}).items()}
        digest = weights_digest(params | {"head": head_params})
        if dtype != "float32":
            params = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree))(params)
        model = Bert(config.replace(dtype=dtype, param_dtype=dtype), mesh)
        return cls(folder, model, params, head, head_params, digest)

    def apply(self, batch: TokenBatch) -> jax.Array:
        return _apply_bert(self.model, self.head, self.params, self.head_params, batch)

    def fingerprint(self, **settings: Any) -> str:
        """Returns a digest of weights, tokenizer and settings."""
        values = [self.digest, self.folder.tokenizer.fingerprint, settings]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@dataclasses.dataclass
class LengthLimit:
    """Cuts texts to `max_tokens`, counts the long ones, and warns once for all texts of a call."""

    max_tokens: int
    on_long: Annotated[str, OneOf(_ON_LONG)]
    name: str
    num_long: int = 0
    num_texts: int = 0

    def __post_init__(self):
        check_fields("", self)

    def cut(self, ids: Sequence[int], num_special: int) -> Sequence[int]:
        """Returns the first tokens of a text; with `num_special` more they fit `max_tokens`."""
        self.num_texts += 1
        return ids[: self.allowed(len(ids) + num_special) - num_special]

    def cut_pair(self, first: Sequence[int], second: Sequence[int], num_special: int):
        """Cuts the longer text of a pair, or both to one half each, as `tokenizers` does."""
        self.num_texts += 1
        most = self.allowed(len(first) + len(second) + num_special) - num_special
        short, long = sorted((len(first), len(second)))
        if short + long > most:
            long = max(short, most - short)
            if short + long > most:
                short, long = most // 2, most - most // 2
            sizes = (long, short) if len(first) > len(second) else (short, long)
            first, second = first[: sizes[0]], second[: sizes[1]]
        return first, second

    def allowed(self, length: int) -> int:
        if length <= self.max_tokens:
            return length
        if self.on_long == "error":
            raise InputError(
                f"text {self.num_texts} has {length} tokens, more than the {self.max_tokens} that"
                f" {self.name} reads; cut it into passages, or pass on_long='truncate'"
            )
        self.num_long += 1
        return self.max_tokens

    def warn(self) -> None:
        """Warns if texts were cut since this object was created."""
        if self.num_long:
            warnings.warn(
                f"{self.name}: {self.num_long} of {self.num_texts} texts have more than"
                f" {self.max_tokens} tokens; the rest of them is not read",
                stacklevel=4,
            )


def check_texts(key: str, texts: Sequence[str]) -> Sequence[str]:
    """Returns `texts`; raises an InputError unless it is a list of valid UTF-8 strings."""
    if isinstance(texts, str) or not isinstance(texts, Sequence | np.ndarray):
        raise InputError(f'{key}={texts!r:.40} must be a list of texts: ["a text"]')
    for text in texts:
        check_text(text)
    return texts


def text_row(tokenizer: BertTokenizer, ids: Sequence[int], *marker: int) -> TokenRow:
    """Returns the row [CLS] text [SEP], or with a marker [CLS] marker text [SEP]."""
    row = [tokenizer.cls_id, *marker, *ids, tokenizer.sep_id]
    return TokenRow(row, len(row))


def pair_row(
    tokenizer: BertTokenizer, limit: LengthLimit, first: Sequence[int], second: Sequence[int]
) -> TokenRow:
    """Returns the row [CLS] first [SEP] second [SEP], cut to `limit`."""
    first, second = limit.cut_pair(first, second, 3)
    row = [tokenizer.cls_id, *first, tokenizer.sep_id, *second, tokenizer.sep_id]
    return TokenRow(row, len(row), len(first) + 2)


def checkpoint_name(path: str | Path) -> str:
    path = to_path(path)
    return str(path) if not path.exists() else path.resolve().name
