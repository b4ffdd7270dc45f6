"""Trains a model: python train.py --config configs/quickstart_train.yaml --train.lr=1e-4

With --compile_only --topology v5e:4x4 it only compiles the training step for these devices, on any
machine, and prints the memory that it needs. Nothing is loaded.

    python train.py --config configs/quickstart_train.yaml --compile_only --topology v5e:2x2
"""

import sys

import lcjax.retrieval  # noqa: F401  registers the types of the section `retriever`
from lcjax.parallel import distributed
from lcjax.training import TrainConfig, compile_only, run

if __name__ == "__main__":
    if compile_only.FLAG in sys.argv:
        sys.exit(compile_only.main())
    sys.exit(distributed.main(TrainConfig, run, agreed_stop=True))
