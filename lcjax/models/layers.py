"""Parts of the layers of a decoder: attention, norms, projections, embeddings, parameters."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Num

from lcjax.attention import AttentionMetadata, Disentangled, Pattern, TransformerXL
from lcjax.attention.cache import Arrays
from lcjax.attention.indexer import DistilledPattern, adds_divergence
from lcjax.attention.relative import RelativeTerms
from lcjax.models import cache as cache_lib
from lcjax.models.experts import Load
from lcjax.models.loss import Projection, has_few_rows, product_of_few_rows
from lcjax.models.memory import EncodedContext
from lcjax.models.model_config import ModelConfig
from lcjax.models.weight_storage import StoredKernel
from lcjax.parallel.device_memory import is_offloaded, to_device
from lcjax.parallel.sharding import (
    ReduceScatter,
    attention_layout,
    gradient_reduce_scatter,
    spec_of,
    spread_over,
    tokens_spec,
)
from lcjax.rope import Rotation
from pallas_kernels import Bias, Layout

DEBERTA_SPAN = 256  # buckets of each direction (DeBERTa V3)
DEBERTA_DISTANCE = 512  # from this distance on, all distances share the last bucket


class CollectTerms(NamedTuple):
    """Makes each layer without a cache return terms of the loss over some tokens.

    These are the `Load` of its experts, and the `DistilledPattern.divergence` of its pattern.
    """

    counted: jax.Array  # float32 [B, T], 1 for tokens that count; in the order of hidden states


class CollectKeyValues(NamedTuple):
    """Makes each layer without a cache return the keys and values [B, S, K, H] of some tokens."""

    index: jax.Array  # int32 [B, S], indices of the tokens in the row
    # [B, S], positions, and order indices, of these keys for later queries; None: keys are not
    # rotated. Keys are never rotated if the pattern of the layer moves them.
    positions: jax.Array | None
    keys_only: bool = False  # whether the decoder may omit its hidden states


class LayerOutput(NamedTuple):
    """What a layer returns besides hidden states; None for what the call does not ask for."""

    cache: Arrays | None = None  # the arrays of the layer's cache, with the new tokens
    # [B, S, K, H] each, of the tokens that `CollectKeyValues` selects
    key_values: tuple[jax.Array, jax.Array] | None = None
    load: Load | None = None  # of the experts, over the tokens of `CollectTerms`
    divergence: Float[Array, ""] | None = None  # of the pattern, the sum over these tokens
    # Keys, not rotated, and values of all tokens, for layers that read them
    shared: tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]] | None = None


class LayerInputs(NamedTuple):
    """The inputs of a layer besides hidden states; equal layers share one instance."""

    positions: jax.Array  # [B, T], positions of the rotation; integers or fractions
    segments: jax.Array | None  # int32 [B, T], documents from 1, 0 is padding
    rotation: Rotation
    index: jax.Array | None = None  # int32 [B, T], order indices; None: 0, 1, 2, ...
    view: cache_lib.View | None = None  # the layer's slots in the cache
    # Bias of the logits by distance; with position=deberta the rows [X, D] of its table
    bias: Bias | jax.Array | None = None
    order: jax.Array | None = None  # int32 [T], index of each token in the row; None: text order
    memory: EncodedContext | None = None  # encoded context that reader layers attend to
    # Selects tokens whose keys and values, or whose terms of the loss, the layer returns
    collect: CollectKeyValues | CollectTerms | None = None
    # int32 [B, R] if the last R tokens are beacons: the number of window tokens each beacon sees
    beacons: jax.Array | None = None
    # Keys, not rotated, and values of another layer, of a layer with `keys_of`
    shared: tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]] | None = None
    embedding: Float[Array, "B T P"] | None = None  # of the layer (`LayerEmbeddings`)

    def attention_metadata(
        self,
        extra_partials: Sequence[tuple[jax.Array, jax.Array]] = (),
        layout: Layout | None = None,
        soft_cap: float | None = None,
    ) -> AttentionMetadata:
        """Returns the metadata of one attention layer; with a cache, keys are those of its slots.

        Args:
          extra_partials: partials over keys outside the text, as in `AttentionMetadata`.
          layout: the mesh axes over which rows, heads and length are split.
          soft_cap: cap of the logits, as in `AttentionMetadata`.
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
            soft_cap=soft_cap,
        )
        return metadata if self.view is None else self.view.update_metadata(metadata)

    def with_memory_layer(self, pair: tuple[jax.Array, jax.Array] | None) -> "LayerInputs":
        """Returns a copy whose memory has the keys and values `pair`; None: no change."""
        return self if pair is None else self._replace(memory=self.memory.with_layer(pair))


