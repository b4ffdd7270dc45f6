"""The interface of a backend, the table of backends, and the choice of the one that runs.

A backend is a module with three functions over q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv]:

    forward(q, k, v, operands, spec, *, platform)
        -> out [B, T, N, Hv] in q's dtype, lse float32 [B, T, N]
    backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform)
        -> dq, dk, dv in the dtypes of q, k, v, and the cotangent of operands.bias (None: no bias)
    unsupported(q, k, v, operands, spec) -> str | None
        why the backend cannot run these inputs, or None; reads only shapes, dtypes and structure

A backend computes logit = cap(scale q k^T) + bias with cap(x) = spec.soft_cap tanh(x /
spec.soft_cap). It hides the keys that `spec.mask`, the segments or the table hide, and returns the
softmax's weighted values and its log-sum-exp (natural logarithm). A query that sees no key gets out
0, lse -inf and zero gradients. Softmax and sums are float32; float32 operands are multiplied in
full precision. The cotangent of lse enters the backward pass through
`di = rowsum(out * d_out) - d_lse`; d_lse is None if nothing depends on lse.

While they are traced, `forward` and `backward` call `pallas_kernels.explanations.report` with the
blocks of each kernel, so that `explain` shows them.

The caller of a backend has already split masks per head (`spec.mask` is one mask for all heads) and
turned k_lengths into segments. It merges sinks, and replaces the results of tables that overflowed.
`platform` is the one that the program is lowered for ("cpu", "tpu", "cuda", ...), or "default".

`LANDMARK` lists the backends of `pallas_kernels.landmark.older_blocks`. They have the same three
functions; `spec.block` is set, and masks, indices and segments of keys are those of landmark
blocks.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.extend.backend import get_backend

from pallas_kernels import key_bits, nvidia, reference, timings
from pallas_kernels.biases import Bias, of_heads
from pallas_kernels.explanations import (
    Explanation,
    KernelBlocks,
    current_explanations,
    record_blocks,
)
from pallas_kernels.folded import FoldedHeads, as_rows
from pallas_kernels.masks import Mask, by_heads
from pallas_kernels.quantised import is_quantised
from pallas_kernels.tables import (
    BlockTable,
    block_bounds,
    block_visibility,
    from_block_mask,
    from_mask,
    restrict,
)

log = logging.getLogger(__name__)


class Constant:
    """A pytree of NumPy arrays that are constants of a program: hashable, compared by contents."""

    def __init__(self, tree):
        leaves, structure = jax.tree.flatten(tree)
        digest = hashlib.sha256()
        for leaf in leaves:
            digest.update(f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).data)
        self.tree = tree
        self._key = (structure, digest.digest())

    def __hash__(self):
        return hash(self._key)

    def __eq__(self, other):
        return isinstance(other, Constant) and self._key == other._key


@dataclass(frozen=True)
class Spec:
    """The static part of a call, which is known when the program is traced; hashable."""

    mask: Mask
    scale: float
    soft_cap: float | None = None
    table: Constant | None = None  # a caller's block table of NumPy arrays
    splits: int | None = None  # parts of the keys to compute apart; None: the platform's default
    block: int | None = None  # tokens of a landmark block; None: ordinary attention

    @property
    def family(self) -> str:
        """The key of `FAMILIES`: the public function that the call belongs to."""
        return "flash" if self.block is None else "landmark_attention"


class Operands(NamedTuple):
    """The array arguments besides q, k, v; None if the caller passes none.

    If `Spec.block` is set, k_index and k_segments are [.., C] for C landmark blocks, and both
    indices are block numbers; q_index None means t // block.
    """

    q_index: Any = None  # int32 [1 or B, T]; None: 0, 1, ..., known when traced
    k_index: Any = None  # int32 [1 or B, S]; None: 0, 1, ...
    q_segments: Any = None  # int32 [B, T], 0 is padding; None together with k_segments
    k_segments: Any = None  # int32 [B, S]
    bias: Bias | None = None
    table: Any = None  # a caller's block table of traced arrays; see `user_table`
    key_bits: Any = None  # uint32 [B, T, W], keys that each query may see (`key_bits`)


def split_heads(q, k, v, operands: Operands, spec: Spec) -> Iterator[tuple]:
    """Yields (q, k, v, operands, spec) for runs of query heads that share a mask."""
    heads, group, start = q.shape[2], q.shape[2] // k.shape[2], 0
    for mask, count in by_heads(spec.mask, heads):
        if count == heads:
            yield q, k, v, operands, replace(spec, mask=mask)
            return
        while count:
            # A run must be whole groups of query heads that share a key head, or a part of one.
            size = min(count, group - start % group)
            if start % group == 0 and count >= group:
                size = count - count % group
            yield _some_heads(q, k, v, operands, replace(spec, mask=mask), start, size)
            start, count = start + size, count - size


def join_heads(results: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Concatenates the (out, lse) of the runs of `split_heads` along heads."""
    if len(results) == 1:
        return results[0]
    out, lse = (jnp.concatenate(x, 2) for x in zip(*results, strict=True))
    return out, lse


