"""`python -m lcjax.data teacher`: stores a model's next-token probabilities, to train a student.

CEPED (Yen et al. 2024, arXiv 2402.16617, sec. 2.4): the original decoder reads the context and the
tokens of a row as one text. For each token after the context, the largest next-token probabilities
are stored. Rows come from `data:` as in training, in the same order (`lcjax.data.stored_rows`).
"""

import functools
import json
from dataclasses import dataclass, field
from typing import Any

import draccus
import jax
import numpy as np

from lcjax.checkpoints.build import ModelSection, build, check_source
from lcjax.data.corpus import check_sources
from lcjax.data.data_config import TEACHER
from lcjax.data.jobs import begin
from lcjax.data.loader import Loader, make_loader
from lcjax.data.stored_rows import RowsConfig, write_rows
from lcjax.errors import InputError, PositiveInt, check_fields
from lcjax.files import read_json
from lcjax.models import Decoder, head
from lcjax.models.distill import Teacher, largest_probabilities
from lcjax.parallel import distributed
from lcjax.parallel.digest import weights_digest
from lcjax.parallel.distributed import Distributed
from lcjax.parallel.run_lock import RunLock
from lcjax.parallel.sharding import Mesh, batch_sharding, make_mesh, process_rows

Row = dict[str, np.ndarray]


@dataclass(frozen=True)
class TeacherConfig(RowsConfig):
    """Settings of `python -m lcjax.data teacher`."""

    model: ModelSection = field(default_factory=ModelSection)  # the teacher: a plain decoder
    top: PositiveInt = 50  # number of the largest probabilities of each distribution to store
    mesh: Mesh = field(default_factory=Mesh)
    distributed: Distributed = field(default_factory=Distributed)

    def __post_init__(self):
        super().__post_init__()
        check_fields("", self)
        chunks = self.data.chunks
        if chunks is None or chunks.text != "before":
            raise InputError(
                "data.chunks: the teacher reads a context and the text after it; give"
                " data.chunks.count and data.chunks.length, with text: before"
            )

    def row_shape(self, vocab_size: int) -> dict[str, Any]:
        return super().row_shape(vocab_size) | {"top": self.top}


def write_teacher_rows(config: TeacherConfig) -> dict[str, Any]:
    """Writes the missing shards of a folder of teacher rows.

    Returns:
      The index of the folder, which is the content of `teacher.json`.

    Raises:
      InputError: the folder was written from other text, weights or settings, another process
        writes it, or the model is not a decoder.
    """
    mesh = make_mesh(config.mesh)
    rows = process_rows(mesh, config.batch_size)  # checks that the devices divide the batch
    check_source(config.model)
    check_sources(config.data)
    model, params, tokenizer = build(config.model, mesh)
    _check_teacher(config, model)
    loader = make_loader(config.data, tokenizer, config.batch_size)
    out, identity = config.folder, _identity(config, model, params, loader)
    if distributed.is_main_process():
        begin(out, identity, TEACHER.index, TEACHER.plan)
    distributed.barrier("teacher's folder ready")
    if (out / TEACHER.index).is_file():
        index = read_json(out / TEACHER.index)
    else:
        complete = functools.partial(_add_probabilities, model, params, config, rows)
        fields = {
            "tokenizer": tokenizer.fingerprint,
            "teacher": config.model.path or f"random weights of {config.model.preset}",
            "weights": identity["weights of the teacher"],
            "identity": identity,
        }
        shape = config.row_shape(tokenizer.vocab_size)
        with RunLock(out, "out"):
            index = write_rows(config, TEACHER, shape, loader, complete, fields)
    loader.close()
    if distributed.is_main_process():
        print(
            f"{out}: {index['rows']:,} rows; read them with data.sources:"
            f" [{{type: teacher, path: {out}}}], and train.distill"
        )
    return index


def _check_teacher(config: TeacherConfig, model: Decoder) -> None:
    inserts_tokens = any(pattern.inserts_tokens for pattern in model.config.patterns)
    if model.config.mlm_head or model.config.needs_whole_prompt or inserts_tokens:
        raise InputError(
            f"model.path={config.model.path or config.model.preset} gives no probabilities of the"
            " next token in plain text; name a decoder"
        )
    if config.top > model.config.vocab_size:
        raise InputError(
            f"top={config.top} is more than the {model.config.vocab_size} tokens of the model"
        )


def _identity(
    config: TeacherConfig, model: Decoder, params: dict, loader: Loader
) -> dict[str, Any]:
    """Returns all settings and digests that determine the rows."""
    fields = {
        f"model.{name}": draccus.encode(getattr(model.config, name)) for name in ("rope", "pattern")
    }
    fields |= {"model.dtype": model.config.dtype, "weights of the teacher": weights_digest(params)}
    fields |= {"top": config.top, "rows": config.rows} | loader.get_state()["identity"]
    return json.loads(json.dumps(fields))


def _add_probabilities(
    model: Decoder, params: dict, config: TeacherConfig, rows: list[int], batch: Row
) -> Row:
    """Adds the teacher's probabilities to a global batch; every process must call it.

    `rows` are the indices of the rows that the devices of this process compute.
    """
    context, mask = (
        batch[name].reshape(config.batch_size, -1) for name in ("chunks", "chunk_mask")
    )
    tokens = np.concatenate([context, batch["tokens"]], 1)
    # One text per row, with padding on the left where context is missing, and on the right at
    # the end of the data.
    is_text = np.concatenate([mask, batch["segments"] > 0], 1).astype(np.int32)
    sharding = batch_sharding(model.mesh)
    tokens, is_text = (
        jax.make_array_from_process_local_data(sharding, x[rows]) for x in (tokens, is_text)
    )
    largest = _probabilities(model, params, tokens, is_text, context.shape[1], config.top)
    ids, p, rest = map(distributed.gather, largest)
    teacher = {"teacher_ids": ids, "teacher_probabilities": np.append(p, rest[..., None], axis=2)}
    names = ("chunks", "chunk_mask", "tokens", "targets", "segments", "weights")
    return {name: batch[name] for name in names} | teacher


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _probabilities(
    model: Decoder, params: dict, tokens, is_text, context: int, top: int
) -> Teacher:
    """Returns the largest next-token probabilities of rows [B, T] after the first `context` tokens.

    `is_text` int32 [B, T] is 0 on padding.
    """
    model = Decoder(model.config.for_inference(), model.mesh)
    positions = jax.numpy.maximum(is_text.cumsum(1) - 1, 0)
    output = model.apply({"params": params}, tokens, positions=positions, segments=is_text)
    hidden = output.hidden[:, context:]
    return largest_probabilities(hidden, head(params, model.config), top, mesh=model.mesh)
