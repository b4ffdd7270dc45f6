"""Compares methods over lengths: python eval.py --config configs/quickstart_eval.yaml"""

import sys

from lcjax import config
from lcjax.evaluation import EvalConfig, run

if __name__ == "__main__":
    sys.exit(config.main(EvalConfig, run))
