"""Chat templates: Jinja programs that come with checkpoints, run in a sandbox."""

import datetime
import json
from typing import Any

from lcjax.errors import InputError


def render(template: str | None, messages: list[dict[str, str]], **variables: Any) -> str:
    """The conversation as the model was trained to read it.

    Same environment as transformers: blocks are trimmed, and templates may call
    `raise_exception`, `strftime_now` and `tojson`. The sandbox keeps a stranger's template from
    reaching Python.
    """
    if template is None:
        raise InputError(
            "this tokenizer has no chat_template; give the prompt as plain text, or use an "
            "instruction-tuned checkpoint"
        )
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(messages=messages, **variables)
    except jinja2.TemplateError as error:
        raise InputError(f"chat_template: {error}; check the roles of the messages") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes characters for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise InputError(f"chat_template: {message}")
