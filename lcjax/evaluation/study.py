"""A study: what is compared and not trained yet is trained first, then the evaluation follows.

One file so holds a whole experiment: the stages that make its parts, a base model, every method
trained from it in the same way, and the tables. Trainings lie in the run folder of the evaluation,
`base` and `trained/NAME`, stages in their own. A finished one is not done again; one that was
stopped goes on.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lcjax import config as config_lib
from lcjax.checkpoints import load_config
from lcjax.checkpoints.build import ModelSection, check_source
from lcjax.errors import InputError
from lcjax.evaluation.config import EvalConfig, Method, Study
from lcjax.evaluation.records import folder_name
from lcjax.evaluation.report.tables import markdown
from lcjax.training import TrainConfig
from lcjax.training import folder as folder_lib
from lcjax.training import run as train
from lcjax.training.config import RunSection
from lcjax.training.tracking import announce, read

# In their order: stages by the name of their file (its path, where two have one name), the base
# model, methods by their name.
Trainings = Mapping[str, TrainConfig]

_BASE = "base"
_STAGE = "stage "


def trainings(config: EvalConfig) -> Trainings:
    """What has to be trained, checked as far as it can be before a model is there."""
    study = config.study or Study()
    found: dict[str, TrainConfig] = {}
    stems = [Path(file).stem for file in study.stages]
    for index, (file, stem) in enumerate(zip(study.stages, stems, strict=True)):
        key, name = f"study.stages.{index}", stem if stems.count(stem) == 1 else file
        _add(found, f"{_STAGE}{name}", _parsed(file, (), key, None), f"{key}={file}")
    if study.base is not None:
        if config.model.path is not None or config.model.preset is not None:
            raise InputError(
                f"study.base={study.base} makes the model; leave model.path and model.preset out"
            )
        found[""] = _parsed(study.base, (), "study.base", _folder(config, None))
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
        extension = _parsed(study.extend, method.train, key, _folder(config, method))
        training = _from_model(extension, source, config, key)
        _add(found, method.name, training, f"methods.{index}.name={method.name}")
    _refuse_shared_folders(found)
    return found


def _add(found: dict[str, TrainConfig], name: str, training: TrainConfig, said: str) -> None:
    if name in {other or _BASE for other in found}:
        raise InputError(
            f"{said} is the name of another training of the study; name a stage once, and give the"
            " method another name"
        )
    found[name] = training


def _parsed(file: str, words: tuple[str, ...], key: str, folder: Path | None) -> TrainConfig:
    try:
        parsed = config_lib.parse(TrainConfig, ["--config", file, *(f"--{word}" for word in words)])
    except InputError as error:
        raise InputError(f"{key}: {error}") from error
    if folder is None:
        return parsed
    return parsed.replace(run=dataclasses.replace(parsed.run, folder=str(folder)))


def _from_model(
    extension: TrainConfig, source: str | None, config: EvalConfig, key: str
) -> TrainConfig:
    """The training of a method, which begins with the model of the study."""
    model = extension.model
    if model.path is not None or model.preset is not None:
        raise InputError(
            f"{key}: model.path={model.path or model.preset} is said by the study, so that all"
            " methods begin with one model; leave it out of study.extend"
        )
    if source is None:
        check_source(config.model)  # a preset, or nothing
        raise InputError(
            f"{key} begins with model.path or study.base, and neither is set; trained random"
            f" weights ({config.model.preset}) compare no methods"
        )
    return extension.replace(model=dataclasses.replace(model, path=source))


def _folder(config: EvalConfig, method: Method | None) -> Path:
    if method is None:
        return Path(config.run.folder, _BASE)
    return Path(config.run.folder, "trained", folder_name(method.name))


def _refuse_shared_folders(found: Trainings) -> None:
    owners: dict[str, str] = {}
    for name, training in found.items():
        other = owners.setdefault(training.run.folder, name)
        if other != name:
            raise InputError(
                f"study: {other!r} and {name!r} would both be trained in {training.run.folder};"
                " give one another name, or a stage another run.folder"
            )


def settings(found: Trainings) -> dict[str, Any]:
    """What decides the trained models: records of others are not gone on with."""
    return {name or _BASE: folder_lib.decisive(training) for name, training in found.items()}


def with_trained(config: EvalConfig) -> EvalConfig:
    """`config` with the folders of the trainings in place of the trainings."""
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


def made_by(found: Trainings) -> set[str]:
    """What stands for the trained models: their run folders, and what these export."""
    folders = [Path(training.run.folder) for training in found.values()]
    return {str(path) for folder in folders for path in (folder, folder / "model")}


def has_memory(section: ModelSection, found: Trainings) -> bool:
    """Whether the model of a section, trained or not yet, reads a context beside its window."""
    makers = {
        str(path): training
        for training in found.values()
        for path in (Path(training.run.folder), Path(training.run.folder, "model"))
    }
    while section.memory is None and section.path in makers:
        section = makers.pop(section.path).model
    if section.memory is not None or section.path is None:
        return section.memory is not None
    try:
        return load_config(section.path).memory is not None
    except InputError:  # as of adapters, or of what is not there: loading says it
        return False


def check_paths(config: EvalConfig, found: Trainings) -> None:
    """Refuses trainings whose folders hold something else, before the first one starts."""
    if found and "" not in found and config.model.path not in made_by(found):
        check_source(config.model)
    for training in _as_wanted(config, found).values():
        folder_lib.check(training)


def _as_wanted(config: EvalConfig, found: Trainings) -> Trainings:
    """What happens to trainings that are there is said by the evaluation: they belong to it."""
    existing = "resume" if config.run.existing == "refuse" else config.run.existing
    return {
        name: training.replace(
            run=RunSection(training.run.folder, existing=existing, accept=training.run.accept)
        )
        for name, training in found.items()
    }


def run(config: EvalConfig, found: Trainings) -> bool:
    """Trains what is not finished; False if that was stopped by a signal."""
    for index, (name, training) in enumerate(_as_wanted(config, found).items(), 1):
        if folder_lib.finished(training):
            continue
        announce(f"study: training {index} of {len(found)}, {name or 'the base model'}")
        if train(training)["stopped"]:
            return False
    return True


def table(found: Trainings) -> str:
    """Markdown: how each model was trained, how long its steps took, and where its loss ended."""
    rows = [["trained", "rows x tokens x steps", "seed", "minutes", "last loss"]]
    for name, training in found.items():
        section = training.train
        log = read(Path(training.run.folder, folder_lib.METRICS))
        shape = f"{section.batch_size} x {training.data.length} x {section.steps:,}"
        loss = f"{log[-1]['loss']:.3f}" if log and log[-1]["loss"] is not None else "nan"
        minutes = f"{_seconds(log) / 60:.1f}"
        rows.append([name or "base model", shape, str(section.seed), minutes, loss])
    return f"### Trained first\n\n{markdown(rows)}"


def _seconds(log: list[dict[str, Any]]) -> float:
    """Time of the steps, without what comes before the first one has ended."""
    total, before = 0.0, 0
    for row in log:
        if row.get("tokens_per_second"):
            total += (row["step"] - before) * row["tokens"] / row["tokens_per_second"]
        before = row["step"]
    return total
