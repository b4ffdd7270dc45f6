"""Next-token cross-entropy that never stores the logits of a whole sequence.

Hidden states are projected one chunk of positions at a time, so memory is chunk x V instead of
T x V. The gradients of a chunk are computed with its logits, in the forward pass: one forward and
two backward projections, and no recomputation (as in fused linear cross-entropy, Hsu et al. 2024).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from lcjax.models.tiles import map_devices, tile_size, tokens_of_device
from lcjax.parallel.sharding import gradient_reduce_scatter, spread_over, tokens_spec
from pallas_kernels.gather import einsum

# Maximum number of float32 rows that a CPU splits into three bfloat16 rows each, to multiply them
# by bfloat16 weights
FEW_ROWS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Projection:
    """The projection of hidden states to the vocabulary.

    A tied kernel keeps the layout [V, D] of the embedding: a transpose would copy it and its
    gradient at every use.
    """

    kernel: Float[Array, "D V"] | Float[Array, "V D"]  # [V, D] if tied
    bias: Float[Array, " V"] | None = None
    tied: bool = dataclasses.field(default=False, metadata={"static": True})
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})  # of logits (Granite)
    # Logits become soft_cap tanh(logit / soft_cap) (Gemma 2).
    soft_cap: float | None = dataclasses.field(default=None, metadata={"static": True})
    # Dtype of the stored weights, before their conversion to the compute dtype
    weights_dtype: str = dataclasses.field(default="float32", metadata={"static": True})

    @property
    def vocabulary(self) -> int:
        return self.kernel.shape[0 if self.tied else 1]

    @property
    def axes(self) -> str:
        return "VD" if self.tied else "DV"

    def __call__(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Returns float32 logits of hidden states; they are never rounded to 16 bits."""
        product = functools.partial(einsum, f"...D,{self.axes}->...V")
        if hidden.ndim > 1 and has_few_rows(math.prod(hidden.shape[:-1]), self.weights_dtype):
            options = {"weights_dtype": self.weights_dtype, "axis": 1 if self.tied else 0}
            logits = product_of_few_rows(product, hidden, self.kernel, **options)
        else:
            logits = product(hidden, self.kernel)
        if self.bias is not None:
            logits = logits + self.bias.astype(jnp.float32)
        if self.scale != 1:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        return logits

    def before_cap(
        self, d_logits: Float[Array, "... V"], logits: Float[Array, "... V"]
    ) -> Float[Array, "... V"]:
        """Backpropagates from the logits through soft cap and scale.

        Args:
          d_logits: derivative with respect to the logits.
          logits: the logits that `__call__` returns.

        Returns:
          The derivative with respect to hidden @ kernel + bias.
        """
        if self.soft_cap is not None:
            d_logits = d_logits * (1 - jnp.square(logits / self.soft_cap))
        return d_logits if self.scale == 1 else d_logits * self.scale


# (float32 logits [B, c, V], their log-sum-exp [B, c, 1], inputs of each token) -> (loss [B, c] of
# every token, parts of the loss by name, derivative of the loss with respect to the logits)
Criterion = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, dict, jax.Array]]


