"""The training loop: `run(config)` is the body of train.py.

The loop fetches the metrics of a step while the devices compute the next one, so an accelerator
never waits for the host. The loop therefore detects a non-finite step only after it has dispatched
the next one, so the step itself must leave the state unchanged (`lcjax.training.step`).
"""

import collections
import contextlib
import signal
import sys
import threading
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from lcjax import cost
from lcjax.checkpoints.orbax_io import FOLDER, Checkpoints
from lcjax.checkpoints.run_folder import check_frozen
from lcjax.data import Loader
from lcjax.errors import InputError
from lcjax.files import atomic_file, update_sums
from lcjax.models.weight_storage import num_weights
from lcjax.parallel import distributed
from lcjax.parallel.device_memory import to_device
from lcjax.parallel.run_lock import RunLock
from lcjax.parallel.sharding import make_mesh, replicated
from lcjax.progress import compiling
from lcjax.training import batches, optim
from lcjax.training import folder as folder_lib
from lcjax.training.language_modelling import make_task
from lcjax.training.state import TrainState, abstract_state, init_state
from lcjax.training.step import jitted_step, make_eval_step
from lcjax.training.tracking import (
    Meter,
    Progress,
    Trace,
    Tracker,
    announce,
    check_packages,
    open_tracker,
    plot_loss,
    read,
)
from lcjax.training.train_config import TrainConfig
from lcjax.training.training_task import Task
from lcjax.tree import flatten

_MAX_SKIPS = 20  # non-finite steps in a row after which the run stops, as it will not recover


class NonFiniteError(InputError):
    """The loss or a gradient is not finite; the message names step, batch and checkpoint."""


def run(config: TrainConfig, *, devices: list[jax.Device] | None = None) -> dict[str, Any]:
    """Trains a model as `config` describes; resumes from the run folder's last checkpoint.

    Args:
      config: config of the run.
      devices: the devices of `config.mesh`; None: all.

    Returns:
      The final metrics: step, loss, folder, the signal that stopped the run (None at the end), and
      the validation loss if there is one.

    Raises:
      InputError: if the config, the data or the run folder cannot be used.
      NonFiniteError: if the loss or a gradient is not finite and the run does not skip the batch.
      KeyboardInterrupt: after Ctrl-C, with a saved checkpoint.
    """
    task = make_task(config, make_mesh(config.mesh, devices))
    folder = _check(config, task)
    with RunLock(folder):
        trained, frozen = task.load()
        loader = task.open_loader("train")
        folder_lib.begin(config, folder)
        with Checkpoints(folder, keep=config.train.keep) as checkpoints:
            return Training(config, folder, task, trained, frozen, loader, checkpoints).run()


def _check(config: TrainConfig, task: Task) -> Path:
    """Returns the run folder, after all checks that do not need the model's weights.

    Loading a large model takes minutes, so a wrong path must be reported before.
    """
    if config.model.cache is not None:
        raise InputError(
            "model.cache says what is kept of a text that is read and generated, and training"
            " keeps all of it; leave it out here, and set it in the config of eval.py"
        )
    folder = folder_lib.check(config)
    folder_lib.check_results(config, folder, task.export_format)
    task.check()
    if distributed.is_main_process():
        check_packages(config.track)
    return folder


class PendingStep(NamedTuple):
    """A dispatched step whose results may not be computed yet."""

    number: int  # from 1
    info: dict[str, jax.Array]
    batch: dict[str, np.ndarray]  # rows of this process
    position: dict  # of the batch in the data