class Linear(nn.Module):
    """Projects the last axes of x, with an optional bias and low-rank adapter."""

    inputs: tuple[int, ...]  # sizes of the summed axes: (D,), or (N, H) after attention
    outputs: tuple[int, ...]  # sizes of the new axes
    config: ModelConfig
    bias: bool = False
    mesh: jax.sharding.Mesh | None = None  # its devices share the tokens of x [B, T, ...]

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        config, count = self.config, len(self.inputs)
        batch_shape = x.shape[: x.ndim - count]
        spread = nn.initializers.normal(math.prod(self.inputs) ** -0.5)

        def weight(name, init, shape):
            value = self.param(name, init, shape, jnp.dtype(config.param_dtype))
            return value.astype(config.compute_dtype())

        shape = (*self.inputs, *self.outputs)
        if config.weights is None:
            kernel = weight("kernel", spread, shape)
        else:
            kernel = self.param("kernel", self._quantised(spread, shape))
        if self.is_initializing():  # tracing a product takes longer than creating its weights
            y = jnp.zeros((*batch_shape, *self.outputs), config.compute_dtype())
        elif config.weights is not None:
            flat = x.reshape(*batch_shape, -1)
            y = stored_matmul(flat, kernel, self._stored(x, kernel))
            y = checkpoint_name(y, "product").reshape(*batch_shape, *self.outputs)
        else:
            y = _project(x, kernel, count, self._product(x, kernel, math.prod(batch_shape)))
        if self.bias:
            y = y + weight("bias", nn.initializers.zeros, self.outputs)
        if config.lora is not None and self.name in config.lora.targets:
            rank = config.lora.rank
            a = weight("lora_a", spread, (*self.inputs, rank))
            b = weight("lora_b", nn.initializers.zeros, (rank, *self.outputs))
            update = _project(_project(x, a, count, matmul), b, 1, matmul)
            y = y + multiply(update, config.lora.scale)
        return y

    def _product(
        self, x: jax.Array, kernel: jax.Array, rows: int
    ) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Returns the product of flattened x and the flattened kernel, for this number of rows."""
        product, config = functools.partial(matmul, reduce=self._reduction(x, kernel)), self.config
        if not has_few_rows(rows, config.param_dtype):
            return product
        one_device = self.mesh is None or self.mesh.size == 1
        options = {"weights_dtype": config.param_dtype, "one_device": one_device}
        return functools.partial(product_of_few_rows, product, **options)

    def _quantised(
        self, init: Callable[..., jax.Array], shape: tuple[int, ...]
    ) -> Callable[[jax.Array], dict[str, jax.Array]]:
        """Returns a function from a key to the arrays of an initial kernel."""
        config = self.config

        def quantised(key):
            kernel = init(key, shape, jnp.dtype(config.param_dtype))
            return config.weights.quantise(kernel, len(self.inputs))

        return quantised

    def _stored(self, x: jax.Array, arrays: dict[str, jax.Array]) -> StoredKernel:
        """Returns how devices read the arrays of the kernel.

        Axes that share the tokens of x exchange codes. XLA alone would exchange floats.
        """
        tokens = () if self.mesh is None else spread_over(tokens_spec(self.mesh, *x.shape[:2]))
        shardings = {}
        for name, array in arrays.items() if tokens else ():
            spec = spec_of("/".join((*self.path, "kernel", name)), array.shape, self.mesh)
            cuts = (spread_over(PartitionSpec(cut)) for cut in spec)
            whole = PartitionSpec(*(tuple(a for a in cut if a not in tokens) for cut in cuts))
            shardings[name] = NamedSharding(self.mesh, whole)
        return StoredKernel(self.config.weights, tuple(shardings.items()))

    def _reduction(self, x: jax.Array, kernel: jax.Array) -> ReduceScatter | None:
        """Returns how devices sum the gradient of the flattened kernel; None: XLA decides."""
        path = "/".join((*self.path, "kernel"))
        reduce = gradient_reduce_scatter(self.mesh, path, kernel.shape, *x.shape[:2])
        if reduce is None:
            return None
        flat = PartitionSpec(reduce.gradient[0], reduce.gradient[len(self.inputs)])
        return dataclasses.replace(reduce, gradient=flat)


class Head(nn.Module):
    """Creates the projection of hidden states to logits for models with untied embeddings."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> Projection:
        c = self.config
        dtype, normal = jnp.dtype(c.param_dtype), nn.initializers.normal(0.02)
        kernel = self.param("kernel", normal, (c.width, c.vocab_size), dtype)
        zeros = nn.initializers.zeros
        bias = self.param("bias", zeros, (c.vocab_size,), dtype) if c.head_bias else None
        kernel = kernel.astype(c.compute_dtype())
        return Projection(kernel, bias, False, c.logit_scale, c.logit_soft_cap, c.param_dtype)


