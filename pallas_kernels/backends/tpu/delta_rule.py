"""The gated delta rule for TPU: one kernel forward, one backward, for a decay of each token.

Letters and formulas are those of `pallas_kernels.delta_rule`. A step of the grid holds the tokens
of a group for some heads; the state stays in VMEM from step to step. A group is some chunks of
`CHUNK` tokens. Products of float32 inputs have full precision. Those of bfloat16 inputs multiply
bfloat16 numbers and sum them in float32; A, (I + A)^-1 and the state remain float32.

The forward pass for gradients also writes the state at the start of every group. The backward
kernel visits groups from the last to the first. It computes a group again and pulls the cotangents
back through it by `jax.vjp`, which runs while the kernel is traced: `_group` is the source of both.

(I + A) U = R is solved in two blocks of `SOLVED` tokens, each by the inverse of its matrix. That
begins with blocks of 16 tokens on the diagonal, by forward substitution in all of them at once.
They double in size as in the XLA form, by products of the rows of every second block. The blocks of
16 lie side by side, each in its own lanes. Nothing is differentiated through an inverse: the
cotangent of A is -dR U^T with dR = (I + A)^-T dU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends.tpu import grid
from pallas_kernels.dispatch import unsupported_dtypes

F32, BF16 = jnp.float32, jnp.bfloat16
CHUNK = 128
GROUP = 256  # tokens of a step
HEADS = 4  # of a step: the products of one fill the waits of another
LARGEST_HEAD = 256
BLOCK = 16  # tokens of the blocks that forward substitution inverts
SOLVED = 64  # tokens of the largest blocks that are inverted
LANES = 128


def forward(q, k, v, log_decay, beta, state, *, keep_states: bool, interpret=False):
    """Returns out [B, T, N, V] in v's dtype, the last state, and the states of groups or None.

    Args:
      q, k, v: [B, T, N, K or V], float32 or bfloat16.
      log_decay, beta: float32 [B, T, N]; log_decay is finite.
      state: float32 [B, N, K, V].
      keep_states: whether to return the state at the start of every group, [B, N, groups, K, V].
    """
    x = Sizes.of(q, v)
    arrays = *(x.heads_first(y) for y in (q, k, v)), x.gates(log_decay, beta), state
    tokens, of_state, of_states = x.blocks(reverse=False)
    shapes = [(x.tokens_shape(x.value), v.dtype), (state.shape, F32)]
    specs = [tokens(x.value), of_state]
    if keep_states:
        shapes.append(((*state.shape[:2], x.groups, *state.shape[2:]), F32))
        specs.append(of_states)
    results = _run(
        functools.partial(_forward_kernel, x), "lcjax_delta_rule_forward", x, arrays,
        [tokens(x.key), tokens(x.key), tokens(x.value), tokens(None), of_state],
        shapes, specs, interpret,
    )  # fmt: skip
    out, last, states = *results, *[None] * (not keep_states)
    return x.tokens_first(out), last, states


def backward(q, k, v, log_decay, beta, states, d_out, d_last, *, interpret=False):
    """Returns the cotangents of q, k, v, log_decay, beta and the state."""
    x = Sizes.of(q, v)
    d_out = x.heads_first(d_out.astype(v.dtype))
    arrays = *(x.heads_first(y) for y in (q, k, v)), x.gates(log_decay, beta)
    tokens, of_state, of_states = x.blocks(reverse=True)
    of_tokens = [tokens(x.key), tokens(x.key), tokens(x.value), tokens(None)]
    sizes = (x.key, q.dtype), (x.key, k.dtype), (x.value, v.dtype), (None, F32)
    *results, d_state = _run(
        functools.partial(_backward_kernel, x), "lcjax_delta_rule_backward", x,
        (*arrays, states, d_out, d_last), [*of_tokens, of_states, tokens(x.value), of_state],
        [(x.tokens_shape(size), dtype) for size, dtype in sizes] + [(d_last.shape, F32)],
        [*of_tokens, of_state], interpret,
    )  # fmt: skip
    dq, dk, dv = map(x.tokens_first, results[:3])
    d_gates = results[3].swapaxes(1, 3)[:, : x.length]
    return dq, dk, dv, d_gates[:, :, 0], d_gates[:, :, 1], d_state


def unsupported(q, k, v, log_decay) -> str | None:
    """Returns why these kernels cannot run the inputs, or None."""
    if log_decay.ndim == 4:
        return "it has one decay for each channel"
    if (reason := unsupported_dtypes(q, k, v, "float32", "bfloat16")) is not None:
        return reason
    if (largest := max(q.shape[-1], v.shape[-1])) > LARGEST_HEAD:
        return f"{largest} channels of a head are above {LARGEST_HEAD}"
    return None


class Sizes(NamedTuple):
    """Sizes of the arrays, and of a step: `group` tokens of `heads` heads."""

    length: int
    groups: int
    group: int
    batch: int
    all_heads: int
    heads: int
    key: int
    value: int
    is_precise: bool

    @classmethod
    def of(cls, q, v) -> Sizes:
        batch, length, all_heads, key = q.shape
        group = min(GROUP, -(-length // LANES) * LANES)
        # A step of HEADS heads of 128 channels of bfloat16 fits into 16 MB in the backward pass.
        scale = (1 + (q.dtype == F32)) * -(-max(key, v.shape[-1]) // LANES)
        most = max(HEADS * min(grid.vmem() // (16 * grid.MIB), scale) // scale, 1)
        heads = next(n for n in range(min(most, all_heads), 0, -1) if all_heads % n == 0)
        sizes = batch, all_heads, heads, key, v.shape[-1], q.dtype == F32
        return cls(length, -(-length // group), group, *sizes)

    def heads_first(self, x):
        """[B, T, N, ...] -> [B, N, T, ...], padded at the end of T by tokens that do nothing."""
        missing = self.groups * self.group - self.length
        return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)).swapaxes(1, 2)

    def tokens_first(self, x):
        return x.swapaxes(1, 2)[:, : self.length]

    def gates(self, log_decay, beta):
        """Returns log_decay and beta as rows, [B, N, 2, T]."""
        return jnp.stack([self.heads_first(x) for x in (log_decay, beta)], 2)

    def tokens_shape(self, size: int | None):
        tokens = self.groups * self.group
        sizes = (2, tokens) if size is None else (tokens, size)
        return self.batch, self.all_heads, *sizes

    def blocks(self, reverse: bool):
        """Returns the blocks of a step: a function of channels (None: gates), and of states."""

        def group(t):
            return self.groups - 1 - t if reverse else t

        def tokens(size: int | None):
            if size is None:
                return pl.BlockSpec(
                    (None, self.heads, 2, self.group), lambda b, n, t: (b, n, 0, group(t))
                )
            return pl.BlockSpec(
                (None, self.heads, self.group, size), lambda b, n, t: (b, n, group(t), 0)
            )

        sizes = self.key, self.value
        of_state = pl.BlockSpec((None, self.heads, *sizes), lambda b, n, t: (b, n, 0, 0))
        of_states = pl.BlockSpec(
            (None, self.heads, None, *sizes), lambda b, n, t: (b, n, group(t), 0, 0)
        )
        return tokens, of_state, of_states


def _run(kernel, name: str, x: Sizes, arrays, in_specs, shapes, out_specs, interpret):
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
        grid=(x.batch, x.all_heads // x.heads, x.groups),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM((x.heads, x.key, x.value), F32)],
        interpret=interpret,
        name=name,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=grid.vmem()
        ),
    )(*arrays)


class _Chunk(NamedTuple):
    """Tokens of a chunk of some heads: [heads, C, K or V], and float32 rows [heads, 1, C]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array


