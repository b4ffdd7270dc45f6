"""Methods that sample the positions of training rows.

Each method maps document-relative positions [B, T] to new positions and a rotation. It is a pure
function of its random key: the same key gives the same positions on any number of devices.
"""

import abc
from dataclasses import dataclass
from typing import Annotated, ClassVar

import draccus
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from lcjax.errors import InputError, PositiveInt, Range, check_fields
from lcjax.rope.base import Rope
from lcjax.rope.clex import Clex
from lcjax.rope.default import Default
from lcjax.rope.e2_llm import E2LLM
from lcjax.rope.linear import Linear
from lcjax.rope.rotation import Rotation

_NUM_WITHOUT_OFFSET = 4  # E2-LLM: first tokens of a document without an offset (sec. 4.2.2)


@dataclass(frozen=True, kw_only=True)
class Positions(draccus.ChoiceRegistry, abc.ABC):
    """A method of choosing training positions: the `train.positions` config section."""

    fits_any_rope: ClassVar[bool] = False  # whether it works with every RoPE method

    def __post_init__(self):
        check_fields("positions", self)

    @classmethod
    def default_choice_name(cls) -> str:
        return "plain"

    @abc.abstractmethod
    def sample(
        self,
        key: Array,
        positions: Int[Array, "B T"],
        *,
        rope: Rope,
        head_dim: int,
        params: dict | None = None,
    ) -> tuple[Num[Array, "B T"], Rotation]:
        """Samples the positions and the rotation of a batch.

        Args:
          key: random key of the step.
          positions: document-relative positions.
          rope: RoPE method of the model.
          head_dim: rotary channels.
          params: learned arrays of the rope.

        Raises:
          InputError: the method does not support the rope or the length of the rows.
        """


@Positions.register_subclass("plain")
@dataclass(frozen=True, kw_only=True)
class PlainPositions(Positions):
    """Unchanged positions, with the rope's rotation for rows of T tokens."""

    fits_any_rope: ClassVar[bool] = True

    def sample(self, key, positions, *, rope, head_dim, params=None):
        del key
        return positions, rope.rotation(head_dim, positions.shape[1], params)


