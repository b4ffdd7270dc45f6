"""Inputs, the float64 oracle and comparisons for tests of the gated delta rule."""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from pallas_kernels import Layout, gated_delta_rule
from pallas_kernels.delta_rule import BACKENDS
from pallas_kernels.dispatch import Backend

B, T, N, K, V = 2, 77, 4, 12, 6
# Padding before, in, between and after documents; a document of one token; chunk boundaries (16,
# 32, 64) inside documents, at their first token and in padding.
SEGMENTS = np.array(
    [[0] * 5 + [1] * 27 + [2] + [0] * 4 + [5] * 10 + [0] * 3 + [5] * 14 + [7] * 4 + [0] * 9,
     [1] * 20 + [2] * 3 + [3] * 41 + [4] * 13],
    np.int32,
)  # fmt: skip
NAMES = "q", "k", "v", "log_decay", "beta", "state"


def inputs(kind="random", per_channel=False, t=T, b=B, seed=0):
    """q, k, v, log_decay, beta and state in float64."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape)

    q, k, v = normal(b, t, N, K), normal(b, t, N, K), normal(b, t, N, V)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    shape = (b, t, N, K) if per_channel else (b, t, N)
    log_decay, beta = -np.exp(2 * normal(*shape) - 2), 1 / (1 + np.exp(-normal(b, t, N)))
    if kind == "equal keys":
        k, beta, log_decay = np.broadcast_to(k[:, :1], k.shape), np.ones_like(beta), 0 * log_decay
    elif kind == "strong decays":
        log_decay = np.where(rng.random(shape) < 0.3, -50.0, log_decay)
        log_decay = np.where(rng.random(shape) < 0.1, -1e5, log_decay)
    elif kind == "only strong decays":
        log_decay = np.full(shape, -50.0)
    return q, k, v, log_decay, beta, normal(b, N, K, V)


def recurrence(q, k, v, log_decay, beta, state, segments):
    """The formula of the module, token by token."""

    def step(carry, token):
        state, document = carry
        q, k, v, log_decay, beta, segment = token
        is_token = segment != 0
        begins = is_token & (document != 0) & (segment != document)
        before = jnp.where(begins[:, None, None, None], 0, state)
        decay = jnp.exp(log_decay)
        decayed = before * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
        update = beta[..., None] * (v - jnp.einsum("BNK,BNKV->BNV", k, decayed))
        after = decayed + jnp.einsum("BNK,BNV->BNKV", k, update)
        state = jnp.where(is_token[:, None, None, None], after, state)
        out = jnp.where(is_token[:, None, None], jnp.einsum("BNK,BNKV->BNV", q, state), 0)
        return (state, jnp.where(is_token, segment, document)), out

    tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, log_decay, beta, segments)]
    start = state, jnp.zeros(len(segments), segments.dtype)
    (state, _), out = lax.scan(step, start, tokens)
    return jnp.moveaxis(out, 0, 1), state


def cotangents(arrays):
    rng = np.random.default_rng(9)
    return rng.normal(size=arrays[2].shape), rng.normal(size=arrays[5].shape)


def both(run, arrays, dtype):
    """out, the last state, and the gradients for fixed cotangents of both."""
    weights = [jnp.asarray(x, dtype) for x in cotangents(arrays)]

    @jax.jit
    def program(arrays):
        results, pull = jax.vjp(run, *arrays)
        return *results, pull(tuple(weights))

    return jax.device_get(program([jnp.asarray(x, dtype) for x in arrays]))


@functools.cache
def oracle(kind, per_channel, is_packed, t=T):
    segments = SEGMENTS if is_packed else np.ones((B, t), np.int32)
    with jax.enable_x64(True):
        run = functools.partial(recurrence, segments=jnp.asarray(segments))
        return both(run, inputs(kind, per_channel, t), jnp.float64)


@functools.cache
def weak_after_strong():
    """Inputs with weak decays after a strong one, and their results by the recurrence."""
    arrays = [np.asarray(x) for x in inputs(b=1, t=64)]
    arrays[3] = np.full_like(arrays[3], -0.01)
    arrays[3][:, 3] = -1e5
    with jax.enable_x64(True):
        run = functools.partial(recurrence, segments=jnp.ones((1, 64), int))
        return arrays, both(run, arrays, jnp.float64)


def rule(is_packed=False, **options):
    segments = jnp.asarray(SEGMENTS) if is_packed else None

    def run(*arrays):
        return gated_delta_rule(*arrays[:5], state=arrays[5], segments=segments, **options)

    return run


def assert_agree(actual, expected, bound=2e-6):
    """Compares out, state and gradients, each by its norm."""
    names = "out", "last state", *(f"gradient of {name}" for name in NAMES)
    pairs = zip([*actual[:2], *actual[2]], [*expected[:2], *expected[2]], strict=True)
    for name, (a, b) in zip(names, pairs, strict=True):
        assert a.shape == b.shape and np.all(np.isfinite(a)), name
        error = np.linalg.norm(a - b)
        assert error <= bound * np.linalg.norm(b) + 1e-12, f"{name}: {error / np.linalg.norm(b)}"


def layout(rows=1, heads=1, length=1, kind=AxisType.Auto, **options):
    shape, names = (rows, heads, length), ("rows", "heads", "length")
    devices = jax.devices()[: rows * heads * length]
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * 3, devices=devices)
    return Layout(mesh, ("rows",), "heads", "length", **options)


# Parts of 10 and 40 tokens: devices without a token before, inside and between documents, without
# the start of a document, with several; padding at both ends of parts.
WIDE = 80
PACKED = np.array(
    [[0] * 13 + [1] * 3 + [2] * 32 + [0] * 14 + [3] * 7 + [0] * 11,
     [1] * 30 + [2] * 3 + [0] * 2 + [4] * 10 + [0] * 17 + [4] * 18],
    np.int32,
)  # fmt: skip


@functools.cache
def on_one_device(per_channel, is_packed):
    return both(wide(is_packed), inputs("random", per_channel, WIDE), jnp.float32)


def wide(is_packed, **options):
    segments = jnp.asarray(PACKED) if is_packed else None

    def run(*arrays):
        return gated_delta_rule(
            *arrays[:5], state=arrays[5], segments=segments, chunk=16, **options
        )

    return run


def register_interpreted(monkeypatch, kernels, *, needs_gpu=False):
    """Makes "interpreted" an implementation for CPUs, of the kernels of a module."""
    module = types.ModuleType(f"interpreted_{kernels.__name__}")
    module.GROUP = kernels.GROUP
    module.unsupported = (lambda *arrays: None) if needs_gpu else kernels.unsupported
    for name in ("forward", "backward"):
        setattr(module, name, functools.partial(getattr(kernels, name), interpret=True))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(BACKENDS, "interpreted", Backend(module.__name__, ("cpu",)))