def _some_heads(q, k, v, operands: Operands, spec: Spec, start: int, count: int):
    """Returns (q, k, v, operands, spec) of `count` query heads from `start` on."""
    k, v = as_rows((k, v))
    key_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    first, num_keys = start // group, -(-count // group)

    def slice_heads(table):
        if table is None or table.seen.shape[1] == 1:
            return table
        if table.seen.shape[1] == key_heads:
            return table.heads(lambda x: x[:, first : first + num_keys])
        return table.heads(lambda x: x[:, start : start + count])

    operands = operands._replace(
        bias=of_heads(operands.bias, start, count), table=slice_heads(operands.table)
    )
    if spec.table is not None:
        spec = replace(spec, table=Constant(slice_heads(spec.table.tree)))
    k, v = jax.tree.map(lambda x: x[:, :, first : first + num_keys], (k, v))
    return q[:, :, start : start + count], k, v, operands, spec


def user_table(operands: Operands, spec: Spec) -> BlockTable | None:
    """Returns the caller's BlockTable, of NumPy or of traced arrays, or None.

    It hides all blocks that it does not list, in addition to the mask. Its full blocks are full
    with respect to the mask only: `pallas_kernels.tables.restrict` applies segments to them.
    """
    return operands.table if spec.table is None else spec.table.tree


def default_q_index(spec: Spec, queries: int) -> np.ndarray:
    """Returns the q_index, int32 [1, T], that None stands for: 0, 1, ... or block numbers."""
    index = np.arange(queries, dtype=np.int32)[None]
    return index if spec.block is None else index // spec.block


def visible_blocks(
    operands: Operands, spec: Spec, queries: int, keys: int, q_block: int, k_block: int
) -> BlockTable:
    """Returns the blocks to visit: those of the caller's table, or blocks of the given sizes."""
    q_index, k_index, q_segments, k_segments = operands[:4]
    if q_index is None and spec.block is not None:
        q_index = default_q_index(spec, queries)
    arrays = dict(q_index=q_index, k_index=k_index, q_segments=q_segments, k_segments=k_segments)
    sizes = dict(queries=queries, keys=keys)
    if (table := user_table(operands, spec)) is not None:
        return restrict(table, spec.mask, **sizes, **arrays)
    if operands.key_bits is not None:
        visible, full = block_pairs(operands, spec, queries, keys, q_block, k_block)
        blocks = {"q_block": q_block, "k_block": k_block}
        return from_block_mask(visible[:, None], full=full[:, None], **blocks)
    return from_mask(spec.mask, **sizes, **arrays, q_block=q_block, k_block=k_block)


