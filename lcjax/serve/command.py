"""The command `python -m lcjax.serve --model PATH [--port=8000] [--rope.type=yarn ...]`.

It is also installed as `lcjax-serve`.
"""

import dataclasses
import socket
import sys
from collections.abc import Sequence

from lcjax import config as config_lib
from lcjax.checkpoints.build import ModelSection, Settings, check_source
from lcjax.errors import InputError, check_integer, is_finite_number, missing_extra, one_line
from lcjax.parallel.distributed import cache_compiled_programs
from lcjax.parallel.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """A server of one model with OpenAI's HTTP API.

    `--model PATH` is short for `--model.path=PATH`, and the other keys of `model` may omit the
    prefix `model.`: `--rope.type=yarn --rope.factor=4`.
    """

    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    name: str | None = None  # name of the model in requests; null: its path
    host: str = "127.0.0.1"  # 0.0.0.0 accepts requests of other machines; then set api_key
    port: int = 8000  # 0: any free port
    api_key: str | None = None  # key that requests must send; null: none
    # Maximum tokens of a request, prompt and answer together. Rotations that follow the length are
    # made for it. null: the trained length, extended by the method's factor, and rotations for the
    # length of each request.
    length: int | None = None
    # Read strings of special tokens in messages as special tokens, as transformers does
    allow_special: bool = False
    max_batch: int = 8  # texts that are scored or generated together
    max_queue: int = 64  # requests that wait or run; further ones are refused with status 503
    max_contexts: int = 16  # stored contexts; beyond this, the least recently used is dropped
    max_context_gb: float = 8.0  # GB of stored contexts on the devices; a new one adds to it
    # Seconds in which a client must send its request, and read on while its answer is sent.
    client_timeout: float = 60.0
    shutdown_timeout: float = 30.0  # seconds for running requests after SIGTERM or Ctrl-C
    mesh: Mesh | None = None  # devices that share the model; null: one device

    def __post_init__(self):
        if self.model.path is None and self.model.preset is None:
            raise InputError("model.path is missing; name a checkpoint: --model PATH")
        check_integer("port", self.port, 0, most=65535)
        for name in ("max_batch", "max_queue", "max_contexts"):
            check_integer(name, getattr(self, name), 1)
        if self.length is not None:
            check_integer("length", self.length, 2, "null takes that of the model with its method")
        for name in ("max_context_gb", "client_timeout", "shutdown_timeout"):
            value = getattr(self, name)
            if not is_finite_number(value) or value <= 0:
                raise InputError(f"{name}={value} must be above 0")

    @property
    def model_name(self) -> str:
        return self.name or self.model.path or self.model.preset


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until interrupted; returns the exit code."""
    words = _expand_model_options(sys.argv[1:] if argv is None else argv)
    return config_lib.main(ServeConfig, serve, words)


def serve(config: ServeConfig) -> None:
    """Loads the model and serves until SIGINT or SIGTERM; running requests are finished."""
    try:
        from lcjax.serve.app import Server
        from lcjax.serve.connections import HttpServer
    except ImportError as error:
        raise missing_extra("lcjax.serve", "starlette and uvicorn", "serve", error) from None
    from lcjax.generation.language_model import LanguageModel

    check_source(config.model)
    cache_compiled_programs()
    with bind(
        config.host, config.port
    ) as listener:  # before the weights are read, which takes time
        lm = LanguageModel.load(config.model, mesh=config.mesh)
        app = Server(lm, config).app
        host = f"[{config.host}]" if ":" in config.host else config.host
        url = f"http://{host}:{listener.getsockname()[1]}/v1"
        print(f"{lm}\nat {url} as {config.model_name}", flush=True)
        HttpServer(
            app, client_timeout=config.client_timeout, shutdown_timeout=config.shutdown_timeout
        ).run([listener])
        print("stopped", flush=True)


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket bound to an address; connections are refused until a server listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, TypeError) as error:  # TypeError: a name with NUL or half of a surrogate pair
        listener.close()
        reason = getattr(error, "strerror", None) or one_line(error)
        raise InputError(f"host={host!r:.80}, port={port}: {reason}; choose others") from None
    return listener


def _expand_model_options(words: Sequence[str]) -> list[str]:
    """Expands --model PATH and --rope.type=yarn to --model.path PATH and --model.rope.type=yarn."""
    expanded = []
    for number, word in enumerate(words):
        key, equals, value = word.partition("=")
        following = value if equals else "".join(words[number + 1 : number + 2])
        if key == "--model" and not following.lstrip().startswith("{"):
            key = "--model.path"
        elif key[2:].partition(".")[0] in Settings.__annotations__ and key.startswith("--"):
            key = f"--model.{key[2:]}"
        expanded.append(f"{key}{equals}{value}")
    return expanded
