"""Compiles the programs of inference: `jax.jit` with options for the dtype of the weights.

The rotation is an argument of every program, so one program serves all RoPE methods and lengths.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax

from lcjax.models.decoder import Decoder
from lcjax.models.loss import FEW_ROWS
from lcjax.parallel.device_memory import READING, explained
from lcjax.rope import Rope

# XLA for CPUs multiplies 16-bit weights with float32 activations in float32. By default, a program
# first converts the weights of all layers, which takes twice their memory. With this option, each
# product converts the weights that it reads. Products of bfloat16 with bfloat16 need no conversion
# without the option.
_IN_THE_PRODUCT = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RotationIsArgument(Rope):
    """Takes the place of the RoPE method in programs; it has no frequencies.

    A program that made its own rotation would be wrong for all methods but one, so this raises.
    """

    def frequencies(
        self, head_dim: int, length: int, params: Mapping[str, Any] | None = None
    ) -> NoReturn:
        raise TypeError("rotation: a program of inference takes the rotation as an argument")


@functools.lru_cache
def without_rope(model: Decoder) -> Decoder:
    """Returns the static model of a compiled program, the same for all RoPE methods and lengths.

    The program must take the rotation as an argument, and the parameters of a learned method stay
    where they are. Compiled programs are found by this model instead of `model`.
    """
    config = model.config.replace(extended_length=None)
    if config.position == "rope":  # else there is only one method
        config = config.replace(rope=_RotationIsArgument())
    return Decoder(config, model.mesh)


class InferenceJit:
    """A jitted `function(model, params, ...)`, compiled for the dtype of the weights.

    The model is static except for its RoPE method (`without_rope`), and the function has an
    argument for the rotation. `options` are those of `jax.jit`. `tokens` is the index of the
    argument with the tokens [B] or [B, T]: their number is the number of rows of the matrix
    products, which selects the compiler options. None: many rows.
    """

    def __init__(self, function: Callable[..., Any], *, tokens: int | None = None, **options: Any):
        functools.update_wrapper(self, function)
        self._tokens = tokens
        self._default = jax.jit(function, **options)
        self._from_16_bits = jax.jit(function, compiler_options=_IN_THE_PRODUCT, **options)

    def _for(self, model: Decoder, *args: Any) -> Any:
        config = model.config
        platform = (
            jax.default_backend() if model.mesh is None else model.mesh.devices.flat[0].platform
        )
        if platform != "cpu" or config.param_dtype == "float32" or not _option_is_known():
            return self._default
        few = False
        if self._tokens is not None:
            tokens = (model, *args)[self._tokens]
            # A decoding step may insert a token after each token [B].
            added = tokens.ndim == 1 and config.pattern.inserts_tokens
            few = (1 + added) * tokens.size <= FEW_ROWS
        if config.param_dtype == "bfloat16" and (few or config.dtype == "bfloat16"):
            return self._default
        return self._from_16_bits

    def __call__(self, model: Decoder, *args: Any, **kwargs: Any) -> Any:
        with explained(READING):
            return self._for(model, *args)(without_rope(model), *args, **kwargs)

    def trace(self, model: Decoder, *args: Any, **kwargs: Any) -> Any:
        return self._for(model, *args).trace(without_rope(model), *args, **kwargs)

    def _cache_size(self) -> int:
        """Returns the number of compiled programs, like `jax.jit`'s method of this name."""
        return self._default._cache_size() + self._from_16_bits._cache_size()


@functools.cache
def _option_is_known() -> bool:
    """Returns whether this version of XLA has the option, which is experimental."""
    try:
        jax.jit(lambda: 0, compiler_options=_IN_THE_PRODUCT).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
