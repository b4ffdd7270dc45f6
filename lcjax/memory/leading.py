"""Memories that stand before the text: windows of it, read by the decoder itself one by one.

A window is read behind what has been kept of all windows before it, and what is kept of it, keys
and values of every layer, is put behind that. The keys are not rotated: what there is of M of them
stands at positions 0, 1, 2, ... of whatever is read next, be it a window or the text, and the text
begins behind them. So they are one softmax with the text's own keys, and a row without any is the
decoder as it was.
"""

import abc
import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lcjax.attention import Causal
from lcjax.errors import InputError, whole_number
from lcjax.memory.context_tree import gathered
from lcjax.models import cache as cache_lib
from lcjax.models.config import ModelConfig
from lcjax.models.decoder import Decoder
from lcjax.models.layer_groups import apart
from lcjax.models.layers import CollectKeyValues
from lcjax.models.memory import Encoded, Memory, check_chunks, token_axis
from lcjax.parallel.sharding import LENGTH
from lcjax.rope import Rotation


@dataclasses.dataclass(frozen=True)
class Leading(Memory):
    """Windows of up to `chunk` tokens, and what is kept of each."""

    chunk: int

    @abc.abstractmethod
    def window(
        self, read: "Reader", embedding: jax.Array, tokens: jax.Array, mask: jax.Array, key: Any
    ) -> Encoded:
        """What is kept of a window int32 [B, P] that `read` reads; `mask` is false, then true.

        `embedding` [n, D] are those of the memory's own tokens, n as in `tokens`; `key` is of
        training. There are as many places as `slots` says.
        """

    @property
    @abc.abstractmethod
    def tokens(self) -> int:
        """Tokens of the memory's own that have an embedding."""

    @abc.abstractmethod
    def slots(self, tokens: int) -> int:
        """Places that are computed for a window of so many tokens: at least its `room`."""

    @abc.abstractmethod
    def tokens_read(self, tokens: int) -> int:
        """Tokens that the decoder reads for a window of so many, its own included."""

    @property
    def reach(self) -> int | None:
        """Windows, the text as the last, over whose memory gradients flow together; None: all."""
        return None

    @property
    def is_prefix(self) -> bool:
        return True

    def reader_layers(self, num_layers: int) -> tuple[bool, ...]:
        return (True,) * num_layers

    def of_layers(self, count: int) -> "Leading":
        return self

    @property
    def max_chunk_size(self) -> int:
        return self.chunk

    @property
    def shared_keys(self) -> bool:
        return True

    def projected(self, params: dict, config: ModelConfig, encoded: Encoded) -> Encoded:
        """`encoded` itself, which holds keys and values from the first."""
        return encoded

    def check(self, config: ModelConfig) -> None:
        kind = self.get_choice_name(type(self))
        whole_number("model.memory.chunk", self.chunk, 1, "the papers take 1024 or more")
        if self.chunk >= config.max_length:
            raise InputError(
                f"model.memory.chunk={self.chunk} leaves no room for what is kept of earlier"
                f" windows in the {config.max_length} tokens that the model was trained to read;"
                f" set it to {config.max_length // 2} or less"
            )
        if config.block != "sequential" or config.position != "rope":
            raise InputError(
                f"model.memory.type={kind} moves keys that are not rotated yet, and this model has"
                f" block={config.block}, position={config.position}; choose a Llama-like decoder"
            )
        if config.rope.depends_on_length or config.rope.learned:
            raise InputError(
                f"model.memory.type={kind} reads a text of any length in one place, and rope type"
                f" {config.rope.type} follows the length; choose default, linear, ntk or yarn"
            )
        if not isinstance(config.pattern, Causal):
            raise InputError(
                f"model.memory.type={kind} stands before the text of a model that sees all of it,"
                f" and model.pattern is {config.pattern!r}; leave model.pattern out"
            )

    def encoder(self, config: ModelConfig, mesh: jax.sharding.Mesh | None) -> nn.Module:
        return Windows(config, mesh)


@dataclasses.dataclass(frozen=True)
class Reader:
    """The decoder behind what has been kept of the windows before; nothing is, if None."""

    model: Decoder
    params: dict
    rotation: Rotation
    before: Encoded | None
    at: jax.Array | None = None  # int32 [B, P]: of these tokens hidden states are wanted

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """[B, T, D] of tokens [B, T]."""
        return self.model.apply({"params": self.params}, tokens, method="embedded")

    def __call__(self, x: jax.Array, positions: jax.Array, there: jax.Array, **options: Any):
        """`Decoder.__call__` of hidden states [B, T, D] at `positions` from 0, padding apart."""
        return self.model.apply(
            {"params": self.params},
            x,
            positions=positions,
            segments=there.astype(jnp.int32),
            rotation=self.rotation,
            memory=self.before,
            **options,
        )

    def kept(self, there: jax.Array, layers: Any, hidden: jax.Array) -> Encoded:
        """What was kept [B, R, K, H] of the layers of tokens of which `there` [B, R] are there.

        `hidden` [B, P, D] are the states of the window's own tokens.
        """
        config, mesh = self.model.config, self.model.mesh
        each = apart(layers, config.num_layers) if config.stacked else layers
        layers = tuple(
            tuple(cache_lib.keep_layout(part.swapaxes(1, 2), mesh) for part in pair)
            for pair in each
        )
        if self.at is None:
            return Encoded(there, layers=layers)
        hidden = jnp.take_along_axis(hidden, self.at[..., None], axis=1)
        return Encoded(there, layers=layers, hidden=hidden[:, None])


