"""Progress and metrics of a run: terminal output, metrics files, throughput, profiler traces."""

import importlib.util
import json
import math
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from tqdm.auto import tqdm

from lcjax.errors import InputError, import_package, install_command, one_line
from lcjax.files import atomic_file, write_whole
from lcjax.parallel import distributed
from lcjax.storage import AppendedFile, Staging, close_all, to_path
from lcjax.training import folder as folder_lib
from lcjax.training.train_config import Profile, TrackSection

Metrics = dict[str, float]
_MEAN = 5  # reported losses in the mean of `plot_loss`


def announce(text: str) -> None:
    """Prints a line to stderr, in the first process only."""
    if distributed.is_main_process():
        print(text, file=sys.stderr, flush=True)


class Progress:
    """Shows steps, loss, tokens (or another `unit`) per second, MFU and remaining time.

    A progress bar on a terminal or in a notebook, plain lines elsewhere.
    """

    def __init__(self, *, steps: int, start: int, shown: bool = True, unit: str = "tokens"):
        self._steps, self._shown, self._unit = steps, shown, unit
        self._first: tuple[int, float] | None = None  # first step reported, and its time
        # A notebook is no terminal, but tqdm.auto draws a bar there.
        has_bar = shown and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._bar = tqdm(total=steps, initial=start, unit="step") if has_bar else None

    def write(self, text: str) -> None:
        """Prints a separate line, above the bar."""
        if not self._shown:
            return
        if self._bar is not None:
            tqdm.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def advance(self, step: int) -> None:
        if self._first is None:
            # The first step includes compilation; the forecast starts after it.
            self._first = (step, time.perf_counter())
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def report(self, step: int, metrics: dict) -> None:
        parts = [f"loss {metrics['loss']:.4f}"]
        if (speed := metrics.get(f"{self._unit}_per_second")) is not None:
            parts.append(f"{speed:,.0f} {self._unit}/s")
        if "mfu" in metrics:
            parts.append(f"MFU {metrics['mfu']:.1%}")
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(parts))
        else:
            eta = f"  ETA {_clock(self._remaining_seconds(step))}" if step < self._steps else ""
            self.write(f"step {step}/{self._steps}  " + "  ".join(parts) + eta)

    def _remaining_seconds(self, step: int) -> float | None:
        if self._first is None or step <= self._first[0]:
            return None
        first_step, start = self._first
        return (time.perf_counter() - start) / (step - first_step) * (self._steps - step)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.close()


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Meter:
    """Collects the info of steps; `read` returns the metrics since the last `read`.

    `unit` is what the weights of a batch count; the metrics are named after it.
    """

    def __init__(self, flops_per_token: float, peak: float, peak_source: str, unit: str = "tokens"):
        self._flops, self._peak, self.peak_source = flops_per_token, peak, peak_source
        self._unit = unit
        self._clock: float | None = None  # starts after the first step, which includes compilation
        self._timed_tokens: list[float] = []  # per step since the clock started
        self._clear()

    def _clear(self) -> None:
        self._losses: list[dict[str, float]] = []  # per step: the loss and its parts
        self._last: dict = {}

    def add(self, info: dict, num_pending: int = 0) -> None:
        """Adds the info of one step, which must be on the host; `num_pending` as in `read`."""
        if info["finite"]:
            losses = {"loss": info["loss"]} | info["parts"]
            self._losses.append({name: float(value) for name, value in losses.items()})
        self._last = info
        if self._clock is None:
            self.restart(num_pending)
        else:
            self._timed_tokens.append(float(info["tokens"]))

    def restart(self, num_pending: int = 0) -> None:
        """Restarts the clock, to exclude time that was not training, such as a validation."""
        self._clock, self._timed_tokens = time.perf_counter(), []
        self._num_pending = num_pending

    def read(self, num_pending: int = 0) -> dict[str, float]:
        """Returns the mean loss, the last gradient norm and learning rate, tokens/s and MFU.

        Steps that were pending when the clock started may have been computed before, and steps that
        are pending now may have been computed since. So the number of timed steps is that of the
        added ones, less those pending then, plus those pending now, and at most that of the added
        ones. Tokens/s and MFU are left out if it is 0.

        Args:
          num_pending: number of steps that are dispatched and not added yet.
        """
        count, names = len(self._losses), self._losses[-1] if self._losses else ()
        metrics = {
            "loss": math.nan,
            **{name: sum(losses[name] for losses in self._losses) / count for name in names},
            "grad_norm": float(self._last["grad_norm"]),
            "lr": float(self._last["lr"]),
            self._unit: float(self._last["tokens"]),
            "skipped": int(self._last["skipped"]),
        }
        seconds = time.perf_counter() - self._clock
        timed_tokens = self._timed_tokens[max(0, self._num_pending - num_pending) :]
        if timed_tokens:
            metrics[f"{self._unit}_per_second"] = speed = sum(timed_tokens) / seconds
            # Attention is counted as if every row were one document.
            metrics["mfu"] = speed * self._flops / self._peak
        self.restart(num_pending)
        self._clear()
        return metrics


