"""Runs an evaluation: scores every method on the same units, then writes the report."""

import dataclasses
import functools
import gc
import itertools
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import draccus
import jax
from tqdm import tqdm

from lcjax import cost
from lcjax.checkpoints.build import ModelSection, check_source, planned_config
from lcjax.data import check_outside_data, largest_text
from lcjax.errors import (
    InputError,
    check_arguments,
    check_fields,
    import_package,
)
from lcjax.evaluation import measure, report, study
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.eval_config import (
    EvalConfig,
    Method,
    apply_method,
    by_section,
    check_methods,
    corpora,
    corpus_of,
    datastores,
    encoders,
    method_settings,
    sections,
    split_of,
    texts,
    weights,
)
from lcjax.evaluation.records import Store, named_records, write_folder_sums
from lcjax.evaluation.split import ContextSplit
from lcjax.evaluation.statistics import group_by
from lcjax.evaluation.task import Limits, Record, Task, Unit
from lcjax.evaluation.tasks.perplexity import PROTOCOLS
from lcjax.generation.language_model import LanguageModel
from lcjax.generation.readings import Readings
from lcjax.generation.scorer import Scorer
from lcjax.generation.session import can_share_prefix
from lcjax.models import ModelConfig
from lcjax.parallel import distributed
from lcjax.parallel.device_memory import check_estimate
from lcjax.parallel.run_lock import RunLock
from lcjax.parallel.sharding import make_mesh, padding_rows, rows_over
from lcjax.progress import ticking
from lcjax.storage import to_path

Loader = Callable[[ModelSection], Any]
Plan = dict[tuple[str, int], list[Unit]]  # by task and length
_BYTES_HELD = 8  # for each byte of a document: its text, its ids, and the bytes of each token
# Names of tables and figures that belong to no single task; the files of a task have its name.
_REPORT_FILES = ("cost", "differences", "perplexity_accuracy", "published", "training")


@check_arguments
def run(config: EvalConfig, *, load: Loader | None = None) -> report.Report | None:
    """Runs the missing trainings of a study, scores the units without a record, and reports.

    With several processes every batch is sharded over all of them, and the first process writes.

    Args:
      config: The config of eval.py.
      load: Loads the model of a model section; None for `LanguageModel.load` on the mesh of
        `config`.

    Returns:
      The report; None in other processes than the first, or if a training was stopped by a signal.

    Raises:
      InputError: A setting, a path or the run folder is invalid.
    """
    check(config)
    trainings = study.trainings(config)
    trained = study.with_trained(config)
    mesh = make_mesh(config.mesh)
    load_model = load or functools.partial(LanguageModel.load, mesh=mesh)
    if load is None:
        trained_paths = study.by_path(trainings)
        for i, (method, section) in enumerate(zip(config.methods, sections(trained), strict=True)):
            if section.path not in trained_paths:
                check_source(section, "model" if method.path is None else f"methods.{i}")
            if method.retriever is None and study.has_memory(section, trainings):
                _check_splits(config, [method])
    inputs = encoders(config)
    settings = draccus.encode(config)
    if trainings:
        settings["trainings"] = study.settings(trainings)
    folder = to_path(config.run.folder)
    for task in config.tasks:
        check_outside_data("run.folder", folder, corpus_of(task, config))
    with RunLock(folder), Store(config, settings) as store:
        study.check_paths(config, trainings)
        if not study.run(config, trainings):
            return None
        inputs |= datastores(config) | (weights(trained) if load is None else {})
        store.check_inputs(inputs)
        try:
            runner = _Runner(trained, store, load_model)
            if load is None:
                runner.check_models(mesh)
            records = runner.records()
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(
                f"finished records are in {store.folder}; the same command continues from there"
            ) from stop
        if not distributed.is_main_process():
            return None
        store.check_kept()
        order = [method.name for method in config.methods]
        notes = study.table(trainings) if trainings else ""
        environment = {**report.current_environment(), "models": runner.models}
        with named_records(store.folder):
            result = report.write(
                store.folder,
                settings,
                records,
                order=order,
                published=config.published,
                notes=notes,
                environment=environment,
            )
        write_folder_sums(store.folder)
        print(f"\n{result.text}\nWritten:")
        print("\n".join(f"  {path}" for path in [*map(store.path, _labels(config)), *result.files]))
        return result


