"""XAttention against the authors' code, and which later tokens have a part in a choice."""

import attention_golden
import jax
import numpy as np
import pytest
import sparse_golden as golden

from lcjax.attention import XAttention
from lcjax.errors import InputError
from pallas_kernels import gather

CASES = pytest.mark.parametrize("case", ["xattention.chunks", "xattention.exact"])


def pattern_of(case):
    return XAttention(**{x: golden.params(case)[x] for x in ("threshold", "stride", "block")})


@CASES
@pytest.mark.parametrize("budget", [gather.BUDGET, 1], ids=["at once", "row by row"])
def test_sums_and_choices_equal_those_of_the_authors_code(case, budget, monkeypatch):
    monkeypatch.setattr(gather, "BUDGET", budget)
    x, pattern = golden.arrays(case), pattern_of(case)
    count = len(x["chosen"][0, 0])
    past = np.tril(np.ones((count, count), bool))
    sums, choose = (jax.jit(f) for f in (pattern._block_sums, pattern.choose))
    for number, head in enumerate(golden.heads(case, pattern.block)):
        want = x["sums"][0, number, :count, :count]
        np.testing.assert_allclose(sums(head)[0], want, **attention_golden.TOLERANCE)
        chosen = np.asarray(choose(head)) & past
        np.testing.assert_array_equal(chosen, x["chosen"][0, number])
        assert chosen.sum() < past.sum()


@CASES
def test_attention_equals_that_of_the_authors_code(case):
    x = golden.arrays(case)
    got = golden.attend(pattern_of(case), x["q"], x["k"], x["v"])
    np.testing.assert_allclose(got, x["out"], **attention_golden.TOLERANCE)


def test_only_later_tokens_of_the_own_block_have_a_part_in_the_output_of_a_token():
    x, pattern = golden.arrays("xattention.chunks"), pattern_of("xattention.chunks")
    q, k, v = (x[name] for name in "qkv")
    before = np.asarray(golden.attend(pattern, q, k, v))
    at, start = 201, 192  # the changed token, and the first one of its block
    q, k, v = (x.copy() for x in (q, k, v))
    q[:, at:], k[:, at:], v[:, at:] = -3 * q[:, at:], 2 * k[:, at:], v[:, at:] + 1
    after = np.asarray(golden.attend(pattern, q, k, v))
    np.testing.assert_array_equal(before[:, :start], after[:, :start])
    assert (before[:, start:at] != after[:, start:at]).any()


def test_calls_that_begin_at_blocks_give_the_output_of_one_call():
    x, pattern = golden.arrays("xattention.chunks"), pattern_of("xattention.chunks")
    q, k, v = (x[name] for name in "qkv")
    parts = [(0, 64), (64, 192), (192, 300)]
    got = [golden.attend(pattern, q[:, a:b], k[:, :b], v[:, :b]) for a, b in parts]
    want = golden.attend(pattern, q, k, v)
    np.testing.assert_allclose(np.concatenate(got, 1), want, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize(
    ("kind", "mass", "density"), [("token", 0.99, 0.92), ("block", 0.95, 0.23)]
)
def test_needles_are_visible_and_few_other_blocks(kind, mass, density):
    golden.check_needles(XAttention(stride=8, block=64), kind, mass, density)


def test_blocks_must_be_whole_runs():
    with pytest.raises(InputError, match="block=100 must be a multiple of pattern.stride=8.*104"):
        XAttention(block=100)
    with pytest.raises(InputError, match="pattern.threshold=0 must be a number"):
        XAttention(threshold=0)
    assert XAttention() == XAttention(threshold=0.9, stride=8, block=128)
