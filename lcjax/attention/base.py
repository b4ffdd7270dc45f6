"""What a pattern is: where queries and keys stand, and who sees whom."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import NamedTuple

import draccus
import jax

from lcjax.errors import InputError
from pallas_kernels import Mask


class Pass(NamedTuple):
    """One partial attention: queries and keys rotated to these positions, the keys of `mask`."""

    q_positions: jax.Array  # int or float [B, T]
    k_positions: jax.Array  # int or float [B, S]
    mask: Mask  # over order indices, which keep counting where positions repeat or jump


@dataclass(frozen=True)
class Pattern(draccus.ChoiceRegistry):
    """Which keys a query sees, and at which positions: the `model.pattern` config section.

    A pattern lists passes over disjoint sets of keys. Their results are merged by log-sum-exp, so
    a method says what is seen and from where, never how it is computed.
    """

    def passes(self, q_positions, k_positions) -> list[Pass]:
        """The passes for queries at `q_positions` [B, T] and keys at `k_positions` [B, S]."""
        raise NotImplementedError


def check_at_least(key: str, value: int, least: int) -> None:
    """Refuses anything but an integer of at least `least`."""
    try:
        valid = not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        valid = False
    if not valid:
        raise InputError(f"{key}={value!r} must be an integer of at least {least}")
