"""Official benchmark files in a folder of the user, and the wording of prompts.

Nothing is downloaded, and no Python file is executed.

rows("LongBench/qasper.jsonl", ("input", "context", "answers"))   # (line number, row)
"""

import ast
import dataclasses
import functools
import hashlib
import io
import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lcjax.config import read_yaml, to_data_path
from lcjax.data.files import gzip_chunks
from lcjax.errors import InputError, check_one_of
from lcjax.evaluation.prompt import Segment, document_segments
from lcjax.files import parse_json
from lcjax.storage import check_regular

PROMPTS_VERSION = "lcjax-2"  # version of this library's own prompts, in records
_FIELD = re.compile(r"\{(\w+)\}")
_SURROGATE = re.compile("[\ud800-\udfff]")


def find(folder: str, names: Sequence[str], key: str, source: str) -> Path:
    """Returns the first file of `names` in a folder; `source` is its origin, for messages."""
    root = to_data_path(folder)
    if not folder or not root.is_dir():
        raise InputError(f"{key}.path={folder!r} is no folder; name the one with {source}")
    for name in names:
        if (root / name).is_file():
            return root / name
    raise InputError(f"{key}.path: {root / names[0]} is missing; it is part of {source}")


def rows(
    path: Path, fields: Sequence[str], parse: Callable[[int, dict], Any] | None = None
) -> Iterator[Any]:
    """Yields the rows of a JSONL file, plain or compressed (.gz).

    Lines without one of `fields`, and lines for which `parse` raises ValueError, are skipped with a
    warning that names the file and the line.

    Args:
      path: The file.
      fields: The fields that every row must have.
      parse: A function of the line number and the row; None yields both as a pair.

    Raises:
      InputError: No line has the fields, or the compressed file is damaged.
    """
    has_rows = False
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = _parse_line(line, fields)
            has_rows = True
            item = (number, row) if parse is None else parse(number, row)
        except ValueError as error:
            warn_skipped(path, number, str(error))
            continue
        yield item
    if not has_rows:
        raise InputError(f"{path} contains no row with {', '.join(fields)}; use the official file")


def _lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text file, plain or compressed (.gz)."""
    if path.suffix == ".gz":
        yield from io.StringIO(b"".join(gzip_chunks(path)).decode(errors="replace"))
        return
    check_regular(path)
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from file


def _parse_line(line: str, fields: Sequence[str]) -> dict:
    """Parses a line as an object with `fields`; raises ValueError with what is wrong."""
    try:
        row = parse_json(line)
    except ValueError as error:  # also for numbers with more digits than Python reads
        raise ValueError(f"is no JSON ({getattr(error, 'msg', error)})") from None
    if not isinstance(row, dict):
        raise ValueError("is no JSON object")
    if absent := [name for name in fields if name not in row]:
        raise ValueError(f"lacks {', '.join(absent)}")
    if "\\ud" in line.lower() and _SURROGATE.search(json.dumps(row, ensure_ascii=False)):
        raise ValueError("contains a lone surrogate, which cannot be tokenized")
    return row


def warn_skipped(path: Path, number: int, reason: str) -> None:
    warnings.warn(f"{path}:{number} {reason}; this line is left out", stacklevel=3)


def parse_score(score: object) -> float | None:
    """Converts a passage's score, a number or its text, to float; None stays None.

    Raises:
      ValueError: The score is not a finite number.
    """
    try:
        value = None if score is None else float(score)
    except TypeError:
        value = math.nan
    if value is not None and not math.isfinite(value):
        raise ValueError(f"has a passage with score={score!r:.40}, which is no number")
    return value


def is_text_list(value: object) -> bool:
    """Returns whether `value` is a list of texts that is not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


def fill_template(template: str, values: Mapping[str, str]) -> list[Segment]:
    """Splits a template at its field `context` into segments, and fills in `values`.

    The text after the context is the segment of the question, also if it begins the answer. So a
    chat template surrounds the whole prompt, as in the official scripts.
    """
    matches = list(_FIELD.finditer(template))
    for match in matches:
        if match.group(1) not in values:
            raise InputError(
                f"prompt template {template[:40]!r} has the unknown field {match.group(1)}"
            )
    context = next((match for match in matches if match.group(1) == "context"), None)
    if context is None:
        return [Segment("question", _fill(template, values))]
    before, after = template[: context.start()], template[context.end() :]
    return document_segments(_fill(before, values), values["context"], _fill(after, values))


def _fill(text: str, values: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda match: values[match.group(1)], text)


@dataclasses.dataclass(frozen=True)
class Wording:
    """Texts of prompts by name, with placeholders such as `{question}`."""

    texts: Mapping[str, Any]  # or lists of texts
    source: str = PROMPTS_VERSION  # the file; by default this library's own, by their version

    @property
    def section(self) -> dict[str, Any]:
        """The texts in the form of a file, where a dot in a name separates section and key."""
        section: dict[str, Any] = {}
        for name, text in self.texts.items():
            part, _, rest = name.rpartition(".")
            (section.setdefault(part, {}) if part else section)[rest] = text
        return section

    def fill(self, name: str, **values: str) -> str:
        """Returns the text `name` with `values` in place of its placeholders."""
        return _fill(self.texts[name], values)

    @property
    def fields(self) -> dict[str, str]:
        """The fields of records about the texts: their source and hash."""
        return template_fields(json.dumps(self.texts, sort_keys=True), self.source)