def _read_chunks(q, k, v, gates) -> list[_Chunk]:
    """Returns the chunks of a step's blocks, matrices in float32."""

    def chunk(start):
        at = slice(start, start + CHUNK)
        rows = (gates[:, i : i + 1, at] for i in range(2))
        return _Chunk(*(x[:, at].astype(F32) for x in (q, k, v)), *rows)

    return [chunk(start) for start in range(0, q.shape[1], CHUNK)]


def _forward_kernel(x: Sizes, q, k, v, gates, start, out, last, *refs):
    *states, state = refs

    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = start[...]

    for ref in states:
        ref[...] = state[...]
    state[...], outs = _group(state[...], _read_chunks(q, k, v, gates), x.is_precise)
    for i, y in enumerate(outs):
        out[:, i * CHUNK : (i + 1) * CHUNK] = y.astype(out.dtype)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        last[...] = state[...]


def _backward_kernel(
    x: Sizes, q, k, v, gates, states, d_out, d_last, dq, dk, dv, d_gates, d_first, d_state
):
    @pl.when(pl.program_id(2) == 0)
    def _():
        d_state[...] = d_last[...]

    run = functools.partial(_group, is_precise=x.is_precise)
    _, pull = jax.vjp(run, states[...], _read_chunks(q, k, v, gates))
    starts = range(0, x.group, CHUNK)
    d_outs = [d_out[:, i : i + CHUNK].astype(F32) for i in starts]
    d_state[...], chunks = pull((d_state[...], d_outs))
    for i, chunk in zip(starts, chunks, strict=True):
        at = slice(i, i + CHUNK)
        for ref, y in ((dq, chunk.q), (dk, chunk.k), (dv, chunk.v)):
            ref[:, at] = y.astype(ref.dtype)
        d_gates[:, 0:1, at] = chunk.log_decay
        d_gates[:, 1:2, at] = chunk.beta

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        d_first[...] = d_state[...]


