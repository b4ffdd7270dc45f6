"""The training objective: the next token's negative log-likelihood, and what a teacher says."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lcjax.errors import InputError
from lcjax.models import Decoder, ModelConfig, head
from lcjax.models.distill import Distill, Teacher, distillation
from lcjax.models.loss import cross_entropy
from lcjax.models.memory import Encoded
from lcjax.models.offloaded import boxed, unboxed
from lcjax.parallel.sharding import LENGTH
from lcjax.rope.positions import PlainPositions, Positions
from lcjax.tree import union

Batch = dict[str, jax.Array]
# (trained parameters, frozen parameters, batch, key) -> (sum of losses, sum of weights), and where
# the losses have parts that a log should tell apart, their sums by name
Objective = Callable[[dict, dict, Batch, jax.Array], tuple]

# What a teacher's rows hold beside the text (`lcjax.data.teacher_files`).
TEACHER = ("teacher_ids", "teacher_probabilities", "teacher_rest")


def language_model(
    config: ModelConfig,
    positions,
    *,
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    distill: Distill | None = None,
) -> Objective:
    """Cross-entropy of `targets`, weighted by `weights`, summed over the batch.

    With `distill` also the divergence from the teacher whose probabilities are in the batch; its
    parts `ce` and `kl` are told apart.

    `positions` (`lcjax.rope.positions`) places the tokens: where they stand, or somewhere in a
    longer context, drawn anew for every batch. Rows are spread over the devices of `mesh`.
    """
    if config.position != "rope" and not isinstance(positions, PlainPositions):
        kind = Positions.get_choice_name(type(positions))
        raise InputError(
            f"train.positions.type={kind} spreads tokens for rotations, and model.position="
            f"{config.position} has none; leave it out"
        )
    if config.memory is not None and config.memory.leads and type(positions) is not PlainPositions:
        kind = Positions.get_choice_name(type(positions))
        raise InputError(
            f"train.positions.type={kind} moves the text's tokens, and model.memory stands right"
            " before them; leave it out"
        )
    model = Decoder(config, mesh)

    def objective(trained, frozen, batch, key):
        params = boxed(union(trained, frozen))
        places, rotation = positions.sample(
            key,
            batch["positions"],
            rope=config.rope,
            head_dim=config.rotary_dim,
            params=unboxed(params.get("rope")),
        )
        rotation = config.pattern.at_length(rotation, places.shape[1])
        targets, weights = batch["targets"], batch["weights"]
        order, memory = model.token_order(targets.shape[1]), None
        if config.memory is not None:
            where = {"positions": places, "rotation": rotation}
            memory = _encoded(model, params, batch, where, key)
            windows = memory.hidden
            if mesh is None or mesh.shape[LENGTH] == 1:  # else all text would go to one device
                memory = memory.packed()
        hidden, _ = model.apply(
            {"params": params},
            batch["tokens"],
            positions=places,
            segments=batch["segments"],
            rotation=rotation,
            order=order,
            memory=memory,
        )
        hidden = model.apply({"params": params}, hidden, method="before_head")
        if "chunk_weights" in batch:
            behind = hidden, targets, weights
            hidden, targets, weights = map(
                _joined, (windows, batch["chunk_targets"], batch["chunk_weights"]), behind
            )
        teacher = () if distill is None else tuple(batch[name] for name in TEACHER)
        if order is not None:
            targets, weights, *teacher = (x[:, order] for x in (targets, weights, *teacher))
        known = hidden, head(params, config), targets, weights
        with jax.named_scope("loss"):
            if distill is None:
                return cross_entropy(*known, chunk=chunk, mesh=mesh)
            return distillation(*known, Teacher(*teacher), distill, chunk=chunk, mesh=mesh)

    return objective


def _joined(windows: jax.Array, text: jax.Array) -> jax.Array:
    """[B, C P + T, ...] of what there is of the tokens of windows [B, C, P, ...] and of a text."""
    flat = windows.reshape(windows.shape[0], -1, *text.shape[2:])
    return jnp.concatenate([flat, text], axis=1)


def _encoded(model: Decoder, params: dict, batch: Batch, where: dict, key: jax.Array) -> Encoded:
    """The context of a batch.

    Asked for it is what the last token before the first one that is learned needs, since later ones
    are not there yet when the model answers. A row that is learned from its first token on, or not
    at all, asks nothing: it is a text, and not an answer.
    """
    options, memory = {}, model.config.memory
    if memory.ordered or memory.leads:
        options["key"] = jax.random.fold_in(key, 2)
    if memory.leads:
        options |= {"rotation": where["rotation"], "hidden": "chunk_weights" in batch}
    if memory.asks:
        at = jnp.argmax(batch["weights"] > 0, axis=1)
        own = {"segments": batch["segments"], **where}
        asked = model.apply({"params": params}, batch["tokens"], at, method="asked", **own)
        options |= {"query": asked, "asked": at > 0}
    context = batch["chunks"], batch["chunk_mask"]
    return model.apply({"params": params}, *context, method="encode", **options)
