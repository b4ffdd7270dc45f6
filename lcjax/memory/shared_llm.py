"""SharedLLM: a model reads a context through the keys and values of its own lower layers.

"Two are better than one: context window extension with multi-grained self-injection" (sec. 3). The
lower model, a copy of the embedding and the first M layers, reads a context in chunks: each becomes
a tree of nodes (`lcjax.memory.context_tree`), a node is read by itself, causally, from position 0,
and keys and values of some of its tokens are kept. Layer l of the lower model is read by one layer
of the upper one, between its self-attention and its MLP:

    h <- h + Wo softmax(q K_l^T / sqrt(H)) V_l        q = R(n) Wq norm(h),  K_l = R(i + j) Wk ...

with the keys' own position j in their node, i the number of their chunk, and n that of all chunks,
where every query stands (sec. 3.3, eq. 6). There are no projections of keys and values: they are
shared with the lower model's self-attention.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from lcjax.errors import InputError, one_of
from lcjax.memory.context_tree import Tree, gathered, kept, nodes, numbered
from lcjax.memory.cross_attention import CrossAttention
from lcjax.memory.policies import Policy, Right, search
from lcjax.models import cache as cache_lib
from lcjax.models.config import ModelConfig
from lcjax.models.decoder import Decoder, first_layer
from lcjax.models.layers import CollectKeyValues
from lcjax.models.memory import Encoded, Memory, check_chunks
from lcjax.rope import Rotation, rotate

PLACEMENTS = ("bottom", "top", "interleaved")
POSITIONS = ("paper", "released")


@Memory.register_subclass("shared_llm")
@dataclasses.dataclass(frozen=True)
class SharedLlm(Memory):
    """The lower model, what it keeps of a context, and which layers of the upper one read it."""

    states: ModelConfig  # the lower model, of M layers
    chunk: int  # tokens of a chunk
    tree: Tree = Tree()
    policy: Policy = Right()
    # Which M layers read: the first, the last, or M spread evenly from the first on; the first of
    # them reads the lower model's first layer, and so on.
    placement: str = "bottom"
    # Where chunks stand: paper, keys at 0 ... n-1 and queries at n; released, as the released code
    # computes whole texts: queries at n + 1, and keys at i / (tokens kept of a chunk), so nearly
    # always 0 (it indexes its table of rotations twice).
    positions: str = "paper"

    def __post_init__(self):
        object.__setattr__(self, "policy", Policy.of(self.policy))

    @property
    def layers(self) -> int:
        """M."""
        return self.states.num_layers

    def reader_layers(self, num_layers: int) -> tuple[bool, ...]:
        count = self.layers
        if self.placement == "interleaved":
            chosen = {index * num_layers // count for index in range(count)}
        else:
            first = 0 if self.placement == "bottom" else num_layers - count
            chosen = range(first, first + count)
        return tuple(layer in chosen for layer in range(num_layers))

    def uniform_layers(self, num_layers: int) -> bool:
        """Never: each layer reads another one's keys."""
        return False

    @property
    def max_chunk_size(self) -> int:
        return self.chunk

    def parts(self, chunk: int) -> tuple[int, ...]:
        return tuple(chunk >> level for level in self.tree.levels)

    @property
    def shared_keys(self) -> bool:
        return True

    @property
    def ordered(self) -> bool:
        return True

    @property
    def query_dependent(self) -> bool:
        return self.policy.query_dependent and self.tree.depth > 1

    def without_query(self) -> "SharedLlm":
        return dataclasses.replace(self, policy=Right())

    def of_layers(self, count: int) -> "SharedLlm":
        return dataclasses.replace(self, states=self.states.replace(num_layers=count))

    def num_slots(self, tokens: int) -> int:
        return self.tree.kept(tokens)

    def check_chunk(self, length: int, key: str) -> None:
        super().check_chunk(length, key)
        self.tree.check_chunk(length, key)

    def for_inference(self) -> "SharedLlm":
        """Nodes are split in the middle."""
        return dataclasses.replace(self, tree=dataclasses.replace(self.tree, noise=None))

    def projected(self, params: dict, config: ModelConfig, encoded: Encoded) -> Encoded:
        """`encoded` itself, which holds keys and values from the first."""
        return encoded

    def rotation(self) -> Rotation:
        """Of keys in their node, and of chunks: at the length of a chunk whatever is read."""
        return self.states.rope.rotation(self.states.rotary_dim, self.chunk)

    def check(self, config: ModelConfig) -> None:
        self.tree.check()
        self.tree.check_chunk(self.chunk, "model.memory.chunk")
        one_of("model.memory.placement", self.placement, PLACEMENTS)
        one_of("model.memory.positions", self.positions, POSITIONS)
        if not 1 <= self.layers <= config.num_layers:
            raise InputError(
                f"model.memory.layers={self.layers} must lie in 1 ... {config.num_layers}, the"
                " layers of the model, of which the lower model is made"
            )
        for key in ("width", "num_kv_heads", "head_dim", "rotary_dim", "vocab_size"):
            own, needed = getattr(self.states, key), getattr(config, key)
            if own != needed:
                raise InputError(
                    f"model.memory: the lower model has {key}={own} and the upper one {needed};"
                    " it is made of the layers of the same checkpoint"
                )
        if config.block != "sequential" or config.position != "rope" or self.states.rope.learned:
            raise InputError(
                "model.memory.type=shared_llm reads rotated keys between attention and MLP, and"
                f" this model has block={config.block}, position={config.position}, rope"
                f" {self.states.rope.type}; choose a Llama-like decoder"
            )

    def encoder(self, config: ModelConfig, mesh: jax.sharding.Mesh | None) -> nn.Module:
        changes = {name: getattr(config, name) for name in ("dtype", "param_dtype", "remat")}
        return TreeEncoder(self.states.replace(**changes), self, mesh)

    def reader(self, config: ModelConfig, mesh: jax.sharding.Mesh | None, **options) -> nn.Module:
        return TreeAttention(config.replace(lora=None), mesh, **options)