def _group(state, chunks: list[_Chunk], is_precise: bool):
    """Returns the state [heads, K, V] after chunks, and their outputs [heads, C, V] in float32."""
    # All matrices first: they do not depend on the state, so they fill the waits of its products.
    matrices = [_matrices(chunk, is_precise) for chunk in chunks]
    outs = []
    for chunk, x in zip(chunks, matrices, strict=True):
        rest = x.beta * (chunk.v - _product(x.k_start, state, "NN", is_precise))
        updates = _solve(x.a, x.inverses, rest, is_precise)
        out = _product(x.q_start, state, "NN", is_precise)
        outs.append(out + _product(x.scores, updates, "NN", is_precise))
        state = x.decay * state + _product(x.k_end, updates, "TN", is_precise)
    return state, outs


class _Matrices(NamedTuple):
    """What a chunk is to the state at its start; names as in `pallas_kernels.delta_rule`."""

    q_start: jax.Array  # Q' [heads, C, K]
    k_start: jax.Array  # K'
    k_end: jax.Array  # K''
    beta: jax.Array  # [heads, C, 1]
    a: jax.Array  # A [heads, C, C]
    inverses: list[jax.Array]  # of blocks on the diagonal of I + A
    scores: jax.Array  # tril(Q K^T * D)
    decay: jax.Array  # D_end [heads, 1, 1]


def _matrices(x: _Chunk, is_precise: bool) -> _Matrices:
    row, column = _rows_and_columns(x.k.shape[1])

    def total(mask, rows):
        """Sums rows [heads, 1, C] over the columns of a mask."""
        return jnp.sum(jnp.where(mask, rows, 0), 2, keepdims=True)

    decay = jnp.exp(_sums(x.log_decay))
    start = jnp.exp(total(row >= column, x.log_decay))
    end = jnp.exp(total(row < column, x.log_decay))
    beta = total(row == column, x.beta)
    keys = _product(x.k, x.k, "NT", is_precise) * decay
    a = jnp.where(row > column, beta * keys, 0)
    scores = jnp.where(row >= column, _product(x.q, x.k, "NT", is_precise) * decay, 0)
    whole = jnp.exp(jnp.sum(x.log_decay, 2, keepdims=True))
    inverses = _inverses(lax.stop_gradient(a), is_precise)
    return _Matrices(x.q * start, x.k * start, x.k * end, beta, a, inverses, scores, whole)


