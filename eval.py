"""Compares methods over lengths: python eval.py --config configs/quickstart_eval.yaml"""

import sys

from lcjax.evaluation.command import main

if __name__ == "__main__":
    sys.exit(main())
