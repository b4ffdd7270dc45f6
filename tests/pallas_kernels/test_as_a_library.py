"""Calls as other projects make them: odd inputs, wrong ones, 64-bit programs, all meshes."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    Layout,
    alibi_slopes,
    causal,
    decode,
    flash,
    landmark_attention,
    merge,
    per_head,
    tables,
    window,
)

B, T, N, K, H = 2, 16, 4, 2, 8
BLOCKS = dict(q_block=4, k_block=4)


def arrays(t=T, s=T, b=B, dtype=np.float32):
    r = np.random.default_rng(0)
    return tuple(
        jnp.asarray(r.normal(size=x), dtype) for x in ((b, t, N, H), (b, s, K, H), (b, s, K, H))
    )


def dense(q, k, v):
    """Causal attention in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, N // K, 2) for x in (k, v))
    logits = np.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    logits = np.where(np.tril(np.ones((T, T), bool)), logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), v)


def loss(attention):
    return lambda *x: jnp.sum(jnp.sin(attention(*x).astype(jnp.float32)))


def test_masks_are_combined_by_operators_as_words_would_drop_one():
    with pytest.raises(TypeError, match="combine masks with &"):
        causal() and window(3)


def exported(*x):
    (rows,) = jax.export.symbolic_shape("b")
    like = [jax.ShapeDtypeStruct((rows, *y.shape[1:]), y.dtype) for y in x]
    return jax.export.export(jax.jit(flash))(*like)


WRONG = {
    "integers": (TypeError, "floating", lambda q, k, v: flash(q.astype(int), k, v)),
    "complex": (TypeError, "floating", lambda q, k, v: flash(q, k, v.astype(complex))),
    "dtypes": (TypeError, "one dtype", lambda q, k, v: flash(q, k.astype(jnp.bfloat16), v)),
    "a dtype of v": (TypeError, "one dtype", lambda q, k, v: flash(q, k, v.astype(jnp.float16))),
    "lists": (TypeError, "q is list", lambda q, k, v: flash([[0.0]], k, v)),
    "symbolic sizes": (TypeError, "program for each shape", exported),
    "no heads": (ValueError, "may be 0", lambda q, k, v: flash(q, k[:, :, :0], v[:, :, :0])),
    "a dense mask": (TypeError, "from_block_mask", lambda *x: flash(*x, jnp.ones((T, T), bool))),
    "a function": (TypeError, r"causal\(\) &", lambda *x: flash(*x, causal)),
    "a dense bias": (TypeError, "RelativeBias", lambda *x: flash(*x, bias=jnp.ones((N, T, T)))),
    "a dense table": (TypeError, "from_block_mask", lambda *x: flash(*x, table=np.ones((4, 4)))),
    "segments of floats": (
        TypeError, "must be integers",
        lambda *x: flash(*x, q_segments=jnp.ones((B, T)), k_segments=jnp.ones((B, T))),
    ),
    "places of floats": (TypeError, "integers", lambda *x: flash(*x, q_index=np.arange(T) / 2)),
    "a learned scale": (
        TypeError, "multiply q", lambda *x: jax.grad(lambda s: flash(*x, scale=s)[0].sum())(0.5)
    ),
    "a traced cap": (
        ValueError, "known when", lambda *x: jax.jit(lambda s: flash(*x, soft_cap=s))(5.0)
    ),
    "a table of more keys": (
        ValueError, "make it with keys=8",
        lambda q, k, v: flash(
            q, k[:, :8], v[:, :8],
            table=tables.from_block_mask(np.ones((4, 4), bool), **BLOCKS),
        ),
    ),
    "a batch left out of top k": (
        ValueError, "choices",
        lambda *x: tables.from_top_k(jnp.zeros((2, 4, 3), int), keys=T, **BLOCKS),
    ),
    "top k of floats": (
        TypeError, "integers",
        lambda *x: tables.from_top_k(jnp.zeros((1, 2, 4, 3)), keys=T, **BLOCKS),
    ),
    "a scale of text": (ValueError, "scale='1'", lambda *x: flash(*x, scale="1")),
    "a scale that is not finite": (ValueError, "scale=nan", lambda *x: flash(*x, scale=np.nan)),
    "an implementation of no name": (
        TypeError, "implementation is a list", lambda *x: flash(*x, implementation=["xla"])
    ),
    "a cap of text": (ValueError, "soft_cap='5'", lambda *x: flash(*x, soft_cap="5")),
    "splits of text": (ValueError, "splits", lambda *x: flash(*x, splits="2")),
    "a layout of text": (TypeError, "layout is a str", lambda *x: flash(*x, layout="data")),
    "a cache of lists": (ValueError, "must be arrays", lambda q, k, v: decode(q, [1.0], [1.0])),
    "a block of text": (ValueError, "block", lambda *x: landmark_attention(*x, "4")),
    "a window beyond 32 bits": (ValueError, "32 bits", lambda *x: window(2**70)),
    "a mask of a number": (
        TypeError, "from_mask: the mask is a int",
        lambda *x: tables.from_mask(5, queries=T, keys=T, **BLOCKS),
    ),
    "blocks that are floats": (
        TypeError, "bool array", lambda *x: tables.from_block_mask(np.ones((4, 4)), **BLOCKS)
    ),
    "blocks of no tokens": (
        ValueError, "block",
        lambda *x: tables.from_block_mask(np.ones((4, 4), bool), q_block=0, k_block=4),
    ),
    "slopes of no heads": (ValueError, "heads=0 must be", lambda *x: alibi_slopes(0)),
    "heads without a number": (ValueError, "pair", lambda *x: per_head(causal())),
    "a cache as flash has it": (ValueError, "heads, length", lambda *x: decode(*x, causal())),
    "Landmark of integers": (
        TypeError, "landmark_attention: k",
        lambda q, k, v: landmark_attention(q, k.astype(int), v, 4),
    ),
    "a traced block": (
        ValueError, "must be an integer",
        lambda *x: jax.jit(lambda n: landmark_attention(*x, n))(4),
    ),
    "one partial": (ValueError, "list of pairs", lambda *x: merge(flash(*x))),
    "partials of other queries": (
        ValueError, "one shape", lambda q, k, v: merge([flash(q, k, v), flash(q[:, :3], k, v)])
    ),
    "an axis twice": (
        ValueError, "used once",
        lambda *x: Layout(jax.make_mesh((2,), ("data",)), rows=("data",), heads="data"),
    ),
    "an unknown axis": (
        ValueError, r"those of the mesh: \['data'\]",
        lambda *x: Layout(jax.make_mesh((2,), ("data",)), heads="tensor"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise_errors_that_name_the_fix(name):
    error, message, call = WRONG[name]
    with pytest.raises(error, match=message):
        call(*arrays())


@pytest.mark.parametrize("b,t,s", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)])
@pytest.mark.parametrize("attention", [flash, lambda *x, **_: landmark_attention(*x, 2)])
def test_without_rows_queries_or_keys_the_output_is_zero(b, t, s, attention):
    x = arrays(t, s, b)
    out, lse = attention(*x)
    assert out.shape == (b, t, N, H) and lse.shape == (b, t, N)
    assert np.all(np.asarray(out) == 0) and np.all(np.asarray(lse) == -np.inf)
    slopes = jax.grad(lambda *x: attention(*x)[0].sum(), (0, 1, 2))(*x)
    assert all(d.shape == y.shape and not np.any(d) for d, y in zip(slopes, x, strict=True))


def test_sinks_are_all_that_is_there_without_keys():
    out, lse = flash(*arrays(3, 0), sinks=jnp.arange(N, dtype=jnp.float32))
    np.testing.assert_array_equal(lse, np.broadcast_to(np.arange(N), lse.shape))
    assert not np.any(out)


def test_boolean_segments_are_padding():
    q, k, v = arrays()
    there = jnp.arange(T)[None] < jnp.array([[T], [5]])
    found = flash(q, k, v, q_segments=jnp.ones((B, T), bool), k_segments=there)[0]
    expected = flash(q, k, v, k_lengths=[T, 5])[0]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_programs_of_64_bits_have_the_same_attention_and_keep_their_dtype(dtype):
    with jax.enable_x64(True):
        x = arrays(dtype=dtype)
        segments = jnp.ones((B, T), jnp.int64)
        chosen = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int64), (B, K, 4, 4))
        table = tables.from_top_k(chosen, keys=T, **BLOCKS)

        def attention(*x):
            places = dict(q_segments=segments, k_segments=segments, q_index=jnp.arange(T))
            return flash(*x, causal(), table=table, **places)[0]

        out = jax.jit(attention)(*x)
        slopes = jax.jit(jax.grad(loss(attention), (0, 1, 2)))(*x)
        assert out.dtype == dtype and all(d.dtype == dtype for d in slopes)
        np.testing.assert_allclose(out, dense(*x), atol=1e-6)
    plain = [np.asarray(y, np.float32) for y in x]
    for found, known in zip(
        slopes, jax.grad(loss(lambda *x: flash(*x, causal())[0]), (0, 1, 2))(*plain), strict=True
    ):
        np.testing.assert_allclose(found, known, atol=1e-5)


