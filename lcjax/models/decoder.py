"""The decoder: embedding, blocks, final norm, and the projection to logits."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Num

from lcjax.attention import order_indices
from lcjax.errors import InputError
from lcjax.models import cache as cache_lib
from lcjax.models import layer_groups, remat
from lcjax.models.encoder import MaskedHead
from lcjax.models.experts import Load
from lcjax.models.gated_delta_net import GatedDeltaNetLayer
from lcjax.models.layers import (
    DEBERTA_SPAN,
    Attention,
    CollectKeyValues,
    CollectTerms,
    Head,
    LayerEmbeddings,
    LayerInputs,
    LayerOutput,
    Linear,
    Norm,
    is_of_pattern,
    look_up,
    multiply,
)
from lcjax.models.loss import Projection
from lcjax.models.memory import EncodedContext, check_memory
from lcjax.models.mixer import GatedDeltaNet
from lcjax.models.mlp import ACTIVATIONS, MLP, SparseMLP
from lcjax.models.model_config import ModelConfig
from lcjax.parallel.device_memory import check_fits, host_shardings
from lcjax.parallel.sharding import LENGTH, device_mesh, keep_tokens, param_shardings
from lcjax.rope import Rotation
from lcjax.rope.rotation import no_rotation
from lcjax.tree import flatten, nest, split, union
from pallas_kernels import Alibi, RelativeBias, alibi_slopes, zigzag

BUCKETS = 32  # rows of T5's bias table
_MIXERS = {GatedDeltaNet: GatedDeltaNetLayer}
MAX_DISTANCE = 128  # from this distance on, all distances share T5's last bucket


def _feed_forward(
    config: ModelConfig,
    mesh: jax.sharding.Mesh | None,
    x: jax.Array,
    hidden: jax.Array,
    inputs: LayerInputs,
) -> tuple[jax.Array, Load | None]:
    """Returns the MLP's output, and the load of its experts if `inputs.collect` selects it.

    `x` is the normed input, and `hidden` that before the norm.
    """
    by_tiles = remat.recomputes(config.remat, "product")
    if config.experts is None:
        return MLP(config, mesh, by_tiles, name="mlp")(x), None
    collect = inputs.collect if isinstance(inputs.collect, CollectTerms) else None
    return SparseMLP(config, mesh, by_tiles, name="mlp")(x, hidden, collect)


def _token_mixer(
    config: ModelConfig, mesh: jax.sharding.Mesh | None, *, shares: bool = False
) -> nn.Module:
    """Returns the module that mixes the tokens of a layer: attention, or one in place of it.

    Args:
      config: of the layer.
      mesh: the devices.
      shares: whether other layers read its keys and values.
    """
    if config.mixer is not None:
        return _MIXERS[type(config.mixer)](config, mesh, name="mixer")
    if config.memory is None:
        return Attention(config, mesh, shares=shares, name="attention")
    return (config.memory.attention_module or Attention)(config, mesh, name="attention")


def _block_input(x: jax.Array, mesh: jax.sharding.Mesh | None) -> jax.Array:
    """Returns the hidden states that a block reads, named for `model.remat`."""
    return checkpoint_name(keep_tokens(x, mesh), "input")


def _layer_output(block: nn.Module, x: jax.Array, inputs: LayerInputs) -> jax.Array:
    """Returns the output of a block, for hidden states x after attention and MLP.

    The part of the layer of a second embedding is added, and the result is multiplied by the
    learned number of the layer, if the model has these.
    """
    c = block.config
    if c.layer_embedding is not None:
        floats = c.replace(weights=None)  # these matrices are small

        def linear(name, inputs, outputs):
            return Linear((inputs,), (outputs,), floats, mesh=block.mesh, name=name)

        gate = linear("embedding_gate", c.width, c.layer_embedding)(x)
        y = ACTIVATIONS[c.activation](gate) * inputs.embedding
        y = linear("embedding_out", c.layer_embedding, c.width)(y)
        x = keep_tokens(x + Norm(c, name="embedding_norm")(y), block.mesh)
    if not c.layer_scale:
        return x
    scale = block.param("output_scale", nn.initializers.ones, (1,), jnp.dtype(c.param_dtype))
    return x * scale.astype(x.dtype)


class SequentialBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): Llama, Mistral, Qwen.

    Norms may follow attention and MLP (OLMo 2), or precede and follow them (Gemma 2). A layer with
    cross-attention to a memory adds its result between the two steps.
    """

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None
    reads: bool = False
    shares: bool = False  # whether other layers read its keys and values

    @nn.compact
    def __call__(
        self, x: jax.Array, inputs: LayerInputs, cache, pair=None
    ) -> tuple[jax.Array, LayerOutput]:
        c, x, inputs = self.config, _block_input(x, self.mesh), inputs.with_memory_layer(pair)
        normed = self.norm_before("attention_norm", x)
        mixer = _token_mixer(c, self.mesh, shares=self.shares)
        attended, output = mixer(normed, inputs, cache)
        x = keep_tokens(x + self.added("attention_after_norm", attended), self.mesh)
        if self.reads and inputs.memory is not None:
            reader = c.memory.reader(c.replace(lora=None), self.mesh, name="memory")
            if reader is not None:  # else self-attention has attended to the memory
                x = keep_tokens(x + reader(x, inputs), self.mesh)
        y, load = _feed_forward(c, self.mesh, self.norm_before("mlp_norm", x), x, inputs)
        x = keep_tokens(x + self.added("mlp_after_norm", y), self.mesh)
        return _layer_output(self, x, inputs), output._replace(load=load)

    def norm_before(self, name: str, x: jax.Array) -> jax.Array:
        """Returns the input of attention or the MLP for hidden states x."""
        return x if self.config.norm_place == "after" else Norm(self.config, name=name)(x)

    def added(self, name: str, y: jax.Array) -> jax.Array:
        """Returns the residual update for the output y of attention or the MLP."""
        c = self.config
        y = y if c.norm_place == "before" else Norm(c, name=name)(y)
        return y if c.residual_scale == 1 else multiply(y, c.residual_scale)


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)) with one norm: Phi-2, Cohere."""

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None
    reads: bool = False  # always False: no memory supports this block
    shares: bool = False  # whether other layers read its keys and values

    @nn.compact
    def __call__(
        self, x: jax.Array, inputs: LayerInputs, cache, pair=None
    ) -> tuple[jax.Array, LayerOutput]:
        c, x = self.config, _block_input(x, self.mesh)
        normed = Norm(c, name="attention_norm")(x)
        mixer = _token_mixer(c, self.mesh, shares=self.shares)
        attended, output = mixer(normed, inputs, cache)
        y, load = _feed_forward(c, self.mesh, normed, x, inputs)
        x = keep_tokens(x + attended + y, self.mesh)
        return _layer_output(self, x, inputs), output._replace(load=load)


_BLOCKS = {"sequential": SequentialBlock, "parallel": ParallelBlock}


def _block(config: ModelConfig, *, scanned: bool) -> type[nn.Module]:
    """Returns the block class of `config`, rematerialised according to `config.remat`."""
    block = _BLOCKS[config.block]
    if config.remat == "none":
        return block
    # Outside a scan, XLA would merge the recomputation with the forward pass.
    return nn.remat(block, policy=remat.policy(config.remat), prevent_cse=not scanned)


class PositionEmbedding(nn.Module):
    """Position embeddings and logit biases of decoders without rotations (`config.position`).

    alibi: adds -m_h (i - j) to the logits; m_h is fixed per head (Press et al. 2022, arXiv
        2108.12409).
    t5: adds a learned b[bucket(i - j), h] to the logits, with one table for all layers (Raffel et
        al. 2020, sec. 2.1). Logits are scaled by 1/sqrt(H); T5 folds this factor into its initial
        weights.
    transformer_xl: adds to the logits the products of queries with sinusoidal embeddings of i - j,
        which each layer projects, and two learned biases per head (Dai et al. 2019, arXiv
        1901.02860).
    deberta: adds to the logits the products of queries, and of keys, with a learned row for the
        bucket of i - j. One table serves all layers; each layer projects it with its key and query
        projections (He et al. 2021, arXiv 2006.03654; shared projections as in V2 and V3).
    sinusoidal: hidden states start as sqrt(D) embed + PE, PE[p, 2i] = sin(p / 10000^(2i/D)) and
        PE[p, 2i+1] = cos of the same (Vaswani et al. 2017, sec. 3.4 and 3.5).
    learned: hidden states start as embed + a learned row for each position up to the trained length
        (GPT-2).

    Distances count tokens of the same document, also in packed rows.
    """

    config: ModelConfig

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.param_dtype)
        if c.position == "t5":
            spread = nn.initializers.normal(c.width**-0.5)
            self.bias = self.param("bias", spread, (BUCKETS, c.num_heads), dtype)
        if c.position == "deberta":
            spread, shape = nn.initializers.normal(0.02), (2 * DEBERTA_SPAN, c.width)
            self.embedding = self.param("embedding", spread, shape, dtype)
        if c.position == "learned":
            spread = nn.initializers.normal(0.02)
            self.embedding = self.param("embedding", spread, (c.max_length, c.width), dtype)

    def logit_bias(self) -> Alibi | RelativeBias | Float[Array, "X D"] | None:
        """Returns the part of the logit bias that all layers share (see `Attention.bias`)."""
        c = self.config
        if c.position == "alibi":
            return Alibi(jnp.asarray(alibi_slopes(c.num_heads)))
        if c.position == "t5":
            return RelativeBias(self.bias.astype(jnp.float32), MAX_DISTANCE)
        return self.embedding if c.position == "deberta" else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Num[Array, "B T"],
        segments: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        """Adds absolute position embeddings to token embeddings x, if the model has any."""
        c = self.config
        if c.position not in ("sinusoidal", "learned"):
            return x
        if segments is not None:
            positions = jnp.where(segments == 0, 0, positions)  # padding may have any position
        if c.position == "sinusoidal":
            waves = sinusoids(positions, c.width)
            return (math.sqrt(c.width) * x.astype(jnp.float32) + waves).astype(x.dtype)
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise InputError(
                f"positions of type {positions.dtype} have no row of the table that "
                "model.position=learned looks up; give whole ones"
            )
        # Positions past the table give NaN, since traced positions cannot raise an error.
        rows = jnp.take(self.embedding, positions, axis=0, mode="fill", fill_value=jnp.nan)
        return x + rows.astype(x.dtype)


def sinusoids(positions: Num[Array, "..."], width: int) -> Float[Array, "... D"]:
    """Returns float32 sinusoidal embeddings: sines in even channels, cosines in odd ones."""
    exponents = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    angles = positions.astype(jnp.float32)[..., None] * 10_000.0**-exponents
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*positions.shape, -1)[..., :width]


class DecoderOutput(NamedTuple):
    """The results of a call of the decoder; None for what the call does not ask for."""

    # [B, T, D] after the final norm. None with `CollectKeyValues.keys_only` and stacked layers
    hidden: jax.Array | None
    cache: cache_lib.Cache | None = None  # with the new tokens
    # Of each layer, or stacked over layers, as in `LayerOutput`: keys and values that `collect`
    # selects, [B, S, K, H] each, and the terms of the loss of its experts and of its pattern
    key_values: Any = None
    load: Any = None
    divergence: Any = None


def _by_field(outputs: list[LayerOutput]) -> LayerOutput:
    """Returns, in each field, a tuple with the values of all layers; None if none has any."""
    fields = (None if all(x is None for x in field) else field for field in zip(*outputs))
    return LayerOutput(*fields)


class Decoder(nn.Module):
    """A language model that returns hidden states; `logits` projects them to the vocabulary.

    `hidden = model.apply({"params": params}, tokens, ...).hidden`
    """

    config: ModelConfig
    # Its devices share rows, heads and tokens. Any mesh that `device_mesh` accepts; afterwards the
    # mesh with all axes that it returns
    mesh: jax.sharding.Mesh | None = None

    def __post_init__(self):
        self.mesh = device_mesh(self.mesh)
        super().__post_init__()

    def setup(self):
        c = self.config
        dtype = jnp.dtype(c.param_dtype)
        # 0.02 is the initial standard deviation of the Llama and GPT families.
        self.embed = nn.Embed(
            c.vocab_size, c.width, param_dtype=dtype, embedding_init=nn.initializers.normal(0.02)
        )
        memory = c.memory
        no_layer = (False,) * c.num_layers
        self.reads = no_layer if memory is None else memory.reader_layers(c.num_layers)
        if c.stacked:
            self.layers = nn.scan(
                _block(c, scanned=True),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(nn.broadcast, 0, 0),
                out_axes=0,
                length=c.num_layers,
            )(c.layer(0), self.mesh, self.reads[0])
        else:
            block = _block(c, scanned=False)
            self.layers = [
                block(c.layer(index), self.mesh, reads, index in c.shared_layers)
                for index, reads in enumerate(self.reads)
            ]
        if memory is not None:
            self.encoder = memory.encoder(c, self.mesh)
        if c.layer_embedding is not None:
            self.layer_embed = LayerEmbeddings(c, self.mesh)
        self.final_norm = Norm(c)
        if not c.tie_embeddings:
            self.head = Head(c)
        if c.mlm_head:
            self.mlm = MaskedHead(c)
        self.position = PositionEmbedding(c)
        if c.rope.learned:
            self.rope = self.param("rope", c.rope.init, c.rotary_dim)

    def __call__(
        self,
        tokens: Int[Array, "B T"] | Float[Array, "B T D"],
        *,
        positions: Num[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        rotation: Rotation | None = None,
        cache: cache_lib.Cache | None = None,
        order: np.ndarray | None = None,
        memory: EncodedContext | None = None,
        collect: CollectKeyValues | CollectTerms | None = None,
        beacons: jax.Array | None = None,
    ) -> DecoderOutput:
        """Returns hidden states after the final norm, and what `cache` and `collect` ask for.

        Args:
          tokens: int32 token ids, or float hidden states that replace their embeddings.
          positions: integers or fractions; None: the index of each token in its document,
            continuing after the row's tokens in the cache.
          segments: documents from 1, 0 is padding; None: one document.
          rotation: `config.rotation(length)`. None: the rotation for length T, or with a cache for
            its capacity, which is the full length of the request.
          cache: earlier tokens, from `lcjax.models.cache.create`.
          order: int32 [T], a permutation of the tokens that balances work between devices
            (`token_order`); hidden states have the same order. None: text order.
          memory: the context from `encode`; None: the decoder reads the text alone.
          collect: only without a cache: what each layer returns of its keys and values, or of the
            terms of the loss.
          beacons: int32 [B, R] if the last R tokens are beacons (`LayerInputs.beacons`).

        Raises:
          InputError: the inputs have a wrong shape or dtype, or do not fit the model.
        """
        c = self.config
        if tokens.ndim != (3 if jnp.issubdtype(tokens.dtype, jnp.floating) else 2):
            raise InputError(
                f"tokens of shape {list(tokens.shape)} and type {tokens.dtype} must be token ids"
                " [B, T], or hidden states [B, T, D]; tokens[None] is a batch of one text"
            )
        if memory is not None:
            check_memory(c.memory)
        if self.is_initializing() and c.memory is not None:
            chunk = tokens[:, None, :1]
            memory = self.encode(chunk, jnp.ones_like(chunk, bool))
        views, layers = (None,) * c.num_layers, None
        index = None if segments is None or cache is not None else order_indices(segments)
        if positions is None:
            positions = cache_lib.next_order(cache, segments, tokens.shape[1]) if cache else index
            if positions is None:
                positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape[:2])
        absolute = positions  # for position embeddings, which a prefix memory does not shift
        if memory is not None and c.memory.is_prefix:
            positions = positions + memory.mask.sum(1, keepdims=True)
        if cache is not None:
            cache, views = cache_lib.extend(cache, segments, positions)
            layers = cache.layers
        else:
            c.check_length(tokens.shape[1])
        if rotation is None or c.position != "rope":
            rotation = self._rotation(tokens, cache)
        elif not rotation.kinds and c.has_several_rotations:
            raise InputError(
                "rotation: layers of this model have a rope of their own (model.layers); give"
                " model.config.rotation(length)"
            )
        if order is not None:
            index = jnp.arange(len(order), dtype=jnp.int32)[None] if index is None else index
            tokens, positions, absolute, index, segments = (
                None if x is None else x[:, order]
                for x in (tokens, positions, absolute, index, segments)
            )
        bias = self.position.logit_bias()
        memories = layer_groups.contexts_by_layer(memory, self.reads)
        all_inputs = [
            LayerInputs(
                positions, segments, rotation.of_kind(kind), index, view, bias, order,
                layer_memory, collect, beacons,
            )
            for kind, view, layer_memory in zip(c.kind_by_layer, views, memories, strict=True)
        ]  # fmt: skip
        x = keep_tokens(self.embedded(tokens), self.mesh)
        if c.layer_embedding is not None:
            if tokens.ndim == 3:
                raise InputError(
                    "tokens are hidden states, and each layer of this model adds embeddings of"
                    " token ids (layer_embedding); give token ids"
                )
            embeddings = self.layer_embed(x, tokens)
            all_inputs = [
                inputs._replace(embedding=embeddings[:, :, index])
                for index, inputs in enumerate(all_inputs)
            ]
        x = self.position(x, absolute, segments)
        x, output = (self._stacked if c.stacked else self._separate)(x, all_inputs, layers)
        if cache is not None:
            cache = cache_lib.replace_layers(cache, output.cache)
        if self.is_initializing():
            self.logits(x[:, :1])  # `init` creates parameters of called modules only
        hidden = None if x is None else self.final_norm(x)
        return DecoderOutput(hidden, cache, output.key_values, output.load, output.divergence)

    def _stacked(
        self, x: jax.Array, all_inputs: list[LayerInputs], layers: Any
    ) -> tuple[jax.Array, LayerOutput]:
        """Applies layers whose weights are stacked, and returns stacked outputs."""
        c = self.config
        inputs, collect = all_inputs[0], all_inputs[0].collect
        if getattr(collect, "keys_only", False) and not self.is_initializing():
            block, stacked = _block(c, scanned=True), self.layers.variables["params"]
            block = block(c.layer(0), self.mesh, parent=None)
            return None, layer_groups.collect_keys(block, stacked, x, inputs)
        memory, pairs = layer_groups.stack_contexts([inputs.memory for inputs in all_inputs])
        return self.layers(x, inputs._replace(memory=memory), layers, pairs)

    def _separate(
        self, x: jax.Array, all_inputs: list[LayerInputs], layers: Any
    ) -> tuple[jax.Array, LayerOutput]:
        """Applies layers with separate weights, one by one or group by group.

        The fields of the output are tuples of what each layer returned.
        """
        c, blocks, outputs = self.config, self.layers, []
        layers = (None,) * c.num_layers if layers is None else layers
        shared: dict[int, Any] = {}  # keys and values by the number of their layer

        def inputs_of(index):
            # A layer that reads the keys of another one reads them in the cache of that.
            source = c.key_sources[index]
            inputs, cache = all_inputs[index], layers[source]
            if source != index and not self.is_initializing():
                inputs = inputs._replace(shared=shared[source], view=all_inputs[source].view)
            return inputs, cache

        def add(index, output):
            if output.shared is not None:
                shared[index] = output.shared
            if c.key_sources[index] != index and output.cache is not None:
                output = output._replace(cache=layers[index])
            outputs.append(output._replace(shared=None))

        if self.is_initializing() or self.is_mutable_collection("intermediates"):
            # Flax sees parameters and intermediate values only of modules that are called directly.
            for index, block in enumerate(blocks):
                x, output = block(x, *inputs_of(index))
                add(index, output)
            return x, _by_field(outputs)
        weights = [block.variables["params"] for block in blocks]
        groups = layer_groups.one_group_per_layer(c.num_layers)
        if c.scan_layers and all(layer is None for layer in layers):
            groups = layer_groups.group_layers(weights, layer_groups.layer_kinds(c))

        @functools.cache
        def jitted(block):  # so that equal layers are traced once
            def layer(params, *inputs):
                return block.apply({"params": params}, *inputs)

            # Without `inline`, XLA for TPUs chooses other layouts and copies queries.
            return jax.jit(layer, inline=True)

        for (first, *rest), period in groups:
            if rest:
                module, group = _block(c, scanned=True), slice(first, rest[-1] + 1)
                modules = [
                    module(block.config, self.mesh, block.reads, block.shares, parent=None)
                    for block in blocks[first : first + period]
                ]
                inputs = [inputs_of(index)[0] for index in range(first, rest[-1] + 1)]
                x, scanned = layer_groups.scan(modules, weights[group], inputs, x, self.mesh)
                for index, output in enumerate(scanned, first):
                    add(index, output)
                continue
            block = blocks[first].clone(parent=None, name=None)
            with jax.named_scope(f"layers_{first}"):
                x, output = jitted(block)(weights[first], x, *inputs_of(first))
            add(first, output)
        return x, _by_field(outputs)

    def embedded(self, tokens: Int[Array, "B T"] | Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the embeddings of token ids; casts hidden states to the compute dtype."""
        if tokens.ndim == 3:
            return tokens.astype(self.config.compute_dtype())
        c, mesh = self.config, None if self.is_initializing() else self.mesh
        x = look_up(self.embed.embedding, tokens, c.compute_dtype(), mesh)
        # transformers rounds the factor to the dtype of x, too.
        return x if c.embedding_scale == 1 else x * jnp.asarray(c.embedding_scale, x.dtype)

    def before_head(self, hidden: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns the inputs of the projection to logits.

        These are the hidden states, transformed by `MaskedHead` in masked language models.
        """
        return self.mlm(hidden) if self.config.mlm_head else hidden

    def encode(self, chunks: jax.Array, mask: jax.Array, **options: Any) -> EncodedContext:
        """Encodes a context for the layers that read it.

        Args:
          chunks: int32 [B, C, P], token ids.
          mask: bool [B, C, P], true where there is text.
          **options: keyword arguments of the memory's encoder (`Memory.encoder_inputs`).
        """
        check_memory(self.config.memory)
        options |= self.config.memory.select_inputs(params=self.variables.get("params"))
        return self.encoder(chunks, mask, **options)

    def embed_query(self, tokens: jax.Array, at: jax.Array, **options: Any) -> jax.Array:
        """Returns the embedding of a question, float32 [B, D], without gradient.

        It is the hidden state of one token after the first layer and the final norm, with which
        query-dependent memories compare the context.

        Args:
          tokens: int32 [B, T].
          at: int32 [B], the index of this token.
          **options: those of `first_layer`.
        """
        params = self.variables["params"]
        hidden = first_layer(params, self.config, tokens, self.mesh, **options)
        return hidden[jnp.arange(len(at)), at].astype(jnp.float32)

    def token_order(self, length: int) -> np.ndarray | None:
        """Returns an order of a row's tokens that gives equal work to the devices that share it.

        None is text order. It is used if no devices share a row, if tokens see only a bounded part
        of the text in some layer, or if a pattern, or a layer without attention, needs text order.
        """
        c = self.config
        parts = 1 if self.mesh is None else self.mesh.shape[LENGTH]
        if parts == 1 or not c.is_position_based:
            return None
        if not c.context_strategy(self.mesh, length).keeps_queries:
            return None
        needs_text_order = any(kind.mixer is not None for kind in map(c.of_kind, c.kinds))
        is_bounded = any(pattern.is_bounded for pattern in c.patterns)
        return None if is_bounded or needs_text_order else zigzag(length, parts)

    def _rotation(self, tokens: jax.Array, cache: cache_lib.Cache | None) -> Rotation:
        c = self.config
        if c.position != "rope":
            return no_rotation()
        length = tokens.shape[1] if cache is None else cache.capacity
        if cache is not None and not cache.bounds_length:
            for kind in c.kinds:
                if (rope := c.of_kind(kind).rope).depends_on_length:
                    raise InputError(
                        f"rotation=None: rope type {rope.type} depends on the length of the text,"
                        " which a rolling cache does not know; give rotation=config.rotation(...)"
                    )
        return c.rotation(length, self.rope if c.rope.learned else None)

    def projection(self) -> Projection:
        """Returns the projection of hidden states to logits, in the compute dtype."""
        if not self.config.tie_embeddings:
            return self.head()
        c = self.config
        kernel = self.embed.embedding.astype(c.compute_dtype())
        bias = self.mlm.bias if c.mlm_head else None
        return Projection(kernel, bias, True, c.logit_scale, c.logit_soft_cap, c.param_dtype)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Returns float32 logits of hidden states."""
        return self.projection()(self.before_head(hidden))


class States(NamedTuple):
    """Two representations of each token, both [B, T, D]."""

    hidden: jax.Array  # hidden states after the final norm
    ffn_input: jax.Array  # normed input of the last layer's feed-forward


def apply(
    model: Decoder, params: dict, tokens: jax.Array, *, with_ffn_input: bool = False, **options: Any
) -> tuple[jax.Array | States, Any]:
    """Applies a decoder, and optionally returns the input of the last feed-forward.

    Args:
      model: the decoder; with `with_ffn_input` its layers must not be stacked.
      params: the parameters.
      tokens: int32 [B, T].
      with_ffn_input: whether to return `States` in place of hidden states.
      **options: those of `Decoder.__call__`.

    Returns:
      The result of `Decoder.__call__`, in which `hidden` are hidden states or `States`.

    Raises:
      InputError: `with_ffn_input`, and the feed-forward of the model has no norm before it.
    """
    if not with_ffn_input:
        return model.apply({"params": params}, tokens, **options)
    layer = model.config.num_layers - 1
    if model.config.layer(layer).norm_place == "after":
        raise InputError(
            "model.norm_place=after: the last feed-forward of such a model reads hidden states"
            " without a norm, so none can be returned; use another representation"
        )
    norm = "mlp_norm" if model.config.block == "sequential" else "attention_norm"
    layer = f"layers_{layer}"
    output, state = model.apply(
        {"params": params},
        tokens,
        capture_intermediates=lambda module, _: module.path == (layer, norm),
        mutable=["intermediates"],
        **options,
    )
    ffn_input = state["intermediates"][layer][norm]["__call__"][0]
    return output._replace(hidden=States(output.hidden, ffn_input))


def first_layer(
    params: dict,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    mesh: jax.sharding.Mesh | None = None,
    **options: Any,
) -> Float[Array, "B T D"]:
    """Returns hidden states after the first layer and the final norm.

    The layer does not read the memory, and parameters get no gradient. `options` are those of
    `Decoder.__call__`.
    """
    stacked = params.get("layers")
    first = params["layers_0"] if stacked is None else jax.tree.map(lambda x: x[0], stacked)
    shared = {name: params[name] for name in ("embed", "final_norm", "rope") if name in params}
    shared["layers_0"] = {name: part for name, part in first.items() if name != "memory"}
    plain = {"num_layers": 1, "scan_layers": False, "memory": None, "remat": "none"}
    model = Decoder(config.replace(**plain, tie_embeddings=True), mesh, parent=None)
    output = model.apply({"params": jax.lax.stop_gradient(shared)}, tokens, **options)
    return jax.lax.stop_gradient(output.hidden)


def head(params: dict, config: ModelConfig) -> Projection:
    """Returns the projection of hidden states to logits from parameters, in the compute dtype."""
    return Decoder(config).apply({"params": params}, method="projection")


def _init(config: ModelConfig, key: jax.Array) -> dict:
    return Decoder(config).init(key, jnp.zeros((1, 2), jnp.int32))["params"]


def random_params(config: ModelConfig, seed: int, mesh: jax.sharding.Mesh | None = None) -> dict:
    """Returns random parameters; each array is created on its devices of `mesh`.

    Args:
      config: the model.
      seed: seed of the random key.
      mesh: the devices; None: the default device.
    """
    init, shapes = _initializer(config, device_mesh(mesh))
    check_fits(
        shapes,
        f"the random weights of a model in {config.param_dtype}",
        "store them as bfloat16 (param_dtype), spread them over more devices (mesh), or take a"
        " smaller model",
    )
    return init(jax.random.key(seed))


@functools.lru_cache(maxsize=16)
def _initializer(
    config: ModelConfig, mesh: jax.sharding.Mesh | None
) -> tuple[Callable[..., dict], dict]:
    """Returns the compiled function from a random key to parameters, and their shapes."""
    init, key = functools.partial(_init, config), jax.random.key(0)
    if mesh is None:
        init = jax.jit(init)
        return init, jax.eval_shape(init, key)
    shapes = jax.eval_shape(init, key)
    shardings = param_shardings(mesh, shapes)
    shapes = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), shapes, shardings)
    return jax.jit(init, out_shardings=shardings), shapes


