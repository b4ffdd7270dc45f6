"""Fixtures of the tests of memories."""

import jax
import pytest

from lcjax.generation import context_store


@pytest.fixture
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def encoded(monkeypatch):
    """What is encoded from here on: for each batch the mask, and the options behind it."""
    calls, encode = [], context_store._encode

    def noted(model, params, tokens, mask, *rest):
        calls.append((mask, *rest))
        return encode(model, params, tokens, mask, *rest)

    monkeypatch.setattr(context_store, "_encode", noted)
    return calls
