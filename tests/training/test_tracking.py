"""Metrics files, trackers, terminal output, throughput and traces."""

import json
import sys
import types

import jax
import pytest

from lcjax.errors import InputError
from lcjax.training import tracking
from lcjax.training.tracking import (
    JsonLines,
    Meter,
    Progress,
    Trace,
    Tracker,
    open_tracker,
    plot_loss,
    read,
)
from lcjax.training.train_config import Profile, TrackSection


def test_metrics_after_the_resumed_step_are_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n{"ste')
    sink = JsonLines(file, keep_until=1)
    sink.log(2, {"loss": float("nan")})
    sink.close()
    assert file.read_text() == '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": null}\n'


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    with open_tracker(TrackSection(), tmp_path, keep_until=None, settings={}) as tracker:
        tracker.log(3, {"loss": 1.5})
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "loss": 1.5}


def test_a_new_run_does_not_keep_the_metrics_of_an_old_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with open_tracker(TrackSection(), tmp_path, keep_until=None, settings={}):
        assert read(tmp_path / "metrics.jsonl") == []


class _Sink:
    def __init__(self, name, closed, fails):
        self.name, self.closed, self.fails = name, closed, fails

    def close(self):
        self.closed.append(self.name)
        if self.fails:
            raise OSError(f"{self.name} is full")


def test_all_sinks_are_closed_and_the_first_error_is_the_one_to_see():
    closed = []
    sinks = [_Sink(name, closed, fails=name != "b") for name in "abc"]
    with pytest.raises(OSError, match="a is full"), Tracker(sinks):
        pass
    assert closed == ["a", "b", "c"]
    with (
        pytest.warns(UserWarning, match="is full"),
        pytest.raises(ValueError, match="loss is not finite"),
        Tracker(sinks),
    ):
        raise ValueError("loss is not finite")
    assert closed == ["a", "b", "c"] * 2


def test_tensorboard_gets_event_files(tmp_path):
    pytest.importorskip("tensorboardX")
    section = TrackSection(tensorboard=True)
    with open_tracker(section, tmp_path, keep_until=None, settings={}) as tracker:
        tracker.log(1, {"loss": 2.0})
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()


