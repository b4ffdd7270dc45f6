"""Computes the attention weights of any pattern with the code that computes its attention.

Attention returns a weighted sum of values. If the values are one-hot vectors, one for each key, the
sum is the weights themselves. There is no second implementation that could differ.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.attention import AttentionMetadata, Landmark, Pattern
from lcjax.errors import InputError, check_integer, check_seed
from lcjax.rope import Rotation
from pallas_kernels import by_heads

_MAX_PAIRS = 2**26  # of queries and keys: 8,192 tokens, 1.1 GB
_KEYS = 512  # keys per call, the size of the one-hot values


def attention_weights(
    q: jax.Array,
    k: jax.Array,
    *,
    pattern: Pattern,
    rotation: Rotation,
    metadata: AttentionMetadata | None = None,
    queries: int | None = None,
) -> jax.Array:
    """Returns weights float32 [B, queries, N, S] of unrotated q [B, T, N, H] over k [B, S, K, H].

    Args:
      q: T queries, which are the last of the S tokens.
      k: S keys.
      pattern: the attention pattern.
      rotation: the rotation of queries and keys.
      metadata: positions and documents, as in `Pattern.attend`; None: tokens in order.
      queries: number of last queries whose weights are returned; None: all.
    """
    rows, count, _, _ = q.shape
    length, kv_heads = k.shape[1:3]
    if metadata is None:
        at = jnp.broadcast_to(jnp.arange(length), (rows, length))
        order = jnp.arange(length - count, length)
        metadata = AttentionMetadata(at[:, length - count :], at, q_index=order)
    metadata = metadata.replace(rotation=rotation, implementation="xla")
    queries = count if queries is None else queries
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    # A pattern with its own `attend` may choose keys by all queries together, so it needs them all.
    if type(pattern).attend is Pattern.attend:
        q, metadata = q[:, count - queries :], _last_queries(metadata, queries)
    parts = []
    for start in range(0, length, _KEYS):
        size = min(_KEYS, length - start)
        names = jnp.eye(length, size, -start, dtype=jnp.float32)
        values = jnp.broadcast_to(names[None, :, None], (rows, length, kv_heads, size))
        out = pattern.attend(q, k, values, metadata)
        parts.append(out[:, out.shape[1] - queries :])
    return jnp.concatenate(parts, axis=-1)


def _last_queries(metadata: AttentionMetadata, count: int) -> AttentionMetadata:
    """Returns the metadata of the last `count` queries."""
    segments = metadata.q_segments
    return metadata.replace(
        q_positions=metadata.q_positions[:, -count:],
        q_index=metadata.q_order[..., -count:],
        q_segments=None if segments is None else segments[:, -count:],
        row_indices=None,
    )


def mask_of(
    pattern: Pattern, length: int, *, heads: int = 1, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns which keys are visible in a text of `length` tokens, and at which distances.

    Both results, (seen, distance), are [heads, length, length]. `seen` is true where a query gives
    a key any weight; queries and keys are random, for patterns that choose by them, and so are the
    hidden states and the parameters of patterns that have some, but for parameters that begin with
    given numbers. `distance` is a float, the difference of the positions that the pattern assigns
    to query and key. It is NaN where nothing is seen, and for keys that a query chooses under a
    pattern that moves keys. Under Landmark attention every `block`-th token is a landmark, and one
    call reads `chunk` tokens.
    """
    check_integer("length", length, 2)
    check_integer("heads", heads, 1)
    check_seed("seed", seed)
    if heads * length**2 > _MAX_PAIRS:
        raise InputError(
            f"heads={heads} x length={length} squared must be at most {_MAX_PAIRS:,}, the pairs of"
            " tokens that are computed one by one; draw a shorter text"
        )
    rng = np.random.default_rng(seed)
    q, k = 0.1 * rng.standard_normal((2, 1, length, heads, 16)).astype(np.float32)
    rotation = Rotation(np.zeros(8, np.float32))  # no rotation: no position has more weight
    at = np.arange(length)[None]
    metadata = AttentionMetadata(at, at, num_heads=heads)
    options = {"pattern": pattern, "rotation": rotation}
    if pattern.parameters:
        hidden = jnp.asarray(rng.standard_normal((1, length, 16)), jnp.float32)
        sizes = {"D": 16, "N": heads, "K": heads, "H": 16} | pattern.sizes

        def values(one):
            is_set = isinstance(one.init, tuple)
            shape = one.shape(sizes)
            return np.broadcast_to(one.init, shape) if is_set else rng.standard_normal(shape)

        parameters = {
            name: jnp.asarray(values(one), jnp.float32) for name, one in pattern.parameters.items()
        }
        whole = metadata.replace(q_index=jnp.arange(length), rotation=rotation)
        features = pattern.features(parameters, hidden, q, k, whole)
        options["metadata"] = whole.replace(features=features)
    weigh = jax.jit(functools.partial(attention_weights, **options))
    chunk = length if (most := _most_at_once(pattern)) is None else most
    seen = np.zeros((heads, length, length), bool)
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        weights = weigh(q[:, start:end], k[:, :end])[0]
        seen[:, start:end, :end] = np.asarray(weights).transpose(1, 0, 2) != 0
    moved = metadata.replace(k_positions=pattern.key_positions(at, metadata.k_order))
    distance = np.full((heads, length, length), np.nan)
    order = np.arange(length)
    for step in pattern.passes(moved):
        q_at, k_at = (np.asarray(x, np.float64)[0] for x in (step.q_positions, step.k_positions))
        k_at = np.full_like(k_at, k_at[0]) if step.same_position else k_at
        apart, first = q_at[:, None] - k_at[None], 0
        for part, count in by_heads(step.mask, heads):
            visible = np.broadcast_to(part.element(order[:, None], order[None]), apart.shape)
            distance[first : first + count, visible] = apart[visible]
            first += count
    if not pattern.moves_keys:  # also keys that a query chooses keep their positions
        distance = np.where(np.isnan(distance), order[:, None] - order[None], distance)
    # Keys from the cache were chosen, and moved close to the query: no distance is defined.
    distance[:, order[:, None] // chunk > order[None] // chunk] = np.nan
    distance[~seen] = np.nan
    return seen, distance


def _most_at_once(pattern: Pattern) -> int | None:
    """Returns the maximum number of tokens that one call may read; None: no limit."""
    return pattern.chunk if isinstance(pattern, Landmark) else None
