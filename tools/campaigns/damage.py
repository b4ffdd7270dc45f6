"""Flips bits, cuts and exchanges files of every kind of folder: `python -m tools.campaigns.damage`.

Each case damages one file of a copy. It must be refused when the folder is opened, in one line, or
be found by `python -m lcjax.check`; anything else is printed with its number, and exits with 1.
"""

import argparse
import collections
import contextlib
import io
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from test_check import KINDS, damaged_copies, outcome

from lcjax import files
from lcjax.checkpoints import orbax_io
from lcjax.retrieval import datastore


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=300, help="of each kind of folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=KINDS, help="repeatable; default: all")
    parser.add_argument(
        "--large", action="store_true", help="as if all files were too large to compare on opening"
    )
    args = parser.parse_args()
    if args.large:
        files.SMALL = datastore.SMALL = -1
    warnings.simplefilter("ignore")
    orbax_io._PAUSE, num_failed = 0, 0
    for kind in args.kind or KINDS:
        counts = collections.Counter()
        with tempfile.TemporaryDirectory() as folder:
            num_failed += run(kind, Path(folder), args.cases, args.seed, counts)
        print(kind, dict(counts), flush=True)
    return 1 if num_failed else 0


def run(kind: str, folder: Path, cases: int, seed: int, counts: collections.Counter) -> int:
    make, open_it = KINDS[kind]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        make(folder / "whole")
    expected, num_failed = open_it(folder / "whole"), 0
    copies = damaged_copies(folder / "whole", folder / "copy", cases, seed)
    for number, (what, copy) in enumerate(copies):
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                result = outcome(copy, open_it, expected)
        except Exception:
            result = f"traceback: {traceback.format_exc().splitlines()[-1]}"
        counts[f"found by {result}" if result in ("opening", "check") else result] += 1
        if result not in ("opening", "check"):
            num_failed += 1
            print(f"{kind} --seed {seed}, case {number}, {what}: {result}", flush=True)
    return num_failed


if __name__ == "__main__":
    sys.exit(main())
