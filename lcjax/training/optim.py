"""AdamW, its learning-rate schedule, the weights' moving average, and updates of offloaded weights.

The learning rate is a function of the number of batches seen, and the training step multiplies the
optimizer's update by it. It is not part of the optimizer's state, so a resumed run, or a run that
skipped a batch, always has the rate of the schedule.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lcjax.parallel.device_memory import LAYER, STACK, put_back, to_device
from lcjax.training.train_config import Rate, TrainSection, matcher
from lcjax.tree import flatten, nest, union

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]
# ((parameters, optimizer state, moving average), gradients) -> the updated three
Update = Callable[[tuple, dict], tuple]


def schedule(train: TrainSection) -> Schedule:
    """Returns the learning rate as a function of the update i = 0, 1, ..., steps - 1.

    Warm-up is linear, lr * (i + 1) / warmup_steps, so the first update already has a rate above 0.
    After the warm-up:
    - constant: lr;
    - linear: from lr to lr * min_lr;
    - cosine: lr * (m + (1 - m) * (1 + cos(pi * t)) / 2) with t from 0 to 1, m = min_lr.
    - lceg: warm-up lr * ln(i + 1) / ln(warmup_steps), then lr * (steps - i) / (steps - warmup).
      LCEG (arXiv 2409.12181) trained with this schedule: DeepSpeed's WarmupDecayLR, which
      replaced the constant rate of its command line. DeepSpeed 0.12.5 applied it one update late
      and ran update 0 at the full rate. That bug is not reproduced: update 0 has rate 0.
    """
    lr, warmup, rest = train.lr, train.warmup_steps, max(1, train.steps - train.warmup_steps)
    if train.schedule == "lceg":
        return _log_warmup_linear_decay(lr, warmup, rest)
    decay = {
        "constant": optax.constant_schedule(lr),
        "linear": optax.linear_schedule(lr, lr * train.min_lr, rest),
        "cosine": optax.cosine_decay_schedule(lr, rest, alpha=train.min_lr),
    }[train.schedule]
    if warmup == 0:
        return decay
    return optax.join_schedules([lambda i: lr * (i + 1.0) / warmup, decay], [warmup])


def _log_warmup_linear_decay(lr: float, warmup: int, rest: int) -> Schedule:
    def rate(i):
        i = jnp.asarray(i, jnp.float32)
        rising = jnp.log(i + 1) / jnp.log(float(max(warmup, 2)))
        falling = 1 - (i - warmup) / rest
        return lr * jnp.where(i < warmup, rising, jnp.maximum(falling, 0.0))

    return rate


def optimizer(train: TrainSection) -> optax.GradientTransformation:
    """Returns AdamW with clipping by global norm, without the learning rate.

    Adam (Kingma & Ba 2015) with decoupled weight decay (Loshchilov & Hutter 2019), and the factors
    of `train.rates`. `apply` multiplies the update by minus the learning rate.
    """
    is_excluded = matcher(train.no_decay, "train.no_decay")

    def decay_mask(params: dict) -> dict:
        return nest({path: not is_excluded(path) for path in flatten(params)})

    return optax.chain(
        _clip(train.clip) if train.clip else optax.identity(),
        optax.scale_by_adam(*train.betas, eps=train.eps),
        optax.add_decayed_weights(train.weight_decay, mask=decay_mask)
        if train.weight_decay
        else optax.identity(),
        *([_rates(train.rates)] if train.rates else []),  # stateless: adds nothing to checkpoints
    )


def _clip(limit: float) -> optax.GradientTransformation:
    """Returns `optax.clip_by_global_norm` for updates that may be only a part of the gradient.

    Its update function takes `norm`, the norm of the whole gradient; None: the norm of the update.
    """

    def update(updates, state, params=None, *, norm=None, **_):
        norm = optax.tree.norm(updates) if norm is None else norm
        updates = jax.tree.map(lambda x: jnp.where(norm < limit, x, x / norm * limit), updates)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _rates(rates: tuple[Rate, ...]) -> optax.GradientTransformation:
    """Returns a transformation: multiplies each leaf by the factor of its path's first rule."""
    factors = [(matcher((rate.rule,), "train.rates"), rate.factor) for rate in rates]

    def factor_of(path: str) -> float:
        return next((factor for matches, factor in factors if matches(path)), 1.0)

    def update(updates: dict, params: dict | None) -> dict:
        del params
        return nest({path: leaf * factor_of(path) for path, leaf in flatten(updates).items()})

    return optax.stateless(update)


