"""Keys in two parts: near ones at their own distance, far ones all at one (a distance ceiling)."""

from __future__ import annotations

import jax.numpy as jnp

from lcjax.attention.base import Pass, Places
from pallas_kernels import Mask, causal, window


def near_and_far(places: Places, size: int, distance: int, far: Mask) -> list[Pass]:
    """The last `size` keys at their own distance, older ones of `far` all at `distance`."""
    far = causal() & ~window(size) & far
    near = Pass(places.q_positions, places.k_positions, causal() & window(size))
    return [near, at_distance(places, distance, far)]


def at_distance(places: Places, distance: int, mask: Mask) -> Pass:
    """The keys of `mask`, all of them at `distance`."""
    ceiling = jnp.full_like(places.q_positions, distance)
    return Pass(ceiling, jnp.zeros_like(places.k_positions), mask, together=True)
