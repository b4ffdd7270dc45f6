"""The training step of `train.py`, and batches of random tokens; used by other benchmarks."""

import functools
from collections.abc import Callable


def update(config) -> tuple[Callable, object]:
    """Returns an AdamW update of all weights, and the optimizer that makes its state.

    The update is a function (state, frozen, batch) -> (state, info), which is not jitted. If
    `config.remat` is "none", it is replaced by the default of `train.py`.
    """
    from lcjax.checkpoints.build import ModelSection
    from lcjax.rope import PlainPositions
    from lcjax.training import optim
    from lcjax.training.objective import language_model
    from lcjax.training.step import train_step
    from lcjax.training.train_config import TrainSection

    if config.remat == "none":
        config = config.replace(remat=ModelSection().remat)
    section = TrainSection(lr=1e-5, steps=1000, warmup_steps=0)
    optimizer = optim.optimizer(section)
    step = functools.partial(
        train_step,
        objective=language_model(config, PlainPositions()),
        optimizer=optimizer,
        schedule=optim.schedule(section),
    )
    return step, optimizer


def batch(rows: int, length: int, vocab_size: int) -> dict:
    """Returns a batch of random tokens, with one document per row."""
    import numpy as np

    tokens = np.random.default_rng(0).integers(3, vocab_size, (rows, length + 1)).astype(np.int32)
    ones = np.ones((rows, length), np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": ones,
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "weights": ones.astype(np.float32),
    }
