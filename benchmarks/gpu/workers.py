"""Jobs in a process of their own, which is replaced when one of them crashes it or hangs.

A kernel that has never run may read where nothing is or wait for ever, and takes its process along.
The child gets one JSON list of jobs on its standard input and prints events, one JSON object a line
behind `MARK`; whatever else it prints is passed on. Events of a child:

    {"job": name}                  a job begins
    {"step": text}                 what it is about to do, so that it can be left out afterwards
    {"row": ...}                   a result; anything else with neither of the keys below
    {"done": name}                 a job has ended
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

# Where `python -m` finds this package: the root of a clone, or the site-packages of a wheel.
ROOT = Path(__file__).resolve().parents[__name__.count(".")]
MARK = "@event "
STARTING = 180.0  # seconds in which JAX must find the device
ENDING = 10.0  # seconds after which a process that has closed its output, or was killed, is left


def emit(**event) -> None:
    """Called in the child."""
    print(MARK + json.dumps(event), flush=True)


def jobs_of_child() -> list[dict]:
    return json.loads(sys.stdin.readline())


def supervise(
    command: list[str], jobs: list[dict], *, deadline: float, patience: float
) -> Iterator[dict]:
    """Events of children that do the jobs, [{"name": ..., "skip": [...]}], one after the other.

    The command is run in `ROOT`. Where a child dies, or says nothing for `patience` seconds,
    {"lost": job, "step": step, "why": text, "again": bool} is an event; another child does the job
    again with the step in its `skip`. Where there was no step, a job with "alone": False is done
    again with True, so that it does one thing after another, and any other job is left out. A step
    lost in two jobs is left out of all others. At `deadline` (`time.monotonic`) the child is ended;
    {"left": names} were not finished.
    """
    jobs, lost = [{"skip": []} | job for job in jobs], []
    while jobs and time.monotonic() < deadline:
        at, step, ended = None, None, None
        for event in _events(command, jobs, deadline, patience):
            at, step = event.get("job", at), event.get("step", None if "job" in event else step)
            if "done" in event:
                jobs = [job for job in jobs if job["name"] != event["done"]]
                at, step = None, None
            if "ended" in event:
                ended = event["ended"]
                break
            yield event
        if not jobs or ended == "time":
            break
        at = at or jobs[0]["name"]
        jobs = _without(jobs, at, step)
        again = at in [job["name"] for job in jobs]
        yield {"lost": at, "step": step, "why": ended, "again": again}
        if step in lost:
            jobs = [job | {"skip": [*job["skip"], step]} for job in jobs]
        lost.append(step if step is not None else ())
    if jobs:
        yield {"left": [job["name"] for job in jobs]}


def _without(jobs: list[dict], name: str, step: str | None) -> list[dict]:
    """The jobs that remain, with the step of that job left out, or that job where it has none."""
    found = []
    for job in jobs:
        if job["name"] != name:
            found.append(job)
        elif step is not None and step not in job["skip"]:
            found.append(job | {"skip": [*job["skip"], step]})
        elif step is None and job.get("alone") is False:
            found.append(job | {"alone": True})
    return found


def _events(command, jobs, deadline, patience) -> Iterator[dict]:
    """Of one child; the last one is {"ended": why}."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        errors="replace",
    )
    lines: queue.Queue = queue.Queue()

    def read():
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        child.stdin.write(json.dumps(jobs) + "\n")
        child.stdin.close()
        yield from _read(child, lines, deadline, patience)
    except BrokenPipeError:
        yield {"ended": _end_of(child)}
    finally:
        if child.poll() is None:
            child.kill()
            _end_of(child)


def _end_of(child) -> str:
    """How a process ended; one that the driver does not let go of is killed and left."""
    try:
        return f"exit code {child.wait(ENDING)}"
    except subprocess.TimeoutExpired:
        child.kill()
        return f"it did not end in {ENDING:.0f} s"


def _read(child, lines: queue.Queue, deadline: float, patience: float) -> Iterator[dict]:
    while True:
        left = deadline - time.monotonic()
        try:
            line = lines.get(timeout=max(0.0, min(patience, left)))
        except queue.Empty:
            yield {"ended": "time" if left <= patience else f"silent for {patience:.0f} s"}
            return
        if line is None:
            yield {"ended": _end_of(child)}
            return
        if line.startswith(MARK):
            yield json.loads(line.removeprefix(MARK))
        else:
            print(line, end="", file=sys.stderr)
