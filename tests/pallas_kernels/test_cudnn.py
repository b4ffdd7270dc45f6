"""What cuDNN is asked for and what it is not; no gradient of lse is ever dropped.

cuDNN itself does not run here: `forward` and `backward` compute what JAX says of its primitives.
"""

import dataclasses
import functools
import importlib.util
import json
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import Case, oracle, relative_error
from attention_oracle import run as results_of

from pallas_kernels import Layout, causal, dispatch, everything, flash, prefix, window
from pallas_kernels.backends import cudnn as _cudnn
from pallas_kernels.biases import Alibi
from pallas_kernels.dispatch import BACKENDS, Operands, Spec
from pallas_kernels.tables import from_mask

fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")

SQUARE = dict(batch=2, t=67, s=67, size=16, v_size=16, dtype="bfloat16")
CASES = {
    "causal, grouped heads": Case(**SQUARE, mask=causal()),
    "window": Case(**SQUARE, mask=causal() & window(9), scale=0.5),
    "window first": Case(**SQUARE, mask=window(3) & causal()),
    "dense, fewer queries, two head sizes": Case(
        **SQUARE | dict(t=20, v_size=24, dtype="float16"), mask=everything()
    ),
}


@pytest.fixture
def installed(monkeypatch):
    """A Hopper GPU with cuDNN 9.11, as far as JAX's checks ask."""
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91100)
    monkeypatch.setattr(fused, "check_compute_capability", lambda least: float(least) <= 9.0)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda other: other == "9.0")


def logits(q, k, options):
    """[B, N, T, S]; with a window, each token sees (pos - sliding_window_length, pos]."""
    k, size = jnp.repeat(k, q.shape[2] // k.shape[2], 2), options["sliding_window_length"]
    found = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k.astype(jnp.float32))
    behind = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
    hidden = (behind < 0) & (options["mask_type"] == fused.MaskType.CAUSAL)
    hidden |= behind >= (q.shape[1] if size is None else size)
    return jnp.where(hidden, -jnp.inf, options["scale"] * found)


