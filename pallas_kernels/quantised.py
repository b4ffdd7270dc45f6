"""Keys and values that attention reads as codes: the dequantised cache never exists.

`flash` and `decode` take a `Quantised` in place of k or v. A backend reads the codes of a block of
slots, turns them into a block of floats, and multiplies that. A number that all channels of a slot
share stays outside the product: the scale of a key multiplies a column of logits, and that of a
value multiplies a column of weights.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class Floats(NamedTuple):
    """Slots as floats: `values` [..., S, H], times `scale` [..., S] if it is not None."""

    values: jax.Array
    scale: jax.Array | None = None


class Quantised(abc.ABC):
    """Keys [B, S, K, H] as codes: a pytree of arrays [B, S / n, K, ...], n of `slots_per_entry`.

    A part of these arrays, such as some heads or a block of slots, is again such a pytree. Codes
    have no gradient.
    """

    # Slots that share an entry of an array, at most; blocks of slots are multiples of it
    slots_per_entry: int = 1

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """The shape [B, S, K, H] of the keys that the codes stand for."""

    @property
    @abc.abstractmethod
    def dtype(self) -> jnp.dtype:
        """The dtype of the codes."""

    @abc.abstractmethod
    def read(self, dtype: jnp.dtype) -> Floats:
        """Returns all slots as floats of `dtype`; the arrays are [..., S / n, W] here."""

    def queries(self, q: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Returns the queries by which `read` keys are multiplied, such as rotated ones."""
        return q

    @property
    def ndim(self) -> int:
        return len(self.shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scaled(Quantised):
    """Codes of 8 bits, int8 or float8_e4m3fn, and one scale for each slot and head."""

    codes: Float[Array, "B S K H"] | Any
    scale: Float[Array, "B S K 1"]  # float32

    @property
    def shape(self):
        return self.codes.shape

    @property
    def dtype(self):
        return self.codes.dtype

    def read(self, dtype):
        return Floats(self.codes.astype(dtype), self.scale[..., 0])


def unscaled(k: jax.Array | Quantised, v: jax.Array | Quantised) -> tuple | None:
    """Returns (k, v, scale of k, scale of v) of arrays or `Scaled` codes; None for other codes.

    The scales [B, S, K, 1] of arrays are None.
    """
    pairs = [(x.codes, x.scale) if isinstance(x, Scaled) else (x, None) for x in (k, v)]
    if any(isinstance(x, Quantised) for x, _ in pairs):
        return None
    return *(x for x, _ in pairs), *(scale for _, scale in pairs)


def is_quantised(*arrays: Any) -> bool:
    """Returns whether one of the arrays is given as codes."""
    return any(isinstance(x, Quantised) for x in arrays)


def read_slots(x: jax.Array | Quantised, dtype: jnp.dtype) -> Floats:
    """Returns slots [..., S, H] as floats of `dtype`; arrays keep theirs."""
    return x.read(dtype) if isinstance(x, Quantised) else Floats(x)


def dequantise(x: jax.Array | Quantised, dtype: jnp.dtype) -> Float[Array, "B S K H"]:
    """Returns keys or values as one array, in the basis in which `Quantised.read` has them."""
    if not isinstance(x, Quantised):
        return x
    values, scale = jax.tree.map(swap_heads, x).read(jnp.dtype("float32"))
    values = values if scale is None else values * scale[..., None]
    return swap_heads(values).astype(dtype)


def swap_heads(x: jax.Array) -> jax.Array:
    """[B, S, K, ...] -> [B, K, S, ...], and back."""
    return x.swapaxes(1, 2)
