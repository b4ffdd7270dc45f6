"""The seqio source where seqio is not installed."""

import sys
from dataclasses import dataclass, field

import pytest
from data_support import Bytes

from lcjax import config as configs
from lcjax.data import DataConfig, SeqioSource, TextSource, documents, make_loader
from lcjax.errors import InputError


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "seqio", None)
    config = DataConfig(sources=[SeqioSource(task="my_task")])
    for use in (lambda: make_loader(config, Bytes(), 1), lambda: list(documents(config))):
        with pytest.raises(InputError, match=r"pip install seqio==") as caught:
            use()
        assert "\n" not in str(caught.value)


def test_sources_are_told_apart_by_type_and_are_text_by_default(tmp_path):
    @dataclass(frozen=True)
    class Run:
        data: DataConfig = field(default_factory=DataConfig)

    file = tmp_path / "run.yaml"
    file.write_text(
        "data:\n  sources:\n  - {path: a.txt}\n"
        "  - {type: seqio, task: c4, module: my.tasks, weight: 2, tokens: true}\n"
    )
    data = configs.parse(Run, ["--config", str(file)]).data
    seqio = SeqioSource(task="c4", module="my.tasks", weight=2.0, tokens=True)
    assert data.sources == [TextSource("a.txt"), seqio]
    configs.dump(Run(data), tmp_path / "again.yaml")
    assert configs.parse(Run, ["--config", str(tmp_path / "again.yaml")]).data == data
    with pytest.raises(InputError, match=r"data.sources.0.type='sqio' is unknown"):
        configs.parse(Run, ["--config", str(file), "--data.sources.0.type=sqio"])
    with pytest.raises(InputError, match=r"data.sources.1.task is empty"):
        DataConfig(sources=[TextSource("a.txt"), SeqioSource()]).resolved_sources()