@Positions.register_subclass("bf16")
@dataclass(frozen=True, kw_only=True)
class Bf16Positions(Positions):
    """Positions rounded to bfloat16: reproduces an artefact of published training runs.

    DeepSpeed's ZeRO-3 converts the float32 array of `torch.arange` to bfloat16, which has 8
    significant bits. So tokens from 256 on share positions, and only 1,153 of 32,768 positions are
    distinct. LCEG (arXiv 2409.12181) seems to have trained PI, YaRN and LongLoRA with such
    positions, NTK and CLEX without, and evaluated all of them without. This class serves to measure
    how much of LCEG's ranking this explains. Evaluation uses exact positions here, too. The angles,
    which PI's code rounds again, stay float32.
    """

    fits_any_rope: ClassVar[bool] = True
    frequencies: bool = True  # also round frequencies: true for PI and LongLoRA, false for YaRN
    # Significant bits; fewer bits affect short rows as bfloat16 affects long rows
    bits: Annotated[int, Range(1, 24, hint="bfloat16 has 8, float32 24 significant bits")] = 8

    def sample(self, key, positions, *, rope, head_dim, params=None):
        del key
        rotation = rope.rotation(head_dim, positions.shape[1], params)
        if self.frequencies:
            rotation = rotation._replace(inv_freq=self._rounded(rotation.inv_freq))
        return self._rounded(positions.astype(jnp.float32)), rotation

    def _rounded(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Rounds to the nearest numbers with `bits` significant bits, ties to even, in float32."""
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=self.bits - 1)


@Positions.register_subclass("e2_llm")
@dataclass(frozen=True, kw_only=True)
class E2Positions(Positions):
    """Scales g ~ U{min_scale..max_scale}, offsets t ~ U{0..max(0, gL - R)} (arXiv 2401.06951).

    Token m has position m/g for m < 4 and (m + t)/g otherwise, so that windows of R tokens cover
    [0, L) at every density. The paper draws g and t per step in its formulas, and per sample in its
    text; here every row draws them, which includes both (sec. 4.2). The frequencies stay plain.

    The ablations of table 4 are a fixed g ("without g": rows of 8K with min_scale = max_scale = 2,
    also read at 8K), and `offsets: false` ("without t").
    """

    min_scale: PositiveInt = 1
    max_scale: PositiveInt = 20  # G_max (sec. 5.4)
    offsets: bool = True  # false: t = 0
    window: PositiveInt | None = None  # R, tokens that a training row spans; null: the row's length
    original_length: PositiveInt | None = None  # L; null: the rope's

    def __post_init__(self):
        super().__post_init__()
        if self.min_scale > self.max_scale:
            raise InputError(
                f"positions.min_scale={self.min_scale} (e2_llm) must not exceed"
                f" max_scale={self.max_scale}"
            )

    def sample(self, key, positions, *, rope, head_dim, params=None):
        if not isinstance(rope, (E2LLM, Default, Linear)):
            raise InputError(
                f"positions.type=e2_llm trains plain frequencies, but rope.type={rope.type}; set "
                "rope.type=e2_llm"
            )
        original = self.original_length or getattr(rope, "original_length", None)
        if original is None:
            raise InputError(
                "positions.original_length=None (e2_llm) is not known: set it to the trained "
                "length, or use rope.type=e2_llm"
            )
        rows, length = positions.shape
        scale_key, offset_key = jax.random.split(key)
        scale = jax.random.randint(scale_key, (rows,), self.min_scale, self.max_scale + 1)
        max_offset = self.offsets * e2_max_offset(scale, original, self.window or length)
        offset = jax.random.randint(offset_key, (rows,), 0, max_offset + 1)
        rotation = Default(theta=rope.get_resolved("theta")).rotation(head_dim, length)
        return e2_positions(positions, scale, offset), rotation


def e2_max_offset(scale: Int[Array, " B"], original: int, window: int) -> Int[Array, " B"]:
    """Returns t_max = max(0, g L - R); the window then ends at the end of the interpolated range.

    Args:
      scale: g.
      original: trained length L.
      window: tokens R of a training row.
    """
    return jnp.maximum(0, scale * original - window)


def e2_positions(
    positions: Int[Array, "B T"], scale: Int[Array, " B"], offset: Int[Array, " B"]
) -> Float[Array, "B T"]:
    """Returns m / g for the first four tokens m of a document, and (m + t) / g for the others."""
    shifted = positions + jnp.where(positions < _NUM_WITHOUT_OFFSET, 0, offset[:, None])
    return shifted.astype(jnp.float32) / scale[:, None].astype(jnp.float32)


@Positions.register_subclass("clex")
@dataclass(frozen=True, kw_only=True)
class ClexPositions(Positions):
    """One length factor t ~ U{min_factor..max_factor} per step, and T sorted positions below T t.

    This is the training of CLEX's code; the paper draws t from an interval. Rows of T tokens thus
    have the distances of a longer context. All rows of a batch share t and the positions, and
    document-relative token m has the m-th position. Training does not scale queries (`log_scale`).
    """

    min_factor: PositiveInt = 1  # 2 in early checkpoints
    max_factor: PositiveInt | None = None  # null: that of the rope

    def sample(self, key, positions, *, rope, head_dim, params=None):
        if not isinstance(rope, Clex):
            raise InputError(
                f"positions.type=clex needs rope.type=clex, but rope.type={rope.type}; change one"
            )
        largest = self.max_factor or rope.max_factor
        if not self.min_factor <= largest <= rope.max_factor:
            raise InputError(
                f"positions.max_factor={largest} (clex) must be between min_factor="
                f"{self.min_factor} and rope.max_factor={rope.max_factor}"
            )
        length = positions.shape[1]
        if length < 3:
            raise InputError(f"row length={length} must be 3 or more for positions.type=clex")
        factor_key, draw_key = jax.random.split(key)
        factor = jax.random.randint(factor_key, (), self.min_factor, largest + 1)
        draws = _draw_sorted(draw_key, length - 2, length * factor - 2, length * largest - 2)
        row = clex_positions(draws, length, factor, rope.get_resolved("original_length"))
        params = rope.check_params(params, rope.check_head_dim(head_dim))
        return row[positions], Rotation(rope.frequencies_at(params, factor))


def clex_positions(
    draws: Int[Array, " T-2"], length: int, factor: Int[Array, ""], original: int
) -> Float[Array, " T"]:
    """Returns the positions 0, (r_i + 1) / s and n t // s - 1, where s = max(1, n // P).

    For s > 2 the last position can be below its neighbour, as in the published code.

    Args:
      draws: sorted integers r_i.
      length: tokens n of a row.
      factor: length factor t.
      original: trained length P.
    """
    scale = max(1, length // original)
    last = (length * factor) // scale - 1
    inner = (draws + 1).astype(jnp.float32) / scale
    return jnp.concatenate([jnp.zeros(1), inner, jnp.asarray(last, jnp.float32)[None]])


def _draw_sorted(key: Array, count: int, below: Array, bound: int) -> Int[Array, " count"]:
    """Draws `count` distinct integers from 0..below-1 uniformly, in ascending order.

    Args:
      key: random key.
      count: integers to draw.
      below: exclusive upper limit, traced.
      bound: static upper limit of `below`.
    """
    rank = jax.random.bits(key, (bound,), jnp.uint32)
    rank = jnp.where(jnp.arange(bound) < below, rank, jnp.uint32(2**32 - 1))
    # A stable sort puts a valid integer before the masked ones even if their ranks are equal.
    return jnp.sort(jnp.argsort(rank, stable=True)[:count])
