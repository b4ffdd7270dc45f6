"""Reference arrays of the authors' code, and ropes that say the same."""

import functools
import json
from pathlib import Path

import numpy as np

from lcjax.rope import NTK, Clex, DynamicNTK, Llama3, LongRope, Yarn

FOLDER = Path(__file__).parent.parent / "golden"


@functools.cache
def document() -> dict:
    return json.loads((FOLDER / "rope.json").read_text())


@functools.cache
def arrays() -> dict:
    with np.load(FOLDER / "rope.npz") as data:
        return dict(data)


def fixed_cases() -> list[dict]:
    return [case for case in document()["cases"] if case["method"] != "clex"]


def clex_cases() -> list[dict]:
    return [case for case in document()["cases"] if case["method"] == "clex"]


def make_rope(case: dict):
    p, theta = case["params"], case["rope_theta"]
    original = p.get("original_max_position_embeddings")
    match case["method"]:
        case "yarn":
            return Yarn(theta=theta, factor=p["factor"], original_length=original)
        case "longrope":
            return LongRope(
                theta=theta,
                short_factor=tuple(p["short_factor"]),
                long_factor=tuple(p["long_factor"]),
                original_length=original,
                factor=p["max_position_embeddings"] / original,
            )
        case "llama3":
            return Llama3(theta=theta, factor=p["factor"], original_length=original)
        case "lceg_ntk":
            return DynamicNTK(
                theta=theta, factor=p["s"], original_length=p["C"], min_length=p["C_prime"]
            )
        case "lceg_ntk_frozen":
            return DynamicNTK(theta=theta, factor=p["s"], original_length=p["C"])
        case "ntk":
            return NTK(theta=theta, alpha=p["alpha"])
        case "clex":
            return Clex(
                theta=theta,
                original_length=p["max_position_embeddings"],
                max_factor=p["max_factor"],
                param_factor=p["param_factor"],
                act=p["act"],
                time_dt=p["time_dt"],
            )
    raise AssertionError(f"no rope for {case['method']}")


def cos_sin_tolerance(scale: float, positions: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """A (2e-6 + 8 ulp of the angle): what float32 angles can promise, [positions, R/2]."""
    return scale * (2e-6 + 8 * 2.0**-24 * np.outer(positions, inv_freq.astype(np.float64)))
