"""The golden cases of attention chosen by the data: `tests/golden/sparse_attention.md`."""

import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from lcjax.attention import AttentionMetadata, order_indices

FILE = Path(__file__).parent.parent / "golden" / "sparse_attention.json"


@functools.cache
def case(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """Returns the parameters and arrays of a case; those of heads as [batch, time, heads, ...]."""
    params = json.loads(FILE.read_text())["cases"][name]["params"]
    with np.load(FILE.with_suffix(".npz")) as data:
        names = [key for key in data.files if key.startswith(f"{name}.")]
        arrays = {key.removeprefix(f"{name}."): data[key] for key in names}
    by_head = {"q", "k", "v", "out", "cotangent", "dq", "dk", "dv"}
    return params, {key: x.swapaxes(1, 2) if key in by_head else x for key, x in arrays.items()}


def metadata(params: dict) -> AttentionMetadata:
    """Returns the metadata of a case, whose positions are not rotated."""
    ends = params["cu_seqlens"]
    lengths = np.diff(ends)
    segments = jnp.asarray(np.repeat(np.arange(1, len(ends)), lengths)[None], jnp.int32)
    index = order_indices(segments)
    if len(lengths) == 1:
        return AttentionMetadata(index, index)
    documents = {"q_segments": segments, "k_segments": segments}
    return AttentionMetadata(index, index, q_index=index, k_index=index, **documents)
