"""Cases of grouped softmax over older blocks, to compare a backend's kernels with plain XLA."""

import functools
import sys
import types
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends.xla import landmark as _xla_landmark
from pallas_kernels.dispatch import BACKENDS, LANDMARK, Backend, Operands
from pallas_kernels.landmark import older_spec


@dataclass(frozen=True)
class Case:
    """Inputs; `places` numbers blocks and puts them into documents, at random, in every row."""

    t: int = 300
    s: int = 304
    block: int = 8
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    size: int = 32
    v_size: int = 32
    scale: float | None = None
    places: bool = False
    dtype: str = "float32"


CASES = {
    "several steps of both sides": Case(t=700, s=1280, block=64, size=64, v_size=64),
    "more queries than keys": Case(t=300, s=96, block=16, heads=3, kv_heads=3),
    "fifty-one tokens, as in the paper": Case(t=600, s=612, block=51, size=80, v_size=40),
    "blocks of two, anywhere": Case(t=140, s=170, block=2, batch=2, places=True),
    "three heads per key head, anywhere": Case(
        t=260, s=690, block=23, batch=2, heads=6, kv_heads=2, places=True
    ),
    "few queries, eight heads per key head": Case(t=3, s=256, heads=16, kv_heads=2, places=True),
    "bfloat16, a scale that it cannot hold": Case(
        t=400, s=640, block=64, size=128, v_size=128, scale=0.1, dtype="bfloat16"
    ),
    "bfloat16, anywhere": Case(t=200, s=357, block=51, batch=2, dtype="bfloat16", places=True),
}


def build(case: Case):
    """(q, k, v, d_out, d_lse), operands and spec."""
    rng = np.random.default_rng(0)
    b, t, s, count = case.batch, case.t, case.s, case.s // case.block
    shapes = [
        (b, t, case.heads, case.size),
        (b, s, case.kv_heads, case.size),
        (b, s, case.kv_heads, case.v_size),
        (b, t, case.heads, case.v_size),
    ]
    arrays = [jnp.asarray(rng.normal(size=shape), case.dtype) for shape in shapes]
    arrays.append(jnp.asarray(rng.normal(size=(b, t, case.heads)), jnp.float32))
    operands = Operands()
    if case.places:
        numbers = [rng.integers(0, count, (b, n)) for n in (t, count)]
        segments = [np.sort(rng.integers(0, 4, (b, n)), 1) for n in (t, count)]
        operands = Operands(*(jnp.asarray(x, jnp.int32) for x in numbers + segments))
    scale = case.size**-0.5 if case.scale is None else case.scale
    return arrays, operands, older_spec(case.block, scale)


def run(module, arrays, operands, spec, **options):
    """(out, lse, dq, dk, dv) of a backend."""

    @jax.jit
    def both(q, k, v, d_out, d_lse, operands):
        out, lse = module.forward(q, k, v, operands, spec, **options)
        d_lse = jnp.where(jnp.isfinite(lse), d_lse, 0)
        saved = (q, k, v, out, lse, d_out, d_lse)
        return out, lse, *module.backward(*saved, operands, spec, **options)[:3]

    assert module.unsupported(*arrays[:3], operands, spec) is None
    return both(*arrays, operands)


def compare(module, arrays, operands, spec, interpret=True):
    """Kernels against XLA in float32; returns what the kernels gave."""
    found = run(module, arrays, operands, spec, interpret=interpret)
    wide = [x.astype(jnp.float32) for x in arrays]
    wanted = run(_xla_landmark, wide, operands, spec, platform="cpu")
    exact = arrays[0].dtype == jnp.float32
    bounds = (2e-6, 2e-6, 5e-6, 5e-6, 5e-6) if exact else (5e-3,) * 5
    for x, y, bound in zip(found, wanted, bounds, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.array_equal(np.isneginf(x), np.isneginf(y)) and not np.isnan(x).any()
        x, y = (np.where(np.isfinite(z), z, 0) for z in (x, y))
        assert np.linalg.norm(x - y) <= bound * np.linalg.norm(y)
    return found


def assert_kernels_equal_plain_xla(module, case: Case):
    out, lse, *gradients = compare(module, *build(case))
    assert out.dtype == case.dtype and lse.dtype == jnp.float32
    assert all(x.dtype == case.dtype and x.any() for x in gradients)


def assert_rows_that_see_nothing_are_zero(module):
    arrays, operands, spec = build(CASES["blocks of two, anywhere"])
    out, lse, dq, *_ = compare(module, arrays, operands, spec)
    q, k = (operands.q_index, operands.q_segments), (operands.k_index, operands.k_segments)
    same = (q[1][:, :, None] == k[1][:, None]) & (k[1] != 0)[:, None]
    empty = ~np.any(same & (k[0][:, None] < q[0][:, :, None]), -1)
    assert empty.any() and not empty.all()
    assert np.all(np.isneginf(lse) == empty[..., None])
    assert not np.any(out[empty]) and not np.any(dq[empty])


def assert_landmark_values_are_never_used(module):
    arrays, operands, spec = build(Case())
    changed = arrays.copy()
    changed[2] = arrays[2].at[:, 7::8].set(1e6)
    found = (run(module, x, operands, spec, interpret=True) for x in (arrays, changed))
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)


def register_interpreted(monkeypatch, attention, older):
    """Makes "interpreted" an implementation for CPUs, of the kernels of two backends."""
    for family, kernels in ((BACKENDS, attention), (LANDMARK, older)):
        module = types.ModuleType(f"interpreted_{kernels.__name__}")
        module.unsupported = kernels.unsupported
        for name in ("forward", "backward"):
            setattr(module, name, functools.partial(getattr(kernels, name), interpret=True))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(family, "interpreted", Backend(module.__name__, ("cpu",)))
