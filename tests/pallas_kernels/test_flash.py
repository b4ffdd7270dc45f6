"""Attention against a float64 NumPy oracle, values and gradients, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import CASES, Case, above_limit, oracle, run

from pallas_kernels import (
    Alibi,
    causal,
    flash,
    per_head,
)
from pallas_kernels.dispatch import Constant
from pallas_kernels.tables import from_block_mask, from_top_k

REFERENCE = (
    "queries before every key", "documents of a memory", "bucketed bias, sinks, lengths",
    "masks and tables per head", "rows at places of their own", "bfloat16",
)  # fmt: skip
# What these reach, the others reach together.
SLOW = (
    "causal, odd size, three queries per key", "one head per key head", "eight queries per key",
    "several blocks", "more keys than queries, from an offset", "documents of a memory",
    "far keys only", "rows at places of their own", "a table", "masks and tables per head",
    "bfloat16", "bfloat16, odd head sizes, soft cap", "bfloat16, sinks, few queries",
)  # fmt: skip
RUNS = [
    pytest.param(name, "xla", marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES
] + [(name, "reference") for name in REFERENCE]


@pytest.mark.parametrize(("name", "implementation"), RUNS)
def test_values_and_gradients_equal_the_dense_float64_formulas(name, implementation):
    case = CASES[name]
    expected, actual = oracle(case), run(case, implementation)
    assert actual["out"].dtype == actual["dq"].dtype == case.dtype
    assert actual["lse"].dtype == jnp.float32
    assert actual.keys() == expected.keys()
    assert not above_limit(case, actual, expected)


def test_queries_without_a_key_give_zeros_minus_infinity_and_no_gradient():
    found = jax.device_get(run(Case(batch=1, t=30, s=30, offset=-20), "xla"))
    lse = found["lse"]
    assert np.all(np.isneginf(lse[:, :20])) and np.all(np.isfinite(lse[:, 20:]))
    assert not np.any(found["out"][:, :20]) and not np.any(found["dq"][:, :20])
    assert not np.any(found["dk"][:, 10:]) and not np.any(found["dv"][:, 10:])
    assert all(np.all(np.isfinite(found[x])) for x in ("out", "dq", "dk", "dv"))


def test_a_whole_batch_of_padding_gives_zeros():
    q, nobody = np.ones((2, 9, 2, 8), np.float32), np.zeros((2, 9), np.int32)
    out, lse = jax.jit(lambda: flash(q, q, q, causal(), q_segments=nobody, k_segments=nobody))()
    assert not np.any(out) and np.all(np.isneginf(lse))


def test_large_logits_do_not_overflow():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 1, 300, 1, 16)).astype(np.float32)

    def run(implementation):
        def attention(*x):
            return flash(*x, causal(), scale=100.0, implementation=implementation)

        results, pull = jax.vjp(attention, q, k, v)
        return *results, *pull((v, np.ones((1, 300, 1), np.float32)))

    results = jax.device_get(jax.jit(lambda: run("xla"))())
    assert np.max(results[1]) > 1000  # exp would overflow at 89
    for x, y in zip(results, jax.device_get(jax.jit(lambda: run("reference"))())):
        assert np.linalg.norm(x - y) < 1e-3 * np.linalg.norm(y)


def test_a_traced_table_that_overflows_gives_nan_and_one_that_fits_does_not():
    q = np.ones((1, 64, 2, 8), np.float32)
    chosen = np.array([[[[0, 1, 2], [1, 2, 3]]]])

    def attention(chosen, capacity):
        table = from_top_k(chosen, keys=64, q_block=32, k_block=16, capacity=capacity)
        return flash(q, q, q, table=table)

    attention = jax.jit(attention, static_argnums=1)
    assert all(np.all(np.isfinite(x)) for x in attention(chosen, 3))
    assert all(np.all(np.isnan(x)) for x in attention(chosen, 2))


def test_static_tables_of_equal_content_compile_one_program():
    def constant(keep):
        visible = np.tri(3, dtype=bool) & keep
        return Constant(from_block_mask(visible, q_block=16, k_block=16))

    first, again, other = constant(True), constant(True), constant(np.eye(3, dtype=bool))
    assert first == again and hash(first) == hash(again) and first != other
    q, traced = np.ones((1, 48, 1, 8), np.float32), []

    def attention(q, table):
        traced.append(1)
        return flash(q, q, q, causal(), table=table.tree)[0]

    attention = jax.jit(attention, static_argnums=1)
    np.testing.assert_array_equal(attention(q, first), attention(q, again))
    attention(q, other)
    assert len(traced) == 2


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_of_no_rows_no_queries_or_no_keys_nothing_is_seen(batch, queries, keys):
    q, k = (np.ones((batch, *size, 8), np.float32) for size in ((queries, 2), (keys, 1)))

    @jax.jit
    def results(q, k):
        (out, lse), pull = jax.vjp(lambda q, k: flash(q, k, k, causal()), q, k)
        return out, lse, *pull((out, lse))

    expected = np.zeros_like(q), np.full((batch, queries, 2), -np.inf), *map(np.zeros_like, (q, k))
    for actual, x in zip(results(q, k), expected, strict=True):
        np.testing.assert_array_equal(actual, x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=jnp.ones((4, 2, 8))), "must be \\[batch, length, heads, size\\]"),
        (dict(q=jnp.ones((1, 4, 3, 8))), "3 query heads must be a multiple of 2"),
        (dict(q=jnp.ones((1, 4, 2, 4))), "share q's batch and head size"),
        (dict(v=jnp.ones((1, 5, 2, 8))), "share k's batch, length and heads"),
        (dict(q_segments=jnp.ones((1, 4), jnp.int32)), "both q_segments and k_segments"),
        (dict(q_index=jnp.arange(3)), "q_index has shape \\(3,\\), must be \\(4,\\) or \\(1, 4\\)"),
        (dict(k_lengths=jnp.ones(2)), "k_lengths has shape \\(2,\\), must be \\(1,\\)"),
        (dict(q_index=[[1], 2]), "q_index has rows of different lengths"),
        (dict(sinks=[[1], 2]), "sinks has rows of different lengths"),
        (dict(scale=[[1], 2]), r"scale=\[\[1\], 2\] must be a finite number"),
        (dict(scale=np.ones((2, 3))), r"^[^\n]*scale=array\(.* must be a finite number[^\n]*$"),
        (dict(soft_cap=0.0), "soft_cap=0.0 must be a number above 0"),
        (dict(bias=Alibi(jnp.ones(3))), "the bias is for 3 heads, q has 2"),
        (dict(soft_cap=np.ones((2, 3))), r"^[^\n]*soft_cap=array\(.* must be [^\n]*$"),
        (dict(sinks=jnp.ones(1)), "sinks has shape \\(1,\\), must be \\(2,\\)"),
        (dict(mask=per_head((causal(), 3))), "cover 3 query heads and are used with 2"),
        (
            dict(table=from_block_mask(np.ones((2, 1), bool), q_block=4, k_block=4)),
            "2 query blocks; must be 1 or 1 rows, 1, 2 or 2 heads, and 1 blocks of 4 queries",
        ),
    ],
)
def test_wrong_inputs_raise_value_error(change, message):
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=message):
        flash(**(dict(q=x, k=x, v=x) | change))


@pytest.mark.parametrize(("tokens", "kept"), [(256, (2, 8, 128)), (100, (2, 100, 4))])
def test_log_sum_exps_are_kept_in_rows_of_128_where_tokens_divide(tokens, kept):
    q, k, v = (jnp.ones((2, tokens, heads, 8)) for heads in (4, 2, 2))
    policy = jax.checkpoint_policies.save_only_these_names("attention")
    _, pull_back = jax.vjp(
        jax.checkpoint(lambda *x: flash(*x, causal())[0], policy=policy), q, k, v
    )
    shapes = {x.shape for x in jax.tree.leaves(pull_back)}
    assert shapes == {kept, q.shape, k.shape}
