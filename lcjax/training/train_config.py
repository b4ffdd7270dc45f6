"""The configuration of `train.py`, and the rules that select parameters by their paths."""

import abc
import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import draccus
import jax

from lcjax.attention import Pattern
from lcjax.attention.head_gates import HEAD_GATE, HeadGates
from lcjax.checkpoints.build import ModelSection
from lcjax.config import RunFolder
from lcjax.data import DataConfig
from lcjax.errors import (
    INT32_MAX,
    Fraction,
    InputError,
    Interval,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Seed,
    check_fields,
)
from lcjax.models.distill import Distill
from lcjax.models.lora import LoRA
from lcjax.models.weight_storage import kernel_of
from lcjax.parallel.device_memory import TRAINING, Offload
from lcjax.parallel.distributed import Distributed
from lcjax.parallel.sharding import Mesh
from lcjax.rope.positions import PlainPositions, Positions

if TYPE_CHECKING:
    from lcjax.training.training_task import Task

# Names of common rules. All other rules are regular expressions that are searched in the path.
NAMED_RULES = {
    "all": r"",
    "lora": r"(^|/)lora_[ab]$",
    # Input embeddings, as in LongLoRA; with tied embeddings also the head. Paths of a retriever's
    # two encoders begin with their names. Not the second table of a model with `layer_embedding`,
    # which PEFT does not train as embed_tokens either.
    "embeddings": r"^((query|passage)/)?embed/",
    "head": r"^head/",
    # Also numbers of layers, experts and branches of attention
    "norms": r"norm[/_](scale|bias)$|(^|/)(output|expert|branch)_scale$",
    "rope": r"^rope/",
    "encoder": r"^encoder/",
    "cross_attention": r"(^|/)memory/",
    "memory": r"^encoder/|(^|/)memory/",  # all parameters that a memory adds to a decoder
    "pattern": r"/attention/pattern/",  # all parameters that a pattern adds to layers
    "head_gates": rf"(^|/){HEAD_GATE}$",
    "retriever": r"^retriever/",  # an encoder that is trained beside a language model
}

_HINTS = {
    "lora": "set train.lora too",
    "head_gates": "set train.head_gates too",
    "head": "this model's head is its embedding, for which the rule is embeddings",
}

# Decay of a moving average, which would never change with a decay of 1.
Decay = Annotated[float, Interval(least=0, below=1, hint="such as 0.999")]


def matcher(rules: Iterable[str], key: str) -> Callable[[str], bool]:
    """Returns a predicate that is true for parameter paths which match any of the rules.

    Args:
      rules: keys of `NAMED_RULES`, or regular expressions.
      key: the config field that holds the rules; used in error messages.

    Raises:
      InputError: if a rule is not a valid regular expression.
    """
    patterns = []
    for rule in rules:
        try:
            patterns.append(re.compile(NAMED_RULES.get(rule, rule)))
        except re.error as error:
            raise InputError(
                f"{key}: rule {rule!r} is no regular expression ({error}); "
                f"names: {', '.join(NAMED_RULES)}"
            ) from None
    return lambda path: any(pattern.search(path) for pattern in patterns)


def trainable(
    paths: Iterable[str], rules: Iterable[str], key: str = "train.trainable"
) -> Callable[[str], bool]:
    """Returns `matcher(rules, key)`, after a check that every rule matches one of the paths.

    Only the trainable tree is differentiated. Frozen parameters have no gradient and no moments,
    and checkpoints do not contain them.

    Raises:
      InputError: if a rule matches none of the paths, or one whose kernel is stored as codes.
    """
    paths, rules = list(paths), tuple(rules)
    selects = matcher(rules, key)
    for path in paths:
        if (kernel := kernel_of(path)) is not None and (selects(kernel) or selects(path)):
            raise InputError(
                f"{key}={list(rules)} selects {kernel}, which model.weights stores as codes, and"
                " codes cannot be trained; train adapters on them (--train.lora.rank=8, and the"
                " rule lora), or leave model.weights out"
            )
    for rule in rules:
        if not any(map(matcher((rule,), key), paths)):
            near = difflib.get_close_matches(rule, [*NAMED_RULES, *paths], n=3, cutoff=0.3)
            hint = _HINTS.get(rule) or f"near: {', '.join(near) or 'all'}"
            raise InputError(f"{key}: rule {rule!r} matches no parameter; {hint}")
    return matcher(rules, key)


@dataclass(frozen=True)
class Profile:
    """A profiler trace of some steps in `<run>/profile`, for xprof or Perfetto."""

    start: PositiveInt = 10  # first step of the trace; compilation is over by then
    steps: PositiveInt = 3

    def __post_init__(self):
        check_fields("train.profile", self)


