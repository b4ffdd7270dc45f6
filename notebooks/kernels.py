# ---
# jupyter:
#   accelerator: TPU
#   colab:
#     gpuType: V5E1
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
# # The attention kernels alone
#
# You will see masks written as expressions, the blocks of keys that a kernel visits because of
# them, gradients beside those of `jax.nn.dot_product_attention`, the memory of both, and their
# speed on the device of this session: a TPU, a GPU or a CPU. A minute or two.
#
# Runs on: Colab TPU v5e-1, any GPU or CPU. How to open it: `docs/notebooks.md` of the repository.

# %% [markdown]
# Upload a wheel of lcjax beside this notebook first (`pip wheel --no-deps -w dist .` in a clone
# makes it), or put its path into `LCJAX`: lcjax is on no package index yet.
#
# Run this cell first, before anything imports jax: then no restart is needed. On Colab it
# replaces jax, jaxlib, libtpu and flax, and leaves numpy, matplotlib and torch as they are. (jax
# 0.12 would replace numpy, which needs a restart.)

# %% tags=["install"]
from glob import glob

LCJAX = (glob("lcjax-*.whl") or ["lcjax"])[0]
JAX = "jax[tpu]==0.11.2"  # on a GPU jax[cuda12]==0.11.2, on a CPU jax==0.11.2
# %pip install --quiet "{LCJAX}" "{JAX}"

# %% [markdown]
# All sizes are here. `SMOKE` is for tests, which run these cells on two CPU cores.

# %% tags=["config"]
import os

SMOKE = bool(os.environ.get("SMOKE"))
LENGTH = 1024 if SMOKE else 8192  # tokens in the cells about memory and speed
HEADS, KV_HEADS, HEAD_DIM = (4, 2, 64) if SMOKE else (16, 4, 128)
WINDOW = LENGTH // 8
BLOCK = 128 if SMOKE else 512  # of queries and of keys
DTYPE = "float32" if SMOKE else "bfloat16"
ROUNDS = 3 if SMOKE else 20

# %%
import jax

print(jax.__version__, jax.devices())

# %% [markdown]
# ## A mask is an expression
#
# Never an array. `&`, `|` and `~` combine it from atoms: who is not later, who is near, which
# keys are first, which chunk both are in.

# %% tags=["config"]
from pallas_kernels import causal, chunks, prefix, window

