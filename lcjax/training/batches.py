"""From `data:` to the devices: loaders of this process, and batches spread over the mesh."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lcjax.data import Loader, make_loader
from lcjax.errors import InputError
from lcjax.landmarks import Landmarks
from lcjax.models import ModelConfig
from lcjax.sharding import LENGTH, batch_sharding, process_rows
from lcjax.training.config import TrainConfig


def open_loader(
    config: TrainConfig, model: ModelConfig, tokenizer: Any, split: str, mesh: jax.sharding.Mesh
) -> Loader:
    """Batches of the rows of this process' devices, with the landmarks that `model` reads."""
    return make_loader(
        config.data,
        tokenizer,
        config.train.batch_size,
        rows=process_rows(mesh, config.train.batch_size),
        split=split,
        landmarks=Landmarks.read_by(model.pattern),
    )


def row_length(config: TrainConfig, model: ModelConfig) -> int:
    """Tokens in a row of a batch: data.length, and landmarks among them."""
    landmarks = Landmarks.read_by(model.pattern)
    return landmarks.row_length(config.data.length) if landmarks else config.data.length


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
    pieces, length = 2 * sizes[LENGTH], config.data.length
    if pieces > 2 and length % pieces:
        raise InputError(
            f"data.length={length} must be a multiple of 2 x mesh.context = {pieces}; nearest: "
            f"{max(1, round(length / pieces)) * pieces}"
        )


def put(local: dict[str, np.ndarray], mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """The global batch, of which `local` is the part that this process read."""
    sharding = batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, value)
        for name, value in local.items()
    }
