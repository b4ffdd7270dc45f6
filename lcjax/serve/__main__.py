"""Serves a model with OpenAI's HTTP API: python -m lcjax.serve --model smollm2-135m-instruct"""

import sys

from lcjax.serve.command import main

if __name__ == "__main__":
    sys.exit(main())