def limits_of(config: EvalConfig, task: Task) -> Limits:
    """Returns the settings on which the planning of a task depends."""
    return Limits(
        tuple(sorted(task.lengths or config.lengths)),
        config.stride,
        config.max_documents,
        config.max_windows,
        config.seed,
    )


def check(config: EvalConfig) -> None:
    """Checks all settings that can be checked before a model is loaded.

    Raises:
      InputError: A setting is invalid.
    """
    for key, names in (
        ("methods", [method.name for method in config.methods]),
        ("tasks", _labels(config)),
        ("lengths", list(config.lengths)),
        *((f"tasks.{i}.lengths", list(t.lengths)) for i, t in enumerate(config.tasks) if t.lengths),
    ):
        if not names:
            raise InputError(f"{key} is empty; give at least one")
        if "" in names:
            raise InputError(f"{key}: a name is empty; give each its own name")
        repeated = sorted({str(name) for name in names if names.count(name) > 1})
        if repeated:
            kind = "length" if key.endswith("lengths") else "name"
            names = ", ".join(repeated)
            raise InputError(f"{key}: duplicate {kind} {names}; give each a unique {kind}")
    for index, method in enumerate(config.methods):
        if re.search(r"[|$\n\r\t]", method.name):
            raise InputError(
                f"methods.{index}.name={method.name!r} is a row of tables and figures; remove |, $,"
                " tabs and line breaks"
            )
    for index, label in enumerate(_labels(config)):
        if not re.fullmatch(r"[\w.-]+", label):
            raise InputError(
                f"tasks.{index}.name={label!r} names files; use letters, digits, dot, dash, "
                "underscore"
            )
        if label in _REPORT_FILES:
            raise InputError(f"tasks.{index}.name={label} is a file of every report; rename it")
    for length in (n for lengths in (config, *config.tasks) for n in lengths.lengths):
        if length < 2:
            raise InputError(f"lengths: {length} must be at least 2: one token to predict another")
    check_fields("", config)
    import_package("matplotlib", "the figures of a report")
    for index, task in enumerate(config.tasks):
        if task.corpus and not task.needs_data:
            raise InputError(
                f"tasks.{index}.corpus={task.corpus}: {task.label} reads no text; leave it out"
            )
        task.check(limits_of(config, task), f"tasks.{index}")
    for index, method in enumerate(config.methods):
        if method.retrieval is not None:
            method.retrieval.retriever.check(f"methods.{index}.retrieval.retriever")
        if method.knn is not None:
            method.knn.check(f"methods.{index}.knn")
    cut = [m for m in config.methods if m.retrieval is not None and m.retrieval.decoder is not None]
    for index, table in enumerate(config.published):
        table.check(config.tasks, [m.name for m in config.methods], f"published.{index}")
    _check_splits(config, [m for m in config.methods if m.context or m.replug or m in cut])
    _check_questions(config)


def _check_questions(config: EvalConfig) -> None:
    """Raises InputError if `question` of a method has no effect on any task; warns if on some."""
    names = [method.name for method in config.methods if method.question != "seen"]
    texts = [task.label for task in config.tasks if not task.generates]
    if not names or not texts:
        return
    problem = (
        f"methods: question of {', '.join(names)} has no effect on {', '.join(texts)}, whose texts"
        " have no question"
    )
    if len(texts) == len(config.tasks):
        raise InputError(f"{problem}; leave question out, or add a task with prompts")
    warnings.warn(problem, stacklevel=3)


