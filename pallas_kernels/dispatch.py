"""The interface of a backend, the table of backends, and the choice of the one that runs.

A backend is a module with three functions over q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv]:

    forward(q, k, v, operands, spec, *, platform)
        -> out [B, T, N, Hv] in q's dtype, lse float32 [B, T, N]
    backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform)
        -> dq, dk, dv in the dtypes of q, k, v, and the cotangent of operands.bias (None: no bias)
    unsupported(q, k, v, operands, spec) -> str | None
        a reason not to run these inputs, or None; only shapes, dtypes and structure are read

It computes logit = cap(scale q k^T) + bias with cap(x) = spec.soft_cap tanh(x / spec.soft_cap),
hides the keys that `spec.mask`, the segments or the table hide, and returns the softmax's weighted
values and its log-sum-exp (natural logarithm). A query that sees no key gets out 0, lse -inf and
zero gradients. Softmax and sums are float32; float32 operands are multiplied in full precision. The
cotangent of lse enters the backward pass through `di = rowsum(out * d_out) - d_lse`; d_lse is None
where nothing depends on lse.

The caller of a backend has already split masks per head (`spec.mask` is one mask for all heads) and
turned k_lengths into segments; it merges sinks and replaces the results of tables that overflowed.
`platform` is the one that the program is lowered for ("cpu", "tpu", "cuda", ...), or "default".

`LANDMARK` has the backends of `pallas_kernels.landmark.older_blocks`: the same three functions,
where `spec.block` is set, and masks, indices and segments of keys are those of landmark blocks.
"""

from __future__ import annotations

import contextlib
import contextvars
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

from pallas_kernels import timings, tuning
from pallas_kernels.biases import Bias, of_heads
from pallas_kernels.masks import Mask, by_heads
from pallas_kernels.tables import BlockTable, from_mask, restrict

log = logging.getLogger(__name__)


class Constant:
    """NumPy arrays that a program is compiled for: hashable, and equal where the contents are."""

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
    """Arrays beside q, k, v; None where the caller gives none.

    With `Spec.block`, k_index and k_segments are [.., C] of C landmark blocks, and the indices are
    numbers of blocks; q_index None stands for t // block.
    """

    q_index: Any = None  # int32 [1 or B, T]; None: 0, 1, ..., known when traced
    k_index: Any = None  # int32 [1 or B, S]; None: 0, 1, ...
    q_segments: Any = None  # int32 [B, T], 0 is padding; None together with k_segments
    k_segments: Any = None  # int32 [B, S]
    bias: Bias | None = None
    table: Any = None  # a caller's block table of traced arrays; see `user_table`


def split_heads(q, k, v, operands: Operands, spec: Spec) -> Iterator[tuple]:
    """Yields (q, k, v, operands, spec) for each run of query heads that share a mask."""
    heads, group, start = q.shape[2], q.shape[2] // k.shape[2], 0
    for mask, count in by_heads(spec.mask, heads):
        if count == heads:
            yield q, k, v, operands, replace(spec, mask=mask)
            return
        while count:
            # Whole groups of queries that share a key head, or a part of one group.
            size = min(count, group - start % group)
            if start % group == 0 and count >= group:
                size = count - count % group
            yield _some_heads(q, k, v, operands, replace(spec, mask=mask), start, size)
            start, count = start + size, count - size


