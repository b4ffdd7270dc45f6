"""The HTTP server of an application, on uvicorn, with limits that uvicorn lacks.

A client that sends nothing, half of a request, or reads nothing of its answer loses its connection
after a time, and so gives back what it holds. After a signal the process always ends.
"""

import functools
import os
import signal
import sys
import threading
from asyncio import BaseTransport, TimerHandle
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

# Options of uvicorn. Idle connections stay open for 75 seconds, for the client's next request.
_OPTIONS = {
    "log_level": "warning", "access_log": False, "timeout_keep_alive": 75,
    "loop": "asyncio", "ws": "none", "lifespan": "on",
}  # fmt: skip


class HttpServer(uvicorn.Server):
    """Serves an application until SIGINT or SIGTERM.

    After the first signal, running requests are finished for `shutdown_timeout` seconds. Then, or
    on a second signal, the process ends with the exit code 128 + the number of the signal, whatever
    its threads do.
    """

    def __init__(self, app: ASGIApp, *, client_timeout: float, shutdown_timeout: float):
        """Configures uvicorn for `app`.

        Args:
          app: the ASGI application.
          client_timeout: seconds in which a client must send the head of a request, and read on
            while an answer is sent.
          shutdown_timeout: seconds for running requests after a signal.
        """
        protocol: Any = functools.partial(_Protocol, client_timeout)
        super().__init__(uvicorn.Config(app, http=protocol, **_OPTIONS))
        self._shutdown_timeout = shutdown_timeout
        self._signal = 0
        self._is_ending, self._has_ended = threading.Event(), threading.Event()

    def run(self, sockets: list | None = None) -> None:
        # Started before any signal: a signal's handler may not start threads, whose locks the
        # interrupted code may hold.
        threading.Thread(target=self._end_in_time, daemon=True).start()
        try:
            super().run(sockets)
        finally:
            self._has_ended.set()
            self._is_ending.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal. Unlike uvicorn's, it does not raise the signal again at the end."""
        if self.should_exit:
            os._exit(128 + sig)
        self._signal, self.should_exit = sig, True
        self._is_ending.set()

    def _end_in_time(self) -> None:
        self._is_ending.wait()
        if not self._has_ended.wait(self._shutdown_timeout):
            name = signal.Signals(self._signal).name
            message = f"error: requests still ran {self._shutdown_timeout:g} s after {name}"
            print(f"{message} (--shutdown_timeout); they were ended", file=sys.stderr, flush=True)
            os._exit(128 + self._signal)


class _Protocol(H11Protocol):
    """A connection that is closed when its client keeps it waiting."""

    def __init__(self, timeout: float, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._timeout = timeout
        self._timers: dict[str, TimerHandle] = {}  # by what the client has to do

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self._limit("send", True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # The application limits the time of bodies that it reads; others are dropped here.
        self._limit("send", self.cycle is None or self.cycle.response_complete)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit("read", True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._limit("read", False)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for action in list(self._timers):
            self._limit(action, False)

    def shutdown(self) -> None:
        super().shutdown()
        if self.conn.their_state is h11.SEND_BODY:  # its request has not begun
            self.transport.abort()

    def _limit(self, action: str, is_waiting: bool) -> None:
        """Starts or stops the time in which the client must send or read."""
        if not is_waiting and action in self._timers:
            self._timers.pop(action).cancel()
        elif is_waiting and action not in self._timers:
            self._timers[action] = self.loop.call_later(self._timeout, self.transport.abort)