def block_pairs(
    operands: Operands, spec: Spec, queries: int, keys: int, q_block: int, k_block: int
) -> tuple[jax.Array, jax.Array]:
    """Returns which pairs of blocks have visible keys, and all of them: bool [1 or B, nq, nk].

    `key_bits` are tested in every block that has some.
    """
    q_index, k_index, q_segments, k_segments = operands[:4]
    if q_index is None and spec.block is not None:
        q_index = default_q_index(spec, queries)
    q = block_bounds(q_index, q_segments, queries, q_block).take(lambda x: x[:, :, None])
    k = block_bounds(k_index, k_segments, keys, k_block, is_padded=True)
    visible, full = block_visibility(spec.mask, q, k.take(lambda x: x[:, None]))
    if operands.key_bits is None:
        return visible, full
    visible = visible & key_bits.visited(operands.key_bits, q_block, k_block, keys)
    return visible, visible & False


def unsupported_dtypes(q, k, v, *dtypes: str) -> str | None:
    """Returns a reason unless q, k and v all have the same one of `dtypes`, else None."""
    if is_quantised(k, v):
        kinds = " and ".join(dict.fromkeys(type(x).__name__ for x in (k, v)))
        return f"keys or values are codes, of type {kinds}, which these kernels do not read"
    names = {str(x.dtype) for x in (q, k, v)}
    if any(names == {dtype} for dtype in dtypes):
        return None
    rule = " or all ".join(dtypes)
    return f"q, k and v must all be {rule}, they are {', '.join(sorted(names))}"


def unsupported_mask(operands: Operands, spec: Spec, reads_bits: bool = False) -> str | None:
    """Returns a reason if kernels cannot compute which keys a query sees, else None."""
    if operands.key_bits is not None and not reads_bits:
        return "key_bits say which keys each query sees, and these kernels do not read them"
    if spec.mask.arithmetic:
        return None
    return "the mask looks indices up in a long list; kernels compute masks from scalars"


def unsupported_blocks(q, k, table: BlockTable | None, multiple: int) -> str | None:
    """Returns a reason if a block size of the table is no multiple of `multiple`, else None.

    A single block that covers a whole axis may have any size.
    """
    if table is None:
        return None
    lengths = (q.shape[1], table.q_block), (k.shape[1], table.k_block)
    for name, (length, block) in zip(("queries", "keys"), lengths, strict=True):
        if length > block and block % multiple:
            return f"blocks of {block} {name} are no multiple of {multiple}"
    return None


class Backend(NamedTuple):
    """A backend's module and its platforms; a portable one runs on all other platforms too."""

    module: str
    platforms: tuple[str, ...]
    portable: bool = False
    needs_check: bool = False  # runs only if it is named or has passed the self-check
    takes_d_lse: bool = True  # False: its backward pass runs only if nothing depends on lse
    deterministic: bool = True  # False: gradients may differ in bits between two runs
    reads_folded: bool = False  # whether k and v may be `FoldedHeads`

    def load(self):
        return importlib.import_module(self.module)


# `choose` takes, on each platform, the first one in its order that can run the inputs there;
# "default" stands for every platform that has no entry.
BACKENDS = {
    "xla": Backend(
        "pallas_kernels.backends.xla.attention",
        ("cpu", "default"),
        portable=True,
        reads_folded=True,
    ),
    "tpu": Backend("pallas_kernels.backends.tpu.attention", ("tpu",)),
    "triton": Backend("pallas_kernels.backends.triton.attention", ("cuda",), needs_check=True),
    "mosaic_gpu": Backend(
        "pallas_kernels.backends.mosaic_gpu.attention", ("cuda",), needs_check=True
    ),
    "cudnn": Backend(
        "pallas_kernels.backends.cudnn",
        ("cuda",),
        needs_check=True,
        takes_d_lse=False,
        deterministic=False,
    ),
}
LANDMARK = {
    "xla": Backend("pallas_kernels.backends.xla.landmark", ("cpu", "default"), portable=True),
    "tpu": Backend("pallas_kernels.backends.tpu.landmark", ("tpu",)),
    "triton": Backend("pallas_kernels.backends.triton.landmark", ("cuda",), needs_check=True),
}
FAMILIES = {"flash": BACKENDS, "landmark_attention": LANDMARK}
REFERENCE = "reference"  # dense, differentiated by JAX: for tests, chosen by name only
MUCH_FASTER = 1.1  # speedup for which gradients that differ in bits between runs are accepted
BY_NAME, NO_D_LSE = "chosen by name", "it takes no cotangent of lse"
UNMEASURED = (
    "{}: XLA's blockwise attention runs ({}) on {}: {}; no kernel was measured there yet, which "
    "`python -m benchmarks.gpu.attention --keep` does once, in a clone of lcjax; with its wheel "
    "`python -m lcjax.benchmarks.gpu.attention --keep`"
)


