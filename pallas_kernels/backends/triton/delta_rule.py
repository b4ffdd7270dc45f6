"""The gated delta rule for NVIDIA GPUs in Pallas-Triton: the recurrence over chunks.

Letters and names are those of `pallas_kernels.delta_rule`. The matrices of chunks need no state:
XLA computes them for a group of chunks at once, as in the XLA form. What is left is a few products
for one chunk after another, which XLA runs as a loop of small programs. Here it is one program: it
holds some columns of a head's state in registers and visits the chunks of a group in order, as no
column of U, O and S_next depends on another.

The backward kernel visits them from the last to the first. Of every chunk it returns dS_next, dU
and dR, with R = V - K' S. The cotangents of the matrices are products of these, again of all chunks
at once, and XLA pulls them back to the tokens.

Products of float32 inputs are three in TF32. Those of bfloat16 inputs multiply bfloat16 numbers and
sum them in float32; the state remains float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import nvidia
from pallas_kernels.backends.triton.attention import unsupported_arrays
from pallas_kernels.backends.triton.kernels import F32, next_power_of_two, plt, product
from pallas_kernels.delta_rule import Chunks, Tokens, chunk_matrices, split_tokens

CHUNK = 64
GROUP = 2048  # tokens whose matrices are in memory at once


def forward(q, k, v, log_decay, beta, state, *, keep_states: bool, interpret=False):
    """Returns out [B, T, N, V] in v's dtype, the last state, and the states of groups or None.

    Args:
      q, k, v: [B, T, N, K or V], float32 or bfloat16.
      log_decay: float32 [B, T, N] or [B, T, N, K].
      beta: float32 [B, T, N].
      state: float32 [B, N, K, V].
      keep_states: whether to return the state at the start of every group, [B, N, groups, K, V].
    """
    groups, size = _groups(Tokens(q, k, v, log_decay, beta)), v.shape[-1]
    run = functools.partial(_visit, interpret=interpret)

    def step(state, tokens):
        out, after = run(chunk_matrices(tokens, _precision(q)), state, v.dtype)
        return after, (out, state if keep_states else None)

    last, (out, states) = lax.scan(step, _padded_state(state), groups)
    if keep_states:
        states = _states_first(states)[..., : q.shape[-1], :size]
    return _tokens_first(out, v), last[..., : q.shape[-1], :size], states


def backward(q, k, v, log_decay, beta, states, d_out, d_last, *, interpret=False):
    """Returns the cotangents of q, k, v, log_decay, beta and the state."""
    tokens = Tokens(q, k, v, log_decay, beta)
    groups, d_outs = _groups(tokens), _groups(d_out.astype(v.dtype))
    states = jnp.moveaxis(_padded_state(states), 2, 0)
    precision = _precision(q)

    def step(d_state, group):
        tokens, state, d_out = group
        chunks, pull = jax.vjp(lambda x: chunk_matrices(x, precision), tokens)
        d_out = jnp.moveaxis(d_out, (1, 0, 3, 2), range(4))
        d_chunks, d_state = _pull_back(chunks, state, d_out, d_state, precision, interpret)
        (d_tokens,) = pull(d_chunks)
        return d_state, d_tokens

    d_first, d_groups = lax.scan(
        step, _padded_state(d_last), (groups, states, d_outs), reverse=True
    )
    d_tokens = (_joined(d, x) for d, x in zip(d_groups, tokens, strict=True))
    return *d_tokens, d_first[..., : q.shape[-1], : v.shape[-1]]


def unsupported(q, k, v, log_decay) -> str | None:
    """Returns why these kernels cannot run the inputs, or None."""
    return unsupported_arrays(q, k, v)


def _precision(q):
    return lax.Precision.HIGHEST if q.dtype == F32 else None


# Arrays of groups


def _groups(x):
    """[B, T, N, ...] -> [groups, B, chunks, C, N, ...], channels padded to what a program holds."""
    length = jax.tree.leaves(x)[0].shape[1]
    groups, chunks = -(-length // GROUP), -(-length // CHUNK)
    shape = groups, -(-chunks // groups), CHUNK

    def one(x):
        if x.ndim == 4:
            missing = next_power_of_two(x.shape[-1]) - x.shape[-1]
            x = jnp.pad(x, [(0, 0)] * 3 + [(0, missing)])
        return split_tokens(x, shape)

    return jax.tree.map(one, x)


def _joined(groups, x):
    """[groups, B, chunks, C, N, ...] -> the shape of x, [B, T, N, ...]."""
    groups = jnp.moveaxis(groups, 0, 1)
    tokens = groups.reshape(x.shape[0], -1, *groups.shape[4:])[:, : x.shape[1]]
    return tokens[..., : x.shape[-1]] if x.ndim == 4 else tokens


def _tokens_first(out, x):
    """[groups, chunks, B, N, C, V] -> the shape of x, [B, T, N, V]."""
    return _joined(jnp.moveaxis(out, (2, 1, 4, 3), (1, 2, 3, 4)), x)


def _states_first(states):
    """[groups, B, N, K, V] -> [B, N, groups, K, V]."""
    return jnp.moveaxis(states, 0, 2)


def _padded_state(state):
    missing = [next_power_of_two(size) - size for size in state.shape[-2:]]
    return jnp.pad(state, [(0, 0)] * (state.ndim - 2) + [(0, n) for n in missing])


# The recurrence of a group


def _visit(chunks: Chunks, state, dtype, *, saves: bool = False, interpret=False):
    """Returns out [chunks, B, N, C, V] in `dtype` and the state after the chunks.

    With `saves` also the states [chunks, B, N, K, V] at the starts of chunks, and R [chunks, B, N,
    C, V] in `dtype`.
    """
    outputs = [(chunks.v.shape, dtype), (state.shape, F32)]
    if saves:
        outputs += [((len(chunks.v), *state.shape), F32), (chunks.v.shape, dtype)]
    columns = [chunks.v.astype(dtype), state]
    return _launch(_forward_kernel, _matrices(chunks, dtype), columns, outputs, interpret)


def _pull_back(chunks: Chunks, state, d_out, d_last, precision, interpret):
    """Returns the cotangents of the chunks and of the state before them."""
    dtype, shape = d_out.dtype, d_out.shape
    _, _, states, rests = _visit(chunks, state, dtype, saves=True, interpret=interpret)
    outputs = [(states.shape, F32), (shape, dtype), (shape, dtype), (state.shape, F32)]
    columns = [d_out, d_last]
    d_states, *of_tokens, d_first = _launch(
        _backward_kernel, _matrices(chunks, dtype), columns, outputs, interpret
    )
    d_updates, d_rests, d_out, rests = (x.astype(F32) for x in (*of_tokens, d_out, rests))
    matmul = functools.partial(jnp.matmul, precision=precision)
    updates = matmul(chunks.solve, rests)
    d_decay = jnp.sum(states * d_states, -1, keepdims=True)
    if chunks.decay.shape[-2] == 1:
        d_decay = jnp.sum(d_decay, -2, keepdims=True)
    d_chunks = Chunks(
        k_start=-matmul(d_rests, states.mT),
        k_end=matmul(updates, d_states.mT),
        v=d_rests,
        solve=matmul(d_updates, rests.mT),
        decay=d_decay,
        q_start=matmul(d_out, states.mT),
        scores=matmul(d_out, updates.mT),
    )
    return d_chunks, d_first


def _matrices(chunks: Chunks, dtype) -> list:
    """Returns the matrices of chunks as kernels read them, with a decay for each key channel."""
    *lead, _, channels = chunks.k_start.shape
    matrices = chunks.k_start, chunks.k_end, chunks.q_start, chunks.solve, chunks.scores
    decay = jnp.broadcast_to(chunks.decay, (*lead, channels, 1))
    return [*(x.astype(dtype) for x in matrices), decay]


def _launch(kernel, matrices: list, columns: list, outputs: list, interpret) -> list:
    """Runs a program for every head of a row and some columns of its state.

    Args:
      matrices: arrays [chunks, B, N, ., .] that all programs of a head read.
      columns: arrays [chunks, B, N, C, V] and then [B, N, K, V].
      outputs: shapes like those of `columns`, with their dtypes.
    """
    batch, heads, channels, size = columns[-1].shape
    sizes = nvidia.delta_rule_tile(max(channels, size), matrices[0].dtype)
    width = min(sizes.columns, size)

    def block(shape, has_columns: bool):
        lead, zeros = shape[:-4], [0] * (len(shape) - 4)
        return pl.BlockSpec(
            (*lead, None, None, shape[-2], width if has_columns else shape[-1]),
            lambda i, n, b: (*zeros, b, n, 0, i if has_columns else 0),
        )

    in_specs = [block(x.shape, False) for x in matrices] + [block(x.shape, True) for x in columns]

    return pl.pallas_call(
        functools.partial(kernel, interpret),
        out_shape=[jax.ShapeDtypeStruct(*x) for x in outputs],
        grid=(size // width, heads, batch),
        in_specs=in_specs,
        out_specs=[block(shape, True) for shape, _ in outputs],
        interpret=interpret,
        name=f"lcjax_delta_rule{kernel.__name__.removesuffix('_kernel')}",
        compiler_params=plt.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
    )(*matrices, *columns)


def _product(interpret, a, b, of: int = 1):
    """Returns a times b, over axis `of` of a, in float32; b is rounded to the dtype of a."""
    return product(a, b.astype(a.dtype), 0, of, interpret)


def _forward_kernel(
    interpret, k_start, k_end, q_start, solve, scores, decay, v, state, out, last, *saved
):
    times = functools.partial(_product, interpret)

    def step(i, carry):
        rest = plt.load(v.at[i]).astype(F32) - times(plt.load(k_start.at[i]), carry)
        update = times(plt.load(solve.at[i]), rest)
        y = times(plt.load(q_start.at[i]), carry) + times(plt.load(scores.at[i]), update)
        plt.store(out.at[i], y.astype(out.dtype))
        for ref, x in zip(saved, (carry, rest), strict=False):  # none unless they are saved
            plt.store(ref.at[i], x.astype(ref.dtype))
        return plt.load(decay.at[i]) * carry + times(plt.load(k_end.at[i]), update, of=0)

    plt.store(last, lax.fori_loop(0, v.shape[0], step, plt.load(state)))


def _backward_kernel(
    interpret, k_start, k_end, q_start, solve, scores, decay, d_out, d_last,
    d_states, d_updates, d_rests, d_first,
):  # fmt: skip
    """With dS = dS_next at first: dU = tril(Q K^T D)^T dO + K'' dS, dR = (I + A)^-T dU."""
    times = functools.partial(_product, interpret)

    def step(j, d_next):
        i = d_out.shape[0] - 1 - j
        d_o = plt.load(d_out.at[i])
        d_update = times(plt.load(scores.at[i]), d_o, of=0) + times(plt.load(k_end.at[i]), d_next)
        d_rest = times(plt.load(solve.at[i]), d_update, of=0)
        for ref, x in ((d_states, d_next), (d_updates, d_update), (d_rests, d_rest)):
            plt.store(ref.at[i], x.astype(ref.dtype))
        d_state = plt.load(decay.at[i]) * d_next + times(plt.load(q_start.at[i]), d_o, of=0)
        return d_state - times(plt.load(k_start.at[i]), d_rest, of=0)

    plt.store(d_first, lax.fori_loop(0, d_out.shape[0], step, plt.load(d_last)))
