"""Qwen sparse attention (Qwen4-Exp): an indexer chooses runs of a few tokens for all heads.

Letters: I index heads, J channels of an index head, C complete runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lcjax.attention.base import Features, Parameter, Pattern
from lcjax.attention.chosen_blocks import complete_blocks
from lcjax.attention.chosen_keys import ChosenKeys, Entries
from lcjax.attention.indexer import index_rotation, rms_norm
from lcjax.errors import InputError, PositiveInt
from pallas_kernels import gather


@Pattern.register_subclass("qsa")
@dataclass(frozen=True)
class QSA(ChosenKeys):
    """A token sees the tokens of the runs that an indexer scores highest, and those behind them.

    Runs of `run` tokens count from the first token of a document. The indexer has `heads` query
    heads and one key head, from one matrix. Its queries are normed and rotated as attention is, in
    their first channels. The index key of a run is the mean of the keys of its tokens, normed and
    rotated to the position of the first one. The score of a run for a query is the sum over index
    heads of relu(q k) / sqrt(J), in float32, and all attention heads read the tokens of the `top_k`
    / `run` best runs that are complete up to the query. They also read the tokens behind the last
    complete run, itself included, which take no place of the `top_k`: there are up to `run` - 1.
    Scores that differ by no more than their rounding error count as equal, and of equal runs the
    later ones are read.

    A cache keeps the index keys of all tokens, neither normed nor rotated. The computation is that
    of transformers (`Qwen4ExpTextQSAIndexer`); training has the two stages of `dsa`, since the
    authors' is not published. The divergence is between probabilities of runs; the tokens behind
    the last run have no part in it.
    """

    examples = (
        {"heads": 2, "head_dim": 16, "top_k": 24, "run": 4},
        {"heads": 3, "head_dim": 16, "top_k": 6, "run": 3},
    )

    run: PositiveInt = 4  # tokens of a run; divides top_k

    def __post_init__(self):
        super().__post_init__()
        if self.top_k % self.run:
            raise InputError(
                f"pattern.top_k={self.top_k} must be a multiple of pattern.run={self.run}"
            )

    @property
    def num_chosen(self):
        return self.top_k // self.run

    @property
    def num_read(self):
        return self.top_k + self.run - 1

    @property
    def parameters(self):
        names = "self_attn.indexer.{}.weight".format
        return {
            "run_query_key": Parameter("DMJ", names("index_qk_proj"), "MJ,D"),
            "run_query_norm_scale": Parameter("J", names("q_layernorm"), "J", "zeros"),
            "run_key_norm_scale": Parameter("J", names("k_layernorm"), "J", "zeros"),
        }

    @property
    def sizes(self):
        return super().sizes | {"M": self.heads + 1}

    def choice_flops(self, layer, length, keys):
        return super().choice_flops(layer, length, keys) / self.run

    def features(self, parameters, x, q, k, metadata):
        x = jax.lax.stop_gradient(x)
        both = gather.einsum("BTD,DMJ->BTMJ", x, parameters["run_query_key"]).astype(x.dtype)
        queries = rms_norm(
            both[:, :, :-1], 1 + parameters["run_query_norm_scale"].astype(jnp.float32)
        )
        rotation = index_rotation(metadata.rotation, self.head_dim)
        queries = rotation.rotate(queries, metadata.q_positions)
        weights = jnp.full((*x.shape[:2], self.heads), self.head_dim**-0.5)
        factor = {"factor": 1 + parameters["run_key_norm_scale"].astype(jnp.float32)}
        return Features({"index": queries, "weight": weights}, {"index": both[:, :, -1:]}, factor)

    def entries(self, keys, metadata):
        runs, index = complete_blocks(keys, self.run), metadata.features.keys["index"]
        rows, count = runs.numbers.shape
        of_tokens = runs.take(index).astype(jnp.float32)
        means = of_tokens.reshape(rows, count, self.run, self.head_dim).mean(2)
        means = rms_norm(means.astype(index.dtype), metadata.features.layer["factor"])
        starts = jnp.take_along_axis(keys.positions, runs.slots[..., 0], axis=1)
        rotation = index_rotation(metadata.rotation, self.head_dim)
        vectors = rotation.rotate(means[:, :, None], starts)[:, :, 0]
        slots = jnp.where(runs.segments[..., None] > 0, runs.slots, keys.index.shape[1])
        of_keys = jnp.full(keys.index.shape, count, jnp.int32)
        numbers = jnp.repeat(jnp.arange(count, dtype=jnp.int32), self.run)
        at = jnp.arange(rows)[:, None], slots.reshape(rows, -1)
        of_keys = of_keys.at[at].set(numbers, mode="drop")
        last = (runs.numbers + 1) * self.run - 1
        return Entries(vectors, last, runs.segments, of_keys)

    def always_reads(self, queries, keys):
        first = (queries.index + 1) // self.run * self.run
        return keys.visible_to(queries) & (keys.index[:, None] >= first[..., None])
