"""Context trees: the selection of tokens of a chunk, denser where it matters more.

SharedLLM ("Two are better than one: context window extension with multi-grained self-injection",
sec. 3.2). A chunk is split in two halves. A policy chooses one half, which is split again; the
other half is *preserved* as a node of its level. At the last level both halves are preserved. So
the preserved nodes partition the chunk: with depth h and the right half always chosen they are
[0, P/2), [P/2, 3P/4), ..., and two of size P/2^h. Every node is encoded independently, and of a
node of level w every alpha_w-th token is selected, starting with the first.

Because the nodes partition the chunk, a tree is a numbering of its tokens: shapes depend neither on
the policy's choices nor on where nodes are split. Letters: R chunks, P tokens of a chunk, h levels,
h + 1 nodes. Nodes are stored leaves first, left and right, then level h-1, ..., level 1.

A policy (`model.memory.policy`) is a frozen dataclass with a method `choose`. For a new policy,
register a subclass of `Policy`, or pass `SharedLlm` an instance or any function of a `Level`. It is
called during tracing, once per level, for all chunks at once.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, NamedTuple

import draccus
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lcjax.errors import InputError, Interval, Range, check_fields

SelectionRatio = Annotated[int, Range(1, hint="1 keeps all tokens")]
SplitNoise = Annotated[
    float, Interval(above=0, hint="the paper has 5; null splits nodes in the middle")
]

_MAX_DEPTH = 5
_MAX_DEVIATIONS = 3.0  # standard deviations at which splits are clipped: 1 in 370 draws


@dataclasses.dataclass(frozen=True)
class Tree:
    """The static shape of a tree: the ratio of selection per level, and the noise of splits."""

    # alpha: tokens per selected token at each level, from level 1 (half a chunk) to the leaves. The
    # paper doubles the ratio from level to level upwards (sec. 3.2, table 6), or has 1 or 2
    # everywhere (table 12).
    ratios: tuple[SelectionRatio, ...] = (16, 8, 4)
    # gamma: a node of l tokens is split at l/2 - i, where i is normally distributed with standard
    # deviation l / (2 gamma). None: in the middle.
    noise: SplitNoise | None = None

    @property
    def depth(self) -> int:
        """The number of levels, h."""
        return len(self.ratios)

    @property
    def levels(self) -> tuple[int, ...]:
        """The level of each node, in the order in which nodes are stored."""
        return (self.depth, *range(self.depth, 0, -1))

    def check(self, key: str = "model.memory") -> None:
        """Raises an InputError if the tree cannot be built; its message has the prefix `key`."""
        check_fields(key, self)
        if not 1 <= self.depth <= _MAX_DEPTH:
            raise InputError(
                f"{key}.ratios={list(self.ratios)} has {self.depth} levels; give 1 ... {_MAX_DEPTH}"
                " numbers, level 1 first, such as [16, 8, 4]"
            )

    def check_chunk(self, length: int, key: str) -> None:
        """Raises an InputError unless 2^h divides `length` and nodes have at least alpha tokens.

        Args:
          length: tokens of a chunk.
          key: the setting with this length, for the message.
        """
        unit = 2**self.depth
        if length < unit or length % unit:
            below, above = length // unit * unit, -(-length // unit) * unit
            near = [str(size) for size in (below, above) if size]
            raise InputError(
                f"{key}={length} must be a multiple of 2^{self.depth} = {unit}, so that trees of"
                f" {self.depth} levels have whole leaves; nearest: {', '.join(near)}"
            )
        for level, ratio in enumerate(self.ratios, 1):
            if ratio > length >> level:
                raise InputError(
                    f"ratios={list(self.ratios)}: one of {ratio} tokens is kept at level {level},"
                    f" where a chunk of {length} tokens has nodes of {length >> level}; at most"
                    f" {length >> level} there, or chunks of at least {ratio << level} tokens"
                )

    def max_selected(self, length: int) -> int:
        """Returns the maximum number of tokens selected from a chunk of up to `length` tokens.

        Without noise it is (h+1) P / (2^h alpha_h) for P tokens, if ratios double upwards and
        divide the sizes of their nodes.
        """
        return int(_max_selected(self, length)[-1])

    def below(self, level: int) -> "Tree":
        """Returns the tree of the half that is split at `level`, without the levels before it."""
        return dataclasses.replace(self, ratios=self.ratios[level - 1 :])

    def max_shift(self, half):
        """Returns the largest distance of a split from the middle of nodes of 2 `half` tokens.

        It uses integer arithmetic, so that static shapes and traced arrays get the same numbers.
        """
        if self.noise is None:
            return half * 0
        lib = jnp if isinstance(half, jax.Array) else np
        shift = half * int(1024 * _MAX_DEVIATIONS / self.noise) // 1024
        return lib.minimum(shift, lib.maximum(half - 1, 0))


@functools.lru_cache(maxsize=256)
def _max_selected(tree: Tree, max_length: int) -> np.ndarray:
    """Returns the maximum number of selected tokens for chunks of up to 0 ... `max_length` tokens.

    It is the maximum over all choices, splits and shorter chunks: at each level the preserved node
    may have any length that a split can give to either half.
    """
    lengths = np.arange(max_length + 1)
    halves = lengths // 2
    leaf, selected = tree.ratios[-1], np.zeros(max_length + 1, np.int64)
    for length, half in enumerate(halves):
        selected[length] = -(-(length - half) // leaf) - (-half // leaf)
    shifts = tree.max_shift(halves)
    for ratio in reversed(tree.ratios[:-1]):
        deeper, selected = selected, np.zeros_like(selected)
        for length, (half, shift) in enumerate(zip(halves, shifts, strict=True)):
            node = np.arange(max(half - shift, 0), min(length - half + shift, length) + 1)
            selected[length] = (-(-node // ratio) + deeper[length - node]).max()
    return np.maximum.accumulate(selected)


class Nodes(NamedTuple):
    """Start and length of the nodes whose tokens are selected, in the order of storage.

    R = rows x chunks.
    """

    starts: Int[Array, "R nodes"]
    lengths: Int[Array, "R nodes"]


def split_sizes(
    tree: Tree, length: Int[Array, " R"], noise: Float[Array, " R"] | None
) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """Returns the lengths of the left and the right half of nodes of `length` tokens.

    They are floor(l/2) -+ i. If l is odd, the left half has one token more, so that none is lost
    (the paper's eq. 1; its form with noise drops one). Splits beyond three standard deviations are
    clipped, and both halves of nodes with two tokens or more get at least one. This bounds the
    number of selected tokens.

    Args:
      tree: the shape of the trees.
      length: tokens of each node.
      noise: standard normal numbers; None: splits in the middle.
    """
    half = length // 2
    if noise is None or tree.noise is None:
        return length - half, half
    limit = tree.max_shift(half)
    shift = jnp.clip(jnp.trunc(noise * half / tree.noise).astype(jnp.int32), -limit, limit)
    return length - half - shift, half + shift


def preserved_nodes(
    tree: Tree,
    length: Int[Array, " R"],
    path: Bool[Array, "R h-1"],
    noise: Float[Array, "R h-1"] | None = None,
) -> Nodes:
    """Returns the preserved nodes of chunks.

    Args:
      tree: the shape of the trees.
      length: tokens of each chunk.
      path: whether the right half was chosen at levels 1 ... h-1.
      noise: standard normal numbers that shift the splits; None: splits in the middle.
    """
    start, preserved = jnp.zeros_like(length), []
    for level in range(tree.depth - 1):
        right = path[:, level]
        level_noise = None if noise is None else noise[:, level]
        left_size, right_size = split_sizes(tree, length, level_noise)
        middle = start + left_size
        preserved.append((jnp.where(right, start, middle), jnp.where(right, left_size, right_size)))
        start, length = jnp.where(right, middle, start), jnp.where(right, right_size, left_size)
    left_size, right_size = split_sizes(tree, length, None)
    preserved += [(start + left_size, right_size), (start, left_size)]
    return Nodes(*(jnp.stack(x, axis=1) for x in zip(*reversed(preserved), strict=True)))


def node_segments(nodes: Nodes, width: int) -> tuple[Int[Array, "R P"], Int[Array, "R P"]]:
    """Returns the node and the position in it of each token, for chunks of P = `width` tokens.

    Nodes count from 1, and 0 is padding. Positions count from 0 in each node.
    """
    index = jnp.arange(width, dtype=jnp.int32)[None]
    node = position = jnp.zeros((len(nodes.starts), width), jnp.int32)
    for number in range(nodes.starts.shape[1]):
        start, size = nodes.starts[:, number, None], nodes.lengths[:, number, None]
        inside = (index >= start) & (index < start + size)
        node += jnp.where(inside, number + 1, 0)
        position += jnp.where(inside, index - start, 0)
    return node, position


def select_tokens(
    tree: Tree, nodes: Nodes, width: int
) -> tuple[Int[Array, "R M"], Bool[Array, "R M"]]:
    """Returns the indices of the selected tokens of chunks of `width` tokens, and their mask.

    M is `tree.max_selected(width)`. Selected tokens are in the order in which nodes are stored; if
    there are fewer than M, the last entries are padding.
    """
    indices, masks = [], []
    for number, (level, size) in enumerate(zip(tree.levels, _max_sizes(tree, width), strict=True)):
        ratio = tree.ratios[level - 1]
        offsets = jnp.arange(-(-size // ratio), dtype=jnp.int32)[None] * ratio
        masks.append(offsets < nodes.lengths[:, number, None])
        indices.append(nodes.starts[:, number, None] + offsets)
    index, mask = jnp.concatenate(indices, 1), jnp.concatenate(masks, 1)
    if (capacity := tree.max_selected(width)) < index.shape[1]:
        order = jnp.argsort(~mask, axis=1, stable=True)[:, :capacity]
        index, mask = (jnp.take_along_axis(x, order, 1) for x in (index, mask))
    return jnp.where(mask, index, 0), mask


def _level_sizes(tree: Tree, width: int) -> tuple[int, ...]:
    """Returns the maximum length of the node that is split at each level 1 ... h."""
    sizes = [width]
    for _ in range(tree.depth - 1):
        half = np.asarray(sizes[-1] // 2)
        sizes.append(sizes[-1] - int(half) + int(tree.max_shift(half)))
    return tuple(sizes)


def _max_sizes(tree: Tree, width: int) -> list[int]:
    """Returns the maximum length of each node, in the order in which nodes are stored."""
    *_, last = sizes = _level_sizes(tree, width)
    return [last - last // 2, last // 2, *reversed(sizes[1:])]


def without_padding(
    tokens: Int[Array, "R P"], mask: Bool[Array, "R P"]
) -> tuple[Int[Array, "R P"], Int[Array, " R"]]:
    """Moves all padding to the end of chunks; returns them and the number of tokens of each.

    A tree then depends on the text alone, wherever the padding was.
    """
    order = jnp.argsort(~mask, axis=1, stable=True)
    sorted_mask = jnp.take_along_axis(mask, order, 1)
    length = mask.sum(1, dtype=jnp.int32)
    return jnp.where(sorted_mask, jnp.take_along_axis(tokens, order, 1), 0), length


@dataclasses.dataclass(frozen=True)
class Level:
    """The input of a policy: the two halves of one node in each of R chunks."""

    number: int  # the level, 1 ... h-1
    tokens: jax.Array  # int32 [R, W]: the left half, the right half, and then padding
    left: jax.Array  # int32 [R], number of tokens of the left half
    right: jax.Array  # int32 [R], number of tokens of the right half
    query: jax.Array | None  # float32 [R, D], the embedded question, if there is one
    keys: jax.Array  # random keys [R]
    # (tokens, segments: 1 for the left and 2 for the right half) -> hidden states [R, W, D]
    encode: Callable[[jax.Array, jax.Array], jax.Array]

    @functools.cached_property
    def states(self) -> tuple[jax.Array, jax.Array]:
        """Float32 states [R, D] of each half's last token after the lower model's first layer."""
        index = jnp.arange(self.tokens.shape[1])[None]
        left, both = self.left[:, None], (self.left + self.right)[:, None]
        segments = jnp.where(index < both, 1 + (index >= left), 0).astype(jnp.int32)
        states = self.encode(self.tokens, segments)
        last = jnp.maximum(jnp.concatenate([left, both], 1) - 1, 0)[..., None]
        states = jnp.take_along_axis(states, last, 1).astype(jnp.float32)
        return states[:, 0], states[:, 1]


@dataclasses.dataclass(frozen=True)
class Policy(draccus.ChoiceRegistry, abc.ABC):
    """A rule that chooses which half of a node is split again."""

    query_dependent: ClassVar[bool] = False  # whether `choose` needs the query

    @abc.abstractmethod
    def choose(self, level: Level) -> jax.Array:
        """Returns bool [R]: true where the right half is split again."""

    @classmethod
    def from_function(cls, policy: "Policy | Callable[[Level], jax.Array]") -> "Policy":
        """Wraps a function as a policy; returns a policy unchanged."""
        if isinstance(policy, Policy):
            return policy
        if not callable(policy) or isinstance(policy, type):
            raise InputError(
                f"model.memory.policy={policy!r} must be a policy, such as Right(), or a function"
                " of a lcjax.memory.Level"
            )
        return FunctionPolicy(policy)

    def to_dict(self) -> dict[str, Any]:
        """Returns the policy as plain values, including `type`."""
        if type(self) not in Policy.get_known_choices().values():  # a function has no name
            raise InputError(
                f"model.memory.policy={self!r} has no name to be saved by; register its class:"
                " @Policy.register_subclass(NAME)"
            )
        return {"type": Policy.get_choice_name(type(self))} | dataclasses.asdict(self)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> "Policy":
        """Restores a policy from the values of `to_dict`."""
        choices, name = Policy.get_known_choices(), fields.get("type")
        if name not in choices:
            raise InputError(
                f"model.memory.policy.type={name!r} is not one of {', '.join(choices)}; import the"
                " module that registers it first"
            )
        return choices[name](**{key: value for key, value in fields.items() if key != "type"})


@Policy.register_subclass("right")
@dataclasses.dataclass(frozen=True)
class Right(Policy):
    """Chooses the half that is nearer to the text, as in the paper's language modelling."""

    def choose(self, level: Level) -> jax.Array:
        return jnp.ones(level.left.shape, bool)


@Policy.register_subclass("query")
@dataclasses.dataclass(frozen=True)
class QueryAware(Policy):
    """Chooses the half whose last token is more similar to the query; the left one if equal.

    Similarity is the cosine of hidden states after one layer and the final norm (sec. 3.2). The
    paper has one self-attention layer; the released code runs the whole layer, as here.
    """

    query_dependent: ClassVar[bool] = True

    def choose(self, level: Level) -> jax.Array:
        left, right = (_cosine(state, level.query) for state in level.states)
        return right > left


@Policy.register_subclass("random")
@dataclasses.dataclass(frozen=True)
class Random(Policy):
    """Chooses a random half, independent of the text, as a control."""

    def choose(self, level: Level) -> jax.Array:
        return jax.vmap(jax.random.bernoulli)(level.keys)


@dataclasses.dataclass(frozen=True)
class FunctionPolicy(Policy):
    """A policy that calls a function `Level` -> bool [R].

    It cannot be saved in a checkpoint; register a subclass of `Policy` for that.
    """

    function: Callable[[Level], jax.Array]
    query_dependent: bool = dataclasses.field(default=False, kw_only=True)

    def choose(self, level: Level) -> jax.Array:
        return self.function(level)


def _cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    size = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return (a * b).sum(-1) / jnp.maximum(size, 1e-6)


def search(
    policy: Policy,
    tree: Tree,
    tokens: Int[Array, "R P"],
    length: Int[Array, " R"],
    keys: jax.Array,
    encode: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    query: Float[Array, "R D"] | None = None,
    has_query: Bool[Array, " R"] | None = None,
    noise: Float[Array, "R h-1"] | None = None,
) -> Bool[Array, "R h-1"]:
    """Returns the path of each chunk, for `preserved_nodes`.

    Args:
      policy: chooses a half at each level.
      tree: the shape of the trees.
      tokens: chunks, with their padding at the end.
      length: tokens of each chunk.
      keys: random keys [R].
      encode: as in `Level`.
      query: embedded questions.
      has_query: which chunks have a question; the right half is chosen in others. None: all have.
      noise: standard normal numbers that shift the splits, as in `preserved_nodes`.
    """
    start, path = jnp.zeros_like(length), []
    for number, width in enumerate(_level_sizes(tree, tokens.shape[1])[:-1], 1):
        left, right = split_sizes(tree, length, None if noise is None else noise[:, number - 1])
        index = start[:, None] + jnp.arange(width)
        node = jnp.take_along_axis(tokens, jnp.minimum(index, tokens.shape[1] - 1), 1)
        level_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        choice = policy.choose(Level(number, node, left, right, query, level_keys, encode))
        if has_query is not None:
            choice |= ~has_query
        choice &= right > 0  # a single token has no right half
        path.append(choice)
        start = jnp.where(choice, start + left, start)
        length = jnp.where(choice, right, left)
    return jnp.stack(path, 1) if path else jnp.zeros((len(length), 0), bool)
