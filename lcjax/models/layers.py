"""The layers of a decoder. Modules hold parameters and wiring; the maths is in plain functions."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from lcjax import cache as cache_lib
from lcjax.attention import attend
from lcjax.models.config import ModelConfig
from lcjax.rope import Rotation


class Context(NamedTuple):
    """What every layer needs beside the hidden states."""

    positions: jax.Array  # [B, T], where tokens stand for the rotation; may be fractional
    segments: jax.Array | None  # int32 [B, T], documents from 1, 0 is padding
    rotation: Rotation
    view: cache_lib.View | None = None  # where the new tokens stand in the cache


class Einsum(nn.Module):
    """A projection `x, kernel -> y` with an optional bias and an optional low-rank adapter."""

    equation: str  # "BTD,DNH->BTNH"
    shape: tuple[int, ...]
    config: ModelConfig
    bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, dtype = self.config, self.config.compute_dtype()
        inputs, output = self.equation.split("->")
        x_axes, kernel_axes = inputs.split(",")
        contracted = "".join(axis for axis in kernel_axes if axis in x_axes)
        kept = "".join(axis for axis in kernel_axes if axis in output)
        size = dict(zip(kernel_axes, self.shape, strict=True))
        fan_in = 1
        for axis in contracted:
            fan_in *= size[axis]

        def weight(name, init, shape):
            return self.param(name, init, shape, jnp.dtype(config.param_dtype)).astype(dtype)

        kernel = weight("kernel", nn.initializers.normal(fan_in**-0.5), self.shape)
        y = jnp.einsum(self.equation, x, kernel)
        if self.bias:
            y = y + weight("bias", nn.initializers.zeros, tuple(size[axis] for axis in kept))
        if config.lora is not None and self.name in config.lora.targets:
            rank = config.lora.rank
            down = (*(size[axis] for axis in contracted), rank)
            up = (rank, *(size[axis] for axis in kept))
            a = weight("lora_a", nn.initializers.normal(fan_in**-0.5), down)
            b = weight("lora_b", nn.initializers.zeros, up)
            outer = "".join(axis for axis in x_axes if axis not in contracted)
            low = jnp.einsum(f"{x_axes},{contracted}r->{outer}r", x, a)
            y = y + config.lora.scale * jnp.einsum(f"{outer}r,r{kept}->{output}", low, b)
        return y


class Norm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm with bias, in float32."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, wide = self.config, x.astype(jnp.float32)
        dtype = jnp.dtype(config.param_dtype)
        if config.norm == "layer":
            wide = wide - wide.mean(-1, keepdims=True)
        variance = jnp.square(wide).mean(-1, keepdims=True)
        y = wide * jax.lax.rsqrt(variance + config.norm_epsilon)
        y = y * self.param("scale", nn.initializers.ones, (config.width,), dtype)
        if config.norm == "layer":
            y = y + self.param("bias", nn.initializers.zeros, (config.width,), dtype)
        return y.astype(config.compute_dtype())


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) under any rotation and pattern."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array, context: Context, layer: Any) -> tuple[jax.Array, Any]:
        c = self.config
        heads, kv_heads, size = c.num_heads, c.num_kv_heads, c.head_dim

        def project(name, count):
            shape = (c.width, count, size)
            return Einsum("BTD,DNH->BTNH", shape, c, c.qkv_bias, name=name)(x)

        with jax.named_scope("qkv"):
            q, k, v = project("query", heads), project("key", kv_heads), project("value", kv_heads)
        with jax.named_scope("attend"):
            if layer is None:
                y = attend(
                    q,
                    k,
                    v,
                    pattern=c.pattern,
                    rotation=context.rotation,
                    q_positions=context.positions,
                    k_positions=context.positions,
                    q_segments=context.segments,
                    k_segments=context.segments,
                )
            else:
                y, layer = cache_lib.attend_cached(
                    q, k, v, layer, pattern=c.pattern, context=context
                )
        with jax.named_scope("out"):
            out = Einsum("BTNH,NHD->BTD", (heads, size, c.width), c, c.out_bias, name="out")(y)
        return out, layer


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020) when gated, else two matrices with the activation between."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        activate = {"silu": nn.silu, "gelu_tanh": lambda h: nn.gelu(h, approximate=True)}[
            c.activation
        ]

        def widen(name):
            return Einsum("BTD,DF->BTF", (c.width, c.mlp_width), c, c.mlp_bias, name=name)(x)

        hidden = activate(widen("gate")) * widen("up") if c.gated_mlp else activate(widen("up"))
        down = Einsum("BTF,FD->BTD", (c.mlp_width, c.width), c, c.mlp_bias, name="down")
        return down(hidden)
