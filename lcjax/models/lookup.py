"""Rows of the embedding, with a gradient that many devices add up without anyone keeping it all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0

from lcjax.sharding import Sums


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def look_up(table: jax.Array, tokens: jax.Array, dtype: jnp.dtype, sums: Sums | None) -> jax.Array:
    """Rows of `table` [V, D] for tokens int32 [B, T]: [B, T, D] in `dtype`.

    A table that is split over devices is gathered as `dtype`. Its gradient is added up in the
    table's own precision, by `sums` or, if None, as the compiler sees fit.
    """
    return table.astype(dtype)[tokens]


def _forward(table, tokens, dtype, sums):
    # Of the table the gradient needs rows and type: what an empty part of it says.
    return look_up(table, tokens, dtype, sums), (tokens, table[:, :0])


def _backward(dtype, sums, saved, dy):
    tokens, like = saved

    def added(tokens, dy):
        zeros = jnp.zeros((like.shape[0], dy.shape[-1]), like.dtype)
        return zeros.at[tokens].add(dy.astype(like.dtype))

    d_table = added(tokens, dy) if sums is None else sums(added, tokens, dy)
    return d_table, np.zeros(tokens.shape, float0)


look_up.defvjp(_forward, _backward)
