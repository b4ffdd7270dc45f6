"""How processes find each other, and what they are told when they do not."""

import dataclasses
import os
import socket
import threading
import time

import jax
import numpy as np
import pytest

from lcjax.checkpoints import orbax_io as checkpoint
from lcjax.checkpoints.orbax_io import CheckpointError, Checkpoints
from lcjax.errors import InputError
from lcjax.parallel import distributed
from lcjax.parallel.distributed import Distributed
from lcjax.parallel.rendezvous import Place, meet
from pallas_kernels import measured


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def meeting(*places, timeout=20.0, delay=0.0):
    """What `meet` says to each of the places, which start one after the other."""
    said = [None] * len(places)

    def one(index):
        try:
            meet(places[index], timeout)
            said[index] = "go"
        except InputError as error:
            said[index] = str(error)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(places))]
    for thread in threads:
        thread.start()
        time.sleep(delay)
    for thread in threads:
        thread.join()
    return said


def places(*numbers, count):
    address = free_address()
    return [Place(address, count, number) for number in numbers]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_processes_go_on_when_all_are_there_whoever_comes_first(order):
    all_places = places(*order, count=3)
    assert meeting(*all_places, delay=0.3) == ["go"] * 3
    socket.create_server(("127.0.0.1", all_places[0].port)).close()  # the port is free again


def test_all_that_are_there_learn_who_is_missing():
    here = places(0, 2, count=4)
    said = meeting(*here, timeout=1.0)
    assert said[0] == said[1]
    assert f"coordinator={here[0].coordinator}: processes 1, 3 did not come within 1 s" in said[0]
    assert "(4 processes expected)" in said[0]


def test_a_coordinator_that_is_not_there_is_named():
    (here,) = places(1, count=2)
    (said,) = meeting(here, timeout=0.5)
    assert f"coordinator={here.coordinator}: process 0 did not come within 0.5 s" in said
    assert "2 processes expected, this is process 1" in said


def test_one_number_of_two_processes_and_two_counts_are_refused():
    said = meeting(*places(0, 1, 1, count=3))
    assert all("distributed.process=1 is the number of two processes" in line for line in said)
    address = free_address()
    said = meeting(Place(address, 2, 0), Place(address, 3, 1))
    assert all("distributed.processes is 3 in process 1 and 2 in process 0" in s for s in said)


def test_strangers_and_processes_that_died_do_not_count():
    first, second, third = places(0, 1, 2, count=3)
    thread = threading.Thread(target=meet, args=(first, 20.0))
    thread.start()
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"lcjax 1 3\n"):  # a scanner; a process, then killed
        for _ in range(50):
            try:
                with socket.create_connection(("127.0.0.1", first.port), 5) as door:
                    door.sendall(words)
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
    time.sleep(0.2)
    assert thread.is_alive()
    assert meeting(second, third) == ["go", "go"]
    thread.join()


def test_a_port_that_is_taken_is_said():
    with socket.create_server(("", 0)) as server:
        place = Place(f"127.0.0.1:{server.getsockname()[1]}", 2, 0)
        with pytest.raises(InputError, match=r"cannot listen there .*give another port"):
            meet(place, 5.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coordinator": "10.0.0.1"}, r"coordinator='10.0.0.1' must be host:port"),
        ({"processes": 0}, r"distributed.processes=0 must be .* at least 1"),
        ({"processes": 2, "process": 2}, r"process=2 must be below distributed.processes=2"),
        ({"timeout": 0}, r"distributed.timeout=0 must be"),
    ],
)
def test_a_section_that_cannot_be_is_refused(fields, message):
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


def test_a_cluster_says_who_is_there_and_the_section_overrules_it(monkeypatch):
    clean(monkeypatch, **SLURM)
    place = distributed._place(Distributed())
    assert place.host == "node03" and place[1:] == (16, 9)
    assert distributed._place(Distributed(coordinator="head:1")) == ("head:1", 16, 9)
    assert distributed._place(Distributed(processes=1)) is None
    clean(monkeypatch, **OPEN_MPI)
    place = distributed._place(Distributed())
    assert place.host == "10.96.0.1" and place[1:] == (4, 3)


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
def test_a_process_on_its_own_connects_to_nothing(monkeypatch, env):
    clean(monkeypatch, **env)
    assert distributed._place(Distributed()) is None
    distributed.start(Distributed())
    assert not jax.distributed.is_initialized()


def test_what_nobody_says_is_asked_for(monkeypatch):
    clean(monkeypatch)
    with pytest.raises(InputError, match=r"distributed.process=null, and no cluster says it"):
        distributed._place(Distributed(coordinator="10.0.0.1:1", processes=2))


def test_alone_there_is_nothing_to_agree_on():
    assert distributed.first() and distributed.worst(2) == 2 and distributed.same("a")
    np.testing.assert_array_equal(distributed.gather(jax.numpy.arange(3)), np.arange(3))


def two_checkpoints(folder):
    state = {"x": jax.numpy.arange(4.0)}
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state, {"next": step})
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
    monkeypatch.setattr(distributed, "worst", lambda code: max(code, next(answers)))
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.warns(UserWarning, match=r"another process of the job cannot read its part"),
    ):
        assert checkpoints.restore(abstract)[0] == 1
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2.damaged"]


def test_processes_that_see_different_checkpoints_are_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "same", lambda value: False)
    with pytest.raises(CheckpointError, match=r"must lie on storage that all machines share"):
        Checkpoints(tmp_path)


def test_processes_that_measured_other_kernels_are_told_so(monkeypatch):
    @dataclasses.dataclass
    class Config:
        distributed: Distributed = dataclasses.field(default_factory=Distributed)

    monkeypatch.setattr(measured, "figures", lambda: {"causal, heads of 64": {}})
    monkeypatch.setattr(distributed, "same", lambda value: "causal" not in value)
    with pytest.raises(InputError, match="copy .*kernels to all, or point LCJAX_KERNELS at"):
        distributed._check_same_config(Config())
