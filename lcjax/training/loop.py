"""The training loop: `run(config)` is what train.py calls.

The metrics of a step are fetched while the next one is being computed: an accelerator never waits
for the host. What must not happen after a bad step is therefore prevented in the step itself.
"""

import collections
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from lcjax import config as config_lib
from lcjax import cost
from lcjax.checkpoints.build import check_source
from lcjax.checkpoints.orbax_io import Checkpoints
from lcjax.checkpoints.run_folder import MODEL_CONFIG, check_frozen
from lcjax.data import Loader, check_sources
from lcjax.errors import InputError
from lcjax.parallel.sharding import make_mesh, replicated
from lcjax.training import abstract_step, batches, estimate, optim, results
from lcjax.training import folder as folder_lib
from lcjax.training.assemble import Assembly, assemble, base_of, jitted_step
from lcjax.training.config import TrainConfig
from lcjax.training.meter import Meter
from lcjax.training.progress import Progress, announce
from lcjax.training.state import TrainState, abstract_state, init_state
from lcjax.training.stop import StopRequest
from lcjax.training.trace import Trace
from lcjax.training.track import Tracker, check_packages, open_tracker
from lcjax.training.validation import Validation
from lcjax.tree import flatten

_SKIPPED_IN_A_ROW = 20  # after so many, skipping batches is not the cure


class NonFiniteError(InputError):
    """The loss or a gradient is not a number; the message names step, batch and checkpoint."""


class Dispatched(NamedTuple):
    """A step whose results may still be on their way."""

    number: int  # from 1
    info: dict[str, jax.Array]
    batch: dict[str, np.ndarray]
    position: dict  # of its batch in the data


def run(config: TrainConfig) -> dict[str, Any]:
    """Trains as `config` says, going on where the run folder's last checkpoint stands.

    Returns the final metrics: step, loss, folder, what stopped it (None at the end), and the
    validation loss if there is one.
    """
    mesh = make_mesh(config.mesh)
    batches.check_batch(config, mesh)
    folder = folder_lib.check(config)
    folder_lib.check_results(config, folder)
    # A wrong path must not cost the minutes that a large model takes to read.
    check_source(config.model)
    check_sources(config.data)
    batches.check_text(config)
    if jax.process_index() == 0:
        check_packages(config.track)
    abstract_step.check_rules(config)
    announce(f"loading {config.model.path or config.model.preset}")
    assembly = assemble(config, mesh)
    announce(
        f"opening the text of data.path={config.data.path}"
        if config.data.path
        else "opening the text of data.sources"
    )
    loader = batches.open_loader(config, assembly.config, assembly.tokenizer, "train", mesh)
    folder_lib.begin(config, folder)
    with Checkpoints(folder, keep=config.train.keep) as checkpoints:
        return Training(config, folder, mesh, assembly, loader, checkpoints).run()


