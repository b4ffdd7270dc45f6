"""Tri-shape against the authors' code."""

import attention_golden
import numpy as np
import pytest
import sparse_golden as golden

from lcjax.attention import TriShape
from lcjax.errors import InputError

CASE = "minference.shapes"
PATTERN = TriShape(*(golden.params(CASE)[name] for name in ("init", "window", "last")))


def test_attention_equals_that_of_the_authors_code():
    x = golden.arrays(CASE)
    got = golden.attend(PATTERN, x["q"], x["k"], x["v"])
    np.testing.assert_allclose(got, x["out_tri_shape"], **attention_golden.TOLERANCE)
    wrong = np.abs(got - x["out_a_shape"]).max((0, 2, 3)) > 1e-3
    last = np.arange(len(wrong)) >= len(wrong) - PATTERN.last
    assert not wrong[~last].any() and wrong[last].all()


def test_a_call_that_continues_a_text_shows_everything_to_its_last_queries():
    x = golden.arrays(CASE)
    want = golden.attend(PATTERN, x["q"], x["k"], x["v"])
    got = golden.attend(PATTERN, x["q"][:, 50:], x["k"], x["v"])
    np.testing.assert_allclose(got, want[:, 50:], rtol=1e-5, atol=2e-6)


def test_fields_out_of_range_raise_input_error():
    for field, value in (("sinks", -1), ("window", 0), ("last", 0)):
        with pytest.raises(InputError, match=f"pattern.{field}={value} must be"):
            TriShape(**{field: value})
