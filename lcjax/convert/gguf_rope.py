"""Position metadata of a GGUF file in the words of a Hugging Face config."""

from typing import Any

import numpy as np

from lcjax.errors import InputError

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def to_hf(file: Any, rotary_dim: int) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of `file` (a `GGUFFile`)."""
    theta = float(file.get("{arch}.rope.freq_base", 10_000.0))
    if "rope_freqs.weight" in file.stored:
        return {"rope_theta": theta, "rope_scaling": _llama3(file, theta, rotary_dim)}
    kind = file.get("{arch}.rope.scaling.type", "none")
    factor = file.get("{arch}.rope.scaling.factor", file.get("{arch}.rope.scale_linear"))
    if kind in ("none", "") and factor in (None, 0.0, 1.0):
        return {"rope_theta": theta}
    if kind in ("linear", "none", ""):
        return {
            "rope_theta": theta,
            "rope_scaling": {"rope_type": "linear", "factor": float(factor)},
        }
    if kind == "yarn" and factor:
        return {"rope_theta": theta, "rope_scaling": _yarn(file, float(factor))}
    raise InputError(
        f"{file.path}: rope.scaling.type={kind!r} with factor={factor!r} cannot be read from GGUF; "
        "load the Hugging Face folder of this model"
    )


def _yarn(file: Any, factor: float) -> dict[str, Any]:
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.need(
            "{arch}.rope.scaling.original_context_length"
        ),
    }
    names = {"attn_factor": "attention_factor"}
    for key in ("attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
        value = file.get("{arch}.rope.scaling." + key)
        if value is not None:
            scaling[names.get(key, key.removeprefix("yarn_"))] = float(value)
    return scaling


def _llama3(file: Any, theta: float, rotary_dim: int) -> dict[str, Any]:
    """Finds the Llama-3 settings behind stored frequency divisors, and checks every one of them.

    The file holds theta_j / f_j, not the settings. The slowest pair is divided by the full factor;
    the other numbers are those of every published Llama-3.1 to 3.3.
    """
    stored = file.vector("rope_freqs.weight").astype(np.float64)
    settings = {"rope_type": "llama3", "factor": float(stored.max())} | _LLAMA3
    if stored.shape != (rotary_dim // 2,) or not np.allclose(
        _llama3_divisors(settings, theta, rotary_dim), stored, rtol=1e-4
    ):
        raise InputError(
            f"{file.path}: rope_freqs.weight holds frequencies that are not those of Llama-3 for "
            f"factor {stored.max():g}; load the Hugging Face folder of this model"
        )
    return settings


def _llama3_divisors(settings: dict[str, Any], theta: float, dim: int) -> np.ndarray:
    """theta_j / f_j: 1 for fast pairs, `factor` for slow ones, a blend of frequencies between."""
    freq = theta ** (-np.arange(0, dim, 2) / dim)
    turns = settings["original_max_position_embeddings"] * freq / (2 * np.pi)
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - kept) / settings["factor"] + kept)
