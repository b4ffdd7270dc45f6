"""The training loop: `run(config)` is what train.py calls."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lcjax import config as config_lib
from lcjax import cost
from lcjax.checkpoint import Checkpoints
from lcjax.data import Loader, make_loader
from lcjax.errors import InputError
from lcjax.rope.positions import PlainPositions
from lcjax.sharding import batch_sharding, make_mesh
from lcjax.training import folder as folder_lib
from lcjax.training import optim, restore
from lcjax.training.assemble import Assembly, assemble
from lcjax.training.config import TrainConfig
from lcjax.training.meter import Meter
from lcjax.training.objective import language_model
from lcjax.training.partition import flatten, matcher, union
from lcjax.training.progress import Progress, announce
from lcjax.training.state import TrainState, abstract, init_state, state_shardings
from lcjax.training.step import make_eval_step, make_train_step
from lcjax.training.stop import StopRequest
from lcjax.training.track import Tracker, open_tracker, plot_loss, read

_SKIPPED_IN_A_ROW = 20  # after so many, skipping batches is not the cure


class NonFiniteError(InputError):
    """The loss or a gradient is not a number; the message names step, batch and checkpoint."""


def run(config: TrainConfig) -> dict[str, Any]:
    """Trains as `config` says, going on where the run folder's last checkpoint stands.

    Returns the final metrics: step, loss, folder, what stopped it (None at the end), and the
    validation loss if there is one.
    """
    mesh = make_mesh(config.mesh)
    check_batch(config, mesh)
    folder = folder_lib.check(config)
    announce(f"loading {config.model.path or config.model.preset}")
    assembly = assemble(config, mesh)
    announce(
        f"opening the text of data.path={config.data.path}"
        if config.data.path
        else "opening the text of data.sources"
    )
    loader = open_loader(config, assembly.tokenizer, "train")
    folder_lib.begin(config, folder)
    with Checkpoints(folder, keep=config.train.keep) as checkpoints:
        return Training(config, folder, mesh, assembly, loader, checkpoints).run()


def open_loader(config: TrainConfig, tokenizer: Any, split: str) -> Loader:
    """This process' share of the batches."""
    return make_loader(
        config.data,
        tokenizer,
        config.train.batch_size,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        split=split,
    )