class CannotRun(ValueError):
    """Raised if the backend that the caller names cannot run the call."""


def choose(
    name: str | None, q, k, v, operands, spec, direction: str = "forward", d_lse: bool = False
):
    """Returns ((platform, backend), ...), the argument `choice` of `run`.

    Of the backends that can run on a platform, the one with the fastest measurement is chosen
    (`ranked_by`); on GPUs without a measurement of such calls, the first of `nvidia.order`. GPU
    kernels must pass the self-check for such calls (`pallas_kernels.self_check`). Any backend can
    run the backward pass on another one's results.

    Args:
      name: the implementation that the caller requires, or None.
      d_lse: whether the backward pass has a cotangent of lse.

    Raises:
      CannotRun: the backend `name` is unknown or cannot run the call.
    """
    inputs = q, k, v, operands, spec
    kind = timings.kind(*inputs)
    if name is not None:
        choice, reasons = _explicit(name, inputs, d_lse)
    else:
        times = timings.times(kind, direction, str(q.dtype))
        choice, reasons = _fastest(times, kind, inputs, direction, d_lse)
    if (explanations := current_explanations()) is not None:
        arrays = ", ".join(f"{n} {x.dtype}{list(x.shape)}" for n, x in zip("qkv", (q, k, v)))
        suffix = f" ({kind})" if kind else ""
        call = f"{spec.family} {direction}{suffix} on {platform()}: {arrays}"
        current = platform() if platform() in choice else "default"
        blocks = _blocks_of(direction, current, choice[current], inputs, d_lse)
        explanations.append(
            Explanation(call, kind, choice[current], tuple(reasons.items()), blocks)
        )
    return tuple(choice.items())


def _blocks_of(
    direction: str, platform: str, name: str, inputs, d_lse: bool
) -> tuple[KernelBlocks, ...]:
    """Returns the blocks that the kernels of a backend report while they are traced.

    The backend is traced apart from the program: `run` is under jit, so JAX does not trace it again
    for a call that it has seen before.
    """
    q, k, v, operands, spec = inputs
    arrays, operands = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ((q, k, v), operands)
    )
    if direction == "backward":
        out = jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype)
        lse = jax.ShapeDtypeStruct(q.shape[:3], "float32")
        arrays = *arrays, out, lse, out, lse if d_lse else None
    with record_blocks() as blocks:
        jax.eval_shape(
            lambda *x: _run_narrow({platform: name}, direction, *x, spec), arrays, operands
        )
    return tuple(dict.fromkeys(blocks))


