"""Bad and odd input for every entry point: each case is refused in one line, or accepted.

    python -m tools.campaigns.fuzz --seed 0
    python -m tools.campaigns.fuzz --seed 0 --case "config train.lr=nan"
    python -m tools.campaigns.fuzz --seed 0 --random 1000

The cases are those of `fuzz_cases.py`, or with --random those that `fuzz_random.py` draws. A
configuration that can be parsed goes on until the first training step, or the first scored batch,
would begin. A case fails if it ends in a traceback, takes more than --limit seconds, is accepted or
refused wrongly, is refused without naming what is wrong or in several lines, changes files that it
must not, or leaves a run folder behind a start that was refused. Not collected by pytest: some
minutes.
"""

import argparse
import collections
import contextlib
import fnmatch
import io
import multiprocessing
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from lcjax.errors import InputError
from lcjax.evaluation.run import _Runner
from lcjax.training import loop
from tools.campaigns.fuzz_cases import (
    ACCEPTED,
    CLEAN,
    REFUSED,
    ROWS,
    Broken,
    Case,
    Place,
    Refused,
    Started,
    all_cases,
    brief,
    language_model,
    make_shared,
)  # fmt: skip
from tools.campaigns.fuzz_random import random_cases

MEMORY = 10 << 30  # bytes that a case may allocate


def outcome(case: Case, place: Place) -> tuple[str, str]:
    """Runs a case; returns the kind of its outcome, and what was printed or raised."""
    text = ""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            case.run(place)
        kind = "accepted as expected" if case.expected != REFUSED else "wrongly accepted"
    except Broken as error:
        kind, text = "tracebacks", str(error)
        if "left" in text[:40]:
            kind = "run folders left behind"
    except (Refused, InputError, TypeError, ValueError, NotImplementedError) as error:
        text = str(error)
        if case.expected == ACCEPTED:
            kind = "wrongly refused"
        elif "\n" in text.strip() or not text.strip():
            kind = "not one line"
        elif not re.search(case.says, text):
            kind = "does not name it"
        elif isinstance(error, (UnicodeError, RecursionError)) and case.expected == CLEAN:
            kind = "tracebacks"
        else:
            kind = "refused as expected"
    except BaseException as error:
        kind, text = "tracebacks", brief(error)
    lost = place.lost()
    return ("lost files", f"{lost} {text}") if lost else (kind, text)


def worker(connection, folder: Path, seed: int, count: int) -> None:
    """Runs the cases whose names come in, one after another."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    shared, number = folder / "shared", 0
    if not shared.exists():
        make_shared(shared)
    stop_before_work()
    if count:
        cases = {case.name: case for case in random_cases(seed, count)}
    else:
        cases = all_cases(shared / "model")
    language_model(shared / "model").nll(ROWS)
    connection.send(list(cases))
    while name := connection.recv():
        number += 1
        place = Place(shared, folder / f"{os.getpid()}_{number}", f"{seed} {name}")
        os.chdir(place.folder)
        kind, text = outcome(cases[name], place)
        connection.send((kind, text.encode(errors="backslashreplace").decode()))
        os.chdir(folder)
        shutil.rmtree(place.folder, ignore_errors=True)


def stop_before_work() -> None:
    """Ends trainings before their first step, and evaluations before their first batch."""

    def begin(*_):
        raise Started

    loop.Training.run = begin
    _Runner._score = begin


class Pool:
    """One process that runs cases; it is replaced when a case takes too long or kills it."""

    def __init__(self, folder: Path, seed: int, count: int, limit: float):
        self._folder, self._seed, self._count, self._limit = folder, seed, count, limit
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(
            target=worker,
            args=(other, self._folder, self._seed, self._count),
        )
        self._process.start()
        other.close()
        self.names = self._connection.recv()

    def run(self, name: str) -> tuple[str, str, float]:
        begin = time.monotonic()
        self._connection.send(name)
        try:
            if self._connection.poll(self._limit):
                return *self._connection.recv(), time.monotonic() - begin
            kind, text = "too long", ""
        except (EOFError, ConnectionError):
            kind, text = "tracebacks", f"the process ended with {self._process.exitcode}"
        self._process.kill()
        self._process.join()
        self._start()
        return kind, text, time.monotonic() - begin

    def close(self) -> None:
        self._process.kill()
        self._process.join()


GOOD = ("accepted as expected", "refused as expected")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="only those whose names match, such as 'API: nll*'")
    parser.add_argument("--share", type=float, default=0.25, help="of the cases of configs")
    parser.add_argument("--random", type=int, default=0, help="number of random cases instead")
    parser.add_argument("--limit", type=float, default=20, help="seconds of a case")
    parser.add_argument("--verbose", action="store_true", help="print every outcome")
    args = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}  # of the process with the cases
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    counts, failures, begin = collections.Counter(), [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lcjax_fuzz_") as folder:
        pool = Pool(Path(folder), args.seed, args.random, args.limit)
        chance, names = random.Random(args.seed), pool.names
        if args.case:
            names = [n for n in names if n == args.case or fnmatch.fnmatch(n, args.case)]
        elif args.random:
            names = list(names)
        else:
            names = [n for n in names if n[:7] != "config " or chance.random() < args.share]
        try:
            for name in names:
                kind, text, seconds = pool.run(name)
                counts[kind] += 1
                if kind not in GOOD:
                    failures.append((name, kind, text))
                if args.verbose or kind not in GOOD:
                    print(f"{kind}: {name} ({seconds:.1f} s)\n    {text[:600]}", flush=True)
        finally:
            pool.close()
    print(
        f"\nseed {args.seed}: {len(names)} cases in {(time.monotonic() - begin) / 60:.1f} minutes"
    )
    for kind in dict.fromkeys([*GOOD, *KINDS, *counts]):
        print(f"{counts[kind]:6}  {kind}")
    drawn = f" --random {args.random}" if args.random else ""
    for name, _, _ in failures:
        print(f"python -m tools.campaigns.fuzz --seed {args.seed}{drawn} --case {name!r}")
    return int(bool(failures))


KINDS = (
    "tracebacks", "too long", "wrongly accepted", "wrongly refused", "lost files",
    "not one line", "does not name it", "run folders left behind",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
