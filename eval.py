"""Compares methods over lengths: python eval.py --config configs/quickstart_eval.yaml"""

import sys

from lcjax import distributed
from lcjax.evaluation import EvalConfig, run

if __name__ == "__main__":
    sys.exit(distributed.main(EvalConfig, run))
