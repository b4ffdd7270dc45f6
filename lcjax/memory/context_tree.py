"""Context trees: which tokens of a chunk are kept, more of them where it matters more.

SharedLLM ("Two are better than one: context window extension with multi-grained self-injection",
sec. 3.2). A chunk is split in two; one half, chosen by a policy, is
split again, the other is *preserved* as a node of its level; at the last level both halves are. So
the preserved nodes partition the chunk: with depth h and the right half always chosen they are
[0, P/2), [P/2, 3P/4), ..., two of size P/2^h. Every node is encoded by itself, and of a node of
level w every alpha_w-th token is kept, the first one included.

Because the nodes partition the chunk, a tree is a numbering of its tokens: shapes do not depend on
what was chosen, nor on where nodes were split. Letters: R chunks, P tokens of a chunk, h levels,
h + 1 nodes. Nodes are stored leaves first, left and right, then level h-1, ..., level 1.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.errors import InputError, whole_number

_DEEPEST = 5
_SPREAD = 3.0  # standard deviations within which splits are drawn; one in 370 would be beyond


@dataclasses.dataclass(frozen=True)
class Tree:
    """The static shape of a tree: how much is kept at each level, and how splits are drawn."""

    # Of how many tokens one is kept, level 1 (half a chunk) first, the leaves last. The paper
    # doubles it from level to level upwards, or takes 1 or 2 everywhere (sec. 4.1, table 5).
    ratios: tuple[int, ...] = (16, 8, 4)
    # gamma: a node of l tokens is split at l/2 - i, i of a normal distribution with standard
    # deviation l / (2 gamma). None: in the middle.
    noise: float | None = None

    @property
    def depth(self) -> int:
        """h, the number of levels."""
        return len(self.ratios)

    @property
    def levels(self) -> tuple[int, ...]:
        """The level of each node in the order in which they are stored."""
        return (self.depth, *range(self.depth, 0, -1))

    def check(self, key: str = "model.memory") -> None:
        """Refuses trees that cannot be built."""
        if not 1 <= self.depth <= _DEEPEST:
            raise InputError(
                f"{key}.ratios={list(self.ratios)} has {self.depth} levels; give 1 ... {_DEEPEST}"
                " numbers, level 1 first, such as [16, 8, 4]"
            )
        for ratio in self.ratios:
            whole_number(f"{key}.ratios: ratio", ratio, 1, "1 keeps all tokens")
        if self.noise is not None and not self.noise > 0:
            raise InputError(
                f"{key}.noise={self.noise} must be above 0, as the paper's 5; null splits nodes in"
                " the middle"
            )

    def check_chunk(self, length: int, key: str) -> None:
        """Refuses chunks of `length` tokens that have no whole leaves, or none to keep of them."""
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

    def kept(self, length: int) -> int:
        """The most tokens that are kept of a chunk of up to `length`.

        Without noise (h+1) P / (2^h alpha_h) of P tokens, where ratios double upwards and divide.
        """
        return int(_kept(self, length)[-1])

    def below(self, level: int) -> "Tree":
        """The tree of what remains when nodes have been preserved at all levels before `level`."""
        return dataclasses.replace(self, ratios=self.ratios[level - 1 :])

    def shift(self, half):
        """The largest distance of a split from the middle of nodes of 2 `half` tokens.

        In whole numbers, so that what is computed of shapes and of arrays is the same.
        """
        if self.noise is None:
            return half * 0
        lib = jnp if isinstance(half, jax.Array) else np
        drawn = half * int(1024 * _SPREAD / self.noise) // 1024
        return lib.minimum(drawn, lib.maximum(half - 1, 0))


@functools.lru_cache(maxsize=256)
def _kept(tree: Tree, longest: int) -> np.ndarray:
    """By the length 0 ... `longest` of a chunk, the most tokens kept of one that is no longer.

    Over all choices and splits: at each level the node that is preserved may have every length
    that a split leaves to either half.
    """
    lengths = np.arange(longest + 1)
    halves = lengths // 2
    leaf, found = tree.ratios[-1], np.zeros(longest + 1, np.int64)
    for length, half in enumerate(halves):
        found[length] = -(-(length - half) // leaf) - (-half // leaf)
    shifts = tree.shift(halves)
    for ratio in reversed(tree.ratios[:-1]):
        deeper, found = found, np.zeros_like(found)
        for length, (half, most) in enumerate(zip(halves, shifts, strict=True)):
            node = np.arange(max(half - most, 0), min(length - half + most, length) + 1)
            found[length] = (-(-node // ratio) + deeper[length - node]).max()
    return np.maximum.accumulate(found)


class Nodes(NamedTuple):
    """Where the nodes of chunks lie, in the order in which they are stored."""

    starts: jax.Array  # int32 [R, h + 1]
    lengths: jax.Array  # int32 [R, h + 1]


def halves(tree: Tree, length: jax.Array, drawn: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The lengths of the left and the right half of nodes of `length` tokens, int32.

    floor(l/2) -+ i; an odd token goes to the left, so that none is lost (the paper's eq. 1; its
    form with noise drops one). `drawn` is standard normal; None: split in the middle. Splits within
    three standard deviations are taken as they are, others there, and both halves of two tokens or
    more have one, which bounds what is kept.
    """
    half = length // 2
    if drawn is None or tree.noise is None:
        return length - half, half
    most = tree.shift(half)
    away = jnp.clip(jnp.trunc(drawn * half / tree.noise).astype(jnp.int32), -most, most)
    return length - half - away, half + away


