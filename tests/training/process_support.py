"""Jobs of several processes on this machine: scripts over loopback, CPU devices, gloo."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from lcjax import config as config_lib

ROOT = Path(__file__).resolve().parents[2]
HEARTBEAT = 10  # seconds; a machine under load may keep a thread waiting for a few

# train.py with a signal that ACTION describes: "1 6 SIGKILL" kills process 1 after step 6.
TRAIN = """
import os, runpy, signal, time
from lcjax.training import loop

who, when, what = os.environ.get("ACTION", "0 0 -").split()
report = loop.Progress.report

def reporting(self, step, metrics):
    report(self, step, metrics)
    if [str(loop.jax.process_index()), str(step)] == [who, when]:
        os.kill(os.getpid(), getattr(signal, what))
    if who == "1" and step >= int(when):
        time.sleep(0.2)  # JAX looks for SIGTERM once a second

loop.Progress.report = reporting
runpy.run_path("train.py", run_name="__main__")
"""
SCRIPT = "import runpy; runpy.run_path('{}', run_name='__main__')"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def environment(cache, devices, **more):
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        **more,
    }


class Job:
    """Processes that run `code` on a config (or its YAML), each with its own devices.

    `extra`: more arguments of each process. `started`: number of processes that are started.
    """

    def __init__(
        self, config, folder, cache, *, code=TRAIN, processes=2, devices=4, extra=((), ()),
        started=None, timeout=120, **env,
    ):  # fmt: skip
        port = free_port()
        file = Path(folder) / f"job_{port}.yaml"
        file.write_text(config) if isinstance(config, str) else config_lib.dump(config, file)
        shared = ["--config", str(file)]
        if processes > 1:
            shared += [f"--distributed.coordinator=127.0.0.1:{port}"]
            shared += [f"--distributed.processes={processes}", f"--distributed.timeout={timeout}"]
            shared += [f"--distributed.heartbeat={HEARTBEAT}"]
        self.processes, self.logs = [], []
        for number in range(started or processes):
            number_option = [f"--distributed.process={number}"] if processes > 1 else []
            self.logs.append(file.with_suffix(f".{number}.log"))
            with self.logs[-1].open("w") as output:
                command = [sys.executable, "-c", code, *shared, *number_option, *extra[number]]
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env=environment(cache, devices, **env),
                        cwd=ROOT,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def end(self, seconds=240):
        """(exit code, output) of each; one that hangs is killed, and its exit code is -9."""
        codes = []
        for process in self.processes:
            try:
                codes.append(process.wait(seconds))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        logs = [log.read_text(errors="replace") for log in self.logs]
        return list(zip(codes, logs, strict=True))
