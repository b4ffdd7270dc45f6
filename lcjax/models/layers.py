"""The layers of a decoder. Modules hold parameters and wiring; the maths is in plain functions."""

import dataclasses
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lcjax.attention import Causal, attend
from lcjax.models import cache as cache_lib
from lcjax.models.config import ModelConfig
from lcjax.models.loss import Projection
from lcjax.models.matmul import matmul
from lcjax.models.memory import EncodedContext
from lcjax.parallel.reduce_scatter import ReduceScatter, gradient_reduce_scatter
from lcjax.parallel.sharding import attention_layout
from lcjax.rope import Rotation, rotate
from pallas_kernels import Bias


class CollectKeyValues(NamedTuple):
    """Tokens whose keys and values [B, S, K, H] a layer returns, where nothing is cached."""

    index: jax.Array  # int32 [B, S], indices of the tokens in the row
    # [B, S], positions assigned to these keys when they are attended to; None: they are not rotated
    positions: jax.Array | None
    keys_only: bool = False  # whether the decoder may skip hidden states after the last layer


class Context(NamedTuple):
    """What every layer needs beside the hidden states."""

    positions: jax.Array  # [B, T], where tokens stand for the rotation; may be fractional
    segments: jax.Array | None  # int32 [B, T], documents from 1, 0 is padding
    rotation: Rotation
    index: jax.Array | None = None  # int32 [B, T], places in the own document; None: 0, 1, 2, ...
    view: cache_lib.View | None = None  # where the new tokens stand in the cache
    bias: Bias | None = None  # of the logits, by distance
    order: jax.Array | None = None  # int32 [T], the place in the row of each token; None: in order
    memory: EncodedContext | None = None  # the context beside the text
    collect: CollectKeyValues | None = None  # tokens whose keys and values are returned
    # int32 [B, R]: the last R tokens are beacons, each after so many tokens of the text
    beacons: jax.Array | None = None

    def with_memory_layer(self, pair: tuple[jax.Array, jax.Array] | None) -> "Context":
        """Returns a copy with the keys and values of a memory that one layer reads, if given."""
        return self if pair is None else self._replace(memory=self.memory.with_layer(pair))


class Linear(nn.Module):
    """A projection of the last axes of x, with an optional bias and low-rank adapter."""

    inputs: tuple[int, ...]  # sizes of the summed axes: (D,), or (N, H) after attention
    outputs: tuple[int, ...]  # sizes of the new axes
    config: ModelConfig
    bias: bool = False
    mesh: jax.sharding.Mesh | None = None  # whose devices share the tokens of x [B, T, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config, count = self.config, len(self.inputs)
        spread = nn.initializers.normal(math.prod(self.inputs) ** -0.5)

        def weight(name, init, shape):
            value = self.param(name, init, shape, jnp.dtype(config.param_dtype))
            return value.astype(config.compute_dtype())

        kernel = weight("kernel", spread, (*self.inputs, *self.outputs))
        y = _matmul(x, kernel, count, self._reduction(x, kernel))
        if self.bias:
            y = y + weight("bias", nn.initializers.zeros, self.outputs)
        if config.lora is not None and self.name in config.lora.targets:
            rank = config.lora.rank
            a = weight("lora_a", spread, (*self.inputs, rank))
            b = weight("lora_b", nn.initializers.zeros, (rank, *self.outputs))
            y = y + config.lora.scale * _matmul(_matmul(x, a, count), b, 1)
        return y

    def _reduction(self, x: jax.Array, kernel: jax.Array) -> ReduceScatter | None:
        """For the gradient of the kernel as one flat matrix, of whose axes the outer ones count."""
        if self.is_initializing():
            return None
        path = "/".join((*self.path, "kernel"))
        reduce = gradient_reduce_scatter(self.mesh, path, kernel.shape, *x.shape[:2])
        if reduce is None:
            return None
        flat = PartitionSpec(reduce.kept[0], reduce.kept[len(self.inputs)])
        return dataclasses.replace(reduce, kept=flat)


class Head(nn.Module):
    """The projection of hidden states to the vocabulary, where it is not the tied embedding."""

    config: ModelConfig

    @nn.compact
    def __call__(self, hidden: jax.Array) -> jax.Array:
        c = self.config
        dtype, spread = jnp.dtype(c.param_dtype), nn.initializers.normal(0.02)
        kernel = self.param("kernel", spread, (c.width, c.vocab_size), dtype)
        zeros = nn.initializers.zeros
        bias = self.param("bias", zeros, (c.vocab_size,), dtype) if c.head_bias else None
        return Projection(kernel.astype(c.compute_dtype()), bias)(hidden)


