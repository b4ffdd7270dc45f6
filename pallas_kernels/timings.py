"""Which implementations of attention are right, and how fast, on GPUs where they were measured.

`python -m benchmarks.gpu.attention --keep` (of a wheel: `lcjax.benchmarks.gpu.attention`) checks
and measures the GPU of the process and writes one file for its kind, which every later process
reads. Where nothing was measured, rules choose (`pallas_kernels.dispatch.choose`). A file holds
milliseconds by kind of call, direction and implementation, and what was wrong by implementation,
dtype and form of call:

    {"device": "NVIDIA H200", "jax": "0.11.2", "driver": "580.95", "kernels": "5f0c...",
     "wrong": {"triton, float32, documents": "small, float32: documents: relative errors ..."},
     "milliseconds": {
        "causal, heads of 128": {"forward": {"mosaic_gpu": 1.9, "xla": 60.0}, "backward": {...}}}}

What was wrong is never used for such calls, whatever the size of their heads. Times say which
kernel is the fastest, and the self-check (`pallas_kernels.self_check`) whether it may run.
Processes of one run have to read the same file: copy it to every machine, or point LCJAX_KERNELS at
a folder that they share.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import subprocess
from pathlib import Path

import jax

from pallas_kernels import tuning
from pallas_kernels.masks import causal, everything

log = logging.getLogger(__name__)
VARIABLE = "LCJAX_KERNELS"
SIZES = (64, 128, 256)  # of heads: a call counts as the next larger one
MEASURED = "bfloat16"  # the dtype of what is timed; float16 follows it
FEW = 128  # rows that share a key head, up to which reading the keys is all that takes time


def user_cache() -> Path:
    """The user's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lcjax"


def folder() -> Path:
    """The folder of this machine's files: $LCJAX_KERNELS, or the user's cache."""
    return Path(os.environ.get(VARIABLE) or user_cache() / "kernels")


@functools.cache
def driver() -> str:
    """The version of NVIDIA's driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        try:
            text = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout
        except (OSError, subprocess.SubprocessError):
            text = ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"


@functools.cache
def sources() -> str:
    """A hash of this package."""
    digest, package = hashlib.sha256(), Path(__file__).resolve().parent
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """What decides whether a result still holds, beside the GPU."""
    return {"jax": jax.__version__, "driver": driver(), "kernels": sources()}


def file_of(device: str) -> str:
    return re.sub(r"\W+", "_", device).strip("_") + ".json"


def kind(q, k, v, operands, spec) -> str | None:
    """The kind of call by which times are stored, such as "causal, heads of 128".

    None for float32, which is not timed.
    """
    if any(x.dtype.itemsize > 2 for x in (q, k, v)):
        return None
    return kind_of_any_dtype(q, k, v, operands, spec)


def kind_of_any_dtype(q, k, v, operands, spec) -> str:
    """As `kind`, also for float32."""
    largest = max(q.shape[-1], v.shape[-1])
    size = next((x for x in SIZES if largest <= x), SIZES[-1])
    return f"{_form(q, k, operands, spec)}, heads of {size}"


def _form(q, k, operands, spec) -> str:
    if spec.block is not None:
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


def form_of(kind: str) -> str:
    """ "causal" of "causal, heads of 128"."""
    return kind.split(", heads of ")[0]


def times(kind: str | None, direction: str, dtype: str = MEASURED) -> dict[str, float]:
    """Milliseconds by implementation on the GPU that programs are for, fastest first.

    They are those of the nearest kind that was measured: other head sizes, then plain causal
    attention for the forms that are computed like it. Empty where nothing was measured. What was
    wrong for this form and dtype is left out.
    """
    if kind is None or not (milliseconds := figures()):
        return {}
    form, size = kind.split(", heads of ")
    sizes = sorted(SIZES, key=lambda x: (x != int(size), x < int(size), abs(x - int(size))))
    forms = [form] if form in ("few queries", "landmark") else [form, "causal"]
    for name in (f"{form}, heads of {size}" for form in forms for size in sizes):
        if by_name := milliseconds.get(name, {}).get(direction):
            kept = {x: ms for x, ms in by_name.items() if why_wrong(x, dtype, form) is None}
            return dict(sorted(kept.items(), key=lambda item: item[1]))
    return {}


def case(name: str, dtype: str, form: str) -> str:
    """The key of what was wrong."""
    return f"{name}, {dtype}, {form}"


def why_wrong(name: str, dtype: str, form: str) -> str | None:
    """What a measurement found wrong in an implementation's calls of a form, or None."""
    return wrong().get(case(name, dtype, form))


def wrong() -> dict[str, str]:
    """What measurements on the GPU that programs are for found wrong: reasons by `case`."""
    device = tuning.device_kind()
    return _read(device, folder())["wrong"] if device else {}


def figures() -> dict:
    """Milliseconds by kind of call, direction and implementation on the GPU that programs are for.

    Empty where nothing was measured.
    """
    device = tuning.device_kind()
    return _read(device, folder())["milliseconds"] if device else {}


def is_current() -> bool:
    """Whether the GPU was measured with these kernels, this driver and this version of JAX."""
    device = tuning.device_kind()
    return bool(device) and _read(device, folder())["versions"] == versions()


@functools.cache
def _read(device: str, local: Path) -> dict:
    """The file of a kind of GPU in this machine's folder."""
    file, version = local / file_of(device), jax.__version__
    nothing = {"milliseconds": {}, "wrong": {}, "versions": {}}
    if not file.exists():
        return nothing
    try:
        content = json.loads(file.read_text())
        found = {"milliseconds": content["milliseconds"], "wrong": content.get("wrong", {})}
        found["versions"] = {x: content.get(x) for x in versions()}
        measured_with = content["jax"]
    except (ValueError, KeyError, OSError, TypeError) as error:
        log.warning("%s cannot be read (%s): remove or measure it again", file, error)
        return nothing
    if measured_with.split(".")[:2] != version.split(".")[:2]:
        log.warning("%s was measured with jax %s, this is %s", file, measured_with, version)
    return found


def write(
    place: Path, device: str, milliseconds: dict, wrong: dict[str, str] | None = None
) -> Path:
    """Writes the file of a kind of GPU, for these `versions`; returns its path.

    What the file has of the same versions stays, except times of what is `wrong`: a reason by
    `case`.
    """
    file, here = place / file_of(device), versions()
    known = json.loads(file.read_text()) if file.exists() else {}
    if any(known.get(x) != here[x] for x in here):
        known = {}
    wrong, merged = known.get("wrong", {}) | (wrong or {}), {}
    for kind, directions in (*known.get("milliseconds", {}).items(), *milliseconds.items()):
        for direction, of in directions.items():
            right = {k: v for k, v in of.items() if case(k, MEASURED, form_of(kind)) not in wrong}
            merged.setdefault(kind, {})[direction] = right  # of one workload, measured in turns
    content = {"device": device, **here, "wrong": wrong, "milliseconds": merged}
    place.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(file)
    _read.cache_clear()
    return file
