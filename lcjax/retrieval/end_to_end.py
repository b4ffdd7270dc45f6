"""Trains an encoder by the likelihood that a language model assigns to text after its passages.

Let x be the query, y the text to be predicted, z one of the k best passages, s(z, x) the score of z
and x, and P(z | x) = softmax(s(z, x) / temperature) over these k passages. The losses are:

- REPLUG-LSR (Shi et al. 2023, arXiv 2301.12652, sec. 4): KL(P(z | x) || Q(z | x, y)) with
  Q = softmax(log p_LM(y | z, x) / lm_temperature). The language model is frozen.
- The marginal likelihood of REALM (Guu et al. 2020, arXiv 2002.08909) and RAG (Lewis et al. 2020,
  arXiv 2005.11401): -log sum_z P(z | x) p(y | x, z) of whole texts (RAG-Sequence), or the sum over
  tokens of -log sum_z P(z | x) p(y_t | x, z, y_<t) (RAG-Token). Both models are trained.

`EndToEndTask.prepare` searches the k passages of a batch on the host, in an index whose vectors
come from weights of an earlier step (`_Index`). Scores and likelihoods are computed with gradients
from the current weights.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from lcjax import cost
from lcjax.checkpoints.hf_save import HF_FOLDER, check_exportable, save_hf
from lcjax.checkpoints.orbax_io import FOLDER as CHECKPOINTS
from lcjax.checkpoints.orbax_io import steps_in
from lcjax.checkpoints.tokenizer import encode_mid_text
from lcjax.data import Loader
from lcjax.data.data_config import StoredSource
from lcjax.errors import (
    InputError,
    NonEmpty,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Range,
    check_fields,
)
from lcjax.files import atomic_file, check_destination, read_json, write_json
from lcjax.generation.passages import SEPARATOR
from lcjax.parallel import distributed
from lcjax.parallel.sharding import LENGTH, process_rows
from lcjax.retrieval.chunks import check_named, search_other_documents
from lcjax.retrieval.datastore import (
    Datastore,
    EncoderSection,
    open_vectors,
    vector_file,
    vector_header,
)
from lcjax.retrieval.encoder import BertEncoder
from lcjax.retrieval.retriever import Hit, Retriever
from lcjax.retrieval.search import ExactIndex
from lcjax.retrieval.token_batches import LengthLimit, TokenRow, pad_rows
from lcjax.retrieval.training import TrainedEncoder, check_bert_section, export_format
from lcjax.rope.positions import PlainPositions
from lcjax.storage import local_path, to_path
from lcjax.training import batches
from lcjax.training import folder as folder_lib
from lcjax.training.language_modelling import LanguageModelTask, split_trained
from lcjax.training.objective import Objective, target_nll
from lcjax.training.tracking import announce
from lcjax.training.train_config import RetrieverTraining, TrainConfig, matcher
from lcjax.tree import union

RETRIEVER = "retriever"  # the first part of the paths of the encoder's parameters
TEXTS = ("tokens", "targets")  # fields of a batch: texts after their passages
_WHY_LOCAL = "the vectors of a training with a retriever are mapped from there"
_PASSAGES, _STEP = "passages.json", "step"  # in the folder of the index
_INDEX_MEMORY = 1 << 30  # bytes of the index on a device; a larger index is streamed
_ABSENT = -1e30  # used for -inf, because differences of -inf are NaN


def lsr_loss(
    scores: Float[Array, "B K"],
    nll: Float[Array, "B K T"],
    scored: Float[Array, "B T"],
    has_passage: Bool[Array, "B K"],
    *,
    temperature: float,
    lm_temperature: float,
) -> Float[Array, " B"]:
    """Returns KL(P || Q) of REPLUG-LSR for each query, without a gradient into `nll`.

    The log-likelihood of a text is the mean over its tokens. A sum would grow with their number,
    and Q would put all probability on one passage.

    Args:
      scores: [B, K] scores of the passages, from the encoder.
      nll: [B, K, T] -log p_LM of every token of the text after each passage.
      scored: [B, T], 1 for the tokens of y.
      has_passage: [B, K], whether a passage exists; others have probability 0.
      temperature: divisor of the scores.
      lm_temperature: divisor of the log-likelihoods.
    """
    log_p = log_prior(scores, has_passage, temperature)
    mean_nll = (nll * scored[:, None]).sum(-1) / jnp.maximum(scored.sum(-1), 1)[:, None]
    log_q = log_prior(jax.lax.stop_gradient(-mean_nll), has_passage, lm_temperature)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def marginal_nll(
    log_p: Float[Array, "B K"],
    nll: Float[Array, "B K T"],
    scored: Float[Array, "B T"],
    *,
    marginal: str,
) -> Float[Array, " B"]:
    """Returns -log p(y | x) of each query, marginalised over its passages.

    Args:
      log_p: [B, K] log P(z | x), from `log_prior`.
      nll: [B, K, T] -log p of every token of the text after each passage.
      scored: [B, T], 1 for the tokens of y.
      marginal: "sequence" mixes probabilities of the whole text, "token" those of each token.
    """
    nll = nll * scored[:, None]
    if marginal == "sequence":
        return -jax.nn.logsumexp(log_p - nll.sum(-1), axis=1)
    return -(jax.nn.logsumexp(log_p[..., None] - nll, axis=1) * scored).sum(-1)


def log_prior(
    scores: Float[Array, "B K"], has_passage: Bool[Array, "B K"], temperature: float
) -> Float[Array, "B K"]:
    """Returns log P(z | x) = log softmax(scores / temperature) over the existing passages."""
    return jax.nn.log_softmax(jnp.where(has_passage, scores / temperature, _ABSENT), axis=-1)


@dataclass(frozen=True)
class EndToEnd(RetrieverTraining):
    """Options of both losses. Numbers of tokens are in tokens of the model that reads the text."""

    encoder: EncoderSection = field(default_factory=EncoderSection)  # a BERT
    # Folder of the datastore, which is not changed
    store: Annotated[str, NonEmpty("name a folder of lcjax.retrieval build")] = ""
    k: PositiveInt = 10  # number of passages of each query
    query_tokens: PositiveInt = 128  # of the query; in a row without a question its first tokens
    # Of a passage in training; the index encodes longer ones
    passage_tokens: Annotated[int, Range(3)] = 128
    # Steps after which all passages are encoded again with the current weights; null: never
    refresh: PositiveInt | None = 500
    # Weights that encode passages: trained or frozen
    passages: Annotated[str, OneOf(("trained", "frozen"))] = "trained"
    same_document: bool = False  # whether passages may come from the documents of the row
    unit: ClassVar[str] = "tokens"

    def __post_init__(self):
        check_fields("retriever", self)

    def make_task(self, config: TrainConfig, mesh: jax.sharding.Mesh) -> "EndToEndTask":
        return EndToEndTask(config, mesh)

    @property
    def kind(self) -> str:
        return RetrieverTraining.get_choice_name(type(self))


@RetrieverTraining.register_subclass("lsr")
@dataclass(frozen=True)
class LSR(EndToEnd):
    """REPLUG-LSR: trains the encoder to prefer passages that help the frozen model of `model`."""

    # Number of passages of each query
    k: Annotated[int, Range(2, hint="one passage has nothing to be compared with")] = 10
    temperature: PositiveFloat = 0.1  # divides the scores
    lm_temperature: PositiveFloat = 0.1  # divides the mean log-likelihoods
    unit: ClassVar[str] = "queries"

    def loss(self, scores: jax.Array, nll: jax.Array, batch: dict) -> jax.Array:
        temperatures = {"temperature": self.temperature, "lm_temperature": self.lm_temperature}
        return lsr_loss(scores, nll, batch["scored"], batch["has_passage"], **temperatures)


@RetrieverTraining.register_subclass("marginal")
@dataclass(frozen=True)
class Marginal(EndToEnd):
    """Marginal likelihood of a text over its passages; `train.trainable` selects the parameters."""

    # Sequence mixes probabilities of whole texts, token of each token
    marginal: Annotated[str, OneOf(("sequence", "token"))] = "sequence"
    temperature: PositiveFloat = 1.0  # divides the scores

    def loss(self, scores: jax.Array, nll: jax.Array, batch: dict) -> jax.Array:
        log_p = log_prior(scores, batch["has_passage"], self.temperature)
        return marginal_nll(log_p, nll, batch["scored"], marginal=self.marginal)


class EndToEndTask(LanguageModelTask):
    """The training task of `lsr` and `marginal`.

    The parameters of the encoder are `retriever/...`, or with two encoders `retriever/query/...`
    and `retriever/passage/...`. All others belong to the language model.
    """

    def __init__(self, config: TrainConfig, mesh: jax.sharding.Mesh):
        super().__init__(config, mesh)
        self.section: EndToEnd = config.retriever
        self.unit = self.section.unit
        self._trains_lm = isinstance(self.section, Marginal)
        self.export_format = export_format(
            self.section.encoder, separate=self.section.passages == "frozen"
        )

    def check(self) -> None:
        section, config = self.section, self.config
        self._check_config()
        self.check_inputs()
        check_bert_section(section.encoder)
        if not section.same_document:
            check_named(config.data.resolved_sources(), "retriever.same_document")
        try:
            self._store = Datastore(section.store)
        except InputError as error:
            raise InputError(f"retriever.store={error}") from None
        if section.k > len(self._store):
            raise InputError(
                f"retriever.k={section.k} is more than the {len(self._store):,} passages of"
                f" {section.store}; lower it"
            )
        folder = local_path("run.folder", config.run.folder, _WHY_LOCAL)
        if self._trains_lm and config.train.export:
            folder = folder / folder_lib.LANGUAGE_MODEL
            check_destination(folder, HF_FOLDER, overwrite=True)

    def _check_config(self) -> None:
        """Raises an InputError for settings that do not apply to this task."""
        section, config = self.section, self.config
        if config.data.length <= section.query_tokens:
            raise InputError(
                f"data.length={config.data.length} must be above retriever.query_tokens="
                f"{section.query_tokens}: the tokens behind the query are predicted"
            )
        if not self._trains_lm and config.train.lora is not None:
            raise InputError(
                "train.lora adds adapters to the language model, which retriever.type=lsr does not"
                " train; leave it out"
            )
        if config.train.offload == "parameters":
            raise InputError(
                "train.offload=parameters: the encoder reads queries between the steps; set it to"
                " optimizer or none"
            )
        for key, value in (
            ("data.chunks", config.data.chunks),
            ("data.masking", config.data.masking),
            ("model.memory", config.model.memory),
            ("train.distill", config.train.distill),
        ):
            if value is not None:
                raise InputError(
                    f"{key} does not go with retriever.type={section.kind}, whose passages stand in"
                    " front of the text; leave it out"
                )
        for source in config.data.resolved_sources():
            if isinstance(source, StoredSource):
                raise InputError(
                    f"data.sources: rows of {source.name} are stored with other passages or with a"
                    " teacher's probabilities; give the text itself"
                )

    def load(self) -> tuple[dict, dict]:
        section, train = self.section, self.config.train
        announce(f"loading {section.encoder.path}")
        is_frozen = section.passages == "frozen"
        self.encoder = TrainedEncoder(section.encoder, self.mesh, None, separate=is_frozen)
        retriever = self.encoder.take_params(train.seed)
        params = self.load_model()
        if self.model.pattern.inserts_tokens:
            raise InputError(
                f"model.pattern with inserted tokens does not go with retriever.type={section.kind}"
            )
        never_trained = {}  # frozen regardless of `train.trainable`
        if is_frozen:
            never_trained[RETRIEVER] = {"passage": retriever.pop("passage")}
        if self._trains_lm:
            params[RETRIEVER] = retriever
        else:
            never_trained, params = never_trained | params, {RETRIEVER: retriever}
        trained, frozen = split_trained(self._with_rules(), params)
        frozen = union(frozen, never_trained)
        self._frozen_retriever = frozen.get(RETRIEVER, {})
        if self._trains_lm and train.export:
            check_exportable(self.model)
        trees = trained.get(RETRIEVER, {})
        trains_passages = bool(trees.get("passage") if self.encoder.has_two else trees)
        self._index = _Index(self.config, self._store, self.encoder.bert, self.mesh)
        if not trains_passages:
            self._index.refresh = None  # the same weights give the same vectors again
        return trained, frozen

    def write_config(self, folder: Path) -> None:
        """Writes nothing: only `run` reads the checkpoints, and <run>/model holds the result."""

    def _with_rules(self) -> TrainConfig:
        """Returns the config; with adapters, its default rules train adapters and the encoder."""
        train = self.config.train
        if train.lora is None or train.trainable:
            return self.config
        return self.config.replace(train=dataclasses.replace(train, trainable=("lora", RETRIEVER)))

    def open_loader(self, split: str) -> Loader:
        has_names = not self.section.same_document
        return super().open_loader(split, documents=has_names)

    def objective(self, split: str) -> Objective:
        train, section, encoder = self.config.train, self.section, self.encoder
        positions = train.positions if split == "train" else PlainPositions()
        nll_of = target_nll(
            self._model_in(split), positions, chunk=train.loss_chunk, mesh=self.mesh
        )

        def objective(trained, frozen, batch, key):
            params = union(trained, frozen)
            with jax.named_scope("retriever"):
                scores = _scores(encoder, params.pop(RETRIEVER), batch)
            nll = _aligned(nll_of(params, _text_rows(batch), key), batch)
            loss, weights = section.loss(scores, nll, batch), batch["weights"]
            is_scored = jnp.where(batch["scored"].any(-1), 1.0, 0.0)
            return (loss * is_scored).sum(), weights.sum(), {}

        return objective

    def prepare(
        self, step: int, batch: dict[str, np.ndarray], params: dict
    ) -> dict[str, np.ndarray]:
        """Searches the passages of a batch, and returns the fields that the objective reads.

        - `tokens`, `targets` int32 [B, K, W], `lengths` [B, K]: each passage and the text after it.
        - `starts` int32 [B, K]: the index of the text's first token in them.
        - `scored` float32 [B, T]: 1 for the targets of the text that are y.
        - `has_passage` bool [B, K]: whether the k-th passage exists.
        - `query` int32 [B, Q], `query_lengths` [B], `passages` [B, K, P], `passages_lengths`
          [B, K]: the token rows of the encoder.
        - `weights` float32: `scored` [B, T], or [B] with 1 for each query if queries are the unit
          of the loss.
        """
        batch = self._of_all_processes(batch)
        rows = [
            _split_row(*row, self.section.query_tokens)
            for row in zip(batch["tokens"], batch["weights"], batch["segments"], strict=True)
        ]
        queries = [self.tokenizer.decode(row.query, skip_special=True) for row in rows]
        hits = self._search(step, batch, queries, params)
        fields = self._text_fields(batch, rows, hits) | self._encoder_fields(queries, hits)
        if self.unit == "queries":
            fields["weights"] = fields["scored"].any(-1).astype(np.float32)
        else:
            fields["weights"] = fields["scored"]
        if jax.process_count() == 1:
            return fields
        local_rows = process_rows(self.mesh, len(rows))
        return {name: value[local_rows] for name, value in fields.items()}

    def _of_all_processes(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Gathers the rows of all processes.

        All processes search the same queries, because each holds a part of the index.
        """
        if jax.process_count() == 1:
            return batch
        placed = batches.put(batch, self.mesh)
        return {name: distributed.gather(value) for name, value in placed.items()}

    def _search(
        self, step: int, batch: dict[str, np.ndarray], queries: list[str], params: dict
    ) -> list[list[Hit]]:
        """Returns the best passages of every query; a blank query has none."""
        retriever = union(params.get(RETRIEVER, {}), self._frozen_retriever)
        index = self._index.at(step, self.encoder.with_params(retriever))
        texts = [i for i, query in enumerate(queries) if query.strip()]
        if "documents" in batch:
            documents = [set(row.tolist()) for row in batch["documents"]]
        else:
            documents = [set()] * len(queries)
        results = search_other_documents(
            index, [queries[i] for i in texts], [documents[i] for i in texts], self.section.k
        )
        hits: list[list[Hit]] = [[] for _ in queries]
        for i, row in zip(texts, results, strict=True):
            hits[i] = row
        if step == 0 and texts and not any(results):
            raise InputError(
                f"retriever.store={self.section.store} has no passage for the first {len(texts)}"
                " queries; name a datastore of more text, or retriever.same_document=true if it is"
                " the same text"
            )
        return hits

    def _text_fields(
        self, batch: dict[str, np.ndarray], rows: list["_Row"], hits: list[list[Hit]]
    ) -> dict[str, np.ndarray]:
        tokenizer, section, length = self.tokenizer, self.section, batch["tokens"].shape[1]
        separator = encode_mid_text(tokenizer, SEPARATOR)
        shape = len(rows), section.k
        width = section.passage_tokens + len(separator) + length
        width += -width % (2 * self.mesh.shape[LENGTH])  # divisible by the devices of a text
        fields = {name: np.zeros((*shape, width), np.int32) for name in TEXTS}
        fields |= {name: np.zeros(shape, np.int32) for name in ("lengths", "starts")}
        fields["has_passage"] = np.zeros(shape, bool)
        fields["scored"] = np.zeros(batch["tokens"].shape, np.float32)
        for i, (row, row_hits) in enumerate(zip(rows, hits, strict=True)):
            text, head = batch["tokens"][i, : row.length], 0
            if row.length and text[0] == tokenizer.bos_id:
                head = 1  # BOS stays the first token
            if row_hits:
                fields["scored"][i] = row.scored
            for j, hit in enumerate(row_hits):
                ids = tokenizer.encode(hit.passage.full_text)[: section.passage_tokens]
                ids = [*ids, *separator]
                start, end = len(ids), len(ids) + row.length
                fields["tokens"][i, j, :end] = np.concatenate([text[:head], ids, text[head:]])
                fields["targets"][i, j, start:end] = batch["targets"][i, : row.length]
                fields["lengths"][i, j], fields["starts"][i, j] = end, start
                fields["has_passage"][i, j] = True
        return fields

    def _encoder_fields(self, queries: list[str], hits: list[list[Hit]]) -> dict[str, np.ndarray]:
        encoder, section = self.encoder.bert, self.section
        padding_row = TokenRow([0], 1)

        def fields(name, rows, width):
            batch = pad_rows(rows, len(rows), width)
            return {name: batch.tokens, f"{name}_lengths": batch.lengths}

        # The encoder may need more tokens for a query than the language model.
        width = min(2 * section.query_tokens, encoder.max_tokens)
        limit = LengthLimit(width, "truncate", encoder.name)
        query = fields("query", encoder.token_rows(queries, None, True, limit), width)
        width = min(section.passage_tokens, encoder.max_tokens)
        limit = LengthLimit(width, "truncate", encoder.name)
        passages = [hit.passage for row in hits for hit in row]
        rows = iter(
            encoder.token_rows(
                [passage.text for passage in passages],
                [passage.title for passage in passages],
                False,
                limit,
            )
        )
        passage_rows = [
            next(rows) if j < len(row) else padding_row for row in hits for j in range(section.k)
        ]
        passage = fields("passages", passage_rows, width)
        shape = len(hits), section.k
        return query | {
            name: value.reshape(*shape, *value.shape[1:]) for name, value in passage.items()
        }

    def export(self, folder: Path, trained: dict, frozen: dict) -> None:
        train, model = self.config.train, folder / folder_lib.MODEL
        params = union(trained, frozen)
        self.encoder.save(model, params.pop(RETRIEVER), train)
        written = f"{model} holds the encoder"
        if self._trains_lm:
            lm = folder / folder_lib.LANGUAGE_MODEL
            options = {"overwrite": True, "checksums": train.checksums, "dtype": train.export_dtype}
            save_hf(lm, params, self.model, self.tokenizer, **options)
            written += f", {lm} the language model"
        store = self.section.store
        announce(
            f"{written}; {store} has no vectors of this encoder yet: add them with"
            f" Datastore({store!r}).encode(EncoderSection({str(model)!r}))"
        )

    def training_flops(self) -> float:
        """Returns the FLOPs of an update per query or scored token, for rows without padding."""
        section = self.section
        length = self.config.data.length
        width = section.passage_tokens + length
        rules = matcher(self._with_rules().train.rules(), "train.trainable")
        work = cost.estimate(self.model, width, trained=rules)
        flops = section.k * width * (work.training_flops if self._trains_lm else work.forward_flops)
        passages = [section.passage_tokens] * section.k
        flops += self.encoder.training_flops(section.query_tokens, *passages)
        return flops if self.unit == "queries" else flops / (length - section.query_tokens)

    def summary(self) -> list[str]:
        refresh = self._index.refresh
        schedule = f"encoded again every {refresh:,} steps" if refresh else "encoded once"
        name, store = self.encoder.bert.name, self.section.store
        return [f"{name} searches {len(self._store):,} passages of {store}, which are {schedule}"]