class Training:
    """One run in one process: its state, its data and the loop over them."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        mesh: jax.sharding.Mesh,
        assembly: Assembly,
        loader: Loader,
        checkpoints: Checkpoints,
    ):
        self.config, self.folder, self.mesh = config, folder, mesh
        self.model, self.frozen = assembly.config, assembly.frozen
        self.tokenizer, self.loader, self.checkpoints = assembly.tokenizer, loader, checkpoints
        self.main = jax.process_index() == 0
        self.trace = Trace(config.train.profile if self.main else None, folder / folder_lib.PROFILE)
        self.validation = Validation(config, self.model, self.tokenizer, mesh)
        self.pending: collections.deque[Dispatched] = collections.deque()
        self.patience = 1 if config.train.on_nan == "stop" else _SKIPPED_IN_A_ROW
        self.bad = jax.device_put(np.int32(0), replicated(mesh))  # steps not finite, up to now
        self.state, self.first = self._begin(assembly)
        self.step = jitted_step(config, self.model, mesh, self.state, halt_after=self.patience)

    def _begin(self, assembly: Assembly) -> tuple[TrainState, int]:
        """The state of the last good checkpoint, with the data put to its place; or a new run."""
        train, base = self.config.train, base_of(self.config, assembly)
        make = assembly.trained, optim.optimizer(train), self.mesh
        settings = {"seed": train.seed, "ema": train.ema is not None, "offload": train.offload}
        if self.checkpoints.steps:
            check_frozen(self.folder, base)
            target = abstract_state(*make, **settings)
            for leaf in flatten(assembly.trained).values():
                leaf.delete()  # now: the checkpoint's weights take their place
            step, state, position = self.checkpoints.restore(target)
            self.loader.set_state(position)
        else:
            step, state = 0, init_state(*make, **settings)
            if self.main:
                config_lib.dump(self.model, self.folder / MODEL_CONFIG)
                (self.folder / folder_lib.TOKENIZER).mkdir(exist_ok=True)
                self.tokenizer.save(self.folder / folder_lib.TOKENIZER)
        if self.main:
            base.write(self.folder)
        return state, step

    def run(self) -> dict[str, Any]:
        """The loop, then what is left to write."""
        train, step = self.config.train, self.first
        keep = self.first if self.first else None
        settings = folder_lib.flat(self.config)
        with (
            StopRequest() as stop,
            open_tracker(self.config.track, self.folder, keep_until=keep, settings=settings)
            if self.main
            else Tracker([]) as self.tracker,
            Progress(steps=train.steps, start=step, shown=self.main) as self.progress,
            self.trace,
        ):
            self.meter = Meter(self._flops_per_token(), *cost.machine_peak(self.model.dtype))
            self._greet()
            while step < train.steps and not stop.wanted(step):
                step = self._one(step)
            self._save(step)
            self.checkpoints.wait()
        if stop.signal is not None and step < train.steps:
            return self._stopped(step, stop)
        last = results.finish(
            *(self.config, self.folder, self.model, self._result_params(), self.frozen),
            self.tokenizer,
        )
        return last | {"step": step, "folder": str(self.folder), "stopped": None}

    def _one(self, step: int) -> int:
        """One batch: update, log, save. Returns the number of batches seen."""
        train = self.config.train
        position = self.loader.get_state()
        local = next(self.loader, None)
        if local is None:
            self._settle()
            raise InputError(
                f"the data ended after {step} of train.steps={train.steps}; set data.repeat=null"
                " to read it again, or lower train.steps"
            )
        if self.trace.turns(step):
            self._settle()
            if message := self.trace.turn(step):
                self.progress.say(message)
        self.state, info = self.step(self.state, self.frozen, self._put(local), self.bad)
        step, self.bad = step + 1, info["bad"]
        self.pending.append(Dispatched(step, info, local, position))
        self._settle(leave=1)
        every = self.config.eval.every
        if every and (step % every == 0 or step == train.steps):
            self._validate(step)
        if step % train.save_every == 0:
            self._save(step)
        return step

    def _put(self, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return batches.put(local, self.mesh)

    def _settle(self, leave: int = 0) -> None:
        """Waits for the results of all steps but the last `leave`, and reports them."""
        train = self.config.train
        while len(self.pending) > leave:
            done = self.pending.popleft()
            info = jax.device_get(done.info)
            if not info["finite"]:
                self._not_finite(done, info)
            if info["spike"]:
                self.progress.say(
                    f"skipped step {done.number}: gradient norm {info['grad_norm']:.3g} against the"
                    f" usual {info['usual_norm']:.3g} (train.spike={train.spike})"
                )
            self.meter.add(info)
            self.progress.advance(done.number)
            if done.number % train.log_every == 0 or done.number in (1, train.steps):
                metrics = self.meter.read()
                self.tracker.log(done.number, metrics)
                self.progress.report(done.number, metrics)

    def _save(self, step: int) -> None:
        self._settle()
        self.checkpoints.save(step, self.state, self.loader.get_state())

    def _not_finite(self, done: Dispatched, info: dict) -> None:
        """Names the batch; stops the run where it was before it, or lets it go on."""
        step, file = done.number, self.folder / f"bad_batch_{done.number}.npz"
        if self.main:
            np.savez(file, position=np.array(str(done.position)), **done.batch)
        what = (
            f"step {step}: loss {float(info['loss'])}, gradient norm {float(info['grad_norm'])};"
            f" the batch and its place in the data are in {file}"
        )
        if info["bad"] < self.patience:
            self.progress.say(f"skipped {what}")
            return
        # This step and those that were dispatched after it have left the state as it was.
        self.checkpoints.save(step - 1, self.state, done.position)
        self.checkpoints.wait()
        raise NonFiniteError(
            f"stopped at {what}; the checkpoint of step {step - 1} is from before it: resume with"
            " train.on_nan=skip, or with run.accept=[train.lr] and a lower train.lr"
        )

    def _validate(self, step: int) -> None:
        """Mean loss on held-out documents; with the averaged weights, where there are some."""
        self._settle()
        loss, tokens = self.validation.loss(self._result_params(), self.frozen)
        self.tracker.log(step, {"validation_loss": loss, "validation_tokens": tokens})
        self.progress.say(f"step {step}: validation loss {loss:.4f} over {tokens:,.0f} tokens")
        self.meter.restart()

    def _result_params(self) -> dict:
        return self.state.params if self.state.ema is None else self.state.ema

    def _flops_per_token(self) -> float:
        return estimate.flops(self.config, self.model).training_flops

    def _greet(self) -> None:
        def count(tree):
            return sum(leaf.size for leaf in flatten(tree).values())

        trained, frozen = count(self.state.params), count(self.frozen)
        devices = jax.devices()
        self.progress.say(
            f"training {trained:,} of {trained + frozen:,} parameters on {len(devices)} x"
            f" {devices[0].device_kind}; MFU against {self.meter.peak_source}"
        )
        for line in estimate.of_run(self.config, self.model, self.mesh):
            self.progress.say(line)
        if self.first:
            self.progress.say(f"resumed from step {self.first} in {self.folder}")

    def _stopped(self, step: int, stop: StopRequest) -> dict[str, Any]:
        message = f"stopped by {stop.signal.name}; step {step} is saved in {self.folder}, the same"
        message += " command goes on from there"
        if stop.signal.name == "SIGINT":
            raise KeyboardInterrupt(message)
        print(message) if self.main else None
        return {"step": step, "folder": str(self.folder), "stopped": stop.signal.name}
