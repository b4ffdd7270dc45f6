"""How processes find each other, and what they are told when they do not."""

import dataclasses
import os
import platform
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from lcjax.checkpoints import orbax_io as checkpoint
from lcjax.checkpoints.orbax_io import CheckpointError, Checkpoints
from lcjax.errors import InputError
from lcjax.parallel import distributed
from lcjax.parallel.distributed import Distributed
from pallas_kernels import self_check, timings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coordinator": "10.0.0.1"}, r"coordinator='10.0.0.1' must be host:port"),
        ({"processes": 0}, r"distributed.processes=0 must be .* at least 1"),
        ({"processes": 2, "process": 2}, r"process=2 must be below distributed.processes=2"),
        ({"timeout": 0}, r"distributed.timeout=0 must be"),
    ],
)
def test_a_section_that_cannot_be_raises_input_error(fields, message):
    with pytest.raises(InputError, match=message):
        Distributed(**fields)


def clean(monkeypatch, **env):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "JOB_", "TPU_", "JAX_COORD")):
            monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
}


@pytest.fixture
def connections(monkeypatch):
    """The arguments of each call of `jax.distributed.initialize`, which does nothing."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **_: calls.append(args))
    return calls


@pytest.mark.parametrize("env", [SLURM, OPEN_MPI, {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1"}])
def test_jax_finds_the_processes_of_a_cluster(monkeypatch, connections, env):
    clean(monkeypatch, **env)
    distributed.start(Distributed())
    distributed.start(Distributed(coordinator="head:1"))
    distributed.start(Distributed(processes=1))
    assert connections == [(None, None, None), ("head:1", None, None)]


@pytest.mark.parametrize(
    "env",
    [
        {},
        SLURM | {"SLURM_NTASKS": "1"},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16"},  # on the machine where a job was allocated
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},  # a notebook in a pod
    ],
)
def test_a_process_on_its_own_connects_to_nothing(monkeypatch, connections, env):
    clean(monkeypatch, **env)
    distributed.start(Distributed())
    assert not connections


def test_a_host_with_tpus_that_is_part_of_no_pod_runs_alone(monkeypatch):
    clean(monkeypatch, TPU_ML_PLATFORM="JAX")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert start_process("Distributed()").returncode == 0


def test_a_process_without_a_number_raises_input_error(monkeypatch):
    clean(monkeypatch)
    error = start_process("Distributed('10.0.0.1:1', 2)").stderr.splitlines()[-1]
    assert re.search(r"InputError: distributed: .*process id .*give coordinator", error)


@pytest.mark.parametrize("process", [0, 1])
def test_processes_that_do_not_come_end_the_others_with_one_line(process):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    run = start_process(f"Distributed('{address}', 2, {process}, timeout=1)")
    assert run.returncode == 2
    assert run.stderr.startswith(
        "error: distributed.timeout: not all processes connected within 1 s"
    )
    assert f"coordinator={address}, processes=2, process={process}" in run.stderr
    assert len(run.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_whose_peer_dies_ends_with_a_line_that_names_the_fix(killed):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    code = (
        "import os, sys, time; from lcjax.parallel.distributed import *;"
        f"start(Distributed('{address}', 2, int(sys.argv[1]), heartbeat=5));"
        f"barrier('connected'); int(sys.argv[1]) == {killed} and os.kill(os.getpid(), 9);"
        "time.sleep(60)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(n)], stderr=subprocess.PIPE, text=True)
        for n in (0, 1)
    ]
    logs = [process.communicate(timeout=60)[1] for process in processes]
    other = 1 - killed
    assert processes[other].returncode == 1, logs[other]
    last = logs[other].splitlines()[-1]
    assert last.startswith(f"error: process {other} of 2 failed as shown above; if another one")


CACHED = """
import jax
from lcjax.parallel.distributed import cache_compiled_programs
cache_compiled_programs()
print(jax.config.jax_compilation_cache_dir)
"""


@pytest.mark.parametrize("folder", ["/elsewhere", ""])
def test_the_folder_of_compiled_programs_is_the_one_that_the_user_sets(tmp_path, folder):
    env = {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": folder}
    command = [sys.executable, "-c", CACHED]  # JAX reads the variable when it is imported
    run = subprocess.run(command, env=os.environ | env, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == folder


def test_scripts_keep_compiled_programs(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    before = jax.config.jax_compilation_cache_dir

    def folder_below(home):
        monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        jax.config.update("jax_compilation_cache_dir", None)
        distributed.cache_compiled_programs()
        return jax.config.jax_compilation_cache_dir

    (tmp_path / "lcjax").write_text("a file, where a folder can not be made")
    try:
        assert folder_below(tmp_path) is None
        home = tmp_path / "another"
        assert folder_below(home) == str(home / "lcjax" / "programs" / platform.node())
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InputError, match=rf"{coordinator}: process 0 cannot listen .*port"):
            distributed.start(Distributed(coordinator, 2, 0))


def start_process(section):
    """Runs `start` with a section, given as Python, in a process of its own."""
    code = f"from lcjax.parallel.distributed import *; start({section})"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_alone_there_is_nothing_to_agree_on():
    assert (
        distributed.is_main_process()
        and distributed.max_over_processes(2) == 2
        and distributed.equal_on_all_processes("a")
    )
    np.testing.assert_array_equal(distributed.gather(jax.numpy.arange(3)), np.arange(3))


def two_checkpoints(folder):
    state = {"x": jax.numpy.arange(4.0)}
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state, {"identity": {}, "position": {"next": step}})
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def failing(monkeypatch, *errors):
    """The next reads of a checkpoint raise these."""
    load, left = checkpoint._load, list(errors)
    monkeypatch.setattr(checkpoint, "_PAUSE", 0)

    def read(*args, **options):
        if left:
            raise left.pop(0)
        return load(*args, **options)

    monkeypatch.setattr(checkpoint, "_load", read)


TRANSIENT = [
    OSError(5, "Input/output error"),
    PermissionError(13, "Permission denied"),
    ValueError("UNAVAILABLE: Error reading local file"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_storage_that_fails_once_costs_no_checkpoint(tmp_path, monkeypatch, error):
    abstract = two_checkpoints(tmp_path)
    failing(monkeypatch, error)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(abstract)[0] == 2
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2"]


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_storage_that_fails_again_ends_the_run_and_renames_nothing(tmp_path, monkeypatch, error):
    abstract = two_checkpoints(tmp_path)
    failing(monkeypatch, error, error)
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match=r"checkpoints/2 cannot be read now .*nothing was"),
    ):
        checkpoints.restore(abstract)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2"]


def test_what_another_process_cannot_read_this_one_does_not_take(tmp_path, monkeypatch):
    abstract = two_checkpoints(tmp_path)
    answers = iter([1, 1, 0])  # the newest is damaged for somebody else, also the second time
    monkeypatch.setattr(checkpoint, "_PAUSE", 0)
    monkeypatch.setattr(distributed, "max_over_processes", lambda code: max(code, next(answers)))
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.warns(UserWarning, match=r"another process of the job cannot read its part"),
    ):
        assert checkpoints.restore(abstract)[0] == 1
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2.damaged"]


def test_processes_with_different_checkpoints_raise_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "equal_on_all_processes", lambda value: False)
    with pytest.raises(CheckpointError, match=r"must lie on storage that all machines share"):
        Checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("module", "name"), [(timings, "figures"), (timings, "wrong"), (self_check, "known")]
)
def test_processes_with_different_kernels_raise_an_error(monkeypatch, module, name):
    @dataclasses.dataclass
    class Config:
        distributed: Distributed = dataclasses.field(default_factory=Distributed)

    monkeypatch.setattr(module, name, lambda: {"causal, heads of 64": {}})
    monkeypatch.setattr(distributed, "equal_on_all_processes", lambda value: "causal" not in value)
    with pytest.raises(InputError, match="copy .*kernels to all, or point LCJAX_KERNELS at"):
        distributed._check_same_config(Config())
