"""Training: `run(config)` is the body of `train.py`, from the config to the exported model."""

from lcjax.training.config import TrainConfig
from lcjax.training.loop import run

__all__ = ["TrainConfig", "run"]
