"""Attention of few queries over a cache of keys and values, read as it lies in memory."""

from __future__ import annotations

from pallas_kernels.flash import flash
from pallas_kernels.masks import Mask


def decode(q, keys, values, mask: Mask | None = None, *, splits: int | None = None, **options):
    """`flash` of q [B, T, N, H] over keys [B, K, S, H] and values [B, K, S, Hv]: (out, lse).

    Heads stand before keys, as in a cache that grows along S: a step multiplies whole runs of it,
    and no part of it is reordered, padded or copied. Key blocks that no query sees, such as those
    of a cache that are not filled yet or lie before a window, are not read. Where T queries times
    the G of them that share a key head are at most 128 rows, TPUs run a kernel of their own.

    splits: the parts that the visible keys are cut in, which are computed side by side and merged
        by log-sum-exp, for devices with more cores than there are rows and heads; the result is the
        same. None: what suits the platform.
    options: those of `flash`. The result is differentiable in all that flash's is.

    Raises:
      ValueError, TypeError: as `flash` does.
    """
    if keys.ndim != 4 or values.ndim != 4 or q.shape[2] % max(keys.shape[1], 1):
        raise ValueError(
            f"decode: keys {keys.shape} and values {values.shape} must be [batch, heads, length, "
            f"size] of a number of heads that divides the {q.shape[2]} of q; flash takes "
            "[batch, length, heads, size]"
        )
    return flash(q, keys.swapaxes(1, 2), values.swapaxes(1, 2), mask, splits=splits, **options)