@dataclass(frozen=True)
class Rate:
    """A multiple of the learning rate for the parameters that match a rule."""

    rule: str  # as in train.trainable
    # Times train.lr
    factor: Annotated[
        float, Interval(above=0, hint="to freeze parameters, leave them out of train.trainable")
    ]

    def __post_init__(self):
        check_fields("train.rates", self)
        matcher((self.rule,), "train.rates")


@dataclass(frozen=True)
class TrainSection:
    """The optimizer, its schedule, and what a run saves."""

    steps: PositiveInt = 1000  # number of updates
    batch_size: PositiveInt = 8  # rows per update, over all devices and microbatches
    accumulation: PositiveInt = 1  # microbatches per update; more of them need less memory
    lr: PositiveFloat = 2e-5  # the highest learning rate
    schedule: Literal["cosine", "linear", "constant", "lceg"] = "cosine"  # after the warm-up
    warmup_steps: NonNegativeInt = 20
    min_lr: Fraction = 0.0  # final value of cosine and linear, as a fraction of lr
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Interval(least=0, most=10)] = 0.0
    # Rules of parameters without decay; as in Hugging Face and LLaMA, norms and biases.
    no_decay: tuple[str, ...] = ("norms", r"(^|/)bias$", "rope")
    # Multiples of lr for some parameters, such as {rule: rope, factor: 0.01}. The first rule that
    # matches a path decides.
    rates: tuple[Rate, ...] = ()
    clip: PositiveFloat | None = 1.0  # largest global norm of the gradient; null: none
    ema: Decay | None = None  # decay of the weights' moving average, such as 0.999
    # Rules that select the trained parameters: all, lora, embeddings (of the input; if tied, also
    # the head), head, norms, rope, encoder, cross_attention, memory (encoder and cross_attention:
    # all that a memory adds), pattern (all that an attention pattern adds), retriever (an encoder
    # that is trained beside the model), or regular expressions on parameter paths. Empty: lora if
    # train.lora is set, else all.
    # LongLoRA's "LoRA+" is [lora, embeddings, norms]; LoRA+ is also the name of another method.
    trainable: tuple[str, ...] = ()
    lora: LoRA | None = None  # adds low-rank adapters to kernels
    distill: Distill | None = None  # distillation; needs data.sources of type teacher
    # Trains gates of key heads, the scores of model.cache.type=duo_attention, and nothing else
    head_gates: HeadGates | None = None
    positions: Positions = field(default_factory=PlainPositions)  # position ids of training tokens
    on_nan: Literal["stop", "skip"] = "stop"  # when a loss or gradient is not finite
    # Skips updates whose gradient norm is more than this multiple of its running average, such as
    # 5; null: skips none.
    spike: Annotated[float, Interval(above=1, hint="such as 5; null skips none")] | None = None
    # Arrays that are stored in the host's memory and fetched layer by layer: none, optimizer
    # (Adam's moments and the moving average) or parameters (the weights as well, including frozen
    # ones; needs model.remat). The device holds one or two layers of them at a time; gradients stay
    # on the device. Saves 8 bytes per trained parameter (12 with ema), or all weights as well. Each
    # update transfers as many bytes in both directions, and with parameters every microbatch also
    # transfers each weight twice.
    offload: Offload = "none"
    seed: Seed = 0  # of new weights and of sampled positions
    loss_chunk: PositiveInt | None = None  # positions per chunk of logits; null: chosen by size
    log_every: PositiveInt = 10
    save_every: PositiveInt = 500  # steps between checkpoints
    # Also saves when so many minutes have passed since the last checkpoint, such as 10 on machines
    # that may be taken away; null: never. Several processes check it at steps of log_every.
    save_minutes: PositiveFloat | None = None
    # Number of newest checkpoints to keep, beside the newest one whose next step was finite.
    keep: PositiveInt = 2
    export: bool = True  # write <run>/model, a Hugging Face folder, at the end
    checksums: bool = True  # add SHA-256 sums to <run>/model and <run>/adapter
    # Dtype of <run>/model; null: model.param_dtype, or the dtype of the checkpoint.
    export_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    profile: Profile | None = None

    def __post_init__(self):
        check_fields("train", self)
        if self.profile is not None and self.profile.start + self.profile.steps > self.steps:
            raise InputError(
                f"train.profile.start={self.profile.start} with steps={self.profile.steps} ends"
                f" after train.steps={self.steps}; lower them"
            )
        if self.batch_size % self.accumulation:
            nearest = _nearest_divisor(self.batch_size, self.accumulation)
            raise InputError(
                f"train.accumulation={self.accumulation} must divide train.batch_size="
                f"{self.batch_size}; nearest: {nearest}"
            )
        if self.warmup_steps > self.steps:
            raise InputError(
                f"train.warmup_steps={self.warmup_steps} must lie in 0 ... train.steps={self.steps}"
            )
        for name in ("lora", "distill", "trainable") if self.head_gates is not None else ():
            if getattr(self, name):
                raise InputError(
                    f"train.head_gates trains gates alone, and train.{name} something else; leave"
                    " one of the two out"
                )
        for name in ("trainable", "no_decay"):
            matcher(getattr(self, name), f"train.{name}")

    def rules(self) -> tuple[str, ...]:
        """Returns `trainable`, or its default if it is empty."""
        if self.trainable:
            return self.trainable
        is_set = {"lora": self.lora is not None, "head_gates": self.head_gates is not None}
        return tuple(name for name, value in is_set.items() if value) or ("all",)