def all_of(count: int, rows: int, start: int = 0) -> CollectKeyValues:
    """Of `rows` rows, the tokens from `start` on, as they are projected."""
    index = jnp.broadcast_to(start + jnp.arange(count, dtype=jnp.int32), (rows, count))
    return CollectKeyValues(index, None)


class Windows(nn.Module):
    """The decoder over one window after the other."""

    config: ModelConfig  # of the decoder, its memory included
    mesh: jax.sharding.Mesh | None = None

    @nn.compact
    def __call__(
        self,
        chunks: jax.Array,
        mask: jax.Array,
        *,
        params: dict | None,
        rotation: Rotation | None = None,
        after: Encoded | None = None,
        key: jax.Array | None = None,
        hidden: bool = False,
    ) -> Encoded | None:
        """What is kept of windows int32 [B, C, P], with `mask` true where there is text.

        Args:
          params: of the decoder; None while they are made.
          rotation: that of the text; None: that of `config.rope`, which follows no length.
          after: what has been kept of windows before these, of which nothing is returned.
          key: of training, for what is drawn.
          hidden: whether `Encoded.hidden` is wanted, which the windows are learned by.
        """
        c, memory = self.config, self.config.memory
        dtype, shape = jnp.dtype(c.param_dtype), (memory.tokens, c.width)
        embedding = self.param("embedding", nn.initializers.normal(0.02), shape, dtype)
        if self.is_initializing():
            return None
        check_chunks(chunks, mask, memory.max_chunk_size)
        if self.mesh is not None and self.mesh.shape[LENGTH] > 1:
            raise InputError(
                f"mesh.context={self.mesh.shape[LENGTH]}: windows of model.memory are read one"
                " after the other, each on the devices of its rows; set mesh.context=1"
            )
        if rotation is None:
            rotation = c.rope.rotation(c.rotary_dim, chunks.shape[2])
        model = Decoder(c, self.mesh, parent=None)

        def window(before, tokens, there, key):
            tokens, length = gathered(tokens, there)
            # Text stands at the end, next to what is put behind it.
            missing = tokens.shape[1] - length[:, None]
            place = jnp.arange(tokens.shape[1]) - missing
            # Where the tokens of the chunk have come to stand, for what is wanted of each.
            at = jnp.maximum(missing + jnp.cumsum(there, axis=1) - 1, 0) if hidden else None
            tokens = jnp.take_along_axis(tokens, jnp.maximum(place, 0), 1)
            read = Reader(model, params, rotation, before, at)
            return memory.window(read, embedding.astype(c.compute_dtype()), tokens, place >= 0, key)

        return _one_by_one(window, c, chunks, mask, after, key)


def _one_by_one(window, config, chunks, mask, after, key) -> Encoded:
    """`window` of each of the chunks [B, C, P] behind those before, with a key of its own."""
    rows, count, size = chunks.shape
    keys = None if key is None else jax.random.split(key, count)
    if count == 1:
        return window(after, chunks[:, 0], mask[:, 0], None if keys is None else keys[0])
    slots, reach = config.memory.slots(size), config.memory.reach
    kept = _with_room(after, config, rows, count * slots)
    start = kept.mask.shape[1] - count * slots

    def one(kept, part):
        number, tokens, there, key = part
        kept = _detached(kept, number, reach)
        new = window(kept, tokens, there, key)
        put = functools.partial(_put, at=start + number * slots)
        return jax.tree.map(put, kept, dataclasses.replace(new, hidden=None)), new.hidden

    parts = jnp.arange(count), chunks.swapaxes(0, 1), mask.swapaxes(0, 1), keys
    kept, hidden = jax.lax.scan(one, kept, parts)  # hidden [C, B, 1, P, D]
    if hidden is not None:
        hidden = hidden[:, :, 0].swapaxes(0, 1)
    kept = jax.tree.map(lambda x: jax.lax.slice_in_dim(x, start, None, axis=token_axis(x)), kept)
    return dataclasses.replace(_detached(kept, count, reach), hidden=hidden)


def _detached(kept: Encoded, number: int | jax.Array, reach: int | None) -> Encoded:
    """What window `number` reads, through which no gradient flows if it begins a new `reach`."""
    if reach is None:
        return kept
    stop = number % reach == 0
    return jax.tree.map(lambda x: jnp.where(stop, jax.lax.stop_gradient(x), x), kept)


def _put(old: jax.Array, new: jax.Array, *, at: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(old, new, at, token_axis(old))


def _with_room(after: Encoded | None, config: ModelConfig, rows: int, room: int) -> Encoded:
    """`after`, or nothing, and `room` for as many tokens behind it."""
    pair = (jnp.zeros((rows, config.num_kv_heads, room, config.head_dim), config.compute_dtype()),)
    empty = Encoded(jnp.zeros((rows, room), bool), layers=(pair * 2,) * config.num_layers)
    if after is None:
        return empty
    return jax.tree.map(lambda old, x: jnp.concatenate([old, x], token_axis(x)), after, empty)
