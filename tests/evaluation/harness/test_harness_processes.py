"""Several processes ask the harness's questions together; only the first one has its data."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness, the extra eval")
pytestmark = pytest.mark.slow

# eval.py over a harness of one task, which only process 0 may open.
CODE = """
import runpy, sys
from lcjax.evaluation.lm_eval import harness

class Suite:
    def __init__(self, names, **settings):
        assert "--distributed.process=1" not in sys.argv
        if names == ["nothing"]:
            raise harness.InputError("tasks: nothing is no task")

    def documents(self, chat, **more):
        fields = {"metric": "acc", "lower": [], "aggregation": {}, "by_size": True, "shots": 0}
        asked = lambda n: [("loglikelihood", ["word " * n + "is", " " + c], 1) for c in "abc"]
        texts = [harness.HarnessDocument("t", "t", n, asked(n), fields) for n in range(5)]
        written = [("generate_until", ["some words", {"max_gen_toks": 4}], 1)]
        return [*texts, harness.HarnessDocument("w", "w", 0, written, fields)]

    def score_document(self, dataset, number, given):
        if dataset == "w":
            return {"acc,none": 1.0}
        return {"acc,none": float(max(range(3), key=lambda k: given[k][0][0]) == 0)}

harness.installed, harness.Suite = lambda: None, Suite
runpy.run_path("eval.py", run_name="__main__")
"""
CONFIG = """
model: {{preset: tiny}}
tasks: [{{type: lm_eval, tasks: [{task}]}}]
lengths: [64]
batch_size: 2
mesh: {{data: 2, fsdp: 2, tensor: 2}}
run: {{folder: {folder}}}
"""


@pytest.fixture
def job(monkeypatch, tmp_path):
    """Runs CODE as so many processes: (exit code, output) of each."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "training")
    from process_support import Job

    def start(folder, count, task="t"):
        text = CONFIG.format(folder=folder, task=task)
        made = Job(text, tmp_path, tmp_path / "xla", code=CODE, processes=count, devices=8 // count)
        return made.end()

    return start


def test_two_processes_have_the_records_of_one(job, tmp_path):
    found = []
    for name, count in (("one", 1), ("two", 2)):
        ended = job(tmp_path / name, count)
        assert [code for code, _ in ended] == [0] * count, "\n".join(
            log[-3000:] for _, log in ended
        )
        lines = (tmp_path / name / "records" / "lm_eval.jsonl").read_text().splitlines()
        found.append({row["window"]: row for row in map(json.loads, lines)})
    one, two = found
    assert len(one) == len(two) == 6
    for number, row in one.items():
        assert row["scores"] == two[number]["scores"] and row["answer"] == two[number]["answer"]
        if row["dataset"] == "t":
            sums = [[answer[0] for answer in each[number]["responses"]] for each in found]
            np.testing.assert_allclose(*sums, rtol=1e-4)


def test_all_processes_report_the_error_of_the_first(job, tmp_path):
    for code, log in job(tmp_path / "none", 2, task="nothing"):
        assert code == 2 and "error: tasks: nothing is no task" in log
