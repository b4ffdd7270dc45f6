"""Contrastive training of encoders by train.py: the type `contrastive` of `retriever`.

    retriever:
      type: contrastive
      encoder: {path: facebook/contriever, pooling: mean, allow_pickle: true}
      pairs: {type: records, path: pairs.jsonl}

Training loop, checkpoints and optimizer are shared with language models
(`lcjax.training.training_task`).
"""

import copy
import dataclasses
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lcjax.checkpoints.bert_folder import (
    BERT_FOLDER,
    BERT_FOLDERS,
    BertWeights,
    SentenceModules,
    save_bert,
)
from lcjax.checkpoints.build import ModelSection
from lcjax.checkpoints.hub import find_encoder
from lcjax.checkpoints.run_folder import BaseModel
from lcjax.data import DataConfig, Loader
from lcjax.errors import InputError, Interval, NonNegativeInt, Range, check_fields
from lcjax.files import FolderFormat
from lcjax.models.bert import Bert, BertConfig
from lcjax.models.lora import LoRA
from lcjax.parallel import distributed
from lcjax.parallel.digest import weights_digest
from lcjax.parallel.sharding import keep_rows, process_rows, replicated
from lcjax.retrieval.datastore import EncoderSection
from lcjax.retrieval.encoder import BertEncoder, encoder_class, has_two_encoders
from lcjax.retrieval.token_batches import DTYPES, TokenBatch
from lcjax.retrieval.training_pairs import PairRows, Pairs, Records, open_pairs
from lcjax.storage import to_path
from lcjax.training import batches
from lcjax.training import folder as folder_lib
from lcjax.training.language_modelling import split_trained
from lcjax.training.objective import Objective
from lcjax.training.state import new_adapters
from lcjax.training.tracking import announce
from lcjax.training.train_config import RetrieverTraining, TrainConfig, TrainSection
from lcjax.training.training_task import Task
from lcjax.tree import flatten, union

# Fields of `data` that describe rows of a language model
_ROW_FIELDS = ("length", "pack", "overlong", "packing_bins", "masking", "chunks")
_ROW_FIELDS += ("document_mask", "add_bos", "add_eos")
_SIDES = ("query", "passage")  # first names in the paths of parameters of two encoders


@RetrieverTraining.register_subclass("contrastive")
@dataclasses.dataclass(frozen=True)
class Contrastive(RetrieverTraining):
    """Contrastive training with in-batch negatives: raises the score of a query's own passage.

    The loss of a query q with its passage p+ is -log softmax(sim(q, p) / temperature) at p = p+.
    The softmax is over the passages p of all queries of the microbatch, on all devices, with their
    hard negatives (DPR, Karpukhin et al. 2020, arXiv 2004.04906; Contriever, Izacard et al. 2022,
    arXiv 2112.09118).
    """

    # Initial weights: a BERT, or two (`query_folder`). Settings default to those of its folder
    encoder: EncoderSection = dataclasses.field(default_factory=EncoderSection)
    # Divides the similarities; 0.05 in Contriever, 1 in DPR
    temperature: Annotated[float, Interval(above=0, hint="such as 0.05")] = 0.05
    negatives: NonNegativeInt = 0  # hard negatives of each query, from records
    # Whether to average with the loss of each passage over the queries (as in CLIP)
    symmetric: bool = False
    pairs: Pairs = dataclasses.field(default_factory=Records)
    # Maximum tokens of a query, special tokens included; longer: cut
    query_tokens: Annotated[int, Range(3)] = 128
    passage_tokens: Annotated[int, Range(3)] = 256  # the same of a passage

    def __post_init__(self):
        check_fields("retriever", self)

    def make_task(self, config: TrainConfig, mesh: jax.sharding.Mesh) -> "ContrastiveTask":
        return ContrastiveTask(config, mesh)


