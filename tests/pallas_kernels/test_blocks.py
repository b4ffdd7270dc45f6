"""How the blockwise loops behave: what they skip, what they hold, what they compose with."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import Alibi, FoldedHeads, causal, flash, window
from pallas_kernels.backends.xla import attention as _xla
from pallas_kernels.backends.xla import blocks as _xla_blocks
from pallas_kernels.dispatch import Operands, Spec
from pallas_kernels.online_softmax import row_cotangent


def arrays(batch=2, t=96, heads=4, kv_heads=2, size=16, seed=5):
    rng = np.random.default_rng(seed)
    shapes = [(batch, t, heads, size), (batch, t, kv_heads, size), (batch, t, kv_heads, size)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def loss(q, k, v, mask=None, **options):
    out, lse = flash(q, k, v, causal() if mask is None else mask, **options)
    return jnp.sum(out**2) + jnp.sum(jnp.sin(lse))


def assert_close(x, y):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), x, y)


def walked(mask, batch, t, block, batch_chunks, segments=None, **places):
    """The table of a cut into `batch_chunks`, one key head."""
    n = t // block
    cut = _xla_blocks.Tiling(batch // batch_chunks, 1, batch_chunks, 1, n, block, n, block, 1)
    segments = {} if segments is None else dict.fromkeys(("q_segments", "k_segments"), segments)

    def table(places):
        return _xla_blocks.block_table(Operands(**places), Spec(mask, 1.0), t, t, cut)

    places |= segments
    return jax.jit(table)(places) if places else table({})


def test_causal_walks_the_triangle_masks_only_the_diagonal_and_is_known_when_compiling():
    found = walked(causal(), 1, 64, 8, 1)
    assert found.static
    np.testing.assert_array_equal(found.full[0, 0], np.arange(8))
    np.testing.assert_array_equal(found.seen[0, 0], np.arange(8) + 1)


def test_rows_of_a_batch_skip_each_their_own_documents():
    segments = np.stack([np.repeat([1, 2], 32), np.repeat([1, 1], 32)])
    apart = walked(causal(), 2, 64, 32, 2, segments)
    np.testing.assert_array_equal(apart.seen[:, 0], [[1, 1], [1, 2]])
    np.testing.assert_array_equal(apart.full[:, 0], [[0, 0], [0, 1]])


def test_grouped_rows_visit_the_union_of_blocks_and_test_partial_ones():
    segments = np.stack([np.repeat([1, 2], 32), np.repeat([1, 1], 32)])
    together = walked(causal(), 2, 64, 32, 1, segments)
    np.testing.assert_array_equal(together.seen, [[[1, 2]]])
    np.testing.assert_array_equal(together.full, [[[0, 0]]])
    late = np.stack([np.arange(64), 32 + np.arange(64)])
    found = walked(causal(), 2, 64, 32, 1, q_index=late)
    np.testing.assert_array_equal(found.seen, [[[2, 2]]])
    np.testing.assert_array_equal(found.full, [[[0, 1]]])


def test_nothing_is_computed_for_invisible_keys():
    # A NaN in an unseen block would reach the output through 0 * NaN if the block were walked.
    q, k, v = arrays(batch=1, t=2048)
    v[:, 1024:] = np.nan
    out, _ = jax.jit(lambda q, k, v: flash(q, k, v, causal()))(q[:, :256], k, v)
    assert np.all(np.isfinite(out))


@pytest.mark.parametrize(
    "scores", [2500, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 9000))]
)
def test_looping_over_batch_and_heads_changes_nothing(scores):
    q, k, v = arrays(batch=3, t=50, heads=12, kv_heads=6)
    segments = np.sort(np.random.default_rng(0).integers(0, 3, (3, 50)), 1).astype(np.int32)
    slopes = Alibi(np.linspace(0.1, 2.0, 12, dtype=np.float32))
    operands = Operands(q_segments=segments, k_segments=segments, bias=slopes)
    spec, blocks = Spec(causal(), 0.3), _xla_blocks.BlockSizes(16, 24, scores)
    out, lse = jax.jit(lambda *x: _xla.forward(*x, operands, spec, blocks=blocks))(q, k, v)
    dense = jax.jit(lambda *x: flash(
        *x, causal(), scale=0.3, bias=slopes, q_segments=segments, k_segments=segments,
        implementation="reference",
    ))  # fmt: skip
    expected = dense(q, k, v)
    assert_close((out, lse), expected)
    rows, whole = (q, k, v, out, lse, q, np.ones_like(lse)), _xla_blocks.BlockSizes(50, 50)
    found, single = (
        jax.jit(lambda *x, blocks=blocks: _xla.backward(*x, operands, spec, blocks=blocks))(*rows)
        for blocks in (blocks, whole)
    )
    assert_close(found, single)


@pytest.mark.slow
def test_changing_a_token_changes_nothing_before_it():
    q, k, v = arrays(t=300)
    run = jax.jit(lambda q, k, v: flash(q, k, v, causal()))
    before = run(q, k, v)
    changed = (np.arange(300) == 171)[:, None, None]
    after = run(*(x + changed for x in (q, k, v)))
    for x, y in zip(before, after):
        np.testing.assert_array_equal(x[:, :171], y[:, :171])
        assert np.all(np.any(np.reshape(x != y, (2, 300, -1)), -1)[:, 171:])


@pytest.mark.slow
def test_packed_documents_equal_separate_ones():
    q, k, v = arrays(batch=1, t=330)
    lengths = [65, 200, 65]
    segments = np.repeat(np.arange(1, 4), lengths)[None].astype(np.int32)
    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    packed = run(q, k, v, q_segments=segments, k_segments=segments)
    ends = np.cumsum(lengths)
    separate = [run(*(x[:, e - n : e] for x in (q, k, v))) for n, e in zip(lengths, ends)]
    assert_close(packed[0], sum(value for value, _ in separate))
    grads = [np.concatenate(parts, 1) for parts in zip(*(g for _, g in separate))]
    assert_close(packed[1], tuple(grads))


def test_vmap_equals_a_loop():
    q, k, v = (x[:, None] for x in arrays(batch=3, t=40))
    grad = jax.jit(jax.grad(loss, (0, 1, 2)))
    mapped = jax.jit(jax.vmap(grad))(q, k, v)
    assert_close(mapped, tuple(np.stack(x) for x in zip(*map(grad, q, k, v))))


def test_vmap_over_offsets_equals_a_loop():
    q, k, v = arrays(batch=1, t=70)
    q = q[:, :3]

    def step(offset):
        return flash(q, k, v, causal(), q_index=offset + jnp.arange(3))

    offsets = np.array([0, 20, 66])
    expected = [np.stack(x) for x in zip(*map(jax.jit(step), offsets))]
    assert_close(jax.jit(jax.vmap(step))(offsets), tuple(expected))


def test_scanned_and_checkpointed_layers_have_the_same_gradients():
    q, k, v = arrays(t=40, heads=2)

    def layer(x):
        return x + flash(x, k, v, causal() & window(9))[0]

    def scanned(x):
        step = jax.checkpoint(lambda x, _: (layer(x), None))
        return jnp.sum(jax.lax.scan(step, x, None, length=3)[0] ** 2)

    def plain(x):
        return jnp.sum(layer(layer(layer(x))) ** 2)

    assert_close(jax.jit(jax.grad(scanned))(q), jax.jit(jax.grad(plain))(q))


def test_sharding_over_batch_and_heads_moves_no_data():
    q, k, v = arrays(batch=4, t=64, heads=8, kv_heads=4)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("data", None, "tensor", None))
    grad = jax.jit(jax.grad(loss, (0, 1, 2)), out_shardings=(sharding,) * 3)
    sharded = [jax.device_put(x, sharding) for x in (q, k, v)]
    compiled = grad.lower(*sharded).compile()
    assert_close(compiled(*sharded), jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v))
    text = compiled.as_text()
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in text


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_forward_and_backward_lower_for_accelerators(platform):
    shapes = [jax.ShapeDtypeStruct((2, 2048, h, 64), jnp.bfloat16) for h in (8, 2, 2)]
    step = jax.jit(jax.grad(lambda *x: loss(*x).astype(jnp.float32), (0, 1, 2)))
    text = step.trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
    assert "f64" not in text and "callback" not in text


def temporary_bytes(t, function):
    shapes = [jax.ShapeDtypeStruct((1, t, h, 64), jnp.float32) for h in (9, 3, 3)]
    return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(loss, id="forward", marks=pytest.mark.slow),
        pytest.param(jax.grad(loss, (0, 1, 2)), id="backward"),
    ],
)
def test_memory_grows_with_the_length_not_its_square(function):
    short, long = temporary_bytes(8192, function), temporary_bytes(16384, function)
    assert long - short < 1.1 * 8192 * 64 * 4 * (9 + 3 + 3) * 3  # a few copies of q, k, v
    assert long < 300e6  # one float32 score matrix of one head would be 1074 MB


def test_a_cpu_sums_products_without_an_axis_of_1():
    # XLA takes 7 to 50 times as long if the first axis is 1.
    x, y = np.random.default_rng(0).standard_normal((2, 1, 24, 3, 16)).astype(np.float32)
    program = jax.jit(row_cotangent).lower(x, y, None).compile()
    sums = re.findall(r"= f32\[([\d,]*)\]\S* reduce\(", program.as_text())
    assert sums == ["24,3"]  # not 1,24,3
    np.testing.assert_allclose(program(x, y, None), (x * y).sum(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("heads", "scores"), [(6, 1), (6, 700), (4, 2500), (1, 2500)])
def test_heads_that_are_rows_are_read_where_a_cache_has_them(heads, scores):
    """All ways to loop over them: some heads of a text, all heads of some texts, and odd sizes."""
    texts, slots = 3, 37
    rng = np.random.default_rng(heads)
    cache = rng.normal(size=(2, texts, heads, slots, 16)).astype(np.float32)
    q = rng.normal(size=(texts * heads, 2, 4, 16)).astype(np.float32)
    index = rng.integers(0, 60, (texts * heads, slots)).astype(np.int32)
    segments = np.ones((texts * heads, 2), np.int32), rng.integers(0, 2, index.shape)
    q_index = np.full((texts * heads, 2), [40, 50], np.int32)
    operands = Operands(q_index, index, segments[0], segments[1].astype(np.int32))
    spec, blocks = Spec(causal(), 0.3), _xla_blocks.BlockSizes(16, 8, scores)
    found = jax.jit(lambda q, *x: _xla.forward(q, *x, operands, spec, blocks=blocks))(
        q, *map(FoldedHeads, cache)
    )
    places = dict(zip(("q_index", "k_index", "q_segments", "k_segments"), operands))
    expected = flash(
        q, *(x.reshape(texts * heads, slots, 1, 16) for x in cache), causal(), scale=0.3,
        implementation="reference", **places,
    )  # fmt: skip
    assert_close(found, expected)
    folded, rows = map(FoldedHeads, cache), cache.reshape(2, texts * heads, slots, 1, 16)
    keys, values = folded
    for pair in ((keys, values), (rows[0], values), (keys, rows[1])):
        for options in ({}, {"implementation": "reference"}, {"splits": 3}):
            whole = flash(q, *pair, causal(), scale=0.3, **places, **options)
            assert_close(whole, expected)


def test_values_whose_heads_are_rows_are_read_beside_an_array_of_keys():
    """A chunk of rows is neither a part of the heads of a text nor all heads of some texts."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(6, 64, 8, 16)).astype(np.float32)
    keys, values = rng.normal(size=(2, 2, 3, 2048, 16)).astype(np.float32)
    rows = [x.reshape(6, 2048, 1, 16) for x in (keys, values)]
    assert_close(flash(q, rows[0], FoldedHeads(values)), flash(q, *rows))


def test_heads_that_are_rows_have_no_gradient():
    q, cache = np.ones((6, 2, 2, 8), np.float32), FoldedHeads(jnp.ones((2, 3, 5, 8)))
    with pytest.raises(NotImplementedError, match="FoldedHeads, have no gradient"):
        jax.grad(lambda x: flash(x, cache, cache)[0].sum())(q)
