"""AdamW, its learning rate over time, and the running average of the weights, from optax.

The learning rate is a function of the number of batches seen and multiplies the finished update
in the step. Keeping it out of the optimizer's state means that a resumed run, and a run that
skipped a batch, have the rate that the schedule says.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lcjax.training.config import Rate, TrainSection
from lcjax.training.partition import matcher
from lcjax.tree import flatten, nest

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def schedule(train: TrainSection) -> Schedule:
    """Learning rate of update i = 0, 1, ..., steps - 1.

    Warm-up is linear, lr * (i + 1) / warmup_steps, so that the first update already moves; then
    - constant: lr;
    - linear: from lr to lr * min_lr;
    - cosine: lr * (m + (1 - m) * (1 + cos(pi * t)) / 2) with t from 0 to 1, m = min_lr.
    - lceg: warm-up lr * ln(i + 1) / ln(warmup_steps), then lr * (steps - i) / (steps - warmup):
      what LCEG (arXiv 2409.12181) trained with, DeepSpeed's WarmupDecayLR, which overruled the
      constant rate of its command line. DeepSpeed 0.12.5 applied it one update late and ran
      update 0 at the full rate; that accident is left out, so update 0 has rate 0.
    """
    lr, warmup, rest = train.lr, train.warmup_steps, max(1, train.steps - train.warmup_steps)
    if train.schedule == "lceg":
        return _log_warmup_linear_decay(lr, warmup, rest)
    after = {
        "constant": optax.constant_schedule(lr),
        "linear": optax.linear_schedule(lr, lr * train.min_lr, rest),
        "cosine": optax.cosine_decay_schedule(lr, rest, alpha=train.min_lr),
    }[train.schedule]
    if warmup == 0:
        return after
    return optax.join_schedules([lambda i: lr * (i + 1.0) / warmup, after], [warmup])


def _log_warmup_linear_decay(lr: float, warmup: int, rest: int) -> Schedule:
    def rate(i):
        i = jnp.asarray(i, jnp.float32)
        rising = jnp.log(i + 1) / jnp.log(float(max(warmup, 2)))
        falling = 1 - (i - warmup) / rest
        return lr * jnp.where(i < warmup, rising, jnp.maximum(falling, 0.0))

    return rate


def optimizer(train: TrainSection) -> optax.GradientTransformation:
    """Clipping by global norm, Adam (Kingma & Ba 2015), decoupled weight decay (Loshchilov &
    Hutter 2019), and the multiples of the learning rate in `train.rates`; the update still has to
    be multiplied by minus the learning rate.
    """
    skipped = matcher(train.no_decay, "train.no_decay")

    def decayed(params: dict) -> dict:
        return nest({path: not skipped(path) for path in flatten(params)})

    return optax.chain(
        _clip(train.clip) if train.clip else optax.identity(),
        optax.scale_by_adam(*train.betas, eps=train.eps),
        optax.add_decayed_weights(train.weight_decay, mask=decayed)
        if train.weight_decay
        else optax.identity(),
        *([_rates(train.rates)] if train.rates else []),  # no state, and none in older checkpoints
    )


def _clip(limit: float) -> optax.GradientTransformation:
    """As `optax.clip_by_global_norm`, of which an update may be only a part.

    `norm`, an argument of the update, is that of the whole gradient; the part's own if None.
    """

    def update(updates, state, params=None, *, norm=None, **_):
        norm = optax.tree.norm(updates) if norm is None else norm
        updates = jax.tree.map(lambda x: jnp.where(norm < limit, x, x / norm * limit), updates)
        return updates, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _rates(rates: tuple[Rate, ...]) -> optax.GradientTransformation:
    """Multiplies each leaf by the factor of the first rule that holds for its path."""
    tests = [(matcher((rate.rule,), "train.rates"), rate.factor) for rate in rates]

    def factor(path: str) -> float:
        return next((factor for holds, factor in tests if holds(path)), 1.0)

    def update(updates: dict, params: dict | None) -> dict:
        del params
        return nest({path: leaf * factor(path) for path, leaf in flatten(updates).items()})

    return optax.stateless(update)


def apply(params: Any, updates: Any, lr: jax.Array) -> Any:
    """params - lr * updates, summed in float32, in the parameters' own dtype."""

    def one(param, update):
        return (param.astype(jnp.float32) - lr * update).astype(param.dtype)

    return jax.tree.map(one, params, updates)


def average(ema: Any, params: Any, decay: float) -> Any:
    """ema <- decay * ema + (1 - decay) * params, in float32.

    Half precision could not hold it: with a decay of 0.999 the change is below one rounding step.
    """
    return optax.incremental_update(wide(params), ema, 1 - decay)


def wide(tree: Any) -> Any:
    """The tree in float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
