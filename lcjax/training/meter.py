"""Means and speeds between two lines of the log."""

import math
import time


class Meter:
    """Collects the info of steps; `read` gives the metrics since the last `read`."""

    def __init__(self, flops_per_token: float, peak: float, peak_source: str):
        self._flops, self._peak, self.peak_source = flops_per_token, peak, peak_source
        self._clock: float | None = None  # starts after the first step, which holds compilation
        self._timed_tokens = 0.0
        self._clear()

    def _clear(self) -> None:
        self._losses: list[float] = []
        self._last: dict = {}

    def add(self, info: dict) -> None:
        """Adds one step, whose results have arrived on the host."""
        if info["finite"]:
            self._losses.append(float(info["loss"]))
        self._last = info
        if self._clock is None:
            self._clock = time.perf_counter()
        else:
            self._timed_tokens += float(info["tokens"])

    def restart(self) -> None:
        """Leaves out time that was not training, such as a validation."""
        self._clock, self._timed_tokens = time.perf_counter(), 0.0

    def read(self) -> dict[str, float]:
        """Mean loss, last gradient norm and rate, tokens per second and utilisation."""
        metrics = {
            "loss": sum(self._losses) / len(self._losses) if self._losses else math.nan,
            "grad_norm": float(self._last["grad_norm"]),
            "lr": float(self._last["lr"]),
            "tokens": float(self._last["tokens"]),
            "skipped": int(self._last["skipped"]),
        }
        seconds = time.perf_counter() - self._clock
        if self._timed_tokens:
            metrics["tokens_per_second"] = self._timed_tokens / seconds
            # Attention is counted as if every row were one document.
            metrics["mfu"] = metrics["tokens_per_second"] * self._flops / self._peak
        self.restart()
        self._clear()
        return metrics
