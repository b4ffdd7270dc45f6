"""What tests of memories share: golden cases, reading with a context, a tiny SharedLLM."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from lcjax.build import ModelSection, build
from lcjax.convert.weights import TensorInfo
from lcjax.memory import SharedLlmSection

TOLERANCE = 2e-5  # absolute, of float32 logits in exact products


class Golden:
    """Cases of a released code: what it was given and gave, and its weights."""

    def __init__(self, name: str):
        self._folder = Path(__file__).parent.parent / "golden" / name

    def document(self, case: str) -> dict:
        return json.loads((self._folder / f"{case}.json").read_text())

    def arrays(self, case: str) -> dict[str, np.ndarray]:
        with np.load(self._folder / f"{case}.io.npz") as data:
            return dict(data)

    def weights(self, case: str) -> "Stored":
        return Stored(case, load_file(self._folder / f"{case}.weights.safetensors"))


class Stored:
    """Named tensors in memory, as `read_params` wants them."""

    def __init__(self, name: str, arrays: dict[str, np.ndarray]):
        self.path, self._arrays = name, arrays
        self.tensors = {k: TensorInfo(v.shape, str(v.dtype)) for k, v in arrays.items()}

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._arrays[name][start:stop]


@functools.partial(jax.jit, static_argnums=0)
def read(model, params, tokens, memory, options):
    """Logits [B, T, V], and the cache if there is one."""
    hidden, cache = model.apply({"params": params}, tokens, memory=memory, **options)
    return model.apply({"params": params}, hidden, method="logits"), cache


def assert_close(found, wanted, tolerance=TOLERANCE):
    np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=0)


SECTION = SharedLlmSection(layers=1, chunk=16, ratios=(4, 2, 1), out=1.0)


@functools.cache
def small_shared_llm(section=SECTION):
    """A random model that listens to its context, and its parameters."""
    model, params, _ = build(ModelSection(preset="tiny", memory=section))
    return model, params
