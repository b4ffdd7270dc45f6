"""Rotary position methods: one registered dataclass per method, pure functions, no hidden state."""

from lcjax.rope.base import Rope, Rotation, rotate
from lcjax.rope.default import Default
from lcjax.rope.linear import Linear
from lcjax.rope.ntk import NTK
from lcjax.rope.yarn import Yarn

__all__ = ["NTK", "Default", "Linear", "Rope", "Rotation", "Yarn", "rotate"]
