"""Peak memory, and time with and without compilation."""

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
    """Resets the peak if the system allows it, and returns the floor for `peak_bytes`.

    The floor is 0 for host memory on Linux. Device allocators keep one peak per process, which
    cannot be reset; of a later use below that peak, only the bound `highest_bytes` is known.
    """
    device = _device_peak()
    if device is not None:
        return device
    if not _CLEAR.exists():
        return _host_peak()
    # glibc keeps freed memory, which would count in the next peak.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        gc.collect()
        trim(0)
    try:
        _CLEAR.write_text("5")
    except OSError:  # containers may forbid it; the peak is then that of the process
        return _host_peak()
    return 0


def peak_bytes(floor: int = 0) -> int | None:
    """Returns the peak bytes of the busiest accelerator, or of the process without accelerators.

    The result is None if the peak is not above `floor` (the result of `reset_peak`), because the
    peak is then an earlier one.
    """
    peak = highest_bytes()
    return peak if peak > floor else None


def highest_bytes() -> int:
    """Returns the highest peak since the last reset that the system allowed."""
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
    """Measures the seconds of a `with` block, and the seconds in which JAX traced or compiled.

    Methods share compiled functions, so compilation time would count for the first method only.
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
        # Nested tracing reports the same time again.
        for first, last in sorted(self._spans):
            self.compiling += max(0.0, last - max(first, end))
            end = max(end, last)

    def _note(self, event: str, seconds: float, **_) -> None:
        if event.startswith("/jax/core/compile/"):
            now = time.perf_counter()
            self._spans.append((now - seconds, now))
