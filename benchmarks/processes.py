"""Runs each measurement in a process of its own, so that its peak memory is measured alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
EXPORT = (
    "from lcjax import checkpoints; import sys;"
    "checkpoints.save_hf(sys.argv[1], *checkpoints.load('smollm2-135m-instruct'))"
)


def python(*words: str, **environment: str) -> str:
    """Runs Python with these arguments and this repository on its path; returns its output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return done.stdout


def measured(*words: str, **environment: str) -> dict:
    """Runs Python with these arguments; returns the JSON in the last line of its output."""
    return json.loads(python(*words, **environment).splitlines()[-1])


def export(folder: str) -> None:
    """Writes SmolLM2-135M-Instruct as a Hugging Face folder."""
    python("-c", EXPORT, folder, **CPU)