def _fastest(times: dict[str, float], kind, inputs, direction: str, d_lse: bool):
    """Returns {platform: backend}, and {backend: why it is or is not chosen}.

    Args:
      times: milliseconds of the backends that were measured.
    """
    backends, chosen, reasons = FAMILIES[inputs[-1].family], {}, {}
    rules = [] if times else [x for x in nvidia.order() if x in backends]

    def rank(name):
        backend, by_rule = backends[name], rules.index(name) if name in rules else len(rules)
        ranked = ranked_by(name, times.get(name, math.inf), direction)
        return ranked, backend.portable, _varies(name, direction), by_rule

    for name in sorted(backends, key=rank):
        backend, duration = backends[name], f"{times.get(name, 0.0):.3g} ms for a call like it"
        if _varies(name, direction):
            duration += f", counted as {MUCH_FASTER} times that: its gradients vary in bits"
        if backend.portable:
            timed = ("cuda",) if name in times else ()  # slower backends are then not considered
            chosen = dict.fromkeys((*backend.platforms, *timed), name) | chosen
            reasons[name] = duration if name in times else "it runs everywhere"
            continue
        if backend.needs_check and name not in times and name not in rules:
            reasons[name] = f"no measurement on this GPU for {kind or 'float32'}"
            continue
        if chosen.keys() >= set(backend.platforms):
            reasons[name] = duration if name in times else "another backend is preferred"
            continue
        can, why = _may_run(name, backend, name in times, inputs, direction, d_lse)
        if can:
            chosen = dict.fromkeys(backend.platforms, name) | chosen
        reasons[name] = duration if can and name in times else why
    _log_choice(times, kind, inputs[-1].family, chosen, reasons)
    return chosen, reasons


def ranked_by(name: str, milliseconds: float, direction: str) -> float:
    """Returns the sort key of a measured backend, which prefers reproducible gradients."""
    return milliseconds * (MUCH_FASTER if _varies(name, direction) else 1.0)


def _varies(name: str, direction: str) -> bool:
    """Returns whether results may differ in bits between two runs."""
    return direction == "backward" and name in BACKENDS and not BACKENDS[name].deterministic


def _may_run(name: str, backend: Backend, measured: bool, inputs, direction: str, d_lse: bool):
    """Returns whether a backend may run a call, and why."""
    if d_lse and not backend.takes_d_lse:
        return False, NO_D_LSE
    if reason := backend.load().unsupported(*inputs):
        return False, reason
    if not backend.needs_check:
        return True, f"for {', '.join(backend.platforms)}"
    form = timings.form_of(timings.kind_of_any_dtype(*inputs))
    if reason := timings.why_wrong(name, str(inputs[0].dtype), form):
        return False, f"it was measured to be wrong: {reason}"
    return self_check().may_run(name, direction, inputs, measured)


def self_check():
    """Imports the module late: it is also a command, and itself imports this package."""
    return importlib.import_module("pallas_kernels.self_check")


def _log_choice(times: dict, kind, family: str, chosen: dict, reasons: dict) -> None:
    """Warns once if a preferred backend of this platform is refused, or if XLA runs unmeasured."""
    current, backends = platform(), FAMILIES[family]
    fastest = chosen.get(current, chosen["default"])
    refused = list(itertools.takewhile(lambda name: name != fastest, reasons))
    # Table order gives forward and backward the same message, which is then logged once.
    of_cuda = {x: reasons[x] for x in backends if x in refused and "cuda" in backends[x].platforms}
    unmeasured = current == "cuda" and kind and not times and backends[fastest].portable
    # The self-check has already logged what it refuses.
    if unmeasured and not any(x.startswith(self_check().LOGGED) for x in of_cuda.values()):
        why = "; ".join(f"not {name}, {reason}" for name, reason in of_cuda.items())
        _warn_once(UNMEASURED.format(family, kind, nvidia.device_kind(), why))
    for name in refused:
        known = name in times or not backends[name].needs_check
        is_silent = reasons[name] == NO_D_LSE or reasons[name].startswith(self_check().LOGGED)
        if known and current in backends[name].platforms and not is_silent:
            _warn_once(f"{family}: not {name}, {reasons[name]}; {fastest} runs")


