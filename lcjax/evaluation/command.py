"""`python eval.py [run | reproduce | score | report | compare | make-data | retrieval] ...`.

The default command is `run`. An installed lcjax provides the program as `lcjax-eval`.
"""

import re
import sys
from collections.abc import Callable, Sequence

from lcjax import config as config_lib
from lcjax.config.help import command, is_output_closed, print_help
from lcjax.errors import InputError, one_line, suggestion
from lcjax.evaluation import reproduce, results, retriever_scores
from lcjax.evaluation.compare import compare
from lcjax.evaluation.eval_config import EvalConfig
from lcjax.evaluation.export import export, make_data
from lcjax.evaluation.run import run
from lcjax.parallel import distributed

USAGE = """\
python eval.py [run] --config FILE [--tasks NAME,NAME] [--KEY=VALUE ...]
    evaluates every method where records are missing, and writes the report; --tasks piqa,hellaswag
    is short for --tasks.0.tasks=[piqa,hellaswag], and --include_path for that of tasks.0
python eval.py reproduce TABLE --scale paper|smollm2|tiny|... [--skip_missing] [--KEY=VALUE ...]
    runs a table of a paper, and shows the published numbers beside; without TABLE it lists them
python eval.py report RUN [RUN ...] [--export=lm_eval,longbench,ruler]
    writes tables, figures and report.html again, from the records alone; with --export also
    RUN/export/FORMAT, which the official scorers read
python eval.py score RUN [--out=FOLDER] [--tasks.0.KEY=VALUE ...]
    scores the answers again with other scoring settings of the tasks; default folder: RUN_scored
python eval.py compare RUN [RUN ...] [--against=ROW] [--out=FOLDER]
    writes compare.html: runs, or the methods of one run, with paired differences over examples
python eval.py make-data --config FILE [--out=FOLDER] [--KEY=VALUE ...]
    writes the prompts as JSONL with RULER's keys; only the model's tokenizer is loaded
python eval.py retrieval --retrievers='[{folder: F, kind: sparse}]' --path=FILE [--out=FOLDER]
    shows how well retrievers find the answers of questions, over the number of passages
--import FILE.py, or a module, registers methods, memories and tasks of your own.
python eval.py run --help
    every key of a config, its default and its meaning"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command of eval.py.

    Args:
      argv: Words of the command line; None for those of the process.

    Returns:
      The exit code: 2 for a mistake of the user, which is reported in one line.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].startswith("-") and {"-h", "--help"} & set(words):
        print_help(f"{USAGE.replace('python eval.py', command())}\n")  # the keys follow
    if words[:1] == ["run"] or not words or words[0].startswith("-"):
        words = words[1:] if words[:1] == ["run"] else words
        return distributed.main(EvalConfig, run, _expand_short_options(words))
    name, *words = words
    if name == "reproduce" and words and not {"-h", "--help"} & set(words):
        return distributed.main(EvalConfig, run, words, parse=reproduce.parse)
    if {"-h", "--help"} & set(words):
        print_help(USAGE.replace("python eval.py", command()))
        return 0
    try:
        if name not in _COMMANDS:
            raise InputError(f"{name} is no command; {suggestion(name, ['run', *_COMMANDS])}")
        _COMMANDS[name](config_lib.import_modules(words))
    except (InputError, OSError) as error:
        if isinstance(error, BrokenPipeError) and is_output_closed():
            return 141
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


def _expand_short_options(words: Sequence[str]) -> list[str]:
    """Replaces --tasks NAME,NAME and --include_path by the keys of the first task."""
    expanded = list(words)
    for index, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key not in ("--tasks", "--include_path") or (not equals and index + 1 == len(words)):
            continue
        if key == "--tasks" and re.match(r"\s*\[?\s*\{", value if equals else words[index + 1]):
            continue  # the value is a list of tasks
        expanded[index] = f"--tasks.0.{key[2:]}{equals}{value}"
    return expanded


def _parse(
    name: str, words: Sequence[str], *options: str, has_keys: bool = False
) -> tuple[list[str], dict[str, str | None], list[str]]:
    """Returns run folders, the values of options, and config keys if the command takes any."""
    folders, values, keys = config_lib.split_options(words, options)
    if keys and not has_keys:
        raise InputError(f"{keys[0]}: {name} takes no such option; see {command()} {name} --help")
    return folders, values, keys


def _report(words: Sequence[str]) -> None:
    folders, options, _ = _parse("report", words, "export")
    if not folders:
        raise InputError("report: name the folder of a run, such as runs/quickstart_eval")
    for folder in folders:
        saved = results.read(folder)
        formats = [name.strip() for name in (options["export"] or "").split(",") if name.strip()]
        exported = export(saved, formats, saved.folder / "export")
        report = results.rebuild(saved)
        _print(report.text, [*report.files, *exported])


def _score(words: Sequence[str]) -> None:
    folders, options, keys = _parse("score", words, "out", has_keys=True)
    if len(folders) != 1:
        raise InputError(f"score takes one run, not {len(folders)}: {command()} score RUN")
    report = results.score(folders[0], options["out"], keys)
    _print(report.text, report.files)


def _compare(words: Sequence[str]) -> None:
    folders, options, _ = _parse("compare", words, "out", "against")
    comparison = compare(folders, options["out"], options["against"])
    _print(comparison.text, comparison.files)


def _make_data(words: Sequence[str]) -> None:
    others, options, keys = _parse("make-data", words, "out", has_keys=True)
    if others:
        raise InputError(f"{others[0]} is not understood; write make-data --config file.yaml")
    _print("", make_data(config_lib.parse(EvalConfig, keys), options["out"]))


def _retrieval(words: Sequence[str]) -> None:
    config = config_lib.parse(retriever_scores.RetrievalConfig, words)
    _print(*retriever_scores.run(config))


def _print(text: str, files: Sequence[object]) -> None:
    if text:
        print(f"\n{text}")
    if files:
        print("\n".join(["Written:", *(f"  {path}" for path in files)]))


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "reproduce": lambda words: _print(reproduce.overview(), ()),
    "report": _report,
    "score": _score,
    "compare": _compare,
    "make-data": _make_data,
    "retrieval": _retrieval,
}
