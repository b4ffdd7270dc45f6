"""The process that renders chat templates: `chat_template` starts this file as a program.

Templates are untrusted. Jinja's sandbox hides Python's objects from them, but bounds neither time
nor memory, and one operation (`'x' * 10**10`) may take all of both. Here the system does: it ends
this process when a template takes too much processor time, and refuses it more memory. The process
imports nothing but Jinja and the standard library, and ends when its input does.
"""

import contextlib
import datetime
import functools
import json
import marshal
import os
import signal
import struct
import sys
from typing import BinaryIO, ClassVar

sys.path += sys.argv[2:]  # Jinja's folders: the process is started without site-packages

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MAX_TEXT = 50_000_000  # characters of a conversation
_MAX_ERROR = 1_000  # characters of an error
_OTHER_FILES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class _Refusal(Exception):
    """An error whose message is complete."""


class _Namespace(Namespace):
    """Jinja's namespace without names of Python's internals, as in transformers."""

    def __init__(*args, **kwargs):
        self, *values = args  # `self` may be the name of a variable
        variables = dict(*values, **kwargs)
        for name in variables:
            _check_name(name)
        Namespace.__init__(self, variables)

    def __setitem__(self, name, value):
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise _Refusal(f"a namespace may not hold {name!r}; remove the underscore")


class _Generation(Extension):
    """Renders the body of `{% generation %}`, and finds where it is in the text.

    Variables that are set in the body are local to it, as in transformers.
    """

    tags: ClassVar = {"generation"}

    def __init__(self, environment):
        super().__init__(environment)
        self._depth = 0

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_record"), [], [], body).set_lineno(line)

    def _record(self, caller):
        self._depth += 1
        body = caller()
        self._depth -= 1
        if self._depth == 0:  # else the block around it is recorded
            self._pending.append(body)
        return body

    def begin(self) -> None:
        self.spans, self._pending, self._depth, self._is_known = [], [], 0, True

    def locate(self, piece: str, start: int) -> None:
        """Notes the span of a body that is the next piece of the text.

        Text of a macro is one piece, so a body within it has no known position. Then the template
        has no spans at all: a part of them would be wrong.
        """
        if not self._pending:
            return
        self._is_known &= self._pending == [piece]
        self._pending.clear()
        self.spans = [*self.spans, (start, start + len(piece))] if self._is_known else []


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> tuple[jinja2.Template, _Generation]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    # Jinja's own `tojson` escapes characters for HTML.
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": _Namespace,
    }
    tree = environment.parse(source)
    if (other := tree.find(_OTHER_FILES)) is not None:
        raise _Refusal(
            f"line {other.lineno} reads another file, which no chat template may; put its text"
            " into the template"
        )
    return environment.from_string(tree), environment.extensions[_Generation.identifier]


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message):
    raise _Refusal(message)


def _render(source: str, variables: dict) -> tuple[str, list[tuple[int, int]]]:
    template, generation = _compile(source)
    generation.begin()
    pieces, size = [], 0
    for piece in template.generate(variables):
        generation.locate(piece, size)
        pieces.append(piece)
        size += len(piece)
        if size > _MAX_TEXT:
            raise _Refusal(f"its text has more than {_MAX_TEXT:,} characters, and was stopped")
    return "".join(pieces), generation.spans


def _reply(source: str, variables: dict) -> bytes:
    """Returns a header, the text or the error as UTF-8, and the spans as pairs of numbers."""
    kind, spans = b"t", []
    try:
        text, spans = _render(source, variables)
    except MemoryError:
        kind, text = b"m", ""
    except _Refusal as error:
        kind, text = b"r", str(error)[:_MAX_ERROR]
    except Exception as error:  # templates may apply any operation to any value
        kind, text = b"e", str(error)[:_MAX_ERROR].strip() or type(error).__name__
    data = text.encode("utf-8", "surrogatepass")
    numbers = [number for span in spans for number in span]
    header = struct.pack("<cQQ", kind, len(data), len(spans))
    return header + data + struct.pack(f"<{len(numbers)}Q", *numbers)


def _limit(memory: int) -> None:
    """Limits the memory of this process, where the system can, and lets a timer end it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that renders
    if os.name != "posix":
        return
    import resource

    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for kind, size in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        size = size if hard == resource.RLIM_INFINITY else min(size, hard)
        with contextlib.suppress(OSError, ValueError):  # macOS has no limit of address space
            resource.setrlimit(kind, (size, size))


def _serve(requests: BinaryIO, replies: BinaryIO, memory: int) -> None:
    replies.write(b".")
    replies.flush()
    while header := requests.read(16):
        size, seconds = struct.unpack("<Qd", header)
        if hasattr(signal, "setitimer"):  # of processor time; it ends the process
            signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = _reply(*marshal.loads(requests.read(size)))
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(reply)
        replies.flush()
        if reply[:1] == b"m":  # without memory for the next template another process renders it
            bytes(memory // 2)


if __name__ == "__main__":
    _limit(int(sys.argv[1]))
    _serve(sys.stdin.buffer, sys.stdout.buffer, memory=int(sys.argv[1]))
