"""Which implementation of attention was right, and how fast, on GPUs where it was measured.

`python -m benchmarks.gpu.attention --keep` checks and measures the GPU that is there and writes one
file for its kind, which every later process reads: where nothing was measured, attention on GPUs is
XLA's. A file holds milliseconds by kind of call, direction and implementation:

    {"device": "NVIDIA H200", "jax": "0.11.2", "milliseconds": {
        "causal, heads of 128": {"forward": {"mosaic_gpu": 1.9, "xla": 60.0}, "backward": {...}}}}

Only implementations whose results were right are in it. Processes of one run have to read the same
file: copy it to every machine, or point LCJAX_KERNELS at a folder that they share.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from pathlib import Path

import jax

from pallas_kernels import tuning
from pallas_kernels.masks import causal, everything

log = logging.getLogger(__name__)
VARIABLE = "LCJAX_KERNELS"
SHIPPED = Path(__file__).parent / "measured"
SIZES = (64, 128, 256)  # of heads: a call counts as the next larger one
FEW = 128  # rows that share a key head, up to which reading the keys is all that takes time


def folder() -> Path:
    """Where files of this machine are: $LCJAX_KERNELS, or the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get(VARIABLE) or cache / "lcjax" / "kernels")


def file_of(device: str) -> str:
    return re.sub(r"\W+", "_", device).strip("_") + ".json"


def kind(q, k, v, operands, spec, family: str = "flash") -> str | None:
    """What calls are told apart by where they are timed, such as "causal, heads of 128".

    None for float32, which is not timed.
    """
    if any(x.dtype.itemsize > 2 for x in (q, k, v)):
        return None
    largest = max(q.shape[-1], v.shape[-1])
    size = next((x for x in SIZES if largest <= x), SIZES[-1])
    return f"{_form(q, k, operands, spec, family)}, heads of {size}"


def _form(q, k, operands, spec, family: str) -> str:
    if family != "flash":
        return "landmark"
    if q.shape[1] * q.shape[2] // k.shape[2] <= FEW:
        return "few queries"
    if operands.table is not None or spec.table is not None:
        return "blocks"
    if q.shape[1] != k.shape[1]:
        return "cross"
    if operands.q_segments is not None or operands.q_index is not None:
        return "documents"
    return {causal(): "causal", everything(): "dense"}.get(spec.mask, "window")


def times(kind: str | None, direction: str) -> dict[str, float]:
    """Milliseconds by implementation on the GPU that programs are for, fastest first.

    Those of the nearest kind that was measured: other head sizes, then plain causal attention for
    what is computed like it. Empty where nothing was.
    """
    if kind is None or not (found := figures()):
        return {}
    form, size = kind.split(", heads of ")
    sizes = sorted(SIZES, key=lambda x: (x != int(size), x < int(size), abs(x - int(size))))
    forms = [form] if form in ("few queries", "landmark") else [form, "causal"]
    for name in (f"{form}, heads of {size}" for form in forms for size in sizes):
        if of := found.get(name, {}).get(direction):
            return dict(sorted(of.items(), key=lambda item: item[1]))
    return {}


def figures() -> dict:
    """Milliseconds by kind of call, direction and implementation; empty where nothing was measured.

    Of the GPU that programs are for.
    """
    device = tuning.device_kind()
    return _read(device, folder()) if device else {}


@functools.cache
def _read(device: str, own: Path) -> dict:
    """What this machine's folder says of a kind of GPU, else what was shipped."""
    version = jax.__version__
    for place in (own, SHIPPED):
        file = place / file_of(device)
        if not file.exists():
            continue
        try:
            found = json.loads(file.read_text())
            milliseconds, measured_with = found["milliseconds"], found["jax"]
        except (ValueError, KeyError, OSError, TypeError) as error:
            log.warning("%s cannot be read (%s): remove or measure it again", file, error)
            continue
        if measured_with.split(".")[:2] != version.split(".")[:2]:
            log.warning("%s was measured with jax %s, this is %s", file, measured_with, version)
        return milliseconds
    return {}


def write(place: Path, device: str, milliseconds: dict, wrong: dict[str, str] | None = None):
    """Writes the file of a kind of GPU, for this version of JAX; returns its path.

    What it has already stays, but for the kinds of calls that are given and for all that is known
    of implementations that were `wrong`, by name with the reason.
    """
    wrong = wrong or {}
    file = place / file_of(device)
    known = json.loads(file.read_text()) if file.exists() else {}
    kept = known.get("milliseconds", {}) if known.get("jax") == jax.__version__ else {}
    merged = {
        kind: {x: {k: v for k, v in of.items() if k not in wrong} for x, of in directions.items()}
        for kind, directions in (kept | milliseconds).items()
    }
    found = {"device": device, "jax": jax.__version__, "wrong": wrong, "milliseconds": merged}
    place.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(file)
    _read.cache_clear()
    return file