def _matmul(
    x: jax.Array, kernel: jax.Array, contracted: int, reduce: ReduceScatter | None = None
) -> jax.Array:
    """Sums the last axes of `x` against the first ones of `kernel`, as one flat product.

    Several axes at once would let XLA choose an order in which it copies the kernel first.
    """
    outer, kept = x.shape[: x.ndim - contracted], kernel.shape[contracted:]
    size = math.prod(kernel.shape[:contracted])
    y = matmul(x.reshape(*outer, size), kernel.reshape(size, -1), reduce)
    return y.reshape(*outer, *kept)


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


class Projections(nn.Module):
    """Queries, keys and values of tokens, and what is made of what these attend to."""

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None

    def setup(self):
        c, mesh = self.config, None if self.is_initializing() else self.mesh

        def heads(count):
            return Linear((c.width,), (count, c.head_dim), c, c.qkv_bias, mesh)

        self.query, self.key, self.value = map(heads, (c.num_heads, *2 * [c.num_kv_heads]))
        self.out = Linear((c.num_heads, c.head_dim), (c.width,), c, c.out_bias, mesh)

    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [B, T, N, H], k and v [B, T, K, H] of x [B, T, D]."""
        with jax.named_scope("qkv"):
            return self.query(x), self.key(x), self.value(x)

    def combine(self, y: jax.Array) -> jax.Array:
        """[B, T, D] of what queries attend to, [B, T, N, H]."""
        with jax.named_scope("out"):
            return self.out(y)


class Attention(Projections):
    """Grouped-query attention (Ainslie et al. 2023) under any rotation and pattern."""

    def __call__(self, x: jax.Array, context: Context, layer: Any) -> tuple[jax.Array, Any]:
        c = self.config
        # Parameters do not depend on the pattern, and some refuse the short rows they are made with
        pattern = Causal() if self.is_initializing() else c.pattern
        mesh = None if self.is_initializing() else self.mesh
        q, k, v = self.project(x)
        with jax.named_scope("attend"):
            prefix = self.prefix_partials(q, context)
            if layer is None:
                y = attend(
                    q,
                    k,
                    v,
                    pattern=pattern,
                    rotation=context.rotation,
                    q_positions=context.positions,
                    k_positions=context.positions,
                    q_index=context.index,
                    k_index=context.index,
                    row=(context.order, context.order),
                    bias=context.bias,
                    layout=attention_layout(mesh, c.context_parallel, x.shape[1]),
                    q_segments=context.segments,
                    k_segments=context.segments,
                    extra_partials=prefix,
                )
                if context.collect is not None:
                    layer = collect_key_values(k, v, context)
            else:
                y, layer = cache_lib.attend_cached(
                    q, k, v, layer, pattern=pattern.for_inference(), context=context,
                    layout=attention_layout(mesh), more=prefix,
                )  # fmt: skip
        return self.combine(y), layer

    def prefix_partials(self, q: jax.Array, context: Context) -> list[tuple[jax.Array, jax.Array]]:
        """Returns the partial attention (out, lse) to a memory that stands before the text."""
        if context.memory is None:
            return []
        return self.config.memory.prefix_partials(q, context, self.mesh)


def collect_key_values(k: jax.Array, v: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
    """Returns keys, rotated if positions are given, and values of `context.collect`."""
    index = context.collect.index[:, :, None, None]
    k, v = (jnp.take_along_axis(x, index, axis=1) for x in (k, v))
    if context.collect.positions is None:
        return k, v
    return rotate(k, context.collect.positions, *context.rotation[:2]), v


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020) when gated, else two matrices with the activation between."""

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        activate = {"silu": nn.silu, "gelu_tanh": lambda h: nn.gelu(h, approximate=True)}[
            c.activation
        ]

        def widen(name):
            return Linear((c.width,), (c.mlp_width,), c, c.mlp_bias, self.mesh, name=name)(x)

        hidden = activate(widen("gate")) * widen("up") if c.gated_mlp else activate(widen("up"))
        return Linear((c.mlp_width,), (c.width,), c, c.mlp_bias, self.mesh, name="down")(hidden)