def values(p, v):
    v = jnp.repeat(v.astype(jnp.float32), p.shape[1] // v.shape[2], 2)
    return jnp.einsum("bnts,bsnh->btnh", p, v)


def forward(q, k, v, *absent, is_training, **options):
    assert is_training and len(absent) == 7
    found = logits(q, k, options)
    lse = jax.nn.logsumexp(found, -1)  # [B, N, T]
    return [values(jnp.exp(found - lse[..., None]), v).astype(q.dtype), lse]


def backward(calls, q, k, v, *rest, **options):
    *absent, lse, out, d_out = rest
    assert len(absent) == 7 and lse.dtype == jnp.float32
    calls.append(options)
    out, d_out = (x.astype(jnp.float32) for x in (out, d_out))
    di = jnp.sum(out * d_out, -1)

    def total(q, k, v):  # its gradient by the logits is p * (dp - di)
        p = jnp.exp(logits(q, k, options) - lse[..., None])
        return jnp.sum(values(p, v) * d_out) - jnp.sum(jnp.sum(p, -1).swapaxes(1, 2) * di)

    return jax.grad(total, (0, 1, 2))(q, k, v)


@pytest.fixture
def described(installed, monkeypatch):
    """`flash(implementation="cudnn")` runs here; yields the calls of the backward primitive."""
    calls = []
    for name, bind in (("fwd", forward), ("bwd", functools.partial(backward, calls))):
        primitive = types.SimpleNamespace(bind=bind)
        monkeypatch.setattr(fused, f"_dot_product_attention_{name}_p_wrapper", primitive)
    monkeypatch.setitem(BACKENDS, "cudnn", BACKENDS["cudnn"]._replace(platforms=("cpu",)))
    dispatch.run.clear_cache()
    yield calls
    dispatch.run.clear_cache()


@pytest.mark.parametrize("of_lse", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_dense_formulas(described, name, of_lse):
    case = dataclasses.replace(CASES[name], of_lse=of_lse)
    found, expected = results_of(case, "cudnn"), oracle(case)
    for key, value in expected.items():
        assert relative_error(found[key], value) < 5e-3, key
    assert bool(described) != of_lse  # whether its own backward pass ran


def plain(weight, q, k, v, implementation):
    """A loss that depends on lse where `weight` is not None."""
    out, lse = flash(q, k, v, causal(), implementation=implementation)
    total = jnp.sum(jnp.sin(out.astype(jnp.float32)))
    return total if weight is None else total + weight * jnp.sum(jnp.cos(lse))


def scanned(weight, q, k, v, implementation):
    def step(carry, _):
        return carry, plain(weight, q, carry, v, implementation)

    return jnp.sum(jax.lax.scan(step, k, None, length=2)[1])


WRAPPERS = {
    "plain": lambda f: f,
    "compiled": lambda f: jax.jit(f, static_argnums=(0, 4)),
    "rematerialised": lambda f: jax.checkpoint(
        f, static_argnums=(0, 4), policy=jax.checkpoint_policies.save_only_these_names("attention")
    ),
}


@pytest.mark.parametrize(
    ("wrapper", "loss"), [*((name, plain) for name in WRAPPERS), ("rematerialised", scanned)]
)
def test_cudnn_computes_gradients_only_where_nothing_depends_on_lse(described, loss, wrapper):
    loss = WRAPPERS[wrapper](loss)
    gradient = jax.grad(loss, (1, 2, 3))
    compiled = jax.jit(gradient, static_argnums=(0, 4))
    for weight, own in ((2.0, False), (None, True)):
        run = compiled if wrapper == "rematerialised" else gradient  # also outside of a program
        actual = run(weight, *ARRAYS, "cudnn")
        for x, y in zip(actual, compiled(weight, *ARRAYS, "reference"), strict=True):
            assert relative_error(x, y) < 1e-2
        assert bool(described) == own


ARRAYS = np.random.default_rng(0).normal(size=(3, 2, 12, 2, 8)).astype(jnp.bfloat16)


def test_on_a_mesh_too_it_computes_gradients_only_where_nothing_depends_on_lse(described):
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layout = Layout(mesh, ("rows",), "heads")

    def loss(weight, arrays, layout, name):
        out, lse = flash(*arrays, causal(), layout=layout, implementation=name)
        total = jnp.sum(jnp.sin(out.astype(jnp.float32)))
        return total if weight is None else total + weight * jnp.sum(jnp.cos(lse))

    for weight, own in ((2.0, False), (None, True)):
        gradient = jax.jit(jax.grad(functools.partial(loss, weight)), static_argnums=(1, 2))
        actual, expected = gradient(ARRAYS, layout, "cudnn"), gradient(ARRAYS, None, "reference")
        for x, y in zip(actual, expected, strict=True):
            assert relative_error(x, y) < 1e-2
        assert bool(described) == own


def shapes(t=64, s=64, heads=(4, 2), size=64, v_size=None, dtype="bfloat16"):
    sizes = ((t, heads[0], size), (s, heads[1], size), (s, heads[1], v_size or size))
    return [jax.ShapeDtypeStruct((2, *x), dtype) for x in sizes]


PLACES = jax.ShapeDtypeStruct((1, 64), "int32")
TABLE = from_mask(causal(), queries=64, keys=64, q_block=64, k_block=64)


@pytest.mark.parametrize(
    ("inputs", "operands", "spec", "reason"),
    [
        (dict(dtype="float32"), {}, {}, "all float16, they are float32"),
        ({}, dict(q_index=PLACES), {}, "does not support q_index"),
        ({}, dict(q_segments=PLACES, k_segments=PLACES), {}, "support q_segments, k_segments"),
        ({}, dict(bias=Alibi(jnp.ones(4))), {}, "does not support bias"),
        ({}, {}, dict(soft_cap=30.0), "does not support soft_cap"),
        ({}, dict(table=TABLE), {}, "does not support table"),
        ({}, {}, dict(mask=causal() & prefix(4)), "supports only the masks everything"),
        ({}, {}, dict(mask=window(4)), "supports only the masks"),  # it shows the keys ahead
        (dict(s=128), {}, {}, "64 queries and 128 keys is not square"),
        (dict(size=60), {}, {}, "a multiple of 8, but got 60"),
        (dict(size=264), {}, {}, "head dim must be <= 256"),
        (dict(v_size=60), {}, {}, "a multiple of 8, but got 60"),
        (dict(v_size=512), {}, {}, "head dim must be <= 256"),
    ],
)
def test_unsupported_calls_return_reason(installed, inputs, operands, spec, reason):
    spec = Spec(**{"mask": causal(), "scale": 1.0} | spec)
    assert reason in _cudnn.unsupported(*shapes(**inputs), Operands(**operands), spec)
    for mask in (everything(), causal(), causal() & window(4)):
        assert _cudnn.unsupported(*shapes(), Operands(), Spec(mask, 1.0)) is None


def test_older_gpus_are_rejected(installed, monkeypatch):
    monkeypatch.setattr(fused, "check_compute_capability", lambda least: float(least) <= 7.5)
    reason = _cudnn.unsupported(*shapes(), Operands(), Spec(causal(), 1.0))
    assert reason == "cuDNN's fused attention is for GPUs of compute capability 8.0 or above"


def test_without_cudnn_the_reason_is_jaxs_own():
    wheels = importlib.util.find_spec("nvidia")
    if wheels and any((Path(x) / "cudnn").exists() for x in wheels.submodule_search_locations):
        pytest.skip("cuDNN is installed, which torch's wheels bring")
    reason = _cudnn.unsupported(*shapes(), Operands(), Spec(causal(), 1.0))
    # The second is that of the CUDA plugin where it is installed without cuDNN.
    assert reason in ("cuDNN is not detected.", "cuDNN not found.")


def test_a_cotangent_of_lse_is_rejected():
    x = jnp.ones((1, 8, 1, 8), "bfloat16")
    with pytest.raises(TypeError, match="does not support a cotangent of lse"):
        lse = jnp.zeros((1, 8, 1))
        _cudnn.backward(x, x, x, x, lse, x, lse, Operands(), Spec(causal(), 1.0))


@pytest.mark.parametrize(
    ("mask", "mask_type", "size"),
    [(everything(), "NO_MASK", 0), (causal(), "CAUSAL", 0), (causal() & window(9), "CAUSAL", 9)],
)
def test_both_passes_lower_to_cudnns_calls_with_the_causal_mask_beside_a_window(
    mask, mask_type, size
):
    q, k, v = shapes(v_size=32)
    out, lse = (
        jax.ShapeDtypeStruct((*q.shape[:3], *x), y) for x, y in (((32,), q.dtype), ((), "float32"))
    )
    spec = Spec(mask, 0.25)
    calls = {
        "__cudnn$fmhaSoftmax": (_cudnn.forward, (q, k, v)),
        "__cudnn$fmhaSoftmaxBackward": (_cudnn.backward, (q, k, v, out, lse, out, None)),
    }
    for name, (call, arrays) in calls.items():
        call = functools.partial(call, operands=Operands(), spec=spec)
        text = jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        (found,) = (x for x in text.splitlines() if f"@{name}(" in x)
        config = json.loads(
            re.search(r'backend_config = "(.*?)"[,}]', found)[1].replace("\\22", '"')
        )
        config = config["cudnn_fmha_backend_config"]
        assert config["mask_type"] == mask_type and config["fmha_scale"] == 0.25
        assert config["sliding_window_length"] == size


def test_flash_rejects_cudnn_on_other_platforms():
    q = jnp.ones((1, 64, 2, 64), "bfloat16")
    with pytest.raises(ValueError, match="it runs on cuda and this process runs on cpu"):
        flash(q, q, q, causal(), implementation="cudnn")
    assert np.all(flash(q, q, q, causal())[0] == 1.0)
