"""Fixtures of the tests of memories."""

import jax
import pytest

from lcjax.generation import contexts


@pytest.fixture
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def encoded(monkeypatch):
    """What is encoded from here on: for each batch the mask, and the options behind it."""
    calls, encode = [], contexts._encode

    def noted(model, params, tokens, mask, *rest):
        calls.append((mask, *rest))
        return encode(model, params, tokens, mask, *rest)

    monkeypatch.setattr(contexts, "_encode", noted)
    return calls
