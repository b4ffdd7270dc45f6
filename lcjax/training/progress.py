"""What a person sees while a run goes on: a bar on a terminal, plain lines in a log file."""

import sys
import time

import jax
from tqdm.auto import tqdm


def announce(text: str) -> None:
    """A line about what takes a while before or after the steps, once for all processes."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


class Progress:
    """Shows steps, loss, tokens per second, utilisation and the time that is left."""

    def __init__(self, *, steps: int, start: int, shown: bool = True):
        self._steps, self._shown = steps, shown
        self._start = start
        self._began: tuple[int, float] | None = None
        # A notebook is no terminal, but tqdm.auto draws a bar there.
        bar = shown and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._bar = tqdm(total=steps, initial=start, unit="step") if bar else None

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._shown:
            tqdm.write(text, file=sys.stderr) if self._bar else print(
                text, file=sys.stderr, flush=True
            )

    def advance(self, step: int) -> None:
        if self._began is None:
            # The first step holds compilation; a forecast starts after it.
            self._began = (step, time.perf_counter())
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def report(self, step: int, metrics: dict) -> None:
        parts = [f"loss {metrics['loss']:.4f}"]
        if "tokens_per_second" in metrics:
            parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
        if "mfu" in metrics:
            parts.append(f"MFU {metrics['mfu']:.1%}")
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(parts))
        elif self._shown:
            left = f"  ETA {_clock(self._seconds_left(step))}" if step < self._steps else ""
            self.say(f"step {step}/{self._steps}  " + "  ".join(parts) + left)

    def _seconds_left(self, step: int) -> float | None:
        if self._began is None or step <= self._began[0]:
            return None
        first, since = self._began
        return (time.perf_counter() - since) / (step - first) * (self._steps - step)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.close()


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
