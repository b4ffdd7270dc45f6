"""The layers of a decoder. Modules hold parameters and wiring; the maths is in plain functions."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lcjax.attention import AttentionMetadata, Causal
from lcjax.attention.base import rotate_queries
from lcjax.models import cache as cache_lib
from lcjax.models.config import ModelConfig
from lcjax.models.loss import Projection
from lcjax.models.matmul import matmul
from lcjax.models.memory import Encoded
from lcjax.parallel.reduce_scatter import ReduceScatter, gradient_reduce_scatter
from lcjax.parallel.sharding import attention_layout
from lcjax.rope import Rotation, rotate
from pallas_kernels import Bias, Layout, flash


class CollectKeyValues(NamedTuple):
    """Of which tokens a layer returns keys and values, [B, S, K, H], where nothing is cached."""

    index: jax.Array  # int32 [B, S], their places in the row
    # [B, S], where these keys stand for whoever reads them; None: they are not rotated
    positions: jax.Array | None
    alone: bool = False  # hidden states are not wanted, so the last layer need not make any


class Context(NamedTuple):
    """What every layer needs beside the hidden states."""

    positions: jax.Array  # [B, T], where tokens stand for the rotation; may be fractional
    segments: jax.Array | None  # int32 [B, T], documents from 1, 0 is padding
    rotation: Rotation
    index: jax.Array | None = None  # int32 [B, T], places in the own document; None: 0, 1, 2, ...
    view: cache_lib.View | None = None  # where the new tokens stand in the cache
    bias: Bias | None = None  # of the logits, by distance
    order: jax.Array | None = None  # int32 [T], the place in the row of each token; None: in order
    memory: Encoded | None = None  # what is read beside the tokens
    keep: CollectKeyValues | None = None  # tokens whose keys and values are wanted
    # int32 [B, R]: the last R tokens are those of a memory that sums up the text, and each of them
    # has so many tokens of the text before it
    beacons: jax.Array | None = None

    def attention_metadata(
        self,
        extra_partials: Sequence[tuple[jax.Array, jax.Array]] = (),
        layout: Layout | None = None,
    ) -> AttentionMetadata:
        """The positions, documents and rotation of one attention layer.

        Args:
          extra_partials: partials over keys outside the text, as in `AttentionMetadata`.
          layout: the mesh axes over which rows, heads and length are split.
        """
        metadata = AttentionMetadata(
            self.positions,
            self.positions,
            rotation=self.rotation,
            q_index=self.index,
            k_index=self.index,
            q_segments=self.segments,
            k_segments=self.segments,
            row_indices=(self.order, self.order),
            bias=self.bias,
            extra_partials=extra_partials,
            layout=layout,
        )
        return metadata if self.view is None else self.view.update_metadata(metadata)

    def with_memory_layer(self, pair: tuple[jax.Array, jax.Array] | None) -> "Context":
        """With keys and values of a memory that one layer reads; None: with what all read."""
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
            partials = self.before(q, context)
            if layer is None:
                layout = attention_layout(mesh, c.context_parallel, x.shape[1])
                y = pattern.attend(q, k, v, context.attention_metadata(partials, layout))
                if context.keep is not None:
                    layer = kept(k, v, context)
            else:
                metadata = context.attention_metadata(partials, attention_layout(mesh))
                y, layer = cache_lib.attend_cached(
                    q, k, v, layer, pattern.for_inference(), context.view, metadata
                )
        return self.combine(y), layer

    def before(self, q: jax.Array, context: Context) -> list[tuple[jax.Array, jax.Array]]:
        """The partial (out, lse) over what a memory has put before the text, if it has.

        Its keys are not rotated: what is there of M of them stands at 0, 1, 2, ... in each row.
        """
        memory = context.memory
        if memory is None or not self.config.memory.is_prefix:
            return []
        k, v = (part.swapaxes(1, 2) for part in memory.layers[0])
        there = memory.mask.astype(jnp.int32)
        k = rotate(k, jnp.cumsum(there, axis=1) - 1, *context.rotation[:2])
        q = rotate_queries(q, context.positions, context.rotation)
        return [
            flash(
                q,
                k,
                v,
                q_segments=jnp.ones(q.shape[:2], jnp.int32),
                k_segments=there,
                layout=attention_layout(self.mesh),
            )
        ]


def kept(k: jax.Array, v: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
    """Keys, rotated where that is asked for, and values of the tokens that `context.keep` names."""
    index = context.keep.index[:, :, None, None]
    k, v = (jnp.take_along_axis(x, index, axis=1) for x in (k, v))
    if context.keep.positions is None:
        return k, v
    return rotate(k, context.keep.positions, *context.rotation[:2]), v


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
