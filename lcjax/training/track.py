"""Metrics go to `<run>/metrics.jsonl` always, to TensorBoard or Weights & Biases on request."""

import importlib.util
import json
import math
import uuid
from pathlib import Path
from typing import Protocol

from lcjax.config.files import write_whole
from lcjax.errors import InputError
from lcjax.training import folder as folder_lib
from lcjax.training.config import TrackSection

Metrics = dict[str, float]


class Sink(Protocol):
    """A place for metrics."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line, on disk as soon as it is written."""

    def __init__(self, path: str | Path, *, keep_until: int | None = None):
        """`keep_until`: a resumed run repeats the steps after its checkpoint; drop their lines."""
        self._path = Path(path)
        rows = read(self._path) if keep_until is not None else []
        kept = [row for row in rows if row["step"] <= keep_until]
        write_whole(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = self._path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        # NaN is no JSON: null is what other readers understand.
        row = {
            k: v if not isinstance(v, float) or math.isfinite(v) else None
            for k, v in metrics.items()
        }
        self._file.write(json.dumps({"step": step} | row) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars in event files."""

    def __init__(self, folder: str | Path, *, keep_until: int | None = None):
        """`keep_until`: as in `JsonLines`; TensorBoard hides the steps after it, or all of them."""
        from tensorboardX import SummaryWriter

        purge = 0 if keep_until is None else keep_until + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project; resumed runs go on in the same one.

    Its id lies in the run folder: folders of the same name are different runs, and a folder that
    is begun anew is a new one.
    """

    def __init__(self, project: str, folder: Path, settings: dict, *, resumed: bool = False):
        import wandb

        file = folder / folder_lib.WANDB_RUN
        note = {"project": project, "id": uuid.uuid4().hex[:12]}
        if resumed and file.exists():
            known = json.loads(file.read_text(encoding="utf-8"))
            note = known if known["project"] == project else note
        try:
            self._run = wandb.init(
                **note, name=folder.name, resume="allow", dir=str(folder), config=settings
            )
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"track.wandb={project}: run {note['id']} cannot be written ({reason}); remove"
                f" {file} to begin a new one, or set track.wandb=null"
            ) from error
        file.write_text(json.dumps(note) + "\n", encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class Tracker:
    """All sinks of a run behind one `log(step, metrics)`."""

    def __init__(self, sinks: list[Sink]):
        self._sinks = sinks

    def log(self, step: int, metrics: Metrics) -> None:
        for sink in self._sinks:
            sink.log(step, metrics)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_) -> None:
        for sink in self._sinks:
            sink.close()


def check_packages(section: TrackSection) -> None:
    """Refuses sinks whose packages are not installed: before a model is read, which takes long."""
    for key, value, package in (
        ("tensorboard", section.tensorboard and "true", "tensorboardX"),
        ("wandb", section.wandb, "wandb"),
    ):
        if value and importlib.util.find_spec(package) is None:
            raise InputError(
                f"track.{key}={value} needs {package}: pip install 'lcjax[{key}]', or leave"
                f" track.{key} out"
            )


def open_tracker(
    section: TrackSection, folder: Path, *, keep_until: int | None, settings: dict
) -> Tracker:
    """The sinks that `track:` asks for; JSON lines first."""
    check_packages(section)
    sinks: list[Sink] = [JsonLines(folder / folder_lib.METRICS, keep_until=keep_until)]
    if section.tensorboard:
        sinks.append(TensorBoard(folder / folder_lib.TENSORBOARD, keep_until=keep_until))
    if section.wandb:
        resumed = keep_until is not None
        sinks.append(WeightsAndBiases(section.wandb, folder, settings, resumed=resumed))
    return Tracker(sinks)


def read(path: str | Path) -> list[dict]:
    """The rows of a metrics file; a line that a kill cut short is left out."""
    path, rows = Path(path), []
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def plot_loss(metrics: str | Path, image: str | Path) -> None:
    """The loss over the steps, training and validation, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read(metrics)
    figure = Figure(figsize=(7, 4), layout="tight")
    FigureCanvasAgg(figure)  # no global state, no display
    axes = figure.add_subplot()
    for name, style in (("loss", "-"), ("validation_loss", "o-")):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name.replace("_", " "), markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(image, dpi=120)
