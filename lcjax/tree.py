"""Nested dicts of parameters and their flat form, `{"layers/mlp/up/kernel": leaf}`."""

from collections.abc import Callable, Iterator
from typing import Any


def flatten(tree: dict, *, separator: str = "/", lists: bool = False) -> dict[str, Any]:
    """Returns `{"a/b": x}` for `{"a": {"b": x}}`; empty dicts are left out.

    Every value that is not a dict is a leaf. With `lists=True` lists are flattened too:
    `{"a": [x]}` -> `{"a/0": x}`.
    """
    return dict(_leaves(tree, "", separator, dict | list if lists else dict))


def _leaves(branch: Any, prefix: str, separator: str, kinds: Any) -> Iterator[tuple[str, Any]]:
    # An inner function that calls itself would hold all leaves until the garbage collector runs.
    for name, child in branch.items() if isinstance(branch, dict) else enumerate(branch):
        path = f"{prefix}{name}"
        if isinstance(child, kinds):
            yield from _leaves(child, path + separator, separator, kinds)
        else:
            yield path, child


def nest(flat: dict[str, Any]) -> dict:
    """Returns `{"a": {"b": x}}` for `{"a/b": x}`, the inverse of `flatten`."""
    tree: dict = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def lookup(tree: dict, path: str) -> Any:
    """Returns the leaf or subtree at a path such as `"a/b"`."""
    for part in path.split("/"):
        tree = tree[part]
    return tree


def split(tree: dict, keep: Callable[[str], bool]) -> tuple[dict, dict]:
    """Returns the leaves whose path `keep` accepts and the others, both as nested dicts."""
    kept, rest = {}, {}
    for path, leaf in flatten(tree).items():
        (kept if keep(path) else rest)[path] = leaf
    return nest(kept), nest(rest)


def union(first: dict, second: dict) -> dict:
    """Returns the merged tree, sorted by path so that its order does not depend on the split."""
    return nest(dict(sorted((flatten(first) | flatten(second)).items())))
