"""Training: `run(config)` is the body of `train.py`, from the config to the exported model."""

from typing import TYPE_CHECKING, Any

from lcjax.training.train_config import TrainConfig

if TYPE_CHECKING:  # for editors; at run time `__getattr__` imports it
    from lcjax.training.loop import run

__all__ = ["TrainConfig", "run"]


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module 'lcjax.training' has no attribute {name!r}")
    from lcjax.training.loop import run  # deferred: it imports readers of data and checkpoints

    return run
