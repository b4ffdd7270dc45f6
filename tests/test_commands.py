"""Every command of the README is started once as the program that a user starts."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize(
    "line",
    [
        "train.py --nonsense=1",
        "eval.py --nonsense=1",
        "lcjax.training --nonsense=1",
        "lcjax.evaluation nonsense",
        "lcjax.cost --topology=nonsense",
        "lcjax.cost --topology=v5e:2x2 nonsense",
        "lcjax.convert a b --nonsense",
        "lcjax.convert nonsense b",
        "lcjax.data nonsense",
        "lcjax.retrieval nonsense",
        "lcjax.retrieval search a b --nonsense",
        "lcjax.pictures nonsense",
        "lcjax.serve --nonsense=1",
        "pallas_kernels.self_check --nonsense",
    ],
)
def test_a_command_reads_the_words_after_its_name(line, monkeypatch, capsys):
    name, *words = line.split()
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit) as end:
        if name.endswith(".py"):
            runpy.run_path(str(ROOT / name), run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    assert end.value.code == 2
    assert "nonsense" in capsys.readouterr().err