def _check_splits(config: EvalConfig, methods: Sequence[Method]) -> None:
    """Raises InputError if a task scores tokens that the decoder of a method does not read."""
    for (index, task), method in itertools.product(enumerate(config.tasks), methods):
        key, protocol = f"tasks.{index}", getattr(task, "protocol", "last_k")
        split = method.context or method.replug or method.retrieval or ContextSplit()
        if task.generates and method.retrieval is not None:
            raise InputError(
                f"{key}: {task.label} has prompts, and the method {method.name} reads the end of"
                " windows (retrieval.decoder), which texts have; leave one of them out"
            )
        if split.source == "foreign" and task.generates:
            raise InputError(
                f"{key}: {task.label} has prompts, and the method {method.name} reads chunks of"
                " other documents (source=foreign), which texts have; leave one of them out"
            )
        longest = limits_of(config, task).lengths[-1]
        if not PROTOCOLS[protocol].ends and (split.decoder or 0) < longest:
            raise InputError(
                f"{key}.protocol={protocol} scores tokens that the decoder of the method"
                f" {method.name} does not read; use last_k"
            )


def _labels(config: EvalConfig) -> list[str]:
    return [task.label for task in config.tasks]


@dataclasses.dataclass(frozen=True)
class _PlannedModel:
    """The properties of a model that is not loaded yet, from which its bytes on a device follow."""

    config: ModelConfig
    mesh: jax.sharding.Mesh

    @property
    def shares_prefixes(self) -> bool:
        return can_share_prefix(self.config)

    def inference_memory(
        self, rows: int, length: int, context: tuple[int, int] | None = None
    ) -> cost.MemoryEstimate:
        options = {"chunk": length, "context": context}
        return cost.generation_memory(self.config, length, rows, self.mesh, **options)


@dataclasses.dataclass(frozen=True)
class _Cell:
    """One task, method and length: the units to score, and the model that scores them."""

    task: Task
    model: Scorer  # with the settings of the method
    fields: Record  # fields of all records
    missing: Sequence[Unit]  # units without a record
    units: Sequence[Unit]  # all of them


