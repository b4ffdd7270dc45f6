"""Trains a model: python -m lcjax.training --config lcjax:quickstart_train --train.lr=1e-4

With --compile_only --topology v5e:4x4 it only compiles the training step for these devices, on any
machine, and prints its memory and time, as `python -m lcjax.cost --compiled --programs train`.
"""

import sys
from collections.abc import Sequence

from lcjax.parallel import distributed
from lcjax.training import TrainConfig, run

COMPILE_ONLY = "--compile_only"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `train.py`, `lcjax-train` or `python -m lcjax.training`; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if COMPILE_ONLY in words:
        from lcjax.cost import __main__ as cost  # not at the start of every training

        words.remove(COMPILE_ONLY)
        return cost.main([cost.COMPILED, "--programs=train", *words])
    return distributed.main(TrainConfig, run, words, agreed_stop=True)


if __name__ == "__main__":
    sys.exit(main())
