"""From `data:` to the devices: loaders of this process, and batches spread over the mesh."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lcjax import checkpoints
from lcjax.attention.landmark.tokens import Landmarks
from lcjax.checkpoints.build import resolve
from lcjax.data import Loader, TeacherSource, make_loader
from lcjax.data.teacher_files import TeacherFiles
from lcjax.errors import InputError
from lcjax.models import ModelConfig, preset
from lcjax.models.distill import check_top
from lcjax.parallel.sharding import LENGTH, batch_sharding, process_rows
from lcjax.training.config import TrainConfig


def open_loader(
    config: TrainConfig, model: ModelConfig, tokenizer: Any, split: str, mesh: jax.sharding.Mesh
) -> Loader:
    """Batches of the rows of this process' devices, with the landmarks that `model` reads."""
    check_context(config, model)
    check_mask(config, model, tokenizer)
    return make_loader(
        config.data,
        tokenizer,
        config.train.batch_size,
        rows=process_rows(mesh, config.train.batch_size),
        split=split,
        landmarks=Landmarks.read_by(model.pattern),
    )


def row_length(config: TrainConfig, model: ModelConfig) -> int:
    """Tokens in a row of a batch: of data.length the decoder's, and landmarks among them."""
    landmarks, length = Landmarks.read_by(model.pattern), config.data.decoder_length
    return landmarks.row_length(length) if landmarks else length


def check_context(config: TrainConfig, model: ModelConfig) -> None:
    """A model that reads a context needs chunks of it, and no other model has a use for them."""
    chunks, memory = config.data.chunks, model.memory
    if memory is None and chunks is not None:
        raise InputError(
            "data.chunks are read by a memory, and this model has none; set model.memory.type to"
            " cepe, shared_llm, beacon or auto_compressor, or leave data.chunks out"
        )
    if memory is None:
        return
    if chunks is None:
        raise InputError(
            "data.chunks=null: model.memory reads chunks of text; set data.chunks.count and"
            " data.chunks.length"
        )
    if chunks.length > (limit := memory.longest):
        raise InputError(
            f"data.chunks.length={chunks.length} is more than the {limit} tokens that the encoder"
            f" of model.memory was trained to read; set it to {limit} or less"
        )
    memory.check_chunk(chunks.length, "data.chunks.length")
    if memory.leads and memory.reach and not chunks.learned and chunks.count % memory.reach == 0:
        raise InputError(
            f"model.memory.gradient_segments={memory.reach} lets no gradient through from the text"
            f" behind data.chunks.count={chunks.count}; set data.chunks.learned=true, or leave it"
            " out"
        )
    if chunks.learned and (not memory.leads or config.train.distill is not None):
        raise InputError(
            "data.chunks.learned=true learns what follows the tokens of chunks: those of memories"
            " whose chunks the decoder itself reads (beacon, auto_compressor), without a teacher"
            " (train.distill); leave it out"
        )


def check_mask(config: TrainConfig, model: ModelConfig, tokenizer: Any = None) -> None:
    """The model must have a row for the token that hides others."""
    if (masking := config.data.masking) is None:
        return
    token, way_out = masking.token, "name one that the model has"
    if token is None and tokenizer is not None:
        token, way_out = tokenizer.vocab_size, "set data.masking.token to one that the model has"
    if token is not None and token >= model.vocab_size:
        raise InputError(
            f"data.masking.token={token} is beyond the {model.vocab_size} tokens of the model;"
            f" {way_out}"
        )


def check_teacher(config: TrainConfig) -> None:
    """Rows with a teacher's probabilities, and what learns from them, go together."""
    distill, key = config.train.distill, "data.sources"
    sources = config.data.resolved_sources()
    taught = [source for source in sources if isinstance(source, TeacherSource)]
    if taught and distill is None:
        raise InputError(
            f"train.distill=null does not read the probabilities in the rows of {taught[0].path};"
            " set train.distill.kl, as 2, or train on the text itself"
        )
    if distill is not None and not taught:
        raise InputError(
            f"train.distill needs a teacher's rows, and {key} are none; make them with `python -m"
            " lcjax.data teacher` and name them as {type: teacher, path: FOLDER}"
        )
    for source in taught:
        check_top(distill, TeacherFiles(source).index["top"], source.path)


def check_text(config: TrainConfig) -> None:
    """What can be said of rows and model before the weights are read."""
    check_teacher(config)
    section = config.model
    try:
        known = preset(section.preset) if section.preset else checkpoints.load_config(section.path)
    except InputError:
        return  # adapters, or what reading the model will say
    model = resolve(section, known)
    check_context(config, model)
    check_mask(config, model)


def check_batch(config: TrainConfig, mesh: jax.sharding.Mesh) -> None:
    """Every device must get the same number of rows of every microbatch, and of tokens."""
    check_rows(config, mesh.shape)


def check_rows(config: TrainConfig, sizes: Mapping[str, int]) -> None:
    """`check_batch` by the sizes of the mesh's axes."""
    devices, rows = sizes["data"] * sizes["fsdp"], config.train.batch_size
    unit = devices * config.train.accumulation
    if rows % unit:
        raise InputError(
            f"train.batch_size={rows} must be a multiple of mesh.data x mesh.fsdp x "
            f"train.accumulation = {unit}; nearest: {max(1, round(rows / unit)) * unit}"
        )
    # Twice as many pieces as devices: one from each end of a text makes their work equal.
    pieces, length = 2 * sizes[LENGTH], config.data.decoder_length
    if pieces > 2 and length % pieces:
        context = config.data.length - length
        behind = f" less the {context} of its chunks" if context else ""
        raise InputError(
            f"data.length={config.data.length}{behind} must be a multiple of 2 x mesh.context ="
            f" {pieces}; nearest: {max(1, round(length / pieces)) * pieces + context}"
        )


def put(local: dict[str, np.ndarray], mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """The global batch, of which `local` is the part that this process read."""
    sharding = batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, value)
        for name, value in local.items()
    }
