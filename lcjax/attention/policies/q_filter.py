"""Q-Filters: a direction for each key head, along which keys receive little attention."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Float

from lcjax.attention.eviction import CachePolicy
from lcjax.errors import InputError, NonEmpty
from lcjax.storage import to_path

ARRAY = "q_filters"  # name of the array in files, as in the authors'
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16}  # little-endian


@CachePolicy.register_subclass("qfilter")
@dataclass(frozen=True, kw_only=True)
class QFilter(CachePolicy):
    """Keeps keys that queries favour whatever they ask (Godey et al. 2025, arXiv 2503.02812).

    Queries of a head lie on one side of a hyperplane, and the projection of a key on its normal
    predicts the attention that it receives. With f, the direction of a key head in `file`, the
    score of a rotated key k is -f k, as in kvpress. `write_query_filters` of
    `lcjax.generation.query_filters` makes the file of a model from texts; files of the authors have
    the same form.
    """

    examples = ()  # needs a file

    # A .safetensors file with an array q_filters [L, K, H], of the L layers that evict tokens
    file: Annotated[str, NonEmpty()]

    @property
    def differs_by_layer(self) -> bool:
        return True

    def check_layer(self, layer, num_layers):
        filters = read_query_filters(self.file)
        expected = num_layers, layer.num_kv_heads, layer.head_dim
        if filters.shape != expected:
            layers, heads, size = filters.shape
            raise InputError(
                f"model.cache.file={self.file} has directions of {size} channels for {layers}"
                f" layers of {heads} key heads, and the model has {num_layers} layers that evict"
                f" tokens, of {layer.num_kv_heads} key heads with {layer.head_dim} channels; give"
                " the file of this model"
            )

    def score(self, slots):
        filters = jnp.asarray(read_query_filters(self.file)[slots.layer])
        return -(slots.keys.astype(jnp.float32) * filters[None, :, None]).sum(-1)


@functools.lru_cache(maxsize=8)
def read_query_filters(file: str) -> Float[np.ndarray, "L K H"]:
    """Reads the array `q_filters` of a .safetensors file.

    Raises:
      InputError: there is no such file, or it has no such array.
    """
    try:
        content = to_path(file).read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        entry = json.loads(content[8:start])[ARRAY]
        begin, end = entry["data_offsets"]
        array = np.frombuffer(content[start + begin : start + end], _DTYPES[entry["dtype"]])
        array = array.reshape(entry["shape"]).astype(np.float32)
    except (OSError, ValueError, TypeError, LookupError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise InputError(
            f"model.cache.file={file} is no .safetensors file with an array {ARRAY} of floats"
            f" ({reason}); write_query_filters of lcjax.generation.query_filters makes one"
        ) from None
    if array.ndim != 3 or not np.isfinite(array).all():
        raise InputError(
            f"model.cache.file={file}: {ARRAY} of shape {array.shape} must have finite numbers"
            " [layers, key heads, channels]"
        )
    return array
