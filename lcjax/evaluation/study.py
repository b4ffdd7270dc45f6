"""A study: trains the models of an evaluation that are not trained yet, before the evaluation.

One config file describes a whole experiment: stages that train parts of models, a base model, and
methods trained from it in the same way. The base model is trained in `base` and methods in
`trained/NAME` of the run folder, or in a folder that evaluations share; stages have their own
folders. A finished training does not run again, and a stopped one is resumed.
"""

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lcjax import config as config_lib
from lcjax.checkpoints import load_config
from lcjax.checkpoints.build import ModelSection, check_source
from lcjax.data import check_sources
from lcjax.errors import InputError
from lcjax.evaluation.eval_config import EvalConfig, Method, Study
from lcjax.evaluation.records import folder_name
from lcjax.evaluation.report.tables import markdown
from lcjax.storage import to_path
from lcjax.training import TrainConfig
from lcjax.training import folder as folder_lib
from lcjax.training import run as train
from lcjax.training.tracking import announce, read

# Trainings in their order: stages by file name (by path, if two have one name), the base model
# as `base`, methods by name.
Trainings = Mapping[str, TrainConfig]

_BASE = "base"
_STAGE = "stage "


def trainings(config: EvalConfig) -> Trainings:
    """Returns the trainings of a config, after all checks that need no model.

    Raises:
      InputError: A config of a training is invalid, or two trainings share a name or a folder.
    """
    study = config.study or Study()
    trainings: dict[str, TrainConfig] = {}
    stages = [_split(stage, f"study.stages.{n}") for n, stage in enumerate(study.stages)]
    stems = [Path(file).stem for file, _ in stages]
    for index, (stage, stem) in enumerate(zip(study.stages, stems, strict=True)):
        key, name = f"study.stages.{index}", stem if stems.count(stem) == 1 else stage
        training = _parse(*stages[index], key, None)
        _add(trainings, f"{_STAGE}{name}", training, f"{key}={stage}")
    if study.base is not None:
        if config.model.path is not None or config.model.preset is not None:
            raise InputError(
                f"study.base={study.base} makes the model; leave model.path and model.preset out"
            )
        trainings[_BASE] = _parse(study.base, (), "study.base", _folder(config, None))
    source = str(_folder(config, None)) if study.base is not None else config.model.path
    for index, method in enumerate(config.methods):
        if method.train is None:
            continue
        key = f"methods.{index}.train"
        if study.extend is None:
            raise InputError(
                f"{key}={list(method.train)} has nothing to change; set study.extend to a config of"
                " train.py"
            )
        if method.path is not None:
            raise InputError(f"{key}: {method.name} has path={method.path}, too; keep one of them")
        if method is not _first_of(config, method):
            continue
        file, shared = _split(study.extend, "study.extend")
        extension = _parse(file, (*shared, *method.train), key, _folder(config, method))
        training = _from_model(extension, source, config, key)
        _add(trainings, method.name, training, f"methods.{index}.name={method.name}")
    _check_folders(trainings)
    return trainings


def _add(trainings: dict[str, TrainConfig], name: str, training: TrainConfig, key: str) -> None:
    if name in trainings:
        raise InputError(
            f"{key} is the name of another training of the study; name a stage once, and give the"
            " method another name"
        )
    trainings[name] = training


def _split(text: str, key: str) -> tuple[str, tuple[str, ...]]:
    """Returns the file and the keys without dashes of a text like `mine.yaml --train.steps=9`."""
    try:
        file, *words = shlex.split(text)
    except ValueError as error:  # a quotation without an end, or no word
        raise InputError(f"{key}={text!r} must be a file, and keys that follow it") from error
    return file, tuple(word.removeprefix("--") for word in words)


def _parse(file: str, overrides: tuple[str, ...], key: str, folder: Path | None) -> TrainConfig:
    try:
        words = ["--config", file, *(f"--{override}" for override in overrides)]
        training = config_lib.parse(TrainConfig, words)
    except InputError as error:
        raise InputError(f"{key}: {error}") from error
    if folder is None:
        return training
    return training.replace(run=dataclasses.replace(training.run, folder=str(folder)))


def _from_model(
    extension: TrainConfig, source: str | None, config: EvalConfig, key: str
) -> TrainConfig:
    """Returns the training of a method from the model of its own config, or of the study."""
    model, has_base = extension.model, config.study.base is not None
    if model.path is not None and not has_base:
        return extension
    if model.path is not None or model.preset is not None:
        raise InputError(
            f"{key}: the study sets the base model; remove"
            f" model.{'preset' if model.path is None else 'path'} from study.extend"
        )
    if source is None:
        check_source(config.model)  # a preset, or nothing
        raise InputError(
            f"{key} begins with model.path or study.base, and neither is set; trained random"
            f" weights ({config.model.preset}) compare no methods"
        )
    return extension.replace(model=dataclasses.replace(model, path=source))


def _folder(config: EvalConfig, method: Method | None) -> Path:
    run_folder = to_path(config.run.folder)
    if method is None:
        return run_folder / _BASE
    shared = config.study and config.study.folder
    folder = to_path(shared) if shared else run_folder / "trained"
    return folder / folder_name(_first_of(config, method).name)


