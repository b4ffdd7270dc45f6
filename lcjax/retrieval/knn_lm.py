"""kNN-LM: the next tokens of similar contexts, mixed with those that a language model predicts.

build_tokens(TokenConfig(data=TextConfig(path="text"), model=ModelSection(path=...), out="store"))
knn = KnnLM(lm, TokenStore("store"), weight=0.25)
knn.nll(tokens)

Khandelwal et al. 2020 (arXiv 1911.00172): a datastore has a key and a value for each token of a
text. The value is the token, the key what the last layer's feed-forward reads, after its norm, at
the token before (the choice of their section 5). With q the same of the text so far,

    p_knn(y) ~ sum of exp(-|q - key|^2 / temperature) over the k nearest keys whose value is y
    p = weight p_knn + (1 - weight) p_lm

    index.json  the model, the number of tokens, the settings of the build, checksums
    keys.bin    float16 or float32 [tokens, D]
    values.bin  uint32 [tokens]
    keys.faiss  an approximate index of the keys, if one was built

While a datastore is built, `progress.json` counts the windows and tokens that the files hold; the
same command goes on there after a kill.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from lcjax.checkpoints.build import ModelSection
from lcjax.data.config import TeacherSource, TextConfig
from lcjax.data.corpus import all_empty, check_outside_data, corpus_identity, open_split
from lcjax.data.jobs import begin
from lcjax.errors import InputError, check_integer, check_integers, check_one_of, is_finite_number
from lcjax.files import check_path, read_json, sha256, sync_file, write_json
from lcjax.generation.generate import Piece
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.sampling import GeneratedText, Mixture, Sampling, join_pieces
from lcjax.generation.scorer import Ids, WrappedScorer
from lcjax.generation.scoring import Continuation
from lcjax.generation.session import check_token_rows
from lcjax.models.loss import token_nll
from lcjax.parallel import distributed
from lcjax.parallel.run_lock import RunLock
from lcjax.parallel.sharding import Mesh
from lcjax.retrieval.build_store import check_documents
from lcjax.retrieval.datastore import WHY_MAPPED
from lcjax.retrieval.faiss_index import FaissIndex, RefinedIndex, default_lists, faiss_module
from lcjax.retrieval.passages import document_text
from lcjax.retrieval.search import ExactIndex
from lcjax.retrieval.token_batches import weights_digest
from lcjax.storage import local_path

FORMAT = "tokens 1"
DTYPES = {"float16": np.dtype("<f2"), "float32": np.dtype("<f4")}
INDICES = ("ivf", "ivf_pq")
_INDEX, _PLAN, _PROGRESS = "index.json", "plan.json", "progress.json"
_KEYS, _VALUES, _FAISS = "keys.bin", "values.bin", "keys.faiss"
_CODE_BYTES = 64  # of a key under ivf_pq, as in the paper
_LISTS = 4096  # most lists of an approximate index, as in the paper
_PROBES = 32  # of them that a search visits, as in the paper
_QUERIES = 4096  # that are searched at once: k of them take 12 bytes each


# The datastore


@dataclasses.dataclass(frozen=True)
class TokenConfig:
    """Settings of `python -m lcjax.retrieval build-tokens`."""

    data: TextConfig = dataclasses.field(default_factory=TextConfig)  # text of the tokens
    model: ModelSection = dataclasses.field(default_factory=ModelSection)  # that reads it
    mesh: Mesh | None = None  # devices that read; null: one device
    window: int = 1024  # tokens that are read at once
    overlap: int = 512  # of them, the ones of the window before: context of the others
    batch_size: int = 4  # windows at a time
    max_tokens: int | None = None  # the first ones; null: all
    dtype: str = "float16"  # of the keys: float16 or float32
    faiss: str | None = None  # an approximate index: ivf or ivf_pq; null: exact search only
    out: str = ""  # folder to write

    def __post_init__(self):
        check_one_of("dtype", self.dtype, DTYPES)
        check_integer("window", self.window, 2)
        check_integer("overlap", self.overlap, 1)  # else no window predicts its first token
        check_integers("", self, 1, "batch_size", "max_tokens")
        if self.overlap >= self.window - 1:
            raise InputError(
                f"overlap={self.overlap} must be below window - 1 = {self.window - 1}, so that"
                " windows have new tokens"
            )
        if self.faiss is not None:
            check_one_of("faiss", self.faiss, INDICES)
        if not self.out:
            raise InputError("out is empty: give --out=FOLDER")
        check_documents(self.data)


def model_fingerprint(lm: LanguageModel) -> str:
    """Returns what keys depend on, as a digest: weights, tokenizer, positions and pattern.

    And the length of the model, where it changes the rotation.
    """
    config = lm.config
    values = [weights_digest(lm.params), lm.tokenizer.fingerprint]
    values += [repr(x) for x in (config.position, config.rope, config.pattern, *config.layers)]
    # The length stands for the rotation, whose last bits may differ between devices.
    follows = lm.follows_length and lm.length is not None
    if follows and not lm.rotation(lm.length).equals(config.rotation(1, lm.params.get("rope"))):
        values.append(lm.length)
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def build_tokens(config: TokenConfig, *, lm: LanguageModel | None = None) -> dict[str, Any]:
    """Writes a datastore of tokens, or goes on with one.

    Args:
      config: settings.
      lm: in place of the model that `config.model` names.

    Returns:
      The content of `index.json`.

    Raises:
      InputError: the folder belongs to other text, settings or another model, the text has no
        token to predict, or a source cannot be read.
    """
    check_path("out", config.out)
    folder = local_path("out", config.out, WHY_MAPPED).expanduser()
    check_outside_data("out", folder, config.data)
    lm = LanguageModel.load(config.model, mesh=config.mesh) if lm is None else lm
    lm.config.check_length(config.window)
    if config.faiss is not None:
        faiss_module()  # a missing extra is found before the text is read
    for source in config.data.resolved_sources():
        if isinstance(source, TeacherSource):  # by its path
            raise InputError(f"data.path={source.path}: teacher rows are no documents")
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
        write_json(folder / _INDEX, index)
        for name in (_PLAN, _PROGRESS):
            (folder / name).unlink(missing_ok=True)
    return index


def _model_name(config: TokenConfig, lm: LanguageModel) -> str:
    return config.model.path or config.model.preset or f"{lm.config.num_layers} layers"


def _windows(
    config: TokenConfig, lm: LanguageModel, corpora: Sequence[Any]
) -> Iterator[tuple[np.ndarray, int]]:
    """Yields (token ids, place of the first one that is a value) of all windows."""
    rest = config.max_tokens
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
                if rest is not None:
                    window = window[: first + rest]
                    rest -= len(window) - first
                yield window, first
                if rest == 0:
                    return


def _write_tokens(
    config: TokenConfig, folder: Path, lm: LanguageModel, windows: Iterator[tuple[np.ndarray, int]]
) -> int:
    """Appends keys and values of the windows that are missing; returns the number of tokens."""
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
            file.truncate(num_tokens * size)  # what a killed build wrote after its last count
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
    """Returns keys float32 [n, D] and values uint32 [n] of windows."""
    lengths = np.array([len(window) for window, _ in batch])
    tokens = np.zeros((len(batch), lengths.max()), np.int32)
    for row, (window, _) in zip(tokens, batch, strict=True):
        row[: len(window)] = window
    first = min(first for _, first in batch)
    keys = lm.score(_keys, tokens, first=first, lengths=lengths, with_ffn_input=True)
    spans = [(row, slice(first, len(window))) for row, (window, first) in enumerate(batch)]
    values = np.concatenate([tokens[span] for span in spans]).astype("<u4")
    return np.concatenate([keys[span] for span in spans]), values


def _keys(states, projection, targets):
    """A `score` of `LanguageModel.score`: the keys, without logits."""
    del projection, targets
    return states.ffn_input.astype(jnp.float32)


def _keys_and_nll(states, projection, targets):
    return states.ffn_input.astype(jnp.float32), token_nll(states.hidden, projection, targets)


class TokenStore:
    """A datastore of tokens that `build_tokens` wrote, mapped into memory.

    Attributes:
      keys: [n, D].
      values: uint32 [n].
      index: the content of `index.json`.
    """

    def __init__(self, folder: str | Path):
        """Opens a folder.

        Raises:
          InputError: it is no datastore of tokens, incomplete, or damaged.
        """
        self.folder = local_path("datastore", folder, WHY_MAPPED).expanduser()
        way_out = "build one with python -m lcjax.retrieval build-tokens"
        if (self.folder / _PROGRESS).is_file() and not (self.folder / _INDEX).is_file():
            raise InputError(f"{folder} is incomplete: run the same build-tokens command again")
        if not (self.folder / _INDEX).is_file():
            raise InputError(f"{folder} is no datastore of tokens; {way_out}")
        self.index = read_json(self.folder / _INDEX)
        if self.index.get("format") != FORMAT:
            raise InputError(f"{folder} is no datastore of tokens of this format; {way_out}")
        num_tokens, dim = self.index["tokens"], self.index["dim"]
        self.keys = _open_array(self.folder, _KEYS, DTYPES[self.index["dtype"]], (num_tokens, dim))
        self.values = _open_array(self.folder, _VALUES, np.dtype("<u4"), (num_tokens,))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def fingerprint(self) -> str:
        """What searches depend on, as a digest: keys, values and the approximate index."""
        content = json.dumps(self.index["sha256"], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def check_model(self, lm: LanguageModel) -> None:
        """Raises an InputError unless the keys are those of `lm`."""
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
        """Compares the SHA-256 sums of all files; returns their number."""
        for name, expected in self.index["sha256"].items():
            file = self.folder / name
            if not file.is_file() or sha256(file) != expected:
                raise InputError(f"{file} is not as it was written; copy it again, or build again")
        return len(self.index["sha256"])

    def open_index(
        self, kind: str = "exact", mesh: jax.sharding.Mesh | None = None
    ) -> ExactIndex | RefinedIndex:
        """Opens the search: "exact", or the approximate index that was built."""
        check_one_of("index", kind, ("exact", *INDICES))
        if kind == "exact":
            return ExactIndex(self.keys, metric="l2", mesh=mesh)
        if self.index["faiss"] != kind:
            raise InputError(
                f"index={kind}: {self.folder} has {self.index['faiss'] or 'none'}; build it with"
                f" --faiss={kind}, or search with index=exact"
            )
        faiss = FaissIndex.load(self.folder / _FAISS, dim=self.index["dim"], count=len(self))
        # As many candidates as neighbours, as in the paper: the last of 1,024 hardly count.
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
    # More lists would leave a search a smaller share of the keys than in the paper. And of few keys
    # the root: with lists of 39, FAISS's least, a search would visit hardly more than k.
    nlist = min(_LISTS, default_lists(len(keys)))
    return FaissIndex.build(keys, kind=kind, metric="l2", nlist=nlist, nprobe=_PROBES, m=m)


# The language model


@dataclasses.dataclass(frozen=True)
class KnnLM(WrappedScorer):
    """A language model that also predicts the tokens after similar contexts in a datastore.

    With weight 0 it is `lm`, bit by bit.
    """

    lm: LanguageModel
    store: TokenStore
    k: int = 1024  # nearest keys
    weight: float = 0.25  # of their tokens: lambda of the paper
    temperature: float = 1.0  # squared distances are divided by it
    index: str = "exact"  # or the approximate index of the datastore: ivf or ivf_pq

    def __post_init__(self):
        check_settings("", self)
        if self.k > len(self.store):
            raise InputError(
                f"k={self.k} must be at most {len(self.store)}, the tokens of {self.store.folder}"
            )
        self.store.check_model(self.lm)
        self._search  # noqa: B018 -- opened here, so that errors come at once

    @functools.cached_property
    def _search(self) -> ExactIndex | RefinedIndex:
        return self.store.open_index(self.index, self.lm.mesh)

    def neighbours(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns log weights float64 [Q, k] and tokens int64 [Q, k] of the nearest keys.

        Weights sum to 1 for each of `queries` float32 [Q, D]. Where an approximate index returns
        fewer than k keys, the weight of the others is 0.
        """
        scores, rows = self._search.search(queries, self.k)
        logits = scores.astype(np.float64) / self.temperature
        # Without a single key every token has probability 0.
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
        """As `LanguageModel.nll`; infinite where weight is 1 and no neighbour has the token."""
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
        """log (weight p_knn + (1 - weight) p_lm)."""
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
        """As `LanguageModel.generate`: the datastore is searched for every token."""
        if not self.weight:
            return self.lm.generate(prompts, sampling, **options)
        return join_pieces(self.stream(prompts, sampling, **options), len(prompts))

    def stream(
        self,
        prompts: Sequence[str | Ids],
        sampling: Sampling = Sampling(),
        **options: Any,
    ) -> Iterator[Piece]:
        """Yields the text of `generate` piece by piece."""
        mixture = _KnnMixture(len(prompts), knn=self) if self.weight else None
        return self.lm.stream(prompts, sampling, mixture=mixture, **options)


