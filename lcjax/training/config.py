"""The YAML sections of `train.py`."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from lcjax.attention import Pattern
from lcjax.checkpoints.build import ModelSection
from lcjax.config import RunFolder
from lcjax.data import DataConfig
from lcjax.errors import InputError, whole_number, whole_numbers
from lcjax.models.distill import Distill
from lcjax.models.lora import LoRA
from lcjax.parallel.distributed import Distributed
from lcjax.parallel.offload import Offload
from lcjax.parallel.sharding import Mesh
from lcjax.rope.positions import PlainPositions, Positions
from lcjax.training.partition import matcher


@dataclass(frozen=True)
class Profile:
    """A trace of some steps for xprof or Perfetto, in `<run>/profile`."""

    start: int = 10  # first step of the trace; compilation is over by then
    steps: int = 3

    def __post_init__(self):
        whole_numbers("train.profile", self, 1, "start", "steps")


@dataclass(frozen=True)
class Rate:
    """A learning rate of its own for some parameters."""

    rule: str  # as in train.trainable
    factor: float  # times train.lr

    def __post_init__(self):
        matcher((self.rule,), "train.rates")
        if not self.factor > 0:
            raise InputError(
                f"train.rates: factor={self.factor} of rule {self.rule!r} must be above 0; what is"
                " not to be trained is left out of train.trainable"
            )


_USUAL = {"betas": "[0.9, 0.999]", "ema": "0.999"}


@dataclass(frozen=True)
class TrainSection:
    """How the weights change."""

    steps: int = 1000  # updates in all
    batch_size: int = 8  # rows per update, over all devices and microbatches
    accumulation: int = 1  # microbatches that an update is split into, to save memory
    lr: float = 2e-5  # the highest learning rate
    schedule: Literal["cosine", "linear", "constant", "lceg"] = "cosine"  # after the warm-up
    warmup_steps: int = 20
    min_lr: float = 0.0  # where cosine and linear end, as a fraction of lr
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    # Rules for parameters without decay: Hugging Face's and LLaMA's practice, norms and biases.
    no_decay: tuple[str, ...] = ("norms", r"(^|/)bias$", "rope")
    # Learning rates of their own, such as {rule: rope, factor: 0.01}; the first that holds decides
    rates: tuple[Rate, ...] = ()
    clip: float | None = 1.0  # largest global norm of the gradient; null: none
    ema: float | None = None  # decay of a running average of the weights, such as 0.999; below 1
    # What is trained: rules out of all, lora, embeddings (of the input; where tied, the head, too),
    # head, norms, rope, encoder, cross_attention, memory (these two: all that a memory adds), or
    # regular expressions on parameter paths. Empty: lora where train.lora is set, else all.
    # LongLoRA trains [lora, embeddings, norms]; it calls that LoRA+, as another method is called.
    trainable: tuple[str, ...] = ()
    lora: LoRA | None = None  # adapters beside the kernels
    distill: Distill | None = None  # learns from a teacher, too: data.sources of type teacher
    positions: Positions = field(default_factory=PlainPositions)  # where training tokens stand
    on_nan: Literal["stop", "skip"] = "stop"  # a loss or gradient that is not finite
    # Updates whose gradient is so many times as long as usual are left out, such as 5; null: none
    spike: float | None = None
    # What waits in the host's memory, from which every update fetches it layer by layer: optimizer
    # (Adam's moments and the average) or parameters (these and the weights, frozen ones, too; needs
    # model.remat). Of it a device has a layer or two at a time; gradients stay there. Saves 8 bytes
    # a trained number (12 with ema), or all weights, too. Costs the link to the host as many in
    # both directions for every update, and with parameters every weight twice a microbatch.
    offload: Offload = "none"
    seed: int = 0  # of new weights and of sampled positions
    loss_chunk: int | None = None  # positions projected to the vocabulary at once; null: fitting
    log_every: int = 10
    save_every: int = 500
    keep: int = 2  # newest checkpoints that are kept
    export: bool = True  # write <run>/model, a Hugging Face folder, at the end
    # Of the weights in <run>/model; null: model.param_dtype, or what the checkpoint is stored in.
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    profile: Profile | None = None

    def __post_init__(self):
        counts = ("steps", "batch_size", "accumulation", "log_every", "save_every", "keep")
        whole_numbers("train", self, 1, *counts, "loss_chunk")
        for name in ("lr", "eps", "clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"train.{name}={value} must be above 0")
        if self.batch_size % self.accumulation:
            nearest = _nearest_divisor(self.batch_size, self.accumulation)
            raise InputError(
                f"train.accumulation={self.accumulation} must divide train.batch_size="
                f"{self.batch_size}; nearest: {nearest}"
            )
        if not 0 <= self.warmup_steps <= self.steps:
            raise InputError(
                f"train.warmup_steps={self.warmup_steps} must lie in 0 ... train.steps={self.steps}"
            )
        for name, high in (("min_lr", 1), ("weight_decay", 10)):
            if not 0 <= getattr(self, name) <= high:
                raise InputError(f"train.{name}={getattr(self, name)} must lie in 0 ... {high}")
        # A decay of 1 would never let go of the first value.
        for name, decays in (("betas", self.betas), ("ema", [self.ema or 0.0])):
            if not all(0 <= decay < 1 for decay in decays):
                raise InputError(
                    f"train.{name}={getattr(self, name)} must be at least 0 and below 1, such as"
                    f" {_USUAL[name]}"
                )
        if self.spike is not None and not self.spike > 1:
            raise InputError(
                f"train.spike={self.spike} must be above 1, such as 5, or null: it is a multiple of"
                " the gradient's usual norm"
            )
        for name in ("trainable", "no_decay"):
            matcher(getattr(self, name), f"train.{name}")

    def rules(self) -> tuple[str, ...]:
        """`trainable`, with what an empty list stands for."""
        return self.trainable or (("lora",) if self.lora is not None else ("all",))


@dataclass(frozen=True)
class RunSection(RunFolder):
    """Where checkpoints, metrics and the model go."""

    folder: str = "runs/train"
    accept: tuple[str, ...] = ()  # keys that may differ from the run that is resumed


@dataclass(frozen=True)
class EvalSection:
    """Loss on the held-out documents (`data.holdout`) while training."""

    every: int = 0  # steps; 0: never
    batches: int | None = 16  # of train.batch_size rows; null: all

    def __post_init__(self):
        whole_numbers("eval", self, 0, "every")
        if self.batches is not None:
            whole_number("eval.batches", self.batches, 1, "null takes all")


@dataclass(frozen=True)
class TrackSection:
    """Where metrics go besides <run>/metrics.jsonl."""

    tensorboard: bool = False  # event files in <run>/tensorboard (extra: tensorboard)
    wandb: str | None = None  # project name on Weights & Biases (extra: wandb)


@dataclass(frozen=True)
class TrainConfig:
    """Everything that `train.py` reads."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainSection = field(default_factory=TrainSection)
    mesh: Mesh = field(default_factory=Mesh)
    distributed: Distributed = field(default_factory=Distributed)
    run: RunSection = field(default_factory=RunSection)
    eval: EvalSection = field(default_factory=EvalSection)
    track: TrackSection = field(default_factory=TrackSection)

    def __post_init__(self):
        if self.model.dtype == "float16":
            raise InputError(
                "model.dtype='float16' cannot be trained: its gradients underflow; use bfloat16"
            )
        pattern = self.model.pattern
        if pattern is not None and pattern.prefill_only:
            kind = Pattern.get_choice_name(type(pattern))
            raise InputError(
                f"model.pattern.type={kind} lets later tokens choose what earlier ones see, so"
                " nothing can be trained under it; it is for reading prompts"
            )
        if self.model.param_dtype == "float16":
            raise InputError(
                "model.param_dtype='float16' cannot be trained from: weights of other checkpoints"
                " leave its range; use float32 or bfloat16, or null for the checkpoint's own"
            )
        if self.train.offload == "parameters" and self.model.remat == "none":
            raise InputError(
                "train.offload=parameters fetches weights again for the backward pass, and"
                " model.remat=none would keep them all; set model.remat to full, attention or dots"
            )
        if self.eval.every and not self.data.holdout:
            raise InputError(
                f"eval.every={self.eval.every} needs held-out documents; set data.holdout, as 0.01"
            )

    def replace(self, **changes) -> "TrainConfig":
        return dataclasses.replace(self, **changes)


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: abs(d - wanted))
