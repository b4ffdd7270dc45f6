"""Metrics go to `<run>/metrics.jsonl` always, to TensorBoard or Weights & Biases on request."""

import json
import math
from pathlib import Path
from typing import Protocol

from lcjax.errors import InputError
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
        draft = self._path.with_suffix(".tmp")
        draft.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        draft.replace(self._path)
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

    def __init__(self, folder: str | Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise InputError(
                "track.tensorboard=true needs tensorboardX: pip install 'lcjax[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project; resumed runs go on in the same one."""

    def __init__(self, project: str, folder: Path, settings: dict):
        try:
            import wandb
        except ImportError:
            raise InputError(
                f"track.wandb={project} needs wandb: pip install 'lcjax[wandb]'"
            ) from None
        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=folder.name,
            resume="allow",
            dir=str(folder),
            config=settings,
        )

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


def open_tracker(
    section: TrackSection, folder: Path, *, keep_until: int | None, settings: dict
) -> Tracker:
    """The sinks that `track:` asks for; JSON lines first."""
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", keep_until=keep_until)]
    if section.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard"))
    if section.wandb:
        sinks.append(WeightsAndBiases(section.wandb, folder, settings))
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
