"""The training loss: cross-entropy, and terms of distillation, experts and attention patterns."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.attention import Pattern
from lcjax.attention.indexer import adds_divergence
from lcjax.errors import InputError
from lcjax.models import Decoder, ModelConfig, head
from lcjax.models.decoder import DecoderOutput
from lcjax.models.distill import Distill, Teacher, distillation
from lcjax.models.experts import Load, balance_loss
from lcjax.models.layers import (
    CollectTerms,
    box_offloaded,
    learns_by_divergence,
    unbox_offloaded,
)
from lcjax.models.loss import cross_entropy, token_nll
from lcjax.models.memory import EncodedContext
from lcjax.parallel.sharding import LENGTH
from lcjax.rope import NoRotation, Rotation
from lcjax.rope.positions import PlainPositions, Positions
from lcjax.tree import flatten, union

Batch = dict[str, jax.Array]
# (trained parameters, frozen parameters, batch, key) -> (sum of losses, sum of weights, sums of the
# parts of the loss that are logged, by name)
Objective = Callable[[dict, dict, Batch, jax.Array], tuple[jax.Array, jax.Array, dict]]

# Fields of a batch with the teacher's probabilities (`lcjax.data.stored_rows`).
TEACHER = ("teacher_ids", "teacher_probabilities", "teacher_rest")


def language_model(
    config: ModelConfig,
    positions: Positions,
    *,
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    distill: Distill | None = None,
    terms: bool = True,
) -> Objective:
    """Returns a loss: the cross-entropy of `targets`, weighted by `weights`, summed over the batch.

    For mixtures of experts, `model.experts.balance` times the load-balancing loss of the batch
    (`lcjax.models.experts.balance_loss`) is added per unit of weight, so the mean loss equals that
    of transformers. For a `DistilledPattern`, the mean of its divergence over tokens and layers
    times its factor is added per unit of weight. Padding counts in neither.

    If only parameters are trained that learn by divergence, such as the indexers of DSA, it is the
    whole loss, and no logits are computed: the rest has no gradient for them.

    Args:
      config: config of the decoder.
      positions: chooses the position ids of tokens: consecutive ones, or a sample from a longer
        context, drawn for every batch.
      chunk: number of positions per chunk of logits; None: chosen by size.
      mesh: the devices over which the rows of a batch are sharded.
      distill: adds the divergence from the teacher whose probabilities are in the batch. The
        loss then has the parts `ce` and `kl`.
      terms: whether to add the losses of experts and of patterns. The loss then has the parts `ce`,
        and `balance` or `divergence`, these without their factors.

    Raises:
      InputError: if the model cannot use these positions.
    """
    _check_positions(config, positions)
    model = Decoder(config, mesh)
    balance = config.experts.balance if terms and config.experts is not None else 0.0
    patterns = [layer.pattern for layer, _ in config.layer_counts if layer.mixer is None]
    diverges = any(map(adds_divergence, patterns))

    def objective(trained, frozen, batch, key):
        by_divergence = learns_by_divergence(patterns, flatten(trained))
        params = box_offloaded(union(trained, frozen))
        order = model.token_order(batch["tokens"].shape[1])
        collect = None
        if balance or by_divergence or (diverges and terms):
            counted = (batch["segments"] != 0).astype(jnp.float32)
            collect = CollectTerms(_reorder(counted, order))
        hidden, windows, output = _hidden_states(
            model, positions, params, batch, key, order=order, collect=collect
        )
        targets, weights = batch["targets"], batch["weights"]
        if collect is not None and diverges:
            divergence, total = _divergence(output.divergence, patterns, config), weights.sum()
            divergence = [x / jnp.maximum(counted.sum(), 1) * total for x in divergence]
            if by_divergence:
                return divergence[1], total, {"divergence": divergence[0]}
        if "chunk_weights" in batch:
            hidden = _prepend(windows, hidden)
            targets = _prepend(batch["chunk_targets"], targets)
            weights = _prepend(batch["chunk_weights"], weights)
        teacher = () if distill is None else tuple(batch[name] for name in TEACHER)
        targets, weights, *teacher = (_reorder(x, order) for x in (targets, weights, *teacher))
        inputs = hidden, head(params, config), targets, weights
        with jax.named_scope("loss"):
            if distill is None:
                loss, count = cross_entropy(*inputs, chunk=chunk, mesh=mesh)
                parts = {}
            else:
                loss, count, parts = distillation(
                    *inputs, Teacher(*teacher), distill, chunk=chunk, mesh=mesh
                )
            if balance:
                added = _balance(output.load) * count
                parts = (parts or {"ce": loss}) | {"balance": added}
                loss = loss + balance * added
            if collect is not None and diverges:
                parts = (parts or {"ce": loss}) | {"divergence": divergence[0]}
                loss = loss + divergence[1]
            return loss, count, parts

    return objective


def _reorder(x: jax.Array, order: np.ndarray | None) -> jax.Array:
    return x if order is None else x[:, order]


def _balance(layers: Load | tuple[Load | None, ...]) -> jax.Array:
    """Returns the load-balancing loss of scanned layers, or of layers that differ.

    Dense layers have no load.
    """
    if isinstance(layers, Load):
        return balance_loss(layers)
    loads = (load for load in layers if load is not None)
    return balance_loss(jax.tree.map(lambda *x: jnp.stack(x), *loads))


def _divergence(
    layers: jax.Array | tuple[jax.Array | None, ...],
    patterns: Sequence[Pattern],
    config: ModelConfig,
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum over tokens of the mean over layers of divergences, and that with factors.

    Args:
      layers: the sums over tokens, stacked for scanned layers or separate; None: there is none.
      patterns: those of the layers, if they are scanned of all of them.
      config: the model.
    """
    if isinstance(layers, jax.Array):
        mean = layers.mean()
        return mean, patterns[0].divergence_factor * mean
    terms = [(i, one) for i, one in enumerate(layers) if one is not None]
    mean = sum(one for _, one in terms) / len(terms)
    factors = (config.layer(i).pattern.divergence_factor * one for i, one in terms)
    return mean, sum(factors) / len(terms)


