"""The training objective: the next token's negative log-likelihood, at trained positions."""

from collections.abc import Callable

import jax

from lcjax.errors import InputError
from lcjax.loss import cross_entropy
from lcjax.models import Decoder, ModelConfig, head
from lcjax.rope.positions import PlainPositions, Positions
from lcjax.sharding import LENGTH
from lcjax.tree import union

Batch = dict[str, jax.Array]
# (trained parameters, frozen parameters, batch, key) -> (sum of losses, sum of weights)
Objective = Callable[[dict, dict, Batch, jax.Array], tuple[jax.Array, jax.Array]]


def language_model(
    config: ModelConfig,
    positions,
    *,
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Objective:
    """Cross-entropy of `targets`, weighted by `weights`, summed over the batch.

    `positions` (`lcjax.rope.positions`) places the tokens: where they stand, or somewhere in a
    longer context, drawn anew for every batch. Rows are spread over the devices of `mesh`.
    """
    if config.position != "rope" and not isinstance(positions, PlainPositions):
        kind = Positions.get_choice_name(type(positions))
        raise InputError(
            f"train.positions.type={kind} spreads tokens for rotations, and model.position="
            f"{config.position} has none; leave it out"
        )
    model = Decoder(config, mesh)

    def objective(trained, frozen, batch, key):
        params = union(trained, frozen)
        places, rotation = positions.sample(
            key,
            batch["positions"],
            rope=config.rope,
            head_dim=config.rotary_dim,
            params=params.get("rope"),
        )
        rotation = config.pattern.at_length(rotation, places.shape[1])
        targets, weights = batch["targets"], batch["weights"]
        order, memory = model.token_order(targets.shape[1]), None
        if config.memory is not None:
            context = batch["chunks"], batch["chunk_mask"]
            memory = model.apply({"params": params}, *context, method="encode")
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
        if order is not None:
            targets, weights = targets[:, order], weights[:, order]
        with jax.named_scope("loss"):
            return cross_entropy(
                hidden,
                head(params, config),
                targets,
                weights,
                chunk=chunk,
                mesh=mesh,
            )

    return objective