def apply(params: Any, updates: Any, lr: jax.Array) -> Any:
    """Returns params - lr * updates, computed in float32, in the dtypes of `params`."""

    def one(param, update):
        return (param.astype(jnp.float32) - lr * update).astype(param.dtype)

    return jax.tree.map(one, params, updates)


def average(ema: Any, params: Any, decay: float) -> Any:
    """Returns decay * ema + (1 - decay) * params, in float32.

    Half precision is not enough: with a decay of 0.999 the change is below one rounding step.
    """
    return optax.incremental_update(to_float32(params), ema, 1 - decay)


def to_float32(tree: Any) -> Any:
    """Casts all leaves to float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


# Updates of arrays that are offloaded to the host's memory.


def layerwise_update(update: Update, should_update: jax.Array, old: tuple, grads: dict) -> tuple:
    """Applies `update` to one layer after another; every array stays in its memory space.

    Fetching everything at once would need the device's memory for all weights and moments and for
    their new values. Adam, weight decay and the moving average work element by element, so the
    order does not matter. Only clipping needs the norm of the whole gradient, which `update` gets
    from its caller.

    All parameters outside of layers are updated together. The compiler divides several parameters
    by Adam's corrections but multiplies a single one by their inverse, which may change the last
    bit.

    Args:
      update: the function of one update.
      should_update: bool []; if false, the values do not change.
      old: (parameters, optimizer state, moving average or None).
      grads: gradients, a tree like the parameters.

    Returns:
      The three trees of `old` after the update.
    """

    def update_part(old: tuple, grads: dict) -> tuple:
        new = jax.lax.cond(should_update, update, lambda old, _: old, to_device(old), grads)
        return put_back(new, old)

    parts, token = [], should_update
    for paths in _layer_groups(grads):
        part = _select(old, paths)
        # Without this order the compiler could fetch all groups at the same time.
        part, token = jax.lax.optimization_barrier((part, token))
        if STACK.match(paths[0]):
            part = _update_stack(update_part, part, _select(grads, paths))
        else:
            part = update_part(part, _select(grads, paths))
        token, _ = jax.lax.optimization_barrier((token, part))
        parts.append(part)
    return merge_trees(parts)


def _layer_groups(tree: dict) -> list[list[str]]:
    """Groups paths by stack of layers and by single layer; all other paths are one group."""
    groups: dict[str, list[str]] = {}
    for path in flatten(tree):
        layer = STACK.match(path) or LAYER.match(path)
        groups.setdefault(layer[0] if layer else "", []).append(path)
    return list(groups.values())


def _update_stack(update_layer: Update, old: tuple, grads: dict) -> tuple:
    """Applies `update_layer` to every layer of stacks [L, ...], in place."""
    num_layers = jax.tree.leaves(grads)[0].shape[0]

    def body(layer, stacks):
        def at(x):
            return jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)

        # Adam's count is a scalar: every layer needs its value from before the update.
        part = jax.tree.map(lambda x, start: at(x) if start.ndim else start, stacks, old)
        new = update_layer(part, jax.tree.map(at, grads))
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, layer, 0) if x.ndim else y,
            stacks,
            new,
        )

    return jax.lax.fori_loop(0, num_layers, body, old)


def _is_params(node: Any) -> bool:
    """Returns whether `node` is a parameter tree: the only dicts in an optimizer's state."""
    return isinstance(node, dict)


def _select(tree: Any, paths: list[str]) -> Any:
    """Returns `tree` with only these paths in its parameter trees."""

    def one(node):
        if not _is_params(node):
            return node
        flat = flatten(node)
        return nest({path: flat[path] for path in paths})

    return jax.tree.map(one, tree, is_leaf=_is_params)


def merge_trees(parts: list[Any]) -> Any:
    """Merges trees whose parameter trees hold different paths, the inverse of selecting paths."""
    first, *rest = parts
    for part in rest:
        first = jax.tree.map(
            lambda a, b: union(a, b) if _is_params(a) else b, first, part, is_leaf=_is_params
        )
    return first