def with_learned_rope(params: dict, config: ModelConfig, seed: int) -> dict:
    """Adds initial arrays of a learned rope to parameters without them; else returns `params`."""
    if not config.rope.learned or "rope" in params:
        return params
    return params | {"rope": config.rope.init(jax.random.key(seed), config.rotary_dim)}


def with_pattern_parameters(
    params: dict, config: ModelConfig, seed: int, mesh: jax.sharding.Mesh | None = None
) -> dict:
    """Adds initial parameters of patterns where `params` lack them, and drops those of others.

    Args:
      params: those of `config`, arranged as its layers; those of patterns may be missing.
      config: the model.
      seed: of the initial values.
      mesh: the devices; None: the default device.
    """
    present, shapes = flatten(params), _shapes_of_patterns(config)
    missing = _missing(present, shapes)
    used = {p: x for p, x in present.items() if not is_of_pattern(p) or p in shapes}
    if not missing and len(used) == len(present):
        return params

    def create(key):
        return split(_init(config, key), missing.__contains__)[0]

    key = jax.random.fold_in(jax.random.key(seed), 2)
    shardings = None
    if mesh is not None:
        shardings = param_shardings(mesh, jax.eval_shape(create, key))
    return union(nest(used), jax.jit(create, out_shardings=shardings)(key) if missing else {})