class TreeEncoder(nn.Module):
    """The lower model: keys and values of the tokens that trees keep."""

    config: ModelConfig
    memory: SharedLlm
    mesh: jax.sharding.Mesh | None = None

    def setup(self):
        self.model = Decoder(self.config, self.mesh)
        nn.share_scope(self, self.model)  # `encoder/embed`, not `encoder/model/embed`

    def __call__(
        self,
        chunks: jax.Array,
        mask: jax.Array,
        *,
        numbers: jax.Array | None = None,
        path: jax.Array | None = None,
        query: jax.Array | None = None,
        asked: jax.Array | None = None,
        key: jax.Array | None = None,
        tags: jax.Array | None = None,
        tree: Tree | None = None,
    ) -> Encoded:
        """Of chunks int32 [B, C, P], with `mask` true where there is text.

        Args:
          numbers: int32 [B, C], the chunks' own; None: those with text count 0, 1, 2, ...
          path: bool [B, C, h - 1], as `choose` gives it; None: what it gives for `query`, `key`.
          query: float32 [B, D], what `Decoder.asked` says of the question.
          asked: bool [B], which rows have one: in others the half nearer to the text is split
            again; None: all.
          key: of training: it moves splits, and chooses for a random policy.
          tags: uint32 [B, C], which tell chunks apart for a random policy.
          tree: another one than the memory's: what is below a node (`Tree.below`).
        """
        check_chunks(chunks, mask, self.memory.max_chunk_size)
        tree, (rows, count, width) = tree or self.memory.tree, chunks.shape
        there = mask.any(2)
        if numbers is None:
            numbers = jnp.cumsum(there, axis=1, dtype=jnp.int32) - 1
        tokens, length = gathered(*(x.reshape(rows * count, width) for x in (chunks, mask)))
        drawn = _drawn(tree, key, rows, count)
        if path is None:
            options = {"query": query, "asked": asked, "key": key, "tags": tags}
            path = self._path(tree, tokens, length, (rows, count), drawn, **options)
        found = nodes(tree, length, path.reshape(rows * count, -1), drawn)
        node, position = numbered(found, width)
        index, present = kept(tree, found, width)
        turns = numbers.reshape(-1, 1)
        if self.memory.positions == "released":
            turns = turns // self.memory.tree.kept(self.memory.chunk)
        _, layers = self.model(
            tokens,
            positions=position,
            segments=node,
            rotation=self.memory.rotation(),
            keep=CollectKeyValues(
                index, jnp.take_along_axis(position, index, 1) + turns, alone=True
            ),
        )
        return Encoded(
            present.reshape(rows, -1), layers=self._by_rows(layers, rows), chunks=there.sum(1)
        )

    def choose(
        self,
        chunks: jax.Array,
        mask: jax.Array,
        *,
        query: jax.Array | None = None,
        tags: jax.Array | None = None,
    ) -> jax.Array:
        """bool [B, C, h - 1]: at which levels the right half of chunks [B, C, P] is split again.

        `tags` uint32 [B, C] tell chunks apart for a random policy.
        """
        shape, width = chunks.shape[:2], chunks.shape[2]
        tokens, length = gathered(*(x.reshape(-1, width) for x in (chunks, mask)))
        options = {"query": query, "tags": tags}
        path = self._path(self.memory.tree, tokens, length, shape, None, **options)
        return path.reshape(*shape, -1)

    def _path(
        self, tree, tokens, length, shape, drawn, *, query=None, asked=None, key=None, tags=None
    ):
        """bool [B C, h - 1] for chunks [B C, P] of B, C = `shape`."""
        policy, (rows, count) = self.memory.policy, shape
        if self.is_initializing():
            policy = Right()
        if policy.query_dependent and tree.depth > 1 and query is None:
            raise InputError(
                "query=None: model.memory.policy compares the context with a question; give its"
                " state (Decoder.asked), or choose the policy right"
            )
        query, asked = (None if x is None else jnp.repeat(x, count, axis=0) for x in (query, asked))
        tags = jnp.arange(rows * count) if tags is None else tags.reshape(-1)
        key = jax.random.key(0) if key is None else key
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, tags)

        def encode(tokens, segments):
            params, rotation = self.variables["params"], self.memory.rotation()
            options = {"segments": segments, "rotation": rotation}
            place = jnp.arange(tokens.shape[1])[None]
            start = jnp.argmax(segments == 2, axis=1)[:, None]
            position = jnp.where(segments == 2, place - start, place)
            return first_layer(
                params, self.config, tokens, self.mesh, positions=position, **options
            )

        options = {"query": query, "asked": asked, "drawn": drawn}
        return search(policy, tree, tokens, length, keys, encode, **options)

    def _by_rows(self, layers, rows: int) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """Keys and values [B, K, C M, H] by layer of stacked ones [L, B C, M, K, H]."""

        def one(x):
            x = x.reshape(rows, -1, *x.shape[2:]).swapaxes(1, 2)
            return cache_lib.keep_layout(x, self.mesh)

        return tuple(
            tuple(one(part[layer]) for part in layers) for layer in range(self.config.num_layers)
        )


def _drawn(tree: Tree, key: jax.Array | None, rows: int, count: int) -> jax.Array | None:
    """Standard normal numbers [B C, h - 1] that move splits: those of a row are shared."""
    if key is None or tree.noise is None:
        return None
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, 1), jnp.arange(rows))
    drawn = jax.vmap(lambda key: jax.random.normal(key, (tree.depth - 1,)))(keys)
    return jnp.repeat(drawn, count, axis=0)


class TreeAttention(CrossAttention):
    """Cross-attention to keys that are rotated already; all queries stand behind all chunks."""

    @property
    def query_bias(self) -> bool:
        return self.config.qkv_bias

    def queries(self, q: jax.Array, encoded: Encoded) -> jax.Array:
        memory = self.config.memory
        place = encoded.chunks + (memory.positions == "released")
        return rotate(q, place[:, None], *memory.rotation()[:2])

    def keys(self, encoded: Encoded) -> tuple[jax.Array, jax.Array]:
        return tuple(part.swapaxes(1, 2) for part in encoded.layers[0])