def _project(
    x: jax.Array,
    kernel: jax.Array,
    contracted: int,
    product: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Contracts the last axes of `x` with the first axes of `kernel` by one matrix `product`.

    Contracting several axes directly may make XLA copy the kernel into another layout first.
    """
    batch_shape, out_shape = x.shape[: x.ndim - contracted], kernel.shape[contracted:]
    size = math.prod(kernel.shape[:contracted])
    y = product(x.reshape(*batch_shape, size), kernel.reshape(size, -1))
    return checkpoint_name(y, "product").reshape(*batch_shape, *out_shape)  # for remat=dots


class Norm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm, over the last axes, in float32."""

    config: ModelConfig
    axes: tuple[int, ...] | None = None  # sizes of the normalised axes; None: the width
    heads: int | None = None  # size of the axis before them, if its entries have own scales

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        config = self.config
        # XLA for CPUs (jax 0.10.2) takes 20 to 50 times as long for the gradients, which sum
        # products of two arrays, if the first axis is 1.
        wide = (x.squeeze(0) if x.ndim > 2 and x.shape[0] == 1 else x).astype(jnp.float32)
        dtype, shape = jnp.dtype(config.param_dtype), self.axes or (config.width,)
        axes = tuple(range(-len(shape), 0))
        if config.norm == "layer":
            wide = wide - wide.mean(axes, keepdims=True)
        variance = jnp.square(wide).mean(axes, keepdims=True)
        shape = shape if self.heads is None else (self.heads, *shape)
        y = wide * jax.lax.rsqrt(variance + config.norm_epsilon)
        y = y * _norm_scale(self, config, shape)
        if config.norm == "layer" and config.norm_bias:
            y = y + self.param("bias", nn.initializers.zeros, shape, dtype)
        return y.astype(config.compute_dtype()).reshape(x.shape)


class NormScale(nn.Module):
    """Creates the scales of an RMSNorm [H] without applying it."""

    config: ModelConfig
    size: int

    @nn.compact
    def __call__(self) -> Float[Array, " H"]:
        return _norm_scale(self, self.config, (self.size,))


def _norm_scale(module: nn.Module, config: ModelConfig, shape: tuple[int, ...]) -> jax.Array:
    """Creates the scales of a norm in `module`, and returns what it multiplies by, in float32."""
    init = nn.initializers.zeros if config.norm_plus_one else nn.initializers.ones
    scale = module.param("scale", init, shape, jnp.dtype(config.param_dtype)).astype(jnp.float32)
    return 1 + scale if config.norm_plus_one else scale


class Projections(nn.Module):
    """The projections of attention: queries, keys and values, and the output."""

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None

    def setup(self):
        c, mesh = self.config, None if self.is_initializing() else self.mesh

        def heads(count):
            return Linear((c.width,), (count, c.head_dim), c, c.qkv_bias, mesh)

        def norm(count):
            return {
                "rotated": NormScale(c, c.head_dim),
                "head": Norm(c, (c.head_dim,)),
                "all": Norm(c, (count, c.head_dim)),
                "each": Norm(c, (c.head_dim,), heads=count),
            }[c.qk_norm]

        has_norms = c.qk_norm not in ("none", "unscaled")
        self.query = heads(c.num_heads)
        if has_norms:
            self.query_norm = norm(c.num_heads)
        if c.keys_of is None:
            self.key = heads(c.num_kv_heads)
            if not c.values_from_keys:
                self.value = heads(c.num_kv_heads)
            if has_norms:
                self.key_norm = norm(c.num_kv_heads)
        if c.attention_gate:
            self.output_gate = heads(c.num_heads)
        self.out = Linear((c.num_heads, c.head_dim), (c.width,), c, c.out_bias, mesh)

    def project(
        self,
        x: Float[Array, "B T D"],
        rotation: Rotation | None = None,
        shared: tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]] | None = None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Returns queries, keys and values of hidden states, normed but not rotated.

        Args:
          x: hidden states.
          rotation: that of the layer, for a norm after it; None: the layer has no such norm.
          shared: keys and values of another layer, of a layer with `keys_of`.
        """
        c = self.config

        def norm(y, scaled):
            if c.qk_norm not in ("unscaled", "rotated"):
                return y if c.qk_norm == "none" else scaled(y)
            if not (c.rotates or c.qk_norm == "rotated"):
                return y
            return norm_of_rotated(y, rotation.scale, c.norm_epsilon)

        with jax.named_scope("qkv"):
            q = norm(self.query(x), getattr(self, "query_norm", None))
            if c.keys_of is None:
                k = self.key(x)
                v = k if c.values_from_keys else self.value(x)
                k = norm(k, getattr(self, "key_norm", None))
                if c.value_norm:
                    v = norm_of_rotated(v, 1.0, c.norm_epsilon)
            else:
                k, v = shared
            if c.attention_scale is not None:  # kernels divide by sqrt(H)
                q = multiply(q, c.attention_scale * math.sqrt(c.head_dim))
            return q, k, v

    def combine(self, y: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """Applies the output projection to the result of attention."""
        with jax.named_scope("out"):
            return self.out(y)


def learns_by_divergence(patterns: Iterable[Pattern], trained: Iterable[str]) -> bool:
    """Returns whether all trained parameters are of patterns that learn by a divergence alone.

    Args:
      patterns: those of the model.
      trained: paths of the trained parameters.
    """
    with_parameters, trained = [x for x in patterns if x.parameters], list(trained)
    teaches_all = all(isinstance(x, DistilledPattern) for x in with_parameters)
    diverges = any(map(adds_divergence, with_parameters))
    return diverges and teaches_all and bool(trained) and all(map(is_of_pattern, trained))


def is_of_pattern(path: str) -> bool:
    """Returns whether a path is that of a parameter of a pattern (`PatternParameters`)."""
    return "/attention/pattern/" in path


class PatternParameters(nn.Module):
    """Creates the parameters of a layer's pattern (`Pattern.parameters`)."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> dict[str, jax.Array]:
        c, initializers = self.config, nn.initializers
        sizes = {"D": c.width, "N": c.num_heads, "K": c.num_kv_heads, "H": c.head_dim}
        sizes |= c.pattern.sizes
        inits = {"zeros": initializers.zeros, "ones": initializers.ones}
        inits["normal"] = initializers.normal(0.02)

        def create(name, parameter):
            dtype, init = jnp.dtype(parameter.dtype or c.param_dtype), parameter.init
            init = (
                initializers.constant(jnp.asarray(init)) if isinstance(init, tuple) else inits[init]
            )
            array = self.param(name, init, parameter.shape(sizes), dtype)
            return array if parameter.dtype else array.astype(c.compute_dtype())

        return {name: create(name, one) for name, one in c.pattern.parameters.items()}