def missing_of_patterns(params: dict, config: ModelConfig) -> set[str]:
    """Returns the paths of parameters of `config`'s patterns that `params` lack.

    Raises:
      InputError: `params` have some of another shape.
    """
    return _missing(flatten(params), _shapes_of_patterns(config))


def _shapes_of_patterns(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the parameters of patterns, by path."""
    if not any(pattern.parameters for pattern in config.patterns):
        return {}  # without tracing the model
    shapes = flatten(jax.eval_shape(functools.partial(_init, config), jax.random.key(0)))
    return {path: leaf for path, leaf in shapes.items() if is_of_pattern(path)}


def _missing(present: dict, shapes: dict[str, jax.ShapeDtypeStruct]) -> set[str]:
    """Returns the paths of `shapes` that are not in `present`; see `missing_of_patterns`."""
    for path in sorted(shapes.keys() & present.keys()):
        if present[path].shape != shapes[path].shape:
            raise InputError(
                f"model.pattern: the weights have {path} of shape {present[path].shape}, and these"
                f" fields need {shapes[path].shape}; give the sizes with which it was trained"
            )
    return set(shapes) - set(present)


def abstract_params(config: ModelConfig, mesh: jax.sharding.Mesh, *, host: bool = False) -> dict:
    """Returns shapes, dtypes and shardings of the parameters on `mesh`, without allocating them.

    Args:
      config: the model.
      mesh: the devices.
      host: whether the shardings are in host memory.
    """
    shapes = jax.eval_shape(lambda k: _init(config, k), jax.random.key(0))
    shardings = param_shardings(mesh, shapes)
    if host:
        shardings = host_shardings(shapes, shardings)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
