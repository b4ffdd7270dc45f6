"""Mask algebra: element tests against definitions, block bounds against brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels as pk
from pallas_kernels import causal, everything, window
from pallas_kernels.masks import UNROLLED

INTEGERS = st.integers(-25, 70)
SIZES = st.integers(1, 20)
LISTS = st.lists(INTEGERS, max_size=9)
BLOCK_LISTS = st.lists(st.lists(st.integers(0, 12), max_size=4), max_size=9)
ATOMS = st.one_of(
    st.sampled_from([causal(), everything(), pk.nothing()]),
    st.integers(1, 40).map(window),
    st.tuples(INTEGERS, st.integers(0, 30)).map(lambda x: pk.band(x[0], sum(x))),
    SIZES.map(pk.stride),
    SIZES.flatmap(lambda n: st.builds(pk.tail_of, st.just(n), st.integers(1, n))),
    st.integers(0, 70).map(pk.prefix),
    st.builds(pk.chunks, SIZES, st.integers(-9, 9)),
    st.builds(
        lambda size, low, more, shift: pk.chunk_distance(
            size, low, None if more is None else low + more, shift
        ),
        SIZES, st.integers(-3, 4), st.none() | st.integers(0, 3), st.integers(-9, 9),
    ),
    st.builds(pk.since_chunk, SIZES, st.integers(0, 20), st.integers(0, 20)),
    LISTS.map(pk.keys_in),
    LISTS.map(pk.queries_in),
    LISTS.map(pk.documents),
    st.builds(pk.random_blocks, SIZES, BLOCK_LISTS),
)  # fmt: skip
MASKS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
        inner.map(lambda mask: ~mask),
    ),
    max_leaves=6,
)
RANGES = st.tuples(st.integers(-30, 60), st.integers(1, 14))
Q, K = np.arange(-13, 40), np.arange(-9, 44)
LONG = tuple(range(-7, 3 * UNROLLED, 2))  # longer than what is unrolled in traced code

# A definition of each atom, by one pair of plain integers.
DEFINITIONS = {
    everything(): lambda q, k: True,
    pk.nothing(): lambda q, k: False,
    causal(): lambda q, k: k <= q,
    window(3): lambda q, k: q - k < 3,
    pk.band(-2, 5): lambda q, k: -2 <= q - k <= 5,
    pk.stride(4): lambda q, k: q in range(k - 400, k + 400, 4),
    pk.stride(1): lambda q, k: True,
    pk.tail_of(5, 2): lambda q, k: k in (x + 5 * i for i in range(-20, 20) for x in (3, 4)),
    pk.tail_of(3, 3): lambda q, k: True,
    pk.prefix(4): lambda q, k: k < 4,
    pk.chunks(4): lambda q, k: q // 4 == k // 4,
    pk.chunks(6, shift=3): lambda q, k: (q + 3) // 6 == (k + 3) // 6,
    pk.chunk_distance(4, 1, 2): lambda q, k: q // 4 - k // 4 in (1, 2),
    pk.chunk_distance(4, 2, shift=1): lambda q, k: (q + 1) // 4 - (k + 1) // 4 >= 2,
    pk.keys_in([7, 1, 2, 3, 1]): lambda q, k: k in (1, 2, 3, 7),
    pk.keys_in(LONG): lambda q, k: k in LONG,
    pk.queries_in([0, 5, -2]): lambda q, k: q in (-2, 0, 5),
    pk.queries_in(LONG): lambda q, k: q in LONG,
    pk.documents([0, 4, 30]): lambda q, k: not any(min(q, k) < s <= max(q, k) for s in (0, 4, 30)),
    pk.documents(LONG): lambda q, k: not any(min(q, k) < s <= max(q, k) for s in LONG),
    pk.since_chunk(3, 5, 2): lambda q, k: k >= (0 if q < 5 else q - (q - 5) % 3) - 2,
    pk.random_blocks(4, [(2, 0), (), (1, 1)]): lambda q, k: (
        (q // 4, k // 4) in {(0, 0), (0, 2), (2, 1)}
    ),
    pk.random_blocks(1, [(i // 2,) for i in LONG if i >= 0]): lambda q, k: q >= 0 and k == q,
}
NAMES = [f"{mask!r:.60}" for mask in DEFINITIONS]


def dense(mask, q, k):
    return np.broadcast_to(mask.element(q[:, None], k[None, :]), (len(q), len(k)))


def grid(q=Q, k=K, size=4):
    """Interval ends of a grid of blocks, as `bounds` takes them."""
    (q_lo, q_hi), (k_lo, k_hi) = (
        (x[::size], x[np.minimum(np.arange(size - 1, len(x) + size - 1, size), len(x) - 1)])
        for x in (q, k)
    )
    return q_lo[:, None], q_hi[:, None], k_lo[None], k_hi[None]


@pytest.mark.parametrize(("mask", "definition"), DEFINITIONS.items(), ids=NAMES)
def test_mask_atoms_equal_their_definitions(mask, definition):
    expected = np.array([[definition(int(q), int(k)) for k in K] for q in Q])
    actual = mask.element(Q[:, None], K[None, :])
    assert actual.shape == expected.shape and actual.dtype == bool
    np.testing.assert_array_equal(actual, expected)
    assert bool(mask.element(3, 2)) == expected[16, 11]


@pytest.mark.parametrize("mask", DEFINITIONS, ids=NAMES)
def test_an_atom_answers_the_same_where_it_is_traced(mask):
    @jax.jit
    def both(q, k, ends):
        return mask.element(q, k), *mask.bounds(*ends)

    q, k, ends = Q[:, None], K[None, :], grid()
    element, *bounds = both(q, k, ends)
    np.testing.assert_array_equal(element, mask.element(q, k))
    np.testing.assert_array_equal(bounds, mask.bounds(*ends))
    assert np.shape(bounds[0]) == (len(ends[0]), ends[2].shape[1])


@pytest.mark.parametrize("mask", DEFINITIONS, ids=NAMES)
def test_bounds_of_every_atom_are_tight(mask):
    seen = dense(mask, Q, K)
    for size in (1, 4, 7):
        some, whole = mask.bounds(*grid(size=size))
        for i, j in np.ndindex(some.shape):
            block = seen[i * size : (i + 1) * size, j * size : (j + 1) * size]
            assert (some[i, j], whole[i, j]) == (block.any(), block.all()), (size, i, j)


@settings(max_examples=600, deadline=None)
@given(MASKS, RANGES, RANGES)
def test_block_bounds_never_contradict_brute_force(mask, q_range, k_range):
    q, k = (start + np.arange(size) for start, size in (q_range, k_range))
    seen = dense(mask, q, k)
    some, whole = mask.bounds(q[0], q[-1], k[0], k[-1])
    assert some or not seen.any()
    assert not whole or seen.all()


@settings(max_examples=200, deadline=None)
@given(ATOMS, RANGES, RANGES)
def test_bounds_of_an_atom_and_its_inverse_are_tight(mask, q_range, k_range):
    q, k = (start + np.arange(size) for start, size in (q_range, k_range))
    for atom in (mask, ~mask):
        seen = dense(atom, q, k)
        some, whole = atom.bounds(q[0], q[-1], k[0], k[-1])
        assert (bool(some), bool(whole)) == (seen.any(), seen.all())


@settings(max_examples=200, deadline=None)
@given(MASKS, st.integers(-50, 50))
def test_a_shift_invariant_mask_does_not_depend_on_the_origin(mask, shift):
    if mask.shift_invariant:
        np.testing.assert_array_equal(dense(mask, Q, K), dense(mask, Q + shift, K + shift))


def test_masks_of_the_distance_are_shift_invariant_and_others_are_not():
    assert (causal() & ~(window(3) | pk.stride(2) & pk.band(1, 9))).shift_invariant
    assert (everything() | pk.nothing()).shift_invariant
    absolute = [pk.prefix(2), pk.chunks(3), pk.tail_of(3, 1), pk.since_chunk(2, 2, 2)]
    absolute += [make([3]) for make in (pk.keys_in, pk.queries_in, pk.documents)]
    absolute += [pk.random_blocks(2, [(0,)])]
    assert not any((causal() & ~mask).shift_invariant for mask in absolute)


def test_long_lists_are_no_plain_arithmetic_and_short_ones_are():
    assert (causal() & ~pk.keys_in([1, 2])).arithmetic
    assert not (causal() | ~pk.keys_in(LONG)).arithmetic
    assert not pk.random_blocks(4, [(0,)] * (UNROLLED + 1)).arithmetic


@pytest.mark.parametrize("mask", DEFINITIONS, ids=NAMES)
def test_the_element_test_of_plain_arithmetic_holds_no_arrays(mask):
    tile = jax.ShapeDtypeStruct((8, 1), jnp.int32), jax.ShapeDtypeStruct((1, 16), jnp.int32)
    program = jax.make_jaxpr(mask.element)(*tile)
    assert mask.arithmetic != bool(program.consts)


def test_a_huge_table_of_random_blocks_keeps_conservative_bounds():
    mask = pk.random_blocks(1, [(i,) for i in range(4096)])
    some, whole = mask.bounds(np.arange(3)[:, None], np.arange(3)[:, None], 0, np.arange(2))
    assert some.all() and not whole.any() and some.shape == (3, 2)
    assert not mask.bounds(-5, -1, 0, 9)[0] and not mask.bounds(4096, 5000, 0, 9)[0]


def test_bounds_are_the_same_on_integers_numpy_and_traced_arrays():
    mask = causal() & ~window(4) | pk.chunks(5) & pk.keys_in([1, 7]) | pk.tail_of(9, 2)
    ends = grid()
    on_numpy = np.stack(mask.bounds(*ends))
    on_jax = jnp.stack(jax.jit(mask.bounds)(*ends))
    on_integers = np.zeros_like(on_numpy)
    for i, j in np.ndindex(on_numpy.shape[1:]):
        block = ends[0][i, 0], ends[1][i, 0], ends[2][0, j], ends[3][0, j]
        on_integers[:, i, j] = mask.bounds(*map(int, block))
    np.testing.assert_array_equal(on_numpy, on_jax)
    np.testing.assert_array_equal(on_numpy, on_integers)


def test_equal_expressions_are_equal_hashable_values():
    assert causal() & window(3) == causal() & window(3)
    assert len({causal() & window(3), causal() & window(3), causal() & window(4)}) == 2
    assert pk.keys_in([3, 1, 3]) == pk.keys_in(np.array([1, 3]))
    assert hash(pk.random_blocks(2, [[1, 0]])) == hash(pk.random_blocks(2, [(0, 1)]))


def test_masks_per_head_combine_part_by_part():
    halves = pk.per_head((pk.chunks(4), 2), (pk.chunks(4, 2), 2))
    mixed = ~(causal() & halves | pk.per_head((window(2), 1), (window(3), 3)))
    single = [
        ~(causal() & pk.chunks(4, shift) | window(size))
        for shift, size in ((0, 2), (0, 3), (2, 3), (2, 3))
    ]
    parts = pk.by_heads(mixed, 4)
    by_head = [mask for mask, heads in parts for _ in range(heads)]
    assert [heads for _, heads in parts] == [1, 1, 2]
    assert by_head == single
    assert hash(halves & causal()) == hash(halves & causal())
    assert (causal() & pk.per_head((window(2), 1))).parts == ((causal() & window(2), 1),)
    assert not halves.shift_invariant and pk.per_head((window(2), 3)).shift_invariant
    assert pk.by_heads(causal(), 7) == ((causal(), 7),)


def test_masks_per_head_of_different_numbers_of_heads_raise_an_error():
    halves = pk.per_head((causal(), 2), (window(3), 2))
    with pytest.raises(ValueError, match="cover 3 query heads and are used with 4"):
        _ = halves & pk.per_head((causal(), 3))
    with pytest.raises(ValueError, match="cover 4 query heads and are used with 8"):
        pk.by_heads(halves, 8)
    with pytest.raises(TypeError, match="by_heads"):
        halves.element(Q, K)
    with pytest.raises(TypeError, match="by_heads"):
        halves.bounds(0, 1, 0, 1)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "3"])
def test_a_window_without_a_token_raises_value_error(size):
    with pytest.raises(ValueError, match="window: size=.* must be an integer of at least 1"):
        window(size)


BAD = {
    "band: high=1 .* at least 2": lambda: pk.band(2, 1),
    "stride: n=0": lambda: pk.stride(0),
    "c must not exceed n; at most 3": lambda: pk.tail_of(3, 4),
    "prefix: n=-1": lambda: pk.prefix(-1),
    "chunk_distance: size=0": lambda: pk.chunks(0),
    "chunk_distance: high=0 .* at least 1": lambda: pk.chunk_distance(4, 1, 0),
    "since_chunk: stride=0": lambda: pk.since_chunk(0, 1, 1),
    "since_chunk: recent=-1": lambda: pk.since_chunk(1, 1, -1),
    "keys_in: indices=1.5": lambda: pk.keys_in([1.5]),
    "a key block=-1": lambda: pk.random_blocks(4, [(-1,)]),
    "block=0": lambda: pk.random_blocks(0, [(1,)]),
    "a part of 0 heads": lambda: pk.per_head((causal(), 0)),
    "no mask of one head": lambda: pk.per_head((pk.per_head((causal(), 1)), 1)),
    "at least one": lambda: pk.per_head(),
}


@pytest.mark.parametrize(("message", "make"), BAD.items(), ids=BAD)
def test_a_mask_that_makes_no_sense_names_the_rule(message, make):
    with pytest.raises(ValueError, match=message):
        make()
