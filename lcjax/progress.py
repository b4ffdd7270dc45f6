"""Shows that the process works while a call reports no progress, such as a compilation."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from tqdm.auto import tqdm

_TERMINAL, _LOG = 1.0, 60.0  # seconds between two updates on a terminal, and of a log


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Prints `text` to stderr, and the elapsed time until the block ends."""
    if not _is_terminal():
        print(f"{text} ...", file=sys.stderr, flush=True)
    options = {"desc": text, "bar_format": "{desc}: {elapsed}", "leave": False}
    with tqdm(**options, delay=0 if _is_terminal() else _LOG) as bar, ticking(bar):
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