class Trace:
    """Starts and stops the profiler (`train.profile`); a context manager."""

    def __init__(self, profile: Profile | None, folder: Path):
        self._profile, self._folder, self._running = profile, folder, False
        self._staging: Staging | None = None

    def is_boundary(self, step: int) -> bool:
        """Returns whether the trace starts or ends before this step, counted from 0."""
        profile = self._profile
        return profile is not None and step in (profile.start, profile.start + profile.steps)

    def toggle(self, step: int) -> str | None:
        """Starts or ends the trace; returns a message after the end."""
        if self._running:
            return self._stop()
        if step == self._profile.start:
            self._staging = Staging(self._folder)
            jax.profiler.start_trace(str(self._staging.local))
            self._running = True
        return None

    def _stop(self) -> str:
        jax.profiler.stop_trace()
        self._running = False
        with self._staging as staging:
            staging.upload()
        return f"trace written to {self._folder}"

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_) -> None:
        if self._running:
            announce(self._stop())


class Sink(Protocol):
    """A destination of metrics."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def flush(self) -> None:
        """Blocks until all logged metrics are stored."""

    def close(self) -> None: ...


class JsonLines:
    """Writes one JSON object per line (`lcjax.storage.AppendedFile`)."""

    def __init__(self, path: str | Path, *, keep_until: int | None = None):
        """Opens the file.

        Args:
          path: path of the file.
          keep_until: the step of the checkpoint that a run resumes from. Lines of later steps are
            dropped, because the run repeats these steps. None: a new run, which drops all lines.
        """
        self._path = to_path(path)
        rows = read(self._path) if keep_until is not None else []
        rows = [row for row in rows if row["step"] <= keep_until]
        write_whole(self._path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file = AppendedFile(self._path)

    def log(self, step: int, metrics: Metrics) -> None:
        # JSON has no NaN; other readers understand null.
        row = {
            k: v if not isinstance(v, float) or math.isfinite(v) else None
            for k, v in metrics.items()
        }
        self._file.write(json.dumps({"step": step} | row) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Writes scalars to event files."""

    def __init__(self, folder: str | Path, *, keep_until: int | None = None):
        """Opens a file; `keep_until` as in `JsonLines`, but TensorBoard only hides later steps."""
        from tensorboardX import SummaryWriter

        purge_step = 0 if keep_until is None else keep_until + 1
        self._staging = Staging(to_path(folder))
        self._writer = SummaryWriter(str(self._staging.local), purge_step=purge_step)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def flush(self) -> None:
        self._staging.upload()

    def close(self) -> None:
        self._writer.close()
        with self._staging as staging:
            staging.upload()


