"""`python eval.py [run | score | report | compare | make-data] ...`; without a word it is run."""

import re
import sys
from collections.abc import Callable, Sequence

from lcjax import config as config_lib
from lcjax.config.read import near
from lcjax.errors import InputError
from lcjax.evaluation import finished
from lcjax.evaluation.commands.compare import compare
from lcjax.evaluation.commands.export import export
from lcjax.evaluation.commands.make_data import make_data
from lcjax.evaluation.commands.score import score
from lcjax.evaluation.config import EvalConfig
from lcjax.evaluation.run import run
from lcjax.parallel import distributed

USAGE = """\
python eval.py [run] --config FILE [--tasks NAME,NAME] [--KEY=VALUE ...]
    asks every method what no record answers yet, and writes the report; --tasks piqa,hellaswag is
    short for --tasks.0.tasks=[piqa,hellaswag], and --include_path for that of tasks.0
python eval.py report RUN [RUN ...] [--export=lm_eval,longbench,ruler]
    tables, figures and report.html again, from the records alone; with --export also
    RUN/export/FORMAT, which the official scorers read
python eval.py score RUN [--out=FOLDER] [--tasks.0.KEY=VALUE ...]
    judges the answers again, by other scores of the tasks; default folder: RUN_scored
python eval.py compare RUN [RUN ...] [--against=ROW] [--out=FOLDER]
    compare.html: the runs side by side, or the methods of one; differences example by example
python eval.py make-data --config FILE [--out=FOLDER] [--KEY=VALUE ...]
    the prompts as JSONL with RULER's keys; only the model's tokenizer is read
python eval.py run --help
    every key of a config, its default and what it means"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; what the user can put right is one line and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in _COMMANDS:
        return _guarded(_COMMANDS[words[0]], words[1:])
    if words and words[0] == "run":
        return distributed.main(EvalConfig, run, _written_out(words[1:]))
    if words and not words[0].startswith("-"):
        known = near(words[0], ["run", *_COMMANDS])
        return _guarded(_unknown(words[0], known), [])
    return distributed.main(EvalConfig, run, _written_out(words))


def _written_out(words: Sequence[str]) -> list[str]:
    """`words` with the short options in full: names after --tasks are those of the first task."""
    found, names = list(words), ("--tasks", "--include_path")
    for place, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key not in names or (not equals and place + 1 == len(words)):
            continue
        if key == "--tasks" and re.match(r"\s*\[?\s*\{", value if equals else words[place + 1]):
            continue  # tasks themselves
        found[place] = f"--tasks.0.{key[2:]}{equals}{value}"
    return found


def _unknown(word: str, known: str) -> Callable[[list[str]], None]:
    def refuse(_: list[str]) -> None:
        raise InputError(f"{word} is no command; {known}")

    return refuse


def _guarded(command: Callable[[list[str]], None], words: list[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    try:
        command(words)
    except (InputError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


def _taken(words: list[str], *options: str) -> tuple[list[str], dict[str, str], list[str]]:
    """Folders, the values of `options`, and the other words that begin with `--`."""
    folders, found, rest = [], {}, []
    words = list(words)
    while words:
        key, equals, value = words.pop(0).partition("=")
        if not key.startswith("--"):
            folders.append(key + equals + value)
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                raise InputError(f"{key} has no value; write {key}=value")
            value = words.pop(0)
        if key[2:] in options:
            found[key[2:]] = value
        else:
            rest.append(f"{key}={value}")
    return folders, found, rest


def _report(words: list[str]) -> None:
    folders, options, rest = _taken(words, "export")
    _refuse(rest, "report")
    if not folders:
        raise InputError("report: name the folder of a run, such as runs/quickstart_eval")
    for folder in folders:
        found = finished.read(folder)
        made = finished.rebuild(found)
        files = list(made.files)
        if "export" in options:
            formats = [name.strip() for name in options["export"].split(",") if name.strip()]
            files += export(found, formats, found.folder / "export")
        _said(made.text, files)


def _score(words: list[str]) -> None:
    folders, options, overrides = _taken(words, "out")
    if len(folders) != 1:
        raise InputError(f"score takes one run, not {len(folders)}: python eval.py score RUN")
    made = score(folders[0], options.get("out"), overrides)
    _said(made.text, made.files)


def _compare(words: list[str]) -> None:
    folders, options, rest = _taken(words, "out", "against")
    _refuse(rest, "compare")
    made = compare(folders, options.get("out"), options.get("against"))
    _said(made.text, made.files)


def _make_data(words: list[str]) -> None:
    folders, options, rest = _taken(words, "out")
    if folders:
        raise InputError(f"{folders[0]} is not understood; write make-data --config file.yaml")
    _said("", make_data(config_lib.parse(EvalConfig, rest), options.get("out")))


def _refuse(rest: Sequence[str], command: str) -> None:
    if rest:
        raise InputError(
            f"{rest[0]}: {command} takes no such option; see python eval.py {command} --help"
        )


def _said(text: str, files: Sequence[object]) -> None:
    print(f"\n{text}\nWritten:" if text else "Written:")
    print("\n".join(f"  {path}" for path in files))


_COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "report": _report,
    "score": _score,
    "compare": _compare,
    "make-data": _make_data,
}