def read_wording(
    file: str | None,
    library: Mapping[str, Any],
    placeholders: Mapping[str, str | None],
    key: str,
    *,
    needed: Collection[str] | None = None,
) -> Wording:
    """Reads the wording of prompts from the YAML file that a task names.

    Args:
      file: The file, or a recipe `lcjax:NAME`; None gives this library's own texts.
      library: This library's own texts by name, or by data set and name.
      placeholders: For each text the names between braces that it may have, separated by blanks.
        Those without a question mark are required; None checks nothing. Names in sections are
        joined by a dot.
      key: The place of the task in the config, for messages.
      needed: Texts that the file must have; None for all.

    Raises:
      InputError: The file lacks a text, or a text lacks a placeholder or has an unknown one.
    """
    if file is None:
        return Wording(_flatten(library))
    place = f"{key}.wording={file}"
    try:
        texts = _flatten(read_yaml(file))
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
    for name, text in texts.items():
        check_one_of(f"{place}: name of a text", name, placeholders)
        is_list = isinstance(_flatten(library)[name], list)
        if not (is_text_list(text) if is_list else isinstance(text, str)):
            kind = "a list of texts" if is_list else "a text"
            raise InputError(f"{place}: {name}={text!r:.40} must be {kind}")
        if placeholders[name] is None:
            continue
        names = placeholders[name].split()
        present, known = set(_FIELD.findall(str(text))), [n.rstrip("?") for n in names]
        for unknown in sorted(present - {*known}):
            rule = f"it may have {{{'}, {'.join(known)}}}" if known else "it has no placeholders"
            raise InputError(f"{place}: {name} has the unknown placeholder {{{unknown}}}; {rule}")
        for missing in (n for n in names if not n.endswith("?") and n not in present):
            raise InputError(f"{place}: {name} lacks the placeholder {{{missing}}}")
    for name in placeholders if needed is None else needed:
        if name not in texts:
            raise InputError(
                f"{place} lacks {name}, which is needed here; the first record of a run without"
                " `wording` shows all texts (wording_texts)"
            )
    return Wording(texts, file)


def _flatten(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested sections, with their names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in section.items():
        is_section = isinstance(value, Mapping)
        flat |= _flatten(value, f"{prefix}{name}.") if is_section else {f"{prefix}{name}": value}
    return flat


@functools.cache
def library_prompts(benchmark: str) -> dict[str, Any]:
    """Returns this library's own prompts of a benchmark, by data set (`prompts.yaml`)."""
    text = Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)[benchmark]


def template_fields(template: str, source: str) -> dict[str, str]:
    """Returns the fields of records about a template: its source and hash."""
    digest = hashlib.sha256(template.encode()).hexdigest()[:12]
    return {"wording": source, "wording_hash": digest}


class ChosenTemplate(NamedTuple):
    """A prompt template, and the file or version that it comes from."""

    text: str
    source: str


def choose_template(
    file: str | None,
    benchmark: str,
    name: str,
    official: Callable[[], tuple[Mapping[str, str], str]],
    key: str,
    placeholders: str = "context input?",
) -> ChosenTemplate:
    """Returns the prompt template of a data set, and its source.

    Args:
      file: A YAML file for `read_wording`. None: the official template in the user's folder if it
        exists, else the library's own.
      benchmark: The benchmark.
      name: The data set.
      official: Returns the official templates by data set, empty without a file, and their source.
      key: The place of the task in the config, for messages.
      placeholders: Those of the template in a file of the user (`read_wording`).
    """
    if file is not None:
        library = library_prompts(benchmark)
        names = {**dict.fromkeys(library), name: placeholders}
        text = read_wording(file, library, names, key, needed=(name,)).texts[name]
        return ChosenTemplate(text, file)
    templates, source = official()
    if templates.get(name):
        return ChosenTemplate(templates[name], source)
    return ChosenTemplate(library_prompts(benchmark)[name], PROMPTS_VERSION)


def json_templates(folder: str, names: Sequence[str]) -> tuple[dict[str, str], str]:
    """Returns the templates of the first JSON file that exists, and its name; else nothing."""
    for path in _files(folder, names):
        try:
            return parse_json(path.read_text(encoding="utf-8")), path.name
        except ValueError as error:
            raise InputError(f"{path} is no JSON ({error}); restore or remove it") from None
    return {}, ""


def python_templates(
    folder: str, names: Sequence[str], variable: str
) -> tuple[dict[str, str], str]:
    """Returns a dict of strings that a Python file assigns to `variable`, and the file's name."""
    for path in _files(folder, names):
        for value in assigned_values(path, variable):
            if isinstance(value, ast.Dict):
                pairs = zip(value.keys, value.values, strict=True)
                return {_string(k): _string(v) for k, v in pairs if k is not None}, path.name
    return {}, ""


def _files(folder: str, names: Sequence[str]) -> list[Path]:
    """Returns the files of `names` that exist in a folder; none without a folder."""
    paths = [to_data_path(folder) / name for name in names if folder]
    return [path for path in paths if path.is_file()]


def assigned_values(path: Path, name: str) -> Iterator[ast.expr]:
    """Yields the expressions that a Python file assigns to a name."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no Python ({error}); restore or remove it") from None
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            yield node.value


def _string(node: ast.expr) -> str:
    """Returns the value of a string literal, or of several joined by +."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _string(node.left) + _string(node.right)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
