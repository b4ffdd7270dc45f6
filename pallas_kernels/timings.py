"""Measured speed and correctness of attention's implementations on GPUs.

`python -m benchmarks.gpu.attention --keep` (of a wheel: `lcjax.benchmarks.gpu.attention`) checks
and measures the implementations on the GPU of the process. It writes one file for the kind of GPU,
which every later process reads. Without a measurement `pallas_kernels.dispatch.choose` follows
fixed rules. A file holds milliseconds by kind of call, direction and implementation, and the
reasons why results were wrong by implementation, dtype and form of call:

    {"device": "NVIDIA H200", "jax": "0.11.2", "driver": "580.95", "kernels": "5f0c...",
     "wrong": {"triton, float32, documents": "small, float32: documents: relative errors ..."},
     "milliseconds": {
        "causal, heads of 128": {"forward": {"mosaic_gpu": 1.9, "xla": 60.0}, "backward": {...}}}}

An implementation that was wrong for a form of call never runs such calls, whatever the size of
their heads. Times decide which kernel is the fastest, and the self-check
(`pallas_kernels.self_check`) decides whether it may run. Processes of one run must read the same
file: copy it to every machine, or set LCJAX_KERNELS to a folder that they share.
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

from pallas_kernels import nvidia
from pallas_kernels.masks import causal, everything
from pallas_kernels.quantised import is_quantised

log = logging.getLogger(__name__)
VARIABLE = "LCJAX_KERNELS"
SIZES = (64, 128, 256)  # head sizes that are measured; others count as the next larger one
CHOSEN = "chosen keys"  # the form of calls with `key_bits`
# Forms that causal attention says nothing about
ALONE = ("few queries", "codes", "landmark", CHOSEN)
TIMED_DTYPE = "bfloat16"  # the dtype of timed calls; float16 uses the same times
FEW = 128  # rows per key head up to which the time of a call is that of reading the keys


def user_cache() -> Path:
    """Returns lcjax's folder in the user's cache, for files that can be recreated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lcjax"


def folder() -> Path:
    """Returns the folder of this machine's files: $LCJAX_KERNELS, or one in the user's cache."""
    return Path(os.environ.get(VARIABLE) or user_cache() / "kernels")


@functools.cache
def driver() -> str:
    """Returns the version of NVIDIA's driver, or "unknown"."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        try:
            text = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout
        except (OSError, subprocess.SubprocessError):
            text = ""
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return match[0] if match else "unknown"


@functools.cache
def sources() -> str:
    """Returns a hash of this package's source files."""
    digest, package = hashlib.sha256(), Path(__file__).resolve().parent
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Returns the versions for which a result is valid, besides the kind of GPU."""
    return {"jax": jax.__version__, "driver": driver(), "kernels": sources()}


def file_of(device: str) -> str:
    return re.sub(r"\W+", "_", device).strip("_") + ".json"


def kind(q, k, v, operands, spec) -> str | None:
    """Returns the kind of call by which times are stored, such as "causal, heads of 128".

    It is None for float32, which is not timed.
    """
    if any(x.dtype.itemsize > 2 for x in (q, k, v)):
        return None
    return kind_of_any_dtype(q, k, v, operands, spec)


def kind_of_any_dtype(q, k, v, operands, spec) -> str:
    """Returns the kind of call as `kind` does, also for float32."""
    largest = max(q.shape[-1], v.shape[-1])
    size = next((x for x in SIZES if largest <= x), SIZES[-1])
    return f"{_form(q, k, operands, spec)}, heads of {size}"


def _form(q, k, operands, spec) -> str:
    if spec.block is not None:
        return "landmark"
    if is_quantised(k):
        return "codes"
    if operands.key_bits is not None:
        return CHOSEN
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
    """Returns the form of a kind of call: "causal" for "causal, heads of 128"."""
    return kind.split(", heads of ")[0]


def times(kind: str | None, direction: str, dtype: str = TIMED_DTYPE) -> dict[str, float]:
    """Returns milliseconds by implementation on the GPU that programs are for, fastest first.

    They are those of the nearest kind that was measured: other head sizes, then plain causal
    attention for the forms that are computed like it. Implementations that were wrong for this form
    and dtype are left out. The result is empty if nothing was measured.
    """
    if kind is None or not (milliseconds := figures()):
        return {}
    form, size = kind.split(", heads of ")
    sizes = sorted(SIZES, key=lambda x: (x != int(size), x < int(size), abs(x - int(size))))
    forms = [form] if form in ALONE else [form, "causal"]
    for name in (f"{form}, heads of {size}" for form in forms for size in sizes):
        if by_name := milliseconds.get(name, {}).get(direction):
            right = {x: ms for x, ms in by_name.items() if why_wrong(x, dtype, form) is None}
            return dict(sorted(right.items(), key=lambda item: item[1]))
    return {}


def case_key(name: str, dtype: str, form: str) -> str:
    """Returns the key of a wrong result in `wrong`."""
    return f"{name}, {dtype}, {form}"


def why_wrong(name: str, dtype: str, form: str) -> str | None:
    """Returns why an implementation's calls of a form were measured to be wrong, or None."""
    return wrong().get(case_key(name, dtype, form))