def _explicit(name: str, inputs, d_lse: bool):
    """Returns the results of `_fastest` for a backend that the caller names."""
    family = inputs[-1].family
    backends, call = FAMILIES[family], f"{family}(implementation={name!r})"
    if name not in backends:
        choices = ", ".join([*backends, REFERENCE])
        raise CannotRun(f"{call}: unknown; choose one of {choices}")
    backend, current = backends[name], platform()
    if backend.portable:
        return dict.fromkeys(backend.platforms, name), {name: BY_NAME}
    if current not in backend.platforms:
        reason = f"it runs on {', '.join(backend.platforms)} and this process runs on {current}"
    else:
        reason = backend.load().unsupported(*inputs)
    if reason is not None:
        raise CannotRun(f"{call}: {reason}; leave implementation out for the best one that can")
    if d_lse and not backend.takes_d_lse:
        portable = next(name for name, backend in backends.items() if backend.portable)
        _warn_once(f"{call}: a result depends on lse and {NO_D_LSE}; {portable} computes gradients")
        return {"default": portable}, {name: NO_D_LSE, portable: "it runs everywhere"}
    return {"default": name}, {name: BY_NAME}


def platform() -> str:
    """Returns the process' platform as lowered programs name it: "cuda" instead of "gpu"."""
    platform = jax.default_backend()
    if platform != "gpu":
        return platform
    return "rocm" if "rocm" in get_backend().platform_version else "cuda"


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)


def differentiable(forward: Callable, backward: Callable, name: str | None = None) -> Callable:
    """Returns `attention(q, k, v, operands, static) -> (out, lse)` with a gradient rule.

    Args:
      forward: ((q, k, v), operands, static) -> (out, lse).
      backward: ((q, k, v, out, lse, d_out, d_lse), operands, static) -> dq, dk, dv and the
        cotangent of operands.bias; d_lse is None where nothing depends on lse.
      name: checkpoint name of the residuals out and lse. A remat policy that saves this name does
        not recompute attention.
    """

    def attention(q, k, v, operands, static):
        return forward((q, k, v), operands, static)

    def save(q, k, v, operands, static):
        if is_quantised(k, v) or any(isinstance(x, FoldedHeads) for x in (k, v)):
            raise NotImplementedError(
                "keys and values given as codes, or as FoldedHeads, have no gradient; differentiate"
                " attention over arrays"
            )
        q, k, v, operands = custom_vjp_primal_tree_values((q, k, v, operands))
        out, lse = _once_differentiable(forward, (q, k, v), operands, static)
        if name is not None:
            out, lse = checkpoint_name(out, name), _in_lanes(lse, name)
        return (out, lse), (q, k, v, operands, out, lse)

    def pull_back(static, residuals, cotangents):
        q, k, v, operands, out, lse = residuals
        d_out, d_lse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
        d_out = jnp.zeros_like(out) if d_out is None else d_out
        arrays = (q, k, v, out, lse, d_out, d_lse)
        dq, dk, dv, d_bias = _once_differentiable(backward, arrays, operands, static)
        if d_bias is not None:
            d_bias = jax.tree.map(lambda d, x: d.astype(x.dtype), d_bias, operands.bias)
        return dq, dk, dv, Operands(bias=d_bias)

    attention = jax.custom_vjp(attention, nondiff_argnums=(4,))
    attention.defvjp(save, pull_back, symbolic_zeros=True)
    return attention


def _in_lanes(lse, name: str):
    """Names `lse` [B, T, N] as an array whose last axis has 128 numbers.

    TPUs pad that axis to 128, also in the memory of the host.
    """
    batch, queries, heads = lse.shape
    if queries % 128:
        return checkpoint_name(lse, name)
    kept = checkpoint_name(lse.swapaxes(1, 2).reshape(batch, -1, 128), name)
    return kept.reshape(batch, heads, queries).swapaxes(1, 2)


