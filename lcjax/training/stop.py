"""Being asked to stop: SIGTERM (a scheduler) and Ctrl-C end a run with a checkpoint."""

import signal
import threading

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Notes the first SIGTERM or SIGINT; a second Ctrl-C interrupts at once."""

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._previous: dict = {}

    def __enter__(self) -> "StopRequest":
        # With several processes JAX watches for SIGTERM itself and agrees on a common step.
        # Python allows handlers in the main thread only.
        alone = jax.process_count() == 1
        if alone and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            if handler is not None:  # one that Python did not set, and cannot set again
                signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        del frame
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt("stopped at once; the last checkpoint is the one to resume")
        self.signal = signal.Signals(number)

    def wanted(self, step: int) -> bool:
        """Whether the run has to end after `step`; the same answer in every process."""
        # Without that service, as in eval.py, SIGTERM ends every process at once.
        together = jax.process_count() > 1 and jax.config.jax_enable_preemption_service
        if together and multihost_utils.reached_preemption_sync_point(step):
            self.signal = signal.SIGTERM
        return self.signal is not None
