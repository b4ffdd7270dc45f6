"""Several processes as one job: losses, ends of every kind, other topologies, evaluation."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
from process_support import SCRIPT, Job
from training_support import STEPS, losses, quick_compilation, tiny, write_corpus

from lcjax.checkpoints import load
from lcjax.checkpoints.adapters import read_adapters
from lcjax.checkpoints.run_folder import load_run
from lcjax.models.lora import LoRA
from lcjax.parallel.sharding import Mesh
from lcjax.tree import flatten

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="signals")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where jobs lie; the corpus is at `place / "corpus"`, compiled programs beside it."""
    folder = tmp_path_factory.mktemp("jobs")
    write_corpus(folder / "corpus")
    return folder


def train(place, name, *, config=None, **job):
    settings = {"export": False} | (config or {})
    return Job(tiny(place / name, place / "corpus", **settings), place, place / "xla", **job).end()


def assert_ended_well(job):
    assert [code for code, _ in job] == [0] * len(job), "\n".join(log[-3000:] for _, log in job)


def assert_close(actual, expected):
    """Sums of several machines are added in another order."""
    assert list(actual) == list(expected)
    np.testing.assert_allclose(list(actual.values()), list(expected.values()), rtol=1e-5)


@pytest.fixture(scope="module")
def one(place):
    """The losses of one process with eight devices."""
    assert_ended_well(train(place, "one", processes=1, devices=8))
    return losses(place / "one")


@pytest.fixture(scope="module")
def two(place):
    """The losses of two processes with four devices each, which end by exporting the model."""
    job = train(place, "two", config={"export": True})
    assert_ended_well(job)
    assert "model/ (a Hugging Face folder)" in job[0][1] and "results in" not in job[1][1]
    return losses(place / "two")


@pytest.fixture(scope="module")
def killed(place):
    """A run of two processes, of which the second was killed after step 6."""
    first, second = train(place, "killed", ACTION="1 6 SIGKILL")
    assert second[0] == -signal.SIGKILL
    assert first[0] not in (0, -signal.SIGKILL), first[1][-3000:]  # it ended by itself
    assert "process 0 of 2 failed" in first[1] or "another task died" in first[1]
    return place / "killed"


def test_two_processes_have_the_losses_of_one(one, two):
    assert list(two) == list(range(1, STEPS + 1))
    assert_close(two, one)


def test_two_processes_export_the_model_that_their_checkpoint_holds(place, two):
    params, exported = load_run(place / "two")[0], load(place / "two" / "model")[0]
    for path, leaf in flatten(params).items():
        np.testing.assert_array_equal(leaf, flatten(exported)[path], err_msg=path)


def test_after_kill_9_of_one_process_the_job_resumes_with_equal_losses(place, killed, two):
    assert sorted(os.listdir(killed / "checkpoints")) == ["4"]
    shutil.copytree(killed, place / "again")
    assert_ended_well(train(place, "again"))
    assert losses(place / "again") == two


def test_a_job_resumes_as_one_process_on_another_mesh(place, killed, one):
    shutil.copytree(killed, place / "alone")
    config = {"mesh": Mesh(data=1, fsdp=4, context=2)}
    assert_ended_well(train(place, "alone", config=config, processes=1, devices=8))
    assert_close(losses(place / "alone"), one)


def test_sigterm_to_one_process_makes_both_save_the_same_step_and_end_well(place):
    job = train(place, "stopped", config={"steps": 100, "save_every": 100}, ACTION="1 3 SIGTERM")
    assert_ended_well(job)
    (saved,) = os.listdir(place / "stopped" / "checkpoints")
    assert 3 < int(saved) < 100
    assert f"stopped by SIGTERM; step {saved} is saved" in job[0][1]
    assert list(losses(place / "stopped")) == list(range(1, int(saved) + 1))


def test_processes_agree_when_a_checkpoint_is_due_by_time(place):
    config = {"save_every": 100, "save_minutes": 1e-9, "log_every": 2, "steps": 5, "keep": 9}
    assert_ended_well(train(place, "timed", config=config))
    assert sorted(os.listdir(place / "timed" / "checkpoints")) == ["2", "4", "5"]


def test_adapters_are_exported_from_two_processes(place):
    assert_ended_well(
        train(place, "lora", config={"export": True, "lora": LoRA(rank=2), "steps": 2})
    )
    with quick_compilation(place / "xla"):  # random weights depend on how they were compiled
        params = load_run(place / "lora")[0]
    exported = load(place / "lora" / "model")[0]
    for path, leaf in flatten(params).items():
        np.testing.assert_allclose(leaf, flatten(exported)[path], atol=1e-7, err_msg=path)
    adapters = read_adapters(place / "lora" / "adapter").low_rank
    assert adapters and all(np.abs(pair.b).max() > 0 for pair in adapters.values())


EVALUATION = """
model: {{preset: tiny}}
methods: [{{name: base}}, {{name: linear, rope: {{type: linear, factor: 2}}}}]
tasks: [{{type: perplexity, protocol: slide_full}}, {{type: passkey, depths: 2, max_new_tokens: 4}}]
lengths: [512]
stride: 256
max_windows: 3
batch_size: 2
mesh: {{data: 2, fsdp: 2, tensor: 2}}
data: {{path: {folder}/corpus}}
run: {{folder: {folder}/{name}}}
"""


def test_two_processes_evaluate_together_and_write_one_set_of_records(place):
    code = SCRIPT.format("eval.py")
    for name, count in (("eval_one", 1), ("eval_two", 2)):
        job = Job(
            *(EVALUATION.format(folder=place, name=name), place, place / "xla"),
            code=code, processes=count, devices=8 // count,
        ).end()  # fmt: skip
        assert_ended_well(job)
    assert "Passkey accuracy" in job[0][1] and "Passkey accuracy" not in job[1][1]
    one, two = (
        {
            (row["method"], file.name, row["window"]): row
            for file in sorted((place / name / "records").iterdir())
            for row in map(json.loads, file.read_text().splitlines())
        }
        for name in ("eval_one", "eval_two")
    )
    lines = [f.read_text().count("\n") for f in (place / "eval_two" / "records").iterdir()]
    assert sum(lines) == len(two) == len(one) == 2 * (3 + 2)
    costs = {"seconds", "compile_seconds", "peak_bytes", "peak_bytes_at_most"}
    for key, row in one.items():
        for name in row.keys() - costs:
            values = row[name], two[key][name]
            if isinstance(row[name], float | list) and np.asarray(row[name]).dtype.kind in "fi":
                np.testing.assert_allclose(*values, rtol=1e-4, err_msg=f"{key} {name}")
            else:
                assert values[0] == values[1], (key, name)


def test_a_process_with_other_settings_is_rejected_by_all(place):
    config = tiny(place / "other", place / "corpus")
    for code, log in Job(config, place, place / "xla", extra=([], ["--train.lr=1"])).end():
        assert code == 2
        assert "error: the processes of this job have different settings" in log
    assert not (place / "other").exists()


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_a_host_that_never_comes_is_one_line_with_the_address_and_exit_code_2(place, script):
    config = tiny(place / "lonely", place / "corpus")
    if script == "eval.py":
        config = EVALUATION.format(folder=place, name="lonely")
    job = Job(config, place, place / "xla", code=SCRIPT.format(script), started=1, timeout=2)
    ((code, log),) = job.end()
    assert code == 2 and len(log.splitlines()) == 1
    assert log.startswith("error: distributed.timeout: not all processes connected within 2 s")
    assert "(coordinator=127.0.0.1:" in log and "processes=2, process=0)" in log
    assert not (place / "lonely").exists()
