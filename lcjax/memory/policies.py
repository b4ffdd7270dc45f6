"""Which half of a node a context tree splits again: the `model.memory.policy` of a config.

A policy is a frozen dataclass with `choose`. To use your own, register a subclass of `Policy`, or
give `SharedLlm` an instance or any function of a `Level`: it is called while tracing, once per
level, for all chunks at once.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import draccus
import jax
import jax.numpy as jnp

from lcjax.errors import InputError
from lcjax.memory.context_tree import Tree, halves, widths


@dataclasses.dataclass(frozen=True)
class Level:
    """What a policy sees: the two halves of one node of R chunks."""

    number: int  # 1 ... h-1
    tokens: jax.Array  # int32 [R, W]: the left half, the right one behind it, and then padding
    left: jax.Array  # int32 [R], tokens of the left half
    right: jax.Array  # int32 [R]
    query: jax.Array | None  # float32 [R, D], what is asked for, if anything is
    keys: jax.Array  # random keys [R]
    encode: Callable[[jax.Array, jax.Array], jax.Array]  # (tokens, halves 1 and 2) -> [R, W, D]

    @functools.cached_property
    def states(self) -> tuple[jax.Array, jax.Array]:
        """What the lower model's first layer says of the last token of each half, [R, D]."""
        place = jnp.arange(self.tokens.shape[1])[None]
        left, whole = self.left[:, None], (self.left + self.right)[:, None]
        segments = jnp.where(place < whole, 1 + (place >= left), 0).astype(jnp.int32)
        found = self.encode(self.tokens, segments)
        ends = jnp.maximum(jnp.concatenate([left, whole], 1) - 1, 0)[..., None]
        ends = jnp.take_along_axis(found, ends, 1).astype(jnp.float32)
        return ends[:, 0], ends[:, 1]


@dataclasses.dataclass(frozen=True)
class Policy(draccus.ChoiceRegistry, abc.ABC):
    """How the half of a node that is split again is chosen."""

    query_dependent: ClassVar[bool] = False  # whether `choose` needs the query

    @abc.abstractmethod
    def choose(self, level: Level) -> jax.Array:
        """bool [R]: true where the right half is split again."""

    @classmethod
    def of(cls, policy: "Policy | Callable[[Level], jax.Array]") -> "Policy":
        """A policy as it is, and a function as one."""
        if isinstance(policy, Policy):
            return policy
        if not callable(policy) or isinstance(policy, type):
            raise InputError(
                f"model.memory.policy={policy!r} must be a policy, such as Right(), or a function"
                " of a lcjax.memory.Level"
            )
        return Own(policy)


@Policy.register_subclass("right")
@dataclasses.dataclass(frozen=True)
class Right(Policy):
    """The half that is nearer to the text: what the paper does in language modelling."""

    def choose(self, level: Level) -> jax.Array:
        return jnp.ones(level.left.shape, bool)


@Policy.register_subclass("query")
@dataclasses.dataclass(frozen=True)
class QueryAware(Policy):
    """The half whose last token is more like the query's; the left one if both are (sec. 3.2).

    Compared are hidden states after one layer and the final norm, by their cosine. (The paper says
    one self-attention layer; the released code runs the whole layer.)
    """

    query_dependent: ClassVar[bool] = True

    def choose(self, level: Level) -> jax.Array:
        left, right = (_cosine(state, level.query) for state in level.states)
        return right > left


@Policy.register_subclass("random")
@dataclasses.dataclass(frozen=True)
class Random(Policy):
    """Either half, whatever is in it: a control."""

    def choose(self, level: Level) -> jax.Array:
        return jax.vmap(jax.random.bernoulli)(level.keys)


@dataclasses.dataclass(frozen=True)
class Own(Policy):
    """What a function chooses, a `Level` -> bool [R]; `query_dependent`: whether it uses the query.

    A checkpoint cannot name a function: to save one, register a subclass of `Policy`.
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
    tokens: jax.Array,
    length: jax.Array,
    keys: jax.Array,
    encode: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    query: jax.Array | None = None,
    asked: jax.Array | None = None,
    drawn: jax.Array | None = None,
) -> jax.Array:
    """The path of each chunk, bool [R, h - 1], for `lcjax.memory.context_tree.nodes`.

    Args:
      tokens: int32 [R, P], of which the first `length` [R] are there.
      keys: random keys [R].
      encode: as `Level` has it.
      query: [R, D]; `drawn`: the splits, as in `nodes`.
      asked: bool [R], which chunks anything is asked of: others are split as `Right` does; None:
        all.
    """
    start, path = jnp.zeros_like(length), []
    for number, width in enumerate(widths(tree, tokens.shape[1])[:-1], 1):
        left, right = halves(tree, length, None if drawn is None else drawn[:, number - 1])
        place = start[:, None] + jnp.arange(width)
        here = jnp.take_along_axis(tokens, jnp.minimum(place, tokens.shape[1] - 1), 1)
        own = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        level = Level(number, here, left, right, query, own, encode)
        chosen = policy.choose(level)
        if asked is not None:
            chosen |= ~asked
        chosen &= right > 0  # half a token is none: then there is nothing to choose
        path.append(chosen)
        start = jnp.where(chosen, start + left, start)
        length = jnp.where(chosen, right, left)
    none = jnp.zeros((len(length), 0), bool)
    return jnp.stack(path, 1) if path else none


def policy_note(policy: Policy) -> dict[str, Any]:
    """`policy` as plain values, with its `type`."""
    try:
        name = Policy.get_choice_name(type(policy))  # a function has none
    except (KeyError, ValueError):
        raise InputError(
            f"model.memory.policy={policy!r} has no name to be saved by; register its class:"
            " @Policy.register_subclass(NAME)"
        ) from None
    return {"type": name} | dataclasses.asdict(policy)


def policy_of(note: dict[str, Any]) -> Policy:
    """The inverse of `policy_note`."""
    fields = dict(note)
    name = fields.pop("type", None)
    known = Policy.get_known_choices()
    if name not in known:
        raise InputError(
            f"model.memory.policy.type={name!r} is not one of {', '.join(known)}; import the module"
            " that registers it first"
        )
    return known[name](**fields)
