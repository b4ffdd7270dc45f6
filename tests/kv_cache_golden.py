"""The golden cases of cache policies: `tests/golden/kv_cache.md` says what they are."""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lcjax.attention.policies import Cap, Compactor, Cur, Knorm, NonCausal, QFilter

FILE = Path(__file__).resolve().parent / "golden" / "kv_cache.json"


@functools.cache
def golden():
    """Returns the document, and the arrays by name."""
    with np.load(FILE.with_suffix(".npz")) as arrays:
        return json.loads(FILE.read_text()), dict(arrays)


def head_file(table):
    """Returns the path of a file with a number for each key head [L, K], as DuoAttention has."""
    path = Path(tempfile.mkdtemp()) / "full_attention_heads.tsv"
    np.savetxt(path, table, delimiter="\t")
    return str(path)


def filter_file(filters):
    """Returns the path of a file with a direction for each key head [L, K, H], as QFilter has."""
    path = Path(tempfile.mkdtemp()) / "filters.safetensors"
    save_file({"q_filters": np.asarray(filters, np.float32)}, path)
    return str(path)


class InjectedSketch(Compactor):
    """A Compactor with the sketches of the released code, which differ between layers."""

    @property
    def differs_by_layer(self):
        return True

    def gaussian(self, slots):
        return golden()[1]["compactor.r50.sketch"][slots.layer]


# Policies whose scores are tested in one layer, and whose logits are tested in a model.
SCORES = {
    "chunk.knorm": Knorm(ratio=0.5, part=20),
    "qfilter.r50": QFilter(ratio=0.5, file=filter_file(golden()[1]["qfilter.r50.filter"])),
    "cur.default": Cur(ratio=0.45),
    "non_causal.chunk32": NonCausal(ratio=0.5, block=32, fills_block=True),
    "compactor.r50": InjectedSketch(ratio=0.5, block=32, fills_block=True),
    "cap.default": Cap(ratio=0.5, future=64),
}