class _Runner:
    """Loads the models one after another, and scores the units without a record."""

    def __init__(self, config: EvalConfig, store: Store, load: Loader):
        self._config, self._store, self._load = config, store, load
        self._limits = {task.label: limits_of(config, task) for task in config.tasks}
        self._lengths = sorted({n for limits in self._limits.values() for n in limits.lengths})
        self._plans: dict[tuple, Plan] = {}  # by `_plan_key` of the tokenizer
        self._done = {task.label: store.read(task.label) for task in config.tasks}
        self._records: dict[Task, list[Record]] = {task: [] for task in config.tasks}
        self.models: dict[str, Any] = {}  # configs of the methods, for the summary
        self._readings: Readings | None = None  # that methods share

    def check_models(self, mesh: jax.sharding.Mesh) -> None:
        """Raises an InputError if a method does not fit its model, or the run its devices.

        Nothing is loaded. Models whose configs only loading shows are checked by `records`.
        """
        for section, methods in by_section(self._config):
            if (config := planned_config(section)) is not None:
                check_methods(methods, config, self._lengths[-1])
                config = config.for_inference().replace(scan_layers=False)
                self._memory_lines(section, methods, _PlannedModel(config, mesh))

    def records(self) -> dict[Task, list[Record]]:
        """Returns all records by task; those of a batch are written before the next batch runs."""
        for task in self._config.tasks:
            if task.needs_data:  # a corpus without text fails before a large model is loaded
                next(texts(corpus_of(task, self._config)))
        # The progress bar counts tokens instead of windows, whose lengths differ a hundredfold.
        quiet = not distributed.is_main_process()
        options = {"unit": "tok", "unit_scale": True, "dynamic_ncols": True, "disable": quiet}
        with tqdm(**options) as bar, ticking(bar):
            remaining = list(self._config.methods)
            for section, group in by_section(self._config):
                model = self._open(section, group, remaining, bar)
                remaining = [method for method in remaining if method not in group]
                for cell in (cell for method in group for cell in self._cells(method, model)):
                    name, length = cell.fields["method"], cell.fields["length"]
                    bar.set_postfix_str("the first batch compiles", refresh=False)
                    bar.set_description(f"{name} {length:,} {cell.task.label}")
                    for records in self._score(cell):
                        bar.set_postfix_str("", refresh=False)
                        self._store.append(cell.task.label, records)
                        self._records[cell.task] += records
                        bar.update(sum(record["size"] for record in records))
                    del cell
                del model  # before the next checkpoint is loaded
                gc.collect()
        return self._records

    def _open(
        self,
        section: ModelSection,
        methods: Sequence[Method],
        remaining: Sequence[Method],
        bar: tqdm,
    ) -> LanguageModel:
        """Loads a checkpoint and checks all its methods.

        `remaining` are these methods and those of later checkpoints.
        """
        model = self._load(section)
        if self._config.readings_gb:
            num_bytes = int(1e9 * self._config.readings_gb)
            model.readings = self._readings = Readings(num_bytes, measure.Stopwatch)
        for line in self._memory_lines(section, methods, model):
            if distributed.is_main_process():
                bar.write(line, file=sys.stderr)
        # Later checkpoints may have other tokenizers and windows; the bar assumes the same ones.
        bar.total = bar.n + self._num_tokens(remaining, self._plan(model.tokenizer, bar))
        for method in methods:
            self.models[method.name] = method_settings(model, method, self._lengths[-1])
            self._check_model(method, model)
        self._store.begin()  # after the checks, as it may delete an old run
        return model

    def _num_tokens(self, methods: Sequence[Method], plan: Plan) -> int:
        """Returns the number of tokens of all units without a record."""
        return sum(
            unit.fields["size"]
            for (label, length), units in plan.items()
            for method, unit in itertools.product(methods, units)
            if (method.name, length, unit.index) not in self._done[label]
        )

    def _memory_lines(
        self,
        section: ModelSection,
        methods: Sequence[Method],
        model: LanguageModel | _PlannedModel,
    ) -> list[str]:
        """Returns a line on the largest batch's device memory and on filler rows, and a warning.

        Raises:
          InputError: device memory is not sufficient, and `run.ignore_memory` is false.
        """
        batch, length = self._config.batch_size, self._lengths[-1]
        splits = [split_of(method, model) for method in methods]
        generates = any(task.generates for task in self._config.tasks)
        shapes = [(1, length) if s is None else s.shape(model, length) for s in splits]
        # A prompt with several rows (REPLUG) needs all of them in one batch; texts do not.
        shapes = [(rows if generates else 1, tokens) for rows, tokens in shapes]
        rows, longest = max(shapes, key=math.prod)
        contexts = [c for c in (s and s.context(model, length) for s in splits) if c]
        context = max(contexts, key=math.prod, default=None)
        estimated = model.inference_memory(batch * rows, longest, context)
        if estimated is None:
            return []
        # Choices need the cache of the prompt and a copy that each choice extends.
        caches = 2 if any(task.ranks_options for task in self._config.tasks) else int(generates)
        filler = padding_rows(model.mesh, batch)
        if caches and model.shares_prefixes and None in splits:
            # The shared prefix of prompts is one row on every device.
            caches += rows_over(model.mesh, batch + filler) / (batch + filler)
        estimated = dataclasses.replace(estimated, cache=int(caches * estimated.cache))
        devices = jax.local_devices()[:1] if model.mesh is None else model.mesh.local_devices
        if devices[0].platform == "cpu":
            estimated = estimated.on_cpu(len(devices), text=self._text_bytes)
        name = section.path or section.preset
        line = f"{name}: up to about {estimated}, batch_size={batch} of {longest:,} tokens"
        if rows > 1:
            line += f", {rows} rows each"
        warning = check_estimate(
            estimated.total,
            devices[0],
            line,
            f"lower batch_size={batch} or lengths, set model.param_dtype=bfloat16, or use a smaller"
            " model or more devices",
            ignore=self._config.run.ignore_memory,
        )
        if filler:
            line += f"; {filler} more rows are filler: batch_size={batch + filler} takes no longer"
        return [line, *([warning] if warning else [])]

    @functools.cached_property
    def _text_bytes(self) -> int:
        """The memory that the largest text file needs, as text, as ids and as their sizes."""
        data = [corpus_of(task, self._config) for task in self._config.tasks if task.needs_data]
        return int(_BYTES_HELD * max(map(largest_text, data), default=0))

    def _plan(self, tokenizer, bar: tqdm | None = None) -> Plan:
        """Returns all units for a tokenizer; `bar` shows the progress."""
        name = self._plan_key(tokenizer)
        if name not in self._plans:
            by_task, plan = corpora(self._config, tokenizer), {}
            cells = [(t, n) for t in self._config.tasks for n in self._limits[t.label].lengths]
            for task, length in cells:
                if bar is not None:  # long prompts take minutes
                    bar.set_description(f"preparing {task.label} {length:,}")
                limits = self._limits[task.label]
                plan[task.label, length] = task.plan(by_task[task.label], length, limits)
                self._check_same_units(task, length, plan[task.label, length])
            for task in self._config.tasks:
                self._check_not_empty(task, by_task[task.label], plan)
            self._plans[name] = plan
        return self._plans[name]

    def _check_same_units(self, task: Task, length: int, units: Sequence[Unit]) -> None:
        """Raises InputError if processes planned different units, as they share every batch."""
        if not distributed.equal_on_all_processes(
            str([(u.index, u.shape, u.digest) for u in units])
        ):
            raise InputError(
                f"processes planned different examples for {task.label} at length {length}; give"
                " all machines the same data and task files"
            )

    def _plan_key(self, tokenizer) -> tuple:
        """Returns the properties of a tokenizer on which windows and prompts depend."""
        key = [tokenizer.fingerprint, getattr(tokenizer, "add_bos", None), tokenizer.bos_id]
        if any(getattr(task, "template", "none") == "chat" for task in self._config.tasks):
            key.append(tokenizer.render_chat([{"role": "user", "content": "text"}]))
        return tuple(key)

    def _check_not_empty(self, task: Task, corpus: TokenizedCorpus, plan: Plan) -> None:
        empty = [n for n in self._limits[task.label].lengths if not plan[task.label, n]]
        if empty:
            longest, reason = task.longest_length(corpus)
            # If all lengths score the same documents, shorter lengths are empty, too.
            beyond = ", ".join(str(n) for n in empty if n > longest) or ", ".join(map(str, empty))
            raise InputError(f"lengths: {beyond} got no window in {task.label}: {reason}")

    def _check_model(self, method: Method, model) -> None:
        plan = self._plan(model.tokenizer)
        for length in self._lengths:
            subject_of = functools.cache(functools.partial(apply_method, model, method, length))
            for task in self._config.tasks:
                units, done = plan.get((task.label, length), ()), self._done[task.label]
                if any((method.name, length, unit.index) not in done for unit in units):
                    task.check_model(subject_of(prompts=task.generates), units)

    def _cells(self, method: Method, model: LanguageModel) -> Iterator[_Cell]:
        """Yields the cells of a method that lack records, longest first: they need most memory."""
        plan = self._plan(model.tokenizer)
        for length in reversed(self._lengths):
            fields = {"method": method.name, "length": length, "trained": model.config.max_length}
            fields["tokenizer"] = model.tokenizer.fingerprint
            # Cached, once for windows and once for prompts, as a reader may open a datastore.
            subject_of = functools.cache(functools.partial(apply_method, model, method, length))
            for task in self._config.tasks:
                units = plan.get((task.label, length), ())
                missing = self._units_without_record(task, method.name, length, units)
                if not missing:
                    continue
                subject = subject_of(prompts=task.generates)
                if subject.decoder_tokens is not None:
                    fields["decoder"] = subject.decoder_tokens
                yield _Cell(task, subject, fields, missing, units)

    def _units_without_record(
        self, task: Task, method: str, length: int, units: Sequence[Unit]
    ) -> list[Unit]:
        """Returns the units without a record, and keeps the records of the others.

        Raises:
          InputError: A unit with a record has other tokens or references, or no longer exists.
        """
        done = self._done[task.label].items()
        records = {i: record for (*cell, i), record in done if cell == [method, length]}
        planned = {unit.index: unit for unit in units}
        for index, record in records.items():
            unit = planned.get(index)
            if (
                unit is None
                or record["digest"] != unit.digest
                or task.references(record) != task.references(unit.fields)
            ):
                raise InputError(
                    f"data: example {index} of {task.label} at length {length} is not that of"
                    f" {self._store.path(task.label)}; the data has changed since, so choose"
                    " another run.folder"
                )
        self._records[task] += [records[index] for index in planned if index in records]
        return [unit for unit in units if unit.index not in records]

    def _score(self, cell: _Cell) -> Iterator[list[Record]]:
        """Yields the records of each batch; units of one shape share a compiled function.

        A shared prefix of prompts is read once and counts once.
        """
        task, seed = cell.task, self._config.seed
        floor, size = measure.reset_peak(), _num_rows(cell.units, self._config.batch_size)
        prompts = [ids for unit in cell.missing for ids in task.prompts(unit)]
        model = cell.model.with_shared_prefixes(prompts)
        scorer, saved = task.scorer(model, size), 0
        cache_bytes = cell.model.cache_bytes(cell.fields["length"])
        for chunk in _batches(task, model, cell.missing, size):
            inputs = [_with_foreign_context(model, unit, cell.units, seed) for unit in chunk]
            before = 0.0 if self._readings is None else self._readings.saved_seconds
            with measure.Stopwatch() as watch:
                scores = scorer(inputs)
            seconds = watch.seconds - watch.compiling
            if self._readings is not None:  # a method that reads alone would have taken them, too
                seconds += self._readings.saved_seconds - before
            cost = {
                "seconds": seconds / len(chunk),
                "compile_seconds": watch.compiling / len(chunk),
                "peak_bytes": measure.peak_bytes(floor),
                "peak_bytes_at_most": measure.highest_bytes(),
                "cache_bytes": cache_bytes,
            }
            records = [
                {
                    **cell.fields, "window": u.index, "digest": u.digest, **u.fields,
                    "read": _num_read(model, u), **_decoder_passages(model, u), **score, **cost,
                }
                for u, score in zip(chunk, scores, strict=True)
            ]  # fmt: skip
            shared, saved = round((model.saved_tokens - saved) / len(chunk)), model.saved_tokens
            yield [{**record, "read": record["read"] - shared} for record in records]


