"""The data configs that ship: they parse, and say what the papers say."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lcjax import config as configs
from lcjax.data import DataConfig
from lcjax.data.prepare import PrepareConfig

FOLDER = Path(__file__).parents[2] / "configs" / "data"


@dataclass(frozen=True)
class Run:
    data: DataConfig = field(default_factory=DataConfig)


def test_slimpajama_is_upsampled_as_the_studies_had_it():
    file = FOLDER / "slimpajama_upsampled.yaml"
    prepared = configs.parse(PrepareConfig, ["--config", str(file)])
    (source,) = prepared.text_sources()
    assert source.label_field == "meta.redpajama_set_name"
    upsample = source.upsample
    assert (upsample.mode, upsample.ratio, upsample.below) == ("per_source", 0.1, 4096)
    # enough for the 961 steps of 32 rows of 32,768 tokens
    assert upsample.tokens >= 961 * 32 * 32768
    assert sum(upsample.budgets().values()) == pytest.approx(upsample.tokens)


def test_cepes_rows_are_mixed_two_to_one_by_the_papers_shares(tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text(f"data: !include {FOLDER / 'cepe_mixture.yaml'}\n")
    data = configs.parse(Run, ["--config", str(run)]).data
    inside = [source for source in data.sources if source.pack == "windows"]
    across = [source for source in data.sources if source.pack is None]
    weights = [sum(source.weight for source in part) for part in (inside, across)]
    assert weights[0] / weights[1] == pytest.approx(2.0)
    assert all(2 * source.stride == data.length == 8192 for source in data.sources)
    assert sorted(s.labels[0] for s in inside) == ["arxiv", "book"] and len(across) == 7
