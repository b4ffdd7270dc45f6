"""The implementations that `attention.py` compares: lcjax's backends, and other libraries.

Each entry returns a function of q, k, v for a workload, or raises `Unavailable` with the reason.
Arrays are [B, T, N, H] in JAX and [B, N, T, H] in torch.
"""

from __future__ import annotations

import functools
import sys
import types

import numpy as np

from pallas_kernels import by_heads, causal, dispatch, everything
from pallas_kernels.masks import (
    And,
    Causal,
    ChunkDistance,
    Everything,
    Mask,
    Not,
    Or,
    Prefix,
    Window,
)

OURS = "lcjax "


class Unavailable(Exception):
    """The reason why an implementation does not run a workload."""


def names() -> dict[str, str]:
    """Returns all implementations with the library of their arrays: "jax" or "torch"."""
    here = {"cuda", dispatch.platform()}
    ours = {
        OURS + name: "jax"
        for name, backend in dispatch.BACKENDS.items()
        if backend.portable or here & set(backend.platforms)
    }
    return ours | {name: "torch" if make in _TORCH else "jax" for name, make in _PEERS.items()}


def attention(side: str, w):
    """Returns the function of q, k, v that an implementation runs for a workload."""
    if side.startswith(OURS):
        return _ours(side.removeprefix(OURS), w)
    if w.parts:
        raise Unavailable("it has no log-sum-exp whose gradient is right, to merge two calls by")
    if w.landmark:
        raise Unavailable("it has no grouped softmax")
    return _PEERS[side](w)


def _ours(name: str, w):
    backend = dispatch.BACKENDS[name]
    if not backend.portable and dispatch.platform() not in backend.platforms:
        raise Unavailable(
            f"it runs on {', '.join(backend.platforms)}, this is {dispatch.platform()}"
        )
    if w.landmark and name not in dispatch.LANDMARK:
        raise Unavailable("it has no Landmark kernel")
    return w.attention(name)


def interpret_triton() -> None:
    """Makes the backend "triton" run in Pallas' interpreter, for small sizes on CPUs."""
    from pallas_kernels.backends.triton import attention as _triton

    module = types.ModuleType("interpreted_triton_of_benchmarks")
    module.forward = functools.partial(_triton.forward, interpret=True)
    module.backward = functools.partial(_triton.backward, interpret=True)
    module.unsupported = lambda *inputs: None
    sys.modules[module.__name__] = module
    dispatch.BACKENDS["triton"] = dispatch.Backend(module.__name__, ("cpu",))


def plain(w) -> int | None:
    """Returns None for a dense mask, 0 for a causal one, or the number of keys of a causal window.

    Raises:
      Unavailable: another mask, which libraries do not have as an option.
    """
    if w.density is None and not w.documents:
        if w.mask == everything():
            return None
        if w.mask == causal():
            return 0
        if isinstance(w.mask, And) and w.mask.left == causal() and type(w.mask.right) is Window:
            return w.mask.right.size
    raise Unavailable("it knows causal masks, windows and lengths only")


def _lengths(w) -> dict:
    return {} if w.filled is None else {"key_value_seq_lengths": w.places()["k_lengths"]}


def _jax_cudnn(w):
    import jax

    kind, options = plain(w), _lengths(w) | {"implementation": "cudnn"}
    if kind:
        options["local_window_size"] = (kind - 1, 0)  # before the query's own key
    return functools.partial(jax.nn.dot_product_attention, is_causal=kind is not None, **options)


def _tokamax(w, implementation: str):
    try:
        import tokamax
    except ImportError as error:
        raise Unavailable(f"tokamax is not installed ({error})") from None
    kind, options = plain(w), _lengths(w) | {"implementation": implementation}
    if kind:
        options["local_window_size"] = (kind - 1, 0)
    return functools.partial(tokamax.dot_product_attention, is_causal=kind == 0, **options)


def _pallas_triton(w):
    """JAX's deprecated Pallas-Triton kernel: no shared key heads, but documents."""
    from jax.experimental.pallas.ops.gpu import attention

    if w.density is not None or w.mask not in (causal(), everything()) or w.filled is not None:
        raise Unavailable("it knows causal masks and documents only")
    if w.heads != w.kv_heads:
        raise Unavailable("its key heads are not shared")
    segments, scale = w.places().get("q_segments"), w.size**-0.5
    is_causal = w.mask == causal()
    return lambda q, k, v: attention.mha(q, k, v, segments, scale, is_causal)


def _pallas_mosaic(w):
    """JAX's deprecated Hopper kernel, whose tiles are float16 for any input.

    It has no scale, so q is multiplied by it, and no causal backward pass.
    """
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    if plain(w) or w.filled is not None:
        raise Unavailable("it knows causal masks only")
    blocks = {f"block_{x}": 64 for x in ("q_dkv", "kv_dkv", "q_dq", "kv_dq")}
    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=128, max_concurrent_steps=2, causal=plain(w) == 0, **blocks
    )

    def run(q, k, v):
        narrow = (x.astype("float16") for x in (q * np.asarray(w.size**-0.5, q.dtype), k, v))
        return attention_mgpu.attention(*narrow, config).astype(q.dtype)

    return run


