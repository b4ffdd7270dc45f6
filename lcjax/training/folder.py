"""The run folder: its files, and whether an existing run may be resumed or replaced.

config.yaml      the resolved settings        model.yaml   the model's config
checkpoints/     train states                 tokenizer/   the tokenizer
metrics.jsonl    one line per log             loss.png     the loss curve
model/           the result, a Hugging Face folder         base.json  the frozen weights it needs
adapter/         adapters alone, as PEFT reads them        bad_batch_*.npz  batches that gave NaN
index/           vectors of passages                       language_model/  trained with a retriever
tensorboard/     event files                               wandb/, wandb.json  its files, its run
profile/         profiler traces                error.txt    traceback of an I/O or device error
lock.json        the process that writes here              checksums.sha256  of these files
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import draccus
import jax

from lcjax import config as config_lib
from lcjax.checkpoints.adapters import PEFT_FOLDER
from lcjax.checkpoints.bert_folder import BERT_FOLDER, BERT_FOLDERS
from lcjax.checkpoints.hf_save import HF_FOLDER
from lcjax.checkpoints.orbax_io import FOLDER, steps_in
from lcjax.checkpoints.run_folder import BASE, MODEL_CONFIG
from lcjax.checkpoints.tokenizer import TOKENIZER_FILES
from lcjax.config import ERROR
from lcjax.data.data_config import RESUMABLE
from lcjax.errors import InputError
from lcjax.files import (
    CHECKSUMS,
    FolderFormat,
    check_destination,
    check_replaceable,
    update_sums,
)
from lcjax.parallel import distributed
from lcjax.parallel.run_lock import GUARD, LOCK
from lcjax.storage import URLPath, check_regular, remove, to_path
from lcjax.training.train_config import TrainConfig
from lcjax.tree import flatten

CONFIG, METRICS, TOKENIZER = "config.yaml", "metrics.jsonl", "tokenizer"
TENSORBOARD, WANDB, WANDB_RUN, PROFILE = "tensorboard", "wandb", "wandb.json", "profile"
MODEL, ADAPTER, CURVE = "model", "adapter", "loss.png"
LANGUAGE_MODEL, INDEX = "language_model", "index"
HEADS = "heads.json"  # scores of key heads, in `model/`
HEADS_FOLDER = FolderFormat(
    name="the folder of scores of key heads",
    files=(HEADS, CHECKSUMS),
    config=HEADS,
    keys=frozenset({"scores", "sinks", "recent"}),
)
_BAD_BATCHES = "bad_batch_*.npz"
_FILES = (CONFIG, MODEL_CONFIG, METRICS, BASE, CURVE, WANDB_RUN, ERROR, CHECKSUMS)
_FOLDERS = (FOLDER, TOKENIZER, MODEL, ADAPTER, LANGUAGE_MODEL, INDEX, TENSORBOARD, WANDB, PROFILE)
RUN_FOLDER = FolderFormat(  # without the folders of models, which have formats of their own
    name="a run folder",
    files=(
        *(*_FILES, LOCK, GUARD, _BAD_BATCHES),
        *(f"{TOKENIZER}/{name}" for name in TOKENIZER_FILES),
        # orbax, wandb and JAX's profiler change their file names between versions.
        *(f"{FOLDER}/[0-9]*/**", f"{WANDB}/**", f"{PROFILE}/plugins/**"),
        *(f"{TENSORBOARD}/*tfevents*", f"{INDEX}/passages.json", f"{INDEX}/vectors-step*"),
    ),
    config=CONFIG,
    keys=frozenset({"model", "data", "train", "run"}),
)

_VISIBLE = 60  # seconds until network storage shows a new file to all machines

# Keys that do not change what a run computes (up to rounding), so a resumed run may change them.
# The loader itself checks that the text in data.path is the same.
_FREE = (
    *("run.", "eval.", "track.", "mesh.", "distributed.", "model.remat"),
    *("data.path", "data.sources", "retriever.pairs.path"),
    *(f"data.{name}" for name in RESUMABLE),
    *("train.accumulation", "train.on_nan", "train.loss_chunk", "train.offload"),
    *("train.log_every", "train.save_every", "train.save_minutes", "train.keep", "train.export"),
    *("train.checksums", "train.profile"),
)


def check(config: TrainConfig) -> Path:
    """Returns the folder of this run, after checks that change nothing on disk.

    A run that fails at its start must not damage the previous run in the folder.

    Raises:
      InputError: if the run in the folder may not be resumed or replaced.
    """
    folder = to_path(config.run.folder)
    if isinstance(folder, URLPath) and jax.process_count() > 1:
        raise InputError(
            f"run.folder={folder}: several processes write their checkpoints to storage that is"
            " mounted as a folder; name one, or run a single process"
        )
    if folder.exists() and not folder.is_dir():
        raise InputError(f"run.folder={folder} is a file; name a folder")
    check_regular(folder)
    # A run without a checkpoint failed at its start and cannot be resumed.
    has_run = (folder / CONFIG).exists() and bool(steps_in(folder / FOLDER))
    if has_run and config.run.existing == "refuse":
        raise InputError(
            f"run.folder={folder} holds a run; name another folder, or set run.existing to resume"
            " or overwrite"
        )
    if has_run and config.run.existing == "resume":
        _check_settings(config, folder)
    if config.run.existing == "overwrite":
        _run_files(folder)
    _check_writable(folder)
    _check_origin(folder)
    return folder


def _check_origin(folder: Path) -> None:
    """Raises an InputError if a folder without a run holds files that a run would replace."""
    if not folder.exists() or RUN_FOLDER.has_config(folder):
        return
    names = (*_FILES, *_FOLDERS)
    if others := [name for name in names if name != ERROR and _is_there(folder / name)]:
        raise InputError(
            f"run.folder={folder} is not the folder of a run, and its {', '.join(others)} would be"
            " replaced; name a new folder"
        )


def check_kept(folder: Path, step: int | None = None) -> None:
    """Raises an InputError if the folder of this run was removed, or its checkpoint of `step`."""
    lost = [name for name in (CONFIG, BASE) if not (folder / name).exists()]
    if step is not None and step not in steps_in(folder / FOLDER):
        lost.append(f"{FOLDER}/{step}")
    if lost:
        raise InputError(
            f"run.folder={folder}: {', '.join(lost)} was removed during the run, and its results"
            " are incomplete; start the run again"
        )


def _check_writable(folder: Path) -> None:
    """Raises an InputError if something in the folder cannot take the results of a run.

    It does not test whether files can be added to the folder itself, nor URLs: `RunLock` does.
    """
    if isinstance(folder, URLPath):
        return
    for name in _FOLDERS:
        if os.path.lexists(path := folder / name) and not path.is_dir():
            reason = f"{name} is a file, and a folder is needed there"
        elif path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
            reason = f"nothing can be written into {name}/ there"
        else:
            continue
        raise InputError(f"run.folder={folder}: {reason}; move {path} away, or name another folder")
    for name in _FILES:
        if (folder / name).is_dir():
            raise InputError(
                f"run.folder={folder}: {name} is a folder, and a file is needed there; move it"
                " away, or name another folder"
            )


def check_results(config: TrainConfig, folder: Path, model: FolderFormat) -> None:
    """Raises an InputError if the run could not write `model/` or `adapter/` at its end.

    Args:
      config: config of the run.
      folder: folder of the run.
      model: format of `model/`.
    """
    if config.run.existing == "overwrite":
        model = _model_format(folder / MODEL)  # format of the old run, which is removed
    if config.train.export:
        check_destination(folder / MODEL, model, overwrite=True)
        if config.train.lora is not None:
            check_destination(folder / ADAPTER, PEFT_FOLDER, overwrite=True)


def begin(config: TrainConfig, folder: Path) -> None:
    """Writes the settings of this run; first removes the old run if it is to be overwritten."""
    if distributed.is_main_process():
        if config.run.existing == "overwrite":
            # The settings last: without them the rest of a killed process is of unknown origin.
            for name in sorted(_run_files(folder), key=lambda name: name == CONFIG):
                remove(folder / name)
        config_lib.dump(config, folder / CONFIG)
        # The files of the model and the tokenizer are written once, at the start of a run.
        update_sums(folder, [folder / CONFIG], keep=(MODEL_CONFIG, TOKENIZER))
    distributed.barrier("run folder ready")
    _check_shared(folder)


def _check_shared(folder: Path) -> None:
    """Raises an InputError unless machines share the folder: all processes write checkpoints."""
    deadline = time.monotonic() + _VISIBLE
    while not (is_visible := (folder / CONFIG).exists()) and time.monotonic() < deadline:
        time.sleep(0.5)
    if distributed.max_over_processes(int(not is_visible)):
        raise InputError(
            f"run.folder={folder} is not the same folder for all {jax.process_count()} processes;"
            " name one on storage that all machines share"
        )


def _run_files(folder: Path) -> list[str]:
    """Returns the names of an old run's files; raises an InputError if others are among them."""
    batches = [path.name for path in folder.glob(_BAD_BATCHES)]
    names = [name for name in (*_FILES, *_FOLDERS) if _is_there(folder / name)] + batches
    if set(names) <= {ERROR}:  # a run that failed before it wrote its settings
        return []
    check_replaceable(folder, RUN_FOLDER, set(names) - {MODEL, ADAPTER, LANGUAGE_MODEL})
    check_destination(folder / MODEL, _model_format(folder / MODEL), overwrite=True)
    check_destination(folder / ADAPTER, PEFT_FOLDER, overwrite=True)
    check_destination(folder / LANGUAGE_MODEL, HF_FOLDER, overwrite=True)
    return names


