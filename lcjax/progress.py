"""Shows that the process works while a call reports no progress, such as a compilation."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tqdm.auto import tqdm

_TERMINAL, _LOG = 1.0, 60.0  # seconds between two updates on a terminal, and of a log
# Parameters from which the compilation of a training step takes minutes. yarn_7b_32k.yaml for 64
# TPU chips took 3.4 minutes of CPU time, and 12 minutes on two cores that ran other work, too.
_MINUTES_FROM = 1e9


@contextlib.contextmanager
def compiling(program: str, num_params: int, num_devices: int) -> Iterator[None]:
    """Prints that a program is being compiled, and the elapsed time until the block ends.

    For models of 1e9 parameters and more it also says how long that takes, before it begins.

    Args:
      program: name of the program, such as "the training step".
      num_params: number of parameters of the model.
      num_devices: number of devices for which the program is compiled.
    """
    on = f"{num_devices} device{'s' if num_devices > 1 else ''}"
    note = f"a model of {num_params:,} parameters for {on}"
    if num_params >= _MINUTES_FROM:
        note += "; this may take minutes: 5 to 20 for 7e9 parameters and 64 devices"
    text, start = f"compiling {program}", time.monotonic()
    print(f"{text} ({note}) ...", file=sys.stderr, flush=True)
    if _is_terminal():
        options = {"desc": text, "bar_format": "{desc}: {elapsed}", "leave": False}
        with tqdm(**options) as bar, ticking(bar):
            yield
        return

    def report() -> None:
        elapsed = tqdm.format_interval(time.monotonic() - start)
        print(f"{text}: {elapsed}", file=sys.stderr, flush=True)

    with _every(_LOG, report):
        yield


@contextlib.contextmanager
def ticking(bar: tqdm) -> Iterator[None]:
    """Draws `bar` again and again while the block runs, so that its elapsed time goes on."""
    seconds = _TERMINAL if _is_terminal() else _LOG
    with _every(seconds, bar.refresh) if not bar.disable else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _every(seconds: float, function: Callable[[], object]) -> Iterator[None]:
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(seconds):
            function()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _is_terminal() -> bool:
    """Returns whether a line can be drawn again; a notebook is no terminal, but tqdm.auto can."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
