"""Renders chat templates, which are untrusted Jinja programs, in a process with limits.

The process (`template_process`) is started once, by the first template. Values reach it as plain
data, and it answers with text and numbers only.
"""

import atexit
import importlib.util
import marshal
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lcjax.errors import InputError, one_line

_SECONDS = 10.0  # processor time of a template; a conversation of 1M characters takes about 0.01
_MEMORY = 1 << 30  # bytes of address space of the process
_PROGRAM = Path(__file__).with_name("template_process.py")
_HEADER = struct.Struct("<cQQ")
_MAX_REPLY = 1 << 28  # bytes of the text, and of the spans
_PLAIN = {str: str.__str__, int: int.__int__, float: float.__float__}  # of subclasses
_ENDED_BY_OTHERS = (-15, -9)  # SIGTERM; SIGKILL, as by a system without memory
_OPTIONAL = {"tools": None, "documents": None}  # templates compare them with `none`


class Rendered(NamedTuple):
    """A rendered conversation.

    Attributes:
      text: the conversation as the model was trained to read it.
      generated: spans (start, stop) of characters of `text` that `{% generation %}` marks, which
        the model writes. Empty without such blocks, and if one is inside a macro.
    """

    text: str
    generated: tuple[tuple[int, int], ...]


def render_template(
    template: str | None, messages: list[dict[str, Any]], /, **variables: Any
) -> Rendered:
    """Renders a conversation as transformers does.

    The environment is that of transformers: blocks are trimmed, templates may call
    `raise_exception`, `strftime_now` and `tojson`, and mark answers with `{% generation %}`. Also
    as there, `tools` and `documents` are None by default.

    Args:
      template: the Jinja source.
      messages: the conversation.
      **variables: other variables of the template, such as `enable_thinking` or `tools`: text,
        numbers, None, lists and dictionaries.

    Raises:
      InputError: there is no template, or it fails, includes other files, or takes too much time
        or memory; or a variable is no plain data.
    """
    if template is None:
        raise InputError(
            "this tokenizer has no chat_template; give the prompt as plain text, or use an "
            "instruction-tuned checkpoint"
        )
    values = _OPTIONAL | variables | {"messages": messages}
    values = {name: _plain_variable(name, value) for name, value in values.items()}
    kind, text, spans = _process.render(marshal.dumps((template, values)))
    if kind == b"t":
        return Rendered(text, spans)
    text = " ".join(text.split())
    if kind == b"m":  # no reply within the time, or no memory
        text = (
            f"it loops or grows beyond all conversations ({_SECONDS:g} s, {_MEMORY >> 20} MiB), and"
            " was stopped; use the template that was published with the model"
        )
    elif kind == b"e":
        text = f"{text[:200]}; check the roles of the messages"
    raise InputError(f"chat_template: {text}")


def _plain_variable(name: str, value: Any) -> Any:
    """Returns a copy of plain data whose types are exactly Python's, which `marshal` needs."""
    # Pairs (container, copy) by the container's id: YAML's anchors make a list part of many.
    copies: dict[int, tuple[Any, Any]] = {}

    def plain(value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        for kind, convert in _PLAIN.items():
            if isinstance(value, kind):
                return convert(value)
        if id(value) not in copies:
            if isinstance(value, Mapping):
                copy = {plain(key): plain(item) for key, item in value.items()}
            elif isinstance(value, list | tuple):
                copy = (tuple if isinstance(value, tuple) else list)(map(plain, value))
            else:
                raise InputError(
                    f"chat_template: the variable {name} holds a {type(value).__qualname__}; give"
                    " text, numbers, true or false, lists and dictionaries"
                )
            copies[id(value)] = value, copy  # no other container gets this id
        return copies[id(value)][1]

    try:
        return plain(value)
    except RecursionError:
        raise InputError(f"chat_template: the variable {name} is nested too deeply") from None


class _TemplateProcess:
    """A process that renders one template after another, for all threads of this process.

    A process that was forked from this one starts its own.
    """

    def __init__(self):
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def render(self, request: bytes) -> tuple[bytes, str, tuple[tuple[int, int], ...]]:
        """Returns the reply of the process: its kind, a text, and the spans of generated text.

        Kinds: "t", the rendered text; "r", a complete message of an error; "e", the error of an
        operation; "m", the template took too much time or memory.
        """
        with self._lock:
            for _ in range(2):  # another program may have ended the process
                process = self._process = self._process or _start()
                try:
                    return _exchange(process, request)
                except (EOFError, BrokenPipeError) as error:
                    code = self.close()
                    if isinstance(error, EOFError) and code not in _ENDED_BY_OTHERS:
                        break
                except BaseException:  # Ctrl-C: the reply would be read as the next one
                    self.close()
                    raise
        return b"m", "", ()

    def close(self) -> int | None:
        """Ends the process and returns its exit code."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        with process:  # closes its files and waits
            process.kill()  # keeps the exit code of a process that has ended already
        return process.returncode

    def forget(self) -> None:
        """Leaves the process to the parent, in a process that was forked from it."""
        if self._process is not None:
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.returncode = 0  # it is no child of this one
        self._process, self._lock = None, threading.Lock()


def _start() -> subprocess.Popen:
    specs = map(importlib.util.find_spec, ("jinja2", "markupsafe"))
    folders = dict.fromkeys(str(Path(spec.origin).parent.parent) for spec in specs)
    options = ["-I", "-S", *["-B"] * sys.dont_write_bytecode]
    command = [sys.executable, *options, str(_PROGRAM), str(_MEMORY), *folders]
    pipe = subprocess.PIPE
    try:
        # Files without buffers: a forked process closes its copies without writing to them.
        process = subprocess.Popen(
            command, bufsize=0, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        )
        if process.stdout.read(1) == b".":
            return process
        with process:
            process.kill()
        reason = f"exit code {process.returncode}"
    except OSError as error:
        reason = one_line(error)
    raise InputError(f"chat_template: {sys.executable} {_PROGRAM} does not start: {reason}")


def _exchange(
    process: subprocess.Popen, request: bytes
) -> tuple[bytes, str, tuple[tuple[int, int], ...]]:
    """Sends a request and reads the reply; an EOFError or BrokenPipeError: the process ended."""
    timer = threading.Timer(_SECONDS, process.kill)
    if not hasattr(signal, "setitimer"):  # by which the process limits itself, in processor time
        timer.start()
    try:
        data = memoryview(struct.pack("<Qd", len(request), _SECONDS) + request)
        while data:
            data = data[process.stdin.write(data) :]
        kind, size, num_spans = _HEADER.unpack(_read(process, _HEADER.size))
        if size + 16 * num_spans > _MAX_REPLY:
            raise EOFError
        text = _read(process, size).decode("utf-8", "surrogatepass")
        return kind, text, tuple(struct.iter_unpack("<QQ", _read(process, 16 * num_spans)))
    except UnicodeDecodeError:
        raise EOFError from None
    finally:
        timer.cancel()


def _read(process: subprocess.Popen, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = process.stdout.read(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


_process = _TemplateProcess()
atexit.register(_process.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.forget)
