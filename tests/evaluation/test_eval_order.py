"""In which order a run asks, how far it says it is, and that all its processes ask the same."""

import dataclasses
import importlib
from pathlib import Path

import numpy as np
import pytest
from evaluation_support import BigramModel, fake, records, texts
from tqdm import tqdm

from lcjax.errors import InputError
from lcjax.evaluation import Passkey, RunSection, run
from lcjax.evaluation.task import Unit
from lcjax.parallel import distributed

run_module = importlib.import_module("lcjax.evaluation.run")


pytestmark = pytest.mark.usefixtures("quick")


def test_the_progress_bar_counts_remaining_tokens_and_the_longest_run_first(config, monkeypatch):
    bars = []

    class Bar(tqdm):
        def __init__(self, **settings):
            super().__init__(**settings)
            bars.append(self)
            self.said = []

        def update(self, n=1):
            self.said.append(n)
            return super().update(n)

    monkeypatch.setattr(run_module, "tqdm", Bar)
    with pytest.raises(KeyboardInterrupt):
        run(config, load=fake(fail_after=5))
    done = records(config)
    run(config, load=fake())
    every = records(config)
    for method in ("base", "linear"):
        lengths = [record["length"] for record in every if record["method"] == method]
        assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) == 2
    tokens, finished = (sum(record["size"] for record in some) for some in (every, done))
    assert 0 < finished < tokens
    assert [bar.total for bar in bars] == [tokens, tokens - finished]
    assert [sum(bar.said) for bar in bars] == [finished, tokens - finished]


def test_the_longest_units_run_first():
    units = [
        Unit(index, (size,), np.zeros(size, np.int32), {"size": size})
        for index, size in enumerate((4, 9, 4, 9, 6))
    ]
    asked = run_module._batches(Passkey(), BigramModel(), units, 2)
    assert [[unit.index for unit in some] for some in asked] == [[1, 3], [4], [0, 2]]


def test_processes_with_different_examples_raise_input_error(config, monkeypatch):
    said = []
    monkeypatch.setattr(
        distributed, "equal_on_all_processes", lambda value: said.append(value) or True
    )
    run(config, load=fake())
    Path(config.data.path, "text3.txt").write_text(texts()[3][1][::-1])  # another machine's disk
    monkeypatch.setattr(distributed, "equal_on_all_processes", lambda value: value in said)
    other = dataclasses.replace(config, run=RunSection(config.run.folder + "_other"))
    with pytest.raises(InputError, match="different examples for perplexity_slide_press at length"):
        run(other, load=fake())
    assert not Path(other.run.folder).exists()
