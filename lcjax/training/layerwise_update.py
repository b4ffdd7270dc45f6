"""An update one layer after another, for what is offloaded to the host's memory.

Adam, its decay and the average treat every number by itself, so the order does not matter; only the
norm for clipping is of the whole gradient. Fetched together, weights and moments would need the
device's memory all at once, and their new values beside them.

What is in no layer goes together: the compiler divides several parameters by Adam's corrections
and multiplies a single one by their inverse, which may differ in the last bit.
"""

from collections.abc import Callable
from typing import Any

import jax

from lcjax.parallel.offload import LAYER, STACK, fetched, put_back
from lcjax.tree import flatten, nest, union

# ((parameters, state of the optimizer, average), gradients) -> the three after an update
Update = Callable[[tuple, dict], tuple]


def layerwise_update(update: Update, good: jax.Array, old: tuple, grads: dict) -> tuple:
    """`update(old, grads)`, or `old` where `good` is false; every array stays where it lies."""

    def one(old: tuple, grads: dict) -> tuple:
        kept = jax.lax.cond(good, update, lambda old, _: old, fetched(old), grads)
        return put_back(kept, old)

    parts, done = [], good
    for paths in _branches(grads):
        part = _only(old, paths)
        # Not before the last branch is back on the host: else all could be fetched together.
        part, done = jax.lax.optimization_barrier((part, done))
        stacked = STACK.match(paths[0])
        part = (_layers if stacked else lambda one, *x: one(*x))(one, part, _only(grads, paths))
        done, _ = jax.lax.optimization_barrier((done, part))
        parts.append(part)
    return joined(parts)


def _branches(tree: dict) -> list[list[str]]:
    """The paths of each stack of layers, of each layer beside it, and of all that is in none."""
    found: dict[str, list[str]] = {}
    for path in flatten(tree):
        layer = STACK.match(path) or LAYER.match(path)
        found.setdefault(layer[0] if layer else "", []).append(path)
    return list(found.values())


def _layers(one: Update, old: tuple, grads: dict) -> tuple:
    """`one` of every layer of stacks [L, ...], whose new values take the place of the old ones."""
    count = jax.tree.leaves(grads)[0].shape[0]

    def body(layer, stacks):
        def at(x):
            return jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)

        # Adam's count, which is no stack, is that from before the update for all layers.
        part = jax.tree.map(lambda x, start: at(x) if start.ndim else start, stacks, old)
        new = one(part, jax.tree.map(at, grads))
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, layer, 0) if x.ndim else y,
            stacks,
            new,
        )

    return jax.lax.fori_loop(0, count, body, old)


def _is_params(node: Any) -> bool:
    """Parameter trees are the only dicts in an optimizer's state."""
    return isinstance(node, dict)


def _only(tree: Any, paths: list[str]) -> Any:
    """`tree` with these paths alone in its parameter trees."""

    def one(node):
        if not _is_params(node):
            return node
        flat = flatten(node)
        return nest({path: flat[path] for path in paths})

    return jax.tree.map(one, tree, is_leaf=_is_params)


def joined(parts: list[Any]) -> Any:
    """One tree of several that differ in what is in their parameter trees."""
    first, *rest = parts
    for part in rest:
        first = jax.tree.map(
            lambda a, b: union(a, b) if _is_params(a) else b, first, part, is_leaf=_is_params
        )
    return first