def _is_there(path: Path) -> bool:
    return path.exists() if isinstance(path, URLPath) else os.path.lexists(path)


def _model_format(folder: Path) -> FolderFormat:
    """Returns the format of a `model/` that an earlier run wrote."""
    for kind in (BERT_FOLDERS, HEADS_FOLDER):
        if (folder / kind.config).is_file():
            return kind
    return BERT_FOLDER if (folder / "modules.json").is_file() else HF_FOLDER


def finished(config: TrainConfig) -> bool:
    """Returns whether the folder holds this run, complete; raises the errors of `check`."""
    folder, train = check(config), config.train
    if config.run.existing == "overwrite":
        return False
    is_exported = (folder / MODEL / _model_format(folder / MODEL).config).is_file()
    exported = is_exported or not train.export
    return exported and train.steps in steps_in(folder / FOLDER)


def hashed_settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the keys that determine what a run computes, as in `flat`."""
    return {key: value for key, value in flat(config).items() if not key.startswith(_FREE)}


def _check_settings(config: TrainConfig, folder: Path) -> None:
    """Raises an InputError if a setting differs that changes what the run in `folder` computes."""
    words = ["--config", str(folder / CONFIG)]
    old = flat(config_lib.parse(TrainConfig, words, is_stored=True))
    new = flat(config)
    for key in sorted(old.keys() | new.keys()):
        if key.startswith((*_FREE, *config.run.accept)):
            continue
        if old.get(key) != new.get(key):
            raise InputError(
                f"{key}={new.get(key)} but the run in {folder} began with {old.get(key)}; give the"
                f" old value, another run.folder, run.existing=overwrite, or run.accept=[{key}]"
            )


def flat(config: Any) -> dict[str, Any]:
    """Flattens a config to {"train.lr": 1e-4, ...}; lists are values."""
    return flatten(json.loads(json.dumps(draccus.encode(config))), separator=".")
