"""Attacks a server on this machine: slow and silent clients, signals, long prompts, many requests.

    python -m tools.campaigns.serve
    python -m tools.campaigns.serve --only signals

Each part starts `python -m lcjax.serve` and prints a line for each attack with what it measured;
the exit code is 1 if one failed. Connections, requests and bytes are bounded, and all go to
127.0.0.1. Texts are measured with `smollm2-135m-instruct`, clients with the preset tiny. Not
collected by pytest: ten minutes on 2 cores.
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

SMALL, TINY = "path=smollm2-135m-instruct", "preset=tiny"
TIMEOUT = 5.0  # --client_timeout and --shutdown_timeout of the servers
SLOW = 3.0  # seconds that a server may need beyond these on a busy machine
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{"
TEXT = "The ferry leaves the pier at seven in the morning and returns at nine in the evening. "
# A stream of 50 MB that takes one pass over 1,000 tokens.
UNREAD = {"prompt": [5] * 1000, "echo": True, "logprobs": 20, "n": 64, "max_tokens": 1}
results: list[bool] = []


class Server:
    """A server process of this machine."""

    def __init__(self, model: str, *options: str):
        words = [f"--model.{model}", "--port=0", *options]
        words += [f"--client_timeout={TIMEOUT}", f"--shutdown_timeout={TIMEOUT}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lcjax.serve", *words],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.process.stdout.readline()
        self.port = int(self.process.stdout.readline().split("/v1")[0].rpartition(":")[2])
        while True:
            with contextlib.suppress(OSError):
                self.health()
                break
            time.sleep(0.1)

    def ask(self, path: str, body: dict | None = None) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=900)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", path, data)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def complete(self, **body) -> tuple[int, dict]:
        return self.ask("/v1/completions", {"max_tokens": 8, "temperature": 0} | body)

    def health(self) -> float:
        start = time.monotonic()
        assert self.ask("/health")[0] == 200
        return time.monotonic() - start

    def memory(self) -> int:
        """Returns the bytes of the process in memory."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    def open(self, data: bytes) -> socket.socket:
        """Returns a connection with a small window that sent `data` and has read nothing."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", self.port))
        client.sendall(data)
        return client

    def stream(self, **body) -> socket.socket:
        """Returns a connection whose client does not read the stream that it requested."""
        body = {"temperature": 0, "stream": True, **body}
        data = json.dumps(body).encode()
        return self.open(HALF.replace(b"1000\r\n\r\n{", b"%d\r\n\r\n" % len(data)) + data)

    def end(self, *signals: int) -> tuple[float, int]:
        """Sends signals; returns the seconds until the process ends, and its exit code."""
        start = time.monotonic()
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.3)
        code = self.process.wait(120)
        return time.monotonic() - start, code


@contextlib.contextmanager
def serving(model: str, *options: str) -> Iterator[Server]:
    server = Server(model, *options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def report(name: str, passed: bool, text: str) -> None:
    results.append(passed)
    print(f"{'ok    ' if passed else 'FAILED'} {name}: {text}", flush=True)


def is_closed(client: socket.socket) -> bool:
    """Returns whether the server ends the connection; reads what it sent before."""
    client.settimeout(TIMEOUT + SLOW)
    with contextlib.suppress(ConnectionError):
        try:
            while client.recv(65536):
                pass
        except TimeoutError:
            return False
    return True


def slow_clients() -> None:
    """Clients that send half a request, or do not read, do not keep others from the server."""
    attacks: dict[str, tuple[int, Callable[[Server], socket.socket]]] = {
        "no byte": (200, lambda server: server.open(b"")),
        "half a head": (200, lambda server: server.open(HALF[:40])),
        "half a body": (200, lambda server: server.open(HALF)),
        "half a chunked body": (
            200,
            lambda server: server.open(
                HALF.replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked") + b"\r\n"
            ),
        ),
        "streams that are not read": (8, lambda server: server.stream(**UNREAD)),
    }  # fmt: skip
    with serving(TINY, "--max_queue=8", "--length=2048") as server:
        server.complete(prompt="a")
        for name, (count, attack) in attacks.items():
            clients = [attack(server) for _ in range(count)]
            while "stream" in name and server.ask("/health")[1]["running"] < count:
                time.sleep(0.1)
            start, status = time.monotonic(), 503
            while status == 503 and time.monotonic() < start + 300:
                status, _ = server.complete(prompt="a")
                time.sleep(0.05 * (status == 503))
            seconds = time.monotonic() - start
            time.sleep(TIMEOUT)  # a client that reads goes on
            closed = sum(map(is_closed, clients))
            for client in clients:
                client.close()
            text = f"{count} clients; a request beside them took {seconds:.1f} s; {closed} closed"
            report(name, status == 200 and closed == count, text)


def long_texts() -> None:
    """Texts beyond the length are refused before they are tokenised, and nobody waits for them."""
    text = TEXT * (20_000_000 // len(TEXT))
    bodies = {
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/contexts": {"text": text},
        "/v1/completions of ids": {"prompt": [5] * 1_000_000},
        "/v1/completions of many ids": {"prompt": [5] * 2_000_000},
        "/v1/completions of blanks": {"prompt": " " * 20_000_000},
    }
    with serving(SMALL) as server:
        server.complete(prompt="a")
        for name, body in bodies.items():
            before, is_done = server.memory(), threading.Event()
            size = len(json.dumps(body))
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                watching = pool.submit(watch, server, is_done)
                start = time.monotonic()
                status, _ = server.ask(name.split()[0], body)
                seconds = time.monotonic() - start
                is_done.set()
                health, peak = watching.result()
            more = (peak - before) / 1e9
            text = f"status {status} after {seconds:.1f} s, {more:.2f} GB more,"
            text += f" /health at most {health:.2f} s"
            passed = status == 400 and seconds < 60 and more < 1 and health < SLOW
            report(f"{size / 1e6:.0f} MB to {name}", passed, text)


def watch(server: Server, is_done: threading.Event) -> tuple[float, int]:
    """Returns the longest time of `/health`, and the most memory, until an event."""
    seconds, peak = 0.0, 0
    while not is_done.is_set():
        seconds = max(seconds, server.health())
        peak = max(peak, server.memory())
        time.sleep(0.01)
    return seconds, peak


def many_requests() -> None:
    """Requests at once have the texts that each has alone, and nearly its log-probabilities."""

    def ask(server, prompt):
        status, answer = server.complete(prompt=prompt, logprobs=0, max_tokens=4)
        if status != 200:
            return status, None, None
        (choice,) = answer["choices"]
        return status, choice["text"], choice["logprobs"]["token_logprobs"]

    def at_once(server, prompts):
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: ask(server, prompt), prompts))

    parts = ((SMALL, 50, "--max_batch=1"), (SMALL, 50, "--max_batch=8"), (TINY, 200, "--port=0"))
    for model, count, option in parts:
        prompts = [f"{TEXT}Boat number {n} is" for n in range(count)]
        with serving(model, "--max_queue=256", option) as server:
            alone = [ask(server, prompt) for prompt in prompts]
            start = time.monotonic()
            loaded = at_once(server, prompts)
            seconds = time.monotonic() - start
        answered = sum(status == 200 for status, *_ in loaded)
        texts = sum(a[1] == b[1] for a, b in zip(alone, loaded, strict=True))
        bits = sum(a[2] == b[2] for a, b in zip(alone, loaded, strict=True))
        errors = [
            abs(x - y)
            for (_, text, a), (_, other, b) in zip(alone, loaded, strict=True)
            if text is not None and text == other
            for x, y in zip(a, b, strict=True)
        ]
        text = f"{answered} answered in {seconds:.0f} s, {texts} with the text of one alone,"
        text += f" {bits} with its bits; log p differs by at most {max(errors, default=0):.1e}"
        passed = answered == texts == count and max(errors) < 1e-4
        passed &= bits == count or option != "--max_batch=1"
        report(f"{count} requests at once {model} {option}", passed, text)
    with serving(TINY) as server:
        codes = [status for status, *_ in at_once(server, prompts)]
    refused = codes.count(503)
    text = f"{codes.count(200)} answered, {refused} refused with status 503"
    report("200 requests at once --max_queue=64", codes.count(200) + refused == 200, text)


def signals() -> None:
    """After a signal the server ends in time, whatever its clients do."""
    prompt = TEXT * 1200  # 100,000 bytes
    attacks: dict[str, Callable[[Server], socket.socket | None]] = {
        "an idle server": lambda server: None,
        "half a head": lambda server: server.open(HALF[:40]),
        "half a body": lambda server: server.open(HALF),
        "a stream that is not read": lambda server: server.stream(**UNREAD),
        "a long prompt": lambda server: server.stream(prompt=prompt, max_tokens=900),
    }
    for name, attack in attacks.items():
        for words in ((signal.SIGTERM,), (signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)):
            with serving(TINY, "--length=131072") as server:
                client = attack(server)
                time.sleep(1)
                seconds, code = server.end(*words)
                if client is not None:
                    client.close()
            limit = 0.3 * len(words) if len(words) > 1 else TIMEOUT
            passed = seconds < limit + SLOW and code in (0, 128 + words[-1], -words[-1])
            names = " ".join(signal.Signals(number).name for number in words)
            report(f"{names} with {name}", passed, f"{seconds:.1f} s, exit code {code}")


def main() -> int:
    parts = {part.__name__: part for part in (slow_clients, long_texts, many_requests, signals)}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=parts)
    words = parser.parse_args()
    for name, part in parts.items():
        if words.only in (None, name):
            part()
    return not all(results)


if __name__ == "__main__":
    sys.exit(main())