def _once_differentiable(function: Callable, arrays, operands: Operands, static):
    """Runs `function(arrays, operands, static)`, a part of a first derivative.

    Kernels have no derivative. That of this call is the derivative of the reference, which is dense
    and has all others. Only attention on one device, or on devices that share no text, has one.
    """

    @jax.custom_jvp
    def call(arrays, operands):
        return function(arrays, operands, static)

    @call.defjvp
    def second_derivative(primals, tangents):
        if not isinstance(static, tuple) or static[1].block is not None:
            raise NotImplementedError(
                "second derivatives of attention over keys of several devices, and of landmark"
                " attention, are not supported (jax.hessian, grad of grad); leave the axis of the"
                ' length out of the mesh, or use implementation="reference"'
            )
        dense = functools.partial(_by_reference, spec=static[1])
        return jax.jvp(dense, primals, tangents)

    return call(arrays, operands)


def _by_reference(arrays, operands: Operands, spec: Spec):
    """Computes what a backend does, by the dense formula: a forward or a backward pass."""
    q, k, v, *rest = arrays
    table = operands.table if spec.table is None else spec.table.tree

    def attend(q, k, v, bias):
        options = {"mask": spec.mask, "scale": spec.scale, "soft_cap": spec.soft_cap}
        options |= {"table": table, "key_bits": operands.key_bits}
        return reference.attention(q, k, v, *operands[:4], bias=bias, **options)

    if not rest:
        return attend(q, k, v, operands.bias)
    _, lse, d_out, d_lse = rest
    d_lse = jnp.zeros_like(lse) if d_lse is None else d_lse
    (out, _), pull_back = jax.vjp(attend, q, k, v, operands.bias)
    return pull_back((d_out.astype(out.dtype), d_lse))


def choose_and_run(direction: str, arrays, operands: Operands, static: tuple[str | None, Spec]):
    """Runs a pass with the backends that `choose` returns.

    Args:
      arrays: (q, k, v, ...), as in `differentiable`.
      static: the name of the implementation or None, and the spec.
    """
    name, spec = static
    d_lse = direction == "backward" and arrays[-1] is not None
    inputs = arrays[:3]
    if any(isinstance(x, FoldedHeads) for x in inputs):  # their shapes alone are needed
        inputs = jax.eval_shape(as_rows, inputs)
    choice = choose(name, *inputs, operands, spec, direction, d_lse)
    return run(direction, choice, arrays, operands, spec)


# With jit a call outside jit compiles once per shape, and all layers of a model share one trace.
@functools.partial(jax.jit, static_argnames=("direction", "choice", "spec"))
def run(direction: str, choice, arrays, operands, spec):
    """Runs `forward` or `backward` of the backend chosen for the platform of the program."""
    results = _run_narrow(dict(choice), direction, arrays, operands, spec)
    likes = arrays[: 1 if direction == "forward" else 3]
    cast = (x.astype(like.dtype) for x, like in zip(results, likes, strict=False))
    return *cast, *results[len(likes) :]


def _run_narrow(choice: dict[str, str], direction: str, arrays, operands, spec):
    """Runs a pass in 32 bits: kernels and XLA's loops count and sum so, even under x64."""

    def branch_of(platform, name):
        backend = FAMILIES[spec.family][name]
        pass_ = getattr(backend.load(), direction)

        def branch(*inputs):
            inputs = inputs if backend.reads_folded else as_rows(inputs)
            return pass_(*inputs, spec=spec, platform=platform)

        return branch

    branches = {platform: branch_of(platform, name) for platform, name in choice.items()}
    narrow, operands = jax.tree.map(_in_32_bits, (arrays, operands))
    with jax.enable_x64(False):
        if len(branches) > 1:
            return jax.lax.platform_dependent(*narrow, operands, **branches)
        (branch,) = branches.values()
        return branch(*narrow, operands)


def _in_32_bits(x):
    narrow = {"float64": np.float32, "int64": np.int32}
    return x.astype(narrow.get(x.dtype.name, x.dtype))
