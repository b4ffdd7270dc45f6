"""Runs jobs in a child process, which is replaced if a job crashes it or hangs.

A new kernel may read invalid memory or wait for ever, which ends its process. The child gets one
JSON list of jobs on its standard input and prints events, one JSON object per line after `MARK`;
its other output goes to the parent's standard error. Events of a child:

    {"job": name}                  a job begins
    {"step": text}                 what the job does next, so that a later attempt can skip it
    {"within": seconds}            from now on the child may be silent for so long
    {"row": ...}                   a result, as is any event without the other keys
    {"done": name}                 a job has ended
    {"left": names}                there is no time for these
"""

from __future__ import annotations

import contextlib
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
ENDING = 10.0  # seconds to wait for a process that has closed its output, or was killed


def emit(**event) -> None:
    """Prints an event; called in the child."""
    print(MARK + json.dumps(event), flush=True)


def say(text: str) -> None:
    """Prints a text with the time to the standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def jobs_of_child() -> list[dict]:
    return json.loads(sys.stdin.readline())


def supervise(
    command: list[str],
    jobs: list[dict],
    *,
    deadline: float,
    patience: float,
    grace: float = 0.0,
    env: dict[str, str] | None = None,
) -> Iterator[dict]:
    """Yields events of children that do the jobs, [{"name": ..., "skip": [...]}], in order.

    The command is run in `ROOT`. If a child dies, or prints nothing for `patience` seconds (unless
    it has said "within"), it yields {"lost": job, "step": step, "why": text, "again": bool}, and
    another child repeats the job with the step in its `skip`. If there was no step, a job with
    "alone": False is repeated with True, which makes it do one thing at a time; any other job is
    left out. A step that was lost in two jobs is skipped in all others. At `deadline`
    (`time.monotonic`) the child is killed, and {"left": names} lists the jobs that were not
    finished; a child may say so itself before that, and ends. With `grace` a child gets SIGTERM and
    so many seconds to end before it is killed. `env` is its environment; None: this one.
    """
    jobs, lost = [{"skip": []} | job for job in jobs], []
    while jobs and time.monotonic() < deadline:
        at, step, ended = None, None, None
        for event in _events(command, jobs, deadline, patience, grace, env):
            at, step = event.get("job", at), event.get("step", None if "job" in event else step)
            if "done" in event:
                jobs = [job for job in jobs if job["name"] != event["done"]]
                at, step = None, None
            if "ended" in event:
                ended = event["ended"]
                break
            yield event
            if "left" in event:
                return
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
    """Returns the remaining jobs: job `name` skips `step`, or is left out if it has none."""
    remaining = []
    for job in jobs:
        if job["name"] != name:
            remaining.append(job)
        elif step is not None and step not in job["skip"]:
            remaining.append(job | {"skip": [*job["skip"], step]})
        elif step is None and job.get("alone") is False:
            remaining.append(job | {"alone": True})
    return remaining


def _events(command, jobs, deadline, patience, grace, env) -> Iterator[dict]:
    """Yields the events of one child; the last event is {"ended": why}."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=env,
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
        if child.poll() is None and grace:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(grace)
        if child.poll() is None:
            child.kill()
            _end_of(child)


def _end_of(child) -> str:
    """Returns how a process ended; one that does not end is killed and not waited for."""
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
            event = json.loads(line.removeprefix(MARK))
            patience = event.get("within", patience)
            yield event
        else:
            print(line, end="", file=sys.stderr)
