"""The prompts of a config's tasks as JSONL, with RULER's keys, without any model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lcjax.checkpoints.load import load_tokenizer
from lcjax.config.files import write_whole
from lcjax.data import documents
from lcjax.errors import InputError
from lcjax.evaluation import study
from lcjax.evaluation.commands.export import part_of
from lcjax.evaluation.config import EvalConfig
from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.generation import GenerationTask
from lcjax.evaluation.methods import tokenizer_of
from lcjax.evaluation.records import to_lines
from lcjax.evaluation.run import check
from lcjax.evaluation.task import Task, Unit


def make_data(
    config: EvalConfig,
    out: str | Path | None = None,
    *,
    tokenizer: Callable[[str], Any] = load_tokenizer,
) -> list[Path]:
    """Writes `OUT/TASK/LENGTH/SET.jsonl` for every data set or sub-task of tasks that generate.

    A line has RULER's keys: index, input (the prompt as text), outputs (what counts as right),
    length (tokens, with those to be generated), and `others` with all that a record says of the
    unit. `out` None is `data` in the run folder. Only the tokenizer of `model` is read.
    """
    limits = check(config)
    tasks = [task for task in config.tasks if isinstance(task, GenerationTask)]
    if not tasks:
        raise InputError("tasks: none of them asks for an answer, so there is no prompt to write")
    out = Path(out) if out is not None else Path(config.run.folder) / "data"
    data = config.data
    source = (
        documents(data, "validation" if data.holdout else "train")
        if any(task.needs_data for task in tasks)
        else ()
    )
    corpus = Corpus(source, tokenizer_of(study.with_trained(config).model, tokenizer))
    files = []
    for task in tasks:
        for length in limits.lengths:
            units = task.plan(corpus, length, limits)
            if not units:
                raise InputError(f"lengths: {length} gives no prompt in {task.label}")
            parts: dict[str, list[Unit]] = {}
            for unit in units:
                parts.setdefault(part_of(task, unit.facts), []).append(unit)
            for name, own in parts.items():
                files.append(out / task.label / str(length) / f"{name}.jsonl")
                lines = (_line(task, unit, corpus.tokenizer) for unit in own)
                write_whole(files[-1], to_lines(lines, ascii=False))
    return files


def _line(task: Task, unit: Unit, tokenizer) -> dict[str, Any]:
    facts = {key: value for key, value in unit.facts.items() if key not in ("prompt", "references")}
    return {
        "index": unit.index,
        "input": tokenizer.decode(unit.tokens.tolist()),
        "outputs": task.references(unit.facts),
        "length": unit.facts["size"],
        "others": {"id": unit.index, "digest": unit.digest, **facts},
    }
