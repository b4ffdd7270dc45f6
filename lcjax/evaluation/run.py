"""One run: every method answers the same questions at every length; records, then a report."""

import dataclasses
import functools
import gc
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import draccus
from tqdm import tqdm

from lcjax import cost
from lcjax.checkpoints.build import ModelSection, check_source
from lcjax.data import documents
from lcjax.errors import InputError, whole_numbers
from lcjax.evaluation import measure, report, study
from lcjax.evaluation.config import (
    EvalConfig,
    Method,
    described,
    sections,
    split_of,
    subject_of,
    weights,
)
from lcjax.evaluation.corpus import Corpus
from lcjax.evaluation.prompt import Prompt
from lcjax.evaluation.records import Key, Store
from lcjax.evaluation.split import ContextSplit, SplitModel
from lcjax.evaluation.task import Limits, Record, Task, Unit
from lcjax.evaluation.tasks.windows import PROTOCOLS
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.shared_prefix import PrefixReader, batches, reader_of, shareable
from lcjax.parallel import distributed
from lcjax.parallel.sharding import Mesh, make_mesh, padding_rows, rows_over

Loader = Callable[[ModelSection], Any]
Plan = dict[tuple[str, int], list[Unit]]  # by task and length


def run(config: EvalConfig, *, load: Loader | None = None) -> report.Report | None:
    """Scores what is not scored yet and writes the report; trains first what a study lacks.

    `load` opens a model section; None is `LanguageModel.load` on the mesh of `config`. Of several
    processes, which share the work of every batch, the first one writes; others return None. So
    does a study whose training was stopped.
    """
    limits, trainings = check(config), study.trainings(config)
    ready = study.with_trained(config)
    opened = load or functools.partial(LanguageModel.load, mesh=make_mesh(config.mesh))
    if load is None:
        made = study.made_by(trainings)
        for method, section in zip(config.methods, sections(ready), strict=True):
            if section.path not in made:
                check_source(section)
            if study.has_memory(section, trainings):
                _check_splits(config, limits, [method])
    settings = draccus.encode(config)
    if trainings:
        settings["trainings"] = study.settings(trainings)
    store = Store(config, settings)
    study.check_paths(config, trainings)
    if not study.run(config, trainings):
        return None
    if load is None:
        store.of_weights(weights(ready))
    try:
        runner = _Runner(ready, limits, store, opened)
        records = runner.records()
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"finished records are in {store.folder}; the same command continues from there"
        ) from stop
    if not distributed.first():
        return None
    order = [method.name for method in config.methods]
    notes = study.table(trainings) if trainings else ""
    made = {**report.made_here(), "models": runner.models}
    result = report.write(store.folder, settings, records, order=order, notes=notes, made=made)
    print(f"\n{result.text}\nWritten:")
    print("\n".join(f"  {path}" for path in [*map(store.path, _labels(config)), *result.files]))
    return result


def check(config: EvalConfig) -> Limits:
    """Everything that can be refused before a model is loaded."""
    for key, names in (
        ("methods", [method.name for method in config.methods]),
        ("tasks", _labels(config)),
        ("lengths", list(config.lengths)),
    ):
        if not names:
            raise InputError(f"{key} is empty; give at least one")
        twice = sorted({str(name) for name in names if names.count(name) > 1})
        if twice:
            raise InputError(f"{key}: {', '.join(twice)} stands twice; give each its own name")
    for index, label in enumerate(_labels(config)):
        if not re.fullmatch(r"[\w.-]+", label):
            raise InputError(
                f"tasks.{index}.name={label!r} names files; use letters, digits, dot, dash, "
                "underscore"
            )
    for length in config.lengths:
        if length < 2:
            raise InputError(f"lengths: {length} must be at least 2: one token to predict another")
    whole_numbers("", config, 1, "stride", "batch_size", "max_documents", "max_windows")
    limits = Limits(
        tuple(sorted(config.lengths)),
        config.stride,
        config.max_documents,
        config.max_windows,
        config.seed,
    )
    for index, task in enumerate(config.tasks):
        task.check(limits, f"tasks.{index}")
    _check_splits(config, limits, [m for m in config.methods if m.context or m.replug])
    return limits


