"""A trace of some steps, for xprof or Perfetto (`train.profile`)."""

from pathlib import Path

import jax

from lcjax.training.config import Profile
from lcjax.training.progress import announce


class Trace:
    """Starts and stops the profiler; use it as a context manager."""

    def __init__(self, profile: Profile | None, folder: Path):
        self._profile, self._folder, self._running = profile, folder, False

    def turns(self, step: int) -> bool:
        """Whether the trace starts or ends before this step, counted from 0."""
        profile = self._profile
        return profile is not None and step in (profile.start, profile.start + profile.steps)

    def turn(self, step: int) -> str | None:
        """Starts or ends the trace; returns what there is to say."""
        if self._running:
            return self._stop()
        if step == self._profile.start:
            jax.profiler.start_trace(str(self._folder))
            self._running = True
        return None

    def _stop(self) -> str:
        jax.profiler.stop_trace()
        self._running = False
        return f"trace written to {self._folder}"

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_) -> None:
        if self._running:
            announce(self._stop())
