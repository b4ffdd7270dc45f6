"""From `data:` to the devices: loaders of this process, and batches spread over the mesh."""

from typing import Any

import jax
import numpy as np

from lcjax.data import Loader, make_loader
from lcjax.errors import InputError
from lcjax.sharding import batch_sharding, process_rows
from lcjax.training.config import TrainConfig


def open_loader(config: TrainConfig, tokenizer: Any, split: str, mesh: jax.sharding.Mesh) -> Loader:
    """Batches of the rows that this process' devices hold."""
    rows = process_rows(mesh, config.train.batch_size)
    return make_loader(config.data, tokenizer, config.train.batch_size, rows=rows, split=split)


def check_batch(config: TrainConfig, mesh: jax.sharding.Mesh) -> None:
    """Every device must get the same number of rows of every microbatch."""
    devices, rows = mesh.shape["data"] * mesh.shape["fsdp"], config.train.batch_size
    unit = devices * config.train.accumulation
    if rows % unit:
        raise InputError(
            f"train.batch_size={rows} must be a multiple of mesh.data x mesh.fsdp x "
            f"train.accumulation = {unit}; nearest: {max(1, round(rows / unit)) * unit}"
        )


def put(local: dict[str, np.ndarray], mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """The global batch, of which `local` is the part that this process read."""
    sharding = batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, value)
        for name, value in local.items()
    }
