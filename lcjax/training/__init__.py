"""Training: config, state, step and loop. `run(config)` does what train.py does."""

from lcjax.training.config import TrainConfig
from lcjax.training.loop import run

__all__ = ["TrainConfig", "run"]