def _check_splits(config: EvalConfig, limits: Limits, methods: Sequence[Method]) -> None:
    """`methods` read a part of each window beside the decoder."""
    for index, task in enumerate(config.tasks):
        for method in methods:
            _check_split(method, task, f"tasks.{index}", limits)


def _check_split(method: Method, task: Task, key: str, limits: Limits) -> None:
    """Refuses to score what the decoder does not read."""
    split = method.context or method.replug or ContextSplit()
    protocol = getattr(task, "protocol", "last_k")
    if split.source == "foreign" and task.generates:
        raise InputError(
            f"{key}: {task.label} asks with prompts, and the method {method.name} reads chunks of"
            " other documents (source=foreign), which texts have; leave one of them out"
        )
    if PROTOCOLS[protocol].ends or (split.decoder or 0) >= limits.lengths[-1]:
        return
    raise InputError(
        f"{key}.protocol={protocol} scores tokens that the method {method.name} reads beside its"
        " decoder's; use last_k"
    )


def _labels(config: EvalConfig) -> list[str]:
    return [task.label for task in config.tasks]


class _Runner:
    """Loads models one after another, and asks them what no record answers yet."""

    def __init__(self, config: EvalConfig, limits: Limits, store: Store, load: Loader):
        self._config, self._limits, self._store, self._load = config, limits, store, load
        self._plans: dict[tuple, Plan] = {}  # by what the tokenizer does to a text
        self._done = {task.label: store.read(task.label) for task in config.tasks}
        self._kept: dict[Task, list[Record]] = {task: [] for task in config.tasks}
        self.models: dict[str, Any] = {}  # configs of the methods, for the summary

    def records(self) -> dict[Task, list[Record]]:
        """All records of the run, by task; new ones are on disk before the next batch starts."""
        if any(task.needs_data for task in self._config.tasks):
            next(self._texts())  # a path without text is said before a large model is read
        methods = self._config.methods
        opened = sections(self._config)
        # Counted in tokens: windows of one run differ a hundredfold in what they take.
        quiet = not distributed.first()
        with tqdm(unit="tok", unit_scale=True, dynamic_ncols=True, disable=quiet) as bar:
            left = list(methods)
            for index, section in enumerate(opened):
                if section in opened[:index]:
                    continue
                own = [m for m, other in zip(methods, opened, strict=True) if other == section]
                self._checkpoint(section, own, left, bar)
                left = [method for method in left if method not in own]
        return self._kept

    def _checkpoint(
        self, section: ModelSection, methods: Sequence[Method], left: Sequence[Method], bar: tqdm
    ) -> None:
        """All methods of one checkpoint, which is read once and given up before the next one.

        `left` are these methods and those of checkpoints to come.
        """
        model = self._load(section)
        if isinstance(model, LanguageModel) and distributed.first():
            bar.write(self._needs(section, methods, model), file=sys.stderr)
        # Another tokenizer cuts the same texts into other windows; checkpoints to come are taken
        # to have as many.
        bar.total = bar.n + self._tokens(left, self._plan(model.tokenizer, bar))
        for method in methods:
            self.models[method.name] = described(model, method)
            self._refuse_unanswerable(method, model)
        self._store.begin()  # not before: a run that cannot start must not cost the one before it
        for method in methods:
            self._method(method, model, bar)
        del model
        gc.collect()

    def _tokens(self, methods: Sequence[Method], plan: Plan) -> int:
        """Tokens of everything that no record answers: finished work says nothing of the speed."""
        return sum(
            unit.facts["size"]
            for (label, length), units in plan.items()
            for method, unit in itertools.product(methods, units)
            if (method.name, length, unit.index) not in self._done[label]
        )

    def _needs(self, section: ModelSection, methods: Sequence[Method], model: LanguageModel) -> str:
        """What the largest batch needs of each device, and whether it keeps them all busy."""
        batch, length = self._config.batch_size, self._limits.lengths[-1]
        splits = [split_of(method, model) for method in methods]
        asked = any(task.generates for task in self._config.tasks)
        shapes = [(1, length) if s is None else s.shape(model, length) for s in splits]
        # Texts are scored so many rows at a time; a prompt's rows are all in one batch.
        shapes = [(rows if asked else 1, tokens) for rows, tokens in shapes]
        rows, longest = max(shapes, key=math.prod)
        contexts = [c for c in (s and s.context(model, length) for s in splits) if c]
        memory = cost.generation_memory(
            model.config, longest, batch * rows, model.mesh or Mesh(fsdp=1), chunk=longest,
            context=max(contexts, key=math.prod, default=None),
        )  # fmt: skip
        # What is read of a prompt stays as it was for the next choice, beside what goes on from it.
        caches = 2 if any(task.chooses for task in self._config.tasks) else int(asked)
        filler = padding_rows(model.mesh, batch)
        if caches and any(s is None and shareable(model) for s in splits):
            # What prompts begin with is a row on every device.
            caches += rows_over(model.mesh, batch + filler) / (batch + filler)
        memory = dataclasses.replace(memory, cache=int(caches * memory.cache))
        name = section.path or section.preset
        line = f"{name}: up to about {memory}, batch_size={batch} of {longest:,} tokens"
        line += f", {rows} rows each" * (rows > 1)
        if filler:
            line += f"; {filler} more rows are filler: batch_size={batch + filler} takes no longer"
        return line

    def _texts(self) -> Iterator[tuple[str, str]]:
        data = self._config.data
        return documents(data, "validation" if data.holdout else "train")

    def _plan(self, tokenizer, bar: tqdm | None = None) -> Plan:
        """What is asked of models with this tokenizer; `bar` says what is being made."""
        name = self._habits(tokenizer)
        if name not in self._plans:
            corpus, plan = Corpus(self._texts(), tokenizer), {}
            for task, length in itertools.product(self._config.tasks, self._limits.lengths):
                if bar is not None:  # hundreds of long prompts take minutes
                    bar.set_description(f"preparing {task.label} {length:,}")
                plan[task.label, length] = task.plan(corpus, length, self._limits)
                self._refuse_other_questions(task, length, plan[task.label, length])
            for task in self._config.tasks:
                self._refuse_empty(task, corpus, plan)
            self._plans[name] = plan
        return self._plans[name]

    def _refuse_other_questions(self, task: Task, length: int, units: Sequence[Unit]) -> None:
        """Each process computes its part of every batch, so all must have planned the same."""
        if not distributed.same(str([(u.index, u.shape, u.digest) for u in units])):
            raise InputError(
                f"the processes of this job ask different questions in {task.label} at length"
                f" {length}; give all machines the same files of data and tasks, best on storage"
                " that they share"
            )

    def _habits(self, tokenizer) -> tuple:
        """What windows and prompts depend on; two checkpoints may share a vocabulary alone."""
        habits = [tokenizer.fingerprint, getattr(tokenizer, "add_bos", None), tokenizer.bos_id]
        if any(getattr(task, "template", "none") == "chat" for task in self._config.tasks):
            habits.append(tokenizer.render_chat([{"role": "user", "content": "text"}]))
        return tuple(habits)

    def _refuse_empty(self, task: Task, corpus: Corpus, plan: Plan) -> None:
        empty = [n for n in self._limits.lengths if not plan[task.label, n]]
        if empty:
            longest, why = task.reach(corpus)
            # Shorter ones are empty as well when all lengths are to score the same documents.
            beyond = ", ".join(str(n) for n in empty if n > longest) or ", ".join(map(str, empty))
            raise InputError(f"lengths: {beyond} got no window in {task.label}: {why}")

    def _refuse_unanswerable(self, method: Method, model) -> None:
        plan = self._plan(model.tokenizer)
        for length in self._limits.lengths:
            subject = None
            for task in self._config.tasks:
                units, done = plan[task.label, length], self._done[task.label]
                if any((method.name, length, unit.index) not in done for unit in units):
                    subject = subject or subject_of(model, method, length)
                    task.check_model(subject, units)

    def _method(self, method: Method, model, bar: tqdm) -> None:
        plan = self._plan(model.tokenizer)
        for length in reversed(self._limits.lengths):  # what does not fit is known at once
            facts = {"method": method.name, "length": length, "trained": model.config.max_length}
            facts["tokenizer"] = model.tokenizer.fingerprint
            subject = None
            for task in self._config.tasks:
                left = self._left(task, method.name, plan[task.label, length])
                if not left:
                    continue  # a finished cell needs no model
                if subject is None:
                    subject = subject_of(model, method, length)
                    if isinstance(subject, SplitModel):
                        facts["decoder"] = subject.decoder
                bar.set_description(f"{method.name} {length:,} {task.label}")
                units = plan[task.label, length]
                for records in self._score(task, subject, left, facts, units):
                    self._store.append(task.label, records)
                    self._kept[task] += records
                    bar.update(sum(record["size"] for record in records))

    def _left(self, task: Task, method: str, units: Sequence[Unit]) -> list[Unit]:
        """Units without a record; finished ones are taken over, if they saw the same tokens."""
        left = []
        for unit in units:
            key: Key = method, unit.facts["length"], unit.index
            record = self._done[task.label].get(key)
            if record is None:
                left.append(unit)
                continue
            if record["digest"] != unit.digest:
                raise InputError(
                    f"data: the tokens of window {unit.index} at length {key[1]} are not those of "
                    f"{self._store.path(task.label)}; the data has changed since, so choose "
                    "another run.folder"
                )
            self._kept[task].append(record)
        return left

    def _score(
        self, task: Task, model, units: Sequence[Unit], facts: Record, every: Sequence[Unit]
    ) -> Iterator[list[Record]]:
        """Records of one batch after another; units of one shape share a compiled function.

        `every` unit of the task and length may lend its context to another. What prompts begin
        with is read once, and counts once.
        """
        floor, size = measure.reset_peak(), self._config.batch_size
        model = reader_of(model, [ids for unit in units for ids in task.prompts(unit)])
        scorer, saved = task.scorer(model, size), 0
        for chunk in _batches(task, model, units, size):
            fed = chunk
            if isinstance(model, SplitModel):
                fed = [model.fed(unit, every, self._limits.seed) for unit in chunk]
            with measure.Stopwatch() as watch:
                scores = scorer(fed)
            cost = {
                "seconds": (watch.seconds - watch.compiling) / len(chunk),
                "compile_seconds": watch.compiling / len(chunk),
                "peak_bytes": measure.peak_bytes(floor),
                "peak_bytes_at_most": measure.highest_bytes(),
            }
            found = [
                {
                    **facts, "window": u.index, "digest": u.digest, **u.facts,
                    "read": _read(model, u), **score, **cost,
                }
                for u, score in zip(chunk, scores, strict=True)
            ]  # fmt: skip
            if isinstance(model, PrefixReader):
                fewer, saved = round((model.saved - saved) / len(chunk)), model.saved
                found = [{**record, "read": record["read"] - fewer} for record in found]
            yield found


def _batches(task: Task, model, units: Sequence[Unit], size: int) -> Iterator[list[Unit]]:
    """Units of one shape; those whose prompts begin alike are together where `model` profits.

    The longest come first.
    """
    shapes: dict[tuple, list[Unit]] = {}
    for unit in units:
        shapes.setdefault(unit.shape, []).append(unit)
    for group in sorted(shapes.values(), key=lambda own: -max(u.facts["size"] for u in own)):
        yield from batches(model, group, size, lambda unit: next(iter(task.prompts(unit)), ()))


def _read(model, unit: Unit) -> int:
    """Tokens of a unit that the model took in, or wrote."""
    if not isinstance(model, SplitModel):
        return unit.facts["size"]
    if isinstance(unit.payload, Prompt):
        return unit.facts["size"] - model.unread(unit.facts["size"], unit.payload.movable)
    return unit.facts["size"] - model.unread(len(unit.tokens))
