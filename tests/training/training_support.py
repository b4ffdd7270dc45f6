"""A run that takes seconds: the tiny preset with a byte tokenizer on a toy corpus."""

import contextlib
import random

import jax

from lcjax.checkpoints.build import ModelSection
from lcjax.data import DataConfig
from lcjax.parallel.sharding import Mesh
from lcjax.training.tracking import read
from lcjax.training.train_config import RunSection, TrainConfig, TrainSection

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "rat", "at", "dawn"]
STEPS = 12


def compile_quickly(cache):
    """Turns off XLA's optimisations and caches compiled programs in the folder `cache`.

    Returns the previous settings. None of these tests depends on how fast the code runs.
    """
    settings = {
        "jax_compilation_cache_dir": str(cache),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_disable_most_optimizations": True,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    return before


@contextlib.contextmanager
def quick_compilation(cache):
    before = compile_quickly(cache)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def write_corpus(folder):
    """40 documents of a few common words: something a tiny model learns in a few steps."""
    folder.mkdir(parents=True, exist_ok=True)
    pick = random.Random(0)
    for index in range(40):
        text = " ".join(pick.choice(WORDS) for _ in range(120))
        (folder / f"{index:02}.txt").write_text(text)
    return folder


def losses(folder):
    """The loss of every step that the run of `folder` has logged."""
    return {row["step"]: row["loss"] for row in read(folder / "metrics.jsonl") if "loss" in row}


def tiny(folder, corpus, *, data=None, model=None, run=None, mesh=None, **train):
    """A config of 12 steps on eight devices; keywords go to the section `train:`."""
    settings = {
        "steps": STEPS,
        "batch_size": 8,
        "lr": 3e-3,
        "warmup_steps": 2,
        "log_every": 1,
        "save_every": 4,
    }
    data = {"path": str(corpus), "length": 32, "threads": 0, "prefetch": 0} | (data or {})
    return TrainConfig(
        model=ModelSection(**(model or {"preset": "tiny"})),
        data=DataConfig(**data),
        train=TrainSection(**settings | train),
        mesh=mesh or Mesh(data=2, fsdp=2, tensor=2),
        run=RunSection(folder=str(folder), **(run or {})),
    )
