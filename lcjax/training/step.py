"""One update: gradients over microbatches, clipping, AdamW, and a guard against non-finite numbers.

The loss is the sum of negative log-likelihoods over all weights of the *global* batch. Dividing by
that one total before the microbatches are summed makes any accumulation equal to one large batch,
also when microbatches hold different numbers of tokens.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from lcjax.models.offloaded import differentiable, with_gradients
from lcjax.parallel.offload import is_offloaded
from lcjax.training import optim
from lcjax.training.layerwise_update import layerwise_update
from lcjax.training.objective import Batch, Objective
from lcjax.training.state import TrainState

Info = dict[str, jax.Array]

_LEARN = 20  # steps after which the usual norm of the gradient is known
_MEMORY = 0.98  # decay of its average: about 50 steps


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: optim.Schedule,
    *,
    accumulation: int = 1,
    ema_decay: float | None = None,
    halt_after: int | None = None,
    spike: float | None = None,
) -> Callable[..., tuple[TrainState, Info]]:
    """`train_step(state, frozen, batch, bad=0) -> (state, info)`: pure, to be jitted with donation.

    A step whose loss or gradient is not finite leaves parameters, moments and average as they
    were; it only counts. So does one whose gradient is more than `spike` times as long as usual
    (after `_LEARN` steps): a bad batch, of which the moments would carry traces for long. `bad` is
    the `info["bad"]` of the step before: how many of the last steps were not finite. The step at
    which it reaches `halt_after` and all steps after it change nothing at all, so that the loop may
    learn of it late: the state is the one before that step's batch. What lies in the
    host's memory is fetched layer by layer and goes back there.
    """

    def train_step(
        state: TrainState, frozen: dict, batch: Batch, bad: jax.typing.ArrayLike = 0
    ) -> tuple[TrainState, Info]:
        key = jax.random.fold_in(state.rng, state.step)
        loss, tokens, grads, parts = accumulate(
            objective, state.params, frozen, batch, key, accumulation
        )
        norm, lr = optax.tree.norm(grads), schedule(state.step)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        with jax.named_scope("update"):
            halted = False if halt_after is None else bad >= halt_after
            jumped = _is_spike(state, norm, spike) & finite
            good = finite & jnp.logical_not(halted) & jnp.logical_not(jumped)

            def update(old, grads):
                params, opt_state, ema = old
                updates, opt_state = optimizer.update(
                    grads, opt_state, optim.wide(params), norm=norm
                )
                params = optim.apply(params, updates, lr)
                if ema_decay is not None:
                    ema = optim.average(ema, params, ema_decay)
                return params, opt_state, ema

            old = state.params, state.opt_state, state.ema
            if any(map(is_offloaded, jax.tree.leaves(old))):
                kept = layerwise_update(update, good, old, grads)
            else:
                kept = jax.lax.cond(good, update, lambda old, _: old, old, grads)
        bad = jnp.where(good | jumped, 0, bad + 1).astype(jnp.int32)
        counts = 1 if halt_after is None else (bad < halt_after).astype(jnp.int32)
        skipped = state.skipped + jnp.where(finite & jnp.logical_not(jumped), 0, counts)
        counted = finite & jnp.logical_not(halted)
        usual = _usual(state, jnp.where(counted, norm, state.usual), spike)
        info = {
            "loss": loss,
            "grad_norm": norm,
            "lr": jnp.asarray(lr, jnp.float32),
            "tokens": tokens,
            "finite": finite,
            "spike": jumped,
            "usual_norm": state.usual,
            "skipped": skipped,
            "bad": bad,
            "parts": parts,
        }
        return TrainState(state.step + counts, skipped, usual, *kept, state.rng), info

    return train_step


def _is_spike(state: TrainState, norm: jax.Array, spike: float | None) -> jax.Array:
    if spike is None:
        return jnp.bool_(False)
    return (state.step >= _LEARN) & (norm > spike * state.usual)


def _usual(state: TrainState, norm: jax.Array, spike: float | None) -> jax.Array:
    """The average with one more norm, which counts for no more than a spike would have to be.

    So a run whose gradients have grown for good goes on after a while.
    """
    if spike is not None:
        norm = jnp.where(state.step >= _LEARN, jnp.minimum(norm, spike * state.usual), norm)
    first = state.usual == 0
    return jnp.where(first, norm, _MEMORY * state.usual + (1 - _MEMORY) * norm)


def accumulate(
    objective: Objective, params: dict, frozen: dict, batch: Batch, key: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, dict, dict]:
    """Of a whole batch: mean loss per weight, sum of weights, float32 gradients of the mean, and
    the means of the loss's parts by name.
    """
    learned = (batch[name] for name in ("weights", "chunk_weights") if name in batch)
    total = sum(weights.astype(jnp.float32).sum() for weights in learned)
    # A batch of padding only has no loss rather than 0 / 0.
    inverse = jnp.where(total > 0, 1.0 / jnp.where(total > 0, total, 1.0), 0.0)

    def mean_share(by, micro, key):
        loss, _, *parts = objective(with_gradients(params, by), frozen, micro, key)
        return loss * inverse, {name: x * inverse for part in parts for name, x in part.items()}

    def one(carry, xs):
        (loss, parts), grads = jax.value_and_grad(mean_share, has_aux=True)(by, *xs)
        added = jax.tree.map(lambda sum, x: sum + x.astype(jnp.float32), carry, (loss, grads))
        return added, parts

    by = differentiable(params)
    start = (jnp.float32(0), jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))
    if count == 1:
        (loss, grads), parts = one(start, (batch, key))
    else:
        keys = jax.random.split(key, count)
        (loss, grads), parts = jax.lax.scan(one, start, (microbatches(batch, count), keys))
        parts = jax.tree.map(lambda x: x.sum(0), parts)
    return loss, total, grads, parts


def microbatches(batch: Batch, count: int) -> Batch:
    """[B, ...] -> [count, B / count, ...], microbatch m holding the rows m, m + count, ...

    Each device holds consecutive rows of a sharded batch. Taken with a stride, every microbatch
    has rows of every device, and nothing moves between devices.
    """

    def one(x):
        return x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(one, batch)


def make_eval_step(
    objective: Objective, *, accumulation: int = 1
) -> Callable[[dict, dict, Batch], Info]:
    """`eval_step(params, frozen, batch) -> {"nll": sum, "tokens": sum of weights}`.

    Takes as many rows at once as the training step does: what can be trained can be validated.
    """

    def eval_step(params, frozen, batch):
        def one(carry, micro):
            nll, tokens, *_ = objective(params, frozen, micro, jax.random.key(0))
            return {"nll": carry["nll"] + nll, "tokens": carry["tokens"] + tokens}, None

        start = {"nll": jnp.float32(0), "tokens": jnp.float32(0)}
        return jax.lax.scan(one, start, microbatches(batch, accumulation))[0]

    return eval_step