def cross_entropy(
    hidden: Float[Array, "B T D"],
    projection: Projection,
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the weighted sum of negative log-likelihoods and the sum of weights, float32.

    Args:
      hidden: hidden states after the final norm.
      projection: the projection to V logits.
      targets: int32 token ids.
      weights: float32; 0 for positions that do not count.
      chunk: number of positions projected at once; None: chosen from the rows per device and V.
      mesh: the devices that share rows and tokens. Each processes its own tokens, and the kernel's
        gradient is communicated once instead of once per chunk.
    """
    options = {"chunk": chunk, "mesh": mesh}
    total, count, _ = weighted_loss(
        hidden, projection, targets, weights, criterion=negative_log_likelihood, **options
    )
    return total, count


def weighted_loss(
    hidden: Float[Array, "B T D"],
    projection: Projection,
    known: Any,
    weights: Float[Array, "B T"],
    *,
    criterion: Criterion,
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Returns the weighted sum of losses, the sum of weights, and weighted sums of loss parts.

    This generalises `cross_entropy` to any function of a token's logits.

    Args:
      hidden, projection, weights, chunk, mesh: as in `cross_entropy`.
      known: inputs of the criterion for each token, a tree of arrays [B, T, ...].
      criterion: a hashable function; its parts have no gradient.
    """
    weights = weights.astype(jnp.float32)
    chunk = _chunk_size(hidden, projection, chunk, mesh)
    total, parts = _weighted_sum(hidden, projection, known, weights, criterion, chunk, mesh)
    return total, weights.sum(), parts


def token_nll(
    hidden: Float[Array, "B T D"],
    projection: Projection,
    targets: Int[Array, "B T"],
    *,
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Float[Array, "B T"]:
    """Returns float32 -log p(target) of every position.

    A loss may combine the tokens in any way. For this, the backward pass computes the logits of
    each chunk again.
    """
    return _token_nll(hidden, projection, targets, chunk, mesh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _token_nll(hidden, projection, targets, chunk, mesh):
    def one(hidden, projection, targets):
        return negative_log_likelihood(*_logits(hidden, projection), targets)[0]

    return over_chunks(one, hidden, projection, targets, chunk=chunk, mesh=mesh)


def _token_nll_forward(hidden, projection, targets, chunk, mesh):
    return _token_nll(hidden, projection, targets, chunk, mesh), (hidden, projection, targets)


def _token_nll_backward(chunk, mesh, residuals, cotangent):
    hidden, projection, targets = residuals

    def total(hidden, projection):
        return cross_entropy(hidden, projection, targets, cotangent, chunk=chunk, mesh=mesh)[0]

    return *jax.grad(total, argnums=(0, 1))(hidden, projection), None


_token_nll.defvjp(_token_nll_forward, _token_nll_backward)


def over_chunks(
    function: Callable[..., Any],
    hidden: Float[Array, "B T D"],
    projection: Projection,
    *arrays: jax.Array,
    chunk: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Any:
    """Applies a function to one chunk of positions at a time; not for differentiation.

    Args:
      function: maps (hidden, projection, *arrays) of a chunk to a tree of arrays [B, chunk, ...].
      hidden, projection, chunk, mesh: as in `cross_entropy`.
      *arrays: more inputs [B, T, ...].

    Returns:
      The tree of results [B, T, ...].
    """
    chunk = _chunk_size(hidden, projection, chunk, mesh)

    def run(hidden, projection, arrays):
        def one(_, xs):
            return None, function(xs[0], projection, *xs[1])

        chunks = jax.tree.map(lambda x: _chunked(x, chunk), (hidden, arrays))
        return jax.tree.map(
            lambda x: _joined(x, hidden.shape[1]), jax.lax.scan(one, None, chunks)[1]
        )

    tokens, everywhere = tokens_spec(mesh, *hidden.shape[:2]), PartitionSpec()
    by_device = map_devices(run, mesh, tokens, (tokens, everywhere, tokens), tokens)
    return by_device(hidden, projection, arrays)


def _chunk_size(hidden, projection, chunk: int | None, mesh) -> int:
    rows, length = tokens_of_device(mesh, *hidden.shape[:2])
    if chunk is None:
        return tile_size(length, 4 * rows * projection.vocabulary, mesh)
    return -(-length // -(-length // chunk))  # equal chunks, as `tile_size`


def _chunked(x: jax.Array, chunk: int) -> jax.Array:
    """Splits x [B, T, ...] into chunks [T / chunk, B, chunk, ...], padded with zeros."""
    batch, length = x.shape[:2]
    count = -(-length // chunk)
    x = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(batch, count, chunk, *x.shape[2:]).swapaxes(0, 1)


def _joined(x: jax.Array, length: int) -> jax.Array:
    """Inverts `_chunked` for `length` positions."""
    x = x.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def has_few_rows(rows: int, weights_dtype: str) -> bool:
    """Returns whether `product_of_few_rows` applies to so few rows and weights of this dtype."""
    return weights_dtype != "float32" and rows <= FEW_ROWS


def product_of_few_rows(
    product: Callable[[jax.Array, jax.Array], jax.Array],
    x: Float[Array, "... I"],
    kernel: Float[Array, "I O"] | Float[Array, "O I"],
    *,
    weights_dtype: str,
    axis: int = 0,
    one_device: bool = False,
) -> jax.Array:
    """Returns `product(x, kernel)` by a fast path for few rows and 16-bit weights.

    CPU: XLA converts 16-bit weights to float32 before most products. For a few rows, as in
    decoding, this takes ten times as long as the product. XLA reads both operands unconverted only
    if both are bfloat16, there are several rows, and the result is float32. A float32 row is the
    exact sum of three bfloat16 rows, and a float16 row of two, so each row is multiplied as that
    many bfloat16 rows.

    GPU: for a single row and up to 10 million weights, XLA writes all elementwise products to
    memory in float32 and sums them in another kernel. Here the row is repeated 8 times, for which
    XLA uses a matrix kernel. This is not done if devices share the weights, since they would
    exchange 8 rows.

    Args:
      product: the product on other devices, and for float16 weights.
      x: at most `FEW_ROWS` rows, of float32 or 16 bits.
      kernel: the weights, converted to the dtype of x.
      weights_dtype: dtype of the weights before the conversion.
      axis: the contracted axis of the kernel.
      one_device: whether no other device has a part of the kernel.
    """

    def of_two_rows(x, kernel):
        return product(jnp.concatenate([x, jnp.zeros_like(x)]), kernel)[:1]

    def of_bfloat16(x, kernel):
        rest, parts = x.reshape(-1, x.shape[-1]).astype(jnp.float32), []
        for _ in range({"float32": 3, "float16": 2}.get(x.dtype.name, 1)):
            # XLA may remove a conversion to bfloat16 and back, but not `reduce_precision`.
            parts.append(jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
            rest = rest - parts[-1]
        rows = jnp.concatenate(parts).astype(jnp.bfloat16)
        padded = jnp.pad(rows, ((0, -len(rows) % 8), (0, 0)))
        sums = (((1,), (axis,)), ((), ()))
        y = jax.lax.dot_general(
            padded, kernel.astype(jnp.bfloat16), sums, preferred_element_type=jnp.float32
        )
        y = y[: len(rows)].reshape(len(parts), *x.shape[:-1], -1)
        return functools.reduce(jnp.add, reversed(y)).astype(
            jax.eval_shape(product, x, kernel).dtype
        )

    def of_8_rows(x, kernel):
        return product(jnp.broadcast_to(x, (8, *x.shape)), kernel)[0]

    one_row = math.prod(x.shape[:-1]) == 1
    repeats = one_row and one_device and x.dtype.itemsize == 2 and kernel.size < 10_000_000
    on_gpu = {"cuda": of_8_rows} if repeats else {}
    on_cpu = product
    if weights_dtype == "bfloat16":  # its own gradient would be rounded to bfloat16
        on_cpu = jax.custom_vjp(of_bfloat16)
        on_cpu.defvjp(
            lambda *arrays: (of_bfloat16(*arrays), arrays),
            lambda arrays, dy: jax.vjp(product, *arrays)[1](dy),
        )
    elif one_row:
        on_cpu = of_two_rows
    return jax.lax.platform_dependent(x, kernel, cpu=on_cpu, **on_gpu, default=product)


def _logits(hidden, projection):
    """Returns float32 logits [B, c, V] and their log-sum-exp [B, c, 1]."""
    logits = projection(hidden)
    return logits, jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def negative_log_likelihood(
    logits: jax.Array, lse: jax.Array, targets: jax.Array
) -> tuple[jax.Array, dict, jax.Array]:
    """Returns -log p(target), no parts, and its derivative: the criterion of `cross_entropy`."""
    nll = (lse - jnp.take_along_axis(logits, targets[..., None], -1, mode="clip"))[..., 0]
    is_target = targets[..., None] == jnp.arange(logits.shape[-1], dtype=targets.dtype)
    return nll, {}, jnp.exp(logits - lse) - is_target


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _weighted_sum(hidden, projection, known, weights, criterion, chunk, mesh):
    tokens, everywhere = tokens_spec(mesh, *weights.shape), PartitionSpec()
    axes = spread_over(tokens)

    def run(hidden, projection, known, weights):
        def one(_, xs):
            hidden, known, weights = xs
            loss, parts, _ = criterion(*_logits(hidden, projection), known)
            return None, jax.tree.map(lambda x: (weights * x).sum(), (loss, parts))

        chunks = jax.tree.map(lambda x: _chunked(x, chunk), (hidden, known, weights))
        sums = jax.tree.map(jnp.sum, jax.lax.scan(one, None, chunks)[1])
        return jax.lax.psum(sums, axes) if axes else sums

    run = map_devices(run, mesh, tokens, (tokens, everywhere, tokens, tokens), everywhere)
    return run(hidden, projection, known, weights)


def _forward(hidden, projection, known, weights, criterion, chunk, mesh):
    """Returns the loss, and its gradients for a cotangent of 1, computed chunk by chunk."""
    tokens, everywhere = tokens_spec(mesh, *weights.shape), PartitionSpec()
    path = "embed/embedding" if projection.tied else "head/kernel"
    reduce = gradient_reduce_scatter(mesh, path, projection.kernel.shape, *weights.shape)
    run = functools.partial(
        _with_gradients, criterion=criterion, chunk=chunk, axes=spread_over(tokens), reduce=reduce
    )
    kernel = everywhere if reduce is None else reduce.gradient
    bias = None if projection.bias is None else everywhere
    inputs = tokens, everywhere, tokens, tokens
    sums = everywhere, dataclasses.replace(projection, kernel=kernel, bias=bias)
    run = map_devices(run, mesh, tokens, inputs, (sums, (tokens, tokens)))
    (sums, d_projection), by_token = run(hidden, projection, known, weights)
    d_projection = jax.tree.map(lambda d, x: d.astype(x.dtype), d_projection, projection)
    return sums, (d_projection, *by_token)


def _with_gradients(hidden, projection, known, weights, *, criterion, chunk, axes=(), reduce=None):
    """Returns sums over tokens, and arrays of the tokens of one device.

    The sums are (loss, parts) and the gradient of the projection; with `reduce` each device keeps
    a part of the kernel's gradient. The arrays are d_hidden and the loss of each token.
    """

    def one(sums, xs):
        hidden, known, weights = xs
        logits, lse = _logits(hidden, projection)
        loss, parts, slope = criterion(logits, lse, known)
        d_logits = projection.before_cap(weights[..., None] * slope, logits)
        low = d_logits.astype(hidden.dtype)
        d_hidden = einsum(f"BTV,{projection.axes}->BTD", low, projection.kernel)
        # [D, V] also for a tied kernel, and one transpose at the end: [V, D] would require a
        # transpose of the large d_logits of every chunk.
        d_kernel = einsum("BTD,BTV->DV", hidden, low)
        d_bias = None if projection.bias is None else d_logits.sum((0, 1))
        losses = jax.tree.map(lambda x: (weights * x).sum(), (loss, parts))
        sums = jax.tree.map(jnp.add, sums, (d_kernel, d_bias))
        return sums, (losses, d_hidden.astype(hidden.dtype), loss)

    shapes = (hidden.shape[-1], projection.vocabulary), (projection.vocabulary,)
    start = [jnp.zeros(shape, jnp.float32) for shape in shapes]
    if projection.bias is None:
        start[1] = None
    chunks = jax.tree.map(lambda x: _chunked(x, chunk), (hidden, known, weights))
    sums, (losses, *by_token) = jax.lax.scan(one, tuple(start), chunks)
    losses, (d_kernel, d_bias) = jax.tree.map(jnp.sum, losses), sums
    d_kernel = d_kernel.T if projection.tied else d_kernel
    if axes:
        losses, d_bias = jax.lax.psum((losses, d_bias), axes)
        d_kernel = jax.lax.psum(d_kernel, axes) if reduce is None else reduce.of(d_kernel)
    by_token = tuple(_joined(x, hidden.shape[1]) for x in by_token)
    d_projection = dataclasses.replace(projection, kernel=d_kernel, bias=d_bias)
    return (losses, d_projection), by_token


def _backward(criterion, chunk, mesh, residuals, cotangents):
    d_projection, d_hidden, loss = residuals
    cotangent, _ = cotangents

    def scaled(x):
        return (x.astype(jnp.float32) * cotangent).astype(x.dtype)

    return scaled(d_hidden), jax.tree.map(scaled, d_projection), None, loss * cotangent


_weighted_sum.defvjp(_forward, _backward)
