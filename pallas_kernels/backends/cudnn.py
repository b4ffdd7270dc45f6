"""Dense, causal and causal-window attention by cuDNN, through the primitives under `jax.nn`.

`jax.nn.dot_product_attention` (jax 0.10 to 0.12) is not called because of two traps. Its
log-sum-exp has the dtype of the inputs, and the cotangent of it is dropped silently. A window
without `is_causal` shows the keys ahead of a query (jax-ml/jax#39576).

cuDNN computes rowsum(out * d_out) itself and has no operand for a cotangent of lse: a backward pass
that needs one runs on another backend (`dispatch.choose`). cuDNN's backward pass sums dq in an
undefined order; --xla_gpu_deterministic_ops makes results the same in every run.
"""

from __future__ import annotations

import importlib
import inspect

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import unsupported_dtypes, user_table
from pallas_kernels.masks import And, Causal, Everything, Window


def forward(q, k, v, operands, spec, *, platform="cuda"):
    """Returns out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    call = _primitives()._dot_product_attention_fwd_p_wrapper
    out, lse = call.bind(q, k, v, *_absent(q), is_training=True, **_options(spec))
    return out, lse.swapaxes(1, 2)


def backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform="cuda"):
    """Returns the cotangents of q, k and v, and None for that of a bias."""
    if d_lse is not None:
        raise TypeError("cuDNN does not support a cotangent of lse; use another backend")
    call = _primitives()._dot_product_attention_bwd_p_wrapper
    saved = lse.swapaxes(1, 2), out, d_out.astype(out.dtype)
    return *call.bind(q, k, v, *_absent(q), *saved, **_options(spec)), None


def unsupported(q, k, v, operands, spec) -> str | None:
    """Returns why cuDNN cannot run the inputs, or None; reads no values of arrays."""
    if (reason := unsupported_dtypes(q, k, v, "bfloat16", "float16")) is not None:
        return reason
    options = operands._asdict() | dict(soft_cap=spec.soft_cap, table=user_table(operands, spec))
    extra = [name for name, x in options.items() if x is not None]
    if extra:
        return f"cuDNN does not support {', '.join(extra)}"
    form = _form(spec.mask)
    if form is None:
        return "cuDNN supports only the masks everything(), causal() and causal() & window(n)"
    if form[0] and q.shape[1] != k.shape[1]:
        return f"a causal mask over {q.shape[1]} queries and {k.shape[1]} keys is not square"
    return _refusal(q, k, v)


def _refusal(q, k, v) -> str | None:
    """Returns why JAX or the installed cuDNN cannot run head sizes, versions or GPUs, or None."""
    try:
        fused = _primitives()
        version = fused.check_cudnn_version()
        layout = fused.AttentionLayout.BTNH.value
        if not fused.check_compute_capability("8.0"):
            return "cuDNN's fused attention is for GPUs of compute capability 8.0 or above"
        values = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
        for x in (q, values):  # JAX checks only the head size of its first argument
            fused.check_is_flash_attention(x, k, v, layout, version, False, True)
    except (ImportError, AttributeError) as error:
        return f"jax {jax.__version__} does not have the primitives that are called ({error})"
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error)
    return None


def _form(mask) -> tuple[bool, int | None] | None:
    """Returns (whether causal, size of the window or None); None if cuDNN lacks the mask."""
    match mask:
        case Everything():
            return False, None
        case Causal():
            return True, None
        case And(Causal(), Window(size)) | And(Window(size), Causal()):
            return True, size
    return None


def _options(spec) -> dict:
    """Returns the parameters that both primitives share."""
    fused, (causal, size) = _primitives(), _form(spec.mask)
    parameters = inspect.signature(fused._dot_product_attention_fwd).parameters
    # A function of the logits, from jax 0.12 on.
    newer = {name: None for name in ("score_mod",) if name in parameters}
    return newer | dict(
        scale=spec.scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),  # no bias, no gradient of a bias
        # A window needs CAUSAL: it only limits the keys behind a query, and not those ahead.
        mask_type=fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=size,
    )


def _absent(q) -> list:
    """Returns empty arrays for the bias, lengths, offsets and page tables."""
    return [jnp.zeros(0, q.dtype)] * 7


def _primitives():
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