def _batches(task: Task, model: Scorer, units: Sequence[Unit], size: int) -> Iterator[list[Unit]]:
    """Yields batches of units of one shape, the longest first.

    Prompts with a common prefix share a batch if `model` can reuse the prefix.
    """
    shapes = group_by(units, lambda unit: unit.shape)
    for group in sorted(shapes.values(), key=lambda group: -max(u.fields["size"] for u in group)):
        yield from model.batches(group, size, lambda unit: next(iter(task.prompts(unit)), ()))


def _num_rows(units: Sequence[Unit], most: int) -> int:
    """Returns the rows of each batch of `units`: no more than their shape with most units needs.

    Batches are padded to the same number of rows, so that they run in one compiled function. It
    gives as few batches as `most` rows, and the fewest filler rows.
    """
    count = max(map(len, group_by(units, lambda unit: unit.shape).values()))
    return -(-count // -(-count // most))


def _with_foreign_context(model: Scorer, unit: Unit, units: Sequence[Unit], seed: int) -> Unit:
    """Returns the unit to score; for source=foreign its context is of other documents."""
    document = unit.fields.get("document")
    others = (other.tokens for other in units if other.fields.get("document") != document)
    passages = None if unit.prompt is None else unit.prompt.passages
    tokens = model.with_foreign_context(unit.tokens, others, [seed, unit.index], passages)
    return dataclasses.replace(unit, tokens=tokens)


def _decoder_passages(model: Scorer, unit: Unit) -> Record:
    """Returns the field with the number of passages that the decoder reads beside a context."""
    passages = () if unit.prompt is None else unit.prompt.passages
    if model.decoder_tokens is None or all(passage.rank is None for passage in passages):
        return {}
    return {"decoder_passages": model.num_decoder_passages(unit.fields["size"], passages)}


def _num_read(model: Scorer, unit: Unit) -> int:
    """Returns the number of tokens of a unit that the model reads or generates."""
    size = unit.fields["size"]
    if unit.prompt is not None:
        return size - model.num_unread(size, unit.prompt.movable, unit.prompt.passages)
    return size - model.num_unread(len(unit.tokens))
