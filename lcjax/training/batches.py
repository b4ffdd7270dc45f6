"""Batches of a run: checks of rows against model and mesh, and transfer to the devices."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lcjax import checkpoints
from lcjax.checkpoints.build import model_config
from lcjax.data import TeacherSource
from lcjax.data.stored_rows import StoredFiles
from lcjax.errors import InputError
from lcjax.models import ModelConfig, preset
from lcjax.models.distill import check_top
from lcjax.models.memory import Memory, TrainingRows
from lcjax.parallel.sharding import LENGTH, ROWS, batch_sharding, row_axes
from lcjax.training.train_config import TrainConfig


def put(local: dict[str, np.ndarray], mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Returns the global batch; `local` holds the rows of this process."""
    sharding = batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, value)
        for name, value in local.items()
    }


def row_length(config: TrainConfig, model: ModelConfig) -> int:
    """Returns the number of tokens that the decoder reads per row, inserted ones included."""
    inserted, length = model.pattern.inserted_tokens, config.data.decoder_length
    return inserted.row_length(length) if inserted else length


def check_text(config: TrainConfig) -> None:
    """Runs all checks of rows against the model that need no weights.

    Raises:
      InputError: if model and data do not match.
    """
    check_teacher(config)
    section = config.model
    try:
        model = preset(section.preset) if section.preset else checkpoints.load_config(section.path)
    except InputError:
        return  # adapters, or an error that loading the model reports later
    model = model_config(section, model)
    check_context(config, model)
    check_mask(config, model)


def check_context(config: TrainConfig, model: ModelConfig) -> None:
    """Raises an InputError unless `data.chunks` fits `model.memory`, or both are absent."""
    chunks, memory = config.data.chunks, model.memory
    if memory is None and chunks is not None:
        raise InputError(
            "data.chunks are read by a memory, and this model has none; set model.memory.type to"
            f" one of {', '.join(Memory.get_known_choices())}, or leave data.chunks out"
        )
    if memory is None:
        return
    if chunks is None:
        raise InputError(
            "data.chunks=null: model.memory reads chunks of text; set data.chunks.count and"
            " data.chunks.length"
        )
    if chunks.length > (limit := memory.max_chunk_size):
        raise InputError(
            f"data.chunks.length={chunks.length} is more than the {limit} tokens that the encoder"
            f" of model.memory was trained to read; set it to {limit} or less"
        )
    memory.check_chunk(chunks.length, "data.chunks.length")
    retrieved = None
    if chunks.text == "retrieved":
        retrieved = chunks.stride, chunks.num_passages(config.data.length)
    has_teacher = config.train.distill is not None
    memory.check_training(TrainingRows(chunks.count, chunks.learned, has_teacher, retrieved))


def check_mask(config: TrainConfig, model: ModelConfig, tokenizer: Any = None) -> None:
    """Raises an InputError if the mask token of `data.masking` has no row in the embedding."""
    if (masking := config.data.masking) is None:
        return
    token, hint = masking.token, "name one that the model has"
    if token is None and tokenizer is not None:
        token, hint = tokenizer.vocab_size, "set data.masking.token to one that the model has"
    if token is not None and token >= model.vocab_size:
        raise InputError(
            f"data.masking.token={token} is beyond the {model.vocab_size} tokens of the model;"
            f" {hint}"
        )


def check_teacher(config: TrainConfig) -> None:
    """Raises an InputError unless `train.distill` and sources with a teacher's rows are both set.

    Also checks that the rows hold as many probabilities as `train.distill.top` needs.
    """
    distill = config.train.distill
    sources = config.data.resolved_sources()
    sources = [source for source in sources if isinstance(source, TeacherSource)]
    if sources and distill is None:
        raise InputError(
            f"the rows of {sources[0].path} hold a teacher's probabilities, and train.distill is"
            " null; set train.distill.kl, as 2, or train on the text itself"
        )
    if distill is not None and not sources:
        raise InputError(
            "train.distill needs a teacher's rows, and data.sources are none; make them with"
            " `python -m lcjax.data teacher` and name them as {type: teacher, path: FOLDER}"
        )
    for source in sources:
        check_top(distill, StoredFiles(source).index["top"], source.path)


def with_whole_batch(config: TrainConfig, sizes: Mapping[str, int]) -> TrainConfig:
    """Returns `config` with `train.batch_size` rounded up to a value that `check_rows` accepts.

    `sizes` are the sizes of the mesh axes by name.
    """
    unit = _row_unit(config, sizes)
    rows = -(-config.train.batch_size // unit) * unit
    return config.replace(train=dataclasses.replace(config.train, batch_size=rows))


def _row_unit(config: TrainConfig, sizes: Mapping[str, int]) -> int:
    """Returns the number of which `train.batch_size` must be a multiple."""
    return math.prod(sizes[axis] for axis in ROWS) * config.train.accumulation


def check_rows(config: TrainConfig, sizes: Mapping[str, int]) -> None:
    """Raises an InputError unless all devices get equal shares of every microbatch.

    `sizes` are the sizes of the mesh axes by name.
    """
    unit, rows = _row_unit(config, sizes), config.train.batch_size
    if rows % unit:
        nearest = max(1, round(rows / unit)) * unit
        raise InputError(
            f"train.batch_size={rows} must be a multiple of {row_axes(sizes)} x train.accumulation"
            f" = {unit}; nearest: {nearest} (--train.batch_size={nearest})"
        )
    # Two pieces per device, one from each end of a text, make the work of devices equal.
    pieces, length = 2 * sizes[LENGTH], config.data.decoder_length
    if pieces > 2 and length % pieces:
        context = config.data.length - length
        reduced = f" less the {context} of its chunks" if context else ""
        raise InputError(
            f"data.length={config.data.length}{reduced} must be a multiple of 2 x mesh.context ="
            f" {pieces}; nearest: {max(1, round(length / pieces)) * pieces + context}"
        )
