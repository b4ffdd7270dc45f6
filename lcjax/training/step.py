"""One update: gradients over microbatches, clipping, AdamW, and a guard against non-finite numbers.

The loss is the sum of negative log-likelihoods divided by the sum of the weights of the *global*
batch. Each microbatch is divided by that total before the sum over microbatches. So accumulation
equals one large batch, even if microbatches hold different numbers of tokens.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from lcjax.models.layers import differentiable, with_gradients
from lcjax.parallel.device_memory import is_offloaded
from lcjax.parallel.sharding import replicated
from lcjax.training import optim
from lcjax.training.objective import Batch, Objective
from lcjax.training.state import TrainState, state_shardings
from lcjax.training.train_config import TrainConfig

Info = dict[str, jax.Array]

_SPIKE_WARMUP = 20  # steps before the average gradient norm is reliable
_NORM_DECAY = 0.98  # of the average gradient norm, which spans about 50 steps


def jitted_step(
    config: TrainConfig,
    objective: Objective,
    mesh: jax.sharding.Mesh,
    state: TrainState,
    *,
    halt_after: int = 1,
) -> Callable:
    """Returns the compiled `train_step` of `config`, for states with the shapes of `state`.

    Its arguments are those of `train_step` up to `num_nonfinite`. It donates its state.

    Args:
      config: sets the optimizer and the options of the step.
      objective: the loss.
      mesh: the devices.
      state: arrays, or their shapes and dtypes.
      halt_after: see `train_step`.
    """
    train = config.train
    step = functools.partial(
        train_step,
        objective=objective,
        optimizer=optim.optimizer(train),
        schedule=optim.schedule(train),
        accumulation=train.accumulation,
        ema_decay=train.ema,
        halt_after=halt_after,
        spike=train.spike,
    )
    layout = state_shardings(state, mesh, train.offload), replicated(mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=layout)


def train_step(
    state: TrainState,
    frozen: dict,
    batch: Batch,
    num_nonfinite: jax.typing.ArrayLike = 0,
    *,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: optim.Schedule,
    accumulation: int = 1,
    ema_decay: float | None = None,
    halt_after: int = 1,
    spike: float | None = None,
) -> tuple[TrainState, Info]:
    """Computes one update. A pure function, to be jitted with donation of `state`.

    A step whose loss or gradient is not finite changes only the counters. The same holds for a
    step whose gradient norm is more than `spike` times its running average (after `_SPIKE_WARMUP`
    steps): an outlier would stay in Adam's moments for many steps.

    The loop reads the info of a step only after it has dispatched the next one. So the step at
    which `num_nonfinite` reaches `halt_after`, and all steps after it, change nothing, not even
    the counters: the state stays the one before that step's batch.

    Args:
      state: the state before the step. Offloaded arrays are fetched layer by layer and put back.
      frozen: parameters that are not trained.
      batch: arrays of B rows, see `objective`.
      num_nonfinite: `info["num_nonfinite"]` of the step before, int32 []: number of non-finite
        steps in a row.
      objective: the loss, a sum over the batch.
      optimizer: computes the update without the learning rate.
      schedule: the learning rate as a function of the step.
      accumulation: number of microbatches; divides B.
      ema_decay: decay of the weights' moving average; None: no average.
      halt_after: number of non-finite steps in a row that halts the run.
      spike: multiple of the average gradient norm above which a step is skipped; None: never.

    Returns:
      The new state and the metrics of the step, scalars by name.
    """
    key = jax.random.fold_in(state.rng, state.step)
    loss, tokens, grads, parts = accumulate(
        objective, state.params, frozen, batch, key, accumulation
    )
    norm, lr = optax.tree.norm(grads), schedule(state.step)
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    halted = jnp.asarray(num_nonfinite >= halt_after)
    is_spike = _is_spike(state, norm, spike) & finite
    should_update = finite & ~halted & ~is_spike

    def update(old, grads):
        params, opt_state, ema = old
        updates, opt_state = optimizer.update(grads, opt_state, optim.to_float32(params), norm=norm)
        params = optim.apply(params, updates, lr)
        if ema_decay is not None:
            ema = optim.average(ema, params, ema_decay)
        return params, opt_state, ema

    old = state.params, state.opt_state, state.ema
    with jax.named_scope("update"):
        if any(map(is_offloaded, jax.tree.leaves(old))):
            new = optim.layerwise_update(update, should_update, old, grads)
        else:
            new = jax.lax.cond(should_update, update, lambda old, _: old, old, grads)
    num_nonfinite = jnp.where(should_update | is_spike, 0, num_nonfinite + 1).astype(jnp.int32)
    counted = (num_nonfinite < halt_after).astype(jnp.int32)
    skipped = state.skipped + jnp.where(finite & ~is_spike, 0, counted)
    grad_norm_ema = _average_norm(
        state, jnp.where(finite & ~halted, norm, state.grad_norm_ema), spike
    )
    info = {
        "loss": loss,
        "grad_norm": norm,
        "lr": jnp.asarray(lr, jnp.float32),
        "tokens": tokens,
        "finite": finite,
        "spike": is_spike,
        "grad_norm_ema": state.grad_norm_ema,
        "skipped": skipped,
        "num_nonfinite": num_nonfinite,
        "parts": parts,
    }
    return TrainState(state.step + counted, skipped, grad_norm_ema, *new, state.rng), info


def _is_spike(state: TrainState, norm: jax.Array, spike: float | None) -> jax.Array:
    if spike is None:
        return jnp.bool_(False)
    return (state.step >= _SPIKE_WARMUP) & (norm > spike * state.grad_norm_ema)


def _average_norm(state: TrainState, norm: jax.Array, spike: float | None) -> jax.Array:
    """Returns the running average after one more norm, which is clipped to `spike` averages.

    Because spikes count too, a run whose gradients have grown permanently continues after some
    skipped steps.
    """
    if spike is not None:
        clipped = jnp.minimum(norm, spike * state.grad_norm_ema)
        norm = jnp.where(state.step >= _SPIKE_WARMUP, clipped, norm)
    average = _NORM_DECAY * state.grad_norm_ema + (1 - _NORM_DECAY) * norm
    return jnp.where(state.grad_norm_ema == 0, norm, average)


def accumulate(
    objective: Objective, params: dict, frozen: dict, batch: Batch, key: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, dict, dict]:
    """Computes the mean loss of a batch and its gradients, over `count` microbatches.

    Returns:
      Mean loss per weight, sum of weights, float32 gradients of the mean, and the means of the
      loss's parts by name.
    """
    weights = (batch[name] for name in ("weights", "chunk_weights") if name in batch)
    total = sum(x.astype(jnp.float32).sum() for x in weights)
    # A batch of padding only has a loss of 0, not 0 / 0.
    inverse = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)

    def mean_loss(variables, micro, key):
        loss, _, parts = objective(with_gradients(params, variables), frozen, micro, key)
        return loss * inverse, {name: x * inverse for name, x in parts.items()}

    def add_microbatch(sums, xs):
        (loss, parts), grads = jax.value_and_grad(mean_loss, has_aux=True)(variables, *xs)
        sums = jax.tree.map(lambda sum, x: sum + x.astype(jnp.float32), sums, (loss, grads))
        return sums, parts

    variables = differentiable(params)
    zeros = (jnp.float32(0), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
    if count == 1:
        (loss, grads), parts = add_microbatch(zeros, (batch, key))
    else:
        keys = jax.random.split(key, count)
        xs = microbatches(batch, count), keys
        (loss, grads), parts = jax.lax.scan(add_microbatch, zeros, xs)
        parts = jax.tree.map(lambda x: x.sum(0), parts)
    return loss, total, grads, parts


def microbatches(batch: Batch, count: int) -> Batch:
    """Reshapes [B, ...] to [count, B / count, ...]; microbatch m holds the rows m, m + count, ...

    Each device holds consecutive rows of a sharded batch. With a stride, every microbatch has rows
    of every device, and no row moves between devices.
    """

    def one(x):
        return x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(one, batch)


def make_eval_step(
    objective: Objective, *, accumulation: int = 1
) -> Callable[[dict, dict, Batch], Info]:
    """Returns `eval_step(params, frozen, batch) -> {"nll": sum, "tokens": sum of weights}`.

    It uses microbatches like the training step, so it needs no more memory than training.
    """

    def eval_step(params, frozen, batch):
        def add_microbatch(sums, micro):
            nll, tokens, _ = objective(params, frozen, micro, jax.random.key(0))
            return {"nll": sums["nll"] + nll, "tokens": sums["tokens"] + tokens}, None

        zeros = {"nll": jnp.float32(0), "tokens": jnp.float32(0)}
        return jax.lax.scan(add_microbatch, zeros, microbatches(batch, accumulation))[0]

    return eval_step
