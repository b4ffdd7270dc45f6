"""How a layer stores the keys and values that it keeps: exact, or as codes of fewer bits.

A `Storage` turns the keys and values of new tokens into arrays, and arrays of slots into what
attention reads. Codes of one token need no other token, so they are made when a token is written,
and every query reads them, also one of the same call: results do not depend on how a text is
divided into calls. For attention, `pallas_kernels` turns codes into floats one block of slots at a
time, so there is no dequantised cache. Policies that score keys decode all slots of a layer at a
cut, and those that add up attention at every step. `lcjax.attention.kivi` has a storage whose codes
need other tokens.
"""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import draccus
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lcjax.errors import InputError, NonNegativeInt, Range, check_fields
from pallas_kernels import Floats, Quantised, Scaled

Arrays = dict[str, jax.Array]  # of one layer, each [B, heads, _, _]
_LEAST_SCALE = 1e-6


class LayerShape(NamedTuple):
    """The sizes of a layer that its cache depends on."""

    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype  # of keys and values


@dataclass(frozen=True)
class Storage(draccus.ChoiceRegistry, abc.ABC):
    """How keys and values are stored: the section `model.cache.storage`."""

    examples: ClassVar[tuple[dict, ...]] = ({},)
    is_exact: ClassVar[bool] = False  # whether what is read is what was written
    # Whether each token is coded on its own. Then a token can leave, or move to another slot.
    codes_tokens: ClassVar[bool] = True
    names: ClassVar[tuple[str, ...]] = ("keys", "values")  # of `arrays`
    differs_by_layer: ClassVar[bool] = False  # whether `for_layer` depends on the layer

    def __post_init__(self):
        check_fields("model.cache.storage", self)

    def for_layer(self, layer: int, num_layers: int) -> Storage:
        """Returns the storage of one of `num_layers` layers."""
        return self

    def layer_cache(self, needed: Any) -> Any:
        """Returns the `lcjax.attention.cache.FullCache` that a pattern needs, with this storage."""
        return replace(needed, storage=self)

    @abc.abstractmethod
    def arrays(self, layer: LayerShape, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of the arrays of a row, each [K, S, _], by name."""

    @abc.abstractmethod
    def encode(self, k: Float[Array, "... H"], v: Float[Array, "... H"]) -> Arrays:
        """Returns arrays [..., _] by name for rotated keys, and values."""

    @abc.abstractmethod
    def read(self, arrays: Arrays) -> tuple[Any, Any]:
        """Returns keys and values of arrays [B, K, S, _], with shapes [B, K, S, H].

        They are arrays, or codes that `pallas_kernels.decode` reads.
        """

    @abc.abstractmethod
    def decode(self, arrays: Arrays) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
        """Returns keys and values as arrays, for policies that score them."""


@Storage.register_subclass("exact")
@dataclass(frozen=True)
class Exact(Storage):
    """Keys and values as they are, in the compute dtype."""

    is_exact: ClassVar[bool] = True

    def arrays(self, layer, slots):
        pair = jax.ShapeDtypeStruct((layer.num_kv_heads, slots, layer.head_dim), layer.dtype)
        return {"keys": pair, "values": pair}

    def encode(self, k, v):
        return {"keys": k, "values": v}

    def read(self, arrays):
        return arrays["keys"], arrays["values"]

    decode = read


@dataclass(frozen=True)
class _Scaled(Storage):
    """Codes of 8 bits, with a float32 scale for each token and head."""

    dtype: ClassVar[str]  # of codes
    largest: ClassVar[float]
    names: ClassVar[tuple[str, ...]] = ("keys", "values", "key_scale", "value_scale")

    def arrays(self, layer, slots):
        codes = jax.ShapeDtypeStruct((layer.num_kv_heads, slots, layer.head_dim), self.dtype)
        scale = jax.ShapeDtypeStruct((layer.num_kv_heads, slots, 1), jnp.float32)
        return dict(zip(self.names, (codes, codes, scale, scale), strict=True))

    def encode(self, k, v):
        (keys, key_scale), (values, value_scale) = self.quantise(k), self.quantise(v)
        return dict(zip(self.names, (keys, values, key_scale, value_scale), strict=True))

    def quantise(
        self, x: Float[Array, "... H"]
    ) -> tuple[Float[Array, "... H"] | Int[Array, "... H"], Float[Array, "... 1"]]:
        """Returns codes, and the scale max(largest |x| / largest code, 1e-6) of each token."""
        x = x.astype(jnp.float32)
        scale = jnp.abs(x).max(-1, keepdims=True) / self.largest
        scale = jnp.maximum(scale, _LEAST_SCALE)
        return self.round(jnp.clip(x / scale, -self.largest, self.largest)), scale

    @abc.abstractmethod
    def round(self, x: Float[Array, "... H"]) -> Array:
        """Rounds numbers of at most `largest` to codes; of two as near ones to the even code."""

    def read(self, arrays):
        keys = Scaled(arrays["keys"], arrays["key_scale"])
        return keys, Scaled(arrays["values"], arrays["value_scale"])

    def decode(self, arrays):
        return tuple(x.codes.astype(jnp.float32) * x.scale for x in self.read(arrays))


@Storage.register_subclass("int8")
@dataclass(frozen=True)
class Int8(_Scaled):
    """int8 codes with a scale for each token and head, as in vLLM."""

    dtype: ClassVar[str] = "int8"
    largest: ClassVar[float] = 127.0

    def round(self, x):
        return jnp.round(x).astype(jnp.int8)


@Storage.register_subclass("fp8")
@dataclass(frozen=True)
class Fp8(_Scaled):
    """float8 codes (e4m3) with a scale for each token and head, as in vLLM."""

    dtype: ClassVar[str] = "float8_e4m3fn"
    largest: ClassVar[float] = 448.0

    def round(self, x):
        return x.astype(jnp.float8_e4m3fn)  # clipped before, because an overflow would be NaN


# Codes of 2, 3 and 4 bits

# The Lloyd-Max centroids above 0 of a normal distribution, which is symmetric.
_CENTROIDS = {
    2: (0.45278, 1.51042),
    3: (0.24509418, 0.75600529, 1.34390926, 2.15194559),
    4: (
        0.12839504, 0.38804829, 0.65675914, 0.94234043, 1.25623119, 1.6180464, 2.06901717,
        2.73258948,
    ),
}  # fmt: skip
_PLANES = {2: (2,), 3: (2, 1), 4: (4,)}  # bits of the parts of a code, which fill whole words


def num_words(size: int, bits: int) -> int:
    """Returns how many 32-bit words `pack` needs for `size` codes."""
    return sum(-(-size * plane // 32) for plane in _PLANES[bits])


def pack(codes: Int[Array, "... H"], bits: int) -> Int[Array, "... W"]:
    """Packs codes of `bits` bits into int32 words, the first code into the lowest bits.

    Codes of 3 bits are two planes, of their 2 lower bits and of their upper bit.
    """
    words, codes = [], codes.astype(jnp.uint32)
    for plane in _PLANES[bits]:
        count = 32 // plane
        padded = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % count)])
        parts = (padded & (2**plane - 1)).reshape(*codes.shape[:-1], -1, count)
        shifts = plane * jnp.arange(count, dtype=jnp.uint32)
        words.append((parts << shifts).sum(-1, dtype=jnp.uint32))
        codes = codes >> plane
    return jax.lax.bitcast_convert_type(jnp.concatenate(words, -1), jnp.int32)


def unpack(words: Int[Array, "... W"], bits: int, size: int) -> Int[Array, "... H"]:
    """Returns the int32 codes of `pack`, `size` of them."""
    codes, first, lower = 0, 0, 0
    for plane in _PLANES[bits]:
        count = 32 // plane
        part = words[..., first : first + -(-size // count)]
        first, shifts = first + part.shape[-1], plane * jnp.arange(count, dtype=jnp.int32)
        part = (part[..., None] >> shifts) & (2**plane - 1)  # the mask hides copies of the sign
        part = part.reshape(*part.shape[:-2], -1)[..., :size]
        codes, lower = codes + (part << lower), lower + plane
    return codes


def affine(
    x: Float[Array, ...], bits: int, axis: int
) -> tuple[Int[Array, ...], Float[Array, ...], Float[Array, ...]]:
    """Returns (x - min) / scale, scale = (max - min) / (2^bits - 1), and min along an axis.

    All are float32; the scale of equal numbers is 0, and their quotient too.
    """
    x = x.astype(jnp.float32)
    least = x.min(axis, keepdims=True)
    scale = (x.max(axis, keepdims=True) - least) / (2**bits - 1)
    return (x - least) / jnp.where(scale > 0, scale, 1.0), scale, least


@functools.cache
def _hadamard(size: int) -> np.ndarray:
    """Returns Sylvester's Hadamard matrix [H, H], of 1 and -1."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def spread(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    """Multiplies by the Hadamard matrix over the root of H, a rotation that is its own inverse."""
    size = x.shape[-1]
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    matrix = jnp.asarray(_hadamard(size), x.dtype)
    y = jnp.matmul(x, matrix, precision=precision, preferred_element_type=jnp.float32)
    return (y * size**-0.5).astype(x.dtype)


class _Packed(Quantised):
    """Codes of `size` channels in words (`pack`)."""

    words: Int[Array, "B S K W"]
    size: int

    @property
    def shape(self):
        return (*self.words.shape[:-1], self.size)

    @property
    def dtype(self):
        return self.words.dtype


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _CodebookKeys(_Packed):
    """Keys after `spread`, whose channels are centroids, and whose norm is stored."""

    words: Int[Array, "B S K W"]
    norm: Float[Array, "B S K 1"]
    bits: int = field(metadata={"static": True})
    size: int = field(metadata={"static": True})
    corrects_norm: bool = field(metadata={"static": True})

    def queries(self, q):
        return spread(q)

    def read(self, dtype):
        codes = unpack(self.words, self.bits, self.size)
        half = 2 ** (self.bits - 1)
        place = jnp.where(codes >= half, codes - half, half - 1 - codes)
        centroids = [x * self.size**-0.5 for x in _CENTROIDS[self.bits]]
        x = jnp.full(place.shape, centroids[0], jnp.float32)
        for number, centroid in enumerate(centroids[1:], 1):  # XLA for TPUs is slow in look-ups
            x = jnp.where(place == number, centroid, x)
        norm = self.norm[..., 0].astype(jnp.float32)
        if self.corrects_norm:
            norm = norm / jnp.sqrt((x * x).sum(-1))
        return Floats(jnp.where(codes >= half, x, -x).astype(dtype), norm)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AffineValues(_Packed):
    """Values as scale x code + min, with a scale and a min for each of C groups of channels."""

    words: Int[Array, "B S K W"]
    scale: Float[Array, "B S K C"]
    least: Float[Array, "B S K C"]
    bits: int = field(metadata={"static": True})
    size: int = field(metadata={"static": True})

    def read(self, dtype):
        codes = unpack(self.words, self.bits, self.size).astype(jnp.float32)
        groups = codes.reshape(*self.scale.shape, -1)
        scale, least = (x[..., None].astype(jnp.float32) for x in (self.scale, self.least))
        return Floats((groups * scale + least).astype(dtype).reshape(codes.shape))


@Storage.register_subclass("turboquant")
@dataclass(frozen=True)
class TurboQuant(Storage):
    """Keys by a codebook after a random-like rotation (TurboQuant, arXiv 2504.19874), as in vLLM.

    A key is divided by its norm and multiplied by a Hadamard matrix, after which its channels are
    nearly normal; each is stored as the nearest Lloyd-Max centroid, and the norm in float16. Values
    have a scale and a min in float16. Without the paper's correction of inner products (QJL), as in
    vLLM.
    """

    examples: ClassVar[tuple[dict, ...]] = ({"exact_layers": 0},)
    names: ClassVar[tuple[str, ...]] = ("keys", "values", "key_norm", "value_scale", "value_min")
    key_bits: Annotated[int, Range(2, 4)] = 4
    value_bits: Annotated[int, Range(2, 4)] = 4
    # Whether the vector of centroids is scaled to norm 1 when it is read ("nc" in vLLM)
    corrects_norm: bool = True
    exact_layers: NonNegativeInt = 2  # first layers, and as many last ones, that stay exact

    @property
    def differs_by_layer(self) -> bool:
        return self.exact_layers > 0

    def for_layer(self, layer, num_layers):
        is_inner = self.exact_layers <= layer < num_layers - self.exact_layers
        return self if is_inner else Exact()

    def arrays(self, layer, slots):
        size = layer.head_dim
        if size & (size - 1) or size < 32:
            raise InputError(
                "model.cache.storage.type=turboquant multiplies keys by a Hadamard matrix, whose"
                f" size is a power of two, and packs 32 channels; head_dim={size} must be 32, 64,"
                " 128, ...; use int8 or fp8"
            )

        def array(width, dtype):
            return jax.ShapeDtypeStruct((layer.num_kv_heads, slots, width), dtype)

        number = array(1, jnp.float16)
        widths = (num_words(size, bits) for bits in (self.key_bits, self.value_bits))
        words = (array(width, jnp.int32) for width in widths)
        return dict(zip(self.names, (*words, number, number, number), strict=True))

    def encode(self, k, v):
        k, size = k.astype(jnp.float32), k.shape[-1]
        norm = jnp.linalg.norm(k, axis=-1, keepdims=True)
        above = np.array(_CENTROIDS[self.key_bits]) * size**-0.5
        centroids = np.concatenate([-above[::-1], above])
        bounds = jnp.asarray((centroids[1:] + centroids[:-1]) / 2, jnp.float32)
        y = spread(k / (norm + 1e-8))
        codes = sum((y >= bound).astype(jnp.int32) for bound in bounds)
        quotient, scale, least = affine(v, self.value_bits, -1)
        # Ties go up, as in vLLM.
        values = jnp.clip(jnp.floor(quotient + 0.5), 0, 2**self.value_bits - 1).astype(jnp.int32)
        words = pack(codes, self.key_bits), pack(values, self.value_bits)
        numbers = (x.astype(jnp.float16) for x in (norm, scale, least))
        return dict(zip(self.names, (*words, *numbers), strict=True))

    def read(self, arrays):
        size = arrays["values"].shape[-1] * 32 // self.value_bits
        keys = _CodebookKeys(
            arrays["keys"], arrays["key_norm"], self.key_bits, size, self.corrects_norm
        )
        scale = arrays["value_scale"], arrays["value_min"]
        return keys, AffineValues(arrays["values"], *scale, self.value_bits, size)

    def decode(self, arrays):
        keys, values = (x.read(jnp.dtype("float32")) for x in self.read(arrays))
        return spread(keys.values * keys.scale[..., None]), values.values