class TrainedEncoder:
    """One BERT encoder, or separate encoders of queries and passages, as functions of parameters.

    The parameters are those of `lcjax.models.bert.Bert`. With two encoders they are nested below
    `query/` and `passage/`.
    """

    def __init__(
        self,
        section: EncoderSection,
        mesh: jax.sharding.Mesh | None,
        lora: LoRA | None,
        *,
        separate: bool = False,
    ):
        """Opens the checkpoints of `section`; call `check_bert_section` before.

        Args:
          section: one encoder or two.
          mesh: the devices; None: one device.
          lora: adapters to add; None: no adapters.
          separate: whether a single encoder is copied to two encoders with the same weights.
        """
        self._mesh = mesh
        # Weights are trained in float32, whatever the dtype of activations.
        bert: BertEncoder = dataclasses.replace(section, dtype=None).open(mesh)
        # `save` writes a folder that is not a DPR, so the training must not read pairs either.
        bert.reads_pairs = False
        self.bert, self.pool, self.prefixes = bert, bert.pool, bert.prefixes
        self.max_tokens, self.tokenizer = bert.max_tokens, bert.passage.folder.tokenizer
        self._berts = dict(zip(_SIDES, (bert.query, bert.passage)))
        if bert.query is bert.passage and separate:
            copied = jax.tree.map(jnp.copy, bert.query.params)
            self._berts["query"] = dataclasses.replace(bert.query, params=copied)
        elif bert.query is bert.passage:
            self._berts = {"": bert.passage}
        elif bert.query.folder.tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise InputError(
                f"encoder.query_folder={section.query_folder} has another tokenizer than"
                f" encoder.path={section.path}; train two encoders with one vocabulary"
            )
        dtype = section.dtype or "float32"
        self._models = {
            side: Bert(bert.model.config.replace(dtype=dtype, lora=lora), mesh)
            for side, bert in self._berts.items()
        }

    @property
    def config(self) -> BertConfig:
        """Config of the encoder of passages, adapters included."""
        return self._models[next(reversed(self._models))].config

    @property
    def has_two(self) -> bool:
        """Whether queries and passages have separate encoders."""
        return len(self._models) == 2

    def take_params(self, seed: int) -> dict:
        """Returns the parameters, new adapters included, and drops all references to them.

        It can be called only once.
        """
        trees = {}
        for number, (side, bert) in enumerate(self._berts.items()):
            config, params = self._models[side].config, bert.params
            if config.lora is not None:
                adapters = new_adapters(Bert(config).init, self._mesh, seed=seed + number)
                params = union(params, adapters)
            trees[side], bert.params = params, {}
        return trees if self.has_two else trees[""]

    def vectors(
        self, params: dict, tokens: Int[Array, "N T"], lengths: Int[Array, " N"], *, is_query: bool
    ) -> Float[Array, "N D"]:
        """Returns float32 vectors [N, D] of rows of tokens; traceable.

        Args:
          params: parameters of all encoders.
          tokens: [N, T] with special tokens; 0 is padding.
          lengths: [N] tokens of each row; 0 for padding rows, whose vectors are meaningless.
          is_query: whether the rows are queries.
        """
        side, params = self._side(params, is_query)
        tokens, lengths = (keep_rows(x, self._mesh) for x in (tokens, jnp.maximum(lengths, 1)))
        hidden = self._models[side].apply({"params": params}, tokens, lengths=lengths)
        return self.pool(None, {}, hidden, TokenBatch(tokens, lengths, lengths, lengths))

    def _side(self, params: dict, is_query: bool) -> tuple[str, dict]:
        if not self.has_two:
            return "", params
        side = _SIDES[not is_query]
        return side, params[side]

    def with_params(self, params: dict) -> BertEncoder:
        """Returns a copy of the encoder with the given parameters; all other state is shared."""
        encoder = copy.copy(self.bert)
        for name in _SIDES:
            side, tree = self._side(params, name == "query")
            bert = dataclasses.replace(self._berts[side], model=self._models[side], params=tree)
            setattr(encoder, name, bert)
        return encoder

    def save(self, folder: Path, params: dict, train: TrainSection) -> None:
        """Writes a folder that `open_encoder`, sentence-transformers and transformers can read."""
        weights = {
            side: BertWeights(params[side] if self.has_two else params, model.config, bert.folder)
            for (side, model), bert in zip(self._models.items(), self._berts.values())
        }
        save_bert(
            folder,
            weights if self.has_two else weights[""],
            SentenceModules(self.pool.pooling, self.pool.normalize, *self.prefixes),
            max_tokens=self.max_tokens,
            dtype=train.export_dtype or "float32",
            overwrite=True,
            checksums=train.checksums,
        )

    def training_flops(self, *lengths: int) -> float:
        """Returns the FLOPs of an update with one row of each of the `lengths`."""
        c = self.config
        per_token = 2 * c.num_layers * (4 * c.width**2 + 2 * c.width * c.mlp_width)
        attention = 4 * c.num_layers * c.width
        return 3.0 * sum(length * (per_token + attention * length) for length in lengths)


