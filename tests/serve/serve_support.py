"""A server of a tiny model in this process, and a client of the standard library."""

import contextlib
import http.client
import json
import socket
import threading
import time

from lcjax.checkpoints.build import ModelSection
from lcjax.generation.language_model import LanguageModel
from lcjax.serve.app import Server
from lcjax.serve.command import bind
from lcjax.serve.connections import HttpServer
from lcjax.serve.serve_config import ServeConfig


class Client:
    """Requests to a server; `lm` is its model, `server` the object behind its routes."""

    def __init__(self, port: int, lm: LanguageModel, server: Server):
        self.port, self.lm, self.server = port, lm, server
        self.url = f"http://127.0.0.1:{port}/v1"

    def open(self, method: str, path: str, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, headers or {})
        return connection, connection.getresponse()

    def ask(self, method: str, path: str, body=None, headers=None) -> tuple[int, dict]:
        connection, response = self.open(method, path, body, headers)
        with contextlib.closing(connection):
            return response.status, json.loads(response.read())

    def post(self, path: str, **body) -> dict:
        status, answer = self.ask("POST", f"/v1/{path}", body)
        assert status == 200, answer
        return answer

    def complete(self, prompt, **body) -> dict:
        return self.post("completions", prompt=prompt, **{"temperature": 0, **body})

    def stream(self, path: str, **body) -> list[dict]:
        connection, response = self.open("POST", f"/v1/{path}", body | {"stream": True})
        with contextlib.closing(connection):
            assert response.headers["content-type"].startswith("text/event-stream")
            events = [line[6:] for line in response.read().decode().split("\n") if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]


@contextlib.contextmanager
def serving(lm: LanguageModel, **settings):
    """Yields a client of a server of `lm`."""
    config = ServeConfig(ModelSection(preset="tiny"), **settings)
    server, listener = Server(lm, config), bind("127.0.0.1", 0)
    times = {"client_timeout": config.client_timeout, "shutdown_timeout": config.shutdown_timeout}
    with running(HttpServer(server.app, **times), listener):
        yield Client(listener.getsockname()[1], lm, server)


@contextlib.contextmanager
def running(http_server: HttpServer, listener: socket.socket):
    thread = threading.Thread(target=http_server.run, args=([listener],), daemon=True)
    thread.start()
    while not http_server.started:
        time.sleep(0.01)
    yield
    http_server.should_exit = True
    thread.join(timeout=30)
    assert not thread.is_alive()