@dataclass(frozen=True)
class RunSection(RunFolder):
    """The folder for checkpoints, metrics and the trained model."""

    folder: str = "runs/train"
    accept: tuple[str, ...] = ()  # keys that may differ from the run that is resumed


@dataclass(frozen=True)
class EvalSection:
    """Loss on the held-out documents (`data.holdout`) during training."""

    # Steps between evaluations, with one before the first step; 0: never
    every: NonNegativeInt = 0
    # Of train.batch_size rows; null: all
    batches: Annotated[int, Range(1, hint="null takes all")] | None = 16

    def __post_init__(self):
        check_fields("eval", self)


@dataclass(frozen=True)
class TrackSection:
    """Destinations of metrics besides <run>/metrics.jsonl."""

    tensorboard: bool = False  # event files in <run>/tensorboard (extra: tensorboard)
    wandb: str | None = None  # project name on Weights & Biases (extra: wandb)


@dataclass(frozen=True)
class RetrieverTraining(draccus.ChoiceRegistry, abc.ABC):
    """The section `retriever`: trains an encoder of queries and passages.

    The types are registered by the modules that `lcjax.plugins` imports.
    """

    @classmethod
    def get_known_choices(cls) -> dict[str, Any]:
        # By name and on first use: plug-ins import this package.
        import_module("lcjax.plugins")
        return super().get_known_choices()

    @abc.abstractmethod
    def make_task(self, config: "TrainConfig", mesh: jax.sharding.Mesh) -> "Task":
        """Returns the task of a run; nothing is loaded yet.

        Args:
          config: config of the run; its `retriever` is this section.
          mesh: the devices.
        """


@dataclass(frozen=True)
class TrainConfig:
    """A training: the model, its text, its steps, its devices and its run folder."""

    out_of_memory: ClassVar[tuple[str, ...]] = TRAINING
    model: ModelSection = field(default_factory=ModelSection)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainSection = field(default_factory=TrainSection)
    mesh: Mesh = field(default_factory=Mesh)
    distributed: Distributed = field(default_factory=Distributed)
    run: RunSection = field(default_factory=RunSection)
    eval: EvalSection = field(default_factory=EvalSection)
    track: TrackSection = field(default_factory=TrackSection)
    retriever: RetrieverTraining | None = None  # null: a language model is trained

    def __post_init__(self):
        if self.model.dtype == "float16":
            raise InputError(
                "model.dtype='float16' cannot be trained: its gradients underflow; use bfloat16"
            )
        num_tokens = self.train.batch_size * self.data.length
        if num_tokens > INT32_MAX:
            raise InputError(
                f"train.batch_size={self.train.batch_size} x data.length={self.data.length} is"
                f" {num_tokens:,} tokens for one update, at most {INT32_MAX:,} can be counted;"
                " lower one of them"
            )
        kinds = self.model.layers or ()
        for pattern in (self.model.pattern, *(kind.pattern for kind in kinds)):
            if pattern is None or pattern.is_causal:
                continue
            kind = Pattern.get_choice_name(type(pattern))
            way_out = "; its own parameters learn with dense: true" if pattern.parameters else ""
            raise InputError(
                f"model.pattern.type={kind} is for reading prompts only: it selects keys by later"
                f" queries, which is not causal, so nothing can be trained under it{way_out}"
            )
        if self.model.param_dtype == "float16":
            raise InputError(
                "model.param_dtype='float16' cannot be trained from: weights of other checkpoints"
                " leave its range; use float32 or bfloat16, or null for the checkpoint's own"
            )
        if self.train.offload == "parameters" and self.model.remat == "none":
            raise InputError(
                "train.offload=parameters fetches weights again for the backward pass, and"
                " model.remat=none would keep them all; set model.remat to full, attention, dots or"
                " offload"
            )
        if self.eval.every and not self.data.holdout:
            raise InputError(
                f"eval.every={self.eval.every} needs held-out documents; set data.holdout, as 0.01"
            )

    def replace(self, **changes) -> "TrainConfig":
        return dataclasses.replace(self, **changes)


def _nearest_divisor(number: int, target: int) -> int:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min((*small, *(number // d for d in small)), key=lambda d: (abs(d - target), d))
