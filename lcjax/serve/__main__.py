"""Serves a model with OpenAI's HTTP API: python -m lcjax.serve --model smollm2-135m-instruct

--model PATH is short for --model.path=PATH, and --rope.type=yarn for --model.rope.type=yarn: keys
of the section `model` may omit the prefix `model.`.
"""

import sys

from lcjax.serve.command import main

if __name__ == "__main__":
    sys.exit(main())