@dataclasses.dataclass(frozen=True)
class _KnnMixture(Mixture):
    """Every prompt is one text, whose next token is that of a `KnnLM`."""

    needs_ffn_input: ClassVar[bool] = True

    knn: KnnLM | None = None

    def after(self, logits: Any, token: jax.Array) -> "_KnnMixture":
        return self

    def logits(self, logits: tuple[jax.Array, jax.Array]) -> jax.Array:
        """log p [B, V] for logits [B, V] and the inputs of the last feed-forward [B, D]."""
        logits, queries = (distributed.gather(x) for x in logits)
        return jnp.asarray(self.knn.next_log_probs(logits, queries.astype(np.float32)))


def check_settings(key: str, settings: Any) -> None:
    """Raises an InputError for an invalid `k`, `weight`, `temperature` or `index` of `settings`."""
    prefix = f"{key}." if key else ""
    check_integer(f"{prefix}k", settings.k, 1)
    check_one_of(f"{prefix}index", settings.index, ("exact", *INDICES))
    for name, least, most in (("weight", 0, 1), ("temperature", 0, float("inf"))):
        value = getattr(settings, name)
        if not is_finite_number(value) or not least <= value <= most:
            rule = "in [0, 1]" if name == "weight" else "above 0"
            raise InputError(f"{prefix}{name}={value!r:.40} must be a number {rule}")
    if not settings.temperature:
        raise InputError(f"{prefix}temperature=0 must be a number above 0: distances divide by it")
