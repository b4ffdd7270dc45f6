"""Compares methods over lengths: python -m lcjax.evaluation --config lcjax:quickstart_eval"""

import sys

from lcjax.evaluation.command import main

if __name__ == "__main__":
    sys.exit(main())
