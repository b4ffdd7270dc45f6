"""The interface of what a run trains.

The loop, validation and checkpoints (`lcjax.training.loop`) are the same for all tasks. Without a
section `retriever`, the task is `lcjax.training.language_modelling`; plug-ins register the types of
that section (`lcjax/plugins.py`).
"""

import abc
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from lcjax.checkpoints.run_folder import BaseModel
from lcjax.data import Loader
from lcjax.files import FolderFormat
from lcjax.training.objective import Objective

if TYPE_CHECKING:
    from lcjax.training.train_config import TrainConfig


class Task(abc.ABC):
    """A training task. The loop calls `check`, then `load`, then the other methods.

    All processes of a job call the methods, since loading and writing are collective operations.

    Attributes:
      config: config of the run.
      mesh: the devices.
      unit: name of the items that the weights of a batch count, in the plural.
      export_format: format of `<run>/model`.
      dtype: dtype of activations, in which peak FLOP/s are measured; set by `load`.
    """

    unit: str = "tokens"
    export_format: FolderFormat
    dtype: str

    def __init__(self, config: "TrainConfig", mesh: jax.sharding.Mesh | None):
        self.config, self.mesh = config, mesh

    @abc.abstractmethod
    def check(self) -> None:
        """Runs all checks that need no weights: loading a large model takes minutes.

        Raises:
          InputError: if the config or the data cannot be used.
        """

    @abc.abstractmethod
    def load(self) -> tuple[dict, dict]:
        """Loads or initialises the model.

        Returns:
          The trained parameters, in float32 (bfloat16 would round most updates to nothing), and the
          frozen ones. The loop donates the trained ones, so a task holds no reference to them.
        """

    @abc.abstractmethod
    def open_loader(self, split: str) -> Loader:
        """Opens the rows of this process' devices; `split` is "train" or "validation".

        Batches are dicts of arrays [B, ...] with `weights` float32 [B, ...], 0 on padding.
        """

    @abc.abstractmethod
    def objective(self, split: str) -> Objective:
        """Returns the loss of the training, or of the validation."""

    def prepare(
        self, step: int, batch: dict[str, np.ndarray], params: dict
    ) -> dict[str, np.ndarray]:
        """Completes a batch on the host before it goes to the devices.

        For batches that depend on the weights, such as those with passages from a search. A resumed
        run calls it with the same arguments, and it must then return the same batch; files that it
        needs for this may lie in the run folder.

        Args:
          step: number of steps that the parameters have seen.
          batch: rows of this process.
          params: the trained parameters of the state, also in a validation of averaged weights.

        Returns:
          A batch with the same number of rows.
        """
        del step, params
        return batch

    @abc.abstractmethod
    def base(self, trained: dict, frozen: dict) -> BaseModel:
        """Describes the frozen parameters, which the run's checkpoints leave out."""

    def write_config(self, folder: Path) -> None:
        """Writes into the run folder the config that reading its checkpoints requires.

        Only one process calls it.
        """
        del folder

    @abc.abstractmethod
    def export(self, folder: Path, trained: dict, frozen: dict) -> None:
        """Writes the model into the run folder; `<run>/model` has `export_format`."""

    @abc.abstractmethod
    def training_flops(self) -> float:
        """Returns the FLOPs of an update per unit of weight."""

    def summary(self) -> list[str]:
        """Returns lines that the run prints at its start, such as an estimate of its memory."""
        return []
