"""Distillation from a teacher's next-token probabilities: CEPED (arXiv 2402.16617, app. A.3).

A teacher's distribution p is stored as its largest entries and the mass of all others. The loss
adds one of these divergences of the student q, which has all logits, to the cross-entropy:

    drop         sum over the stored j of p_j (log p_j - log q_j)
    renormalise  the same of p and q divided by their sums over the stored j
    rest         drop, plus the same term of the two remaining masses
    smooth       rest, with each of the n masses x replaced by (x + d) / (1 + n d), d = 1e-6

CEPED trains with `drop`. It is a part of a Kullback-Leibler divergence and may be negative, but its
gradient moves q_j towards p_j. `rest` is not defined if the student has no remaining mass.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lcjax.errors import InputError, NonNegativeFloat, OneOf, PositiveInt, check_fields
from lcjax.models.loss import Projection, negative_log_likelihood, over_chunks, weighted_loss

MODES = ("drop", "renormalise", "rest", "smooth")
_SMOOTH = 1e-6  # d; the default of the released code, smooth_1e-6
_TINY = jnp.finfo(jnp.float32).tiny


@dataclass(frozen=True)
class Distill:
    """Options of distillation from stored teacher probabilities: `train.distill`."""

    ce: NonNegativeFloat = 1.0  # weight of the cross-entropy with the text
    kl: NonNegativeFloat = 2.0  # weight of the divergence from the teacher
    # Which divergence: drop, renormalise, rest or smooth
    mode: Annotated[str, OneOf(MODES)] = "drop"
    top: PositiveInt = 50  # number of teacher probabilities used, at most as many as the rows have

    def __post_init__(self):
        check_fields("train.distill", self)
        if self.ce == self.kl == 0:
            raise InputError("train.distill.ce=0 and kl=0 leave nothing to learn; raise one")


class Teacher(NamedTuple):
    """The stored part of a teacher's distribution at every position, the largest entries first."""

    ids: Int[Array, "B T K"]  # tokens
    probabilities: Float[Array, "B T K"]  # in the whole vocabulary, not among the K entries
    rest: Float[Array, "B T"]  # total probability of all other tokens

    def largest(self, count: int) -> "Teacher":
        """Returns the distribution with only the `count` largest entries stored, in float32."""
        entries, others = jnp.split(self.probabilities.astype(jnp.float32), [count], axis=-1)
        rest = self.rest.astype(jnp.float32) + others.sum(-1)
        return Teacher(self.ids[..., :count].astype(jnp.int32), entries, rest)


def divergence(log_q: Float[Array, "B T K"], teacher: Teacher, mode: str) -> Float[Array, "B T"]:
    """Returns the divergence between teacher and student at every position.

    Args:
      log_q: the student's log-probabilities of `teacher.ids`.
      teacher: the stored distribution.
      mode: drop, renormalise, rest or smooth, as defined at the top of this module.
    """
    p, others = teacher.probabilities, teacher.rest
    if mode == "renormalise":
        p = p / jnp.maximum(p.sum(-1, keepdims=True), _TINY)
        log_q = jax.nn.log_softmax(log_q, axis=-1)
    elif mode != "drop":
        q = jnp.exp(log_q)
        p, q = (
            jnp.append(x, rest[..., None], axis=-1) for x, rest in ((p, others), (q, 1 - q.sum(-1)))
        )
        if mode == "smooth":
            p, q = ((x + _SMOOTH) / (1 + x.shape[-1] * _SMOOTH) for x in (p, q))
        log_q = jnp.log(jnp.maximum(q, _TINY))
    # 0 log 0 is 0; float16 stores probabilities below 6e-8 as 0.
    return jnp.where(p > 0, p * (jnp.log(jnp.maximum(p, _TINY)) - log_q), 0.0).sum(-1)


@dataclass(frozen=True)
class _WithTeacher:
    """The `Criterion` that returns the weighted sum of both losses of a token."""

    config: Distill

    def __call__(self, logits, lse, known):
        targets, teacher = known
        teacher, config = Teacher(*teacher).largest(self.config.top), self.config
        nll, _, slope = negative_log_likelihood(logits, lse, targets)
        log_q = jnp.take_along_axis(logits, teacher.ids, -1, mode="clip") - lse
        kl, pull = jax.vjp(lambda log_q: divergence(log_q, teacher, config.mode), log_q)
        (by_log_q,) = pull(jnp.ones_like(kl))
        rows, places = jnp.ogrid[: kl.shape[0], : kl.shape[1]]
        at = rows[..., None], places[..., None], teacher.ids
        share = by_log_q.sum(-1, keepdims=True) * jnp.exp(logits - lse)
        slope = config.ce * slope - config.kl * share
        slope = slope.at[at].add(config.kl * by_log_q, mode="drop")
        return config.ce * nll + config.kl * kl, {"ce": nll, "kl": kl}, slope


def distillation(
    hidden: Float[Array, "B T D"],
    projection: Projection,
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    teacher: Teacher,
    config: Distill = Distill(),
    *,
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns the weighted sum of ce x cross-entropy + kl x divergence, and its parts.

    Logits are computed once for both losses, one chunk of positions at a time.

    Args:
      hidden, projection, targets, weights, chunk, mesh: as in `lcjax.models.loss.cross_entropy`.
      teacher: the stored distributions over the same targets.
      config: weights of the losses, and the divergence.

    Returns:
      The sum of losses, the sum of weights, and the sums of both losses as {"ce", "kl"}.

    Raises:
      InputError: `config.top` exceeds the stored probabilities.
    """
    check_top(config, teacher.ids.shape[-1])
    return weighted_loss(
        hidden, projection, (targets, tuple(teacher)), weights,
        criterion=_WithTeacher(config), chunk=chunk, mesh=mesh,
    )  # fmt: skip


def check_top(config: Distill, stored: int, where: str = "the teacher") -> None:
    """Raises an InputError if `config.top` exceeds the number of stored probabilities."""
    if config.top > stored:
        raise InputError(
            f"train.distill.top={config.top} is more than the {stored} probabilities that {where}"
            f" stored; set it to {stored} or less"
        )


def largest_probabilities(
    hidden: Float[Array, "B T D"],
    projection: Projection,
    count: int,
    *,
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Teacher:
    """Returns the `count` largest probabilities of the next token at every position.

    They are float16, as in files. The logits of a whole text are never stored.
    """

    def one(hidden, projection):
        logits = projection(hidden)
        lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        top, ids = jax.lax.top_k(logits, count)
        p = jnp.exp(top - lse)
        rest = jnp.maximum(1 - p.sum(-1), 0)
        return ids, p.astype(jnp.float16), rest.astype(jnp.float16)

    return Teacher(*over_chunks(one, hidden, projection, chunk=chunk, mesh=mesh))
