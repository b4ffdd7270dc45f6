"""Next-token cross-entropy without the logits of a whole sequence.

Hidden states are projected a chunk of positions at a time, so memory is chunk x V instead of
T x V. The gradients of a chunk are taken while its logits are there: one projection forward and
two backward, none repeated (the idea of fused linear cross-entropy, Hsu et al. 2024).
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lcjax.sharding import ROWS, rows_over

# The float32 logits of one chunk on one device stay below this many bytes: what a CPU's caches
# still help with, and what keeps an accelerator's matrix unit busy.
_CHUNK_BYTES = {"cpu": 64 * 2**20}
_CHUNK_BYTES_DEFAULT = 2**30


def project(hidden: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """float32 logits [..., V] of hidden states [..., D]: sums are never rounded to 16 bits."""
    logits = _einsum("...D,DV->...V", hidden, kernel)
    return logits if bias is None else logits + bias.astype(jnp.float32)


def cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    bias: jax.Array | None = None,
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(sum of weighted negative log-likelihoods, sum of weights), both float32 scalars.

    Args:
      hidden: [B, T, D], after the final norm.
      kernel: [D, V].
      targets: int32 [B, T].
      weights: float32 [B, T]; 0 where nothing is predicted.
      bias: [V] or None.
      chunk: positions of T projected at once; chosen from the rows of a device and V if None.
      mesh: whose devices share the rows: each goes through its own, and the kernel's gradient
        crosses the machine once instead of once per chunk.
    """
    weights = weights.astype(jnp.float32)
    chunk = _chunk_size(hidden, kernel, chunk, mesh)
    return _weighted_sum(hidden, kernel, bias, targets, weights, chunk, mesh), weights.sum()


def token_nll(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    *,
    bias: jax.Array | None = None,
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> jax.Array:
    """-log p(target) of every position, float32 [B, T]. For evaluation: no gradient is stored."""
    chunk = _chunk_size(hidden, kernel, chunk, mesh)

    def one(_, xs):
        return None, _nll(xs[0], kernel, bias, xs[1])[0]

    _, nll = jax.lax.scan(one, None, (_chunked(hidden, chunk), _chunked(targets, chunk)))
    return _joined(nll, hidden.shape[1])


def _chunk_size(hidden, kernel, chunk: int | None, mesh) -> int:
    batch, length, _ = hidden.shape
    if chunk is None:
        limit = _CHUNK_BYTES.get(jax.default_backend(), _CHUNK_BYTES_DEFAULT)
        rows = batch // rows_over(mesh, batch)
        chunk = max(1, limit // (4 * rows * kernel.shape[1]))
    # Equal chunks: 1,000 positions in chunks of at most 600 become 2 x 500, not 600 + 400.
    return -(-length // -(-length // chunk))


def _chunked(x: jax.Array, chunk: int) -> jax.Array:
    """[B, T, ...] -> [T / chunk, B, chunk, ...], padded with zeros."""
    batch, length = x.shape[:2]
    count = -(-length // chunk)
    x = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(batch, count, chunk, *x.shape[2:]).swapaxes(0, 1)


def _joined(x: jax.Array, length: int) -> jax.Array:
    """The inverse of `_chunked`."""
    x = x.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Summed in float32; 32-bit operands are never rounded first, as accelerators would do."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)


def _nll(hidden, kernel, bias, targets):
    """-log p(target) [B, c], the logits [B, c, V] and their log-sum-exp [B, c, 1], float32."""
    logits = project(hidden, kernel, bias)
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    # A comparison instead of a gather stays local when the vocabulary is sharded.
    target = jnp.where(_is_target(targets, logits.shape[-1]), logits, 0.0).sum(-1)
    return lse[..., 0] - target, logits, lse


def _is_target(targets: jax.Array, vocabulary: int) -> jax.Array:
    return targets[..., None] == jnp.arange(vocabulary, dtype=targets.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _weighted_sum(hidden, kernel, bias, targets, weights, chunk, mesh):
    def one(total, xs):
        hidden, targets, weights = xs
        return total + (weights * _nll(hidden, kernel, bias, targets)[0]).sum(), None

    chunks = [_chunked(x, chunk) for x in (hidden, targets, weights)]
    return jax.lax.scan(one, jnp.float32(0), chunks)[0]


def _forward(hidden, kernel, bias, targets, weights, chunk, mesh):
    """The loss and, chunk by chunk, the gradients for a cotangent of one."""
    run = functools.partial(_with_gradients, chunk=chunk)
    if rows_over(mesh, hidden.shape[0]) > 1:
        rows, all_ = PartitionSpec(ROWS), PartitionSpec()
        run = jax.shard_map(
            functools.partial(run, axes=ROWS),
            mesh=mesh,
            in_specs=(rows, all_, all_, rows, rows),
            out_specs=((all_, all_, all_), (rows, rows)),
            axis_names=set(ROWS),  # how the kernel is split over `tensor` is left to the compiler
            check_vma=False,
        )
    (total, d_kernel, d_bias), (d_hidden, nll) = run(hidden, kernel, bias, targets, weights)
    d_bias = None if bias is None else d_bias.astype(bias.dtype)
    return total, (d_hidden, d_kernel.astype(kernel.dtype), d_bias, nll)


def _with_gradients(hidden, kernel, bias, targets, weights, *, chunk, axes=()):
    """((loss, d_kernel, d_bias) summed over all rows, (d_hidden, nll) of these rows)."""

    def one(sums, xs):
        hidden, targets, weights = xs
        nll, logits, lse = _nll(hidden, kernel, bias, targets)
        probability = jnp.exp(logits - lse)
        d_logits = weights[..., None] * (probability - _is_target(targets, kernel.shape[1]))
        low = d_logits.astype(hidden.dtype)
        d_hidden = _einsum("BTV,DV->BTD", low, kernel).astype(hidden.dtype)
        added = (
            (weights * nll).sum(),
            _einsum("BTD,BTV->DV", hidden, low),
            None if bias is None else d_logits.sum((0, 1)),
        )
        return jax.tree.map(jnp.add, sums, added), (d_hidden, nll)

    d_bias = None if bias is None else jnp.zeros(bias.shape, jnp.float32)
    sums = jnp.float32(0), jnp.zeros(kernel.shape, jnp.float32), d_bias
    chunks = [_chunked(x, chunk) for x in (hidden, targets, weights)]
    sums, by_row = jax.lax.scan(one, sums, chunks)
    length = hidden.shape[1]
    return jax.lax.psum(sums, axes) if axes else sums, tuple(_joined(x, length) for x in by_row)


def _backward(chunk, mesh, residuals, cotangent):
    d_hidden, d_kernel, d_bias, nll = residuals

    def scaled(x):
        return (x.astype(jnp.float32) * cotangent).astype(x.dtype)

    d_bias = None if d_bias is None else scaled(d_bias)
    return scaled(d_hidden), scaled(d_kernel), d_bias, None, nll * cotangent


_weighted_sum.defvjp(_forward, _backward)
