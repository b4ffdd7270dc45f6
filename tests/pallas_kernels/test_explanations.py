"""`explain` reports the blocks that the kernels compute, and where their sizes come from."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    Alibi,
    causal,
    chunks,
    dispatch,
    everything,
    explain,
    flash,
    landmark_attention,
    prefix,
    tables,
    window,
)
from pallas_kernels.backends.mosaic_gpu import attention as _mosaic_gpu

HEAD, TRITON_HEAD = 32, 256  # never rows or keys of a step: the products of both stay distinct
TABLE = tables.from_block_mask(np.tri(4, dtype=bool), q_block=128, k_block=128)
PATTERNS = {
    "causal": dict(mask=causal()),
    "dense": dict(mask=everything()),
    "a window and sinks": dict(mask=causal() & (window(200) | prefix(4))),
    "chunks": dict(mask=causal() & chunks(128)),
    "a caller's table": dict(mask=causal(), table=TABLE),
    "documents": dict(
        mask=causal(), q_segments=np.ones((2, 512), int), k_segments=np.ones((2, 512), int)
    ),
    "a soft cap": dict(mask=causal(), soft_cap=5.0),
    "a bias": dict(mask=causal(), bias=Alibi(np.ones(4, np.float32))),
    "few queries": dict(mask=window(40)),
}
DEVICES = {
    "cpu": None,
    "tpu": None,
    "triton": "NVIDIA A100-SXM4-40GB",
    "mosaic_gpu": "NVIDIA H100 80GB HBM3",
}
UNSUPPORTED = {("mosaic_gpu", "a bias"), ("mosaic_gpu", "few queries")}


@pytest.fixture
def on(monkeypatch):
    """Returns a function that makes this process count as one with another device."""
    with contextlib.ExitStack() as stack:

        def become(name: str):
            kind = DEVICES[name]
            platform = name if kind is None else "cuda"
            monkeypatch.setattr(dispatch, "platform", lambda: platform)
            if kind is not None:
                device = jax.sharding.AbstractDevice(
                    device_kind=kind, platform="gpu", num_cores=132
                )
                mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
                stack.enter_context(jax.sharding.use_abstract_mesh(mesh))

        yield become


def shapes(t=512, s=512, heads=4, key_heads=2, size=HEAD, dtype="bfloat16"):
    numbers = (t, heads), (s, key_heads), (s, key_heads)
    return [jax.ShapeDtypeStruct((2, length, n, size), dtype) for length, n in numbers]


def program(pattern, device):
    """Returns the gradients of attention, and its inputs."""
    implementation = "xla" if device == "cpu" else device
    options = PATTERNS[pattern] | dict(implementation=implementation)

    def gradients(q, k, v):
        def loss(q, k, v):
            return jnp.sum(flash(q, k, v, **options)[0].astype(jnp.float32))

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    size = TRITON_HEAD if device == "triton" else HEAD
    return gradients, shapes(t=3 if pattern == "few queries" else 512, size=size)


def equations(jaxpr):
    """Yields all equations of a program, inside loops, branches and kernels, too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: isinstance(x, jax.extend.core.ClosedJaxpr),
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def scores(jaxpr, head: int) -> set[tuple[int, ...]]:
    """The sizes of all products of queries and keys, the smaller number first."""
    found = (x for x in equations(jaxpr) if x.primitive.name == "dot_general")
    sizes = {tuple(sorted(x.outvars[0].aval.shape[-2:])) for x in found}
    return {pair for pair in sizes if head not in pair}


def block_sizes(jaxpr) -> dict[str, set[tuple[int, int]]]:
    """The rows of q and the keys of k that a step of each TPU kernel reads, by kernel."""
    found = {}
    for equation in equations(jaxpr):
        if equation.primitive.name != "pallas_call":
            continue
        sizes = {}
        for mapping in equation.params["grid_mapping"].block_mappings:
            for name in ("q", "k"):
                if f"['{name}']" in mapping.origin:
                    matrix = [getattr(n, "block_size", n) for n in mapping.block_shape[-2:]]
                    # [length, lanes], or [HEAD, length] where XLA stores heads along sublanes
                    sizes[name] = matrix[1] if matrix[0] == HEAD else matrix[0]
        name = equation.params["name"] or equation.params["name_and_src_info"].name
        found.setdefault(name.removeprefix("lcjax_"), set()).add((sizes["q"], sizes["k"]))
    return found


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("device", DEVICES)
def test_reported_blocks_are_those_of_the_kernels(device, pattern, on, monkeypatch):
    if (device, pattern) in UNSUPPORTED:
        pytest.skip("these kernels do not support it")
    on(device)
    function, inputs = program(pattern, device)
    launched = {}
    if device == "mosaic_gpu":
        kernels = _mosaic_gpu._kernels()
        launch = kernels.launch

        def spy(kernel, spec, x, outputs, resident, ring, programs, streamed, *rest, **more):
            launched[kernel.__name__] = spec.tiling.groups * 64, streamed.tile
            return launch(
                kernel, spec, x, outputs, resident, ring, programs, streamed, *rest, **more
            )

        monkeypatch.setattr(kernels, "launch", spy)
    dispatch.run.clear_cache()
    jaxpr = jax.make_jaxpr(function)(*inputs).jaxpr
    blocks = [x for call in explain(function, *inputs) for x in call.blocks]
    assert blocks and all(x.reason for x in blocks)
    if device == "tpu":
        found = block_sizes(jaxpr)
        assert {x.kernel: {(x.rows, x.keys)} for x in blocks} == found
    elif device == "mosaic_gpu":
        for x in blocks:
            sizes = (x.keys, x.rows) if x.kernel == "d_keys" else (x.rows, x.keys)
            assert launched.pop(x.kernel) == sizes
        assert not launched
    else:
        reported = {tuple(sorted((x.rows, x.keys))) for x in blocks}
        found = scores(jaxpr, inputs[0].shape[-1])
        # A program with XLA's attention has the loops of other platforms, too.
        assert reported == found if device == "triton" else reported <= found
    dispatch.run.clear_cache()
    if PATTERNS[pattern].keys() <= {"mask", "soft_cap", "bias"} and pattern != "few queries":
        for x in blocks:
            assert x.fraction == pytest.approx(dense_fraction(PATTERNS[pattern]["mask"], x))


