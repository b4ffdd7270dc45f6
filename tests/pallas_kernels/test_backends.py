"""Which implementation runs, and what is said where one cannot."""

import logging
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal, dispatch, flash
from pallas_kernels.dispatch import BACKENDS, Backend

Q = jnp.ones((1, 4, 2, 8))


@pytest.fixture
def other(monkeypatch):
    """Adds a backend "other" for CPUs; what it cannot do is in `other.reason`."""
    module = types.ModuleType("another_backend")
    module.reason = None
    module.unsupported = lambda q, k, v, operands, spec: module.reason

    def forward(q, k, v, operands, spec, *, platform):
        return jnp.full_like(q, 7.0), jnp.zeros(q.shape[:3])

    module.forward = forward
    monkeypatch.setitem(sys.modules, "another_backend", module)
    monkeypatch.setitem(BACKENDS, "other", Backend("another_backend", ("cpu",)))
    monkeypatch.setitem(BACKENDS, "elsewhere", Backend("another_backend", ("tpu", "rocm")))
    dispatch.run.clear_cache()
    yield module
    dispatch.run.clear_cache()


def test_a_platform_takes_its_own_backend_where_that_can_run(other):
    assert np.all(flash(Q, Q, Q)[0] == 7.0)
    assert np.all(flash(Q, Q, Q, implementation="other")[0] == 7.0)
    assert np.all(flash(Q, Q, Q, implementation="xla")[0] == 1.0)


def test_what_has_not_run_on_its_device_runs_by_name_only(other, monkeypatch):
    monkeypatch.setitem(BACKENDS, "other", BACKENDS["other"]._replace(needs_check=True))
    assert np.all(flash(Q, Q, Q)[0] == 1.0)
    assert np.all(flash(Q, Q, Q, implementation="other")[0] == 7.0)


def test_a_fallback_logs_its_reason_once(other, caplog):
    other.reason = f"it has no taste for {id(other)}"
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert np.all(flash(Q, Q, Q)[0] == 1.0)
    assert [record.message for record in caplog.records] == [
        f"flash: not other, {other.reason}; xla runs"
    ]


def test_an_implementation_by_name_that_cannot_run_raises_value_error_with_its_reason(other):
    other.reason = "heads are too large"
    with pytest.raises(ValueError, match="'other'.*: heads are too large; leave implementation"):
        flash(Q, Q, Q, implementation="other")
    with pytest.raises(ValueError, match="it runs on tpu, rocm and this process runs on cpu"):
        flash(Q, Q, Q, implementation="elsewhere")


def test_unknown_implementations_are_named_with_the_choices():
    with pytest.raises(ValueError, match=r"'fast'.*xla.*reference"):
        flash(Q, Q, Q, implementation="fast")


def test_every_backend_is_a_module_with_the_three_functions():
    for backend in BACKENDS.values():
        module = backend.load()
        assert all(callable(getattr(module, x)) for x in ("forward", "backward", "unsupported"))
    operands, spec = dispatch.Operands(), dispatch.Spec(causal(), 1.0)
    assert BACKENDS["xla"].load().unsupported(Q, Q, Q, operands, spec) is None
