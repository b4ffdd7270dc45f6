"""Training: `run(config)` is the body of `train.py`, from the config to the exported model."""

from typing import TYPE_CHECKING, Any

from lcjax.training.config import TrainConfig

if TYPE_CHECKING:  # for editors; what runs is `__getattr__`
    from lcjax.training.loop import run

__all__ = ["TrainConfig", "run"]


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module 'lcjax.training' has no attribute {name!r}")
    from lcjax.training.loop import run  # which needs what reads data and checkpoints

    return run
