"""Directions for the cache policy `qfilter`, from the queries of a model on texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lcjax.attention import CachePolicy
from lcjax.attention.policies.q_filter import ARRAY
from lcjax.checkpoints.safetensors_io import write_file
from lcjax.checkpoints.weights import TensorInfo
from lcjax.errors import InputError
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.session import Session, check_rows, check_token_ids, prefill_chunk_size
from lcjax.models import cache as cache_lib
from lcjax.models.cache import Cache
from lcjax.storage import to_path


@dataclass(frozen=True)
class _QueryMoments(CachePolicy):
    """Adds up the rotated queries of each head, and their outer products."""

    def state(self, layer):
        heads, size = layer.num_heads, layer.head_dim
        return {
            "query_sum": jax.ShapeDtypeStruct((heads, 1, size), jnp.float32),
            "query_squares": jax.ShapeDtypeStruct((heads, size, size), jnp.float32),
        }

    def observe(self, seen):
        is_token = (seen.index >= 0)[:, None, :, None]
        q = jnp.where(is_token, seen.queries.astype(jnp.float32), 0)
        squares = jnp.einsum("BNTH,BNTI->BNHI", q, q, precision=jax.lax.Precision.HIGHEST)
        state = seen.slots.state
        return {
            "query_sum": state["query_sum"] + q.sum(2, keepdims=True),
            "query_squares": state["query_squares"] + squares,
        }

    def score(self, slots):
        return slots.index.astype(jnp.float32)


def query_filters(lm: LanguageModel, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the Q-Filter of each key head, float32 [L, K, H] of the L layers that a policy cuts.

    For each query head, the first right singular vector v of its rotated queries, with the sign
    that makes the sum of their projections positive (Godey et al. 2025, arXiv 2503.02812, sec. 3).
    Keys with a small projection on v receive little attention. A key head has the mean over its
    query heads, and the result is its negative, as `QFilter` scores keys by -f k.

    Args:
      lm: the model; its cache policy does not matter, its rope does.
      texts: token ids, each of at least 2 tokens. Texts of one length compile once; a hundred of
        2,048 tokens are plenty.
    """
    check_rows("texts", texts, "[[1, 2, 3]]")
    lm = lm.with_method(cache=_QueryMoments(tokens=1), length=lm.length)
    cut = [i for i, kind in enumerate(cache_lib.layer_caches(lm.config)) if kind.evicts]
    shapes = {cache_lib.layer_shape(lm.config.layer(i)) for i in cut}
    if len(shapes) > 1:
        raise InputError(
            "model.layers: layers that see all tokens differ in the sizes of heads, and a file"
            " of qfilter has one array for all; take another cache policy"
        )
    moments = [_moments(_read(lm, f"texts[{i}]", ids)) for i, ids in enumerate(texts)]
    if not moments or not len(moments[0][0]):
        raise InputError(
            "texts is empty, or the model has no layer that a cache policy would cut; give texts,"
            " and a model with layers that see all tokens before a token"
        )
    sums, squares = (np.sum(each, axis=0) for each in zip(*moments, strict=True))
    _, vectors = np.linalg.eigh(squares)  # [L, N, H, H], of ascending eigenvalues
    first = vectors[..., -1]
    first *= np.where((sums * first).sum(-1, keepdims=True) < 0, -1, 1)
    layers, _, size = first.shape
    by_group = first.reshape(layers, shapes.pop().num_kv_heads, -1, size)
    return -by_group.mean(2).astype(np.float32)


def write_query_filters(
    lm: LanguageModel, texts: Sequence[Sequence[int]], file: str | Path
) -> None:
    """Writes `query_filters` as a `file` of the cache policy `qfilter` (.safetensors)."""
    filters = query_filters(lm, texts)
    write_file(to_path(file), {ARRAY: TensorInfo(filters.shape, "float32")}, [(ARRAY, filters)])


def _read(lm: LanguageModel, name: str, ids: Sequence[int]) -> Cache:
    """Returns the cache of a model that has read a text whole; errors call it `name`."""
    array = check_token_ids(name, ids, lm.config.vocab_size)
    if len(array) < 2:
        raise InputError(
            f"{name} has {len(array)} tokens; give texts of at least 2, better of as many as the"
            " model will read"
        )
    chunk, slots = prefill_chunk_size(None), cache_lib.whole_blocks(len(array))
    cache = cache_lib.create(lm.model.config, 1, slots, chunk=chunk, mesh=lm.mesh)
    session = Session(lm.model, lm.params, cache, lm.rotation(max(len(array), lm.length or 0)))
    session.read_ids(array, 0, chunk)
    return session.cache


def _moments(cache: Cache) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sums of the first row in the L layers that evict tokens, in float64.

    They are those of queries [L, N, H], and of their outer products [L, N, H, H].
    """
    sums, squares = [], []
    for arrays, number in zip(cache.separate_layers, cache.kind_by_layer):
        if cache.kinds[number].evicts:
            for values, name in ((sums, "query_sum"), (squares, "query_squares")):
                array = np.asarray(arrays[name], np.float64)
                values.extend(array[:, 0] if cache.is_stacked else array[:1])
    return np.array(sums)[:, :, 0] if sums else np.array(sums), np.array(squares)
