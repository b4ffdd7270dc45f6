"""The gated delta rule: linear attention whose state is corrected by each token.

For every head with a state S [K, V], keys k, values v, decays exp(g) and learning rates beta, the
recurrence of Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464, eq. 10) is

    S_t = exp(g_t) S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - k_t^T exp(g_t) S_{t-1}),
    o_t = q_t^T S_t

With one g for each key channel it is Kimi Delta Attention (arXiv 2510.26692, eq. 1). A chunk of C
tokens is a few matrix products (Yang et al. 2024, arXiv 2406.06484, sec. 3.2). Let D_ij be the
decay exp(g_{j+1} + ... + g_i) from token j to token i, and S the state at the chunk's start:

    (I + A) U = diag(beta) (V - K' S),   A = strict_tril(diag(beta) K K^T * D)
    O = Q' S + tril(Q K^T * D) U
    S_next = D_end S + K''^T U

K' and Q' are decayed from the chunk's start, K'' up to its end. Every decay is the exponential of a
sum of numbers that are at most 0. None is a quotient of two decays or the exponential of a
difference of two sums, so strong decays neither overflow nor lose digits.

Letters: K key channels, V value channels, C tokens of a chunk.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels.arguments import check_shapes, on_any_mesh
from pallas_kernels.dispatch import BY_NAME, Backend, CannotRun, platform, self_check
from pallas_kernels.explanations import Explanation, current_explanations
from pallas_kernels.masks import integer
from pallas_kernels.sharded import Layout, on_shards

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# Tokens whose chunks are computed side by side. The backward pass keeps the state at the start of
# every group and computes the rest of one group at a time again. With heads of 128 channels its
# memory is least at 256: smaller groups keep more states, larger ones more matrices of chunks.
GROUP_TOKENS = 256
# exp of less is 0 in float32, so a decay of -inf may be replaced by this: 0 * -inf would be NaN.
LEAST_LOG_DECAY = -128.0
_BLOCK = 16
XLA = "xla"
# The XLA form of this file, and kernels. The module of kernels has three functions:
#   forward(q, k, v, log_decay, beta, state, *, keep_states)
#       -> out, the last state, and the states at the starts of groups (None unless they are kept)
#   backward(q, k, v, log_decay, beta, states, d_out, d_last) -> the cotangents of q, ..., state
#   unsupported(q, k, v, log_decay) -> why it cannot run the inputs, or None
BACKENDS = {
    "tpu": Backend("pallas_kernels.backends.tpu.delta_rule", ("tpu",)),
    "triton": Backend("pallas_kernels.backends.triton.delta_rule", ("cuda",), needs_check=True),
    XLA: Backend(__name__, ("cpu", "default"), portable=True),
}


@functools.partial(on_any_mesh, second=(0, 2))
def gated_delta_rule(
    q: Float[Array, "B T N K"],
    k: Float[Array, "B T N K"],
    v: Float[Array, "B T N V"],
    log_decay: Float[Array, "B T N"] | Float[Array, "B T N K"],
    beta: Float[Array, "B T N"],
    *,
    state: Float[Array, "B N K V"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    chunk: int = 64,
    layout: Layout | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N K V"]]:
    """Returns the outputs of the gated delta rule for all tokens, and the state after the last.

    Sums are float32. Products of float32 inputs have full precision, those of other inputs the
    default precision of the device. The backward pass keeps the state at the start of every group
    of `GROUP_TOKENS` tokens, T / GROUP_TOKENS x K x V float32 numbers for each head, and one
    group's chunks at a time.

    Args:
      q: queries. They are neither normalised nor scaled here, and neither are keys.
      k: keys. With beta in [0, 1] their norm should be at most 1, or states may grow.
      v: values.
      log_decay: g, at most 0: one for each token and head, or one for each key channel too.
      beta: the learning rate of each token.
      state: the state before the first token; None means 0. With segments it belongs to the
        document of the row's first token.
      segments: documents, numbered from 1; 0 is padding. The state is 0 at the start of every
        document. Padding, which must be finite, has output 0 and leaves the state unchanged. A
        document is one run of tokens, which padding may interrupt.
      chunk: the number of tokens of a chunk of the XLA form, a power of 2; kernels have their own.
        Results do not depend on it beyond rounding.
      layout: shards rows, heads and length. Tokens must be in order. The devices of a split length
        exchange one affine map of the state each, [K, K + V] per head, whatever its method is.
      implementation: a name of `BACKENDS`, or None for the best one that can run the inputs on the
        platform that the program is traced for. Kernels have a gradient in reverse mode only.

    Returns:
      out in v's dtype, and the float32 state after the row's last token.

    Raises:
      TypeError: an array has no floating-point dtype, or segments are not integers.
      ValueError: shapes do not match, there are no heads or no key channels, chunk is no power of
        2, the layout cannot split the length, or the implementation cannot run the inputs.
    """
    axes = "BTN" if getattr(log_decay, "ndim", 3) == 3 else "BTNK"
    arrays = {"q": (q, "BTNK"), "k": (k, "BTNK"), "v": (v, "BTNV"), "log_decay": (log_decay, axes)}
    arrays |= {"beta": (beta, "BTN"), "state": (state, "BNKV")}
    check_shapes("gated_delta_rule", arrays, segments, layout)
    if 0 in q.shape[2:]:
        raise ValueError(
            f"gated_delta_rule: q has shape {q.shape}; neither its heads nor its key channels may"
            " be 0"
        )
    chunk = integer("gated_delta_rule: chunk", chunk, 1)
    if chunk & (chunk - 1):
        near = 1 << chunk.bit_length()
        raise ValueError(f"gated_delta_rule: chunk={chunk} must be a power of 2, such as {near}")
    if state is None:
        state = jnp.zeros((*q.shape[:1], *q.shape[2:], v.shape[3]), jnp.float32)
    state = state.astype(jnp.float32)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    tokens = Tokens(q, k, v, log_decay, beta)
    name = _choose(implementation, tokens)
    if 0 in v.shape:
        return jnp.zeros_like(v), state
    segments = None if segments is None else jnp.asarray(segments, jnp.int32)
    run = maps = functools.partial(_scan, chunk=chunk, precision=precision)
    if name != XLA:
        run = functools.partial(_run_kernels, static=(name, chunk, precision))
    if layout is not None:
        return _over_mesh(tokens, state, segments, run, maps, layout, precision)
    return _on_one_device(tokens, state, segments, run)


def _choose(implementation: str | None, tokens: Tokens) -> str:
    """Returns the name of the backend to run, and records the explanation of the choice."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    current = platform() if described is None else described.platform.replace("gpu", "cuda")
    call = f"gated_delta_rule(implementation={implementation!r})"
    if implementation not in (None, *BACKENDS):
        raise CannotRun(f"{call}: unknown; choose one of {', '.join(BACKENDS)}")
    reasons = {name: _unsupported(name, tokens, current) for name in BACKENDS}
    if implementation is None:
        reasons |= {x: _unchecked(x, tokens) for x, reason in reasons.items() if reason is None}
    elif reasons[implementation] is not None:
        raise CannotRun(f"{call}: {reasons[implementation]}; leave it out for one that can")
    able = [name for name, reason in reasons.items() if reason is None]
    name = implementation or able[0]
    if (explanations := current_explanations()) is not None:
        arrays = ", ".join(f"{n} {x.dtype}{list(x.shape)}" for n, x in zip("qkv", tokens[:3]))
        why = BY_NAME if implementation else "the first that can run the inputs"
        reasons = {x: why if x == name else y or "it runs everywhere" for x, y in reasons.items()}
        call = f"gated_delta_rule on {current}: {arrays}"
        explanations.append(Explanation(call, None, name, tuple(reasons.items())))
    return name