def _torch():
    try:
        import torch
    except ImportError as error:
        raise Unavailable(f"torch is not installed ({error})") from None
    return torch


def _sdpa(w, backend: str):
    torch = _torch()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if plain(w):
        raise Unavailable("it knows causal masks only")
    options = {"is_causal": plain(w) == 0, "enable_gqa": w.heads != w.kv_heads}

    def run(q, k, v):
        if w.filled is not None:
            k, v = k[:, :, : w.filled], v[:, :, : w.filled]
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return run


def _flex(w):
    torch = _torch()
    from torch.nn.attention.flex_attention import flex_attention

    if not torch.cuda.is_available():
        raise Unavailable("compiled FlexAttention is timed on GPUs only")
    from torch._functorch import config

    config.donated_buffer = False  # the backward pass runs many times on the same buffers
    torch.compiler.reset()  # torch stops compiling a function after some compilations
    blocks, shared = block_mask(w, "cuda"), w.heads != w.kv_heads
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=blocks, enable_gqa=shared)


def block_mask(w, device: str):
    """Returns FlexAttention's BlockMask from lcjax's table, without an array of all pairs."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    table = w.table()
    full, seen, index = table.full, table.seen, table.index
    width = np.arange(-(-w.s // w.block), dtype=np.int32)

    def listed(start, stop):
        """Returns counts, and rows that begin with the entries from start to stop."""
        place = np.minimum(start[..., None] + width, index.shape[-1] - 1)
        ids = np.where(width < (stop - start)[..., None], np.take_along_axis(index, place, -1), 0)
        counts = torch.from_numpy(np.ascontiguousarray(stop - start)).to(device)
        return counts, torch.from_numpy(np.ascontiguousarray(ids, np.int32)).to(device)

    partial, partial_index = listed(full, seen)
    whole, whole_index = listed(np.zeros_like(full), full)
    return BlockMask.from_kv_blocks(
        partial, partial_index, whole, whole_index, BLOCK_SIZE=w.block,
        mask_mod=mask_mod(w, device), seq_lengths=(w.t, w.s),
    )  # fmt: skip


def mask_mod(w, device: str):
    """Returns the workload's mask as a torch function of batch, head, query and key."""
    import torch

    parts = [(in_torch(mask), count) for mask, count in by_heads(w.mask, w.heads)]
    first, heads = parts[0]
    second = parts[-1][0]
    documents = None if w.segments is None else torch.from_numpy(w.segments[0]).to(device)

    def mod(b, h, q, k):
        seen = first(q, k)
        if len(parts) == 2:
            seen = torch.where(h < heads, seen, second(q, k))
        if documents is not None:
            seen = seen & (documents[q] == documents[k])
        return seen if w.filled is None else seen & (k < w.filled)

    return mod


def in_torch(mask: Mask):
    """Returns a mask as plain functions of numbers, which torch can compile."""
    kinds = {
        And: lambda: _both(in_torch(mask.left), in_torch(mask.right)),
        Or: lambda: _either(in_torch(mask.left), in_torch(mask.right)),
        Not: lambda: _neither(in_torch(mask.inner)),
        Everything: lambda: lambda q, k: q >= 0,
        Causal: lambda: lambda q, k: q >= k,
        Window: lambda size=getattr(mask, "size", None): lambda q, k: q - k < size,
        Prefix: lambda size=getattr(mask, "size", None): lambda q, k: k < size,
        ChunkDistance: lambda: _chunk_distance(mask.size, mask.low, mask.high, mask.shift),
    }
    if type(mask) not in kinds:
        raise Unavailable(f"no FlexAttention mask for {type(mask).__name__}")
    return kinds[type(mask)]()


def _both(left, right):
    return lambda q, k: left(q, k) & right(q, k)


def _either(left, right):
    return lambda q, k: left(q, k) | right(q, k)


def _neither(inner):
    return lambda q, k: ~inner(q, k)


def _chunk_distance(size, low, high, shift):
    high = 2**30 if high is None else high

    def seen(q, k):
        distance = (q + shift) // size - (k + shift) // size
        return (distance >= low) & (distance <= high)

    return seen


_PEERS = {
    "jax.nn cudnn": _jax_cudnn,
    "tokamax mosaic": functools.partial(_tokamax, implementation="mosaic"),
    "tokamax triton": functools.partial(_tokamax, implementation="triton"),
    "jax pallas mha": _pallas_triton,
    "jax pallas mgpu": _pallas_mosaic,
    "torch flash": functools.partial(_sdpa, backend="FLASH_ATTENTION"),
    "torch cudnn": functools.partial(_sdpa, backend="CUDNN_ATTENTION"),
    "torch flex": _flex,
}
_TORCH = [_PEERS[name] for name in _PEERS if name.startswith("torch")]
