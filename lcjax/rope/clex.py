"""CLEX (Chen et al. 2023, arXiv 2310.16450): frequencies from a learned differential equation."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lcjax.errors import InputError, Interval, OneOf, PositiveInt, Range, check_arguments
from lcjax.rope.base import Rope, base_frequencies, hf_number
from lcjax.rope.rotation import Rotation

# The published layer always uses this base inside the network, instead of the model's base.
_NETWORK_THETA = 10000.0
_MAX_STEPS = 1_000_000  # max_factor / time_dt; published: 1,600 and 3,200


@Rope.register_subclass("clex")
@dataclass(frozen=True, kw_only=True)
class Clex(Rope):
    """f(t) = exp(z(t)), where t = ceil(n / P) >= 1 is the length factor.

    dz/dt = act((z + ln xi(t)) U) D + d ln xi / dt,  z(1) = ln theta_j, with the NTK frequencies
    xi_j(t) = 10000^(-2j/d) alpha^(-2j/(d-2)), alpha = 2t - 1. If D = 0, its initial value, f(t) is
    NTK of strength 2t - 1. Learned arrays: `up` U [R/2, m R], `down` D [m R, R/2], and `inv_freq`,
    the checkpoint's frequencies at t = 1 (a buffer without gradient).

    The published solver, torchdiffeq's "rk4", is the 3/8 rule with step `time_dt`. Here the term
    d ln xi / dt is integrated in closed form and only the network's term by the rule. The limit is
    the same, without the published code's rounding error of 2e-5 over 3,100 float32 steps.

    The published runs train with one learning rate, 2e-5, and one gradient clip for all parameters.
    A frequency changes every distance, so the gradients of U and D are large: at the start of the
    small study their norm is 55 at t = 2 and 5,100 at t = 8, and that of the model is 1. Clipping
    by the global norm then prevents the model from learning at any t > 1. So do not set
    `train.clip`, and give U and D a separate learning rate (`train.rates`: rule rope) if that of
    the model is larger.
    """

    # P; null: the checkpoint's trained length
    original_length: Annotated[int, Range(2)] | None = None
    max_factor: PositiveInt = 16  # longest input is max_factor * P (LCEG: 32)
    # m, hidden width of the network / rotary channels
    param_factor: Annotated[int, Range(1, 1024)] = 1
    # Old checkpoints that name none used silu
    act: Annotated[str, OneOf(("silu", "tanh"))] = "silu"
    time_dt: Annotated[float, Interval(above=0, most=1, hint="published: 0.01")] = 0.01
    # Multiply queries by ln(n) / ln(P), also for n < P; published code: only in evaluation
    log_scale: bool = False

    # With long steps: a tenth of the published number.
    examples = (
        {"original_length": 16, "max_factor": 8, "time_dt": 0.1},
        {"original_length": 32, "max_factor": 4, "param_factor": 2, "act": "tanh", "time_dt": 0.1,
         "log_scale": True},
    )  # fmt: skip
    depends_on_length = True
    learned = True
    hf_types = ("clex",)

    def __post_init__(self):
        super().__post_init__()
        steps = self.max_factor / self.time_dt
        self.require(steps <= _MAX_STEPS, "time_dt", f"give {_MAX_STEPS:,} steps or fewer")

    @check_arguments
    def init(self, key: Array, head_dim: int) -> dict[str, Array]:
        """Returns U uniform in +-1/sqrt(m R), D = 0, and plain frequencies.

        The range of U is that of torch's kaiming_uniform(a=sqrt 5) for this layout.
        """
        half, hidden = self._shape(head_dim)
        bound = 1 / math.sqrt(hidden)
        theta = base_frequencies(self.get_resolved("theta"), head_dim)
        return {
            "up": jax.random.uniform(key, (half, hidden), jnp.float32, -bound, bound),
            "down": jnp.zeros((hidden, half), jnp.float32),
            "inv_freq": jnp.asarray(theta, jnp.float32),
        }

    def length_factor(self, length: int) -> int:
        """Returns t = ceil(n / P) for a request of n = `length` tokens.

        Raises:
          InputError: t exceeds `max_factor`.
        """
        trained = self.get_resolved("original_length")
        factor = math.ceil(self.check_length(length) / trained)
        if factor > self.max_factor:
            raise InputError(
                f"length={length} must be at most {self.max_factor * trained}: rope clex was made "
                f"for max_factor={self.max_factor} times original_length={trained}; shorten the "
                "input or train with a larger max_factor"
            )
        return factor

    @check_arguments
    def frequencies(
        self, head_dim: int, length: int, params: Mapping[str, Any] | None = None
    ) -> tuple[Float[Array, " R//2"], float]:
        params = self.check_params(params, self.check_head_dim(head_dim))
        factor = self.length_factor(length)
        if factor == 1:
            return jax.lax.stop_gradient(params["inv_freq"].astype(jnp.float32)), 1.0
        return self.table(params)[factor - 1], 1.0

    @check_arguments
    def rotation(
        self, head_dim: int, length: int, params: Mapping[str, Any] | None = None
    ) -> Rotation:
        inv_freq, scale = self.frequencies(head_dim, length, params)
        if not self.log_scale:
            return Rotation(inv_freq, scale)
        trained = self.get_resolved("original_length")
        return Rotation(inv_freq, scale, math.log(length) / math.log(trained))

    @functools.partial(jax.jit, static_argnums=0)
    def table(self, params: dict[str, Array]) -> Float[Array, "max_factor R//2"]:
        """Returns the frequencies of all t = 1 .. max_factor (row t - 1) from one integration."""
        path, times = self._integrate(params, jnp.float32(self.max_factor)), self._grid()
        # torchdiffeq interpolates linearly between grid points; most integer t are grid points.
        factors = np.arange(1, self.max_factor + 1, dtype=np.float64)
        column = factors[:, None].astype(np.float32)
        if len(times) == 1:
            return self._frequencies_from(params, path, column)
        after = np.clip(np.searchsorted(times, factors - 1e-4), 1, len(times) - 1)
        span = times[after] - times[after - 1]
        weight = np.clip((factors - times[after - 1]) / span, 0, 1)[:, None].astype(np.float32)
        learned = path[after - 1] * (1 - weight) + path[after] * weight
        return self._frequencies_from(params, learned, column)

    @functools.partial(jax.jit, static_argnums=0)
    def frequencies_at(
        self, params: dict[str, Array], t: Float[Array, ""]
    ) -> Float[Array, " R//2"]:
        """Returns the frequencies of a traced length factor, differentiable in U and D.

        The grid always has the number of steps for `max_factor`; steps beyond `t` have length 0.

        Args:
          params: learned arrays.
          t: length factor, 1 <= t <= max_factor.
        """
        t = jnp.asarray(t, jnp.float32)
        return self._frequencies_from(params, self._integrate(params, t)[-1], t)

    def _grid(self) -> np.ndarray:
        """Returns the float64 times 1, 1 + dt, ..; the last one is max_factor."""
        steps = math.ceil((self.max_factor - 1) / self.time_dt - 1e-6)
        return np.minimum(1 + self.time_dt * np.arange(steps + 1), self.max_factor)

    def _integrate(self, params: dict[str, Array], end: Array) -> Float[Array, "steps+1 R//2"]:
        """Returns w = z - ln theta - ln(xi(t) / xi(1)) on the grid up to `end`, by the 3/8 rule."""
        up, down = (params[k].astype(jnp.float32) for k in ("up", "down"))
        start = self._log_frequencies(self.get_resolved("theta"), 2 * up.shape[0])
        network = self._log_frequencies(_NETWORK_THETA, 2 * up.shape[0])
        act = jax.nn.silu if self.act == "silu" else jnp.tanh
        full = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

        def slope(t, w):
            drift = self._drift(t, up.shape[0])
            z = w + start + drift
            return full(act(full(z + network + drift, up)), down)

        def step(w, interval):
            t, h = interval[0], interval[1] - interval[0]
            k1 = slope(t, w)
            k2 = slope(t + h / 3, w + h * k1 / 3)
            k3 = slope(t + 2 * h / 3, w + h * (k2 - k1 / 3))
            k4 = slope(t + h, w + h * (k1 - k2 + k3))
            w = w + h * (k1 + 3 * (k2 + k3) + k4) / 8
            return w, w

        times = jnp.minimum(jnp.asarray(self._grid(), jnp.float32), end)
        zero = jnp.zeros(up.shape[0], jnp.float32)
        _, path = jax.lax.scan(step, zero, jnp.stack([times[:-1], times[1:]], -1))
        return jnp.concatenate([zero[None], path])

    def _frequencies_from(self, params: dict[str, Array], learned: Array, t: Array) -> Array:
        """Returns exp(z(t)) for the integrated network term `learned`; at t = 1 `inv_freq`."""
        half = params["up"].shape[0]
        theta = base_frequencies(self.get_resolved("theta"), 2 * half).astype(np.float32)
        stored = jax.lax.stop_gradient(params["inv_freq"].astype(jnp.float32))
        return jnp.where(t <= 1, stored, theta * jnp.exp(learned + self._drift(t, half)))

    @staticmethod
    def _log_frequencies(theta: float, head_dim: int) -> np.ndarray:
        return np.log(base_frequencies(theta, head_dim)).astype(np.float32)

    @staticmethod
    def _drift(t: Array, half: int) -> Array:
        """Returns ln(xi(t) / xi(1)) = -2j/(d-2) ln(2t - 1)."""
        exponent = (np.arange(half) / (half - 1)).astype(np.float32)
        return -exponent * jnp.log(2 * t - 1)

    def _shape(self, head_dim: int) -> tuple[int, int]:
        if head_dim < 4:
            raise InputError(
                f"rotary channels={head_dim} must be at least 4 for rope clex, whose exponents "
                "have d - 2 below; use more channels or rope type linear"
            )
        if self.theta is not None:
            self.check_range(base_frequencies(self.theta, head_dim), 1.0)
        return head_dim // 2, self.param_factor * head_dim

    def check_params(self, params: Mapping[str, Any] | None, head_dim: int) -> dict[str, Array]:
        """Returns the learned arrays; raises an InputError if an array or its shape is wrong."""
        half, hidden = self._shape(head_dim)
        shapes = {"up": (half, hidden), "down": (hidden, half), "inv_freq": (half,)}
        if params is None or set(shapes) - set(params):
            raise InputError(
                f"rope clex needs its learned arrays {', '.join(shapes)}: load a CLEX checkpoint "
                "or start from rope.init(key, head_dim)"
            )
        for name, shape in shapes.items():
            if params[name].shape != shape:
                raise InputError(
                    f"rope.{name} has shape {params[name].shape} but must have {shape} for "
                    f"{head_dim} rotary channels and param_factor={self.param_factor}; set "
                    "param_factor to the checkpoint's"
                )
        return {name: jnp.asarray(params[name]) for name in shapes}

    @property
    def hf_limit(self) -> int | None:
        if self.log_scale:  # it also scales the queries of shorter texts
            return 0
        return self.get_resolved("original_length")

    def hf_rope(self, head_dim: int | None) -> tuple[dict, dict]:
        """Returns plain rope, equal up to `original_length`, because transformers has no CLEX."""
        return {"rope_type": "default", "rope_theta": self.theta}, {}

    @classmethod
    def from_hf_rope(cls, rope: dict, config: dict) -> "Clex":
        return cls(
            theta=rope.get("rope_theta"),
            original_length=config.get("max_position_embeddings"),
            max_factor=int(hf_number(rope, "max_factor")),
            param_factor=int(hf_number(rope, "param_factor", 1)),
            act=rope.get("act") or "silu",
            time_dt=hf_number(rope, "time_dt", 0.01),
            log_scale=bool(config.get("log_scale", False)),
        )
