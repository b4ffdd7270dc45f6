"""Prompts do not depend on whether lm-eval is installed where tests run."""

import sys
from pathlib import Path

import pytest

from lcjax.evaluation.tasks import local_files


@pytest.fixture
def lm_eval_tasks(tmp_path, monkeypatch) -> Path:
    """The folder of tasks of an lm-eval that is installed and must not be imported."""
    package = tmp_path / "site" / "lm_eval"
    (package / "tasks").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError\n")
    info = tmp_path / "site" / "lm_eval-0.4.13.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lm_eval\nVersion: 0.4.13\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)  # a real one, of other tests
    return package / "tasks"


@pytest.fixture(autouse=True)
def _without_lm_eval(request, monkeypatch):
    if "lm_eval_tasks" not in request.fixturenames:
        monkeypatch.setattr(local_files, "lm_eval_template", lambda *_: None)
