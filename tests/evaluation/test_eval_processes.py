"""Several processes whose machines hold other files under one path."""

from pathlib import Path

import pytest
from evaluation_support import texts

pytestmark = pytest.mark.slow

# eval.py, to process 1 of which every text reads backwards.
CODE = """
import importlib, runpy, sys

run = importlib.import_module("lcjax.evaluation.run")
texts = run.texts
if "--distributed.process=1" in sys.argv:
    run.texts = lambda data: ((name, text[::-1]) for name, text in texts(data))
runpy.run_path("eval.py", run_name="__main__")
"""
CONFIG = """
model: {{preset: tiny}}
lengths: [64]
stride: 16
data: {{path: {folder}/text}}
mesh: {{data: 2, fsdp: 2, tensor: 2}}
run: {{folder: {folder}/out}}
"""


def test_processes_with_other_texts_end_with_one_line_and_write_nothing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "training")
    from process_support import Job

    (tmp_path / "text").mkdir()
    for name, text in texts((140, 120)):
        (tmp_path / "text" / f"{name}.txt").write_text(text)
    config = CONFIG.format(folder=tmp_path)
    ended = Job(config, tmp_path, tmp_path / "xla", code=CODE, processes=2, devices=4).end()
    for code, log in ended:
        assert code == 2, log[-3000:]
        assert "error: processes planned different examples for perplexity_sl" in log
    assert not (tmp_path / "out" / "records").exists()
