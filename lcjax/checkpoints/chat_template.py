"""Renders chat templates, which are untrusted Jinja programs, in a sandbox with bounded work.

Jinja's sandbox hides Python objects from templates, but does not bound their time or the size of
their strings. Here every step has a cost: each pass of a loop or macro body, and calls, filters,
operators and output in proportion to the size of their results. A template that exceeds its budget
or its time raises an error.
"""

import datetime
import functools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from lcjax.errors import InputError, one_line

_BUDGET = 200_000_000  # characters; a conversation of 1M characters takes about a tenth
_STEP, _ENTRY = 500, 50  # cost in characters of a step, and of an entry of a list
_SECONDS = 10  # CPU time of this thread
# Filters whose results are no larger than their input, and that do not read nested values.
_CHEAP = {
    "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject",
    "rejectattr", "select", "selectattr",
}  # fmt: skip
_OPTIONAL = {"tools": None, "documents": None}  # templates compare them with `none`
_OTHER_FILES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


def render_template(
    template: str | None, messages: list[dict[str, Any]], /, **variables: Any
) -> str:
    """Returns the conversation as the model was trained to read it.

    The environment is that of transformers: blocks are trimmed, templates may call
    `raise_exception`, `strftime_now` and `tojson`, and mark answers with `{% generation %}`. Also
    as there, `tools` and `documents` are None by default.

    Args:
      template: the Jinja source.
      messages: the conversation.
      **variables: other variables of the template, such as `enable_thinking` or `tools`.

    Raises:
      InputError: there is no template, or it fails, includes other files, or does too much work.
    """
    if template is None:
        raise InputError(
            "this tokenizer has no chat_template; give the prompt as plain text, or use an "
            "instruction-tuned checkpoint"
        )
    try:
        compiled = _compile(template)
        compiled.environment.begin()
        return compiled.render(_OPTIONAL | variables, messages=messages)
    except InputError:
        raise
    except Exception as error:  # templates may apply any operation to any value
        reason = one_line(error)[:200]
        raise InputError(f"chat_template: {reason}; check the roles of the messages") from error


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    """Compiles a template, with calls that count its work."""
    environment = _Environment()
    environment.begin()  # compiling evaluates constants
    tree = environment.parse(source)
    if (other := tree.find(_OTHER_FILES)) is not None:
        raise InputError(
            f"chat_template: line {other.lineno} reads another file, which no chat template may;"
            " put its text into the template"
        )
    tree = _Count().visit(tree)
    tree.set_environment(environment)
    return environment.from_string(tree)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that counts the work of templates; each thread that renders has its own budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self):
        extensions = [loopcontrols, _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.filters = {name: self._counted(name, f) for name, f in self.filters.items()}
        self.filters["tojson"] = self._counted("tojson", _to_json)
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
            _Count.STEP: self.spend,
            _Count.JOIN: lambda *parts: "".join(map(str, parts)),
            _Count.WRITE: lambda value: value,
        }
        self._budget = threading.local()

    def begin(self) -> None:
        """Gives this thread a new budget."""
        self._budget.left, self._budget.deadline = _BUDGET, time.thread_time() + _SECONDS

    def spend(self, amount: float) -> None:
        """Takes one step and `amount` characters from the budget."""
        budget = self._budget
        budget.left -= amount + _STEP
        if budget.left < 0 or time.thread_time() > budget.deadline:
            raise InputError(
                "chat_template: it loops or grows beyond all conversations, and was stopped; use"
                " the template that was published with the model"
            )

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        values = [*args, *kwargs.values()]
        if isinstance(owner, str):  # a method of a string: replace, center, join
            self.spend(self._product(owner, values))
        elif function != self.spend:
            self.spend(sum(map(self._size, values)))
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            self.spend(self._size(left) + self._size(right))
        elif operator == "**":
            self.spend(_bits(left) * abs(right) if isinstance(right, int) else 1)
        else:
            self.spend(self._product(left, [right]))
        return super().call_binop(context, operator, left, right)

    def _counted(self, name: str, function: Callable) -> Callable:
        """Wraps a filter so that it spends its cost before it runs."""
        has_context = hasattr(function, "jinja_pass_arg")

        def run(*args: Any, **kwargs: Any) -> Any:
            value, *others = args[has_context:]
            cost = 0 if name in _CHEAP else self._product(value, [*others, *kwargs.values()])
            self.spend(cost)
            return function(*args, **kwargs)

        vars(run).update(getattr(function, "__dict__", {}))  # Jinja's mark of context arguments
        return run

    def _product(self, value: Any, others: list[Any]) -> float:
        """Returns an upper bound on the result size of a string method, filter or product.

        Numbers may be widths or counts, even those inside a format string.
        """
        sizes = [self._size(value)]
        if isinstance(value, str) and ("%" in value or "{" in value):
            sizes.append(max(map(int, re.findall(r"\d{1,12}", value)), default=1))
        for other in others:
            counts = other if isinstance(other, list | tuple) else [other]
            numbers = [abs(count) for count in counts if isinstance(count, int)]
            sizes.append(max([self._size(other), *numbers]))
        return math.prod(max(size, 1) for size in sizes)

    def _size(self, value: Any) -> int:
        """Estimates the characters of a value as text; stops counting beyond the budget."""
        total, values = 0, [value]
        while values and total <= self._budget.left:
            value = values.pop()
            if isinstance(value, str):
                total += len(value)
            elif isinstance(value, Mapping):
                total += _ENTRY * len(value)
                values += [*value.keys(), *value.values()]
            elif isinstance(value, list | tuple | set):
                total += _ENTRY * len(value)
                values += value
            else:
                total += 1 + _bits(value) // 3
        return total


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 1


class _Count(NodeTransformer):
    """Inserts calls that `_Environment.call` counts: in loops and macros, for `~` and output."""

    STEP, JOIN, WRITE = "__step__", "__join__", "__write__"

    def _call(self, name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
        return nodes.Call(nodes.Name(name, "load"), args, [], None, None, lineno=line)

    def _counted_body(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        step = self._call(self.STEP, [nodes.Const(text)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _counted_body

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return self._call(self.JOIN, node.nodes, node.lineno)

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [
            child
            if isinstance(child, nodes.TemplateData)
            else self._call(self.WRITE, [child], node.lineno)
            for child in node.nodes
        ]
        return node


class _Generation(Extension):
    """Renders the body of `{% generation %}`, which marks text that the model writes.

    Variables that are set in the body are local to it, as in transformers.
    """

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Replaces Jinja's filter, which escapes characters for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise InputError(f"chat_template: {message}")
