"""Where metrics go, and what is shown meanwhile."""

import json
import sys

import pytest

from lcjax.errors import InputError
from lcjax.training.config import TrackSection
from lcjax.training.meter import Meter
from lcjax.training.progress import Progress
from lcjax.training.track import JsonLines, open_tracker, plot_loss, read


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


def test_tensorboard_gets_event_files(tmp_path):
    pytest.importorskip("tensorboardX")
    section = TrackSection(tensorboard=True)
    with open_tracker(section, tmp_path, keep_until=None, settings={}) as tracker:
        tracker.log(1, {"loss": 2.0})
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()


@pytest.mark.parametrize(
    ("module", "section", "extra"),
    [
        ("tensorboardX", TrackSection(tensorboard=True), r"lcjax\[tensorboard\]"),
        ("wandb", TrackSection(wandb="p"), r"lcjax\[wandb\]"),
    ],
)
def test_a_missing_extra_says_how_to_install_it(tmp_path, monkeypatch, module, section, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=extra):
        open_tracker(section, tmp_path, keep_until=None, settings={})


def test_the_curve_is_drawn_also_when_losses_are_missing(tmp_path):
    rows = [
        {"step": 1, "loss": None},
        {"step": 2, "loss": 1.0},
        {"step": 2, "validation_loss": 2.0},
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


def info(loss, tokens=100.0, finite=True):
    return {
        "loss": loss, "grad_norm": 1.0, "lr": 0.1, "tokens": tokens, "finite": finite, "skipped": 0
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
