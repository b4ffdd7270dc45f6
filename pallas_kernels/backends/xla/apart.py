"""A block table per query head, where several query heads share a key head.

Queries that share a key head are rows of one product, so they walk the same blocks. Where their
tables differ, the group is taken apart: one query head per key head is handled at a time, as an
attention of K query heads over K key heads.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import Operands, Spec, given_table


def needed(k, operands: Operands, spec: Spec) -> bool:
    table = given_table(operands, spec)
    return table is not None and table.seen.shape[1] not in (1, k.shape[2])


def forward(run, q, k, v, operands: Operands, spec: Spec):
    """out and lse by `run(q, k, v, operands, spec)` of each group."""
    groups = _groups(q, k), _of_groups(k, operands, spec)
    spec = dataclasses.replace(spec, table=None)
    results = lax.map(lambda group: run(group[0], k, v, group[1], spec), groups)
    return tuple(_join(x) for x in results)


def backward(run, k, v, rows, operands: Operands, spec: Spec):
    """Cotangents by `run`, rows: (q, out, lse, d_out, d_lse); keys collect from all groups."""
    groups = jax.tree.map(lambda x: _groups(x, k), rows), _of_groups(k, operands, spec)
    spec = dataclasses.replace(spec, table=None)

    def step(sums, group):
        (q, *rows), operands = group
        dq, dk, dv, d_bias = run(q, k, v, *rows, operands, spec)
        return (sums[0] + dk, sums[1] + dv), (dq, d_bias)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    (dk, dv), (dq, d_bias) = lax.scan(step, zeros, groups)
    d_bias = jax.tree.map(lambda x: _last(jnp.moveaxis(x, 0, -1)), d_bias)
    return _join(dq), dk.astype(k.dtype), dv.astype(v.dtype), d_bias


def _groups(x, k):
    """[B, T, N, ...] -> [G, B, T, K, ...]."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], k.shape[2], -1, *x.shape[3:]), 3, 0)


def _join(x):
    """[G, B, T, K, ...] -> [B, T, N, ...]."""
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _last(x):
    """[..., K, G] -> [..., N]."""
    return x.reshape(*x.shape[:-2], -1)


def _of_groups(k, operands: Operands, spec: Spec) -> Operands:
    """Operands with a leading axis of G: of the bias and the table its part, of others a copy."""
    heads, table = k.shape[2], given_table(operands, spec)
    group = table.seen.shape[1] // heads

    def of_table(name):
        x = jnp.asarray(getattr(table, name))
        return jnp.moveaxis(x.reshape(x.shape[0], heads, group, *x.shape[2:]), 2, 0)

    def of_bias(x):
        return jnp.moveaxis(x.reshape(*x.shape[:-1], heads, group), -1, 0)

    parts = {name: of_table(name) for name in ("index", "full", "seen")}
    places = (x if x is None else jnp.broadcast_to(x, (group, *x.shape)) for x in operands[:4])
    table = dataclasses.replace(table, overflow=None, **parts)
    return Operands(*places, jax.tree.map(of_bias, operands.bias), table)
