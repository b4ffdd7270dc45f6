"""Loss on held-out documents while training."""

from typing import Any

import jax

from lcjax.data import Loader
from lcjax.models import ModelConfig
from lcjax.rope.positions import PlainPositions
from lcjax.training import batches
from lcjax.training.config import TrainConfig
from lcjax.training.objective import language_model
from lcjax.training.step import make_eval_step


class Validation:
    """The same batches of `data.holdout` every time, read where tokens really stand."""

    def __init__(
        self, config: TrainConfig, model: ModelConfig, tokenizer: Any, mesh: jax.sharding.Mesh
    ):
        self._config, self._tokenizer, self._mesh = config, tokenizer, mesh
        self._model = model = model.for_inference()
        objective = language_model(
            model, PlainPositions(), chunk=config.train.loss_chunk, mesh=mesh
        )
        self._step = jax.jit(make_eval_step(objective, accumulation=config.train.accumulation))
        self._loader: Loader | None = None
        self._start: dict = {}

    def loss(self, params: dict, frozen: dict) -> tuple[float, float]:
        """(mean loss per token, number of tokens)."""
        sums = []
        for local in self._held_out():
            if len(sums) == self._config.eval.batches:
                break
            sums.append(self._step(params, frozen, batches.put(local, self._mesh)))
        sums = jax.device_get(sums)  # once, so that the devices do not wait between batches
        nll, tokens = (sum(float(info[name]) for info in sums) for name in ("nll", "tokens"))
        return nll / max(tokens, 1.0), tokens

    def _held_out(self) -> Loader:
        """The held-out batches from the first one; the corpus is opened once."""
        if self._loader is None:
            self._loader = batches.open_loader(
                self._config, self._model, self._tokenizer, "validation", self._mesh
            )
            self._start = self._loader.get_state()
        else:
            self._loader.set_state(self._start)
        return self._loader
