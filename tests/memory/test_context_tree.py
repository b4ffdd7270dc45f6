"""Trees of chunks: nodes partition them, and what is kept is what the paper counts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharedllm_golden as golden
from tree_oracle import by_hand

from lcjax.errors import InputError
from lcjax.memory import Level, Policy, QueryAware, Random, Right, Tree
from lcjax.memory import context_tree as trees
from lcjax.memory.context_tree import search


def built(*arguments):
    """nodes, numbers, positions, places and mask of what is kept, as numpy arrays."""
    return jax.device_get(_built(*arguments))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _built(tree, lengths, path, width, drawn=None):
    found = trees.preserved_nodes(tree, lengths, path, drawn)
    return found, *trees.node_segments(found, width), *trees.select_tokens(tree, found, width)


@pytest.mark.parametrize(
    "tree",
    [
        Tree((4,)),
        Tree((8, 4)),
        Tree(),
        Tree((1, 1, 1)),
        Tree((8, 4, 2, 1)),
        Tree((16, 8, 4, 2, 1)),
        Tree(noise=5.0),
        Tree((3, 5, 2, 1), noise=2.0),
        Tree((16, 8, 4), noise=10.0),
    ],
    ids=lambda tree: f"{tree.ratios}-{tree.noise}",
)
@pytest.mark.parametrize("width", [50, pytest.param(64, marks=pytest.mark.slow)])
def test_nodes_and_selected_tokens_equal_a_recursive_construction(tree, width):
    random = np.random.default_rng(0)
    lengths = np.r_[random.integers(0, width + 1, 200), np.arange(4), width].astype(np.int32)
    path = random.random((len(lengths), tree.depth - 1)) < 0.5
    drawn = None
    if tree.noise is not None:
        drawn = random.standard_normal((len(lengths), tree.depth - 1)).astype(np.float32) * 2
    _, number, position, places, mask = built(tree, lengths, path, width, drawn)
    assert places.shape[1] == tree.max_selected(width)
    for row, length in enumerate(lengths):
        wanted = by_hand(range(length), tree, path[row], None if drawn is None else drawn[row])
        assert places[row][mask[row]].tolist() == [x for kept, _ in wanted for x in kept]
        for index, (_, node) in enumerate(wanted):
            assert np.flatnonzero(number[row] == index + 1).tolist() == node
            assert position[row][node].tolist() == list(range(len(node)))
        assert sorted(x for _, node in wanted for x in node) == list(range(length)), "a partition"
        assert not number[row, length:].any(), "padding is in no node"


@pytest.mark.parametrize(("depth", "leaf"), [(1, 4), (2, 1), (3, 4), (4, 2), (5, 1)])
def test_the_number_of_selected_tokens_equals_the_formula(depth, leaf):
    tree = Tree(tuple(leaf << (depth - level) for level in range(1, depth + 1)))
    chunk = (leaf << depth) * 3
    wanted = (depth + 1) * chunk // (2**depth * leaf)
    assert tree.max_selected(chunk) == wanted
    path = np.random.default_rng(1).random((7, depth - 1)) < 0.5
    mask = built(tree, np.full(7, chunk, np.int32), path, chunk)[-1]
    assert mask.shape == (7, wanted) and mask.all()


def test_the_papers_chunks_are_kept_by_an_eighth():
    assert Tree().max_selected(1024) == 128 and Tree((1, 1, 1)).max_selected(1024) == 1024
    assert Tree(noise=5.0).max_selected(1024) < 1.6 * 128, "room for splits that are drawn"


def test_without_a_choice_the_nodes_are_the_papers():
    found, *_ = built(Tree(), np.array([1024], np.int32), np.ones((1, 2), bool), 1024)
    starts, lengths = (x[0].tolist() for x in found)
    assert starts == [768, 896, 512, 0] and lengths == [128, 128, 256, 512]


@pytest.mark.parametrize("name", golden.CASES)
def test_nodes_of_the_golden_chunks_hold_the_tokens_of_the_released_code(name):
    model, params = golden.model(name)
    text, chunks = golden.tokens(name)

    @jax.jit
    def choose(params):
        query = None
        if model.config.memory.query_dependent:
            at = golden.arrays(name)["query_length"].astype(np.int32) - 1
            query = model.apply({"params": params}, text, at, method="embed_query")
        there = np.ones(chunks.shape, bool)

        def encoder(model):
            return model.encoder.choose(chunks, there, query=query)

        return model.apply({"params": params}, method=encoder)[0]

    path = choose(params)
    tree = model.config.memory.tree
    leaves, level2, level1 = [], [], []
    for chunk, own in zip(chunks[0], np.asarray(path), strict=True):
        *pair, second, first = (node for _, node in by_hand(chunk.tolist(), tree, own))
        leaves, level2, level1 = leaves + pair, [*level2, second], [*level1, first]
    for level, nodes in ((1, level1), (2, level2), (3, leaves)):
        np.testing.assert_array_equal(golden.arrays(name)[f"preserved_ids_level{level}"], nodes)
    if model.config.memory.query_dependent:
        assert not path.all() and path.any(), "the policy does choose"


def paths(policy, tree, *arguments, query=None, seed=0, encode=None):
    return np.asarray(_paths(policy, tree, *arguments, jax.random.key(seed), query, encode))


@functools.partial(jax.jit, static_argnums=(0, 1, 6))
def _paths(policy, tree, tokens, lengths, key, query, encode):
    keys = jax.random.split(key, len(tokens))
    return search(policy, tree, tokens, lengths, keys, encode, query=query)


def test_a_query_finds_the_half_that_ends_like_it_and_the_left_one_when_both_do():
    table = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    tokens = np.zeros((4, 16), np.int32)
    tokens[0, [7, 3, 15]] = 5, 5, 0  # left, then left
    tokens[1, [15, 11]] = 5, 5  # right, then left
    tokens[2, [15]] = 5  # right, right
    tokens[3, [1, 15]] = 5, 5  # of 6 tokens [0 .. 5], none of which is at an end: a tie
    calls = []

    def encode(tokens, segments):
        jax.debug.callback(lambda *arrays: calls.append(arrays), tokens, segments, ordered=True)
        return jnp.asarray(table)[tokens]

    query = table[[5] * 4]
    lengths = np.array([16, 16, 16, 6], np.int32)
    found = paths(QueryAware(), Tree((4, 2, 1)), tokens, lengths, query=query, encode=encode)
    assert found.tolist() == [[False, False], [True, False], [True, True], [False, False]]
    jax.effects_barrier()
    assert [tokens.shape for tokens, _ in calls] == [(4, 16), (4, 8)]
    assert calls[0][1][3].tolist() == [1, 1, 1, 2, 2, 2] + [0] * 10


def test_random_paths_depend_on_their_keys_alone():
    tokens, lengths = np.ones((64, 16), np.int32), np.full(64, 16, np.int32)
    found = paths(Random(), Tree((4, 2, 1)), tokens, lengths)
    np.testing.assert_array_equal(found, paths(Random(), Tree((4, 2, 1)), tokens * 0, lengths))
    assert (found != paths(Random(), Tree((4, 2, 1)), tokens, lengths, seed=1)).any()
    assert 0.3 < found.mean() < 0.7 and (found[:, 0] != found[:, 1]).any()


@dataclasses.dataclass(frozen=True)
class Louder(Policy):
    """The half with the larger token."""

    def choose(self, level: Level):
        place = jnp.arange(level.tokens.shape[1])[None]
        first = jnp.where(place < level.left[:, None], level.tokens, 0).max(1)
        return level.tokens.max(1) > first


def test_a_policy_of_ones_own_chooses_too():
    tokens = np.zeros((3, 16), np.int32)
    tokens[[0, 1, 2], [2, 9, 14]] = 7
    found = paths(Louder(), Tree((4, 2, 1)), tokens, np.full(3, 16, np.int32))
    assert found.tolist() == [[False, False], [True, False], [True, True]]


def test_chunks_are_read_wherever_their_padding_is():
    tokens = np.array([[0, 0, 5, 6, 7], [5, 6, 7, 0, 0], [5, 0, 6, 0, 7]], np.int32)
    actual, length = jax.jit(trees.without_padding)(tokens, tokens > 0)
    assert np.asarray(actual).tolist() == [[5, 6, 7, 0, 0]] * 3 and length.tolist() == [3] * 3


@pytest.mark.parametrize(
    ("tree", "chunk", "words"),
    [
        (Tree(()), 64, "has 0 levels; give 1 ... 5"),
        (Tree((1,) * 6), 64, "has 6 levels"),
        (Tree(), 100, "chunk=100 must be a multiple of 2.3 = 8.*nearest: 96, 104"),
        (Tree(), 4, "nearest: 8"),
        (Tree((64, 8, 4)), 64, "one of 64 tokens is kept at level 1.*at most 32 there"),
        (Tree((16, 8, 4)), 16, "one of 16 tokens.*chunks of at least 32"),
    ],
)
def test_trees_that_cannot_be_built_raise_input_error(tree, chunk, words):
    with pytest.raises(InputError, match=words) as caught:
        tree.check()
        tree.check_chunk(chunk, "chunk")
    assert "\n" not in str(caught.value)


def test_the_right_half_is_chosen_without_a_question():
    tokens = np.ones((2, 16), np.int32)
    found = paths(Right(), Tree((4, 2, 1)), tokens, np.array([16, 1], np.int32))
    assert found.tolist() == [[True, True], [False, False]], "one token has no right half"
