"""Reference arrays of the authors' code, in this library's layout."""

import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from lcjax.rope import Rotation

FOLDER = Path(__file__).parent.parent / "golden"
TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}  # of the arrays, as their conventions say
GRADIENTS = {"rtol": 1e-5, "atol": 1e-4}


@functools.cache
def document() -> dict:
    return json.loads((FOLDER / "attention.json").read_text())["cases"]


def params(case: str) -> dict:
    return document()[case]["params"]


@functools.cache
def arrays(case: str) -> dict[str, np.ndarray]:
    """The arrays of a case; those of heads as [batch, time, heads, ...]."""
    with np.load(FOLDER / "attention.npz") as data:
        names = [name for name in data.files if name.startswith(f"{case}.")]
        found = {name.removeprefix(f"{case}."): data[name] for name in names}
    heads = document()[case]["params"]["heads"]
    return {
        name: x.swapaxes(1, 2) if x.ndim >= 3 and x.shape[1] <= heads else x
        for name, x in found.items()
    }


def rotation(case: str) -> Rotation:
    p = params(case)
    exponents = np.arange(0, p["head_dim"], 2) / p["head_dim"]
    return Rotation(jnp.asarray(p["rope_base"] ** -exponents, jnp.float32))
