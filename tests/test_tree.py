"""Nested dicts and their flat form."""

import gc
import weakref

from lcjax.tree import flatten, lookup, nest, split, union

TREE = {"b": {"up": {"kernel": 1, "lora_a": 2}, "norm": 3}, "a": 4}


def test_flatten_and_nest_are_inverse():
    assert flatten(TREE) == {"b/up/kernel": 1, "b/up/lora_a": 2, "b/norm": 3, "a": 4}
    assert nest(flatten(TREE)) == TREE


def test_lookup_finds_leaves_and_branches():
    assert lookup(TREE, "b/up/kernel") == 1
    assert lookup(TREE, "b/up") == {"kernel": 1, "lora_a": 2}


def test_split_halves_join_to_the_same_tree_in_an_order_of_its_own():
    halves = split(TREE, lambda path: "lora" in path)
    assert halves == ({"b": {"up": {"lora_a": 2}}}, {"b": {"up": {"kernel": 1}, "norm": 3}, "a": 4})
    assert union(*halves) == TREE
    assert list(flatten(union(*halves))) == sorted(flatten(TREE))
    assert str(union(*halves)) == str(union(*halves[::-1]))


def test_flat_trees_hold_no_leaf_after_they_are_gone():
    class Leaf:
        pass

    gc.disable()
    try:
        leaf = Leaf()
        gone = weakref.ref(leaf)
        flat = flatten({"a": {"b": leaf}, "c": 1})
        assert flat["a/b"] is leaf
        del flat, leaf
        assert gone() is None
    finally:
        gc.enable()
