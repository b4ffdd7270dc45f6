"""LM-Infinite (Han et al. 2023, arXiv 2308.16137) and ReRoPE: an upper bound of the distance."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lcjax.attention.base import (
    AttentionMetadata,
    Pass,
    Pattern,
    near_and_far,
    partial_attention,
    pass_at_distance,
    pass_bias,
    rotate_qk,
)
from lcjax.attention.cache import LayerCache, RingCache
from lcjax.errors import InputError, NonNegativeInt, PositiveInt
from pallas_kernels import causal, everything, gather, merge, prefix, window


@Pattern.register_subclass("lm_infinite")
@dataclass(frozen=True)
class LMInfinite(Pattern):
    """A window and the first tokens of the text; no key is further away than `distance`.

    Query i sees key j of its window, 0 <= i - j < window, at distance i - j. Of the keys before the
    window it sees the first `sinks`, all at one distance (sec. 4: the Lambda-shaped mask and the
    distance ceiling). The released code also caps the distance by the length of the text. That
    changes results only if `distance` exceeds `window`; a prompt that is read at once then differs
    from one that is read token by token.

    With `top_k`, every query and head also sees the `top_k` keys between the sinks and the window
    that have the greatest logits at distance `top_k_position`, with these logits, but only if there
    are at least `top_k` such keys. In the released code only the last query of a call chooses keys,
    and only from the fifth layer on. Here every query does, so that a prompt that is read at once
    equals one that is read token by token, and in every layer with this pattern; `model.layers` can
    give the first four layers another one. This needs the logits of all keys and a cache of the
    whole text.
    """

    examples = (
        {"window": 9, "sinks": 3},
        {"window": 6, "sinks": 1, "distance": 4},
        {"window": 6, "sinks": 2, "top_k": 3},
    )
    moves_keys = True
    encodings = ("rope", "alibi")  # ALiBi's bias also stops growing at `distance` (sec. 4, for MPT)

    window: PositiveInt = 4096  # visible keys at their own distance, the token itself included
    sinks: PositiveInt = 10  # first tokens that stay visible (LCEG 10; the paper 5 to 100)
    distance: PositiveInt | None = None  # distance of sinks before the window; null: `window`
    # Keys that a query chooses from the others (passkey script: 5)
    top_k: PositiveInt | None = None
    # Their distance; null: half of `window`, as released
    top_k_position: NonNegativeInt | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.top_k_position is not None and self.top_k is None:
            raise InputError(
                f"pattern.top_k_position={self.top_k_position} needs pattern.top_k; set both, or "
                "neither"
            )

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        distance = self.window if self.distance is None else self.distance
        return near_and_far(metadata, self.window, distance, prefix(self.sinks))

    @property
    def is_position_based(self) -> bool:
        return self.top_k is None

    @property
    def layer_cache(self) -> LayerCache:
        if self.top_k is not None:
            return super().layer_cache
        return RingCache(self.sinks, self.window)

    def attend(self, q, k, v, metadata):
        if self.top_k is None or k.shape[1] < self.sinks + self.top_k + self.window:
            return super().attend(q, k, v, metadata)
        self.check_metadata(metadata)
        partials = [partial_attention(q, k, v, p, metadata) for p in self.passes(metadata)]
        with jax.named_scope("choose"):
            partials.append(_top_k_partial(q, k, v, self._middle(metadata), metadata, self.top_k))
        return merge(partials)[0]

    def _middle(self, metadata: AttentionMetadata) -> Pass:
        """Returns the pass over the keys from which each query chooses `top_k`.

        These are the keys between the sinks and the window.
        """
        distance = self.window // 2 if self.top_k_position is None else self.top_k_position
        middle = causal() & ~window(self.window) & ~prefix(self.sinks)
        return pass_at_distance(metadata, distance, middle)


@Pattern.register_subclass("rerope")
@dataclass(frozen=True)
class ReRoPE(Pattern):
    """Causal attention in which distances above `window` become `window`.

    ReRoPE (Su 2023, kexue.fm/archives/9708) is LM-Infinite's distance ceiling without its mask, an
    ablation of that paper (sec. 5.2).
    """

    examples = ({"window": 6},)
    moves_keys = True
    encodings = ("rope",)

    # Keys at their own distance, the token itself included; at most the trained length
    window: PositiveInt

    def passes(self, metadata: AttentionMetadata) -> list[Pass]:
        return near_and_far(metadata, self.window, self.window, everything())


def _top_k_partial(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    attention_pass: Pass,
    metadata: AttentionMetadata,
    count: int,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Computes a pass over the `count` keys with the greatest logits of each query and head.

    A query for which the mask has fewer than `count` keys sees none. The choice of keys has no
    gradient; the logits of the chosen keys have one.

    Args:
      q, k, v: unrotated queries and keys, and values.
      attention_pass: positions, and the mask of the keys to choose from.
      metadata: rotation, order indices, segments and bias of the call.
      count: keys per query and head.

    Returns:
      The output, and the float32 log-sum-exp of the logits.
    """
    q, k = rotate_qk(q, k, metadata, attention_pass)
    _, lse_shift = pass_bias(attention_pass, metadata)
    q_order, k_order = (
        jnp.broadcast_to(order, x.shape[:2])
        for order, x in ((metadata.q_order, q), (metadata.k_order, k))
    )
    q_segments, k_segments = (
        jnp.ones(x.shape[:2], jnp.int32) if segments is None else segments
        for segments, x in ((metadata.q_segments, q), (metadata.k_segments, k))
    )

    def attend_query(inputs):
        query, order, segment = inputs  # [B, N, H], [B], [B]
        visible = attention_pass.mask.element(order[:, None], k_order)
        visible = visible & (k_segments == segment[:, None]) & (segment != 0)[:, None]
        is_valid = (visible.sum(-1) >= count)[:, None]
        slots = _top_k_slots(query, k, visible, count)
        keys, values = (gather.tokens(x, slots[:, :, None])[:, :, 0] for x in (k, v))
        out, lse = _attend_gathered(query, keys, values)
        return jnp.where(is_valid[..., None], out, 0), jnp.where(is_valid, lse, -jnp.inf)

    elements = q.shape[0] * q.shape[2] * (k.shape[1] + count * (k.shape[3] + v.shape[3]))
    out, lse = gather.by_query(attend_query, (q, q_order, q_segments), elements)
    return out, lse if lse_shift is None else lse + lse_shift


def _top_k_slots(
    query: Float[Array, "B N H"],
    k: Float[Array, "B S K H"],
    visible: Bool[Array, "B S"],
    count: int,
) -> Int[Array, "B N M"]:
    """Returns the int32 slots of the `count` visible keys with the greatest logits."""
    query, k = (lax.stop_gradient(x) for x in (query, k))
    logits = gather.scores(query[:, None], k)[:, 0]
    _, slots = lax.top_k(jnp.where(visible[:, None], logits, -jnp.inf), count)
    return slots


def _attend_gathered(
    query: Float[Array, "B N H"], keys: Float[Array, "B N M H"], values: Float[Array, "B N M Hv"]
) -> tuple[Float[Array, "B N Hv"], Float[Array, "B N"]]:
    """Returns the partial (out, lse) of one query per row and head over its gathered keys."""
    logits = query.shape[-1] ** -0.5 * gather.einsum("BNH,BNMH->BNM", query, keys)
    lse = jax.nn.logsumexp(logits, -1)
    weights = jnp.exp(logits - lse[..., None])
    out = gather.einsum("BNM,BNMH->BNH", weights.astype(values.dtype), values)
    return out.astype(query.dtype), lse