class WeightsAndBiases:
    """Logs to a run of a Weights & Biases project; a resumed run continues the same one.

    The run's id is stored in the run folder, so folders of the same name are different runs, and
    a folder that starts from scratch gets a new one.
    """

    def __init__(self, project: str, folder: Path, settings: dict, *, resumed: bool = False):
        import wandb

        file = folder / folder_lib.WANDB_RUN
        identity = {"project": project, "id": uuid.uuid4().hex[:12]}
        if resumed and file.exists():
            stored = json.loads(file.read_text(encoding="utf-8"))
            identity = stored if stored["project"] == project else identity
        self._staging = Staging(folder)  # for wandb's local files, which are not kept
        place = str(self._staging.local)
        try:
            self._run = wandb.init(
                **identity, name=folder.name, resume="allow", dir=place, config=settings
            )
        except wandb.errors.Error as error:
            raise InputError(
                f"track.wandb={project}: run {identity['id']} cannot be written"
                f" ({one_line(error)}); remove {file} to start a new one, or set track.wandb=null"
            ) from error
        file.write_text(json.dumps(identity) + "\n", encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._run.finish()
        self._staging.close()


class Tracker:
    """Logs metrics to all sinks of a run; a context manager."""

    def __init__(self, sinks: list[Sink]):
        self._sinks = sinks

    def log(self, step: int, metrics: Metrics) -> None:
        for sink in self._sinks:
            sink.log(step, metrics)

    def flush(self) -> None:
        for sink in self._sinks:
            sink.flush()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> None:
        close_all(self._sinks, error)


def check_packages(section: TrackSection) -> None:
    """Raises an InputError if a sink's package is missing; called before the model is loaded."""
    for key, value, package in (
        ("tensorboard", section.tensorboard and "true", "tensorboardX"),
        ("wandb", section.wandb, "wandb"),
    ):
        if value and importlib.util.find_spec(package) is None:
            raise InputError(
                f"track.{key}={value} needs {package}: {install_command(key)}, or leave"
                f" track.{key} out"
            )


def open_tracker(
    section: TrackSection, folder: Path, *, keep_until: int | None, settings: dict
) -> Tracker:
    """Opens `<run>/metrics.jsonl` and the sinks of `section`; `keep_until` as in `JsonLines`."""
    check_packages(section)
    sinks: list[Sink] = [JsonLines(folder / folder_lib.METRICS, keep_until=keep_until)]
    if section.tensorboard:
        sinks.append(TensorBoard(folder / folder_lib.TENSORBOARD, keep_until=keep_until))
    if section.wandb:
        resumed = keep_until is not None
        sinks.append(WeightsAndBiases(section.wandb, folder, settings, resumed=resumed))
    return Tracker(sinks)


def read(path: str | Path) -> list[dict]:
    """Returns the rows of a metrics file; skips a line that a killed run left incomplete."""
    path, rows = to_path(path), []
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def plot_loss(metrics: str | Path, image: str | Path) -> None:
    """Plots training and validation loss over the steps to a PNG.

    The text of a batch changes its loss more than a few steps of training do, so the mean of the
    last `_MEAN` reported losses is drawn as well.
    """
    import_package("matplotlib", to_path(image).name)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read(metrics)
    figure = Figure(figsize=(7, 4), layout="tight")
    FigureCanvasAgg(figure)  # without global state or a display
    axes = figure.add_subplot()
    for name, style in (("loss", "-"), ("validation_loss", "o-")):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if not points:
            continue
        steps, losses = zip(*points, strict=True)
        has_mean = name == "loss" and len(points) > _MEAN
        axes.plot(
            *(steps, losses, style),
            label=name.replace("_", " "),
            markersize=4,
            alpha=0.35 if has_mean else 1,
        )
        if has_mean:
            means = np.convolve(losses, np.full(_MEAN, 1 / _MEAN), "valid")
            axes.plot(steps[_MEAN - 1 :], means, color="C0", label=f"mean of {_MEAN} losses")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    with atomic_file(image, "wb") as file:
        figure.savefig(file, dpi=120)
