"""kNN-LM: mixes the prediction of a language model with the next tokens of similar contexts.

build_tokens(TokenConfig(data=TextConfig(path="text"), model=ModelSection(path=...), out="store"))
knn = KnnLM(lm, TokenStore("store"), weight=0.25)
knn.nll(tokens)

Khandelwal et al. 2020 (arXiv 1911.00172): a datastore has a key and a value for each token of a
text. The value is the token. The key is the input of the last layer's feed-forward, after its norm,
at the token before (the choice of their section 5). The query q is the same input at the last token
of the text so far:

    p_knn(y) ~ sum of exp(-|q - key|^2 / temperature) over the k nearest keys whose value is y
    p = weight p_knn + (1 - weight) p_lm

The folder of a datastore:

    index.json  the model, the number of tokens, the settings of the build, checksums
    keys.bin    float16 or float32 [tokens, D]
    values.bin  uint32 [tokens]
    keys.faiss  an approximate index of the keys, if one was built

During a build, `progress.json` counts the windows and tokens in the files. After a kill, the same
command resumes from there.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from lcjax.checkpoints.build import ModelSection
from lcjax.data.corpus import all_empty, check_outside_data, corpus_identity, open_split
from lcjax.data.data_config import TextConfig
from lcjax.data.jobs import begin
from lcjax.errors import (
    Fraction,
    InputError,
    NonEmpty,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Range,
    check_arguments,
    check_fields,
    check_one_of,
)
from lcjax.files import (
    FolderSums,
    check_path,
    read_json,
    sha256,
    sync_file,
    write_index,
    write_json,
)
from lcjax.generation.generate import Piece
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import GeneratedText, Mixture, Sampling, join_pieces
from lcjax.generation.scorer import Ids, WrappedScorer
from lcjax.generation.scoring import Continuation
from lcjax.generation.session import check_token_rows, pad_right
from lcjax.models.loss import token_nll
from lcjax.parallel import distributed
from lcjax.parallel.run_lock import RunLock
from lcjax.parallel.sharding import Mesh
from lcjax.retrieval.build_store import check_documents
from lcjax.retrieval.datastore import WHY_MAPPED
from lcjax.retrieval.encoder import model_fingerprint
from lcjax.retrieval.faiss_index import FaissIndex, RefinedIndex, default_lists, faiss_module
from lcjax.retrieval.passages import document_text
from lcjax.retrieval.search import ExactIndex
from lcjax.storage import check_regular, local_path

FORMAT = "tokens 1"
DTYPES = {"float16": np.dtype("<f2"), "float32": np.dtype("<f4")}
INDICES = ("ivf", "ivf_pq")
_INDEX, _PLAN, _PROGRESS = "index.json", "plan.json", "progress.json"
_KEYS, _VALUES, _FAISS = "keys.bin", "values.bin", "keys.faiss"
_CODE_BYTES = 64  # bytes of a key's code with ivf_pq, as in the paper
_LISTS = 4096  # maximum number of lists of an approximate index, as in the paper
_PROBES = 32  # lists that a search visits, as in the paper
_QUERIES = 4096  # queries of one search; each takes 12 k bytes for its scores and rows


# The datastore


@dataclasses.dataclass(frozen=True)
class TokenConfig:
    """Settings of `python -m lcjax.retrieval build-tokens`."""

    data: TextConfig = dataclasses.field(default_factory=TextConfig)  # text of the tokens
    model: ModelSection = dataclasses.field(default_factory=ModelSection)  # gives the keys
    mesh: Mesh | None = None  # devices of the model; null: one device
    window: Annotated[int, Range(2)] = 1024  # tokens that the model reads at once
    overlap: PositiveInt = 512  # first tokens of a window, from the window before: only context
    batch_size: PositiveInt = 4  # windows of a batch
    # Number of tokens to store, from the beginning; null: all
    max_tokens: PositiveInt | None = None
    dtype: Annotated[str, OneOf(DTYPES)] = "float16"  # dtype of the keys: float16 or float32
    # An approximate index; null: exact search only
    faiss: Annotated[str, OneOf(INDICES)] | None = None
    out: Annotated[str, NonEmpty("give --out=FOLDER")] = ""  # folder to write

    def __post_init__(self):
        check_fields("", self)
        if self.overlap >= self.window - 1:
            raise InputError(
                f"overlap={self.overlap} must be below window - 1 = {self.window - 1}, so that"
                " windows have new tokens"
            )
        check_documents(self.data.sources)


@check_arguments
def build_tokens(config: TokenConfig, *, lm: LanguageModel | None = None) -> dict[str, Any]:
    """Writes a datastore of tokens, or resumes an incomplete one.

    Args:
      config: settings.
      lm: model to use instead of that of `config.model`.

    Returns:
      The content of `index.json`.

    Raises:
      InputError: the folder was built from other text, settings or another model, the text has no
        token to predict, or a source cannot be read.
    """
    check_path("out", config.out)
    folder = local_path("out", config.out, WHY_MAPPED)
    check_outside_data("out", folder, config.data)
    check_documents(config.data.resolved_sources())
    lm = LanguageModel.load(config.model, mesh=config.mesh) if lm is None else lm
    lm.config.check_length(config.window)
    if config.faiss is not None:
        faiss_module()  # raises the error of a missing package before the text is read
    corpora = open_split(config.data, "train", lm.tokenizer)
    names = ("window", "overlap", "max_tokens", "dtype", "faiss")
    identity = {
        "model": _model_name(config, lm),
        "fingerprint of the model": model_fingerprint(lm),
        "holdout": config.data.holdout,
        "on_bad_text": config.data.on_bad_text,
        "on_bad_record": config.data.on_bad_record,
        **corpus_identity(corpora),
        **{name: getattr(config, name) for name in names},
    }
    identity = json.loads(json.dumps(identity))
    content = begin(folder, identity, _INDEX, _PLAN)
    if content is not None:
        return content
    with RunLock(folder, "out"):
        num_tokens = _write_tokens(config, folder, lm, _windows(config, lm, corpora))
        if not num_tokens:
            raise all_empty(corpora, "a text needs two tokens")
        index = {
            "format": FORMAT,
            "model": identity["model"],
            "fingerprint": identity["fingerprint of the model"],
            "tokens": num_tokens,
            "dim": lm.config.width,
            "dtype": config.dtype,
            "faiss": config.faiss,
            "identity": identity,
        }
        keys = _open_array(folder, _KEYS, DTYPES[config.dtype], (num_tokens, lm.config.width))
        if config.faiss is not None:
            _build_faiss(keys, config.faiss).save(folder / _FAISS)
        files = [_KEYS, _VALUES] + [_FAISS] * (config.faiss is not None)
        index["sha256"] = {name: sha256(folder / name) for name in files}
        write_index(folder / _INDEX, index, index["sha256"])
        for name in (_PLAN, _PROGRESS):
            (folder / name).unlink(missing_ok=True)
    return index


def _model_name(config: TokenConfig, lm: LanguageModel) -> str:
    return config.model.path or config.model.preset or f"{lm.config.num_layers} layers"


def _windows(
    config: TokenConfig, lm: LanguageModel, corpora: Sequence[Any]
) -> Iterator[tuple[np.ndarray, int]]:
    """Yields (token ids, index of the first one that is a value) of all windows."""
    remaining = config.max_tokens
    for corpus in corpora:
        for name, value in corpus:
            if not isinstance(ids := value, np.ndarray):
                text = document_text(value, name, "")
                ids = lm.encode(text) if text.strip() else []
            ids = np.asarray(ids, np.int32)
            for start in range(0, max(len(ids) - 1, 0), config.window - config.overlap):
                window, first = ids[start : start + config.window], config.overlap if start else 1
                if len(window) <= first:
                    break
                if remaining is not None:
                    window = window[: first + remaining]
                    remaining -= len(window) - first
                yield window, first
                if remaining == 0:
                    return


def _write_tokens(
    config: TokenConfig, folder: Path, lm: LanguageModel, windows: Iterator[tuple[np.ndarray, int]]
) -> int:
    """Appends the keys and values of the missing windows; returns the number of all tokens."""
    dtype, width = DTYPES[config.dtype], lm.config.width
    progress = read_json(folder / _PROGRESS, {"windows": 0, "tokens": 0})
    num_windows, num_tokens = progress["windows"], progress["tokens"]
    with (
        (folder / _KEYS).open("ab") as keys_file,
        (folder / _VALUES).open("ab") as values_file,
        tqdm(desc="tokens", unit="token", unit_scale=True, initial=num_tokens, delay=1) as bar,
    ):
        for file, size in ((keys_file, dtype.itemsize * width), (values_file, 4)):
            if os.fstat(file.fileno()).st_size < num_tokens * size:
                raise InputError(
                    f"{file.name} is shorter than {_PROGRESS} says: delete out={config.out}, and"
                    " build it again"
                )
            file.truncate(num_tokens * size)  # drops what a killed build wrote after its last count
        for _ in range(num_windows):
            next(windows)
        while batch := [pair for _, pair in zip(range(config.batch_size), windows)]:
            keys, values = _read_batch(lm, batch)
            with np.errstate(over="ignore"):
                keys = keys.astype(dtype)
            if not np.isfinite(keys).all():
                raise InputError(
                    f"dtype={config.dtype}: keys of this model are not finite in it; set float32"
                )
            for file, array in ((keys_file, keys), (values_file, values)):
                file.write(array.tobytes())
                sync_file(file)
            num_windows, num_tokens = num_windows + len(batch), num_tokens + len(values)
            write_json(folder / _PROGRESS, {"windows": num_windows, "tokens": num_tokens})
            bar.update(len(values))
    return num_tokens


def _read_batch(
    lm: LanguageModel, batch: Sequence[tuple[np.ndarray, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys float32 [n, D] and values uint32 [n] of a batch of windows."""
    lengths = np.array([len(window) for window, _ in batch])
    tokens = pad_right([window for window, _ in batch])
    first = min(first for _, first in batch)
    keys = lm.score(_keys, tokens, first=first, lengths=lengths, with_ffn_input=True)
    spans = [(row, slice(first, len(window))) for row, (window, first) in enumerate(batch)]
    values = np.concatenate([tokens[span] for span in spans]).astype("<u4")
    return np.concatenate([keys[span] for span in spans]), values