def check_bert_section(section: EncoderSection) -> None:
    """Raises an InputError unless `section` names BERT encoders; does not read weights."""
    if not section.path:
        raise InputError("retriever.encoder.path is empty: name the folder or hub id of a BERT")
    if section.dtype not in (None, *DTYPES):
        raise InputError(
            f"retriever.encoder.dtype={section.dtype} must be one of {', '.join(DTYPES)}"
        )
    for key in ("path", "query_folder"):
        if (path := getattr(section, key)) is None:
            continue
        pickle = section.allow_pickle
        try:
            kind = encoder_class(find_encoder(path, allow_pickle=pickle), pickle)
        except InputError as error:
            message = str(error).removeprefix(f"{path}: ")
            raise InputError(f"retriever.encoder.{key}={path}: {message}") from error
        if kind is not BertEncoder:
            raise InputError(
                f"retriever.encoder.{key}={path} is for a {kind.__name__}, and only BERT encoders"
                " are trained here; name one, such as facebook/contriever"
            )


def export_format(section: EncoderSection, *, separate: bool = False) -> FolderFormat:
    """Returns the format of the folder that `TrainedEncoder.save` writes."""
    path = to_path(section.path)
    # A run folder holds the trained encoder in `model`.
    has_two = section.query_folder is not None or any(map(has_two_encoders, (path, path / "model")))
    return BERT_FOLDERS if has_two or separate else BERT_FOLDER