def join_heads(results: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Concatenates the (out, lse) of `split_heads`."""
    if len(results) == 1:
        return results[0]
    out, lse = (jnp.concatenate(x, 2) for x in zip(*results, strict=True))
    return out, lse


def _some_heads(q, k, v, operands: Operands, spec: Spec, start: int, count: int):
    """(q, k, v, operands, spec) of `count` query heads from `start` on."""
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
    keys = slice(first, first + num_keys)
    return q[:, :, start : start + count], k[:, :, keys], v[:, :, keys], operands, spec


def user_table(operands: Operands, spec: Spec) -> BlockTable | None:
    """The caller's BlockTable, of NumPy or of traced arrays, or None.

    Only its blocks are visible, on top of the mask. A block that it calls full is full with respect
    to the mask alone: segments still apply there (`pallas_kernels.tables.restrict` applies them).
    """
    return operands.table if spec.table is None else spec.table.tree


def default_q_index(spec: Spec, queries: int) -> np.ndarray:
    """int32 [1, T], which stands for operands.q_index None: 0, 1, ... or numbers of blocks."""
    index = np.arange(queries, dtype=np.int32)[None]
    return index if spec.block is None else index // spec.block


def visible_blocks(
    operands: Operands, spec: Spec, queries: int, keys: int, q_block: int, k_block: int
) -> BlockTable:
    """The blocks to visit: those of the caller's table, or blocks of the given sizes."""
    q_index, k_index, q_segments, k_segments = operands[:4]
    if q_index is None and spec.block is not None:
        q_index = default_q_index(spec, queries)
    arrays = dict(q_index=q_index, k_index=k_index, q_segments=q_segments, k_segments=k_segments)
    sizes = dict(queries=queries, keys=keys)
    if (table := user_table(operands, spec)) is not None:
        return restrict(table, spec.mask, **sizes, **arrays)
    return from_mask(spec.mask, **sizes, **arrays, q_block=q_block, k_block=k_block)


def unsupported_dtypes(q, k, v, *dtypes: str) -> str | None:
    """The reason against q, k and v that are not all of one of `dtypes`, or None."""
    names = {str(x.dtype) for x in (q, k, v)}
    if any(names == {dtype} for dtype in dtypes):
        return None
    rule = " or all ".join(dtypes)
    return f"q, k and v must all be {rule}, they are {', '.join(sorted(names))}"


def unsupported_mask(spec: Spec) -> str | None:
    """The reason against a mask that kernels cannot compute, or None."""
    if spec.mask.arithmetic:
        return None
    return "the mask looks indices up in a long list; kernels compute masks from scalars"


def unsupported_blocks(q, k, table: BlockTable | None, multiple: int) -> str | None:
    """The reason against a table whose blocks are no multiple of `multiple`, or None.

    A block that is alone may have any size.
    """
    if table is None:
        return None
    lengths = (q.shape[1], table.q_block), (k.shape[1], table.k_block)
    for name, (length, block) in zip(("queries", "keys"), lengths, strict=True):
        if length > block and block % multiple:
            return f"blocks of {block} {name} are no multiple of {multiple}"
    return None


class Backend(NamedTuple):
    """A module, and the platforms that it is for; a portable one runs on all others too."""

    module: str
    platforms: tuple[str, ...]
    portable: bool = False
    by_name: bool = False  # runs only if it is named or has passed the self-check
    takes_d_lse: bool = True  # else its backward pass runs only where nothing depends on lse
    deterministic: bool = True  # else gradients may differ in bits between two runs

    def load(self):
        return importlib.import_module(self.module)


# The first one that can run the inputs is taken on its platforms; "default" is every other one.
BACKENDS = {
    "xla": Backend("pallas_kernels.backends.xla.attention", ("cpu", "default"), portable=True),
    "tpu": Backend("pallas_kernels.backends.tpu.attention", ("tpu",)),
    "triton": Backend("pallas_kernels.backends.triton.attention", ("cuda",), by_name=True),
    "mosaic_gpu": Backend("pallas_kernels.backends.mosaic_gpu.attention", ("cuda",), by_name=True),
    "cudnn": Backend(
        "pallas_kernels.backends.cudnn",
        ("cuda",),
        by_name=True,
        takes_d_lse=False,
        deterministic=False,
    ),
}
LANDMARK = {
    "xla": Backend("pallas_kernels.backends.xla.landmark", ("cpu", "default"), portable=True),
    "tpu": Backend("pallas_kernels.backends.tpu.landmark", ("tpu",)),
    "triton": Backend("pallas_kernels.backends.triton.landmark", ("cuda",), by_name=True),
}
FAMILIES = {"flash": BACKENDS, "landmark_attention": LANDMARK}
REFERENCE = "reference"  # dense, differentiated by JAX: for tests, chosen by name only
MUCH_FASTER = 1.1  # how many times as fast gradients must be that differ in bits between runs
BY_NAME, NO_D_LSE = "chosen by name", "it takes no cotangent of lse"
UNMEASURED = (
    "{}: XLA's blockwise attention runs ({}) on {}: {}; no kernel was measured there yet, which "
    "`python -m benchmarks.gpu.attention --keep` does once, in a clone of lcjax; with its wheel "
    "`python -m lcjax.benchmarks.gpu.attention --keep`"
)


class CannotRun(ValueError):
    """A backend that the caller names cannot run the call."""


@dataclass(frozen=True)
class Explanation:
    """One kind of attention call, the implementation that computes it here, and the reasons."""

    call: str
    kind: str | None  # of calls that are measured together (`pallas_kernels.timings`)
    implementation: str
    reasons: tuple[tuple[str, str], ...]  # of every implementation that was considered

    def __str__(self) -> str:
        marks = ((">" if name == self.implementation else " ") for name, _ in self.reasons)
        lines = (f"  {m} {x:10} {y}" for m, (x, y) in zip(marks, self.reasons, strict=True))
        return "\n".join([self.call, *lines])


_explanations: contextvars.ContextVar[list | None] = contextvars.ContextVar(
    "attention", default=None
)


def explain(function, *args, **options) -> list[Explanation]:
    """Returns which implementation computes each attention call of a function, and why.

        print(*explain(lambda q, k, v: flash(q, k, v, causal()), q, k, v), sep="\\n")

    `function(*args, **options)` is traced and not run. Each different call is listed once; backward
    passes are listed if the function differentiates. Functions that `jax.jit` has traced before are
    not traced again: give the function under `jit`.

    Args:
      function: calls `flash`, `decode` or `landmark_attention`.
      *args, **options: arrays, or their `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: no attention call was traced.
    """
    with record_explanations() as explanations:
        jax.eval_shape(lambda *x, **y: function(*x, **y), *args, **options)
    if not explanations:
        raise ValueError(
            "explain: the function traced no attention; one that jax.jit has traced before is not "
            "traced again: give the function that is under jit, or call jax.clear_caches() first"
        )
    return list(dict.fromkeys(explanations))


@contextlib.contextmanager
def record_explanations() -> Iterator[list[Explanation]]:
    """Records the explanation of every attention call that is traced inside, also of programs.

    It is for what `explain` cannot trace as a whole, such as a loop in Python over several jitted
    programs. What `jax.jit` has traced before is not traced again.
    """
    explanations: list[Explanation] = []
    token = _explanations.set(explanations)
    try:
        yield explanations
    finally:
        _explanations.reset(token)


def choose(
    name: str | None, q, k, v, operands, spec, direction: str = "forward", d_lse: bool = False
):
    """((platform, backend), ...) for `run`; a name that cannot run raises its reason.

    Of the backends that can run on a platform, the one that was measured to be the fastest is
    taken (`ranked_by`); on GPUs where nothing was measured for such calls, the first of
    `tuning.order`. Kernels of GPUs have to pass the self-check for calls like it
    (`pallas_kernels.self_check`). Any backend can run the backward pass of another's results.

    Args:
      d_lse: whether the backward pass has a cotangent of lse.
    """
    inputs = q, k, v, operands, spec
    kind = timings.kind(*inputs)
    if name is not None:
        choice, reasons = _explicit(name, inputs, d_lse)
    else:
        times = timings.times(kind, direction, str(q.dtype))
        choice, reasons = _fastest(times, kind, inputs, direction, d_lse)
    if (explanations := _explanations.get()) is not None:
        arrays = ", ".join(f"{n} {x.dtype}{list(x.shape)}" for n, x in zip("qkv", (q, k, v)))
        suffix = f" ({kind})" if kind else ""
        call = f"{spec.family} {direction}{suffix} on {platform()}: {arrays}"
        implementation = choice.get(platform(), choice["default"])
        explanations.append(Explanation(call, kind, implementation, tuple(reasons.items())))
    return tuple(choice.items())


def _fastest(times: dict[str, float], kind, inputs, direction: str, d_lse: bool):
    """The choice, and why each backend is or is not taken; times: of those that were measured."""
    backends, chosen, reasons = FAMILIES[inputs[-1].family], {}, {}
    rules = [] if times else [x for x in tuning.order() if x in backends]

    def rank(name):
        backend, by_rule = backends[name], rules.index(name) if name in rules else len(rules)
        ranked = ranked_by(name, times.get(name, math.inf), direction)
        return ranked, backend.portable, _varies(name, direction), by_rule

    for name in sorted(backends, key=rank):
        backend, duration = backends[name], f"{times.get(name, 0.0):.3g} ms for a call like it"
        if _varies(name, direction):
            duration += f", counted as {MUCH_FASTER} times that: its gradients vary in bits"
        if backend.portable:
            timed = ("cuda",) if name in times else ()  # slower backends are not considered
            chosen = dict.fromkeys((*backend.platforms, *timed), name) | chosen
            reasons[name] = duration if name in times else "it runs everywhere"
            continue
        if backend.by_name and name not in times and name not in rules:
            reasons[name] = f"not measured here for {kind or 'float32'}"
            continue
        if chosen.keys() >= set(backend.platforms):
            reasons[name] = duration if name in times else "another one is first"
            continue
        can, why = _may_run(name, backend, name in times, inputs, direction, d_lse)
        if can:
            chosen = dict.fromkeys(backend.platforms, name) | chosen
        reasons[name] = duration if can and name in times else why
    _log_choice(times, kind, inputs[-1].family, chosen, reasons)
    return chosen, reasons


def ranked_by(name: str, milliseconds: float, direction: str) -> float:
    """What backends that were measured are ordered by: reproducible gradients are preferred."""
    return milliseconds * (MUCH_FASTER if _varies(name, direction) else 1.0)


def _varies(name: str, direction: str) -> bool:
    """Whether results differ in bits between two runs."""
    return direction == "backward" and name in BACKENDS and not BACKENDS[name].deterministic


def _may_run(name: str, backend: Backend, measured: bool, inputs, direction: str, d_lse: bool):
    """(whether a backend can run a call, why)."""
    if d_lse and not backend.takes_d_lse:
        return False, NO_D_LSE
    if reason := backend.load().unsupported(*inputs):
        return False, reason
    if not backend.by_name:
        return True, f"for {', '.join(backend.platforms)}"
    form = timings.form_of(timings.kind_of_any_dtype(*inputs))
    if reason := timings.why_wrong(name, str(inputs[0].dtype), form):
        return False, f"it was measured to be wrong: {reason}"
    return _self_check().may_run(name, direction, inputs, measured)


def _self_check():
    """The module, which is also a command and imports this package itself."""
    return importlib.import_module("pallas_kernels.self_check")


def _log_choice(times: dict, kind, family: str, chosen: dict, reasons: dict) -> None:
    """Warns once on a platform if a better backend is refused, or if XLA runs unmeasured."""
    current, backends = platform(), FAMILIES[family]
    fastest = chosen.get(current, chosen["default"])
    refused = list(itertools.takewhile(lambda name: name != fastest, reasons))
    # In the order of the backends, so that both directions say the same, once.
    of_cuda = {x: reasons[x] for x in backends if x in refused and "cuda" in backends[x].platforms}
    unmeasured = current == "cuda" and kind and not times and backends[fastest].portable
    # What the self-check refuses has a line of its own.
    if unmeasured and not any(x.startswith(_self_check().LOGGED) for x in of_cuda.values()):
        why = "; ".join(f"not {name}, {reason}" for name, reason in of_cuda.items())
        _warn_once(UNMEASURED.format(family, kind, tuning.device_kind(), why))
    for name in refused:
        known = name in times or not backends[name].by_name
        said = reasons[name] == NO_D_LSE or reasons[name].startswith(_self_check().LOGGED)
        if known and current in backends[name].platforms and not said:
            _warn_once(f"{family}: not {name}, {reasons[name]}; {fastest} runs")


def _explicit(name: str, inputs, d_lse: bool):
    """As `_fastest`, for a backend that the caller names."""
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
    """The platform of this process under the name that lowered programs use: "cuda", not "gpu"."""
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
      name: of the residuals out and lse: a remat policy that saves it recomputes no attention.
    """

    def attention(q, k, v, operands, static):
        return forward((q, k, v), operands, static)

    def save(q, k, v, operands, static):
        q, k, v, operands = custom_vjp_primal_tree_values((q, k, v, operands))
        out, lse = _once_differentiable(forward, (q, k, v), operands, static)
        if name is not None:
            out, lse = (checkpoint_name(x, name) for x in (out, lse))
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


def _once_differentiable(function: Callable, arrays, operands: Operands, static):
    """`function(arrays, operands, static)`, a part of a first derivative, without one of its own.

    Kernels raise a bare NotImplementedError where they are differentiated.
    """

    @jax.custom_jvp
    def call(arrays, operands):
        return function(arrays, operands, static)

    @call.defjvp
    def second_derivative(primals, tangents):
        raise NotImplementedError(
            "second derivatives of attention are not supported (jax.hessian, grad of grad): its"
            " kernels have a gradient and no more; differentiate pallas_kernels.reference instead"
        )

    return call(arrays, operands)


def choose_and_run(direction: str, arrays, operands: Operands, static: tuple[str | None, Spec]):
    """`run` by the backends that `choose` takes for (q, k, v, ...).

    Args:
      static: the name of the implementation or None, and the spec.
    """
    name, spec = static
    d_lse = direction == "backward" and arrays[-1] is not None
    choice = choose(name, *arrays[:3], operands, spec, direction, d_lse)
    return run(direction, choice, arrays, operands, spec)


# Compiled once per shape also when called outside jit, and traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("direction", "choice", "spec"))
def run(direction: str, choice, arrays, operands, spec):
    """`forward` or `backward` of the chosen backends, by the platform that the program is for."""
    branches = {
        platform: functools.partial(
            getattr(FAMILIES[spec.family][name].load(), direction), spec=spec, platform=platform
        )
        for platform, name in choice
    }
    # Whatever the caller's default is, kernels and XLA's loops count and sum in 32 bits.
    narrow, operands = jax.tree.map(_in_32_bits, (arrays, operands))
    with jax.enable_x64(False):
        if len(branches) == 1:
            results = branches["default"](*narrow, operands)
        else:
            results = jax.lax.platform_dependent(*narrow, operands, **branches)
    likes = arrays[: 1 if direction == "forward" else 3]
    cast = (x.astype(like.dtype) for x, like in zip(results, likes, strict=False))
    return *cast, *results[len(likes) :]


def _in_32_bits(x):
    narrow = {"float64": np.float32, "int64": np.int32}
    return x.astype(narrow.get(x.dtype.name, x.dtype))
