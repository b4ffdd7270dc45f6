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
        self._losses: list[dict[str, float]] = []  # of each step: the whole, and its parts
        self._last: dict = {}

    def add(self, info: dict) -> None:
        """Adds one step, whose results have arrived on the host."""
        if info["finite"]:
            losses = {"loss": info["loss"]} | info["parts"]
            self._losses.append({name: float(value) for name, value in losses.items()})
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
        count, names = len(self._losses), self._losses[-1] if self._losses else ()
        metrics = {
            "loss": math.nan,
            **{name: sum(losses[name] for losses in self._losses) / count for name in names},
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
