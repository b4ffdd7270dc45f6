"""KIVI: keys in few bits by channel, values by token, and the last tokens exact."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lcjax.attention.base import AttentionMetadata, Pattern, partial_attention
from lcjax.attention.cache import Arrays, LayerCache, LayerShape, View
from lcjax.attention.cache_storage import AffineValues, Storage, affine, num_words, pack, unpack
from lcjax.errors import InputError, PositiveInt, Range
from pallas_kernels import Floats, Quantised, swap_heads


@Storage.register_subclass("kivi")
@dataclass(frozen=True)
class Kivi(Storage):
    """Codes of 2 to 4 bits (KIVI, Liu et al. 2024, arXiv 2402.02750), as in its authors' code.

    Keys have a scale and a min for each channel of `group` tokens, and values for each token and
    `group` channels, in the compute dtype. The last tokens are exact: the values of the last
    `residual` tokens, and the keys since the last multiple of `residual`. Tokens that are read in
    one call see each other's exact keys and values, so results depend on the calls. Layers with a
    window keep a ring of exact keys and values.
    """

    examples: ClassVar[tuple[dict, ...]] = ({"residual": 32},)
    codes_tokens: ClassVar[bool] = False
    bits: Annotated[int, Range(2, 4)] = 2
    group: PositiveInt = 32
    residual: PositiveInt = 128  # R in the paper

    def __post_init__(self):
        super().__post_init__()
        if self.group % 32 or self.residual % self.group:
            raise InputError(
                f"model.cache.storage.group={self.group} must be a multiple of 32 that divides"
                f" residual={self.residual}; the authors' is 32"
            )

    def layer_cache(self, needed):
        return KiviCache(self) if needed.keeps_all else needed

    def arrays(self, layer, slots):
        size, groups = layer.head_dim, -(-slots // self.group)
        if size % self.group:
            raise InputError(
                f"model.cache.storage.group={self.group} must divide head_dim={size}, as values"
                " have a scale for each group of channels; use int8 or fp8"
            )

        def array(length, width, dtype=layer.dtype):
            return jax.ShapeDtypeStruct((layer.num_kv_heads, length, width), dtype)

        keys = array(groups, size)
        values = array(groups * self.group, size // self.group)
        return {
            "keys": array(groups * num_words(self.group, self.bits), size, jnp.int32),
            "key_scale": keys,
            "key_min": keys,
            "values": array(groups * self.group, num_words(size, self.bits), jnp.int32),
            "value_scale": values,
            "value_min": values,
        }

    def encode(self, k, v):
        """Returns arrays of keys and values [..., S, H]; whole groups of tokens."""
        return self.encode_keys(k) | self.encode_values(v)

    def encode_keys(self, k: Float[Array, "... S H"]) -> Arrays:
        groups = k.reshape(*k.shape[:-2], -1, self.group, k.shape[-1])
        quotient, scale, least = affine(groups, self.bits, -2)
        words = pack(jnp.round(quotient).astype(jnp.int32).swapaxes(-1, -2), self.bits)
        words = words.swapaxes(-1, -2).reshape(*k.shape[:-2], -1, k.shape[-1])
        numbers = (x.squeeze(-2).astype(k.dtype) for x in (scale, least))
        return dict(zip(("keys", "key_scale", "key_min"), (words, *numbers), strict=True))

    def encode_values(self, v: Float[Array, "... S H"]) -> Arrays:
        groups = v.reshape(*v.shape[:-1], -1, self.group)
        quotient, scale, least = affine(groups, self.bits, -1)
        words = pack(jnp.round(quotient).astype(jnp.int32).reshape(v.shape), self.bits)
        numbers = (x.squeeze(-1).astype(v.dtype) for x in (scale, least))
        return dict(zip(("values", "value_scale", "value_min"), (words, *numbers), strict=True))

    def read(self, arrays):
        numbers = arrays["key_scale"], arrays["key_min"]
        keys = _ChannelKeys(arrays["keys"], *numbers, self.bits, self.group)
        numbers, size = (arrays["value_scale"], arrays["value_min"]), arrays["keys"].shape[-1]
        return keys, AffineValues(arrays["values"], *numbers, self.bits, size)

    def decode(self, arrays):
        return tuple(x.read(jnp.dtype("float32")).values for x in self.read(arrays))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _ChannelKeys(Quantised):
    """Keys as scale x code + min, with a scale and a min for each channel of a group of tokens."""

    words: Int[Array, "B W K H"]
    scale: Float[Array, "B C K H"]  # C groups
    least: Float[Array, "B C K H"]
    bits: int = field(metadata={"static": True})
    group: int = field(metadata={"static": True})

    @property
    def slots_per_entry(self):
        return self.group

    @property
    def shape(self):
        rows, groups, heads, size = self.scale.shape
        return rows, groups * self.group, heads, size

    @property
    def dtype(self):
        return self.words.dtype

    def read(self, dtype):
        *lead, groups, size = self.scale.shape
        words = self.words.reshape(*lead, groups, -1, size).swapaxes(-1, -2)
        codes = unpack(words, self.bits, self.group).swapaxes(-1, -2).astype(jnp.float32)
        scale, least = (x[..., None, :].astype(jnp.float32) for x in (self.scale, self.least))
        return Floats((codes * scale + least).astype(dtype).reshape(*lead, -1, size))


@dataclass(frozen=True)
class KiviCache(LayerCache):
    """Codes of all tokens but the last ones, and a ring of the last `residual` tokens.

    The slot of a token is its order index, so groups do not depend on padding. The ring holds keys
    as they are read, so after a group is complete what its codes stand for.
    """

    keeps_all: ClassVar[bool] = False  # the exact tokens before the last ones are gone

    kivi: Kivi

    def fit(self, length, chunk):
        if not self.rotated:
            raise InputError(
                "model.cache.storage.type=kivi keeps codes of rotated keys, and exact=True rotates"
                " keys again while the text grows; leave one of the two out"
            )
        return self, -(-length // self.kivi.residual) * self.kivi.residual

    def num_visible(self, length, tokens):
        return length

    def arrays(self, layer: LayerShape, slots: int):
        shape = layer.num_kv_heads, self.kivi.residual, layer.head_dim
        recent = jax.ShapeDtypeStruct(shape, layer.dtype)
        return self.kivi.arrays(layer, slots) | {"recent_keys": recent, "recent_values": recent}

    def shared(self, rows, slots):
        return ()

    def reserve(self, slots, new, filled):
        return View(slots, new, filled, None, self)

    def attend(self, arrays, q, k, v, pattern, view, metadata):
        positions = pattern.key_positions(metadata.q_positions, view.new.index)
        k = metadata.rotation.rotate(k, positions)
        recent = _Recent(arrays, k, v, view, self.kivi.residual)
        metadata = metadata.replace(
            row_indices=None, keys_rotated=True, k_index=None, num_heads=q.shape[2]
        )
        codes = self._attend_to_codes(arrays, q, pattern, recent, metadata)
        index, is_token = recent.index
        metadata = metadata.replace(
            k_index=index,
            k_positions=index,
            k_segments=is_token,
            extra_partials=[*metadata.extra_partials, *codes],
        )
        out = pattern.attend(q, recent.all("keys"), recent.all("values"), metadata)
        return out, arrays | self._update(arrays, recent)

    def _attend_to_codes(
        self, arrays: Arrays, q, pattern: Pattern, recent: _Recent, metadata: AttentionMetadata
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Returns partial attentions to the tokens before the ring, whose values are codes, too."""
        keys, values = jax.tree.map(swap_heads, self.kivi.read(arrays))
        order = jnp.arange(keys.shape[1])[None]
        is_coded = order < recent.before[:, None] - self.kivi.residual
        metadata = metadata.replace(k_positions=order, k_segments=is_coded.astype(jnp.int32))
        passes = pattern.passes(metadata)
        return [partial_attention(q, keys, values, one, metadata) for one in passes]

    def _update(self, arrays: Arrays, recent: _Recent) -> Arrays:
        """Returns arrays with codes of what is no longer exact, and the ring of the last tokens."""
        kivi, size = self.kivi, self.kivi.residual
        after, num_new = recent.after[:, None], recent.num_new
        # Values that leave the ring
        order = recent.before[:, None] - size + jnp.arange(num_new)
        leaves = (order >= 0) & (order < after - size)
        coded = _write(arrays, kivi.encode_values(recent.of("values", order)), order, leaves)
        # Keys of whole multiples of the ring, from the first one that was not whole yet
        first = recent.before // size * size
        order = first[:, None] + jnp.arange(-(-(size - 1 + num_new) // size) * size)
        keys, is_whole = recent.of("keys", order), order < after // size * size
        new = kivi.encode_keys(keys)
        groups, is_whole_group = order[:, :: kivi.group] // kivi.group, is_whole[:, :: kivi.group]
        for name, x in new.items():
            count = x.shape[2] // groups.shape[1]  # entries of a group
            entries = (groups[..., None] * count + jnp.arange(count)).reshape(len(groups), -1)
            is_written = jnp.repeat(is_whole_group, count, axis=1)
            coded |= _write(arrays, {name: x}, entries, is_written)
        read = _ChannelKeys(*new.values(), kivi.bits, kivi.group).read(keys.dtype).values
        keys = jnp.where(is_whole[:, None, :, None], read, keys)
        last, _ = recent.ring(recent.after)
        place = jnp.clip(last - first[:, None], 0, keys.shape[2] - 1)[:, None, :, None]
        is_old = (last < first[:, None])[:, None, :, None]
        ring = jnp.where(is_old, arrays["recent_keys"], jnp.take_along_axis(keys, place, 2))
        return coded | {"recent_keys": ring, "recent_values": recent.of("values", last)}


class _Recent:
    """The tokens of the ring before a call, and the new ones."""

    def __init__(self, arrays: Arrays, k, v, view: View, size: int):
        """Arranges new keys and values [B, T, K, H] by order index; `size` is that of the ring."""
        is_new = view.new.segments != 0
        self.size, self.num_new = size, k.shape[1]
        self.after = view.new.index[:, -1] + 1  # padding has the index of the token before it
        self.before = self.after - is_new.sum(1)
        columns = jnp.argsort(~is_new, axis=1, stable=True)[:, :, None, None]
        dtype = arrays["recent_keys"].dtype
        self._new = {
            name: jnp.take_along_axis(x, columns, 1).astype(dtype).swapaxes(1, 2)
            for name, x in (("keys", k), ("values", v))
        }
        self._ring = {name: arrays[f"recent_{name}"] for name in self._new}

    def ring(self, tokens: Int[Array, " B"]) -> tuple[Int[Array, "B R"], Int[Array, "B R"]]:
        """Returns the order indices in the ring after `tokens` tokens, and whether they exist."""
        last = tokens[:, None] - 1
        order = last - (last - jnp.arange(self.size)) % self.size
        return order, (order >= 0).astype(jnp.int32)

    @property
    def index(self) -> tuple[Int[Array, "B R+T"], Int[Array, "B R+T"]]:
        """The order indices of the ring and of the new tokens, and whether they exist."""
        ring, new = self.ring(self.before), self.before[:, None] + jnp.arange(self.num_new)
        is_token = (new < self.after[:, None]).astype(jnp.int32)
        return jnp.concatenate([ring[0], new], 1), jnp.concatenate([ring[1], is_token], 1)

    def all(self, name: str) -> Float[Array, "B R+T K H"]:
        """Returns keys or values of the ring and of the new tokens."""
        return swap_heads(jnp.concatenate([self._ring[name], self._new[name]], 2))

    def of(self, name: str, order: Int[Array, "B n"]) -> Float[Array, "B K n H"]:
        """Returns keys or values of tokens; any number for those that are not there."""
        old = order < self.before[:, None]
        place = jnp.where(old, order % self.size, self.size + order - self.before[:, None])
        place = jnp.clip(place, 0, self.size + self.num_new - 1)[:, None, :, None]
        both = jnp.concatenate([self._ring[name], self._new[name]], 2)
        return jnp.take_along_axis(both, place, 2)


def _write(arrays: Arrays, new: Arrays, entries: Int[Array, "B n"], is_written: Array) -> Arrays:
    """Writes entries [B, K, n, W] to arrays [B, K, S, W] where `is_written` [B, n]."""
    rows = jnp.arange(len(entries))[:, None]

    def write(name):
        places = jnp.where(is_written, entries, arrays[name].shape[2])
        values = new[name].swapaxes(1, 2).astype(arrays[name].dtype)
        return arrays[name].at[rows, :, places].set(values, mode="drop")

    return {name: write(name) for name in new}
