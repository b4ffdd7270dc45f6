"""Trains a model: python train.py --config configs/quickstart_train.yaml --train.lr=1e-4

With --compile_only --topology v5e:4x4 it only compiles the training step for these devices, on any
machine, and prints its cost like `python -m lcjax.cost --compiled --programs train`:

    python train.py --config configs/quickstart_train.yaml --compile_only --topology v5e:2x2
"""

import sys

from lcjax.training.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
