"""Teaches Pallas' GPU interpreter what it lacks, and that a matrix unit takes its time.

As of jax 0.12 it multiplies tiles in shared memory alone, unseen by its race detector, and knows no
`run_state`. Here a left factor may be values in registers, and sums may start from values. To the
race detector a product reads its tiles until the warpgroup awaits it: who frees them before that,
or writes them without a fence, is found.
"""

import functools
from collections import defaultdict
from types import SimpleNamespace

import jax
from jax._src import callback
from jax._src.pallas.mosaic.interpret.utils import JaxprEnv
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret import JaxprInterpreter
from jax._src.state.discharge import run_state_p
from jax._src.state.types import AbstractRef
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Literal

REGISTERS = shared_memory.get_memory_space_idx(plgpu.REGS)
known = SimpleNamespace(
    interpret=JaxprInterpreter.interpret,
    factors=JaxprInterpreter._interpret_wgmma_ref_p,
    wgmma=gpu_callbacks.wgmma,
    load=gpu_callbacks.wgmma_accumulator_deref,
    detector=gpu_callbacks.GPURaceDetectionState,
)
pending = defaultdict(list)  # by warpgroup: clocks of its products under way, oldest first
detectors = []


def teach(monkeypatch) -> None:
    monkeypatch.setattr(JaxprInterpreter, "interpret", interpret)
    monkeypatch.setattr(JaxprInterpreter, "_interpret_wgmma_ref_p", factors)
    monkeypatch.setattr(gpu_callbacks, "wgmma", wgmma)
    monkeypatch.setattr(gpu_callbacks, "wgmma_accumulator_deref", load)
    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", detector)
    pending.clear()
    detectors.clear()


def detector(*args, **options):
    """One for each kernel: the interpreter keeps that of the last alone."""
    detectors.append(known.detector(*args, **options))
    return detectors[-1]


def races_found() -> bool:
    """In any kernel since it was taught."""
    assert detectors, "no kernel was interpreted"
    return any(x.races_found for x in detectors)


def interpret(self, jaxpr, token, *values):
    """One equation at a time where some are ours."""
    ours = {run_state_p: run_state, primitives.wgmma_wait_p: wait}
    if not any(eqn.primitive in ours for eqn in jaxpr.eqns):
        return known.interpret(self, jaxpr, token, *values)
    env = JaxprEnv(vars=jaxpr.constvars + jaxpr.invars, values=values)
    for eqn in jaxpr.eqns:
        if eqn.primitive in ours:
            token, found = ours[eqn.primitive](self, eqn, token, env.read_many(eqn.invars))
        else:
            names = list(dict.fromkeys(x for x in eqn.invars if not isinstance(x, Literal)))
            alone = dict(constvars=[], invars=names, eqns=[eqn], outvars=eqn.outvars)
            alone = SimpleNamespace(**alone)
            token, found = known.interpret(self, alone, token, *env.read_many(names))
        env.write_many(eqn.outvars, found)
    return token, env.read_many(jaxpr.outvars)


def run_state(self, eqn, token, values):
    """Values become references for as long as it runs; products end with it."""
    body = eqn.params["jaxpr"]
    held = [not isinstance(x.aval, AbstractRef) for x in eqn.invars]
    refs, found = [], []
    for value, hold in zip(values, held, strict=True):
        if hold:
            token, value = allocate(self, eqn, token, value)
        refs.append(value)
    token, _ = self.interpret(body, token, *refs)
    for ref, value, hold in zip(refs, eqn.outvars, held, strict=True):
        if hold:
            token, value = call(
                self, eqn, load, token, value.aval, wait_n=0, acc_allocation_key_as_array=ref
            )
            token = free(self, eqn, token, ref)
        found.append(value)
    return token, found


def factors(self, eqn, token, read):
    """A left factor in registers is a reference while the product is issued."""
    if isinstance(eqn.invars[1].aval, AbstractRef):
        return known.factors(self, eqn, token, read)
    total, left, *others = read()
    token, ref = allocate(self, eqn, token, left)
    token, found = known.factors(self, eqn, token, lambda: [total, ref, *others])
    return free(self, eqn, token, ref), found


def wait(self, eqn, token, _):
    """wgmma_wait."""
    return call(self, eqn, await_products, token, n=eqn.params["n"]), []


def allocate(self, eqn, token, value):
    """A reference to registers that hold the value."""
    token, request = gpu_callbacks.call_make_allocation_request_array(
        token=token, compute_unit=self.thread, memory_space_id=REGISTERS
    )
    where = self.mesh_location, self.thread
    return gpu_callbacks.call_allocate_buffer(token, *where, request, value, eqn.source_info)


def free(self, eqn, token, ref):
    where = self.mesh_location, self.thread
    return gpu_callbacks.call_deallocate_buffer(token, *where, ref, eqn.source_info)


def call(self, eqn, function, token, *result, **options):
    """Runs a function of this warpgroup when its turn comes: the token (and a result)."""
    function = functools.partial(function, source_info=eqn.source_info)
    like = gpu_callbacks.TOKEN_SHAPE_DTYPE
    where = dict(mesh_location=self.mesh_location, thread=self.thread)
    like = (like, *result) if result else like
    return callback.io_callback(function, like, token=token, **where, **options)


@gpu_callbacks.fail_on_exception
def wgmma(*, thread, mesh_location, source_info, **options):
    """Computed at once, as the interpreter has it; its reads go by a clock of their own."""
    kept = gpu_callbacks._get_shared_memory()
    clock = kept.incr_clock(thread)
    clock.inc(kept.get_next_tma_thread_id())
    for side in "ab":
        key = gpu_callbacks.HostAllocationKey.from_array(options[f"{side}_allocation_key_as_array"])
        if int(key.memory_space_id) != REGISTERS:
            transforms = gpu_callbacks._remove_noop_transforms(options[f"{side}_transforms"])
            tile = kept.access(key, jax.tree.map(int, transforms))
            now = clock.async_smem_clock.copy()
            gpu_callbacks.get_races().check_read(thread, now, key, tile, source_info)
    pending[thread].append(clock)
    where = dict(thread=thread, mesh_location=mesh_location, source_info=source_info)
    return known.wgmma(**where, **options)


@gpu_callbacks.fail_on_exception
def await_products(*, token, thread, n, **_):
    """Until at most n products of this warpgroup are under way."""
    kept = gpu_callbacks._get_shared_memory()
    while len(pending[thread]) > n:
        with kept.lock:
            kept.clocks[thread].update(pending[thread].pop(0))
    return token


def load(*, token, thread, wait_n, **options):
    """The value of a sum, after the products that were to be awaited."""
    if wait_n is not None:
        await_products(token=token, thread=thread, n=int(wait_n))
    return known.load(token=token, thread=thread, wait_n=wait_n, **options)
