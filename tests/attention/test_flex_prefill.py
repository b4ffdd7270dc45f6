"""FlexPrefill against the authors' code."""

import dataclasses

import attention_golden
import jax
import numpy as np
import pytest
import sparse_golden as golden

from lcjax.attention import FlexPrefill
from lcjax.errors import InputError

CASE = "flexprefill.mixed"
NAMES = ("gamma", "tau", "block", "min_budget")
PATTERN = FlexPrefill(**{name: golden.params(CASE)[name] for name in NAMES})


def test_choices_equal_those_of_the_authors_code():
    x = golden.arrays(CASE)
    choose = jax.jit(lambda head: (PATTERN.choose(head), PATTERN._probe(head)[1]))
    past = np.tril(np.ones((11, 11), bool))
    assert set(x["query_aware"][0].tolist()) == {False, True}
    for number, head in enumerate(golden.heads(CASE, PATTERN.block)):
        chosen, is_query_aware = choose(head)
        assert is_query_aware == x["query_aware"][0, number]
        np.testing.assert_array_equal(np.asarray(chosen) & past, x["chosen"][0, number])
        assert x["chosen"][0, number].sum() < past.sum()


def test_attention_equals_that_of_the_authors_code():
    x = golden.arrays(CASE)
    got = golden.attend(PATTERN, x["q"], x["k"], x["v"])
    np.testing.assert_allclose(got, x["out"], **attention_golden.TOLERANCE)


def test_the_last_tokens_choose_for_all():
    x = golden.arrays(CASE)
    pattern = dataclasses.replace(PATTERN, tau=0)
    q, k, v = (x[name] for name in "qkv")
    before = golden.attend(pattern, q, k, v)
    q = q.copy()
    q[:, -32:] = -3 * q[:, -32:]
    after = golden.attend(pattern, q, k, v)
    assert np.abs(before - after)[0, :-32].max() > 1e-3


def test_the_number_of_keys_that_reach_gamma_is_the_budget_of_columns():
    """Even attention: 9 of 10 keys reach gamma, which are 4 blocks, counted by 128."""
    pattern = FlexPrefill(gamma=0.9, tau=0, block=32, min_budget=32)
    head = golden.prompt_head(np.zeros((512, 16)), np.zeros((512, 16)))
    chosen = np.asarray(jax.jit(pattern.choose)(head))
    budget = int(0.9 * 512) // 128 + 1
    assert chosen[-1].sum() == 2 * budget  # columns, and diagonals that are others
    assert chosen[:, 0].all() and chosen.diagonal().all()


@pytest.mark.parametrize(
    ("kind", "mass", "density"), [("token", 0.94, 0.34), ("block", 0.95, 0.23)]
)
def test_needles_are_visible_and_few_other_blocks(kind, mass, density):
    golden.check_needles(FlexPrefill(block=64, min_budget=128), kind, mass, density)


def test_fields_out_of_range_raise_input_error():
    for field, value in (("gamma", 1.5), ("gamma", 0), ("tau", -0.1), ("min_budget", 0)):
        with pytest.raises(InputError, match=f"pattern.{field}={value} must be"):
            FlexPrefill(**{field: value})
