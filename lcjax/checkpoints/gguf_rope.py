"""Position metadata of a GGUF file in the words of a Hugging Face config."""

import math
from typing import Any

import numpy as np

from lcjax.errors import InputError
from lcjax.rope import Yarn

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


# `<arch>.rope.scaling.*` as llama.cpp reads them; what a key holds where it changes nothing
_READ = {"type", "factor", "original_context_length", "finetuned"}
_NEUTRAL = {
    "attn_factor": (1.0,),  # multiplies cos and sin, whatever the type
    "alpha": (0.0,),
    "yarn_ext_factor": (0.0, -1.0),  # -1: not set
    "yarn_attn_factor": (1.0,),
    "yarn_log_multiplier": (0.0,),
}
_BETAS = {"yarn_beta_fast", "yarn_beta_slow"}  # of the ramp, which only yarn has


def to_hf(file: Any, rotary_dim: int) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of `file` (a `GGUFFile`)."""
    theta = float(file.get("{arch}.rope.freq_base", 10_000.0))
    prefix = f"{file.architecture}.rope.scaling."
    found = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    kind = found.get("type") or "linear"
    factor = found.get("factor", file.get("{arch}.rope.scale_linear"))
    factor = 1.0 if kind == "none" else float(factor or 1.0)  # llama.cpp takes 0 for 1
    divisors = "rope_freqs.weight" in file.stored
    if kind == "yarn" and "factor" in found and not divisors:
        return _yarn(file, theta, factor, found).to_hf(rotary_dim)
    if kind not in ("linear", "none") or (divisors and factor != 1):
        more = " beside rope_freqs.weight" if divisors else ""
        raise _unreadable(file, f"rope.scaling.type={kind!r} with factor={factor:g}{more}")
    _refuse_others(file, found, _READ | _BETAS)
    if divisors:
        return {"rope_theta": theta, "rope_scaling": _llama3(file, theta, rotary_dim)}
    if factor == 1:
        return {"rope_theta": theta}
    return {"rope_theta": theta, "rope_scaling": {"rope_type": "linear", "factor": factor}}


def _yarn(file: Any, theta: float, factor: float, found: dict[str, Any]) -> Yarn:
    """llama.cpp's YaRN: A = attn_factor * (0.1 ln(factor) + 1), without the sum for ext_factor 0.

    `yarn_attn_factor` is not A times something to all its writers: some store A itself there, and
    llama.cpp ignores it in favour of the formula. So it is read where it says the formula's value.
    """
    original = file.need("{arch}.rope.scaling.original_context_length")
    share = found.get("yarn_ext_factor", -1.0)
    sharpened = 0.1 * math.log(max(factor, 1.0)) + 1 if share else 1.0
    read = _READ | _BETAS | {"attn_factor", "yarn_ext_factor"}
    if math.isclose(found.get("yarn_attn_factor", 0.0), sharpened, rel_tol=1e-4):
        read |= {"yarn_attn_factor"}
    _refuse_others(file, found, read, {"yarn_attn_factor": ()})
    betas = {key.removeprefix("yarn_"): float(found[key]) for key in _BETAS if key in found}
    attention = found.get("attn_factor", 1.0)
    return Yarn(
        theta=theta,
        factor=factor,
        original_length=original,
        extrapolation=1.0 if share < 0 else float(share),
        attention_factor=None if attention == 1 and share else attention * sharpened,
        **betas,
    )


def _refuse_others(
    file: Any, found: dict[str, Any], read: set[str], neutral: dict[str, tuple] | None = None
) -> None:
    """Keys that would change the rotation and are not read."""
    neutral = _NEUTRAL | (neutral or {})
    other = {k: v for k, v in found.items() if k not in read and v not in neutral.get(k, ())}
    if other:
        named = ", ".join(f"rope.scaling.{key}={value!r}" for key, value in sorted(other.items()))
        raise _unreadable(file, named)


def _unreadable(file: Any, what: str) -> InputError:
    return InputError(
        f"{file.path}: {what} cannot be read from GGUF; load the Hugging Face folder of this model"
    )


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
