"""The config of `eval.py`."""

import dataclasses

from lcjax.attention import Pattern
from lcjax.checkpoints.build import ModelSection
from lcjax.config import RunFolder
from lcjax.data import TextConfig
from lcjax.errors import InputError
from lcjax.evaluation.split import ContextSplit, ReplugSplit
from lcjax.evaluation.task import Task
from lcjax.evaluation.tasks import Perplexity
from lcjax.parallel.distributed import Distributed
from lcjax.parallel.sharding import Mesh
from lcjax.rope import Rope


@dataclasses.dataclass(frozen=True)
class Method:
    """One row of a table: the model as it is, or with another position method or checkpoint."""

    name: str
    rope: Rope | None = None  # null: the checkpoint's own
    pattern: Pattern | None = None  # null: the checkpoint's own
    path: str | None = None  # another checkpoint than model.path, such as a training run
    # How windows are cut for a model with a memory; null: as CEPE's Table 1 has it.
    context: ContextSplit | None = None
    replug: ReplugSplit | None = None  # or read chunk by chunk by any model; null: not so
    # Instead of path, in a study: what is trained first, as keys over study.extend, such as
    # [model.rope.type=yarn, model.rope.factor=4]; null: nothing
    train: tuple[str, ...] | None = None

    def __post_init__(self):
        if self.context is not None and self.replug is not None:
            raise InputError(
                f"methods: {self.name} has context and replug, two ways to read what is beside the"
                " decoder's text; give one"
            )


@dataclasses.dataclass(frozen=True)
class Study:
    """Trainings that come before the evaluation, and are done once."""

    base: str | None = None  # config of train.py that makes the model; null: model.path is there
    extend: str | None = None  # config of train.py for every method with `train`, from that model
    # Configs of train.py that come first, in this order, each in the run folder that it names:
    # parts of the models, such as an encoder, which later ones and model.path find there
    stages: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RunSection(RunFolder):
    """Where records, tables and figures go."""

    folder: str = "runs/eval"


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Which methods are compared, on what, at which lengths."""

    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    study: Study | None = None  # what is trained first where it is not there yet
    methods: tuple[Method, ...] = (Method("base"),)  # rows of the tables, in this order
    tasks: tuple[Task, ...] = (Perplexity(),)  # what is measured
    lengths: tuple[int, ...] = (1024, 2048, 4096)  # context lengths in tokens, everything counted
    data: TextConfig = dataclasses.field(default_factory=TextConfig)
    # Rows of a batch lie over data x fsdp (a batch with fewer leaves devices without work of their
    # own), weights over fsdp x tensor.
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    distributed: Distributed = dataclasses.field(default_factory=Distributed)
    stride: int = 256  # tokens from one perplexity window to the next
    max_documents: int | None = None  # of the corpus; null: all that are long enough
    max_windows: int | None = None  # perplexity windows per length; null: all
    batch_size: int = 1  # windows that run at once; like mesh, may change when a run is resumed
    seed: int = 0  # of random choices: keys, places, which windows
    run: RunSection = dataclasses.field(default_factory=RunSection)
