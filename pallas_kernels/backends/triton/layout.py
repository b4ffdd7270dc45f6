"""How work is cut into programs of the GPU kernels, and which part of each array they read.

A program's block of an array is its batch row and its heads; rows and keys are counted inside the
kernel. Head sizes are read as the power of two above them, which is what Triton knows.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.masks import Mask

LEAST = 16  # rows, keys and features of a product on tensor cores
LISTS = ("index", "first", "full", "seen")


def power(n: int) -> int:
    """The power of two that n is rounded up to."""
    return max(LEAST, 1 << (n - 1).bit_length())


@dataclass(frozen=True)
class Axis:
    """Steps of `unit` rows or keys along an axis of `length`, `steps` of them in a listed block."""

    length: int
    unit: int
    steps: int

    @property
    def blocks(self) -> int:
        return -(-self.length // self.unit)

    def cut(self, walked: bool) -> bool:
        """Whether a step reaches beyond the end; who walks a list takes all steps of a block."""
        return self.length % (self.unit * self.steps if walked else self.unit) != 0


@dataclass(frozen=True)
class Body:
    """What is static in a kernel; `turned` where keys stay and rows pass by."""

    mask: Mask
    scale: float
    soft_cap: float | None
    rows: Axis
    keys: Axis
    size: int
    v_size: int
    group: int  # query heads of a key head
    turned: bool
    whole: bool  # some listed block needs no test of its elements
    mixed: bool  # some listed block needs one
    by_head: bool = False  # each query head of a key head has a list of its own
    cache: bool = False  # keys lie as [B, K, S, H]
    copies: int = 1  # rows behind each other that have one order index
    parts: int = 1  # programs that a list is dealt out to
    warps: int = 4
    stages: int = 2
    interpret: bool = False

    @property
    def cut_rows(self) -> bool:
        return self.rows.cut(self.turned)

    @property
    def cut_keys(self) -> bool:
        return self.keys.cut(not self.turned)

    @property
    def end_of_rows(self) -> int | None:
        """Where a step has to stop; None: no step reaches beyond the last row."""
        return self.rows.length if self.cut_rows else None

    @property
    def end_of_keys(self) -> int | None:
        return self.keys.length if self.cut_keys else None

    def width(self, name: str) -> int:
        """Features of a matrix."""
        return self.size if name in ("q", "k") else self.v_size


def axis(length: int, block: int, most: int) -> Axis:
    """The largest steps up to `most` that divide a table's blocks, of which there may be one."""
    if length <= block:
        unit = min(most, power(length))
        return Axis(length, unit, -(-length // unit))
    unit = min(most, block & -block)
    return Axis(length, unit, block // unit)


def by_rows(launch, body: Body, x, outputs):
    """Outputs [parts, B, ...] of a program for each block of rows of a query head."""
    batch, heads = x["q"].shape[0], x["q"].shape[2]
    grid = (body.rows.blocks * body.parts, heads, batch)
    made = [None if kind is None else _output(kind, x, body) for kind in outputs]
    return launch(body, x, _specs(x, body, heads), grid=grid, outputs=made)


def by_keys(launch, body: Body, x):
    """Cotangents of keys and of values, a program for each block of keys of a key head."""
    batch, heads = x["k"].shape[0], x["k"].shape[2]
    specs = _specs(x, body, heads)
    made = [
        (jax.ShapeDtypeStruct(x[name].shape, x[name].dtype), specs[name]) for name in ("k", "v")
    ]
    return launch(body, x, specs, grid=(body.keys.blocks, heads, batch), outputs=made)


def _specs(x, body: Body, heads: int):
    return {
        name: None if value is None else _spec(name, value, body, heads)
        for name, value in x.items()
    }


def _spec(name: str, value, body: Body, heads: int):
    """The block of an array that program (i, h, b) reads; `heads`: how many h there are."""
    shape, own = value.shape, body.keys if body.turned else body.rows
    wide, some = power(shape[-1]), body.group if body.turned and body.group > 1 else None

    def row(b):
        return b if shape[0] > 1 else 0

    if name == "slopes":
        return pl.BlockSpec((some or 1,), lambda i, h, b: (h,))
    if name in ("q", "d_out"):
        return pl.BlockSpec((None, shape[1], some, wide), lambda i, h, b: (b, 0, h, 0))
    if name in ("lse", "di"):
        return pl.BlockSpec((None, some, shape[2]), lambda i, h, b: (b, h, 0))
    if name in ("k", "v"):
        head = 1 if body.turned else body.group
        if body.cache:
            return pl.BlockSpec((None, None, shape[2], wide), lambda i, h, b: (b, h, 0, 0))
        return pl.BlockSpec(
            (None, shape[1], None, wide), lambda i, h, b: (b, 0, lax.div(h, head), 0)
        )
    if name not in LISTS:
        return pl.BlockSpec((None, shape[1]), lambda i, h, b: (row(b), 0))

    def listed(i, h, b):
        i = i if body.turned else body.rows.blocks - 1 - lax.div(i, body.parts)
        head = h if body.by_head else lax.div(h, heads // shape[1])
        return row(b), head, 0 if name == "index" else lax.div(i, own.steps)

    some = body.group if body.by_head else 1
    return pl.BlockSpec((None, some, shape[2] if name == "index" else None), listed)


def _output(kind, x, body: Body):
    """(shape, block) of what rows give: (dtype, width) a matrix, "vector" or "number" a block."""
    (batch, rows, heads), parts = x["q"].shape[:3], body.parts
    lead = parts, batch

    def place(i, *rest):
        return lax.rem(i, parts), *rest

    if kind == "vector":
        return (
            jax.ShapeDtypeStruct((*lead, heads, rows), jnp.float32),
            pl.BlockSpec((None, None, None, rows), lambda i, h, b: place(i, b, h, 0)),
        )
    if kind == "number":
        return (
            jax.ShapeDtypeStruct((*lead, heads, body.rows.blocks), jnp.float32),
            pl.BlockSpec((None, None, None, 1), lambda i, h, b: place(i, b, h, lax.div(i, parts))),
        )
    dtype, width = kind
    return (
        jax.ShapeDtypeStruct((*lead, rows, heads, width), dtype),
        pl.BlockSpec((None, None, rows, None, power(width)), lambda i, h, b: place(i, b, 0, h, 0)),
    )