def _unsupported(name: str, tokens: Tokens, current: str) -> str | None:
    """Returns why a backend cannot run the inputs on a platform, or None."""
    backend = BACKENDS[name]
    if backend.portable:
        return None
    if current not in backend.platforms:
        return f"it runs on {', '.join(backend.platforms)} and the program is for {current}"
    if tokens.q.shape[1] <= 1:
        return "a step of generation is the recurrence, which needs no matrices of chunks"
    q, k, v, log_decay, _ = tokens
    return backend.load().unsupported(q, k, v, log_decay)


def _unchecked(name: str, tokens: Tokens) -> str | None:
    """Returns why a backend that can run the inputs may run by name only, or None."""
    if not BACKENDS[name].needs_check:
        return None
    largest = max(tokens.q.shape[-1], tokens.v.shape[-1])
    check, dtype = self_check(), str(tokens.q.dtype)
    return check.why_refused(name, dtype, check.needed_by_delta_rule(dtype, largest))


class Tokens(NamedTuple):
    """Arrays [B, T, N, ...]; q is None if only states are computed."""

    q: jax.Array | None
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array


def _on_one_device(tokens: Tokens, state, segments, run):
    tokens, _ = _without_documents(tokens, segments)
    out, state = run(tokens, state)
    return _without_output(out, segments), state


