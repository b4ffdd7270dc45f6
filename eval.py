"""Compares methods over lengths: python eval.py --config configs/quickstart_eval.yaml

python eval.py report RUN, score RUN, compare RUN RUN and make-data --config FILE work on what is
there already; python eval.py report --help shows them all.
"""

import sys

from lcjax.evaluation.cli import main

if __name__ == "__main__":
    sys.exit(main())