def test_tensorboard_hides_the_steps_that_a_resumed_run_repeats(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    section = TrackSection(tensorboard=True)
    for number, (keep, purge) in enumerate(((None, 0), (4, 5))):
        with open_tracker(section, tmp_path, keep_until=keep, settings={}) as tracker:
            tracker.log(5, {"loss": float(number)})
        newest = max((tmp_path / "tensorboard").iterdir(), key=lambda file: file.stat().st_mtime_ns)
        starts = [event.step for event in events_of(newest, Event) if event.session_log.status]
        assert starts == [purge]


def events_of(file, kind):
    """The records of an event file: length (8 bytes), check (4), message, check (4)."""
    data, events = file.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        events.append(kind.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return events


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package: `wandb.runs` holds the settings of every `init`."""
    errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))
    module = types.SimpleNamespace(errors=errors, runs=[], deleted=set(), __spec__=object())

    def init(**settings):
        if settings["id"] in module.deleted:
            raise errors.Error("run was deleted;\ntry another id")
        module.runs.append(settings)
        return types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def track_in(folder, keep_until, project="p"):
    folder.mkdir(parents=True, exist_ok=True)
    with open_tracker(
        TrackSection(wandb=project), folder, keep_until=keep_until, settings={"train.lr": 1.0}
    ) as tracker:
        tracker.log(1, {"loss": 1.0})


def test_a_resumed_run_continues_its_wandb_run(tmp_path, wandb):
    track_in(tmp_path / "a" / "run", None)
    track_in(tmp_path / "b" / "run", None)  # another folder of the same name
    track_in(tmp_path / "a" / "run", 4)
    track_in(tmp_path / "a" / "run", None)  # begun anew
    track_in(tmp_path / "a" / "run", 4, project="q")
    first, namesake, resumed, anew, elsewhere = (run["id"] for run in wandb.runs)
    assert resumed == first and len({first, namesake, anew, elsewhere}) == 4
    assert {run["name"] for run in wandb.runs} == {"run"}


def test_a_deleted_wandb_run_names_the_fix(tmp_path, wandb):
    track_in(tmp_path, None)
    wandb.deleted = {wandb.runs[0]["id"]}
    with pytest.raises(InputError, match=r"deleted; try another id\); remove .*wandb\.json"):
        track_in(tmp_path, 4)
    (tmp_path / "wandb.json").unlink()
    track_in(tmp_path, 4)
    assert wandb.runs[1]["id"] != wandb.runs[0]["id"]


@pytest.mark.parametrize(
    ("module", "section", "extra"),
    [
        ("tensorboardX", TrackSection(tensorboard=True), "(?i)pip install .tensorboardx>=2"),
        ("wandb", TrackSection(wandb="p"), "pip install .wandb>=0"),
    ],
)
def test_a_missing_extra_names_the_install_command(tmp_path, monkeypatch, module, section, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=extra):
        open_tracker(section, tmp_path, keep_until=None, settings={})


def test_the_curve_is_drawn_also_when_losses_are_missing(tmp_path):
    rows = [
        {"step": 1, "loss": None},
        {"step": 2, "loss": 1.0},
        {"step": 2, "validation_loss": 2.0},
        *({"step": step, "loss": 1.0} for step in range(3, 9)),
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plot_loss(tmp_path / "m.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5_000


def test_without_a_terminal_progress_is_plain_lines(capsys):
    with Progress(steps=4, start=0) as progress:
        progress.advance(1)
        progress.advance(2)
        progress.report(2, {"loss": 1.25, "tokens_per_second": 12_345.0, "mfu": 0.5})
    err = capsys.readouterr().err
    assert err.startswith("step 2/4  loss 1.2500  12,345 tokens/s  MFU 50.0%  ETA 0:00")


def test_a_trace_covers_its_steps_and_ends_with_the_run(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    with Trace(Profile(start=2, steps=3), tmp_path) as trace:
        assert [step for step in range(10) if trace.is_boundary(step)] == [2, 5]
        assert trace.toggle(2) is None
        assert trace.toggle(5) == f"trace written to {tmp_path}"
    assert calls == [str(tmp_path), "stop"]
    with Trace(Profile(start=2, steps=3), tmp_path) as trace:
        trace.toggle(2)
    assert calls[2:] == [str(tmp_path), "stop"]  # a run that is over sooner
    assert capsys.readouterr().err == f"trace written to {tmp_path}\n"
    with Trace(None, tmp_path) as trace:
        assert not any(map(trace.is_boundary, range(10)))


def test_a_run_that_is_resumed_within_its_trace_begins_none(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.profiler, "start_trace", None)
    with Trace(Profile(start=2, steps=3), tmp_path) as trace:
        assert trace.toggle(5) is None


def info(loss, tokens=100.0, finite=True):
    return {
        "loss": loss, "parts": {"ce": loss / 2}, "finite": finite,
        "grad_norm": 1.0, "lr": 0.1, "tokens": tokens, "skipped": 0,
    }  # fmt: skip


def test_the_meter_averages_finite_losses_and_leaves_compilation_out_of_the_speed():
    meter = Meter(flops_per_token=10.0, peak=1e6, peak_source="")
    meter.add(info(2.0))
    assert "tokens_per_second" not in meter.read()
    for step in (info(2.0), info(float("nan"), finite=False), info(4.0)):
        meter.add(step)
    metrics = meter.read()
    assert metrics["loss"] == 3.0
    assert metrics["mfu"] == pytest.approx(metrics["tokens_per_second"] * 10 / 1e6)


def test_a_step_that_may_have_been_computed_before_its_clock_started_has_no_speed(monkeypatch):
    """On short steps the last one is complete as soon as the host has read the one before."""
    times = iter([0.0, 1.0, 1.0, 1.5, 1.5, 1.75, 1.75, 2.5, 2.5])
    monkeypatch.setattr(tracking.time, "perf_counter", lambda: next(times))
    meter = Meter(flops_per_token=10.0, peak=1e6, peak_source="")
    speeds = []
    for num_pending in (1, 1, 1, 0):  # the last step is read without another one being dispatched
        meter.add(info(1.0), num_pending)
        speeds.append(meter.read(num_pending).get("tokens_per_second"))
    assert speeds == [None, 100 / 0.5, 100 / 0.25, None]
