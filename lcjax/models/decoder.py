"""The decoder: embedding, blocks, final norm, and the projection to logits."""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from lcjax.attention import order_indices
from lcjax.errors import InputError
from lcjax.models import cache as cache_lib
from lcjax.models import layer_groups
from lcjax.models.config import ModelConfig
from lcjax.models.encoder import MaskedHead
from lcjax.models.experts import Load
from lcjax.models.layers import (
    DEBERTA_SPAN,
    MLP,
    Attention,
    CollectKeyValues,
    CollectLoad,
    Head,
    LayerInputs,
    Norm,
    SparseMLP,
    look_up,
    multiply,
)
from lcjax.models.loss import Projection
from lcjax.models.memory import EncodedContext, check_memory
from lcjax.parallel.offload import host_shardings
from lcjax.parallel.sharding import LENGTH, keep_tokens, param_shardings
from lcjax.rope import Rotation
from lcjax.rope.rotation import no_rotation
from pallas_kernels import Alibi, RelativeBias, alibi_slopes, zigzag

# "attention" saves the output of attention, whose recomputation is the most expensive for long
# texts, in time and in traffic between devices that share a text. "dots" also saves the results of
# products and recomputes elementwise operations, which is cheaper than to write and read them.
_REMAT_POLICIES = {
    "full": None,
    "attention": jax.checkpoint_policies.save_only_these_names("attention"),
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names("attention", "experts"),
    ),
}

BUCKETS = 32  # of T5's table, per head
MAX_DISTANCE = 128  # from which all distances share its last bucket


def _feed_forward(
    config: ModelConfig, mesh: jax.sharding.Mesh | None, x: jax.Array, inputs: LayerInputs
) -> tuple[jax.Array, Load | None]:
    """What the MLP of a block gives, and the load of its experts if `inputs` collects that."""
    if config.experts is None:
        return MLP(config, mesh, name="mlp")(x), None
    collect = inputs.collect if isinstance(inputs.collect, CollectLoad) else None
    return SparseMLP(config, mesh, name="mlp")(x, collect)


class SequentialBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): Llama, Mistral, Qwen.

    Norms may stand after attention and MLP (OLMo 2), or before and after (Gemma 2). A layer with
    cross-attention to a memory adds it in between.
    """

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None
    reads: bool = False

    @nn.compact
    def __call__(
        self, x: jax.Array, inputs: LayerInputs, layer, pair=None
    ) -> tuple[jax.Array, Any]:
        c, x, inputs = self.config, keep_tokens(x, self.mesh), inputs.with_memory_layer(pair)
        attention = Attention if c.memory is None else c.memory.attention_module or Attention
        normed = self.norm_before("attention_norm", x)
        attended, layer = attention(c, self.mesh, name="attention")(normed, inputs, layer)
        x = keep_tokens(x + self.added("attention_after_norm", attended), self.mesh)
        if self.reads and inputs.memory is not None:
            reader = c.memory.reader(c, self.mesh, name="memory")
            if reader is not None:  # else self-attention has read it
                x = keep_tokens(x + reader(x, inputs), self.mesh)
        y, load = _feed_forward(c, self.mesh, self.norm_before("mlp_norm", x), inputs)
        layer = layer if load is None else load
        return keep_tokens(x + self.added("mlp_after_norm", y), self.mesh), layer

    def norm_before(self, name: str, x: jax.Array) -> jax.Array:
        """What attention or the MLP reads of hidden states x."""
        return x if self.config.norm_place == "after" else Norm(self.config, name=name)(x)

    def added(self, name: str, y: jax.Array) -> jax.Array:
        """What is added to hidden states of the output y of attention or the MLP."""
        c = self.config
        y = y if c.norm_place == "before" else Norm(c, name=name)(y)
        return y if c.residual_scale == 1 else multiply(y, c.residual_scale)


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)) with one norm: Phi-2."""

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None
    reads: bool = False  # never: no memory is defined for it

    @nn.compact
    def __call__(
        self, x: jax.Array, inputs: LayerInputs, layer, pair=None
    ) -> tuple[jax.Array, Any]:
        c, x = self.config, keep_tokens(x, self.mesh)
        normed = Norm(c, name="attention_norm")(x)
        attended, layer = Attention(c, self.mesh, name="attention")(normed, inputs, layer)
        y, load = _feed_forward(c, self.mesh, normed, inputs)
        return keep_tokens(x + attended + y, self.mesh), layer if load is None else load


