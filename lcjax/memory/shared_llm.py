"""SharedLLM: a model reads a context through the keys and values of its lower layers.

"Two are better than one: context window extension with multi-grained self-injection" (sec. 3). The
lower model, a copy of the embedding and the first M layers, encodes a context in chunks. Each chunk
becomes a tree of nodes (`lcjax.memory.context_tree`). Each node is encoded independently, with
causal attention and positions from 0, and keys and values of some of its tokens are collected. One
layer of the upper model attends to layer l of the lower model, between its self-attention and MLP:

    h <- h + Wo softmax(q K_l^T / sqrt(H)) V_l        q = R(n) Wq norm(h),  K_l = R(i + j) Wk ...

where j is the position of a key in its node, i the number of its chunk, and n, the position of
every query, the number of all chunks (sec. 3.3, eq. 6). Equation 6 prints the positions i and n
only. The lower model's keys are in its cache, already rotated to j (app. A.2), and a rotation to i
adds to that; `positions="chunk_index"` rotates keys to i alone. Cross-attention has no projections
of keys and values: it shares them with the lower model's self-attention.

Tensor names and fields of config.json are those of the released code (Clement25/SharedLLM). It is
CEPE's code, in which a negative `num_cross_attn_layers` counts the reader layers from the first
layer on. Settings without a field in that code are in the field `lcjax_shared_llm`.
"""

import dataclasses
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from lcjax.attention import Causal
from lcjax.errors import InputError, OneOf, check_fields
from lcjax.memory.context_tree import (
    Policy,
    QueryAware,
    Right,
    SelectionRatio,
    SplitNoise,
    Tree,
    node_segments,
    preserved_nodes,
    search,
    select_tokens,
    without_padding,
)
from lcjax.memory.cross_attention import (
    RELEASED_CLASS,
    CrossAttention,
    CrossAttentionMemory,
    OutputShare,
    ReaderLayers,
    init_output,
)
from lcjax.models import cache as cache_lib
from lcjax.models.decoder import Decoder, first_layer
from lcjax.models.layers import CollectKeyValues
from lcjax.models.memory import (
    EncodedContext,
    Memory,
    MemorySection,
    ReadConfig,
    TensorRow,
    WriteConfig,
    add_to_readers,
    check_chunks,
)
from lcjax.models.model_config import ModelConfig
from lcjax.parallel.sharding import init_on_mesh
from lcjax.rope import Rotation

PLACEMENTS = ("bottom", "top", "interleaved")
POSITIONS = ("paper", "chunk_index", "released", "none")
_HF_FIELD = "lcjax_shared_llm"
_HF_DEPTH = "segment_tree_depth"
_HF_CHUNK = 1_024  # chunk of the released language models, which config.json does not have


