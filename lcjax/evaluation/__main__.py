"""Compares methods over lengths: python -m lcjax.evaluation --config lcjax:quickstart_eval"""

import sys

from lcjax.evaluation.cli import main

if __name__ == "__main__":
    sys.exit(main())
