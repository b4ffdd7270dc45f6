"""`python -m lcjax.cost --config X --length 131072 --topology v5e:16x16`: memory, speed, hours.

Nothing is loaded or compiled. `--length` (default: data.length) and `--mfu` (default: 0.4) may be
given; every other key is one of train.py's.
"""

import sys

import lcjax.retrieval  # noqa: F401  registers the types of the section `retriever`
from lcjax.training import estimate

if __name__ == "__main__":
    sys.exit(estimate.main())