_BLOCKS = {"sequential": SequentialBlock, "parallel": ParallelBlock}


def _block(config: ModelConfig, *, scanned: bool) -> type[nn.Module]:
    """The block of `config`, rematerialised according to `config.remat`."""
    block = _BLOCKS[config.block]
    if config.remat == "none":
        return block
    # Outside a scan, XLA would merge the recomputation with the forward pass.
    return nn.remat(block, policy=_REMAT_POLICIES[config.remat], prevent_cse=not scanned)


class PositionEmbedding(nn.Module):
    """Position embeddings and logit biases of decoders without rotations (`config.position`).

    alibi: logits get -m_h (i - j), m_h fixed by the head (Press et al. 2022, arXiv 2108.12409).
    t5: logits get a learned b[bucket(i - j), h], one table for all layers (Raffel et al. 2020,
        sec. 2.1). Logits keep their scale 1/sqrt(H), which T5 leaves to its initial weights.
    transformer_xl: logits get the products of queries with sinusoidal embeddings of i - j, which
        each layer projects, and two learned biases of a head (Dai et al. 2019, arXiv 1901.02860).
    deberta: logits get the products of queries, and of keys, with a learned row for the bucket of
        i - j, one table for all layers, which each of them projects as its keys and queries
        (He et al. 2021, arXiv 2006.03654; projections are shared as in V2 and V3).
    sinusoidal: hidden states start at sqrt(D) embed + PE, PE[p, 2i] = sin(p / 10000^(2i/D)) and
        PE[p, 2i+1] = cos of the same (Vaswani et al. 2017, sec. 3.4 and 3.5).
    learned: they start at embed + a learned row for each position up to the trained length (GPT-2).

    Distances are those of tokens in their document, also in packed rows.
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
        """Returns what all layers share of the bias of their logits (`Attention.bias`)."""
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
        """Returns the first hidden states of embeddings x at `positions`."""
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
        # Past the table: a row of NaN, since traced positions cannot raise.
        rows = jnp.take(self.embedding, positions, axis=0, mode="fill", fill_value=jnp.nan)
        return x + rows.astype(x.dtype)


def sinusoids(positions: Num[Array, "..."], width: int) -> Float[Array, "... D"]:
    """Returns float32 sinusoidal embeddings: sines in even channels, cosines in odd ones."""
    exponents = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    angles = positions.astype(jnp.float32)[..., None] * 10_000.0**-exponents
    pairs = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return pairs.reshape(*positions.shape, -1)[..., :width]


class Decoder(nn.Module):
    """A causal language model that returns hidden states; `logits` projects them.

    `hidden, cache = model.apply({"params": params}, tokens, ...)`
    """

    config: ModelConfig
    mesh: jax.sharding.Mesh | None = None  # whose devices share rows, heads and tokens

    def setup(self):
        c = self.config
        dtype = jnp.dtype(c.param_dtype)
        # The Llama and GPT families start from a standard deviation of 0.02.
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
                block(c.layer(index), self.mesh, reads) for index, reads in enumerate(self.reads)
            ]
        if memory is not None:
            self.encoder = memory.encoder(c, self.mesh)
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
        collect: CollectKeyValues | CollectLoad | None = None,
        beacons: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Returns hidden states [B, T, D] after the final norm, and the updated cache.

        Args:
          tokens: int32, or hidden states in place of their embeddings.
          positions: integers or fractions; None: the index of each token in its document,
            after the tokens of the row in the cache.
          segments: documents from 1, 0 is padding; None: one document.
          rotation: `config.rotation(length)`; None: that for length T, or for the capacity of the
            cache, which is the full length of the request.
          cache: earlier tokens, from `lcjax.models.cache.create`.
          order: int32 [T], a permutation of the tokens that balances work between devices
            (`token_order`); hidden states have the same order. None: text order.
          memory: the context from `encode`; None: the decoder reads the text alone.
          collect: without a cache, the tokens whose keys and values [B, S, K, H] of each layer are
            returned in its place, as `Cache.layers` has them but for the order of axes. Where
            layers are scanned and it is `keys_only`, there are no hidden states. Or the tokens
            that count in the `Load` of each layer's experts, which is returned in its place.
          beacons: int32 [B, R], where the last R tokens are beacons (`LayerInputs.beacons`).
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
        absolute = positions  # of embeddings, which a memory before the text does not move
        if memory is not None:
            positions = positions + c.memory.prefix_length(memory)
        if cache is not None:
            cache, views = cache_lib.extend(cache, segments, positions)
            layers = cache.layers
        else:
            c.check_length(tokens.shape[1])
        if rotation is None or c.position != "rope":
            rotation = self._rotation(tokens, cache)
        elif not rotation.kinds and any(kind.rope is not None for kind in c.kinds):
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
        x = self.position(x, absolute, segments)
        x, layers = (self._stacked if c.stacked else self._apart)(x, all_inputs, layers)
        if cache is not None:
            cache = cache_lib.replace_layers(cache, layers)
        if self.is_initializing():
            self.logits(x[:, :1])  # so that `init` creates the head
        return None if x is None else self.final_norm(x), cache if collect is None else layers

    def _stacked(
        self, x: jax.Array, all_inputs: list[LayerInputs], layers: Any
    ) -> tuple[jax.Array, Any]:
        """Applies layers whose weights are one stack."""
        c = self.config
        inputs, collect = all_inputs[0], all_inputs[0].collect
        if getattr(collect, "keys_only", False) and not self.is_initializing():
            block, stacked = _block(c, scanned=True), self.layers.variables["params"]
            block = block(c.layer(0), self.mesh, parent=None)
            return None, layer_groups.collect_keys(block, stacked, x, inputs)
        memory, pairs = layer_groups.stack_contexts([inputs.memory for inputs in all_inputs])
        return self.layers(x, inputs._replace(memory=memory), layers, pairs)

    def _apart(
        self, x: jax.Array, all_inputs: list[LayerInputs], layers: Any
    ) -> tuple[jax.Array, Any]:
        """Applies layers with separate weights, one by one or group by group."""
        c, blocks, outputs = self.config, self.layers, []
        groups = layer_groups.one_group_per_layer(c.num_layers)
        if c.scan_layers and layers is None and not self.is_initializing():
            weights = [block.variables["params"] for block in blocks]
            kinds = [*zip(c.kind_by_layer, self.reads, strict=True)]
            groups = layer_groups.group_layers(weights, kinds)
        for (first, *rest), period in groups:
            if rest:
                module, group = _block(c, scanned=True), slice(first, rest[-1] + 1)
                modules = [
                    module(block.config, self.mesh, block.reads, parent=None)
                    for block in blocks[first : first + period]
                ]
                parts = weights[group], all_inputs[group]
                x, group_outputs = layer_groups.scan(modules, *parts, x, self.mesh)
                outputs += group_outputs
                continue
            layer = None if layers is None else layers[first]
            x, layer = blocks[first](x, all_inputs[first], layer)
            outputs.append(layer)
        return x, tuple(outputs)

    def embedded(self, tokens: Int[Array, "B T"] | Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the embeddings of tokens; hidden states pass unchanged."""
        if tokens.ndim == 3:
            return tokens.astype(self.config.compute_dtype())
        c, mesh = self.config, None if self.is_initializing() else self.mesh
        x = look_up(self.embed.embedding, tokens, c.compute_dtype(), mesh)
        # A factor in the type of x, as transformers rounds it.
        return x if c.embedding_scale == 1 else x * jnp.asarray(c.embedding_scale, x.dtype)

    def before_head(self, hidden: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns the inputs of `head`: hidden states, transformed in masked models."""
        return self.mlm(hidden) if self.config.mlm_head else hidden

    def encode(self, chunks: jax.Array, mask: jax.Array, **options: Any) -> EncodedContext:
        """Encodes chunks int32 [B, C, P], with bool `mask` true where there is text.

        `options` are those of the memory's encoder (`Memory.encoder_inputs`).
        """
        check_memory(self.config.memory)
        options |= self.config.memory.select_inputs(params=self.variables.get("params"))
        return self.encoder(chunks, mask, **options)

    def embed_query(self, tokens: jax.Array, at: jax.Array, **options: Any) -> jax.Array:
        """What a text asks a context for, at its tokens `at` int32 [B]: float32 [B, D], detached.

        Hidden states after one layer and the final norm; `options` as of `first_layer`.
        """
        params = self.variables["params"]
        found = first_layer(params, self.config, tokens, self.mesh, **options)
        return found[jnp.arange(len(at)), at].astype(jnp.float32)

    def token_order(self, length: int) -> np.ndarray | None:
        """Returns the order of a row's tokens with equal work for the devices that share it.

        None: text order, if no devices share a row, if in some layer a token sees a bounded part of
        the text, or a pattern needs keys in text order.
        """
        c = self.config
        parts = 1 if self.mesh is None else self.mesh.shape[LENGTH]
        if parts == 1 or c.context_parallel != "ring" or not c.is_position_based:
            return None
        sees_all = all(pattern.cache_window() is None for pattern in c.patterns)
        return zigzag(length, parts) if sees_all else None

    def _rotation(self, tokens: jax.Array, cache: cache_lib.Cache | None) -> Rotation:
        c = self.config
        if c.position != "rope":
            return no_rotation()
        length = tokens.shape[1] if cache is None else cache.capacity
        if cache is not None and cache.rolling is not None:
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
    """Hidden states of two places, [B, T, D] both."""

    hidden: jax.Array  # after the final norm
    ffn_input: jax.Array  # of the last layer: what its feed-forward reads, after its norm


def apply(
    model: Decoder, params: dict, tokens: jax.Array, *, with_ffn_input: bool = False, **options: Any
) -> tuple[jax.Array | States, Any]:
    """Applies a decoder: returns its hidden states, and what `Decoder.__call__` returns with them.

    Args:
      model: the decoder; for `with_ffn_input` one whose layers are not scanned.
      params: the parameters.
      tokens: int32 [B, T].
      with_ffn_input: whether the hidden states are `States`.
      **options: those of `Decoder.__call__`.
    """
    if not with_ffn_input:
        return model.apply({"params": params}, tokens, **options)
    if model.config.norm_place == "after":
        raise InputError(
            "model.norm_place=after: the feed-forward of such a model reads hidden states without a"
            " norm, so none can be returned; use another representation"
        )
    norm = "mlp_norm" if model.config.block == "sequential" else "attention_norm"
    layer = f"layers_{model.config.num_layers - 1}"
    (hidden, rest), state = model.apply(
        {"params": params},
        tokens,
        capture_intermediates=lambda module, _: module.path == (layer, norm),
        mutable=["intermediates"],
        **options,
    )
    return States(hidden, state["intermediates"][layer][norm]["__call__"][0]), rest


def first_layer(
    params: dict,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    mesh: jax.sharding.Mesh | None = None,
    **options: Any,
) -> Float[Array, "B T D"]:
    """Returns hidden states after the first layer and the final norm.

    The memory is not read, and parameters get no gradient; `options` are those of
    `Decoder.__call__`.
    """
    stacked = params.get("layers")
    first = params["layers_0"] if stacked is None else jax.tree.map(lambda x: x[0], stacked)
    shared = {name: params[name] for name in ("embed", "final_norm", "rope") if name in params}
    shared["layers_0"] = {name: part for name, part in first.items() if name != "memory"}
    plain = {"num_layers": 1, "scan_layers": False, "memory": None, "remat": "none"}
    model = Decoder(config.replace(**plain, tie_embeddings=True), mesh, parent=None)
    hidden, _ = model.apply({"params": jax.lax.stop_gradient(shared)}, tokens, **options)
    return jax.lax.stop_gradient(hidden)


def head(params: dict, config: ModelConfig) -> Projection:
    """Returns the projection to logits of a model's parameters, in the compute dtype."""
    return Decoder(config).apply({"params": params}, method="projection")


def _init(config: ModelConfig, key: jax.Array) -> dict:
    return Decoder(config).init(key, jnp.zeros((1, 2), jnp.int32))["params"]


def random_params(config: ModelConfig, seed: int, mesh: jax.sharding.Mesh | None = None) -> dict:
    """Returns random weights; each array is created where it stays, on `mesh` or one device."""
    key = jax.random.key(seed)
    shardings = None
    if mesh is not None:
        shardings = param_shardings(mesh, jax.eval_shape(lambda k: _init(config, k), key))
    return jax.jit(lambda k: _init(config, k), out_shardings=shardings)(key)


def with_learned_rope(params: dict, config: ModelConfig, seed: int) -> dict:
    """Adds initial frequencies if `config.rope` learns them and `params` has none."""
    if not config.rope.learned or "rope" in params:
        return params
    return params | {"rope": config.rope.init(jax.random.key(seed), config.rotary_dim)}


def abstract_params(config: ModelConfig, mesh: jax.sharding.Mesh, *, host: bool = False) -> dict:
    """Returns shapes, dtypes and shardings of the parameters on `mesh`; nothing is computed.

    With `host` they are in the memory of its hosts.
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
