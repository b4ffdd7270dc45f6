"""Marks of tests that compile for devices that are not here."""

import importlib.util

import pytest

CUDA_PLUGIN = next(
    filter(importlib.util.find_spec, ["jax_cuda13_plugin", "jax_cuda12_plugin"]), None
)
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install -e '.[aot]'",
)
needs_cuda_plugin = pytest.mark.skipif(
    CUDA_PLUGIN is None, reason="jax's CUDA plugin is not installed"
)
