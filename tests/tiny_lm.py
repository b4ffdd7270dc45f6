"""Tiny language models of random weights whose greedy choices do not hang on rounding."""

import jax
import numpy as np


def sharper(lm):
    """`lm` with logits far enough apart for a greedy choice, the same on any devices."""
    lm.params = jax.tree.map(
        lambda x: jax.device_put(np.asarray(x) * (3 if x.ndim > 1 else 1), x.sharding), lm.params
    )
    return lm


def ids(seed, length):
    """Random bytes as token ids, none of them special."""
    return np.random.default_rng(seed).integers(3, 250, length).tolist()
