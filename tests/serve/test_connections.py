"""Clients that send half a request, or do not read, and signals: a server goes on, and ends."""

import concurrent.futures
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from tiny_lm import sharp_lm

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from serve_support import running, serving

from lcjax.serve import app as app_lib
from lcjax.serve import protocol
from lcjax.serve.command import bind
from lcjax.serve.connections import HttpServer

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
HALF = HEAD + b"Content-Length: 2000\r\n\r\n"


@pytest.fixture(scope="module")
def client():
    with serving(sharp_lm(), length=64, max_queue=1, client_timeout=0.5) as client:
        yield client


def connect(port: int, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(data)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Returns what arrives until the server closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            parts.append(part)
    connection.close()
    return b"".join(parts)


def test_half_requests_keep_nobody_waiting_and_are_closed(client):
    beginnings = [
        b"", HEAD, HALF, HALF + b'{"prompt":', HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    ]  # fmt: skip
    halves = [connect(client.port, data) for data in beginnings for _ in range(3)]
    assert client.ask("POST", "/v1/completions", {"prompt": [], "max_tokens": 1})[0] == 400
    assert client.server._num_running == 0
    answers = [read_all(connection) for connection in halves]
    assert [b" 408 " in answer for answer in answers] == [False] * 6 + [True] * 9
    assert b"--client_timeout" in answers[-1]


def test_the_longest_body_makes_way_for_others(client, monkeypatch):
    monkeypatch.setattr(app_lib, "MAX_BODIES", 1000)
    longest = connect(client.port, HALF + b"a" * 900)
    time.sleep(0.1)
    assert client.ask("POST", "/v1/completions", {"prompt": [], "user": "a" * 300})[0] == 400
    assert b" 408 " in read_all(longest)
    assert not client.server._bodies._unread and not client.server._bodies._num_read


def test_a_client_that_does_not_read_loses_its_connection():
    has_ended = threading.Event()

    async def endless(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            for _ in range(400):
                await send({"type": "http.response.body", "body": b"a" * 65536, "more_body": True})
        has_ended.set()

    listener = bind("127.0.0.1", 0)
    server = HttpServer(endless, client_timeout=0.2, shutdown_timeout=9)
    with running(server, listener):
        connection = connect(listener.getsockname()[1], b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert has_ended.wait(20)
        connection.close()


@pytest.mark.parametrize("path", ["completions", "chat/completions", "contexts"])
def test_of_a_text_that_is_far_too_long_only_the_beginning_is_tokenised(client, path, monkeypatch):
    sizes, encode = [], type(client.lm.tokenizer).encode

    def recorded(self, text, **options):
        sizes.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(type(client.lm.tokenizer), "encode", recorded)
    text = "a b " * 250_000
    body = {"messages": [{"role": "user", "content": text}], "prompt": text, "text": text}
    name = {"completions": "prompt", "contexts": "text"}.get(path, "messages")
    status, answer = client.ask("POST", f"/v1/{path}", {name: body[name]})
    assert status == 400 and "512 tokens, more than the 64" in answer["error"]["message"]
    assert set(sizes) == {512}


def test_numbers_and_sizes_of_values_messages_and_names_are_limited(client, monkeypatch):
    message = {"role": "user", "content": "a"}
    for path, body, words in (
        ("completions", {"prompt": "a", "stop": ["a"] * 65}, "stop has more than 64"),
        ("completions", {"prompt": "a", "stop": "a" * 1025}, "more than 1024 characters"),
        ("chat/completions", {"messages": [message] * 65}, "65 messages, more than the 64"),
        ("contexts", {"text": "a", "name": "x" * 1025}, "1025 characters, more than 1024"),
        ("completions", {"prompt": "a", "temperature" * 10**4: 0}, "is no field"),
    ):
        status, answer = client.ask("POST", f"/v1/{path}", body)
        assert status == 400 and words in answer["error"]["message"]
    monkeypatch.setattr(protocol, "MAX_VALUES", 100)
    for prompt, words in (
        ([1] * 200, "commas, colons and brackets, more than 128"),  # twice the length
        ([10**20], "an integer of 21 digits"),
        ([2**64 - 1], "must lie between"),
        ([1] * 100, "100 tokens and max_tokens is 16"),
    ):
        status, answer = client.ask("POST", "/v1/completions", {"prompt": prompt})
        assert status == 400 and words in answer["error"]["message"], answer


PROGRAM = """
import asyncio, socket, sys
from lcjax.serve.connections import HttpServer

async def app(scope, receive, send):
    while (await receive())["type"] == "http.request":
        if sys.argv[2] == "busy":
            await asyncio.sleep(1e9)

listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
HttpServer(app, client_timeout=99, shutdown_timeout=float(sys.argv[1])).run([listener])
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_signal_always_ends_the_process():
    whole = HEAD + b"Content-Length: 0\r\n\r\n"

    def run(seconds, kind, data, *signals):
        words = [sys.executable, "-c", PROGRAM, str(seconds), kind]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            connection = connect(int(process.stdout.readline()), data)
            time.sleep(0.5)
            for number in signals:
                process.send_signal(number)
                time.sleep(0.2)
            code = process.wait(30)
            connection.close()
        return code

    cases = [
        (30, "idle", HALF, signal.SIGTERM),
        (0.1, "busy", whole, signal.SIGTERM),
        (30, "busy", whole, signal.SIGTERM, signal.SIGINT),
    ]
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        codes = list(pool.map(lambda case: run(*case), cases))
    assert codes == [0, 143, 130]