@pytest.mark.slow
def test_landmark_attention_runs_in_programs_of_64_bits():
    with jax.enable_x64(True):
        x = arrays(dtype=np.float64)
        found = jax.jit(lambda *x: landmark_attention(*x, 4)[0])(*x)
        expected = landmark_attention(*x, 4, implementation="reference")[0]
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, atol=1e-6)


def on(mesh, spec, *x):
    return [jax.device_put(y, NamedSharding(mesh, spec)) for y in x]


@pytest.mark.parametrize("length", [None, "context"])
def test_axes_of_the_kind_explicit_are_those_that_make_mesh_makes(length):
    shape, names = (2, 2, 2), ("data", "tensor", "context")
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * 3)
    layout = Layout(mesh, ("data",), "tensor", length) if length else None
    x = arrays()
    split = on(mesh, P("data", None, "tensor"), *x)

    def attention(*x):
        return flash(*x, causal(), layout=layout)[0]

    out, slopes = jax.jit(lambda *x: (attention(*x), jax.grad(loss(attention), (0, 1, 2))(*x)))(
        *split
    )
    assert jax.typeof(out).sharding.spec == P("data", length, "tensor", None)
    np.testing.assert_allclose(np.asarray(out), dense(*x), atol=1e-6)
    known = jax.grad(loss(lambda *x: flash(*x, causal())[0]), (0, 1, 2))(*x)
    for found, expected, given in zip(slopes, known, split, strict=True):
        assert found.sharding.is_equivalent_to(given.sharding, found.ndim)
        np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5)


def test_shard_map_needs_check_vma_false():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    x, spec = arrays(), P("data", None, "tensor")

    def split(**options):
        local = jax.shard_map(
            lambda *x: flash(*x, causal())[0],
            mesh=mesh, in_specs=spec, out_specs=spec, **options,
        )  # fmt: skip
        return jax.jit(local)(*on(mesh, spec, *x))

    with pytest.raises(ValueError, match="check_vma=False"):
        split()
    np.testing.assert_allclose(split(check_vma=False), dense(*x), atol=1e-6)
