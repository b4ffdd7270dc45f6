"""Rows of an embedding whose columns lie on many devices, of which nobody ever holds all."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lcjax.parallel.sharding import spec_of, spread_over, tokens_spec


def look_up(
    table: jax.Array, tokens: jax.Array, dtype: jnp.dtype, mesh: jax.sharding.Mesh | None
) -> jax.Array:
    """Rows of `table` [V, D] for tokens int32 [B, T]: [B, T, D] in `dtype`.

    A device reads its columns for the tokens of all devices that share the table, and they exchange
    tokens for columns. What moves is the size of the result, forward and backward, and the gradient
    is added up where it stays, in the table's own precision. XLA, left alone, gathers the table or
    the hidden states of all rows, and adds up whole gradients.
    """
    if mesh is None:
        return table[tokens].astype(dtype)
    where = tokens_spec(mesh, *tokens.shape)
    columns = spread_over(PartitionSpec(spec_of("embed/embedding", table.shape, mesh)[1]))
    if not columns or not set(columns) <= set(spread_over(where)):
        return table[tokens].astype(dtype)

    def exchange(table, tokens):
        found = table[jax.lax.all_gather(tokens, columns)].astype(dtype)  # [devices, b, t, d]
        return jax.lax.all_to_all(found, columns, split_axis=0, concat_axis=3, tiled=True)[0]

    return jax.shard_map(
        exchange,
        mesh=mesh,
        in_specs=(PartitionSpec(None, columns), where),
        out_specs=where,
        axis_names=set(spread_over(where)),
        check_vma=False,
    )(table, tokens)
