"""Dense, causal and causal-window attention by cuDNN, through the primitives under `jax.nn`.

Two traps of `jax.nn.dot_product_attention` (jax 0.10 to 0.12) are why it is not called: its
log-sum-exp comes in the inputs' dtype and its cotangent is dropped silently; and a window without
`is_causal` shows the keys ahead (jax-ml/jax#39576).

cuDNN computes rowsum(out * d_out) itself and has no operand for a cotangent of lse: a backward pass
that needs one runs on another backend (`dispatch.choose`). cuDNN's backward pass sums dq in any
order; --xla_gpu_deterministic_ops makes results the same in every run.
"""

from __future__ import annotations

import importlib
import inspect

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import unsupported_dtypes, user_table
from pallas_kernels.masks import And, Causal, Everything, Window


def forward(q, k, v, operands, spec, *, platform="cuda"):
    """out [B, T, N, Hv] in q's dtype and lse float32 [B, T, N]."""
    call = _primitives()._dot_product_attention_fwd_p_wrapper
    out, lse = call.bind(q, k, v, *_absent(q), is_training=True, **_options(spec))
    return out, lse.swapaxes(1, 2)


def backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform="cuda"):
    """Cotangents of q, k and v."""
    if d_lse is not None:
        raise TypeError("cuDNN takes no cotangent of lse; another backend has to")
    call = _primitives()._dot_product_attention_bwd_p_wrapper
    saved = lse.swapaxes(1, 2), out, d_out.astype(out.dtype)
    return *call.bind(q, k, v, *_absent(q), *saved, **_options(spec)), None


def unsupported(q, k, v, operands, spec) -> str | None:
    """Why cuDNN cannot run the inputs, or None; reads shapes, dtypes and structure."""
    if (reason := unsupported_dtypes(q, k, v, "bfloat16", "float16")) is not None:
        return reason
    options = operands._asdict() | dict(soft_cap=spec.soft_cap, table=user_table(operands, spec))
    extra = [name for name, x in options.items() if x is not None]
    if extra:
        return f"this call of cuDNN takes no {', '.join(extra)}"
    form = _form(spec.mask)
    if form is None:
        return "of the masks, cuDNN has everything(), causal() and causal() & window(n)"
    if form[0] and q.shape[1] != k.shape[1]:
        return f"a causal mask over {q.shape[1]} queries and {k.shape[1]} keys is not square"
    return _refusal(q, k, v)


def _refusal(q, k, v) -> str | None:
    """The reasons of JAX and the installed cuDNN: head sizes, versions and GPUs."""
    try:
        fused = _primitives()
        version = fused.check_cudnn_version()
        layout = fused.AttentionLayout.BTNH.value
        if not fused.check_compute_capability("8.0"):
            return "cuDNN's fused attention is for GPUs of compute capability 8.0 or above"
        values = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
        for x in (q, values):  # JAX looks at the heads of queries alone
            fused.check_is_flash_attention(x, k, v, layout, version, False, True)
    except (ImportError, AttributeError) as error:
        return f"jax {jax.__version__} does not have the primitives that are called ({error})"
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error)
    return None


def _form(mask) -> tuple[bool, int | None] | None:
    """(causal or not, keys in its window or None); None for a mask that cuDNN does not have."""
    match mask:
        case Everything():
            return False, None
        case Causal():
            return True, None
        case And(Causal(), Window(size)) | And(Window(size), Causal()):
            return True, size
    return None


def _options(spec) -> dict:
    """Parameters that both primitives share."""
    fused, (causal, size) = _primitives(), _form(spec.mask)
    parameters = inspect.signature(fused._dot_product_attention_fwd).parameters
    # A function of the logits, from jax 0.12 on.
    newer = {name: None for name in ("score_mod",) if name in parameters}
    return newer | dict(
        scale=spec.scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),  # no bias, no gradient of one
        # Always with a window: alone, it bounds the keys behind a query and not those ahead.
        mask_type=fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK,
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=size,
    )


def _absent(q) -> list:
    """Empty arrays for the bias, lengths, offsets and page tables."""
    return [jnp.zeros(0, q.dtype)] * 7


def _primitives():
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