@Memory.register_subclass("shared_llm")
@dataclasses.dataclass(frozen=True)
class SharedLlm(CrossAttentionMemory):
    """Options of SharedLLM: the lower model, its collected tokens, and the reader layers."""

    states: ModelConfig  # the lower model, of M layers
    chunk: int  # tokens of a chunk
    tree: Tree = Tree()
    policy: Policy = Right()
    # The M reader layers. bottom: the first; top: the last; interleaved: spread evenly from the
    # first on. The first reader layer reads the lower model's first layer, and so on.
    placement: Annotated[str, OneOf(PLACEMENTS)] = "bottom"
    # Positions of n chunks, added to the positions of keys in nodes. paper: keys at 0 ... n-1 and
    # queries at n. chunk_index: the same numbers without the positions in nodes, equation 6 taken
    # literally. released: as the released code does for whole texts, queries at n + 1, and keys
    # at i // (tokens collected from a chunk), so nearly always 0 (it indexes its table of rotations
    # twice). none, the ablation: 0 for all chunks, and queries at 0.
    positions: Annotated[str, OneOf(POSITIONS)] = "paper"

    def __post_init__(self):
        object.__setattr__(self, "policy", Policy.from_function(self.policy))

    @property
    def layers(self) -> int:
        """The number of layers of the lower model, and of reader layers, M."""
        return self.states.num_layers

    def check(self, config: ModelConfig) -> None:
        check_fields("model.memory", self)
        self.tree.check()
        self.tree.check_chunk(self.chunk, "model.memory.chunk")
        if not 1 <= self.layers <= config.num_layers:
            raise InputError(
                f"model.memory.layers={self.layers} must lie in 1 ... {config.num_layers}, the"
                " layers of the model, of which the lower model is made"
            )
        for key in ("width", "num_kv_heads", "head_dim", "rotary_dim", "vocab_size"):
            lower, upper = getattr(self.states, key), getattr(config, key)
            if lower != upper:
                raise InputError(
                    f"model.memory: the lower model has {key}={lower} and the upper one {upper};"
                    " it is made of the layers of the same checkpoint"
                )
        if any(kind.rope is not None for kind in config.kinds):
            raise InputError(
                "model.memory.type=shared_llm has one rotation for the keys of all layers; leave"
                " rope out of model.layers, or the memory"
            )
        if config.block != "sequential" or config.position != "rope" or self.states.rope.learned:
            raise InputError(
                "model.memory.type=shared_llm reads rotated keys between attention and MLP, and"
                f" this model has block={config.block}, position={config.position}, rope"
                f" {self.states.rope.type}; choose a Llama-like decoder"
            )

    @property
    def max_chunk_size(self) -> int:
        return self.chunk

    def check_chunk(self, length: int, key: str) -> None:
        super().check_chunk(length, key)
        self.tree.check_chunk(length, key)

    def num_slots(self, tokens: int) -> int:
        return self.tree.max_selected(tokens)

    def for_inference(self) -> "SharedLlm":
        """Returns a copy that splits nodes in the middle, without noise."""
        return dataclasses.replace(self, tree=dataclasses.replace(self.tree, noise=None))

    def without_query(self) -> "SharedLlm":
        return dataclasses.replace(self, policy=Right())

    def encoder(self, config: ModelConfig, mesh: jax.sharding.Mesh | None) -> nn.Module:
        return TreeEncoder(self.encoder_config_for(config), self, mesh)

    @property
    def encoder_inputs(self) -> tuple[str, ...]:
        is_asked = self.policy.query_dependent and self.tree.depth > 1
        query = ("query", "has_query") if is_asked else ()
        return ("numbers", "tags", "path", "key", *query)

    def rotation(self) -> Rotation:
        """Returns the rotation of the lower model and of cross-attention, for the chunk length."""
        return self.states.rope.rotation(self.states.rotary_dim, self.chunk)

    def reader_layers(self, num_layers: int) -> tuple[bool, ...]:
        count = self.layers
        if self.placement == "interleaved":
            readers = {index * num_layers // count for index in range(count)}
        else:
            first = 0 if self.placement == "bottom" else num_layers - count
            readers = range(first, first + count)
        return tuple(layer in readers for layer in range(num_layers))

    def uniform_layers(self, num_layers: int) -> bool:
        """Returns False: each reader layer reads another layer of the lower model."""
        return False

    def reader(self, config: ModelConfig, mesh: jax.sharding.Mesh | None, **options) -> nn.Module:
        return TreeAttention(config, mesh, **options)

    def with_num_readers(self, count: int) -> "SharedLlm":
        return dataclasses.replace(self, states=self.states.replace(num_layers=count))

    def chunk_parts(self, chunk: int) -> tuple[int, ...]:
        return tuple(chunk >> level for level in self.tree.levels)

    @classmethod
    def from_hf(cls, hf: dict[str, Any], where: str, read_config: ReadConfig) -> ModelConfig | None:
        if _HF_DEPTH not in hf:
            return None
        config, count = read_config(hf, where), hf.get("num_cross_attn_layers")
        if type(count) is not int or not 1 <= abs(count) <= config.num_layers:
            raise InputError(
                f"{where}: num_cross_attn_layers={count!r} must be the layers that read the"
                f" context, up to {config.num_layers}, below 0 for the first ones"
            )
        states = lower_config(config, abs(count))
        if isinstance(inner := hf.get("encoder_config"), dict):
            states = states.replace(rope=read_config({"model_type": "llama"} | inner, where).rope)
        if (fields := hf.get(_HF_FIELD)) is None:
            return config.replace(memory=cls(states, **_released_fields(hf, where)))
        memory = cls(
            states,
            fields["chunk"],
            Tree(tuple(fields["ratios"]), fields["noise"]),
            Policy.from_dict(fields["policy"]),
            fields["placement"],
            fields["positions"],
        )
        return config.replace(memory=memory)

    def to_hf(self, config: ModelConfig, write_config: WriteConfig) -> dict[str, Any]:
        sign, count = 1 if self.placement == "top" else -1, self._selected_per_level()[0]
        return write_config(config.replace(memory=None)) | {
            "architectures": [RELEASED_CLASS],
            "is_decoder": True,
            "do_cross_attention": True,
            "num_cross_attn_layers": sign * self.layers,
            "last_p": f'"{count},{count}"',  # the released code selects equally many per node
            _HF_DEPTH: self.tree.depth,
            "do_retrieval": self.policy.query_dependent,
            "add_noise": False,  # it fails with true
            "encoder_hidden_size": self.states.width,
            "encoder_config": write_config(self.states),
            "train_encoder": False,
            _HF_FIELD: {
                "chunk": self.chunk,
                "ratios": list(self.tree.ratios),
                "noise": self.tree.noise,
                "policy": self.policy.to_dict(),
                "placement": self.placement,
                "positions": self.positions,
            },
        }

    def hf_rows(self, config: ModelConfig, decoder_rows: list[TensorRow]) -> list[TensorRow]:
        norm, query, _, _, out = super().hf_rows(config, decoder_rows)
        bias = ("model.layers.{}.cross_attn.q_proj.bias", "NH", "layers/memory/query/bias", "NH")
        return [norm, query, *([bias] if config.qkv_bias else []), out]

    def unsupported_by_released_code(self) -> str | None:
        if self.placement == "interleaved":
            return "placement=interleaved as bottom"
        counts = self._selected_per_level()
        if len(set(counts)) > 1:
            ratios = list(self.tree.ratios)
            return f"ratios={ratios} as trees that keep {counts[0]} tokens of every node"
        return None

    def _selected_per_level(self) -> list[int]:
        """Returns the number of tokens selected from a node of each level."""
        return [-(-(self.chunk >> w) // ratio) for w, ratio in enumerate(self.tree.ratios, 1)]


def _released_fields(hf: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the settings of a folder of the released code, which never drew noisy splits."""
    depth, text = hf[_HF_DEPTH], str(hf.get("last_p", -1))
    first = text.strip("\"'()[] ").split(",")[0]
    try:
        share = float(first) if "." in first else int(first)
        ratios = tuple(_ratio(_HF_CHUNK >> level, share) for level in range(1, depth + 1))
    except (ValueError, TypeError):
        raise InputError(
            f"{where}: last_p={text} with {_HF_DEPTH}={depth!r} does not say how many tokens of a"
            " node are kept; correct them"
        ) from None
    return {
        "chunk": _HF_CHUNK,
        "tree": Tree(ratios),
        "policy": QueryAware() if hf.get("do_retrieval", True) else Right(),
        "placement": "bottom" if hf["num_cross_attn_layers"] < 0 else "top",
        "positions": "released",
    }


def _ratio(length: int, share: float) -> int:
    """Returns the ratio of a node of `length` tokens.

    `share` is the number of selected tokens, a float fraction of them, or <= 0 for all tokens.
    """
    if share <= 0:
        return 1
    count = int(length * share) if isinstance(share, float) else share
    if not 1 <= count <= length:
        raise ValueError(count)
    return length // count


class TreeEncoder(nn.Module):
    """The lower model, which returns keys and values of the tokens that trees select."""

    config: ModelConfig
    memory: SharedLlm
    mesh: jax.sharding.Mesh | None = None

    def setup(self):
        self.model = Decoder(self.config, self.mesh)
        nn.share_scope(self, self.model)  # `encoder/embed`, not `encoder/model/embed`

    def __call__(
        self,
        chunks: Int[Array, "B C P"],
        mask: Bool[Array, "B C P"],
        *,
        numbers: Int[Array, "B C"] | None = None,
        path: Bool[Array, "B C h-1"] | None = None,
        query: Float[Array, "B D"] | None = None,
        has_query: Bool[Array, " B"] | None = None,
        key: jax.Array | None = None,
        tags: UInt[Array, "B C"] | None = None,
        tree: Tree | None = None,
    ) -> EncodedContext:
        """Encodes chunks and returns the keys and values of their selected tokens.

        Args:
          chunks: token ids.
          mask: true where there is text.
          numbers: the place of each chunk in its context; None: chunks with text count 0, 1, 2, ...
          path: which halves are split again, from `choose`; None: chosen here with `query`, `key`.
          query: embedded questions (`Decoder.embed_query`).
          has_query: which rows have a question; in others the half nearer to the text is split
            again. None: all rows have one.
          key: random key in training, for the noise of splits and for a random policy.
          tags: a hash of each chunk, which gives it a random key for a random policy.
          tree: replaces the memory's tree: the tree below a node (`Tree.below`).
        """
        check_chunks(chunks, mask, self.memory.max_chunk_size)
        tree, (rows, count, width) = tree or self.memory.tree, chunks.shape
        has_text = mask.any(2)
        if numbers is None:
            numbers = jnp.cumsum(has_text, axis=1, dtype=jnp.int32) - 1
        noise = _split_noise(tree, key, rows, count)
        if path is None:
            question = {"query": query, "has_query": has_query}
            path = self.choose(chunks, mask, tree, noise=noise, key=key, tags=tags, **question)
        tokens, length = without_padding(*(x.reshape(rows * count, width) for x in (chunks, mask)))
        nodes = preserved_nodes(tree, length, path.reshape(rows * count, -1), noise)
        segments, positions = node_segments(nodes, width)
        index, selected = select_tokens(tree, nodes, width)
        offsets, in_node = numbers.reshape(-1, 1), jnp.take_along_axis(positions, index, 1)
        if self.memory.positions == "released":
            offsets = offsets // self.memory.num_slots(self.memory.chunk)
        elif self.memory.positions == "none":
            offsets = jnp.zeros_like(offsets)
        elif self.memory.positions == "chunk_index":
            in_node = jnp.zeros_like(in_node)
        key_positions = in_node + offsets
        output = self.model(
            tokens,
            positions=positions,
            segments=segments,
            rotation=self.memory.rotation(),
            collect=CollectKeyValues(index, key_positions, keys_only=True),
        )
        return EncodedContext(
            selected.reshape(rows, -1),
            layers=self._by_rows(output.key_values, rows),
            num_chunks=has_text.sum(1),
        )

    def choose(
        self,
        chunks: Int[Array, "B C P"],
        mask: Bool[Array, "B C P"],
        tree: Tree | None = None,
        *,
        query: Float[Array, "B D"] | None = None,
        has_query: Bool[Array, " B"] | None = None,
        noise: Float[Array, "R h-1"] | None = None,
        key: jax.Array | None = None,
        tags: UInt[Array, "B C"] | None = None,
    ) -> Bool[Array, "B C h-1"]:
        """Returns, per level, whether the right half of each chunk's node is split again.

        Arguments are those of `__call__`; `noise` shifts the splits as in `preserved_nodes`.
        """
        tree, (rows, count, width) = tree or self.memory.tree, chunks.shape
        policy = Right() if self.is_initializing() else self.memory.policy
        if policy.query_dependent and tree.depth > 1 and query is None:
            raise InputError(
                "query=None: model.memory.policy compares the context with a question; give its"
                " embedding (Decoder.embed_query), or choose the policy right"
            )
        tokens, length = without_padding(*(x.reshape(rows * count, width) for x in (chunks, mask)))
        query, has_query = (
            None if x is None else jnp.repeat(x, count, axis=0) for x in (query, has_query)
        )
        tags = jnp.arange(rows * count) if tags is None else tags.reshape(-1)
        key = jax.random.key(0) if key is None else key
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, tags)

        def encode(tokens, segments):
            index = jnp.arange(tokens.shape[1])[None]
            start = jnp.argmax(segments == 2, axis=1)[:, None]
            return first_layer(
                self.variables["params"],
                self.config,
                tokens,
                self.mesh,
                positions=jnp.where(segments == 2, index - start, index),
                segments=segments,
                rotation=self.memory.rotation(),
            )

        options = {"query": query, "has_query": has_query, "noise": noise}
        path = search(policy, tree, tokens, length, keys, encode, **options)
        return path.reshape(rows, count, -1)

    def _by_rows(self, layers, rows: int) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """Converts stacked keys and values [L, B C, M, K, H] to [B, K, C M, H] for each layer."""

        def one(x):
            x = x.reshape(rows, -1, *x.shape[2:]).swapaxes(1, 2)
            return cache_lib.keep_heads(x, self.mesh)

        return tuple(
            tuple(one(part[layer]) for part in layers) for layer in range(self.config.num_layers)
        )


def _split_noise(tree: Tree, key: jax.Array | None, rows: int, count: int) -> jax.Array | None:
    """Returns standard normal numbers [B C, h - 1] that shift splits, equal for a row's chunks."""
    if key is None or tree.noise is None:
        return None
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, 1), jnp.arange(rows))
    noise = jax.vmap(lambda key: jax.random.normal(key, (tree.depth - 1,)))(keys)
    return jnp.repeat(noise, count, axis=0)


class TreeAttention(CrossAttention):
    """Cross-attention to keys that are already rotated.

    Every query is rotated to one position, the number of chunks.
    """

    @property
    def query_bias(self) -> bool:
        return self.config.qkv_bias

    def queries(self, q: jax.Array, encoded: EncodedContext) -> jax.Array:
        memory = self.config.memory
        if memory.positions == "none":
            return q
        position = encoded.num_chunks + (memory.positions == "released")
        return memory.rotation().rotate(q, position[:, None])


@MemorySection.register_subclass("shared_llm")
@dataclasses.dataclass(frozen=True)
class SharedLlmSection(MemorySection):
    """SharedLLM: the model reads trees of chunks through keys and values of its lower layers.

    The lower model begins as a copy of the first layers of the same checkpoint.
    """

    # M: layers of the lower model, and reader layers (16 for instructions)
    layers: ReaderLayers = 4
    chunk: int = 1024  # tokens of a chunk (512 for instructions)
    # Tokens per selected token at each level of a tree, level 1 first. The default selects an
    # eighth of a chunk (beta = 8); [1, 1, 1] selects all tokens.
    ratios: tuple[SelectionRatio, ...] = (16, 8, 4)
    # gamma, in training: the split of a node of l tokens has standard deviation l / (2 gamma) (10
    # for instructions); null: always in the middle.
    noise: SplitNoise | None = 5.0
    # Which half of a node is split again: right, query, random
    policy: Policy = dataclasses.field(default_factory=Right)
    placement: Annotated[str, OneOf(PLACEMENTS)] = "bottom"  # of the reader layers
    # Positions of chunks (see `lcjax.memory.SharedLlm`)
    positions: Annotated[str, OneOf(POSITIONS)] = "paper"
    # Initial output projection as a share of self-attention's; 0 leaves the model as it was.
    output_share: OutputShare = 0.0

    def memory(self, config: ModelConfig, encoder: ModelConfig | None = None) -> SharedLlm:
        return SharedLlm(
            states=lower_config(config, self.layers),
            chunk=self.chunk,
            tree=Tree(tuple(self.ratios), self.noise),
            policy=self.policy,
            placement=self.placement,
            positions=self.positions,
        )

    def init_params(
        self,
        params: dict,
        config: ModelConfig,
        encoder: dict | None,
        mesh: jax.sharding.Mesh | None,
    ) -> dict:
        """Adds the lower model, and cross-attention to every reader layer.

        The lower model is a copy of the embedding, the first M layers and the final norm (sec. 4.1;
        by mistake, the released code does not load it). The query projection and its norm are
        copies of self-attention's, whose keys the queries attend to.
        """

        def init_layer(layer):
            attention = layer["attention"]
            branch = {
                "norm": layer["attention_norm"],
                "query": attention["query"],
                "out": init_output(attention, self.output_share),
            }
            return {"memory": branch}

        lower = lower_params(params, config.memory.layers, mesh)
        return add_to_readers(params, config, init_layer, mesh) | lower

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"policy": self.policy.to_dict()}


_OF_THE_DECODER = (
    "dtype", "param_dtype", "remat", "context_parallel", "context_group", "lora", "memory"
)  # fmt: skip


def lower_config(config: ModelConfig, layers: int) -> ModelConfig:
    """Returns the config of a model of a decoder's first `layers`, with default dtypes and remat.

    It has causal attention and no memory or adapters.
    """
    default = {
        field.name: field.default
        for field in dataclasses.fields(ModelConfig)
        if field.name in _OF_THE_DECODER
    }
    return config.replace(
        num_layers=layers,
        tie_embeddings=True,  # it has no head
        head_bias=False,
        pattern=Causal(),  # nodes are shorter than any window
        layers=(),
        scan_layers=True,
        **default,
    )


def lower_params(params: dict, layers: int, mesh: jax.sharding.Mesh | None) -> dict:
    """Returns {"encoder": a copy of a decoder's embedding, first layers and final norm}.

    Args:
      params: parameters of the decoder; its layers must not be stacked.
      layers: the number of first layers.
      mesh: the devices of the copy.
    """
    names = [f"layers_{index}" for index in range(layers)]

    def init(params):
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *(params[name] for name in names))
        rest = {name: jax.tree.map(jnp.copy, params[name]) for name in ("embed", "final_norm")}
        return {"encoder": rest | {"layers": stacked}}

    source = {name: params[name] for name in ("embed", "final_norm", *names)}
    return init_on_mesh(init, source, mesh)