def gate_distillation(
    config: ModelConfig,
    positions: Positions,
    penalty: float,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> Objective:
    """Returns a loss of the gates of key heads: that of DuoAttention (`HeadGates`).

    It is the mean over channels of the squared difference of the hidden states to those of full
    attention, weighted by `weights` and summed over the batch, and for each unit of weight
    `penalty` times the mean of the gates. Its parts are `mse` and `gates`, the latter without its
    factor.

    Args:
      config: config of the decoder with gates.
      positions: as in `language_model`.
      penalty: factor of the mean of the gates.
      mesh: as in `language_model`.
    """
    _check_positions(config, positions)
    gated, full = Decoder(config, mesh), Decoder(config.for_inference(), mesh)

    def objective(trained, frozen, batch, key):
        params, hidden = box_offloaded(union(trained, frozen)), []
        for model in (full, gated):
            states, *_ = _hidden_states(model, positions, params, batch, key, order=None)
            hidden.append(states.astype(jnp.float32))
        error = jnp.square(jax.lax.stop_gradient(hidden[0]) - hidden[1]).mean(-1)
        weights = batch["weights"]
        loss, count = (error * weights).sum(), weights.sum()
        gates = jnp.abs(jnp.concatenate([x.ravel() for x in jax.tree.leaves(trained)])).mean()
        parts = {"mse": loss, "gates": gates * count}
        return loss + penalty * gates * count, count, parts

    return objective


def target_nll(
    config: ModelConfig,
    positions: Positions,
    *,
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[[dict, Batch, jax.Array], jax.Array]:
    """Returns a function of (parameters, batch, key) -> float32 [B, T]: -log p of every target.

    It is for losses that are not a sum over tokens. The arguments are those of `language_model`,
    for a model without a memory.
    """
    _check_positions(config, positions)
    model = Decoder(config, mesh)

    def nll(params, batch, key):
        params = box_offloaded(params)
        order = model.token_order(batch["tokens"].shape[1])
        hidden, *_ = _hidden_states(model, positions, params, batch, key, order=order)
        targets, projection = _reorder(batch["targets"], order), head(params, config)
        with jax.named_scope("loss"):
            nll = token_nll(hidden, projection, targets, chunk=chunk, mesh=mesh)
        return _reorder(nll, None if order is None else np.argsort(order))

    return nll


def _hidden_states(
    model: Decoder,
    positions: Positions,
    params: dict,
    batch: Batch,
    key: jax.Array,
    *,
    order: np.ndarray | None,
    collect: CollectTerms | None = None,
) -> tuple[jax.Array, jax.Array | None, DecoderOutput]:
    """Returns the inputs of the head, the hidden states of a memory's windows, and all outputs.

    The inputs are in `order`, that of `Decoder.token_order`. The hidden states of windows are
    `EncodedContext.hidden`, or None.
    """
    config, mesh, windows = model.config, model.mesh, None
    position_ids, rotation = positions.sample(
        key,
        batch["positions"],
        rope=config.rope,
        head_dim=config.rotary_dim,
        params=unbox_offloaded(params.get("rope")),
    )
    rotation = config.complete(rotation, position_ids.shape[1])
    memory = None
    if config.memory is not None:
        memory = _encode(model, params, batch, position_ids, rotation, key)
        windows = memory.hidden
        if mesh is None or mesh.shape[LENGTH] == 1:  # else one device would get all text
            memory = memory.packed()
    output = model.apply(
        {"params": params},
        batch["tokens"],
        positions=position_ids,
        segments=batch["segments"],
        rotation=rotation,
        order=order,
        memory=memory,
        collect=collect,
    )
    hidden = model.apply({"params": params}, output.hidden, method="before_head")
    return hidden, windows, output


def _check_positions(config: ModelConfig, positions: Positions) -> None:
    if type(positions) is PlainPositions:
        return
    kind = Positions.get_choice_name(type(positions))
    if config.position != "rope":
        raise InputError(
            f"train.positions.type={kind} spreads tokens for rotations, and model.position="
            f"{config.position} has none; leave it out"
        )
    ropes = {layer.rope for layer in config.layers if layer.rope is not None}
    channels = {layer.rotary_dim for layer, _ in config.layer_counts}
    if (ropes - {NoRotation()} or len(channels) > 1) and not positions.fits_any_rope:
        raise InputError(
            f"train.positions.type={kind} chooses positions for model.rope, and some model.layers"
            " have a rope of their own, or other rotary channels; leave out train.positions, or"
            " rope in model.layers"
        )
    if config.memory is not None and config.memory.is_prefix:
        raise InputError(
            f"train.positions.type={kind} changes the positions of the text, but model.memory is"
            " placed right before them; leave it out"
        )


def _prepend(windows: jax.Array, text: jax.Array) -> jax.Array:
    """Joins windows [B, C, P, ...] and a text [B, T, ...] to [B, C P + T, ...]."""
    flat = windows.reshape(windows.shape[0], -1, *text.shape[2:])
    return jnp.concatenate([flat, text], axis=1)


def _encode(
    model: Decoder,
    params: dict,
    batch: Batch,
    position_ids: jax.Array,
    rotation: Rotation,
    key: jax.Array,
) -> EncodedContext:
    """Encodes the context chunks of a batch.

    A memory that retrieves chunks takes its query from the token before the first target with a
    weight: at inference later tokens do not exist yet when the answer starts. A row whose first
    token already has a weight, or that has no weights, is plain text and has no query.
    """
    first_target = jnp.argmax(batch["weights"] > 0, axis=1)

    def embed_query():
        return model.apply(
            {"params": params},
            batch["tokens"],
            first_target,
            segments=batch["segments"],
            positions=position_ids,
            rotation=rotation,
            method="embed_query",
        )

    options = model.config.memory.select_inputs(
        key=jax.random.fold_in(key, 2),
        rotation=rotation,
        segments=batch["segments"],
        collect_hidden="chunk_weights" in batch,
        query=embed_query,
        has_query=first_target > 0,
    )
    chunks = batch["chunks"], batch["chunk_mask"]
    return model.apply({"params": params}, *chunks, method="encode", **options)
