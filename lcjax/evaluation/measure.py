"""Peak memory of a row of a table."""

import ctypes
import gc
import resource
import sys
from pathlib import Path

import jax

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Starts a new peak where the system allows it: host memory on Linux.

    Device allocators keep one peak per process; lengths run in ascending order, so it still
    belongs to the length that is being measured.
    """
    if _device_peak() is None and _CLEAR.exists():
        # glibc keeps what was freed, and the next row would answer for the last one.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            gc.collect()
            trim(0)
        try:
            _CLEAR.write_text("5")
        except OSError:  # containers may forbid it; the peak is then the process's
            return


def peak_bytes() -> int:
    """Peak bytes of the busiest accelerator, or of the process where there is none."""
    device = _device_peak()
    if device is not None:
        return device
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _device_peak() -> int | None:
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [entry["peak_bytes_in_use"] for entry in stats if entry]
    return max(peaks, default=None)