class Attention(Projections):
    """Grouped-query attention (Ainslie et al. 2023) under any rotation and pattern."""

    shares: bool = False  # whether other layers read its keys and values

    def setup(self):
        super().setup()
        c, dtype = self.config, jnp.dtype(self.config.param_dtype)
        if c.position == "transformer_xl":
            heads, spread = (c.num_heads, c.head_dim), nn.initializers.normal(0.02)
            self.content_bias = self.param("content_bias", spread, heads, dtype)
            self.position_bias = self.param("position_bias", spread, heads, dtype)
            spread = nn.initializers.normal(c.width**-0.5)
            self.position_key = self.param("position_key", spread, (c.width, *heads), dtype)
        if c.attention_sinks:
            spread = nn.initializers.normal(0.02)
            self.sinks = self.param("sinks", spread, (c.num_heads,), dtype)
        if c.pattern.parameters:
            self.pattern = PatternParameters(c)

    def bias(self, shared: Bias | jax.Array | None) -> Bias | RelativeTerms | None:
        """Returns the bias of this layer's logits.

        Args:
          shared: the part that all layers share, `LayerInputs.bias`.
        """
        c = self.config
        if c.position == "transformer_xl":
            parts = (self.content_bias, self.position_bias, self.position_key)
            return TransformerXL(*(x.swapaxes(-1, -2) for x in parts))
        if c.position == "deberta":
            rows = shared.astype(c.compute_dtype())[None]
            keys = jnp.repeat(self.key(rows)[0], c.num_heads // c.num_kv_heads, 1)
            keys, queries = (x.swapaxes(-1, -2) for x in (keys, self.query(rows)[0]))
            return Disentangled(keys, queries, DEBERTA_DISTANCE)
        return shared

    def __call__(
        self, x: jax.Array, inputs: LayerInputs, cache: Arrays | None
    ) -> tuple[jax.Array, LayerOutput]:
        c, mesh, pattern, output = self.config, self.mesh, self.config.pattern, LayerOutput()
        inputs = inputs._replace(bias=self.bias(inputs.bias))
        if self.is_initializing() and c.keys_of is not None:  # layers are created one by one
            empty = jnp.zeros((*x.shape[:2], c.num_kv_heads, c.head_dim), x.dtype)
            inputs = inputs._replace(shared=(empty, empty))
        q, k, v = self.project(x, inputs.rotation, inputs.shared)
        if c.qk_norm == "rotated":
            # The products of rotated queries and keys have the scales of both.
            scale = inputs.rotation.query_scale * (self.query_norm() * self.key_norm())
            inputs = inputs._replace(rotation=inputs.rotation._replace(query_scale=scale))
        of_unrotated = c.query_scale_layers == "unrotated"
        if c.query_scale and not (of_unrotated and c.rotates):
            positions = inputs.positions + 1 if of_unrotated else inputs.positions
            q = scale_by_position(q, positions, c.query_scale, c.query_scale_length)
        parameters = self.pattern() if pattern.parameters else {}
        with jax.named_scope("attend"):
            partials = self.other_partials(q, inputs)
            if cache is None:
                if self.is_initializing():
                    # No parameter depends on attention, and some patterns reject init's short rows.
                    y = q
                else:
                    length = x.shape[1]
                    plan = c.context_strategy(mesh, length)
                    layout = attention_layout(mesh, plan.method, length, plan.group)
                    metadata = inputs.attention_metadata(partials, layout, c.attention_soft_cap)
                    if parameters:
                        features = pattern.features(parameters, x, q, k, metadata)
                        metadata = metadata.replace(features=features)
                    y = pattern.attend(q, k, v, metadata)
                    if isinstance(inputs.collect, CollectTerms) and adds_divergence(pattern):
                        pair = map(lax.stop_gradient, (q, k))
                        terms = pattern.divergence(*pair, metadata) * inputs.collect.counted
                        output = LayerOutput(divergence=terms.sum())
                if isinstance(inputs.collect, CollectKeyValues):
                    output = LayerOutput(key_values=collect_key_values(k, v, inputs, pattern))
            else:
                kind = inputs.view.kind
                layout = attention_layout(mesh, "split_keys" if kind.parts > 1 else "ring")
                metadata = inputs.attention_metadata(partials, layout, c.attention_soft_cap)
                if kind.reads_output:
                    kernel = self.out.variables["params"]["kernel"]
                    if c.weights is not None:
                        kernel = c.weights.dequantise(unbox_offloaded(kernel), c.compute_dtype())
                        kernel = kernel.reshape(c.num_heads, c.head_dim, c.width)
                    norms = jnp.linalg.norm(x.astype(jnp.float32), axis=-1)
                    metadata = metadata.replace(output_kernel=kernel, input_norms=norms)
                pattern = pattern.for_inference()
                if pattern.parameters:
                    features = pattern.features(parameters, x, q, k, metadata)
                    metadata = metadata.replace(features=features)
                y, cache = kind.attend(cache, q, k, v, pattern, inputs.view, metadata)
                output = LayerOutput(cache=cache)
        if c.attention_gate:
            y = y * nn.sigmoid(self.output_gate(x))
        if self.shares:
            output = output._replace(shared=(k, v))
        return self.combine(y), output

    def other_partials(
        self, q: Float[Array, "B T N H"], inputs: LayerInputs
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Returns partial attentions (out, lse) to what is no token of the text.

        These are the slots of a prefix memory, and a learned sink, whose value is 0.
        """
        partials = []
        if inputs.memory is not None:
            partials += self.config.memory.prefix_partials(q, inputs, self.mesh)
        if self.config.attention_sinks:
            lse = jnp.broadcast_to(self.sinks.astype(jnp.float32), q.shape[:3])
            partials.append((jnp.zeros_like(q), lse))
        return partials


def collect_key_values(
    k: jax.Array, v: jax.Array, inputs: LayerInputs, pattern: Pattern
) -> tuple[jax.Array, jax.Array]:
    """Returns the keys and values of the tokens that `inputs.collect` selects.

    Keys are rotated as in a cache if `inputs.collect.positions` is set and the pattern does not
    move keys.
    """
    index, positions = inputs.collect.index[:, :, None, None], inputs.collect.positions
    k, v = (jnp.take_along_axis(x, index, axis=1) for x in (k, v))
    if positions is None or pattern.moves_keys:
        return k, v
    return inputs.rotation.rotate(k, pattern.key_positions(positions, positions)), v


def scale_by_position(
    q: Float[Array, "B T N H"], positions: Num[Array, "B T"], scale: float, length: int
) -> Float[Array, "B T N H"]:
    """Multiplies queries at position p by 1 + scale ln(1 + floor(p / length)).

    Longer texts have more keys, over which softmax spreads. Llama 4 sharpens it in this way
    (`llama_4_scaling_beta` of transformers; Nakanishi 2025, arXiv 2501.19399, has the logarithm of
    the number of keys). The factor is rounded to the dtype of `q`, as in transformers.

    Args:
      q: queries.
      positions: their positions; those of padding may be negative and count as 0.
      scale: the factor of the logarithm.
      length: number of positions that share a factor.
    """
    blocks = jnp.floor(jnp.maximum(positions, 0).astype(jnp.float32) / length)
    factor = 1 + scale * jnp.log1p(blocks)
    return q * factor[:, :, None, None].astype(q.dtype)


def norm_of_rotated(
    x: Float[Array, "B T N H"], scale: float | jax.Array, epsilon: float
) -> Float[Array, "B T N H"]:
    """Divides x so that after its rotation the mean square of each head is 1.

    RMSNorm without scales. The rotation turns pairs, multiplies them by `scale` and follows, so it
    changes the mean square m to scale^2 m.

    Args:
      x: queries or keys, all of whose channels will be rotated; or values.
      scale: `Rotation.scale`; [B, 1, 1] if rows differ; 1 if there is no rotation.
      epsilon: added to the mean square.
    """
    wide = x.astype(jnp.float32)
    square = jnp.square(wide).mean(-1, keepdims=True)
    square = jnp.square(jnp.asarray(scale, jnp.float32))[..., None] * square
    return (wide * jax.lax.rsqrt(square + epsilon)).astype(x.dtype)


def multiply(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """Multiplies x by `factor` and rounds once, to the dtype of x.

    PyTorch multiplies by a Python number in this way. JAX would round `factor` to the dtype of x
    first.
    """
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


class LayerEmbeddings(nn.Module):
    """The second embedding of tokens, of which each layer reads a part (Gemma 4 E2B and E4B).

    (norm(x W / sqrt(D)) + sqrt(P) e) / sqrt(2) for the embedding x of a token, and the row e of a
    table with P numbers for each layer.
    """

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], tokens: Int[Array, "B T"]
    ) -> Float[Array, "B T L P"]:
        c, dtype = self.config, jnp.dtype(self.config.param_dtype)
        sizes = c.num_layers, c.layer_embedding
        mesh = None if self.is_initializing() else self.mesh
        normal = nn.initializers.normal(0.02)
        table = self.param("embedding", normal, (c.vocab_size, math.prod(sizes)), dtype)
        rows = look_up(table, tokens, c.compute_dtype(), mesh)
        rows = rows * jnp.asarray(math.sqrt(c.layer_embedding), rows.dtype)
        shape, floats = ((c.width,), (math.prod(sizes),)), c.replace(weights=None)
        projected = Linear(*shape, floats, mesh=self.mesh, name="projection")(x)
        projected = multiply(projected, c.width**-0.5)
        projected = Norm(c, sizes[1:], name="norm")(projected.reshape(*x.shape[:2], *sizes))
        return multiply(projected + rows.reshape(projected.shape), 2**-0.5)


def look_up(
    table: Float[Array, "V D"],
    tokens: Int[Array, "B T"],
    dtype: jnp.dtype,
    mesh: jax.sharding.Mesh | None,
) -> Float[Array, "B T D"]:
    """Looks up token embeddings in a table whose columns may be sharded over devices.

    Each device reads its columns for the tokens of all devices that share the table. An all-to-all
    then exchanges tokens for columns. The traffic is the size of the result, forward and backward,
    and each device sums the gradient of its own columns, in the table's precision. XLA alone would
    gather the table or the hidden states of all rows, and sum whole gradients.

    Args:
      table: the embedding.
      tokens: int32 token ids.
      dtype: dtype of the result.
      mesh: the devices; None: one device.
    """
    if mesh is None:
        return table[tokens].astype(dtype)
    token_spec = tokens_spec(mesh, *tokens.shape)
    columns = spread_over(PartitionSpec(spec_of("embed/embedding", table.shape, mesh)[1]))
    if not columns or not set(columns) <= set(spread_over(token_spec)):
        return table[tokens].astype(dtype)

    def exchange(table, tokens):
        rows = table[jax.lax.all_gather(tokens, columns)].astype(dtype)  # [devices, b, t, d]
        return jax.lax.all_to_all(rows, columns, split_axis=0, concat_axis=3, tiled=True)[0]

    return jax.shard_map(
        exchange,
        mesh=mesh,
        in_specs=(PartitionSpec(None, columns), token_spec),
        out_specs=token_spec,
        axis_names=set(spread_over(token_spec)),
        check_vma=False,
    )(table, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(
    x: Float[Array, "... I"], kernel: Float[Array, "I O"], reduce: ReduceScatter | None = None
) -> Float[Array, "... O"]:
    """Multiplies x by the kernel, both of one dtype.

    JAX's own rule computes the kernel's gradient as the transpose of dy^T x. On a CPU, this
    transposes the large dy, fused with the elementwise operations before it and not in memory
    order: a fifth of a training step. Here the gradient is x^T dy, which needs no transpose.
    float32 operands are multiplied in full precision, also on accelerators whose default is lower.

    Args:
      x: the inputs.
      kernel: the weights.
      reduce: how devices sum their gradients of the kernel; None leaves it to the compiler.
    """
    return _dot_general(x, kernel, x.ndim - 1, 0)


def _matmul_forward(x, kernel, reduce):
    return _dot_general(x, kernel, x.ndim - 1, 0), (x, kernel)


def _matmul_backward(reduce, saved, dy):
    x, kernel = saved
    d_kernel = _kernel_gradient(x, dy) if reduce is None else reduce(_kernel_gradient, x, dy)
    return _dot_general(dy, kernel, dy.ndim - 1, 1), d_kernel


def _kernel_gradient(x, dy):
    return _dot_general(x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]), 0, 0)


matmul.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def stored_matmul(
    x: Float[Array, "... I"], arrays: dict[str, jax.Array], stored: StoredKernel
) -> Float[Array, "... O"]:
    """Multiplies x by a matrix that is stored as codes, and has no gradient.

    The backward pass dequantises the matrix again, so residuals are the codes, which exist anyway.

    Args:
      x: the inputs.
      arrays: those of the matrix (`lcjax.models.weight_storage`).
      stored: how they are read.
    """
    return _dot_general(x, stored.matrix(arrays, x.dtype), x.ndim - 1, 0)


def _stored_forward(x, arrays, stored):
    return stored_matmul(x, arrays, stored), arrays


def _stored_backward(stored, arrays, dy):
    arrays = lax.optimization_barrier(arrays)  # else XLA could keep the matrix of the forward pass
    return _dot_general(dy, stored.matrix(arrays, dy.dtype), dy.ndim - 1, 1), None


stored_matmul.defvjp(_stored_forward, _stored_backward)


def _dot_general(x, y, axis_x: int, axis_y: int):
    axes = (((axis_x,), (axis_y,)), ((), ()))
    if x.dtype == jnp.float32:
        return lax.dot_general(x, y, axes, precision=lax.Precision.HIGHEST)

    def of_16_bits(x, y, result):
        return lax.dot_general(x, y, axes, preferred_element_type=result).astype(x.dtype)

    # XLA for CPUs uses the CPU's 16-bit matrix units (AMX) only if the result is float32; otherwise
    # it converts both operands to float32. Other devices accumulate in float32 either way.
    on_cpu = functools.partial(of_16_bits, result=jnp.float32)
    elsewhere = functools.partial(of_16_bits, result=x.dtype)
    return lax.platform_dependent(x, y, cpu=on_cpu, default=elsewhere)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Offloaded(meta.AxisMetadata):
    """A box around a weight in host memory that moves it to the device on access.

    Flax unboxes a parameter when a module accesses it, and this box then fetches the weight. Inside
    a scan over layers it fetches one layer's part, and again when the layer is rematerialised.

    The loss is differentiated with respect to `gradient`, an array of the weight's shape whose
    values are never read, so that the gradient stays on the device. The gradient of the weight
    itself would be sent to the host. None: the weight is not trained.
    """

    weight: jax.Array
    gradient: jax.Array | None = None

    def unbox(self) -> jax.Array:
        return (
            to_device(self.weight) if self.gradient is None else _fetch(self.weight, self.gradient)
        )

    def replace_boxed(self, val: Any) -> Any:
        return val

    def add_axis(self, index: int, params: dict) -> "Offloaded":
        return self

    def remove_axis(self, index: int, params: dict) -> "Offloaded":
        return self


@jax.custom_vjp
def _fetch(weight: jax.Array, gradient: jax.Array) -> jax.Array:
    return to_device(weight)


_fetch.defvjp(lambda weight, gradient: (to_device(weight), None), lambda _, slope: (None, slope))


def differentiable(params: dict) -> dict:
    """Returns the arrays to differentiate with respect to.

    These are the parameters, with zeros in place of parameters on the host.
    """
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if is_offloaded(x) else x, params)


def with_gradients(params: dict, by: dict) -> dict:
    """Returns model parameters whose gradients flow to the arrays `by` of `differentiable`."""
    return jax.tree.map(lambda x, d: Offloaded(x, d) if is_offloaded(x) else d, params, by)


def box_offloaded(params: dict) -> dict:
    """Wraps the parameters in host memory in `Offloaded` boxes."""
    return jax.tree.map(
        lambda x: x if isinstance(x, Offloaded) or not is_offloaded(x) else Offloaded(x),
        params,
        is_leaf=lambda x: isinstance(x, Offloaded),
    )


def unbox_offloaded(tree: Any) -> Any:
    """Replaces the boxes of a tree by their weights, fetched to the device."""
    return meta.unbox(tree)
