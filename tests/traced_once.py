"""What a run is told of its memory is traced once for all runs of the same model."""

import contextlib
import functools

import pytest

from lcjax import cost
from lcjax.cost import compute, memory


@contextlib.contextmanager
def traced_once():
    """Shapes, residuals and visible keys are remembered: only the first run waits for them."""
    shapes = functools.cache(cost.parameter_shapes)
    slopes, known = memory._slopes, {}

    def remembered(config, chunk, trained):
        key = config, chunk, tuple(path for path in shapes(config) if trained(path))
        if key not in known:
            known[key] = slopes(config, chunk, trained)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (cost, compute, memory):
            patch.setattr(module, "parameter_shapes", lambda config: dict(shapes(config)))
        patch.setattr(memory, "_slopes", remembered)
        patch.setattr(compute, "visible_keys", functools.cache(compute.visible_keys))
        yield
