"""What a cell of a table cost: peak memory, and time without the compilation in it."""

import ctypes
import gc
import resource
import sys
import time
from pathlib import Path

import jax
import jax.monitoring

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reset_peak() -> int:
    """Starts a new peak where the system allows it, and returns what a peak has to exceed.

    That is 0 for host memory on Linux. Device allocators keep one peak per process, which nothing
    resets: of what does not rise above it, only the upper bound `highest_bytes` is known.
    """
    device = _device_peak()
    if device is not None:
        return device
    if not _CLEAR.exists():
        return _host_peak()
    # glibc keeps what was freed, and the next row would answer for the last one.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        gc.collect()
        trim(0)
    try:
        _CLEAR.write_text("5")
    except OSError:  # containers may forbid it; the peak is then the process's
        return _host_peak()
    return 0


def peak_bytes(floor: int = 0) -> int | None:
    """Peak bytes of the busiest accelerator, or of the process where there is none.

    None when the peak is not above `floor`, the result of `reset_peak`: it is then an earlier one.
    """
    peak = highest_bytes()
    return peak if peak > floor else None


def highest_bytes() -> int:
    """The highest peak that the system tells of: no cell since it was reset has needed more."""
    device = _device_peak()
    return _host_peak() if device is None else device


def _host_peak() -> int:
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


class Stopwatch:
    """Seconds of a `with` block, and how many of them JAX traced, lowered or compiled.

    Methods share compiled functions, so compilation would be charged to whoever comes first.
    """

    def __enter__(self) -> "Stopwatch":
        self._spans: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._note)
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self.seconds = time.perf_counter() - self._start
        jax.monitoring.unregister_event_duration_listener(self._note)
        self.compiling, end = 0.0, self._start
        # A function that is traced inside another reports its part of the same time again.
        for first, last in sorted(self._spans):
            self.compiling += max(0.0, last - max(first, end))
            end = max(end, last)

    def _note(self, event: str, seconds: float, **_) -> None:
        if event.startswith("/jax/core/compile/"):
            now = time.perf_counter()
            self._spans.append((now - seconds, now))