def check_batch(config: TrainConfig, mesh: jax.sharding.Mesh) -> None:
    """Every device must get the same number of rows of every microbatch."""
    devices, rows = mesh.shape["data"] * mesh.shape["fsdp"], config.train.batch_size
    unit = devices * config.train.accumulation
    if rows % unit:
        raise InputError(
            f"train.batch_size={rows} must be a multiple of mesh.data x mesh.fsdp x "
            f"train.accumulation = {unit}; nearest: {max(1, round(rows / unit)) * unit}"
        )


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
        train = config.train
        optimizer = optim.optimizer(train)
        state = init_state(
            assembly.trained, optimizer, mesh, seed=train.seed, ema=train.ema is not None
        )
        step = make_train_step(
            language_model(self.model, train.positions, chunk=train.loss_chunk, mesh=mesh),
            optimizer,
            optim.schedule(train),
            accumulation=train.accumulation,
            ema_decay=train.ema,
        )
        layout = state_shardings(state, mesh)
        self.step = jax.jit(step, donate_argnums=0, out_shardings=(layout, None))
        plain = language_model(self.model, PlainPositions(), chunk=train.loss_chunk, mesh=mesh)
        self.eval_step = jax.jit(make_eval_step(plain))
        self.tracing = False
        self.validation: tuple[Loader, dict] | None = None  # with its position at the beginning
        self.state, self.first = self._resume(state)

    def _resume(self, state: TrainState) -> tuple[TrainState, int]:
        """The state of the last good checkpoint, with the data put to its place; or a new run."""
        found = self.checkpoints.restore(abstract(state))
        if found is None:
            if self.main:
                config_lib.dump(self.model, self.folder / folder_lib.MODEL_CONFIG)
                (self.folder / "tokenizer").mkdir(exist_ok=True)
                self.tokenizer.save(self.folder / "tokenizer")
            restore.write_base(self.folder, self.frozen, self.config)
            return state, 0
        step, state, position = found
        restore.check_base(self.folder, self.frozen, self.config)
        self.loader.set_state(position)
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
        ):
            self.meter = Meter(self._flops_per_token(), *cost.machine_peak(self.model.dtype))
            self._greet()
            try:
                while step < train.steps and not stop.wanted(step):
                    step = self._one(step)
            finally:
                self._stop_trace()
            self._save(step)
            self.checkpoints.wait()
        if stop.signal is not None and step < train.steps:
            return self._stopped(step, stop)
        return self._finish(step)

    def _one(self, step: int) -> int:
        """One batch: update, log, save. Returns the number of batches seen."""
        train = self.config.train
        position = self.loader.get_state()
        local = next(self.loader, None)
        if local is None:
            raise InputError(
                f"the data ended after {step} of train.steps={train.steps}; set data.repeat=null"
                " to read it again, or lower train.steps"
            )
        self._profile(step)
        self.state, info = self.step(self.state, self.frozen, self._put(local))
        step, info = step + 1, jax.device_get(info)
        if not info["finite"]:
            self._not_finite(step, info, local, position)
        self.meter.add(info)
        self.progress.advance(step)
        if step % train.log_every == 0 or step in (1, train.steps):
            metrics = self.meter.read()
            self.tracker.log(step, metrics)
            self.progress.report(step, metrics)
        every = self.config.eval.every
        if every and (step % every == 0 or step == train.steps):
            self._validate(step)
        if step % train.save_every == 0:
            self._save(step)
        return step

    def _put(self, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        sharding = batch_sharding(self.mesh)
        return {
            name: jax.make_array_from_process_local_data(sharding, value)
            for name, value in local.items()
        }

    def _save(self, step: int) -> None:
        self.checkpoints.save(step, self.state, self.loader.get_state())

    def _not_finite(self, step: int, info: dict, batch: dict, position: dict) -> None:
        """Names the batch; stops the run where it was before it, or lets it go on."""
        file = self.folder / f"bad_batch_{step}.npz"
        if self.main:
            np.savez(file, position=np.array(str(position)), **batch)
        what = (
            f"step {step}: loss {float(info['loss'])}, gradient norm {float(info['grad_norm'])};"
            f" the batch and its place in the data are in {file}"
        )
        self.meter.skip()
        if self.config.train.on_nan == "skip" and self.meter.skipped < _SKIPPED_IN_A_ROW:
            self.progress.say(f"skipped {what}")
            return
        # The step left the weights alone; going back one batch makes it repeatable.
        state = dataclasses.replace(
            self.state, step=self.state.step - 1, skipped=self.state.skipped - 1
        )
        self.checkpoints.save(step - 1, state, position)
        self.checkpoints.wait()
        raise NonFiniteError(
            f"stopped at {what}; the checkpoint of step {step - 1} is from before it: resume with"
            " train.on_nan=skip, or with run.accept=[train.lr] and a lower train.lr"
        )

    def _validate(self, step: int) -> None:
        """Mean loss on held-out documents; with the averaged weights, where there are some."""
        nll = tokens = 0.0
        for count, local in enumerate(self._held_out()):
            if count == self.config.eval.batches:
                break
            params = self._result_params()
            info = jax.device_get(self.eval_step(params, self.frozen, self._put(local)))
            nll, tokens = nll + float(info["nll"]), tokens + float(info["tokens"])
        loss = nll / max(tokens, 1.0)
        self.tracker.log(step, {"validation_loss": loss, "validation_tokens": tokens})
        self.progress.say(f"step {step}: validation loss {loss:.4f} over {tokens:,.0f} tokens")
        self.meter.restart()

    def _held_out(self) -> Loader:
        """The held-out batches from the first one; the corpus is opened once."""
        if self.validation is None:
            loader = open_loader(self.config, self.tokenizer, "validation")
            self.validation = loader, loader.get_state()
        else:
            self.validation[0].set_state(self.validation[1])
        return self.validation[0]

    def _result_params(self) -> dict:
        if self.state.ema is None:
            return self.state.params
        return jax.tree.map(
            lambda average, leaf: average.astype(leaf.dtype), self.state.ema, self.state.params
        )

    def _profile(self, step: int) -> None:
        profile = self.config.train.profile
        if profile is None or not self.main:
            return
        if step == profile.start:
            jax.profiler.start_trace(str(self.folder / "profile"))
            self.tracing = True
        elif step == profile.start + profile.steps:
            self._stop_trace()

    def _stop_trace(self) -> None:
        if self.tracing:
            jax.profiler.stop_trace()
            self.tracing = False
            self.progress.say(f"trace written to {self.folder / 'profile'}")

    def _flops_per_token(self) -> float:
        trained = matcher(self.config.train.rules(), "train.trainable")
        return cost.estimate(self.model, self.config.data.length, trained=trained).training_flops

    def _greet(self) -> None:
        def count(tree):
            return sum(leaf.size for leaf in flatten(tree).values())

        trained, frozen = count(self.state.params), count(self.frozen)
        devices = jax.devices()
        self.progress.say(
            f"training {trained:,} of {trained + frozen:,} parameters on {len(devices)} x"
            f" {devices[0].device_kind}; MFU against {self.meter.peak_source}"
        )
        if self.first:
            self.progress.say(f"resumed from step {self.first} in {self.folder}")

    def _stopped(self, step: int, stop: StopRequest) -> dict[str, Any]:
        message = f"stopped by {stop.signal.name}; step {step} is saved in {self.folder}, the same"
        message += " command goes on from there"
        if stop.signal.name == "SIGINT":
            raise KeyboardInterrupt(message)
        print(message) if self.main else None
        return {"step": step, "folder": str(self.folder), "stopped": stop.signal.name}

    def _finish(self, step: int) -> dict[str, Any]:
        """The model folder and the curve; says where everything is."""
        rows = read(self.folder / folder_lib.METRICS)
        last = {k: v for row in rows for k, v in row.items()}
        # One process cannot see the weights of the others.
        alone = jax.process_count() == 1
        if self.config.train.export and alone:
            self._export()
        if self.main:
            plot_loss(self.folder / folder_lib.METRICS, self.folder / "loss.png")
            model = ", model/ (a Hugging Face folder)"
            if not alone:
                model = f"; python -m lcjax.convert {self.folder} DST makes a Hugging Face folder"
            found = f"{folder_lib.METRICS}, loss.png, checkpoints/"
            print(f"results in {self.folder}: {found}{model if self.config.train.export else ''}")
        return last | {"step": step, "folder": str(self.folder), "stopped": None}

    def _export(self) -> None:
        """The merged model; beside it the adapters alone, when nothing else was trained."""
        from lcjax.convert import save_hf
        from lcjax.convert.peft import save_peft

        announce(f"writing {self.folder / 'model'}")
        trained = self._result_params()
        if all(matcher(("lora",), "")(path) for path in flatten(trained)):
            base = self.config.model.path or str(self.config.model.preset)
            save_peft(self.folder / "adapter", trained, self.model, base=base, overwrite=True)
        params, model = restore.merged(union(trained, self.frozen), self.model)
        dtype = self.config.train.export_dtype
        save_hf(self.folder / "model", params, model, self.tokenizer, dtype=dtype, overwrite=True)
