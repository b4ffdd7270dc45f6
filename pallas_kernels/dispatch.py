"""What a backend is given and must answer, which ones there are, and which one runs.

A backend is a module with three functions over q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv]:

    forward(q, k, v, operands, spec, *, platform)
        -> out [B, T, N, Hv] in q's dtype, lse float32 [B, T, N]
    backward(q, k, v, out, lse, d_out, d_lse, operands, spec, *, platform)
        -> dq, dk, dv in the dtypes of q, k, v, and the cotangent of operands.bias (None: no bias)
    unsupported(q, k, v, operands, spec) -> str | None
        a reason not to run these inputs, or None; only shapes, dtypes and structure are read

It computes logit = cap(scale q k^T) + bias with cap(x) = spec.soft_cap tanh(x / spec.soft_cap),
hides what `spec.mask`, the segments or the table hide, and returns the softmax's weighted values
and its log-sum-exp (natural logarithm). A query that sees no key gets out 0, lse -inf and zero
gradients. Softmax and sums are float32; float32 operands are multiplied in full precision. The
cotangent of lse enters the backward pass through `di = rowsum(out * d_out) - d_lse`; d_lse is None
where nothing depends on lse.

Already done outside backends: masks per head are split (`spec.mask` is one mask for all heads),
k_lengths are segments, sinks are merged in, a table that overflowed has its results replaced.
`platform` is the one that the program is lowered for ("cpu", "tpu", "cuda", ...), or "default".
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import logging
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.backend import get_backend

from pallas_kernels import measured, tuning
from pallas_kernels.biases import Bias
from pallas_kernels.explain import note
from pallas_kernels.masks import Mask

log = logging.getLogger(__name__)


class Constant:
    """NumPy arrays that a program is compiled for: a hashable that equals its like in content."""

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
    """What is known when the program is traced; hashable."""

    mask: Mask
    scale: float
    soft_cap: float | None = None
    table: Constant | None = None  # a caller's block table of NumPy arrays
    splits: int | None = None  # parts of the keys to compute apart; None: what suits the platform


class Operands(NamedTuple):
    """Arrays beside q, k, v; what is absent is None."""

    q_index: Any = None  # int32 [1 or B, T]; None: 0, 1, ..., known when traced
    k_index: Any = None  # int32 [1 or B, S]; None: 0, 1, ...
    q_segments: Any = None  # int32 [B, T], 0 is padding; None together with k_segments
    k_segments: Any = None  # int32 [B, S]
    bias: Bias | None = None
    table: Any = None  # a caller's block table of traced arrays; see `given_table`


@dataclass(frozen=True)
class LandmarkSpec:
    """`Spec` of grouped softmax over older blocks (`pallas_kernels.landmark.older_blocks`)."""

    block: int
    scale: float


class LandmarkOperands(NamedTuple):
    """`Operands` of grouped softmax over older blocks; C of them stand behind each other in k."""

    q_numbers: Any = None  # int32 [1 or B, T] of blocks; None: t // block
    k_numbers: Any = None  # int32 [1 or B, C]; None: 0, 1, ...
    q_segments: Any = None  # int32 [B, T], 0 is padding; None together with k_segments
    k_segments: Any = None  # int32 [B, C]


def given_table(operands: Operands, spec: Spec):
    """The caller's BlockTable, of NumPy or of traced arrays, or None: the mask says it all.

    Only its blocks are visible, on top of the mask. It calls a block full with respect to the mask
    alone: segments still apply there (`pallas_kernels.tables.restrict` applies them).
    """
    return operands.table if spec.table is None else spec.table.tree


class Backend(NamedTuple):
    """A module, and the platforms that it is for; a portable one runs on all others too."""

    module: str
    platforms: tuple[str, ...]
    portable: bool = False
    by_name: bool = False  # only where it is asked for, or was measured on the device
    takes_d_lse: bool = True  # else its backward pass runs only where nothing depends on lse

    def load(self):
        return importlib.import_module(self.module)


# The first one that can run the inputs is taken on its platforms; "default" is every other one.
BACKENDS = {
    "xla": Backend("pallas_kernels.backends.xla.attention", ("cpu", "default"), portable=True),
    "tpu": Backend("pallas_kernels.backends.tpu.attention", ("tpu",)),
    "triton": Backend("pallas_kernels.backends.triton.attention", ("cuda",), by_name=True),
    "mosaic_gpu": Backend("pallas_kernels.backends.mosaic_gpu.attention", ("cuda",), by_name=True),
    "cudnn": Backend("pallas_kernels.backends.cudnn", ("cuda",), by_name=True, takes_d_lse=False),
}
LANDMARK = {  # the same functions over `LandmarkOperands` and `LandmarkSpec`, without a bias
    "xla": Backend("pallas_kernels.backends.xla.landmark", ("cpu", "default"), portable=True),
    "tpu": Backend("pallas_kernels.backends.tpu.landmark", ("tpu",)),
    "triton": Backend("pallas_kernels.backends.triton.landmark", ("cuda",), by_name=True),
}
FAMILIES = {"flash": BACKENDS, "landmark_attention": LANDMARK}
REFERENCE = "reference"  # dense, differentiated by JAX: for tests, chosen by name only
ASKED, NO_D_LSE = "asked for by name", "it takes no cotangent of lse"
UNMEASURED = (
    "{}: XLA's blockwise attention runs ({}): no kernel was measured on {} yet, which "
    "`python -m benchmarks.gpu.attention --keep` does once (docs/benchmarks.md)"
)


def choose(
    name: str | None, q, k, v, operands, spec, family: str = "flash",
    direction: str = "forward", d_lse: bool = False,
):  # fmt: skip
    """((platform, backend), ...) for `run`; an explicit name that cannot run raises its reason.

    Where several backends of a platform can, it is the one that was measured to be the fastest.
    d_lse: the backward pass has a cotangent of lse. Any backend can go on from another's results.
    """
    inputs = q, k, v, operands, spec
    kind = measured.kind(*inputs, family)
    if name is not None:
        choice, reasons = _explicit(name, inputs, family, d_lse)
    else:
        choice, reasons = _fastest(measured.times(kind, direction), kind, inputs, family, d_lse)
    note(inputs, kind, family, direction, dict(choice), reasons, _here())
    return choice


def _fastest(times: dict[str, float], kind, inputs, family: str, d_lse: bool):
    """The choice, and by backend why it is or is not taken; times: of those that were measured."""
    backends, chosen, reasons = FAMILIES[family], {}, {}
    for name in sorted(backends, key=lambda x: (times.get(x, math.inf), backends[x].portable)):
        backend, took = backends[name], f"{times.get(name, 0.0):.3g} ms for a call like it"
        if backend.portable:
            timed = ("cuda",) if name in times else ()  # what was slower is not asked any more
            chosen = dict.fromkeys((*backend.platforms, *timed), name) | chosen
            reasons[name] = took if name in times else "it runs everywhere"
        elif backend.by_name and name not in times:
            reasons[name] = f"not measured here for {kind or 'float32'}"
        elif chosen.keys() >= set(backend.platforms):
            reasons[name] = took if name in times else "another one is first"
        elif d_lse and not backend.takes_d_lse:
            reasons[name] = NO_D_LSE
        elif reason := backend.load().unsupported(*inputs):
            reasons[name] = reason
        else:
            chosen = dict.fromkeys(backend.platforms, name) | chosen
            reasons[name] = took if name in times else f"for {', '.join(backend.platforms)}"
    _tell(times, kind, family, chosen, reasons)
    return tuple(chosen.items()), reasons


def _tell(times: dict, kind, family: str, chosen: dict, reasons: dict) -> None:
    """Says once on its platform that a better backend was refused, or that none was measured."""
    here, backends = _here(), FAMILIES[family]
    taken = chosen.get(here, chosen["default"])
    if here == "cuda" and kind and not times:
        _say_once(UNMEASURED.format(family, kind, tuning.device_kind()))
    for name in itertools.takewhile(lambda name: name != taken, reasons):
        known = name in times or not backends[name].by_name
        if known and here in backends[name].platforms and reasons[name] != NO_D_LSE:
            _say_once(f"{family}: not {name}, {reasons[name]}; {taken} runs")


def _explicit(name: str, inputs, family: str, d_lse: bool):
    backends, call = FAMILIES[family], f"{family}(implementation={name!r})"
    if name not in backends:
        choices = ", ".join([*backends, REFERENCE])
        raise ValueError(f"{call}: unknown; choose one of {choices}")
    backend, here = backends[name], _here()
    if backend.portable:
        return tuple((platform, name) for platform in backend.platforms), {name: ASKED}
    if here not in backend.platforms:
        reason = f"it runs on {', '.join(backend.platforms)} and this process runs on {here}"
    else:
        reason = backend.load().unsupported(*inputs)
    if reason is not None:
        raise ValueError(f"{call}: {reason}; leave implementation out for the best one that can")
    if d_lse and not backend.takes_d_lse:
        portable = next(name for name, backend in backends.items() if backend.portable)
        _say_once(f"{call}: a result depends on lse and {NO_D_LSE}; {portable} computes gradients")
        return (("default", portable),), {name: NO_D_LSE, portable: "it runs everywhere"}
    return (("default", name),), {name: ASKED}


def _here() -> str:
    """This process' platform, as programs that are lowered for it name it: "cuda", not "gpu"."""
    platform = jax.default_backend()
    if platform != "gpu":
        return platform
    return "rocm" if "rocm" in get_backend().platform_version else "cuda"


@functools.cache
def _say_once(message: str) -> None:
    log.warning(message)


def choose_and_run(direction: str, name: str | None, arrays, operands, spec, family: str = "flash"):
    """`run` by the backends that `choose` takes for (q, k, v, ...); d_lse comes last, backwards."""
    d_lse = direction == "backward" and arrays[-1] is not None
    choice = choose(name, *arrays[:3], operands, spec, family, direction, d_lse)
    return run(direction, choice, arrays, operands, spec, family)


# Compiled once per shape also when called outside jit, and traced once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("direction", "choice", "spec", "family"))
def run(direction: str, choice, arrays, operands, spec, family: str = "flash"):
    """`forward` or `backward` of the chosen backends, by the platform that the program is for."""
    branches = {
        platform: functools.partial(
            getattr(FAMILIES[family][name].load(), direction), spec=spec, platform=platform
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
