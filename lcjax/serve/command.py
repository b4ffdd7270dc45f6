"""The command `python -m lcjax.serve --model PATH [--port=8000] [--rope.type=yarn ...]`.

It is also installed as `lcjax-serve`.
"""

import socket
import sys
from collections.abc import Sequence

from lcjax import config as config_lib
from lcjax.checkpoints.build import Settings, check_source
from lcjax.errors import InputError, missing_extra, one_line
from lcjax.parallel.distributed import cache_compiled_programs
from lcjax.serve.serve_config import ServeConfig


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