def contrastive_loss(
    queries: Float[Array, "B D"],
    passages: Float[Array, "B N D"],
    weights: Float[Array, " B"],
    passage_ids: Int[Array, "B N"],
    *,
    temperature: float,
    symmetric: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Computes the contrastive loss of queries over the passages of all rows, summed over the rows.

    With s_ij = q_i . p_j / temperature, the loss of query i, whose passage is p_i, is

        -s_ii + log sum_j exp(s_ij)

    The sum is over all passages j, hard negatives included. It leaves out the passages of padding
    rows, and passages that equal p_i (other than p_i itself). With `symmetric` the loss is the mean
    of this and of -s_ii + log sum_j exp(s_ji). That sum is over the queries j, without those of
    padding rows and other queries whose passage equals p_i.

    Args:
      queries: [B, D] vectors.
      passages: [B, N, D] vectors; the positive of each query, then its hard negatives.
      weights: [B], 0 for padding rows.
      passage_ids: [B, N], equal for equal passages.
      temperature: divisor of the scores.
      symmetric: whether to add the loss of each passage over the queries.
      mesh: mesh over which rows are sharded; every device scores its queries over all passages.

    Returns:
      The sum of the losses, the sum of the weights, and for the log `accuracy`, the number of
      queries whose passage has the highest score.
    """
    num_rows, num_passages = passage_ids.shape
    passages = passages.reshape(num_rows * num_passages, -1)
    if mesh is not None:
        # Gathered once; gradients flow back to the device that computed a passage.
        passages = jax.lax.with_sharding_constraint(passages, replicated(mesh))
    scores = jnp.matmul(queries, passages.T, precision=jax.lax.Precision.HIGHEST) / temperature
    scores = keep_rows(scores.reshape(num_rows, num_rows, num_passages), mesh)

    is_own = jnp.eye(num_rows, dtype=bool)
    is_positive = is_own[:, :, None] & (jnp.arange(num_passages) == 0)
    is_equal = passage_ids[:, :1, None] == passage_ids[None]  # [B, B, N]
    is_text = (weights > 0)[None, :, None]
    is_scored = is_positive | (is_text & ~is_equal)
    scored = jnp.where(is_scored, scores, -jnp.inf)
    positive = jnp.diagonal(scores[:, :, 0])
    losses = jax.nn.logsumexp(scored, axis=(1, 2)) - positive
    if symmetric:
        # Columns are queries. Equality of positives is symmetric.
        by_passage = jnp.where(is_own | (is_text & ~is_equal)[:, :, 0], scores[:, :, 0].T, -jnp.inf)
        losses = (losses + jax.nn.logsumexp(by_passage, axis=1) - positive) / 2
    is_best = positive > jnp.where(is_positive, -jnp.inf, scored).max((1, 2))
    parts = {"accuracy": jnp.sum(weights * is_best)}
    return jnp.sum(weights * losses), jnp.sum(weights), parts


class ContrastiveTask(Task):
    """The training task of `Contrastive`: an encoder on pairs of queries and passages."""

    unit = "queries"
    encoder: TrainedEncoder

    def __init__(self, config: TrainConfig, mesh: jax.sharding.Mesh | None):
        super().__init__(config, mesh)
        self.settings: Contrastive = config.retriever
        self.export_format = export_format(self.settings.encoder)

    def check(self) -> None:
        config, settings = self.config, self.settings
        check_sections(config)
        batches.check_rows(config, self.mesh.shape)
        rows, negatives = config.train.batch_size, settings.negatives
        distributed.from_main(lambda: settings.pairs.check(config.data, rows, negatives))
        check_bert_section(settings.encoder)

    def load(self) -> tuple[dict, dict]:
        settings, train = self.settings, self.config.train
        announce(f"loading {settings.encoder.path}")
        self.encoder = TrainedEncoder(settings.encoder, self.mesh, train.lora)
        for name in ("query_tokens", "passage_tokens"):
            if (tokens := getattr(settings, name)) > self.encoder.max_tokens:
                raise InputError(
                    f"retriever.{name}={tokens} is more than the {self.encoder.max_tokens} tokens"
                    f" that {settings.encoder.path} reads; lower it"
                )
        self.dtype = self.encoder.config.dtype
        return split_trained(self.config, self.encoder.take_params(train.seed))

    def open_loader(self, split: str) -> Loader:
        config, settings, size = self.config, self.settings, self.config.train.batch_size
        encoder, lengths = self.encoder, (settings.query_tokens, settings.passage_tokens)
        return open_pairs(
            settings.pairs,
            PairRows(encoder.tokenizer, encoder.prefixes, *lengths, settings.negatives),
            config.data,
            batch_size=size,
            local_rows=process_rows(self.mesh, size),
            split=split,
        )

    def objective(self, split: str) -> Objective:
        del split
        encoder, settings, mesh = self.encoder, self.settings, self.mesh

        def objective(trained, frozen, batch, key):
            del key
            params = union(trained, frozen)
            queries = encoder.vectors(params, batch["query"], batch["query_length"], is_query=True)
            shape = batch["passages"].shape
            passages = encoder.vectors(
                params,
                batch["passages"].reshape(-1, shape[2]),
                batch["passage_lengths"].reshape(-1),
                is_query=False,
            )
            with jax.named_scope("loss"):
                return contrastive_loss(
                    queries,
                    passages.reshape(*shape[:2], -1),
                    batch["weights"],
                    batch["passage_ids"],
                    temperature=settings.temperature,
                    symmetric=settings.symmetric,
                    mesh=mesh,
                )

        return objective

    def base(self, trained: dict, frozen: dict) -> BaseModel:
        train, section = self.config.train, self.settings.encoder
        return BaseModel(
            path=section.path,
            param_dtype="float32",
            seed=train.seed,
            trained=tuple(flatten(trained)),
            average=train.ema is not None,
            frozen=weights_digest(frozen),
            base=section.query_folder,
        )

    def export(self, folder: Path, trained: dict, frozen: dict) -> None:
        path = folder / folder_lib.MODEL
        self.encoder.save(path, union(trained, frozen), self.config.train)

    def training_flops(self) -> float:
        settings = self.settings
        passages = [settings.passage_tokens] * (1 + settings.negatives)
        return self.encoder.training_flops(settings.query_tokens, *passages)


def check_sections(config: TrainConfig) -> None:
    """Raises an InputError for settings of language models, which encoders do not use."""
    defaults = ModelSection()
    for field in dataclasses.fields(ModelSection):
        if (value := getattr(config.model, field.name)) != getattr(defaults, field.name):
            raise InputError(
                f"model.{field.name}={value} is of a language model, and a contrastive retriever"
                " trains none; leave it out, and name the encoder with retriever.encoder.path"
            )
    data, default = config.data, DataConfig()
    for name in _ROW_FIELDS:
        if (value := getattr(data, name)) != getattr(default, name):
            raise InputError(
                f"data.{name}={value} describes rows of a language model; leave it out, and set"
                " retriever.query_tokens and retriever.passage_tokens"
            )
    train, default = config.train, TrainSection()
    for name in ("distill", "positions", "loss_chunk"):
        if getattr(train, name) != getattr(default, name):
            raise InputError(f"train.{name} is of a language model; leave it out")
    if train.offload == "parameters":
        raise InputError("train.offload=parameters is for decoders; set optimizer, or none")
