"""Jobs of several processes: connecting them, collective checks, and a clean end.

Every process runs the same script on the same config and holds a part of the devices of a TPU pod
or GPU cluster. Process 0 does what only one process may do, such as writing a log.
"""

import ctypes
import dataclasses
import json
import os
import platform
import re
import signal
import socket
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax._src import distributed as runtime  # no public way to a barrier with a time limit
from jax.experimental import multihost_utils

from lcjax import config as config_lib
from lcjax.errors import InputError, NonNegativeInt, PositiveInt, check_fields
from lcjax.parallel.device_memory import READING, explained
from pallas_kernels import self_check, timings

_handlers: list[Any] = []  # ctypes does not own the functions that C may call
_failed = threading.Event()  # this process has said why it ends
_GRACE = 10  # seconds that a process which fails waits for the others to fail as well


@dataclasses.dataclass(frozen=True)
class Distributed:
    """Processes of a job; fields that are null come from the cluster's environment, if any."""

    coordinator: str | None = None  # host:port of process 0, reachable by all
    # Number of processes; 1: a single process, also in a cluster
    processes: PositiveInt | None = None
    process: NonNegativeInt | None = None  # index of this process, from 0
    timeout: PositiveInt = 300  # seconds that processes wait for each other at the start
    heartbeat: PositiveInt = 100  # seconds without a heartbeat after which a process counts as dead

    def __post_init__(self):
        check_fields("distributed", self)
        if None not in (self.process, self.processes) and self.process >= self.processes:
            raise InputError(
                f"distributed.process={self.process} must be below distributed.processes="
                f"{self.processes}; processes are counted from 0"
            )
        if self.coordinator is not None and not re.fullmatch(r"\S+:\d+", self.coordinator):
            raise InputError(
                f"distributed.coordinator={self.coordinator!r} must be host:port, such as"
                " 10.0.0.1:1234"
            )


def main(
    cls: type,
    run: Callable[[Any], object],
    argv: Sequence[str] | None = None,
    *,
    parse: Callable[[Sequence[str] | None], Any] | None = None,
    agreed_stop: bool = False,
) -> int:
    """Runs a script as `lcjax.config.main` does, in one or several processes.

    Connects the processes before `run`, and ends all of them if one fails.

    Args:
      cls: the config, with a field `distributed`.
      run: the script's body, which takes the config.
      argv: command-line arguments; None: `sys.argv[1:]`.
      parse: returns the config for these arguments; None: `lcjax.config.parse`.
      agreed_stop: see `start`.
    """
    report = config_lib.ErrorReport()
    try:
        with report:
            config = config_lib.parse(cls, argv) if parse is None else parse(argv)
            report.config = config
            start(config.distributed, agreed_stop=agreed_stop)
            cache_compiled_programs()
            _check_same_config(config)
            with explained(getattr(cls, "out_of_memory", READING)):
                run(config)
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        _failed.set()
        print(_failure(jax.process_index(), jax.process_count()), file=sys.stderr)
        report.code = 1
    _leave(report.code)
    return report.code


def cache_compiled_programs() -> None:
    """Turns on JAX's persistent compilation cache for a script of a single process.

    Does nothing if the user has set `JAX_COMPILATION_CACHE_DIR` (also to an empty string) or JAX's
    option. Each host has its own folder, because programs for CPUs depend on the CPU's instructions
    and a home folder may be shared by different CPUs. Jobs of several processes have no cache by
    default: they need a folder that all of them share.
    """
    variable = "JAX_COMPILATION_CACHE_DIR"
    if variable in os.environ or jax.config.jax_compilation_cache_dir is not None:
        return
    if jax.distributed.is_initialized():
        return
    try:
        folder = timings.user_cache() / "programs" / (platform.node() or "host")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home folder, or one that cannot be written
        return
    if os.access(folder, os.W_OK | os.X_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))


def _failure(index: int, count: int) -> str:
    return (
        f"error: process {index} of {count} failed as shown above; if another one ended first, its"
        " log says why. The same command goes on from what is saved"
    )


def start(section: Distributed, *, agreed_stop: bool = False) -> None:
    """Connects the processes of the job; does nothing for a single process.

    Call it before anything initialises JAX's devices. `jax.distributed.initialize` reads the fields
    that are null from the environment: SLURM, Open MPI, Cloud TPU, Kubernetes.

    Args:
      section: the config section.
      agreed_stop: whether a SIGTERM to any process only makes
        `multihost_utils.reached_preemption_sync_point` true in all of them, at the same step.
        Otherwise SIGTERM ends the process at once, as usual.

    Raises:
      InputError: the environment does not name the processes, or the coordinator's port is taken.
    """
    arguments = section.coordinator, section.processes, section.process
    if jax.distributed.is_initialized() or section.processes == 1:
        return
    if arguments == (None, None, None) and not _is_cluster():
        return
    _check_port(section)
    jax.config.update("jax_enable_preemption_service", agreed_stop)
    # At its own time-out JAX aborts the process with a stack trace of C++.
    timer = threading.Timer(section.timeout, _exit_at_timeout, [section])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            *arguments,
            initialization_timeout=section.timeout + _GRACE,
            heartbeat_timeout_seconds=section.heartbeat,
        )
    except (RuntimeError, ValueError, LookupError, OSError) as error:
        if arguments == (None, None, None) and "coordinator_address" in str(error):
            return  # one host with TPUs that is part of no pod, as in Colab
        raise InputError(
            f"distributed: JAX cannot connect the processes of this job ({error}); give"
            " coordinator, processes and process, or processes=1 to run alone"
        ) from error
    finally:
        timer.cancel()
    if jax.distributed.is_initialized():
        _exit_at_abort()


