"""Activation Beacon: windows of a text, condensed to keys and values of beacon tokens.

Zhang et al. 2024, "Soaring from 4K to 400K: extending LLM's context with activation beacon" (arXiv
2401.03462, first version). Behind a window of P tokens stand P / r beacons, one for every r of its
tokens, all with one learned embedding. They have projections of queries, keys, values and outputs
of their own in every layer; norms and MLPs are the decoder's, which stays as it is. With m beacons
of earlier windows before it,

    token j stands at m + j and sees these m, and the tokens of the window up to itself;
    beacon i stands at m + (i + 1) r and sees these m, the first (i + 1) r tokens, and itself

("step-expansion"). Of the window its beacons' keys and values are kept in every layer, the keys
before their rotation: as memory they stand at m, m + 1, ..., so r times as much text fits before
the window that is read at last.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lcjax.attention import AttentionMetadata, Causal
from lcjax.attention.base import rotate_queries
from lcjax.errors import InputError, whole_number
from lcjax.memory.leading import Leading, Reader, all_of
from lcjax.models.config import ModelConfig
from lcjax.models.layers import Attention, Context, Projections, kept
from lcjax.models.memory import Encoded, Memory
from lcjax.parallel.sharding import attention_layout
from lcjax.rope import rotate


@Memory.register_subclass("beacon")
@dataclasses.dataclass(frozen=True)
class Beacon(Leading):
    """How many tokens of a window a beacon stands for."""

    # 0: what is kept are the tokens themselves, and the model is the one without beacons.
    ratio: int = 32
    # In training each window of a row draws one of these; empty: `ratio`.
    ratios: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return 1

    @property
    def attention(self) -> type[Attention]:
        return BeaconAttention

    def num_slots(self, tokens: int) -> int:
        return -(-tokens // self.ratio) if self.ratio else tokens

    def slots(self, tokens: int) -> int:
        # Where nothing is drawn, as in validation, it is `ratio` with all of `ratios` there.
        return (
            -(-tokens // min(self.ratio, *self.ratios)) if self.ratios else self.num_slots(tokens)
        )

    def tokens_read(self, tokens: int) -> int:
        return tokens + self.slots(tokens) if self.ratio else tokens

    def for_inference(self) -> "Beacon":
        """Every window is condensed by `ratio`."""
        return dataclasses.replace(self, ratios=())

    def check(self, config: ModelConfig) -> None:
        super().check(config)
        whole_number("model.memory.ratio", self.ratio, 0, "0 keeps all tokens")
        if not isinstance(self.ratios, tuple):
            raise InputError(
                f"model.memory.ratios={self.ratios!r} must be a list of whole numbers, such as"
                " [2, 4, 8]; [] trains with model.memory.ratio alone"
            )
        for ratio in self.ratios:
            whole_number("model.memory.ratios: ratio", ratio, 1, "1 has a beacon for every token")
        if self.ratios and not self.ratio:
            raise InputError(
                "model.memory.ratio=0 keeps all tokens and has no beacons to train; leave"
                " model.memory.ratios empty, or set ratio to one of them"
            )
        self.check_chunk(self.chunk, "model.memory.chunk")
        if self.chunk + self.num_slots(self.chunk) > config.max_length:
            raise InputError(
                f"model.memory.chunk={self.chunk} and the {self.num_slots(self.chunk)} slots of the"
                f" window before it are more than the {config.max_length} tokens that the model"
                f" was trained to read; set it to {config.max_length // 2} or less, or raise"
                " model.memory.ratio"
            )

    def check_chunk(self, length: int, key: str) -> None:
        super().check_chunk(length, key)
        for ratio in (self.ratio, *self.ratios):
            if ratio and length % ratio:
                below, above = length // ratio * ratio, -(-length // ratio) * ratio
                near = ", ".join(str(size) for size in (below, above) if size)
                raise InputError(
                    f"{key}={length} must be a multiple of {ratio}, the tokens that a beacon stands"
                    f" for (model.memory.ratio, ratios); nearest: {near}"
                )

    def window(
        self, read: Reader, embedding: jax.Array, tokens: jax.Array, mask: jax.Array, key: Any
    ) -> Encoded:
        (rows, size), x = tokens.shape, read.embedded(tokens)
        place, length = jnp.cumsum(mask, axis=1) - 1, mask.sum(1, keepdims=True)
        if not self.ratio:
            hidden, layers = read(x, place, mask, keep=all_of(size, rows))
            return read.kept(mask, layers, hidden)
        count, ratio = self.slots(size), self._drawn(key, rows)[:, None]
        # A window that is no multiple of r ends with a beacon for fewer tokens.
        there = jnp.arange(count) * ratio < length
        beacons = jnp.minimum(jnp.arange(1, count + 1) * ratio, length)
        own = jnp.broadcast_to(embedding, (rows, count, x.shape[-1]))
        hidden, layers = read(
            jnp.concatenate([x, own], 1),
            jnp.concatenate([place, beacons], 1),
            jnp.concatenate([mask, there], 1),
            keep=all_of(count, rows, size),
            beacons=beacons,
        )
        return read.kept(there, layers, hidden[:, :size])

    def _drawn(self, key: jax.Array | None, rows: int) -> jax.Array:
        """The ratio int32 [B] of a window in each row."""
        if not self.ratios or key is None:
            return jnp.full((rows,), self.ratio, jnp.int32)
        return jax.random.choice(key, jnp.array(self.ratios, jnp.int32), (rows,))


class BeaconAttention(Attention):
    """Self-attention in which beacons have projections of their own, and no token sees them."""

    def setup(self):
        super().setup()
        self.memory = Projections(self.config.replace(lora=None), self.mesh)

    def __call__(self, x: jax.Array, context: Context, layer: Any) -> tuple[jax.Array, Any]:
        if self.is_initializing():
            self.memory.combine(self.memory.project(x)[0])
        if context.beacons is None:
            return super().__call__(x, context, layer)
        size = x.shape[1] - context.beacons.shape[1]
        q, k, v = self.project(x[:, :size])
        own = self.memory.project(x[:, size:])
        with jax.named_scope("attend"):
            q = jnp.concatenate([q, own[0]], 1)
            order = context.index[:, :size]
            metadata = AttentionMetadata(
                context.positions,
                context.positions[:, :size],
                rotation=context.rotation,
                # A beacon stands behind the last token that it sees.
                q_index=jnp.concatenate([order, context.beacons - 1], 1),
                k_index=order,
                q_segments=context.segments,
                k_segments=context.segments[:, :size],
                layout=attention_layout(self.mesh),
                extra_partials=[*self.before(q, context), _itself(*own, context, size)],
            )
            y = Causal().attend(q, k, v, metadata)
        out = [self.combine(y[:, :size]), self.memory.combine(y[:, size:])]
        k, v = (jnp.concatenate(pair, 1) for pair in ((k, own[1]), (v, own[2])))
        return jnp.concatenate(out, 1), kept(k, v, context)


def _itself(
    q: jax.Array, k: jax.Array, v: jax.Array, context: Context, size: int
) -> tuple[jax.Array, jax.Array]:
    """The partial of beacons [B, R] to themselves, behind `size` tokens to which it is empty."""
    positions = context.positions[:, size:]
    q = rotate_queries(q, positions, context.rotation).astype(jnp.float32)
    k = rotate(k, positions, *context.rotation[:2]).astype(jnp.float32)
    k, v = (jnp.repeat(part, q.shape[2] // part.shape[2], axis=2) for part in (k, v))
    lse = (q * k).sum(-1) * q.shape[-1] ** -0.5
    before = [(0, 0), (size, 0), (0, 0)]
    return jnp.pad(v, [*before, (0, 0)]), jnp.pad(lse, before, constant_values=-jnp.inf)