class Training:
    """One run in one process: its state, its data, and the loop over batches."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        task: Task,
        trained: dict,
        frozen: dict,
        loader: Loader,
        checkpoints: Checkpoints,
    ):
        """Restores or initialises the state; `trained` is donated to it."""
        self.config, self.folder, self.task, self.mesh = config, folder, task, task.mesh
        self.frozen, self.loader, self.checkpoints = frozen, loader, checkpoints
        self.is_main = distributed.is_main_process()
        profile = config.train.profile if self.is_main else None
        self.trace = Trace(profile, folder / folder_lib.PROFILE)
        self.validation = Validation(config, task)
        self.pending: collections.deque[PendingStep] = collections.deque()
        self.saved_at = monotonic()
        self.halt_after = 1 if config.train.on_nan == "stop" else _MAX_SKIPS
        self.num_nonfinite = jax.device_put(
            np.int32(0), replicated(self.mesh)
        )  # non-finite steps in a row
        self.state, self.first = self._restore_or_init(trained)
        self.train_step = jitted_step(
            config, task.objective("train"), self.mesh, self.state, halt_after=self.halt_after
        )

    def run(self) -> dict[str, Any]:
        """Trains until the last step or a stop signal, saves, and writes the results."""
        train, eval_every, step = self.config.train, self.config.eval.every, self.first
        with (
            StopRequest() as stop,
            self._open_tracker() as self.tracker,
            Progress(
                steps=train.steps, start=step, shown=self.is_main, unit=self.task.unit
            ) as self.progress,
            self.trace,
        ):
            peak = cost.machine_peak(self.task.dtype, list(self.mesh.devices.flat))
            self.meter = Meter(self.task.training_flops(), *peak, unit=self.task.unit)
            self._print_summary()
            if eval_every and step == 0:
                self._validate(step)  # the loss before training
            while step < train.steps and not stop.should_stop(step):
                batch, position = self._next_batch(step)
                batch = self.task.prepare(step, batch, self.state.params)
                self._toggle_trace(step)
                with self._compiling("the training step", step == self.first):
                    self.state, info = self.train_step(
                        self.state, self.frozen, batches.put(batch, self.mesh), self.num_nonfinite
                    )
                step, self.num_nonfinite = step + 1, info["num_nonfinite"]
                self.pending.append(PendingStep(step, info, batch, position))
                self._report(max_pending=1)
                if eval_every and (step % eval_every == 0 or step == train.steps):
                    self._validate(step)
                if step % train.save_every == 0 or self._is_save_due(step):
                    self._save(step)
            self._save(step)
            self.checkpoints.wait()
        if self.is_main:
            folder_lib.check_kept(self.folder, step)
        if stop.signal is not None and step < train.steps:
            return self._finish_early(step, stop.signal)
        return self._finish(step)

    def _restore_or_init(self, trained: dict) -> tuple[TrainState, int]:
        """Returns the state and its step, from the last readable checkpoint or for a new run."""
        train, base = self.config.train, self.task.base(trained, self.frozen)
        args = trained, optim.optimizer(train), self.mesh
        settings = {"seed": train.seed, "ema": train.ema is not None, "offload": train.offload}
        if self.checkpoints.steps:
            check_frozen(self.folder, base)
            target = abstract_state(*args, **settings)
            for leaf in flatten(trained).values():
                leaf.delete()  # before restoring, so that the weights are not in memory twice
            step, state, position = self.checkpoints.restore(target)
            self.loader.set_state(position)
        else:
            step, state = 0, init_state(*args, **settings)
            if self.is_main:
                self.task.write_config(self.folder)
        if self.is_main:
            base.write(self.folder)
        return state, step

    def _open_tracker(self) -> Tracker:
        if not self.is_main:
            return Tracker([])
        return open_tracker(
            self.config.track,
            self.folder,
            keep_until=self.first or None,
            settings=folder_lib.flat(self.config),
        )

    def _next_batch(self, step: int) -> tuple[dict[str, np.ndarray], dict]:
        """Returns the rows of this process, and their position in the data."""
        position = self.loader.get_state()
        batch = next(self.loader, None)
        if batch is None:
            self._report()
            raise InputError(
                f"the data ended after {step} of train.steps={self.config.train.steps}; set"
                " data.repeat=null to read it again, or lower train.steps with"
                " run.accept=[train.steps]"
            )
        return batch, position

    def _toggle_trace(self, step: int) -> None:
        if self.trace.is_boundary(step):
            self._report()
            if message := self.trace.toggle(step):
                self.progress.write(message)

    def _report(self, max_pending: int = 0) -> None:
        """Waits for the results of all steps but the last `max_pending`, and logs them."""
        train = self.config.train
        while len(self.pending) > max_pending:
            pending = self.pending.popleft()
            step, info = pending.number, jax.device_get(pending.info)
            if info["finite"]:
                self.checkpoints.last_finite = step - 1
            else:
                self._handle_nonfinite(pending, info)
            if info["spike"]:
                self.progress.write(
                    f"skipped step {step}: gradient norm {info['grad_norm']:.3g} against an"
                    f" average of {info['grad_norm_ema']:.3g} (train.spike={train.spike})"
                )
            self.meter.add(info, len(self.pending))
            self.progress.advance(step)
            if step % train.log_every == 0 or step in (1, train.steps):
                metrics = self.meter.read(len(self.pending))
                self.tracker.log(step, metrics)
                self.progress.report(step, metrics)

    def _handle_nonfinite(self, pending: PendingStep, info: dict) -> None:
        """Writes the batch to a file; raises a NonFiniteError if it is not to be skipped."""
        step, file = pending.number, self.folder / f"bad_batch_{pending.number}.npz"
        if self.is_main:
            with atomic_file(file, "wb") as data:
                np.savez(data, position=np.array(str(pending.position)), **pending.batch)
        message = (
            f"step {step}: loss {float(info['loss'])}, gradient norm {float(info['grad_norm'])};"
            f" the batch and its place in the data are in {file}"
        )
        # At a halt neither this step nor those dispatched after it have changed the state.
        is_state_finite = _is_finite(self.state)
        if is_state_finite and info["num_nonfinite"] < self.halt_after:
            self.progress.write(f"skipped {message}")
            return
        if is_state_finite:
            self.tracker.flush()
            self.checkpoints.save(step - 1, self.state, pending.position)
            self.checkpoints.wait()
        raise NonFiniteError(f"stopped at {message}; {self._advice(step, is_state_finite)}")

    def _advice(self, step: int, is_state_finite: bool) -> str:
        """Returns advice on how to continue after the non-finite `step`, which stops the run."""
        accept = "" if "train.lr" in self.config.run.accept else " and run.accept=[train.lr]"
        lower = f"a lower train.lr{accept}"
        last = self.checkpoints.finite_step
        if is_state_finite and self.config.train.on_nan == "stop":
            good = f"; the last checkpoint whose next step was finite is that of step {last}"
            return (
                f"the checkpoint of step {step - 1} is from before it: resume with"
                f" train.on_nan=skip, or with {lower}{good * (last is not None)}"
            )
        if not is_state_finite:
            cause = "the weights or the optimizer's moments are not finite, so no skip can help"
        else:
            cause = f"{self.halt_after} steps in a row were not finite: the weights may be ruined"
        if last is None:
            return f"{cause}, and no checkpoint is from before that; start again with {lower}"
        later = ", ".join(str(number) for number in self.checkpoints.steps if number > last)
        move = f"move {later} out of {self.folder / FOLDER}, and " if later else ""
        return (
            f"{cause}; the last checkpoint whose next step was finite is that of step {last}:"
            f" {move}resume with {lower}"
        )

    def _is_save_due(self, step: int) -> bool:
        """Returns whether train.save_minutes have passed; the result is equal on all processes."""
        minutes = self.config.train.save_minutes
        if minutes is None:
            return False
        is_due = monotonic() - self.saved_at >= 60 * minutes
        if jax.process_count() == 1:
            return is_due
        # Clocks differ, and agreeing waits for the devices, so not at every step.
        is_checked = step % self.config.train.log_every == 0
        return is_checked and bool(multihost_utils.broadcast_one_to_all(np.array(is_due)))

    def _save(self, step: int) -> None:
        self.saved_at = monotonic()
        self._report()
        if self.is_main:
            folder_lib.check_kept(self.folder)
        self.tracker.flush()  # a checkpoint is never newer than the metrics
        self.checkpoints.save(step, self.state, self.loader.get_state())

    def _validate(self, step: int) -> None:
        """Logs the mean loss on held-out documents, with the averaged weights if there are any."""
        self._report()
        unit, params = self.task.unit, self._final_params()
        with self._compiling("the validation step, and running it", self.validation.is_new):
            loss, count = self.validation.loss(params, self.frozen, step, self.state.params)
        self.tracker.log(step, {"validation_loss": loss, f"validation_{unit}": count})
        self.progress.write(f"step {step}: validation loss {loss:.4f} over {count:,.0f} {unit}")
        self.meter.restart()

    def _final_params(self) -> dict:
        """Returns the parameters to validate and export: the averages if there are any."""
        return self.state.params if self.state.ema is None else self.state.ema

    def _compiling(self, program: str, is_new: bool) -> contextlib.AbstractContextManager:
        """Shows that `program` is compiled, in the first process and if it is new."""
        if not (is_new and self.is_main):
            return contextlib.nullcontext()
        return compiling(program, sum(self._num_params), self.mesh.size)

    @property
    def _num_params(self) -> tuple[int, int]:
        """The number of trained and of frozen parameters."""
        trees = self.state.params, self.frozen
        trained, frozen = (
            sum(num_weights(path, leaf.shape) for path, leaf in flatten(tree).items())
            for tree in trees
        )
        return trained, frozen

    def _print_summary(self) -> None:
        trained, frozen = self._num_params
        devices = self.mesh.devices.flat
        self.progress.write(
            f"training {trained:,} of {trained + frozen:,} parameters on {self.mesh.size} x"
            f" {devices[0].device_kind}; MFU against {self.meter.peak_source}"
        )
        for line in self.task.summary():
            self.progress.write(line)
        if self.first:
            self.progress.write(f"resumed from step {self.first} in {self.folder}")

    def _finish_early(self, step: int, stop_signal: signal.Signals) -> dict[str, Any]:
        message = (
            f"stopped by {stop_signal.name}; step {step} is saved in {self.folder}, the same"
            " command goes on from there"
        )
        if stop_signal == signal.SIGINT:
            raise KeyboardInterrupt(message)
        if self.is_main:
            print(message)
        return {"step": step, "folder": str(self.folder), "stopped": stop_signal.name}

    def _finish(self, step: int) -> dict[str, Any]:
        """Exports the model and plots the loss; returns the last metrics."""
        export, metrics = self.config.train.export, self.folder / folder_lib.METRICS
        rows = read(metrics)
        if export:
            announce(f"writing {self.folder / folder_lib.MODEL}")
            self.task.export(self.folder, self._final_params(), self.frozen)
        if self.is_main:
            names = f"{folder_lib.METRICS}, {folder_lib.CURVE}, checkpoints/"
            try:
                plot_loss(metrics, self.folder / folder_lib.CURVE)
            except InputError as error:  # the trained model does not need a figure
                print(error, file=sys.stderr)
                names = f"{folder_lib.METRICS}, checkpoints/"
            if (self.folder / folder_lib.ADAPTER).exists():
                names += ", adapter/ (the LoRA weights alone, as PEFT reads them)"
            folder_lib.check_kept(self.folder, step)
            update_sums(self.folder, [metrics, self.folder / folder_lib.CURVE])
            names += ", model/ (a Hugging Face folder)" if export else ""
            print(f"results in {self.folder}: {names}")
        last = {key: value for row in rows for key, value in row.items()}
        return last | {"step": step, "folder": str(self.folder), "stopped": None}


def _is_finite(state: TrainState) -> bool:
    """Returns whether all numbers of a state are finite; all processes must call this function."""
    numbers = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    # One program at a time: many small ones with collectives can block each other on CPUs.
    jax.block_until_ready(numbers)
    return all(bool(_is_leaf_finite(x)) for x in numbers)


@jax.jit
def _is_leaf_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(to_device(x)).all()


class Validation:
    """Mean loss on `data.holdout`: the same batches every time, with plain positions."""

    def __init__(self, config: TrainConfig, task: Task):
        self._config, self._task = config, task
        objective = task.objective("validation")
        self._step = jax.jit(make_eval_step(objective, accumulation=config.train.accumulation))
        self._loader: Loader | None = None
        self._start: dict = {}

    @property
    def is_new(self) -> bool:
        """Whether the next call of `loss` is the first one, which compiles."""
        return self._loader is None

    def loss(
        self, params: dict, frozen: dict, step: int, state_params: dict
    ) -> tuple[float, float]:
        """Returns (mean loss per weight, sum of the weights).

        Args:
          params: the weights to validate, which may be averaged ones.
          frozen: parameters that are not trained.
          step: number of steps of the training, for `Task.prepare`.
          state_params: the trained parameters of the state, for `Task.prepare`.
        """
        sums = []
        for batch in self._batches():
            if len(sums) == self._config.eval.batches:
                break
            batch = self._task.prepare(step, batch, state_params)
            sums.append(self._step(params, frozen, batches.put(batch, self._task.mesh)))
        sums = jax.device_get(sums)  # one transfer at the end, so that the devices do not wait
        nll, weight = (sum(float(info[name]) for info in sums) for name in ("nll", "tokens"))
        return nll / max(weight, 1.0), weight

    def _batches(self) -> Loader:
        """Returns the loader of held-out batches at the first one; opens the corpus only once."""
        if self._loader is None:
            self._loader = self._task.open_loader("validation")
            self._start = self._loader.get_state()
        else:
            self._loader.set_state(self._start)
        return self._loader


class StopRequest:
    """Catches SIGTERM (sent by schedulers) and Ctrl-C, so that a run ends with a checkpoint.

    A second Ctrl-C interrupts at once. Use it as a context manager.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._previous: dict = {}

    def __enter__(self) -> "StopRequest":
        # With several processes JAX itself watches for SIGTERM and agrees on a common step.
        # Python allows handlers in the main thread only.
        is_single = jax.process_count() == 1
        if is_single and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            if handler is not None:  # None: not set by Python, which cannot restore it
                signal.signal(number, handler)

    def _handle(self, number: int, frame) -> None:
        del frame
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt("stopped at once; the last checkpoint is the one to resume")
        self.signal = signal.Signals(number)

    def should_stop(self, step: int) -> bool:
        """Returns whether the run must stop after `step`; the result is equal on all processes."""
        # Without the preemption service SIGTERM ends every process at once.
        has_service = jax.process_count() > 1 and jax.config.jax_enable_preemption_service
        if has_service and multihost_utils.reached_preemption_sync_point(step):
            self.signal = signal.SIGTERM
        return self.signal is not None