def _keys(states, projection, targets):
    """Returns the keys; a score function for `LanguageModel.score` that computes no logits."""
    del projection, targets
    return states.ffn_input.astype(jnp.float32)


def _keys_and_nll(states, projection, targets):
    return states.ffn_input.astype(jnp.float32), token_nll(states.hidden, projection, targets)


class TokenStore:
    """A datastore of tokens that `build_tokens` wrote, mapped into memory.

    Attributes:
      keys: float16 or float32 [n, D].
      values: uint32 [n], token ids.
      index: the content of `index.json`.
    """

    @check_arguments
    def __init__(self, folder: str | Path):
        """Opens a folder.

        Raises:
          InputError: the folder is not a datastore of tokens, is incomplete, or is damaged.
        """
        self.folder = local_path("datastore", folder, WHY_MAPPED)
        check_regular(self.folder)
        way_out = "build one with python -m lcjax.retrieval build-tokens"
        if (self.folder / _PROGRESS).is_file() and not (self.folder / _INDEX).is_file():
            raise InputError(f"{folder} is incomplete: run the same build-tokens command again")
        if not (self.folder / _INDEX).is_file():
            raise InputError(f"{folder} is no datastore of tokens; {way_out}")
        self._sums = FolderSums(self.folder, "copy it again, or build the datastore again")
        self._sums.check(_INDEX)
        self.index = read_json(self.folder / _INDEX)
        if self.index.get("format") != FORMAT:
            raise InputError(f"{folder} is no datastore of tokens of this format; {way_out}")
        num_tokens, dim = self.index["tokens"], self.index["dim"]
        self.keys = _open_array(self.folder, _KEYS, DTYPES[self.index["dtype"]], (num_tokens, dim))
        self.values = _open_array(self.folder, _VALUES, np.dtype("<u4"), (num_tokens,))
        self._sums.check_small()

    def __len__(self) -> int:
        return len(self.values)

    @property
    def fingerprint(self) -> str:
        """Digest of everything that searches depend on: keys, values and approximate index."""
        content = json.dumps(self.index["sha256"], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def check_model(self, lm: LanguageModel) -> None:
        """Raises an InputError unless `lm` would compute the same keys (`model_fingerprint`)."""
        fingerprint = model_fingerprint(lm)
        if fingerprint != self.index["fingerprint"]:
            raise InputError(
                f"{self.folder} holds keys of {self.index['model']} (fingerprint"
                f" {self.index['fingerprint']}), and this model has {fingerprint}: weights,"
                " tokenizer, rope and pattern must be the same, and the length that a rotation"
                " follows (with_method(length=...)); build another with this model:"
                " build_tokens(config, lm=...)"
            )
        if self.values.max() >= lm.config.vocab_size:
            raise InputError(
                f"{self.folder / _VALUES} is damaged: it holds no ids of the vocabulary; copy it"
                " again, or build the datastore again"
            )

    def check_files(self) -> int:
        """Compares the SHA-256 sums of all files with `index.json`; returns their number."""
        for name, expected in self.index["sha256"].items():
            file = self.folder / name
            if not file.is_file() or sha256(file) != expected:
                raise InputError(f"{file} is not as it was written; copy it again, or build again")
        return len(self.index["sha256"])

    def open_index(
        self, kind: str = "exact", mesh: jax.sharding.Mesh | None = None
    ) -> ExactIndex | RefinedIndex:
        """Opens an index of the keys: "exact", or the approximate index that was built."""
        check_one_of("index", kind, ("exact", *INDICES))
        if kind == "exact":
            return ExactIndex(self.keys, metric="l2", mesh=mesh)
        if self.index["faiss"] != kind:
            raise InputError(
                f"index={kind}: {self.folder} has {self.index['faiss'] or 'none'}; build it with"
                f" --faiss={kind}, or search with index=exact"
            )
        # Of any size, since FAISS may read outside of its memory if its lists are damaged.
        self._sums.check(_FAISS)
        faiss = FaissIndex.load(self.folder / _FAISS, dim=self.index["dim"], count=len(self))
        # As many candidates as neighbours, as in the paper: the last of 1,024 have little weight.
        return RefinedIndex(faiss, self.keys, 1)


def _open_array(folder: Path, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    path, expected = folder / name, dtype.itemsize * int(np.prod(shape))
    size = path.stat().st_size if path.is_file() else 0
    if size != expected:
        raise InputError(
            f"{path} is damaged: it has {size:,} bytes, and {shape[0]:,} tokens take {expected:,};"
            " copy it again, or build the datastore again"
        )
    return np.memmap(path, dtype, "r", 0, shape)


def _build_faiss(keys: np.ndarray, kind: str) -> FaissIndex:
    dim = keys.shape[1]
    most = max(min(_CODE_BYTES, dim // 4), 1)
    m = max(part for part in range(1, most + 1) if dim % part == 0) if kind == "ivf_pq" else None
    # With more lists a search would visit a smaller share of the keys than in the paper. For few
    # keys it is the square root: with lists of 39 keys, FAISS's minimum, a search would visit
    # hardly more than k keys.
    nlist = min(_LISTS, default_lists(len(keys)))
    return FaissIndex.build(keys, kind=kind, metric="l2", nlist=nlist, nprobe=_PROBES, m=m)


# The language model


@dataclasses.dataclass(frozen=True)
class KnnLM(WrappedScorer):
    """A language model mixed with the tokens that follow similar contexts in a datastore.

    With weight 0 its results equal those of `lm` bit for bit.
    """

    lm: LanguageModel
    store: TokenStore
    k: PositiveInt = 1024  # number of nearest keys
    weight: Fraction = 0.25  # probability mass of their tokens: lambda of the paper
    temperature: PositiveFloat = 1.0  # divides squared distances
    # Exact, or the approximate index of the datastore
    index: Annotated[str, OneOf(("exact", *INDICES))] = "exact"

    def __post_init__(self):
        check_fields("", self)
        if self.k > len(self.store):
            raise InputError(
                f"k={self.k} must be at most {len(self.store)}, the tokens of {self.store.folder}"
            )
        self.store.check_model(self.lm)
        self._search  # noqa: B018 -- opened here, so that errors are raised early

    @functools.cached_property
    def _search(self) -> ExactIndex | RefinedIndex:
        return self.store.open_index(self.index, self.lm.mesh)

    def neighbours(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns log weights float64 [Q, k] and tokens int64 [Q, k] of the nearest keys.

        The weights of each of the `queries` float32 [Q, D] sum to 1. If an approximate index
        returns fewer than k keys, the missing ones have weight 0.
        """
        scores, rows = self._search.search(queries, self.k)
        logits = scores.astype(np.float64) / self.temperature
        # The limits by min and tiny give every token probability 0 if a query has no key at all.
        top = np.maximum(logits.max(1, keepdims=True), np.finfo(np.float64).min)
        total = np.exp(logits - top).sum(1, keepdims=True)
        with np.errstate(divide="ignore"):
            log_weights = logits - top - np.log(np.maximum(total, np.finfo(np.float64).tiny))
        return log_weights, self.store.values[np.maximum(rows, 0)].astype(np.int64)

    def nll(
        self,
        tokens: np.ndarray,
        *,
        first: int = 1,
        lengths: np.ndarray | None = None,
        **options: Any,
    ) -> np.ndarray:
        """Returns -log p as `LanguageModel.nll` does.

        It is infinite if the weight is 1 and no neighbour has the token.
        """
        if not self.weight:
            return self.lm.nll(tokens, first=first, lengths=lengths, **options)
        options |= {"first": first, "lengths": lengths, "with_ffn_input": True}
        keys, nll = self.lm.score(_keys_and_nll, tokens, **options)
        tokens, lengths = check_token_rows(tokens, lengths, self.config.vocab_size)
        places = np.arange(tokens.shape[1])
        scored = np.flatnonzero((places >= first) & (places < lengths[:, None]))
        keys, targets, flat = keys.reshape(-1, keys.shape[-1]), tokens.reshape(-1), nll.reshape(-1)
        for start in range(0, len(scored), _QUERIES):
            part = scored[start : start + _QUERIES]
            log_weights, values = self.neighbours(keys[part])
            log_weights[values != targets[part, None]] = -np.inf
            log_p = np.logaddexp.reduce(log_weights, axis=1)
            flat[part] = -self._mixed(log_p, -flat[part].astype(np.float64))
        return nll

    def _mixed(self, log_knn: np.ndarray, log_lm: np.ndarray) -> np.ndarray:
        """Returns log (weight p_knn + (1 - weight) p_lm)."""
        with np.errstate(divide="ignore"):
            log_weight, log_rest = np.log(self.weight), np.log1p(-self.weight)
        return np.logaddexp(log_knn + log_weight, log_lm + log_rest)

    def next_log_probs(self, logits: np.ndarray, queries: np.ndarray) -> np.ndarray:
        """Returns log p float32 [B, V] of the next token for logits [B, V] and queries [B, D]."""
        log_weights, values = self.neighbours(queries)
        p_knn = np.zeros(logits.shape)
        np.add.at(p_knn, (np.arange(len(values))[:, None], values), np.exp(log_weights))
        logits = logits.astype(np.float64)
        log_lm = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        with np.errstate(divide="ignore"):
            return self._mixed(np.log(p_knn), log_lm).astype(np.float32)

    def continuations(
        self, prompts: Sequence[Ids], continuations: Sequence[Sequence[Ids]], **options: Any
    ) -> list[list[Continuation]]:
        if not self.weight:
            return self.lm.continuations(prompts, continuations, **options)
        return super().continuations(prompts, continuations, **options)

    def generate(
        self,
        prompts: Sequence[str | Ids],
        sampling: Sampling = Sampling(),
        **options: Any,
    ) -> list[GeneratedText]:
        """Generates text like `LanguageModel.generate`, with a search for every token."""
        if not self.weight:
            return self.lm.generate(prompts, sampling, **options)
        return join_pieces(self.stream(prompts, sampling, **options), len(prompts))

    def stream(
        self,
        prompts: Sequence[str | Ids],
        sampling: Sampling = Sampling(),
        **options: Any,
    ) -> Iterator[Piece]:
        """Yields the text of `generate` piece by piece, as `LanguageModel.stream` does."""
        mixture = _KnnMixture(len(prompts), knn=self) if self.weight else None
        return self.lm.stream(prompts, sampling, mixture=mixture, **options)


@dataclasses.dataclass(frozen=True)
class _KnnMixture(Mixture):
    """A mixture in which every prompt is one text, with the next-token distribution of `knn`."""

    needs_ffn_input: ClassVar[bool] = True

    knn: KnnLM | None = None

    def logits(self, logits: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Returns log p [B, V] for logits [B, V] and inputs [B, D] of the last feed-forward."""
        logits, queries = (distributed.gather(x) for x in logits)
        return jnp.asarray(self.knn.next_log_probs(logits, queries.astype(np.float32)))