masks = {
    "causal": causal(),
    "a window": causal() & window(WINDOW),
    "window and first keys": causal() & (window(WINDOW) | prefix(4)),
    "chunks and a window": causal() & (chunks(WINDOW) | window(WINDOW // 2)),
}

# %%
for name, mask in masks.items():
    print(f"{name:22} {mask}")

# %% [markdown]
# ## The blocks that a kernel visits
#
# Keys are read in blocks. A block that no query sees is not read, and one that all queries see
# needs no test of its elements. Both follow from the expression, in the time of the blocks and
# not of the pairs of tokens.

# %%
from IPython.display import Image

from lcjax import pictures
from pallas_kernels import tables

sizes = {"queries": LENGTH, "keys": LENGTH, "q_block": LENGTH // 32, "k_block": LENGTH // 32}
block_tables = {name: tables.from_mask(mask, **sizes) for name, mask in masks.items()}
Image(pictures.table_picture(block_tables, "runs/kernels/blocks.png"))

# %% [markdown]
# White blocks cost nothing. Dark ones are read without a test, light ones with one: they are the
# edges.

# %% [markdown]
# ## Attention, and which implementation computes it
#
# `flash` has the axes and the scale of `jax.nn.dot_product_attention`: queries [B, T, N, H], keys
# and values [B, S, K, H]. It returns the output and the log-sum-exp of every query's logits.

# %% tags=["config"]
import jax

from pallas_kernels import flash

q = jax.ShapeDtypeStruct((1, LENGTH, HEADS, HEAD_DIM), DTYPE)
k = jax.ShapeDtypeStruct((1, LENGTH, KV_HEADS, HEAD_DIM), DTYPE)


def attend(q, k, v):
    return flash(q, k, v, masks["window and first keys"])[0]


def gradients(q, k, v):
    return jax.grad(lambda *x: attend(*x).astype("float32").sum(), argnums=(0, 1, 2))(q, k, v)


PROGRAMS = {"forward": (attend, (q, k, k)), "gradients": (gradients, (q, k, k))}

# %%
from pallas_kernels import explain

for name, (function, arguments) in PROGRAMS.items():
    print(name, *explain(function, *arguments), sep="\n  ")

# %% [markdown]
# The lines name what runs here and what does not, with the reason. On a TPU it is a Pallas
# kernel, on a CPU blocks of XLA, on a GPU what was measured or has passed a self-check there.

# %% [markdown]
# ## Gradients beside the dense formula
#
# An odd length in float32, so that blocks do not divide it. The dense side gets the mask as an
# array.

# %%
import jax.numpy as jnp

keys = jax.random.split(jax.random.key(0), 4)
shapes = [(2, 301, HEADS, HEAD_DIM), *2 * [(2, 301, KV_HEADS, HEAD_DIM)], (2, 301, HEADS, HEAD_DIM)]
*small, weights = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]
order = jnp.arange(301)

for name, mask in masks.items():
    seen = mask.element(order[:, None], order[None])[None, None]
    sides = (
        lambda q, k, v: flash(q, k, v, mask)[0],
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=seen),
    )
    with jax.default_matmul_precision("highest"):
        ours, dense = (
            jax.jit(jax.value_and_grad(lambda *x: (f(*x) * weights).sum(), (0, 1, 2)))(*small)
            for f in sides
        )
    gaps = [float(jnp.abs(a - b).max()) for a, b in zip(ours[1], dense[1])]
    print(f"{name:22} largest difference of dq, dk, dv: {', '.join(f'{x:.1e}' for x in gaps)}")
    assert max(gaps) < 1e-3

# %% [markdown]
# Differences are roundings of float32.

# %% [markdown]
# ## Memory
#
# What a compiled program needs beside its inputs and outputs. The dense side holds a number for
# each pair of tokens and each head; the kernel holds none.


# %%
def dense(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def flash_causal(q, k, v):
    return flash(q, k, v, causal())[0]


def temporary_bytes(function, length):
    shapes = [jax.ShapeDtypeStruct((1, length, *x.shape[2:]), DTYPE) for x in (q, k, k)]
    return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


print("tokens   flash, MB   jax.nn, MB")
for length in (LENGTH // 4, LENGTH // 2, LENGTH):
    sizes = [temporary_bytes(function, length) / 1e6 for function in (flash_causal, dense)]
    print(f"{length:6,} {sizes[0]:11,.1f} {sizes[1]:12,.1f}")

# %% [markdown]
# Twice the tokens: twice the memory on the left, four times on the right.

# %% [markdown]
# ## Speed
#
# The two sides take turns, so that what else the machine does meets both. The median of all
# rounds counts; below 1 `jax.nn` is faster.

# %%
import statistics
import time

arrays = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, (q, k, k))]


def seconds(function):
    start = time.perf_counter()
    jax.block_until_ready(function(*arrays))
    return time.perf_counter() - start


def backward(function):
    return jax.grad(lambda *x: function(*x).astype("float32").sum(), argnums=(0, 1, 2))


for name, wrap in {"forward": lambda f: f, "forward and backward": backward}.items():
    ours, other = (jax.jit(wrap(function)) for function in (flash_causal, dense))
    seconds(ours), seconds(other)  # compiles
    rounds = [(seconds(ours), seconds(other)) for _ in range(ROUNDS)]
    median = [1e3 * statistics.median(column) for column in zip(*rounds)]
    ratio = statistics.median(b / a for a, b in rounds)
    print(f"{name:21} flash {median[0]:8.2f} ms, jax.nn {median[1]:8.2f} ms: {ratio:.2f}x")

# %% [markdown]
# Times of one device at one length. What a window saves: put `masks["a window"]` into
# `flash_causal`.

# %% [markdown]
# ## Blocks chosen by the data
#
# A table can also come from a computation: here every block of queries reads the two blocks of
# keys that fit its mean best, and those nearby. New data compile nothing new.

# %% tags=["config"]
from pallas_kernels import tables


def sparse(q, k, v):
    blocks = LENGTH // BLOCK
    q_mean = q.reshape(1, blocks, BLOCK, KV_HEADS, -1, HEAD_DIM).mean((2, 4))
    k_mean = k.reshape(1, blocks, BLOCK, KV_HEADS, HEAD_DIM).mean(2)
    best = jax.lax.top_k((q_mean.swapaxes(1, 2) @ k_mean.transpose(0, 2, 3, 1)), 2)[1]
    near = causal() & window(BLOCK)
    table = tables.from_top_k(best, keys=LENGTH, q_block=BLOCK, k_block=BLOCK, also=near)
    return flash(q, k, v, causal(), table=table)[0]


PROGRAMS["chosen blocks"] = sparse, (q, k, k)

# %%
out = jax.jit(sparse)(*arrays)
print(out.shape, "visited blocks are chosen while the program runs")
print(*explain(sparse, *arrays), sep="\n")

# %% [markdown]
# More of the kernels (packed documents, decoding, biases, meshes): `docs/kernels.md`.
