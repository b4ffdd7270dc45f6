"""The layer of `mixer.GatedDeltaNet`, which reads a text with a state in place of attention."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from lcjax.attention.cache import Arrays
from lcjax.models.layers import LayerInputs, LayerOutput, Linear, Norm
from lcjax.models.model_config import ModelConfig
from lcjax.parallel.sharding import LENGTH, attention_layout
from pallas_kernels import Layout, causal_convolution, gated_delta_rule

_EPSILON = 1e-6  # in the norms of queries and keys, of all published models


class GatedDeltaNetLayer(nn.Module):
    """Short convolutions, the gated delta rule, and a gated norm, in place of attention.

    Queries, keys and values pass a causal convolution over a few tokens, then SiLU. Queries and
    keys are divided by their norms. For hidden states x, the state of a head decays by
    exp(-exp(decay_rate) softplus(x W_decay + decay_bias)) at each token, and learns with the rate
    sigmoid(x W_beta). What a head reads off its state passes an RMSNorm, and is multiplied by
    SiLU(x W_gate). Yang et al. 2024, arXiv 2412.06464, sec. 3.4, with SiLU as in their code;
    `Qwen3NextGatedDeltaNet` of transformers.
    """

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, cache: Arrays | None
    ) -> tuple[Float[Array, "B T D"], LayerOutput]:
        c, mixer = self.config, self.config.mixer
        mesh = None if self.is_initializing() else self.mesh
        keys, values = (mixer.key_heads, mixer.key_dim), (mixer.value_heads, mixer.value_dim)
        layout = self._layout(x.shape[1], cache)
        state = dict(cache or {})

        def project(name, *outputs):
            config = c if len(outputs) > 1 else c.replace(weights=None)  # rates are sensitive
            return Linear((c.width,), outputs, config, mesh=mesh, name=name)(x)

        def convolve(name, key, *heads):
            y = project(name, *heads)
            init, shape = nn.initializers.normal(0.5), (mixer.taps, *heads)
            taps = self.param(f"{name}_taps", init, shape, jnp.dtype(c.param_dtype))
            if self.is_initializing():
                return y
            taps = taps.astype(jnp.float32)
            y, state[key] = _convolution(y, taps, state.get(key), inputs, layout)
            if cache is not None:
                # Else compilers compute the next state last, and keep the inputs of all layers.
                y, state[key] = jax.lax.optimization_barrier((y, state[key]))
            return nn.silu(y)

        with jax.named_scope("qkv"):
            q, k = convolve("query", "queries", *keys), convolve("key", "keys", *keys)
            v = convolve("value", "values", *values)
            gate = project("output_gate", *values)
            beta, decay = (project(name, mixer.value_heads) for name in ("beta", "decay"))
        heads = (mixer.value_heads,)  # rates are float32 also where other weights are not
        rate = self.param("decay_rate", _initial_rates, heads, jnp.float32)
        bias = self.param("decay_bias", _initial_biases, heads, jnp.float32)
        with jax.named_scope("mix"):
            if self.is_initializing():  # no parameter depends on it
                y = v
            else:
                repeats = mixer.value_heads // mixer.key_heads
                q, k = _normalise(q, mixer.key_dim**-0.5), _normalise(k)
                q, k = (jnp.repeat(y, repeats, axis=2) for y in (q, k))
                beta = nn.sigmoid(beta.astype(jnp.float32)) * (1 + mixer.negative_eigenvalues)
                decay = -jnp.exp(rate) * nn.softplus(decay.astype(jnp.float32) + bias)
                y, state["state"] = gated_delta_rule(
                    *(q, k, v, decay, beta),
                    state=state.get("state"),
                    segments=inputs.segments,
                    layout=layout,
                )
                y = checkpoint_name(y, "attention")
            norm = {"norm": "rms", "norm_plus_one": False}
            norm["norm_epsilon"] = mixer.norm_epsilon or c.norm_epsilon
            y = Norm(c.replace(**norm), (mixer.value_dim,), name="norm")(y)
            y = (y * nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
        with jax.named_scope("out"):
            y = Linear(values, (c.width,), c, mesh=mesh, name="out")(y)
        return y, LayerOutput(cache=None if cache is None else state)

    def _layout(self, length: int, cache: Arrays | None) -> Layout | None:
        """Returns the layout on the mesh; devices share tokens if no cache is read."""
        if cache is not None or self.mesh is None:
            return attention_layout(self.mesh)
        # A device sends its last inputs of the convolution to the next one.
        is_long = length >= self.mesh.shape[LENGTH] * (self.config.mixer.taps - 1)
        return attention_layout(self.mesh, tokens=length if is_long else None)


def _convolution(
    x: Float[Array, "B T N H"],
    taps: Float[Array, "W N H"],
    state: Float[Array, "B N W-1 H"] | None,
    inputs: LayerInputs,
    layout: Layout | None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N W-1 H"]]:
    """Returns the causal convolution of each channel, and the inputs that the next token needs."""
    count, *heads = taps.shape
    if state is not None:
        state = state.swapaxes(1, 2).reshape(len(x), count - 1, math.prod(heads))
    y, state = causal_convolution(
        *(x.reshape(*x.shape[:2], -1), taps.reshape(count, -1)),
        state=state,
        segments=inputs.segments,
        layout=layout,
    )
    return y.reshape(x.shape), state.reshape(len(x), count - 1, *heads).swapaxes(1, 2)


def _normalise(x: Float[Array, "... C"], norm: float = 1.0) -> Float[Array, "... C"]:
    """Scales vectors to a `norm`, in float32."""
    wide = x.astype(jnp.float32)
    squares = jnp.square(wide).sum(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(squares + _EPSILON) * norm).astype(x.dtype)


def _initial_rates(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Returns logarithms of rates between 1 and 16 (as in Mamba-2, arXiv 2405.21060)."""
    return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0)).astype(dtype)


def _initial_biases(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Returns biases whose softplus is between 0.001 and 0.1, evenly in its logarithm."""
    low, high = jnp.log(1e-3), jnp.log(0.1)
    step = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)