def _check_port(section: Distributed) -> None:
    """Raises an InputError if process 0 cannot listen on the port of its coordinator.

    JAX itself would fail too, but jaxlib 0.10 then crashes while other threads run.
    """
    if section.process == 0 and section.coordinator is not None:
        try:
            socket.create_server(("", int(section.coordinator.rpartition(":")[2]))).close()
        except (OSError, OverflowError) as error:
            raise InputError(
                f"distributed.coordinator={section.coordinator}: process 0 cannot listen there"
                f" ({error}); give another port"
            ) from error


def _exit_at_timeout(section: Distributed) -> None:
    """Prints one line and ends the process, whose main thread is blocked in JAX."""
    fields = ("coordinator", "processes", "process")
    settings = [
        f"{name}={getattr(section, name)}" for name in fields if getattr(section, name) is not None
    ]
    place = ", ".join(settings) or "found in the environment"
    print(
        f"error: distributed.timeout: not all processes connected within {section.timeout} s"
        f" ({place}); start all of them, each with its own number, raise"
        " distributed.timeout, or set distributed.processes=1 to run alone",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


def _exit_at_abort() -> None:
    """Makes this process end with one line, without a stack trace, when JAX aborts it.

    JAX aborts in a C++ thread when another process has died. Handlers of Python's `signal` module
    would never run there; a handler that is registered with libc runs in the aborting thread.
    """
    if os.name != "posix":
        return
    line = _failure(runtime.global_state.process_id, runtime.global_state.num_processes) + "\n"

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handler(_):
        if not _failed.is_set():
            os.write(2, line.encode())
        os._exit(1)

    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes = ctypes.c_int, type(handler)
    set_handler.restype = ctypes.c_void_p
    set_handler(signal.SIGABRT, handler)
    _handlers.append(handler)


def _is_cluster() -> bool:
    """Returns whether the environment describes a job of several processes.

    JAX's own check is true in every Kubernetes pod and SLURM allocation, also for single processes.
    """
    env = os.environ
    several = any(
        variable in env and int(env.get(count, "1")) > 1
        for variable, count in (
            ("SLURM_STEP_NODELIST", "SLURM_NTASKS"),
            ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE"),
        )
    )
    indexed = "JOB_COMPLETION_INDEX" in env and "KUBERNETES_SERVICE_HOST" in env
    # Cloud TPU sets the host names of a slice; JAX sets the platform when it finds TPU chips.
    on_tpu = "TPU_ML_PLATFORM" in env and not env.get("JAX_PLATFORMS", "tpu").startswith("cpu")
    return bool(
        several
        or on_tpu
        or env.get("JAX_COORDINATOR_ADDRESS")
        or (indexed and find_spec("kubernetes") is not None)
    )


def _check_same_config(config: Any) -> None:
    """Raises an InputError unless all processes have equal configs and kernel measurements.

    `distributed.process` may differ.
    """
    plain = dataclasses.replace(config, distributed=Distributed())
    if not equal_on_all_processes(repr(plain)):
        raise InputError(
            "the processes of this job have different settings; start all with the same config and"
            " the same overrides, distributed.process apart"
        )
    # Processes have to run the same kernels.
    measured = timings.figures(), timings.wrong(), timings.is_current()
    if not equal_on_all_processes(repr((*measured, self_check.known()))):
        raise InputError(
            "the processes of this job have measured different times of GPU kernels or have"
            " different self-checks of them, or some none;"
            f" copy {timings.folder()} to all, or point {timings.VARIABLE} at a shared folder"
        )


def is_main_process() -> bool:
    """Returns whether this is process 0, which writes the files of a job."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Blocks until all processes have called it."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"lcjax: {name}")


def max_over_processes(code: int) -> int:
    """Returns the largest `code` of all processes; a collective."""
    if jax.process_count() == 1:
        return code
    return int(multihost_utils.process_allgather(np.int32(code)).max())


def equal_on_all_processes(value: str) -> bool:
    """Returns whether `value` is equal on all processes; a collective."""
    if jax.process_count() == 1:
        return True
    digests = multihost_utils.process_allgather(np.uint32(zlib.crc32(value.encode())))
    return bool((digests == digests[0]).all())


def from_main(make: Callable[[], Any]) -> Any:
    """Calls `make` in process 0 and broadcasts its JSON result, or its InputError, to all.

    Use it for results that depend on a network or on chance. A collective.
    """
    if jax.process_count() == 1:
        return make()
    result = {"value": None, "fault": None}
    if is_main_process():
        try:
            result["value"] = make()
        except InputError as error:
            result["fault"] = str(error)
    data = np.frombuffer(json.dumps(result).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    data = data if is_main_process() else np.zeros(size, np.uint8)
    result = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(data)).tobytes())
    if result["fault"] is not None:
        raise InputError(result["fault"])
    return result["value"]


def gather(x: Any) -> np.ndarray:
    """Returns the full array as NumPy, also if its shards are on several processes.

    A collective in that case: all processes must call it.
    """
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _leave(code: int) -> None:
    """Disconnects from the job: together with the others, or at once if this process failed."""
    if not jax.distributed.is_initialized():
        return
    if code == 0:
        jax.distributed.shutdown()
        return
    # Several processes often fail alike, for example at a wrong path. Wait so that each can print
    # its error, then exit so that none waits for this process in a collective.
    try:
        runtime.global_state.client.wait_at_barrier("lcjax: failed", _GRACE * 1000)
    except jax.errors.JaxRuntimeError:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a normal exit of Python would wait for the others again
    jax.distributed.shutdown()
