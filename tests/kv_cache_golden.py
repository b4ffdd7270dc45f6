"""The golden cases of cache policies: `tests/golden/kv_cache.md` says what they are."""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np

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