def nodes(tree: Tree, length: jax.Array, path: jax.Array, drawn: jax.Array | None = None) -> Nodes:
    """The preserved nodes of chunks.

    Args:
      length: int32 [R], tokens of each chunk.
      path: bool [R, h - 1], whether the right half was chosen at levels 1 ... h-1.
      drawn: float32 [R, h - 1], standard normal numbers that move the splits.
    """
    start, preserved = jnp.zeros_like(length), []
    for level in range(tree.depth - 1):
        right = path[:, level]
        left_size, right_size = halves(tree, length, None if drawn is None else drawn[:, level])
        middle = start + left_size
        preserved.append((jnp.where(right, start, middle), jnp.where(right, left_size, right_size)))
        start, length = jnp.where(right, middle, start), jnp.where(right, right_size, left_size)
    left_size, right_size = halves(tree, length, None)
    preserved += [(start + left_size, right_size), (start, left_size)]
    return Nodes(*(jnp.stack(x, axis=1) for x in zip(*reversed(preserved), strict=True)))


def numbered(nodes: Nodes, width: int) -> tuple[jax.Array, jax.Array]:
    """(node, position), int32 [R, P], of the tokens of chunks in rows of `width` = P places.

    Nodes count from 1, and 0 is padding; positions count in the node.
    """
    place, found = jnp.arange(width, dtype=jnp.int32)[None], None
    for number in range(nodes.starts.shape[1]):
        start, size = nodes.starts[:, number, None], nodes.lengths[:, number, None]
        inside = (place >= start) & (place < start + size)
        pair = jnp.where(inside, number + 1, 0), jnp.where(inside, place - start, 0)
        found = pair if found is None else tuple(map(jnp.add, found, pair))
    return found


def kept(tree: Tree, nodes: Nodes, width: int) -> tuple[jax.Array, jax.Array]:
    """(places, mask), int32 and bool [R, M], of the tokens that are kept of chunks of `width`.

    M is `tree.kept(width)`. Tokens stand node by node as these are stored; where fewer are kept,
    what is there comes first.
    """
    places, there = [], []
    for number, (level, most) in enumerate(zip(tree.levels, _longest(tree, width), strict=True)):
        ratio = tree.ratios[level - 1]
        offsets = jnp.arange(-(-most // ratio), dtype=jnp.int32)[None] * ratio
        there.append(offsets < nodes.lengths[:, number, None])
        places.append(nodes.starts[:, number, None] + offsets)
    places, mask = jnp.concatenate(places, 1), jnp.concatenate(there, 1)
    if (room := tree.kept(width)) < places.shape[1]:
        order = jnp.argsort(~mask, axis=1, stable=True)[:, :room]
        places, mask = (jnp.take_along_axis(x, order, 1) for x in (places, mask))
    return jnp.where(mask, places, 0), mask


def widths(tree: Tree, width: int) -> tuple[int, ...]:
    """The most tokens that are still to be split at levels 1 ... h of chunks of `width`."""
    found = [width]
    for _ in range(tree.depth - 1):
        half = np.asarray(found[-1] // 2)
        found.append(found[-1] - int(half) + int(tree.shift(half)))
    return tuple(found)


def _longest(tree: Tree, width: int) -> list[int]:
    """The most tokens of each node in the order in which they are stored."""
    *_, last = found = widths(tree, width)
    return [last - last // 2, last // 2, *reversed(found[1:])]


def gathered(tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of chunks [R, P] without the padding before and between their tokens, and how many.

    So a tree depends on the text alone, wherever the padding is: tokens int32 [R, P], int32 [R].
    """
    order = jnp.argsort(~mask, axis=1, stable=True)
    there = jnp.take_along_axis(mask, order, 1)
    length = mask.sum(1, dtype=jnp.int32)
    return jnp.where(there, jnp.take_along_axis(tokens, order, 1), 0), length
