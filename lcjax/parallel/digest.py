"""A digest of weights, which is equal for equal weights on any devices."""

import hashlib
import json

import jax
import jax.numpy as jnp

from lcjax.parallel.device_memory import to_device
from lcjax.parallel.sharding import path_of


def weights_digest(params: dict) -> str | None:
    """Returns 32 hex digits for the values, dtypes and paths of arrays; None for an empty tree.

    The digest does not depend on sharding. Each array is hashed on its devices in one pass, and
    only 4 bytes of it are copied to the host.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        return None
    checksums = jax.device_get([_checksum(x) for _, x in leaves])
    values = [
        (path_of(path), str(x.dtype), x.shape, int(checksum))
        for (path, x), checksum in zip(leaves, checksums, strict=True)
    ]
    return hashlib.sha256(json.dumps(sorted(values)).encode()).hexdigest()[:32]


@jax.jit
def _checksum(x: jax.Array) -> jax.Array:
    """Returns the uint32 sum of a hash of every element and its index.

    The sum does not depend on the order of its terms, so it is the same for every sharding.
    """
    x = to_device(x)  # one at a time: offloaded parameters may not all fit on the device
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    # The finaliser of MurmurHash3, a bijection of 32 bits.
    mixed = bits.astype(jnp.uint32) ^ (index * jnp.uint32(0x9E3779B1))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return (mixed ^ (mixed >> 16)).sum(dtype=jnp.uint32)
