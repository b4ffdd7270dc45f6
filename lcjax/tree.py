"""Nested dicts of parameters and their flat form, `{"layers/mlp/up/kernel": leaf}`."""

from collections.abc import Callable
from typing import Any


def flatten(tree: dict, *, separator: str = "/", lists: bool = False) -> dict[str, Any]:
    """`{"a": {"b": x}}` -> `{"a/b": x}`; empty dicts are left out.

    What is no dict is a leaf; with `lists`, lists are walked too: `{"a": [x]}` -> `{"a/0": x}`.
    """
    flat = {}

    def walk(branch, prefix):
        for name, child in branch.items() if isinstance(branch, dict) else enumerate(branch):
            path = f"{prefix}{name}"
            if isinstance(child, dict | list if lists else dict):
                walk(child, path + separator)
            else:
                flat[path] = child

    walk(tree, "")
    return flat


def nest(flat: dict[str, Any]) -> dict:
    """`{"a/b": x}` -> `{"a": {"b": x}}`, the inverse of `flatten`."""
    tree: dict = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def lookup(tree: dict, path: str) -> Any:
    """The leaf or branch at `"a/b"`."""
    for part in path.split("/"):
        tree = tree[part]
    return tree


def split(tree: dict, keep: Callable[[str], bool]) -> tuple[dict, dict]:
    """(leaves whose path `keep` accepts, the others), both as nested dicts."""
    kept, rest = {}, {}
    for path, leaf in flatten(tree).items():
        (kept if keep(path) else rest)[path] = leaf
    return nest(kept), nest(rest)


def union(first: dict, second: dict) -> dict:
    """The tree of both halves' leaves, in an order that does not depend on how it was split."""
    return nest(dict(sorted((flatten(first) | flatten(second)).items())))