def _dot(a, b, form: str, is_precise: bool = False):
    """Multiplies float32 matrices [heads, ., .]; T in `form` stands for a transposed factor."""
    contract = (0 if form[0] == "T" else 1,), (1 if form[1] == "T" else 0,)

    def product(a, b):
        # Matrices alone: Mosaic packs the bfloat16 numbers of an array with more axes twice.
        if not is_precise:
            a, b = a.astype(BF16), b.astype(BF16)
        precision = lax.Precision.HIGHEST if is_precise else None
        options = dict(precision=precision, preferred_element_type=F32)
        return lax.dot_general(a, b, (contract, ((), ())), **options)

    return jnp.stack([product(*pair) for pair in zip(a, b, strict=True)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(a, b, form: str, is_precise: bool):
    """Multiplies float32 matrices in full precision, or their values rounded to bfloat16."""
    return _dot(a, b, form, is_precise)


def _pull_product(form: str, is_precise: bool, factors, d):
    a, b = factors
    of_a, of_b = {
        "NN": ((d, b, "NT"), (a, d, "TN")),
        "NT": ((d, b, "NN"), (d, a, "TN")),
        "TN": ((b, d, "NT"), (a, d, "NN")),
    }[form]
    return _product(*of_a, is_precise), _product(*of_b, is_precise)


_product.defvjp(
    lambda a, b, form, is_precise: (_product(a, b, form, is_precise), (a, b)), _pull_product
)


def _parts(x, count: int):
    """Returns numbers whose sum is about x, float32; each but the last has the bits of a bfloat16.

    The last one is rounded by the product that multiplies it: three have all 24 bits of x.
    """
    parts = []
    for _ in range(count - 1):
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(2**16))
        parts.append(lax.bitcast_convert_type(bits, F32))
        x = x - parts[-1]
    return [*parts, x]


def _rows_times(parts, matrix):
    """Returns the sum of parts [heads, rows, C], each times a matrix [C, C] of 0 and 1."""
    rows = jnp.concatenate([x.reshape(-1, x.shape[2]) for x in parts], 0).astype(BF16)
    product = jnp.dot(rows, matrix.astype(BF16), preferred_element_type=F32)
    return product.reshape(len(parts), *parts[0].shape).sum(0)


def _rows_and_columns(size: int):
    return (lax.broadcasted_iota(jnp.int32, (1, size, size), i) for i in (1, 2))


@jax.custom_vjp
def _sums(log_decay):
    """Returns the sums of log_decay [heads, 1, C] over (j, i], [heads, C (i), C (j)].

    They are sums and not differences of sums from the chunk's start, which would lose the digits of
    weak decays after a strong one. One factor is 0 or 1, so three products are in full precision.
    """
    row, column = _rows_and_columns(log_decay.shape[2])
    upto = jnp.where(row >= column, log_decay, 0)
    return _rows_times(_parts(upto, 3), (row > column)[0])


def _pull_sums(_, d):
    row, column = _rows_and_columns(d.shape[2])
    upto = _rows_times(_parts(d, 3), (row < column)[0])
    return (jnp.sum(jnp.where(row >= column, upto, 0), 1, keepdims=True),)


_sums.defvjp(lambda log_decay: (_sums(log_decay), None), _pull_sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _solve(a, inverses, rest, is_precise: bool):
    """Returns U = (I + a)^-1 rest, block by block; a enters through its gradient too.

    Args:
      inverses: those of the blocks [heads, SOLVED, SOLVED] on the diagonal of I + a.
    """
    size, blocks = inverses[0].shape[1], []
    for i, inverse in enumerate(inverses):
        block = rest[:, i * size : (i + 1) * size]
        for j, update in enumerate(blocks):
            factor = a[:, i * size : (i + 1) * size, j * size : (j + 1) * size]
            block = block - _product(factor, update, "NN", is_precise)
        blocks.append(_product(inverse, block, "NN", is_precise))
    return jnp.concatenate(blocks, 1)


def _save_solve(a, inverses, rest, is_precise: bool):
    updates = _solve(a, inverses, rest, is_precise)
    return updates, (a, inverses, updates)


def _pull_solve(is_precise: bool, saved, d):
    """Computes dR = (I + a)^-T dU from the last block to the first; then da = -dR U^T."""
    a, inverses, updates = saved
    size, blocks = inverses[0].shape[1], {}
    for i in reversed(range(len(inverses))):
        block = d[:, i * size : (i + 1) * size]
        for j, d_rest in blocks.items():
            factor = a[:, j * size : (j + 1) * size, i * size : (i + 1) * size]
            block = block - _product(factor, d_rest, "TN", is_precise)
        blocks[i] = _product(inverses[i], block, "TN", is_precise)
    d_rest = jnp.concatenate([blocks[i] for i in range(len(inverses))], 1)
    d_a = -_product(d_rest, updates, "NT", is_precise)
    return d_a, [jnp.zeros_like(x) for x in inverses], d_rest


_solve.defvjp(_save_solve, _pull_solve)


def _inverses(a, is_precise: bool):
    """Returns the inverses [heads, SOLVED, SOLVED] of the blocks on the diagonal of I + a."""

    def exact(x, y):
        """To 2^-16 for bfloat16 inputs, whose products round to 2^-9."""
        if is_precise:
            return _dot(x, y, "NN", True)
        (x_0, x_1), (y_0, y_1) = _parts(x, 2), _parts(y, 2)
        both = _dot(jnp.concatenate([x_0, x_1], 1), y_0, "NN")
        return both[:, : x.shape[1]] + (both[:, x.shape[1] :] + _dot(x_0, y_1, "NN"))

    count, size = a.shape[1], BLOCK
    inverse, solved = _inverse_of_blocks(a), min(SOLVED, count)
    while size < solved:
        # Rows of the second block of every pair: [[X, 0], [Y, Z]]^-1 = [[X^-1, 0], [-W, Z^-1]]
        starts = range(size, count, 2 * size)
        column = lax.broadcasted_iota(jnp.int32, (1, size, count), 2)
        is_first = [(column >= i - size) & (column < i) for i in starts]
        below = jnp.concatenate(
            [jnp.where(m, a[:, i : i + size], 0) for m, i in zip(is_first, starts, strict=True)], 1
        )
        second = jnp.concatenate([inverse[:, i : i + size] for i in starts], 1)
        half = exact(below, inverse)  # Y X^-1, in the rows of second blocks
        zeros = jnp.zeros_like(half[:, :size])
        spread = []
        for i in range(len(starts)):
            spread += [zeros, half[:, i * size : (i + 1) * size]]
        new = second - exact(second, jnp.concatenate(spread, 1))
        rows = []
        for i, start in enumerate(starts):
            rows += [inverse[:, start - size : start], new[:, i * size : (i + 1) * size]]
        inverse, size = jnp.concatenate(rows, 1), 2 * size
    return [inverse[:, i : i + size, i : i + size] for i in range(0, count, size)]


def _inverse_of_blocks(a):
    """Returns the inverses of the blocks on the diagonal of I + a, 0 elsewhere, [heads, C, C].

    Rows i of all blocks are one row, in which every block has its own lanes. Row j is final after
    step j, which subtracts its multiples from the rows below.
    """
    heads, count, _ = a.shape
    starts = range(0, count, BLOCK)
    column = lax.broadcasted_iota(jnp.int32, (1, BLOCK, count), 2)
    is_own = [(column >= i) & (column < i + BLOCK) for i in starts]
    below = sum(jnp.where(m, a[:, i : i + BLOCK], 0) for m, i in zip(is_own, starts, strict=True))
    below = below.reshape(heads * BLOCK, count)
    lane = lax.broadcasted_iota(jnp.int32, below.shape, 1)
    row = lax.broadcasted_iota(jnp.int32, (1, BLOCK, count), 1)
    x = jnp.broadcast_to((column % BLOCK == row).astype(F32), (heads, BLOCK, count))
    for j in range(BLOCK - 1):
        factor = jnp.take_along_axis(below, lane // BLOCK * BLOCK + j, 1)
        x = x - factor.reshape(x.shape) * x[:, j : j + 1]
    return jnp.concatenate([jnp.where(m, x, 0) for m in is_own], 1)
