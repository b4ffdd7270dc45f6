"""Waiting until all processes of a job are there, before JAX connects them.

JAX ends a process with a stack trace when another one does not come in time. Here process 0 listens
where JAX will listen, the others say who they are, and whoever is missing is named in one line.
"""

import contextlib
import socket
import time
from typing import NamedTuple

from lcjax.errors import InputError

_HELLO, _GO, _NO = "lcjax", "go", "no"
_SHORT = 5.0  # seconds within which somebody who has connected must say something


class Place(NamedTuple):
    """One process among those of a job."""

    coordinator: str  # host:port of process 0
    processes: int
    process: int

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0].strip("[]")


def meet(place: Place, timeout: float) -> None:
    """Returns when all processes of the job have called it; InputError when they do not."""
    _receive(place, timeout) if place.process == 0 else _announce(place, timeout)


def _receive(place: Place, timeout: float) -> None:
    """Process 0: waits for the others, then tells them all to go on, or why not."""
    deadline = time.monotonic() + timeout
    guests: dict[int, socket.socket] = {}
    try:
        with _listen(place) as door:
            while len(guests) < place.processes - 1 and (left := deadline - time.monotonic()) > 0:
                door.settimeout(min(left, 1.0))
                guest = None
                with contextlib.suppress(TimeoutError):
                    guest = door.accept()[0]
                if guest is not None:
                    _forget_gone(guests)
                    _admit(place, guest, guests)
                _forget_gone(guests)
        # The door is closed by now: the port is free for JAX.
        missing = [str(n) for n in range(1, place.processes) if n not in guests]
        if missing:
            raise InputError(_missing(place, missing, timeout))
        _tell(guests, _GO)
    except InputError as error:
        _tell(guests, f"{_NO} {error}")
        raise
    finally:
        for guest in guests.values():
            guest.close()


def _listen(place: Place) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            address = ("", place.port)
            return socket.create_server(address, family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", place.port))
    except OSError as error:
        raise InputError(
            f"distributed.coordinator={place.coordinator}: process 0 cannot listen there"
            f" ({error.strerror}); give another port"
        ) from error


def _admit(place: Place, guest: socket.socket, guests: dict[int, socket.socket]) -> None:
    """Notes who has come; others than processes of this job are sent away."""
    guest.settimeout(_SHORT)
    words = _read_line(guest).split()
    if len(words) != 3 or words[0] != _HELLO or not all(word.isdigit() for word in words[1:]):
        guest.close()
        return
    process, processes = map(int, words[1:])
    if process in guests or process == 0:
        fault = f"distributed.process={process} is the number of two processes; count from 0"
    elif processes != place.processes:
        fault = (
            f"distributed.processes is {processes} in process {process} and {place.processes} in"
            " process 0; give all the same"
        )
    else:
        guests[process] = guest
        return
    _tell({process: guest}, f"{_NO} {fault}")
    guest.close()
    raise InputError(fault)


def _announce(place: Place, timeout: float) -> None:
    """Another process than 0: says who it is until it is told to go on."""
    deadline, seen = time.monotonic() + timeout, "nothing answers there"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((place.host, place.port), min(left, _SHORT)) as door:
                door.sendall(f"{_HELLO} {place.process} {place.processes}\n".encode())
                # Process 0 may have started later, and waits as long for the others.
                door.settimeout(timeout + _SHORT)
                word, _, reason = _read_line(door).partition(" ")
        except OSError as error:  # not there yet: refused, or a name that is not known yet
            word, reason, seen = "", "", error.strerror or str(error)
        if word == _GO:
            return
        if word == _NO:
            raise InputError(reason)
        time.sleep(min(0.2, timeout))
    raise InputError(
        f"distributed.coordinator={place.coordinator}: process 0 did not come within {timeout:g} s"
        f" ({seen}; {place.processes} processes expected, this is process {place.process}); start"
        " it, correct the address, or raise distributed.timeout"
    )


def _missing(place: Place, missing: list[str], timeout: float) -> str:
    who = f"process {missing[0]}" if len(missing) == 1 else f"processes {', '.join(missing)}"
    return (
        f"distributed.coordinator={place.coordinator}: {who} did not come within {timeout:g} s"
        f" ({place.processes} processes expected); start them all, raise distributed.timeout, or"
        " set distributed.processes=1 to run alone"
    )


def _tell(guests: dict[int, socket.socket], text: str) -> None:
    for guest in guests.values():
        try:
            guest.sendall(f"{' '.join(text.split())}\n".encode())
        except OSError:  # has ended meanwhile; JAX notices when it connects
            continue


def _read_line(end: socket.socket) -> str:
    """Up to the end of the line, or to what came before the connection ended."""
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < 4096:
            more = end.recv(4096)
            if not more:
                break
            data += more
    except OSError:
        return ""
    return data.decode(errors="replace").strip()


def _forget_gone(guests: dict[int, socket.socket]) -> None:
    """Drops processes that have ended: when they are started again they come anew."""
    for process in [number for number, guest in guests.items() if _has_gone(guest)]:
        guests.pop(process).close()


def _has_gone(guest: socket.socket) -> bool:
    """Whether the other end is closed; a process that waits says nothing."""
    try:
        guest.settimeout(0)
        return not guest.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        guest.settimeout(_SHORT)
