"""Official benchmark files in a folder that the user gives; nothing is downloaded.

rows("LongBench/qasper.jsonl", ("input", "context", "answers"))   # (line number, fields)
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from lcjax.errors import InputError, one_of
from lcjax.evaluation.generation import OWN_WORDING
from lcjax.evaluation.prompt import Segment

_FIELD = re.compile(r"\{(\w+)\}")
WORDINGS = ("auto", "folder", "lm_eval")
Found = Callable[[], tuple[str, str] | None]  # a template and whose it is
_HALF = re.compile("[\ud800-\udfff]")


def find(folder: str, names: Sequence[str], key: str, source: str) -> Path:
    """The first of `names` that is there; `source` says where the user gets it."""
    root = Path(folder)
    if not folder or not root.is_dir():
        raise InputError(f"{key}.path={folder!r} is no folder; name the one with {source}")
    for name in names:
        if (root / name).is_file():
            return root / name
    raise InputError(f"{key}.path: {root / names[0]} is missing; it is part of {source}")


def rows(path: Path, fields: Sequence[str]) -> Iterator[tuple[int, dict]]:
    """Line numbers and rows of a JSONL file; a line without one of `fields` is left out.

    A warning names the file and the line. A file without any good line is refused.
    """
    good = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = _row(line, fields)
            except ValueError as fault:
                skip(path, number, str(fault))
                continue
            good += 1
            yield number, row
    if not good:
        raise InputError(
            f"{path} has no line with {', '.join(fields)}; it is not the official file"
        )


def _row(line: str, fields: Sequence[str]) -> dict:
    """A line as an object with `fields`; ValueError says what does not fit."""
    try:
        row = json.loads(line)
    except ValueError as error:  # also of numbers with more digits than Python reads
        raise ValueError(f"is no JSON ({getattr(error, 'msg', error)})") from None
    if not isinstance(row, dict):
        raise ValueError("is no JSON object")
    if absent := [name for name in fields if name not in row]:
        raise ValueError(f"lacks {', '.join(absent)}")
    if "\\ud" in line.lower() and _HALF.search(json.dumps(row, ensure_ascii=False)):
        raise ValueError("has half a character (a lone surrogate), which no tokenizer reads")
    return row


def texts(value: object) -> bool:
    """Whether `value` is a list of texts, and not an empty one."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


def skip(path: Path, number: int, fault: str) -> None:
    """Says that a line is left out, once."""
    warnings.warn(f"{path}:{number} {fault}; this line is left out", stacklevel=3)


def fill(template: str, fields: Mapping[str, str], document: str = "context") -> list[Segment]:
    """Segments of a template: what stands before the document, it, and what follows.

    The end of the template is part of the question, so that a chat template goes around all of it,
    as the official scripts have it.
    """
    marks = list(_FIELD.finditer(template))
    unknown = [mark.group(1) for mark in marks if mark.group(1) not in fields]
    if unknown:
        raise InputError(f"prompt template {template[:40]!r} asks for {unknown[0]}, no field here")
    place = next((mark for mark in marks if mark.group(1) == document), None)
    if place is None:
        return [Segment("question", _filled(template, fields))]
    parts = (
        ("instruction", _filled(template[: place.start()], fields)),
        ("context_doc", fields[document]),
        ("question", _filled(template[place.end() :], fields)),
    )
    return [Segment(kind, text) for kind, text in parts if text]


def _filled(template: str, fields: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda mark: fields[mark.group(1)], template)


def wording_hash(template: str) -> str:
    return hashlib.sha256(template.encode()).hexdigest()[:12]


def json_templates(folder: str, names: Sequence[str]) -> tuple[dict[str, str], str] | None:
    """Prompt templates from the first JSON file that is there, and the file's name."""
    for name in names:
        path = Path(folder) / name
        if path.is_file():
            try:
                return json.loads(path.read_text(encoding="utf-8")), path.name
            except json.JSONDecodeError as error:
                raise InputError(f"{path} is no JSON ({error.msg}); restore or remove it") from None
    return None


def python_templates(
    folder: str, names: Sequence[str], variable: str
) -> tuple[dict[str, str], str] | None:
    """A dict of strings that a Python file assigns to `variable`, and the file's name."""
    for name in names:
        path = Path(folder) / name
        for value in assigned(path, variable) if path.is_file() else ():
            if isinstance(value, ast.Dict):
                pairs = zip(value.keys, value.values, strict=True)
                return {_string(k): _string(v) for k, v in pairs if k is not None}, path.name
    return None


def assigned(path: Path, name: str) -> Iterator[ast.expr]:
    """What a Python file assigns to a name, in its order; the file is not executed."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no Python ({error}); restore or remove it") from None
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            yield node.value


def _string(node: ast.expr) -> str:
    """A string literal, or several joined by +."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _string(node.left) + _string(node.right)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def worded(
    rule: str, name: str, folder: Found, lm_eval: Found, own: str, key: str = "tasks"
) -> tuple[str, str]:
    """The prompt of a data set, and whose words it has: the first that is there.

    `rule` auto: the official one in the user's folder, that of an installed lm-eval, this library's
    `own`; folder: not lm-eval's; lm_eval: nothing else.
    """
    one_of(f"{key}.wording", rule, WORDINGS)
    found = folder() if rule != "lm_eval" else None
    if found is None and rule != "folder":
        found = lm_eval()
    if found is None and rule == "lm_eval":
        raise InputError(
            f"{key}: wording=lm_eval, and no lm-eval with a prompt of {name} is installed; install"
            " it, or use wording=folder"
        )
    return found or (own, OWN_WORDING)


def lm_eval_template(folder: str, name: str) -> tuple[str, str] | None:
    """A task's prompt from an installed lm-eval, which is not imported; None without it.

    Its copy lacks blanks and newlines at the end of some prompts.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "tasks" / folder / f"{name}.yaml"
    if not path.is_file():
        return None
    task = yaml.load(path.read_text(encoding="utf-8"), _Lenient)
    text = task.get("doc_to_text")
    if not isinstance(text, str) or "{%" in text:
        return None
    text = (task.get("description") or "") + text
    template = re.sub(r"\{\{\s*(\w+)\s*\}\}", r"{\1}", text).replace("{question}", "{input}")
    return template, f"lm-eval {importlib.metadata.version('lm_eval')}"


class _Lenient(yaml.SafeLoader):
    """Reads task files with tags such as !function, whose values are left out."""


_Lenient.add_multi_constructor("!", lambda loader, suffix, node: None)