def dense_fraction(mask, blocks) -> tuple[float, float]:
    """The visited fraction of all pairs of blocks, and the tested one of these, by the elements."""
    index = np.arange(512)
    seen = np.broadcast_to(np.asarray(mask.element(index[:, None], index)), (512, 512))
    sizes = 512 // blocks.queries, blocks.queries, 512 // blocks.keys, blocks.keys
    some, every = (f(seen.reshape(sizes), axis=(1, 3)) for f in (np.any, np.all))
    return some.mean(), 1 - every.sum() / some.sum()


def reasons(device, **options):
    """The reasons for the blocks of a call, by kernel."""
    inputs = shapes(**{name: options.pop(name) for name in ("t", "s", "size") if name in options})
    (call,) = explain(lambda *x: flash(*x, **options), *inputs)
    assert all(f"    {x.kernel}: " in str(call) for x in call.blocks)
    return {x.kernel: x.reason for x in call.blocks}


def test_reasons_name_the_rule_and_what_limited_the_blocks(on):
    on("cpu")
    long = reasons("cpu", mask=causal(), t=4096, s=4096)["forward"]
    assert long.startswith("512 x 512 is for more than 2048 keys on a CPU, measured")
    assert "at most 1310720 scores, which stay in the CPU's cache" in long
    assert "one block holds all queries" in reasons("cpu", mask=causal(), t=130)["forward"]
    assert "the caller's table" in reasons("cpu", mask=causal(), table=TABLE)["forward"]
    on("tpu")
    usual = "1024 rows x 1024 keys of bfloat16 heads up to 128 fit into 16 MB of VMEM"
    assert reasons("tpu", mask=causal(), t=4096, s=4096)["forward"] == usual
    short = reasons("tpu", mask=causal() & window(512), t=4096, s=4096, size=128)["forward"]
    assert "1024 x 1024 would cost" in short
    assert "one block holds all keys" in reasons("tpu", mask=causal())["forward"]
    assert "the caller's table" in reasons("tpu", mask=causal(), table=TABLE)["forward"]
    assert "hide the overhead" in reasons("tpu", t=1, s=2**17, size=128)["decode"]
    on("triton")
    usual = "128 x 64 spills no registers and fits into shared memory on sm80 for bfloat16 heads up"
    assert reasons("triton", mask=causal(), implementation="triton")["forward"].startswith(usual)
    capped = reasons("triton", soft_cap=5.0, implementation="triton")["forward"]
    assert capped.endswith("half of it with indices, segments, a soft cap or a bias in registers")
    split = reasons("triton", t=1, implementation="triton")["decode"]
    assert "8 programs share the keys of a list" in split
    on("mosaic_gpu")
    capped = reasons("mosaic_gpu", soft_cap=5.0, implementation="mosaic_gpu")["forward"]
    assert capped.endswith("registers hold two warpgroups")
    ragged = reasons("mosaic_gpu", t=512, implementation="mosaic_gpu")["forward"]
    assert ragged.endswith("a resident tile of 128 rows needs the least padding")


def test_blocks_of_traced_tables_have_no_fraction():
    def attend(q, k, v, visible):
        table = tables.from_block_mask(visible, q_block=128, k_block=128)
        return flash(q, k, v, causal(), table=table)

    (call,) = explain(attend, *shapes(), jax.ShapeDtypeStruct((4, 4), bool))
    (blocks,) = call.blocks
    assert (blocks.queries, blocks.keys, blocks.fraction) == (128, 128, None)
    assert "the visited blocks are computed on the device" in str(call)


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_landmark_attention_reports_whole_blocks(device, on):
    on(device)
    found = explain(lambda *x: landmark_attention(*x, 64), *shapes(t=4096, s=4096))
    (older,) = (x for x in found if x.call.startswith("landmark"))
    (blocks,) = older.blocks
    assert blocks.kernel == "forward" and blocks.keys % 64 == 0 and blocks.fraction.visited < 1


def test_parts_of_the_keys_are_reported(on):
    on("cpu")
    (kernel,) = reasons("cpu", t=1, splits=4)
    assert kernel == "forward, each of 4 parts"


def test_a_call_that_was_traced_before_is_reported_with_its_blocks():
    attend = functools.partial(flash, mask=causal())
    jax.eval_shape(attend, *shapes())
    (call,) = explain(attend, *shapes())
    assert [x.kernel for x in call.blocks] == ["forward"]
