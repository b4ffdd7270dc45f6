"""Trains a model: python train.py --config configs/quickstart_train.yaml --train.lr=1e-4"""

import sys

from lcjax import distributed
from lcjax.training import TrainConfig, run

if __name__ == "__main__":
    sys.exit(distributed.main(TrainConfig, run, agreed_stop=True))