def _first_of(config: EvalConfig, method: Method) -> Method:
    """Returns the first method with the training of `method`, which all of them share."""
    return next(other for other in config.methods if other.train == method.train)


def _check_folders(trainings: Trainings) -> None:
    names: dict[str, str] = {}
    for name, training in trainings.items():
        other = names.setdefault(training.run.folder, name)
        if other != name:
            raise InputError(
                f"study: {other!r} and {name!r} would both be trained in {training.run.folder};"
                " give one another name, or a stage another run.folder"
            )


def settings(trainings: Trainings) -> dict[str, Any]:
    """Returns the settings that determine the trained models, for the hash of the run."""
    return {name: folder_lib.hashed_settings(training) for name, training in trainings.items()}


def with_trained(config: EvalConfig) -> EvalConfig:
    """Returns `config` without `study`, with run folders of the trainings as models' paths."""
    methods = tuple(
        dataclasses.replace(m, path=str(_folder(config, m)), train=None)
        if m.train is not None
        else m
        for m in config.methods
    )
    model = config.model
    if config.study is not None and config.study.base is not None:
        model = dataclasses.replace(model, path=str(_folder(config, None)))
    return dataclasses.replace(config, model=model, methods=methods, study=None)


def by_path(trainings: Trainings) -> dict[str, TrainConfig]:
    """Returns trainings by path of a model: their run folders, and models and steps in these."""
    by_path = {}
    for training in trainings.values():
        folder, train = to_path(training.run.folder), training.train
        steps = {*range(train.save_every, train.steps, train.save_every), train.steps}
        paths = (folder, folder / "model", *(folder / "checkpoints" / str(s) for s in steps))
        by_path |= {str(path): training for path in paths}
    return by_path


def has_memory(section: ModelSection, trainings: Trainings) -> bool:
    """Returns whether the model of a section has a memory, also if it is not trained yet."""
    remaining = by_path(trainings)
    while section.memory is None and section.path in remaining:
        section = remaining.pop(section.path).model
    if section.memory is not None or section.path is None:
        return section.memory is not None
    try:
        return load_config(section.path).memory is not None
    except InputError:  # adapters or a missing checkpoint; loading reports it
        return False


def check_paths(config: EvalConfig, trainings: Trainings) -> None:
    """Raises InputError if a training's folder holds something else, or it has no text."""
    if trainings and _BASE not in trainings and config.model.path not in by_path(trainings):
        check_source(config.model)
    for training in _with_existing(config, trainings).values():
        try:
            folder_lib.check(training)
        except InputError as error:
            if _is_inside(config, training):
                raise
            hint = "an evaluation replaces no training outside of its run.folder; train.py does"
            raise InputError(f"{error} ({hint})") from None
        if not folder_lib.finished(training):
            check_sources(training.data)


def _with_existing(config: EvalConfig, trainings: Trainings) -> Trainings:
    """Returns trainings with the evaluation's `run.existing`, or `resume` outside its folder.

    Trainings elsewhere (stages, rows of `study.folder`) also serve other studies, and may have
    taken hours: `overwrite` of an evaluation does not replace them.
    """
    existing = "resume" if config.run.existing == "refuse" else config.run.existing

    def with_existing(training: TrainConfig) -> TrainConfig:
        policy = existing if _is_inside(config, training) else "resume"
        return training.replace(run=dataclasses.replace(training.run, existing=policy))

    return {name: with_existing(training) for name, training in trainings.items()}


def _is_inside(config: EvalConfig, training: TrainConfig) -> bool:
    return to_path(config.run.folder) in to_path(training.run.folder).parents


def run(config: EvalConfig, trainings: Trainings) -> bool:
    """Runs the trainings that are not finished; returns False if a signal stopped one."""
    for index, (name, training) in enumerate(_with_existing(config, trainings).items(), 1):
        if folder_lib.finished(training):
            continue
        announce(f"study: training {index} of {len(trainings)}, {name}")
        if train(training)["stopped"]:
            return False
    return True


def table(trainings: Trainings) -> str:
    """Returns a Markdown table of the trainings: sizes, seed, time of the steps, last loss."""
    rows = [["trained", "rows x tokens x steps", "seed", "minutes", "last loss"]]
    for name, training in trainings.items():
        section = training.train
        log = read(to_path(training.run.folder) / folder_lib.METRICS)
        shape = f"{section.batch_size} x {training.data.length} x {section.steps:,}"
        losses = [row["loss"] for row in log if row.get("loss") is not None]  # not of validation
        loss = f"{losses[-1]:.3f}" if losses else "nan"
        minutes = f"{_seconds(log) / 60:.1f}"
        rows.append([name, shape, str(section.seed), minutes, loss])
    return f"### Trained first\n\n{markdown(rows)}"


def _seconds(log: list[dict[str, Any]]) -> float:
    """Returns the seconds of all steps after the first one."""
    total, previous = 0.0, 0
    for row in log:
        for unit in ("tokens", "queries"):
            if row.get(f"{unit}_per_second"):
                total += (row["step"] - previous) * row[unit] / row[f"{unit}_per_second"]
        previous = row["step"]
    return total
