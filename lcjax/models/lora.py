"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): W x + (alpha / rank) B A x.

`lcjax.models.layers.Linear` creates `lora_a` and `lora_b` beside the `kernel` of each targeted
projection. This module defines their config and merges trained adapters into kernels.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from lcjax.errors import InputError, Interval, OneOf, PositiveInt, check_fields

PROJECTIONS = ("query", "key", "value", "out", "gate", "up", "down")


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Options of low-rank adapters."""

    rank: PositiveInt = 8
    # The update is scaled by alpha / rank
    alpha: Annotated[float, Interval(above=0, hint="usual: twice lora.rank")] = 16.0
    targets: tuple[Annotated[str, OneOf(PROJECTIONS)], ...] = ("query", "key", "value", "out")

    def __post_init__(self):
        check_fields("lora", self)
        if not self.targets:
            raise InputError(f"lora.targets is empty; name some of: {', '.join(PROJECTIONS)}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def is_adapter(path: str) -> bool:
    """Returns whether the parameter at `path` belongs to an adapter."""
    return path.rpartition("/")[2].startswith("lora_")


def merge(params: dict, lora: LoRA, *, dtype: jax.typing.DTypeLike | None = None) -> dict:
    """Adds every adapter to its kernel: the model computes the same without adapters.

    Args:
      params: parameters with adapters.
      lora: config of the adapters.
      dtype: dtype of merged kernels; sums are computed in float32. None: the wider dtype of kernel
        and adapter, so float32 adapters keep their precision on a bfloat16 base.

    Returns:
      The parameters without adapters.
    """
    if not isinstance(params, dict):
        return params
    merged = {
        name: merge(child, lora, dtype=dtype)
        for name, child in params.items()
        if not is_adapter(name)
    }
    if "lora_a" in params:
        merged["kernel"] = _merged_kernel(params, lora.scale, dtype)
    return merged


def _merged_kernel(layer: dict, scale: float, dtype: jax.typing.DTypeLike | None) -> jax.Array:
    kernel, a, b = layer["kernel"], layer["lora_a"], layer["lora_b"]
    # `a` is [in..., r] and `b` [r, out...]; stacked layers add an axis before each.
    stacked = a.ndim + b.ndim == kernel.ndim + 3

    def update(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.tensordot(a, b, ([-1], [0]), precision=jax.lax.Precision.HIGHEST)

    delta = jax.vmap(update)(a, b) if stacked else update(a, b)
    dtype = jnp.result_type(kernel, a, b) if dtype is None else dtype
    return (kernel.astype(jnp.float32) + scale * delta).astype(dtype)
