"""Next-token cross-entropy without the logits of a whole sequence.

Hidden states are projected a chunk of positions at a time, so memory is chunk x V instead of
T x V. The gradients of a chunk are taken while its logits are there: one projection forward and
two backward, none repeated (the idea of fused linear cross-entropy, Hsu et al. 2024).
"""

import jax
import jax.numpy as jnp

# The float32 logits of one chunk stay below this many bytes: what a CPU's caches still help with,
# and what keeps an accelerator's matrix unit busy.
_CHUNK_BYTES = {"cpu": 64 * 2**20}
_CHUNK_BYTES_DEFAULT = 2**30


def project(hidden: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """float32 logits [..., V] of hidden states [..., D]: sums are never rounded to 16 bits."""
    logits = jnp.einsum("...D,DV->...V", hidden, kernel, preferred_element_type=jnp.float32)
    return logits if bias is None else logits + bias.astype(jnp.float32)


def cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    bias: jax.Array | None = None,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(sum of weighted negative log-likelihoods, sum of weights), both float32 scalars.

    Args:
      hidden: [B, T, D], after the final norm.
      kernel: [D, V].
      targets: int32 [B, T].
      weights: float32 [B, T]; 0 where nothing is predicted.
      bias: [V] or None.
      chunk: positions of T projected at once; chosen from B and V if None.
    """
    weights = weights.astype(jnp.float32)
    if bias is None:
        bias = jnp.zeros(kernel.shape[1], kernel.dtype)
    chunk = _chunk_size(hidden, kernel, chunk)
    chunks = [_chunked(x, chunk) for x in (hidden, targets, weights)]
    return _weighted_sum(chunks[0], kernel, bias, *chunks[1:]), weights.sum()


def token_nll(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    *,
    bias: jax.Array | None = None,
    chunk: int | None = None,
) -> jax.Array:
    """-log p(target) of every position, float32 [B, T]. For evaluation: no gradient is stored."""
    if bias is None:
        bias = jnp.zeros(kernel.shape[1], kernel.dtype)
    chunk = _chunk_size(hidden, kernel, chunk)

    def one(_, xs):
        return None, _nll(xs[0], kernel, bias, xs[1])[0]

    _, nll = jax.lax.scan(one, None, (_chunked(hidden, chunk), _chunked(targets, chunk)))
    return nll.swapaxes(0, 1).reshape(hidden.shape[0], -1)[:, : hidden.shape[1]]


def _chunk_size(hidden: jax.Array, kernel: jax.Array, chunk: int | None) -> int:
    batch, length, _ = hidden.shape
    if chunk is None:
        limit = _CHUNK_BYTES.get(jax.default_backend(), _CHUNK_BYTES_DEFAULT)
        chunk = max(1, limit // (4 * batch * kernel.shape[1]))
    # Equal chunks: 1,000 positions in chunks of at most 600 become 2 x 500, not 600 + 400.
    return -(-length // -(-length // chunk))


def _chunked(x: jax.Array, chunk: int) -> jax.Array:
    """[B, T, ...] -> [T / chunk, B, chunk, ...], padded with zeros."""
    batch, length = x.shape[:2]
    count = -(-length // chunk)
    x = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(batch, count, chunk, *x.shape[2:]).swapaxes(0, 1)


def _nll(hidden, kernel, bias, targets):
    """-log p(target) [B, c], the logits [B, c, V] and their log-sum-exp [B, c, 1], float32."""
    logits = project(hidden, kernel, bias)
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    # A comparison instead of a gather stays local when the vocabulary is sharded.
    target = jnp.where(_is_target(targets, logits.shape[-1]), logits, 0.0).sum(-1)
    return lse[..., 0] - target, logits, lse


def _is_target(targets: jax.Array, vocabulary: int) -> jax.Array:
    return targets[..., None] == jnp.arange(vocabulary, dtype=targets.dtype)


@jax.custom_vjp
def _weighted_sum(hidden, kernel, bias, targets, weights):
    def one(total, xs):
        hidden, targets, weights = xs
        return total + (weights * _nll(hidden, kernel, bias, targets)[0]).sum(), None

    return jax.lax.scan(one, jnp.float32(0), (hidden, targets, weights))[0]


def _forward(hidden, kernel, bias, targets, weights):
    """The loss and, chunk by chunk, the gradients for a cotangent of one."""

    def one(carry, xs):
        total, d_kernel, d_bias = carry
        hidden, targets, weights = xs
        nll, logits, lse = _nll(hidden, kernel, bias, targets)
        probability = jnp.exp(logits - lse)
        d_logits = weights[..., None] * (probability - _is_target(targets, kernel.shape[1]))
        low = d_logits.astype(hidden.dtype)
        d_hidden = jnp.einsum("BTV,DV->BTD", low, kernel)
        d_kernel += jnp.einsum("BTD,BTV->DV", hidden, low, preferred_element_type=jnp.float32)
        d_bias += d_logits.sum((0, 1))
        return (total + (weights * nll).sum(), d_kernel, d_bias), (d_hidden, nll)

    start = (jnp.float32(0), jnp.zeros(kernel.shape, jnp.float32), jnp.zeros(bias.shape))
    (total, d_kernel, d_bias), (d_hidden, nll) = jax.lax.scan(
        one, start, (hidden, targets, weights)
    )
    return total, (d_hidden, d_kernel.astype(kernel.dtype), d_bias.astype(bias.dtype), nll)


def _backward(residuals, cotangent):
    d_hidden, d_kernel, d_bias, nll = residuals

    def scaled(x):
        return (x.astype(jnp.float32) * cotangent).astype(x.dtype)

    return scaled(d_hidden), scaled(d_kernel), scaled(d_bias), None, nll * cotangent


_weighted_sum.defvjp(_forward, _backward)
