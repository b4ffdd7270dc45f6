"""The golden cases of cache policies: `tests/golden/kv_cache.md` says what they are."""

import functools
import json
from pathlib import Path

import numpy as np

FILE = Path(__file__).resolve().parent / "golden" / "kv_cache.json"


@functools.cache
def golden():
    """Returns the document, and the arrays by name."""
    with np.load(FILE.with_suffix(".npz")) as arrays:
        return json.loads(FILE.read_text()), dict(arrays)
