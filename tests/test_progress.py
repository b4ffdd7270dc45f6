"""What a command prints while it reports no progress: before it begins, and while it lasts."""

import re
import time

import pytest

from lcjax import progress


@pytest.fixture
def log(monkeypatch, capsys):
    """Lines of stderr, which is no terminal, with an update every 20 ms."""
    monkeypatch.setattr(progress, "_LOG", 0.02)
    return lambda: capsys.readouterr().err.splitlines()


def test_a_large_compilation_says_before_it_begins_that_it_may_take_minutes(log):
    with progress.compiling("the training step", 6_738_415_616, 64):
        assert log()[0] == (
            "compiling the training step (a model of 6,738,415,616 parameters for 64 devices; this"
            " may take minutes: 5 to 20 for 7e9 parameters and 64 devices) ..."
        )
    with progress.compiling("the decoding step", 134_515_008, 1):
        pass
    (first,) = [line for line in log() if line.endswith("...")]
    assert first == (
        "compiling the decoding step (a model of 134,515,008 parameters for 1 device) ..."
    )


def test_a_log_has_a_line_with_the_elapsed_time_again_and_again_until_the_end(log):
    lines, end = [], time.monotonic() + 30
    with progress.compiling("the step", 10, 1):
        while len(lines) < 3 and time.monotonic() < end:
            time.sleep(0.01)
            lines += log()
    lines += log()
    assert lines[0] == "compiling the step (a model of 10 parameters for 1 device) ..."
    assert len(lines) > 2
    assert all(re.fullmatch(r"compiling the step: 00:\d\d", line) for line in lines[1:])
    time.sleep(0.1)
    assert log() == []


def test_the_elapsed_time_ends_where_the_work_fails(log):
    failing = progress.compiling("the step", 10, 1)
    with pytest.raises(ValueError, match="damaged"), failing:
        raise ValueError("damaged")
    log()
    time.sleep(0.1)
    assert log() == []