def wrong() -> dict[str, str]:
    """Returns the reasons of wrong results on the GPU that programs are for, by `case_key`."""
    device = nvidia.device_kind()
    return _read(device, folder())["wrong"] if device else {}


def figures() -> dict:
    """Returns milliseconds by kind of call, direction and implementation.

    They are those of the GPU that programs are for; empty if nothing was measured.
    """
    device = nvidia.device_kind()
    return _read(device, folder())["milliseconds"] if device else {}


def is_current() -> bool:
    """Returns whether the GPU was measured with these kernels, this driver and this JAX."""
    device = nvidia.device_kind()
    return bool(device) and _read(device, folder())["versions"] == versions()


@functools.cache
def _read(device: str, local: Path) -> dict:
    """Returns the content of the file of a kind of GPU; empty if it is missing or unreadable."""
    file, version = local / file_of(device), jax.__version__
    nothing = {"milliseconds": {}, "wrong": {}, "versions": {}}
    if not file.exists():
        return nothing
    try:
        content = json.loads(file.read_text())
        result = {"milliseconds": content["milliseconds"], "wrong": content.get("wrong", {})}
        result["versions"] = {x: content.get(x) for x in versions()}
        measured_with = content["jax"]
    except (ValueError, KeyError, OSError, TypeError) as error:
        log.warning("%s cannot be read (%s): remove or measure it again", file, error)
        return nothing
    if measured_with.split(".")[:2] != version.split(".")[:2]:
        log.warning("%s was measured with jax %s, this is %s", file, measured_with, version)
    return result


def write(
    place: Path, device: str, milliseconds: dict, wrong: dict[str, str] | None = None
) -> Path:
    """Writes the file of a kind of GPU for the current `versions`, and returns its path.

    Earlier results of the same versions remain in the file, except times of implementations that
    are wrong.

    Args:
      wrong: reasons by `case_key`.
    """
    file, here = place / file_of(device), versions()
    known = json.loads(file.read_text()) if file.exists() else {}
    if any(known.get(x) != here[x] for x in here):
        known = {}
    wrong, merged = known.get("wrong", {}) | (wrong or {}), {}
    for kind, directions in (*known.get("milliseconds", {}).items(), *milliseconds.items()):
        for direction, by_name in directions.items():
            right = {
                k: v
                for k, v in by_name.items()
                if case_key(k, TIMED_DTYPE, form_of(kind)) not in wrong
            }
            # Replaced as a whole: only times of one workload, measured in turns, are comparable.
            merged.setdefault(kind, {})[direction] = right
    content = {"device": device, **here, "wrong": wrong, "milliseconds": merged}
    place.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(file)
    _read.cache_clear()
    return file