def _without_documents(tokens: Tokens, segments):
    """Returns tokens that a recurrence without documents can read, and the `_documents`.

    Padding changes no state. The first token of a document, but not of the row, decays the state
    to 0, as exp(LEAST_LOG_DECAY) is 0 in float32.
    """
    log_decay = jnp.maximum(tokens.log_decay.astype(jnp.float32), LEAST_LOG_DECAY)
    beta = tokens.beta.astype(jnp.float32)
    if segments is None:
        return tokens._replace(log_decay=log_decay, beta=beta), None
    documents = _documents(segments)
    begins = jnp.pad(documents[:, 1:] != documents[:, :-1], [(0, 0), (1, 0)])
    is_token, axes = segments != 0, (..., *[None] * (log_decay.ndim - 2))
    log_decay = jnp.where(is_token[axes], log_decay, 0)
    log_decay = jnp.where(begins[axes], LEAST_LOG_DECAY, log_decay)
    beta = jnp.where(is_token[..., None], beta, 0)
    return tokens._replace(log_decay=log_decay, beta=beta), documents


def _without_output(out, segments):
    """Returns `out` with 0 where padding is."""
    return out if segments is None else jnp.where((segments != 0)[..., None, None], out, 0)


def _documents(segments):
    """Returns segments [B, T] whose padding belongs to the document of the token before it.

    Padding before the first token of a row belongs to the document of that one. A row without
    tokens has 0.
    """
    at = jnp.arange(segments.shape[1], dtype=jnp.int32)
    is_token = segments != 0
    last = lax.cummax(jnp.where(is_token, at, -1), axis=1)
    first = jnp.argmax(is_token, axis=1, keepdims=True).astype(jnp.int32)
    return jnp.take_along_axis(segments, jnp.where(last < 0, first, last), axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _run_kernels(tokens: Tokens, state, static: tuple[str, int, lax.Precision | None]):
    """Returns (out, state) computed by a backend's kernels.

    Args:
      static: the backend's name, and the chunk and precision of `_scan`, which takes its place
        where the program is lowered for another platform.
    """
    return _forward(tokens, state, static, keep_states=False)[:2]


def _save(tokens: Tokens, state, static):
    out, after, states = _forward(tokens, state, static, keep_states=True)
    return (out, after), (tokens, states)


def _pull_back(static, saved, cotangents):
    (name, *options), (tokens, states) = static, saved

    def by_xla(*arrays):
        *tokens, states, d_out, d_state = arrays
        run = functools.partial(_scan, chunk=options[0], precision=options[1])
        _, pull = jax.vjp(run, Tokens(*tokens), states[:, :, 0])
        d_tokens, d_first = pull((d_out, d_state))
        return *d_tokens, d_first

    *d_tokens, d_first = _on_platform(name, "backward", by_xla, *tokens, states, *cotangents)
    return Tokens(*d_tokens), d_first


_run_kernels.defvjp(_save, _pull_back)


def _forward(tokens: Tokens, state, static, keep_states: bool):
    name, chunk, precision = static
    groups = -(-tokens.v.shape[1] // BACKENDS[name].load().GROUP)

    def by_xla(*arrays):
        *tokens, state = arrays
        out, after = _scan(Tokens(*tokens), state, chunk, precision)
        # Its backward pass reads the first state alone.
        states = jnp.broadcast_to(state[:, :, None], (*state.shape[:2], groups, *state.shape[2:]))
        return out, after, states if keep_states else None

    return _on_platform(name, "forward", by_xla, *tokens, state, keep_states=keep_states)


def _on_platform(name: str, direction: str, by_xla, *arrays, **options):
    """Runs a backend's pass, or `by_xla` where the program is lowered for another platform."""
    backend = BACKENDS[name]
    kernel = functools.partial(getattr(backend.load(), direction), **options)
    with jax.enable_x64(False):
        branches = dict.fromkeys(backend.platforms, kernel)
        return lax.platform_dependent(*arrays, **branches, default=by_xla)


def _scan(tokens: Tokens, state, chunk: int, precision):
    """Returns (out, state); out is None if there are no queries."""
    batch, length, heads, size = tokens.v.shape
    if length == 1 and tokens.q is not None:
        return _step(tokens, state, precision)
    chunk = min(chunk, 1 << (length - 1).bit_length())
    chunks = -(-length // chunk)
    groups = -(-chunks * chunk // max(GROUP_TOKENS, chunk))
    shape = groups, -(-chunks // groups), chunk
    tokens = jax.tree.map(lambda x: split_tokens(x, shape), tokens)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def run(state, group):
        return _group(state, group, precision)

    state, out = lax.scan(run, state, tokens)
    if out is None:
        return None, state
    return jnp.moveaxis(out, 0, 1).reshape(batch, -1, heads, size)[:, :length], state


def split_tokens(x, shape: tuple[int, int, int]):
    """[B, T, ...] -> [groups, B, chunks, C, ...], padded at the end.

    Padded tokens change no state, as their beta and log_decay are 0.
    """
    missing = shape[0] * shape[1] * shape[2] - x.shape[1]
    if missing:
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], *shape, *x.shape[2:]), 1, 0)


def _step(tokens: Tokens, state, precision):
    """Computes the recurrence for one token, as a step of generation does."""
    q, k, v, log_decay, beta = (x[:, 0].astype(jnp.float32) for x in tokens)
    einsum = functools.partial(jnp.einsum, precision=precision)
    decay = jnp.exp(log_decay)
    state = state * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
    update = beta[..., None] * (v - einsum("BNK,BNKV->BNV", k, state))
    state = state + k[..., None] * update[..., None, :]
    out = einsum("BNK,BNKV->BNV", q, state)
    return out[:, None].astype(tokens.v.dtype), state


class Chunks(NamedTuple):
    """What chunks are to a state at their start, [chunks, B, N, ...]; `D` etc. as in this file."""

    k_start: jax.Array  # K' [C, K]
    k_end: jax.Array  # K'' [C, K]
    v: jax.Array  # [C, V]
    solve: jax.Array  # (I + A)^-1 diag(beta) [C, C]
    decay: jax.Array  # D_end [1 or K, 1]
    q_start: jax.Array | None  # Q' [C, K]
    scores: jax.Array | None  # tril(Q K^T * D) [C, C]


def _group(state, tokens: Tokens, precision):
    """Returns the next state and the outputs [B, chunks, C, N, V] of a group of chunks."""
    matmul = functools.partial(jnp.matmul, precision=precision)
    dtype, width = tokens.v.dtype, state.shape[-1]

    def step(state, x: Chunks):
        # Columns of the state beyond those of v are the linear map of `_affine_map`.
        v = jnp.pad(x.v, [(0, 0)] * 3 + [(0, width - x.v.shape[-1])])
        updates = matmul(x.solve, v - matmul(x.k_start, state))
        after = x.decay * state + matmul(x.k_end.mT, updates)
        if x.scores is None:
            return after, None
        out = matmul(x.q_start, state) + matmul(x.scores, updates)
        return after, out.astype(dtype)

    state, out = lax.scan(step, state, chunk_matrices(tokens, precision))
    return state, None if out is None else out.transpose(1, 0, 3, 2, 4)


def chunk_matrices(tokens: Tokens, precision) -> Chunks:
    """Computes what needs no state, for all chunks of a group at once."""

    def heads_first(x):
        """[B, chunks, C, N, ...] -> [chunks, B, N, C, ...] in float32."""
        return jnp.moveaxis(x, (1, 0, 3, 2), range(4)).astype(jnp.float32)

    q, k, v, log_decay, beta = jax.tree.map(heads_first, tokens)
    products = _scalar_products if log_decay.ndim == 4 else _channel_products
    keys, scores, (start, end, whole) = products(q, k, log_decay, precision)
    start, end, whole = jnp.exp(start), jnp.exp(end), jnp.exp(whole)
    solve = _inverse(beta[..., None] * keys) * beta[..., None, :]
    q_start = None if q is None else q * start
    return Chunks(k * start, k * end, v, solve, whole.mT, q_start, scores)


def _scalar_products(q, k, log_decay, precision):
    """Returns decayed products of a decay for each token, and its sums.

    Args:
      q, k: float32 [..., C, K]; q may be None.
      log_decay: float32 [..., C].

    Returns:
      strict_tril(K K^T * D) and tril(Q K^T * D), [..., C, C], the latter None without q; and the
      sums of log_decay from the chunk's start up to each token, [..., C, 1], after each token up
      to the chunk's end, [..., C, 1], and over the chunk, [..., 1, 1].
    """
    at = np.arange(k.shape[-2])
    later = at[:, None] > at
    upto = jnp.asarray(~later.T, jnp.float32)
    # The sum over (j, i], summed as such: a difference of two sums from the chunk's start would
    # lose the digits of weak decays that follow a strong one.
    exact = {"precision": lax.Precision.HIGHEST}
    sums = jnp.matmul(upto, jnp.where(later, log_decay[..., None], 0), **exact)
    start = jnp.matmul(upto, log_decay[..., None], **exact)
    decay = jnp.exp(sums)

    def product(x, mask):
        return jnp.where(mask, jnp.matmul(x, k.mT, precision=precision) * decay, 0)

    sums = start, sums[..., -1, :, None], start[..., -1:, :]
    return product(k, later), None if q is None else product(q, ~later.T), sums


def _channel_products(q, k, log_decay, precision):
    """Returns the same for log_decay [..., C, K]; sums are [..., C, K] and [..., 1, K].

    D_ij differs between channels, so it cannot be applied to a product. Of two neighbouring blocks
    of tokens, i in the second and j in the first, it is the decay from j up to the end of the first
    times that from there to i, which are applied to keys and queries. Blocks double from one token.
    """
    rows = [k] if q is None else [k, q]  # no stack of both: XLA's CPU code crashes on many axes
    start = total = log_decay[..., None, :]  # of blocks [..., blocks, size, K]
    end = jnp.zeros_like(start)
    lower = [jnp.zeros((*k.shape[:-1], 1, 1), jnp.float32)] * len(rows)
    size = 1
    while size < k.shape[-2]:
        (start_0, start_1), (end_0, end_1), (total_0, total_1) = map(_pairs, (start, end, total))

        def blocks(x, size=size):
            return _pairs(x.reshape(*x.shape[:-2], -1, size, x.shape[-1]))

        of_keys = (blocks(k)[0] * jnp.exp(end_0)).mT
        for i, x in enumerate(rows):
            of_rows = blocks(x)[1] * jnp.exp(start_1)
            between = jnp.matmul(of_rows, of_keys, precision=precision)
            lower[i] = _lower_blocks(*_pairs(lower[i]), between)
        start = jnp.concatenate([start_0, total_0 + start_1], -2)
        end = jnp.concatenate([end_0 + total_1, end_1], -2)
        total, size = total_0 + total_1, 2 * size
    lower, sums = jax.tree.map(lambda x: x[..., 0, :, :], (lower, (start, end, total)))
    if q is None:
        return lower[0], None, sums
    diagonal = jnp.sum(q * k, -1)[..., None] * jnp.eye(k.shape[-2], dtype=jnp.float32)
    return lower[0], lower[1] + diagonal, sums


def _pairs(x):
    """Returns the first and the second of every two blocks of x [..., blocks, rows, columns]."""
    return x[..., 0::2, :, :], x[..., 1::2, :, :]


def _lower_blocks(first, second, between):
    """Returns the matrices [[first, 0], [between, second]]."""
    above = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([above, jnp.concatenate([between, second], -1)], -2)


@jax.custom_jvp
def _inverse(a):
    """Returns (I + a)^-1 for strictly lower triangular matrices a [..., C, C].

    Inverses of blocks on the diagonal double in size, [[X, 0], [Y, Z]]^-1 = [[X^-1, 0],
    [-Z^-1 Y X^-1, Z^-1]]. This is as accurate as forward substitution. The sum of powers of -a is
    not: for equal keys its terms are binomial coefficients that cancel.

    Up to `_BLOCK` rows the blocks stay where they are in a larger one, whose other entries are 0:
    compilers take three times as long for many small blocks.
    """
    count = a.shape[-1]
    exact = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    size, at = 1, np.arange(min(_BLOCK, count))
    blocks = _diagonal(a, len(at))
    inverse = jnp.broadcast_to(jnp.eye(len(at), dtype=a.dtype), blocks.shape)
    while size < len(at):
        is_below = (at[:, None] // size % 2 == 1) & (at[:, None] // size - 1 == at // size)
        below = jnp.where(is_below, blocks, 0)
        inverse -= below if size == 1 else exact(exact(inverse, below), inverse)
        size *= 2
    while size < count:
        below = _diagonal(a, 2 * size)[..., size:, :size]
        first, second = _pairs(inverse)
        inverse = _lower_blocks(first, second, -exact(exact(second, below), first))
        size *= 2
    return inverse[..., 0, :, :]


def _diagonal(a, size: int):
    """Returns the blocks [..., C / size, size, size] on the diagonal of matrices [..., C, C]."""
    places = range(0, a.shape[-1], size)
    # No diagonal of a reshaped array: XLA for CPUs (jax 0.10.2) fails on products of its transpose.
    return jnp.stack([a[..., i : i + size, i : i + size] for i in places], -3)


@_inverse.defjvp
def _inverse_jvp(primals, tangents):
    exact = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    inverse = _inverse(*primals)
    return inverse, -exact(exact(inverse, tangents[0]), inverse)


def _over_mesh(tokens: Tokens, state, segments, run, maps, layout: Layout, precision):
    """Runs `run` on shards; devices of a split length exchange maps of the state (by `maps`)."""
    layout = layout.of_tokens(tokens.k)

    def local(tokens, state, segments):
        if layout.length is None:
            return _on_one_device(tokens, state, segments, run)
        tokens, documents = _without_documents(tokens, segments)
        before, after = _states(maps, tokens, state, documents, precision, layout.length)
        return _without_output(run(tokens, before)[0], segments), after

    of_tokens = layout.spec(tokens.k, heads=True)
    of_state = PartitionSpec(of_tokens[0], of_tokens[2])
    of_segments = None if segments is None else layout.spec(segments)
    specs = Tokens(*[of_tokens] * 5), of_state, of_segments
    return on_shards(local, (tokens, state, segments), specs, (of_tokens, of_state), layout.mesh)


def _states(run, tokens: Tokens, state, documents, precision, axis: str):
    """Returns the states before this device's tokens and after those of all devices.

    The state after a device's tokens is `linear @ before + constant`. All devices compute both for
    their tokens at the same time, and combine those of all (as a scan over devices).
    """
    size, width = state.shape[-2:]
    eye = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), (*state.shape[:-1], size))
    start = jnp.concatenate([jnp.zeros_like(state), eye], -1)
    _, end = run(tokens._replace(q=None), start)
    maps = lax.all_gather(end, axis)
    if documents is None:
        ends = jnp.ones((maps.shape[0], maps.shape[1], 2), jnp.int32)
    else:
        ends = lax.all_gather(jnp.stack([documents[:, 0], documents[:, -1]], -1), axis)

    def add(carry, of_device):
        state, open_document = carry
        end, (first, last) = of_device[0], jnp.moveaxis(of_device[1], -1, 0)
        # 0 is a device without tokens, and before the first token the state is anyone's.
        continues = (open_document == 0) | (first == 0) | (first == open_document)
        before = jnp.where(continues[:, None, None, None], state, 0)
        constant, linear = jnp.split(end, [width], -1)
        after = jnp.matmul(linear, before, precision=precision) + constant
        return (after, jnp.where(last == 0, open_document, last)), before

    start = state, jnp.zeros(state.shape[0], ends.dtype)
    (after, _), before = lax.scan(add, start, (maps, ends))
    return lax.dynamic_index_in_dim(before, lax.axis_index(axis), 0, keepdims=False), after