class _Index:
    """An index of all passages, whose vectors are computed again every `refresh` steps.

    The files of vectors stay in the run folder as long as a checkpoint needs them, so a resumed run
    retrieves the same passages. The vectors of step 0 are those of the datastore if it has them.
    """

    def __init__(
        self, config: TrainConfig, store: Datastore, encoder: BertEncoder, mesh: jax.sharding.Mesh
    ):
        section: EndToEnd = config.retriever
        self.refresh = section.refresh
        self._store, self._mesh, self._save_every = store, mesh, config.train.save_every
        self._run = to_path(config.run.folder)
        self._folder = self._run / folder_lib.INDEX
        self._fingerprint = encoder.fingerprint  # of the weights of step 0
        self._is_stored = self._fingerprint in store.index["encoders"]
        self._origin: int | None = None  # step of the weights that made the open vectors
        self._exact: ExactIndex | None = None

    def at(self, step: int, encoder: BertEncoder) -> Retriever:
        """Returns the retriever of a step; all processes must call it.

        Args:
          step: number of updates of the encoder.
          encoder: encoder with the weights of that step.
        """
        origin = self._origin_of(step)
        if self._origin is None:
            self._begin(step)
        if origin != self._origin:
            self._exact = None  # frees the devices before the next vectors are placed there
            vectors = self._vectors(origin, step, encoder)
            self._exact = ExactIndex(
                vectors, valid=self._store.valid, mesh=self._mesh, memory=_INDEX_MEMORY
            )
            self._origin = origin
            self._remove(step)
        exact = self._exact

        def search(queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
            return exact.search(encoder.encode_queries(queries), k)

        return Retriever(self._store, [search])

    def _origin_of(self, step: int) -> int:
        return 0 if self.refresh is None else step // self.refresh * self.refresh

    def _begin(self, step: int) -> None:
        """Checks that the passages are those of the run; removes files of later steps.

        A killed run may have made the later files with settings that have changed since. Before the
        first checkpoint, passages and encoder may change; then all vectors are removed.
        """
        digest = hashlib.sha256()
        for shard in self._store.index["shards"]:
            digest.update(shard["sha256"].encode())
        if self._store.valid is not None:
            digest.update(self._store.valid.tobytes())
        file = self._folder / _PASSAGES
        identity = {"sha256": digest.hexdigest(), "encoder": self._fingerprint}
        saved = distributed.from_main(lambda: read_json(file, identity))
        if step and saved.get("sha256") != identity["sha256"]:
            raise InputError(
                f"retriever.store={self._store.folder} has other passages than when the run in"
                f" {self._run} began; put them back, or start another run.folder"
            )
        if distributed.is_main_process():
            self._folder.mkdir(exist_ok=True)
            write_json(file, identity)
            for path, origin in self._files():
                if origin > step or (step == 0 and saved != identity):
                    path.unlink()
        distributed.barrier("index checked")

    def _vectors(self, origin: int, step: int, encoder: BertEncoder) -> np.ndarray:
        fields = {"fingerprint": f"{_STEP}{origin:09d}", "dim": encoder.dim, "dtype": "float32"}
        path = vector_file(self._folder, fields["fingerprint"])
        if not distributed.from_main(path.is_file):
            if origin == 0 and self._is_stored:
                return self._store.vectors(encoder)
            if step != origin:
                raise InputError(
                    f"{path} is missing, which holds the vectors of the passages from step"
                    f" {origin}; put it back, or start again with run.existing=overwrite"
                )
            self._write(path, fields, encoder)
        return open_vectors(self._folder, fields, self._store.num_rows)

    def _write(self, path: Path, fields: dict[str, Any], encoder: BertEncoder) -> None:
        num_rows = self._store.num_rows
        announce(f"encoding {num_rows:,} passages of {self._store.folder} for {path}")
        with contextlib.ExitStack() as stack:
            # All processes must compute the vectors; the main one writes them.
            is_main, file = distributed.is_main_process(), None
            if is_main:
                file = stack.enter_context(atomic_file(path, "wb"))
                file.write(vector_header(fields))
            for vectors in self._store.encoded_shards(encoder, fields["dtype"]):
                if is_main:
                    file.write(vectors)
        distributed.barrier("index written")

    def _remove(self, step: int) -> None:
        """Removes the vectors that neither a checkpoint nor this step needs.

        At most one checkpoint may be in the course of writing, and is not in the folder yet: that
        of the last multiple of `save_every`, or, during a validation at such a step, that of the
        multiple before. A non-finite step is detected after the next one is dispatched, and the run
        then saves the state of `step - 1`.
        """
        if not distributed.is_main_process():
            return
        since_save = step % self._save_every
        steps = [*steps_in(self._run / CHECKPOINTS), step, step - since_save]
        before = step - 1 if since_save else step - self._save_every
        if before > 0:
            steps.append(before)
        needed = set(map(self._origin_of, steps))
        for path, origin in self._files():
            if origin not in needed:
                path.unlink()

    def _files(self) -> list[tuple[Path, int]]:
        prefix = vector_file(self._folder, _STEP).stem
        paths = self._folder.glob(f"{prefix}*.bin")
        return [(path, int(path.stem.removeprefix(prefix))) for path in paths]


class _Row(NamedTuple):
    """The query of a row, and the mask of its targets that are y."""

    query: list[int]
    length: int  # tokens of the first document; others are not read
    scored: np.ndarray  # float32 [T], 1 for y


def _split_row(
    tokens: np.ndarray, weights: np.ndarray, segments: np.ndarray, query_tokens: int
) -> _Row:
    """Splits a row into its query and y.

    The query is the text before the first target with a weight (a question), cut to its last
    `query_tokens`. If a row begins inside an answer, its query is the first question after that
    answer. In plain text all targets have weights; then the query is the first `query_tokens`, and
    y is the text after them.
    """
    place = np.arange(len(tokens))
    length = int((segments == 1).sum())
    scored = np.where(place < length, weights, 0).astype(np.float32)
    targets = np.flatnonzero(scored)
    if not targets.size:
        return _Row([], length, scored)
    first = targets[0]
    if first == 0 and (after_gap := targets[targets > np.arange(len(targets))]).size:
        first = after_gap[0]
        scored[:first] = 0
    elif first == 0:
        first = query_tokens - 1
        scored = np.where(place >= first, scored, 0).astype(np.float32)
    query = tokens[: min(first + 1, length)][-query_tokens:]
    return _Row(query.tolist(), length, scored)


# Parts of the objective


def _scores(
    encoder: TrainedEncoder, params: dict, batch: dict[str, jax.Array]
) -> Float[Array, "B K"]:
    """Returns the scores of each query and its passages: products of their vectors."""

    def vectors(name: str, *, is_query: bool) -> jax.Array:
        tokens, lengths = batch[name], batch[f"{name}_lengths"]
        rows = tokens.reshape(-1, tokens.shape[-1])
        x = encoder.vectors(params, rows, lengths.reshape(-1), is_query=is_query)
        return x.reshape(*lengths.shape, -1)

    pair = vectors("query", is_query=True), vectors("passages", is_query=False)
    return jnp.einsum("BD,BKD->BK", *pair, precision=jax.lax.Precision.HIGHEST)


def _text_rows(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the texts after their passages as rows [B K, W] of a language model."""
    tokens, targets = (batch[name].reshape(-1, batch[name].shape[-1]) for name in TEXTS)
    place = jnp.arange(tokens.shape[1])
    is_text = place < batch["lengths"].reshape(-1, 1)
    return {
        "tokens": tokens,
        "targets": targets,
        "segments": is_text.astype(jnp.int32),
        "positions": jnp.where(is_text, place, 0),
    }


def _aligned(nll: Float[Array, "BK W"], batch: dict[str, jax.Array]) -> Float[Array, "B K T"]:
    """Returns `nll` of the text alone, so that index t is the same token after every passage."""
    nll = nll.reshape(batch["tokens"].shape)
    places = batch["starts"][..., None] + jnp.arange(batch["scored"].shape[1])
    return jnp.take_along_axis(nll, places, axis=2)
