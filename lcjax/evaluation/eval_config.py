"""The config of `eval.py`, and the model, weights and tokenizer of each method."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import draccus
import numpy as np

from lcjax.attention import CacheMethod, Pattern
from lcjax.checkpoints import ByteTokenizer
from lcjax.checkpoints.build import ModelSection, model_config
from lcjax.checkpoints.load import identity, load_tokenizer
from lcjax.config import RunFolder, check_choices
from lcjax.data import TextConfig
from lcjax.data.corpus import texts_or_ids
from lcjax.errors import InputError, NonNegativeFloat, OneOf, PositiveInt, Seed, check_fields
from lcjax.evaluation.corpus import TokenizedCorpus
from lcjax.evaluation.report.published import Published
from lcjax.evaluation.retrieval import Knn, RetrievalMethod
from lcjax.evaluation.split import ContextSplit, ReplugSplit, Split
from lcjax.evaluation.task import Task
from lcjax.evaluation.tasks import Perplexity
from lcjax.generation.shared_prefix import QueryAgnostic, QueryAware, check_compresses_prefix
from lcjax.memory import MemorySection
from lcjax.models import PRESETS, ModelConfig
from lcjax.models.cache import abstract_cache
from lcjax.parallel.distributed import Distributed
from lcjax.parallel.sharding import Mesh
from lcjax.rope import Rope


@dataclasses.dataclass(frozen=True)
class Method:
    """One row of a table: the model, with an optional position method, pattern or checkpoint."""

    name: str
    rope: Rope | None = None  # null: the checkpoint's own
    pattern: Pattern | None = None  # null: the checkpoint's own
    cache: CacheMethod | None = None  # what layers keep of a text; null: that of model.cache
    # seen: a cache policy cuts at the end of a prompt. unseen: at the end of its documents, before
    # it sees the question. window: at the end, and what follows the documents is its window (Finch)
    question: Annotated[str, OneOf(("seen", "unseen", "window"))] = "seen"
    path: str | None = None  # another checkpoint than model.path, such as a training run
    # Another memory than model.memory, to measure time and memory use: weights that the checkpoint
    # lacks are random; null: the model's
    memory: MemorySection | None = None
    # How windows are split for a model with a memory; null: as in CEPE's Table 1.
    context: ContextSplit | None = None
    replug: ReplugSplit | None = None  # how REPLUG splits windows, for any model; null: no REPLUG
    # The method's own retriever of passages for every text or prompt; null: none
    retrieval: RetrievalMethod | None = None
    knn: Knn | None = None  # next tokens of similar contexts of a datastore (kNN-LM); null: none
    # In a study, instead of path: keys that override study.extend for the training of this model,
    # such as [model.rope.type=yarn, model.rope.factor=4]; null: no training. Methods with the same
    # keys share the training of the first of them
    train: tuple[str, ...] | None = None

    def __post_init__(self):
        names = ("context", "replug", "retrieval", "knn")
        ways = [name for name in names if getattr(self, name) is not None]
        if len(ways) > 1:
            raise InputError(
                f"methods: {self.name} sets {' and '.join(ways)}, of which only one can be set"
            )
        check_choices("methods", self)
        check_fields("methods", self)
        if self.question != "seen" and ways:
            raise InputError(
                f"methods: {self.name} sets question={self.question}, and {ways[0]}, which reads"
                " documents apart from the prompt; leave one of them out"
            )

    @property
    def retriever(self) -> RetrievalMethod | Knn | None:
        """The section of retrieval or kNN-LM, if any; such a method has no `Split`."""
        return self.retrieval or self.knn


@dataclasses.dataclass(frozen=True)
class Study:
    """Trainings that run once, before the evaluation."""

    base: str | None = None  # config of train.py that makes the model; null: use model.path
    # Config of train.py for methods with `train`. They begin with the model of this evaluation;
    # without `base`, with the model.path that the config or `train` names. Keys may follow, as on a
    # command line: mine.yaml --train.steps=9
    extend: str | None = None
    # Configs of train.py that run first, in this order, each in its own run folder. They train
    # parts of models, such as an encoder, that later configs and model.path load from there. Keys
    # may follow here, too.
    stages: tuple[str, ...] = ()
    # Folder of the trainings of methods, by name; null: `trained` of run.folder. Evaluations with
    # the same folder share them.
    folder: str | None = None


@dataclasses.dataclass(frozen=True)
class RunSection(RunFolder):
    """The folder of records, tables and figures."""

    folder: str = "runs/eval"


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Methods, tasks and context lengths of an evaluation.

    `report --help` shows the other commands, which work on finished runs.
    """

    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    study: Study | None = None  # trainings that run before the evaluation
    methods: tuple[Method, ...] = (Method("base"),)  # rows of the tables, in this order
    tasks: tuple[Task, ...] = (Perplexity(),)  # the benchmarks
    lengths: tuple[int, ...] = (1024, 2048, 4096)  # context lengths in tokens, everything counted
    data: TextConfig = dataclasses.field(default_factory=TextConfig)
    # Rows of a batch are sharded over data x fsdp, weights over fsdp x tensor. A smaller batch than
    # data x fsdp is padded with filler rows.
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    distributed: Distributed = dataclasses.field(default_factory=Distributed)
    stride: PositiveInt = 256  # tokens from one perplexity window to the next
    # Maximum number of documents that are long enough; null: all
    max_documents: PositiveInt | None = None
    max_windows: PositiveInt | None = None  # perplexity windows per length; null: all
    batch_size: PositiveInt = 1  # windows per batch; like mesh, may change when a run is resumed
    # GB of memory for prompts that were read and not yet cut: methods that differ only in what
    # `cache` evicts at the end of a prompt read them once; their seconds include that reading
    readings_gb: NonNegativeFloat = 0
    seed: Seed = 0  # seed of random keys, depths and choices of windows
    published: tuple[Published, ...] = ()  # numbers of papers to show beside those of the run
    run: RunSection = dataclasses.field(default_factory=RunSection)


def corpus_of(task: Task, config: EvalConfig) -> TextConfig:
    """Returns the config of the corpus that a task reads."""
    if not task.corpus:
        return config.data
    return dataclasses.replace(config.data, path=task.corpus, sources=[])


def texts(data: TextConfig, tokenizer: Any = None) -> Iterator[tuple[str, str | np.ndarray]]:
    """Yields (name, text) of each document: of the validation split if `data` has a holdout.

    Sources of type tokens have int32 ids of `tokenizer` in place of a text.
    """
    return texts_or_ids(data, "validation" if data.holdout else "train", tokenizer)


def corpora(config: EvalConfig, tokenizer: Any) -> dict[str, TokenizedCorpus]:
    """Returns the corpus of each task by its label; tasks with the same data share one."""
    data = {task.label: corpus_of(task, config) for task in config.tasks}
    opened = {str(d): TokenizedCorpus(texts(d, tokenizer), tokenizer) for d in data.values()}
    return {label: opened[str(d)] for label, d in data.items()}


def sections(config: EvalConfig) -> list[ModelSection]:
    """Returns the model section of each method.

    A method's `path` replaces `model.path` and resets base, preset, rope, pattern, memory and
    tokenizer to their defaults, those of the new checkpoint.
    """
    defaults = dict.fromkeys(("base", "preset", "rope", "pattern", "memory", "tokenizer"))

    def section(method: Method) -> ModelSection:
        changes = {} if method.path is None else {"path": method.path, **defaults}
        changes |= {} if method.memory is None else {"memory": method.memory}
        return dataclasses.replace(config.model, **changes)

    return [section(method) for method in config.methods]


def weights(config: EvalConfig) -> dict[str, str]:
    """Returns the identity of each method's checkpoint files, for `Store.check_inputs`."""
    identities: list[str] = []
    model_sections = sections(config)
    for index, section in enumerate(model_sections):
        first = model_sections.index(section)
        identities.append(_weights_of(section) if first == index else identities[first])
    names = [f"weights of {method.name}" for method in config.methods]
    return dict(zip(names, identities, strict=True))


def datastores(config: EvalConfig) -> dict[str, str]:
    """Returns a digest of the content of each datastore, for `Store.check_inputs`."""
    users = {f"method {method.name}": method.retriever for method in config.methods}
    users |= {f"task {task.label}": getattr(task, "retriever", None) for task in config.tasks}
    return {f"datastore of {name}": x.fingerprint for name, x in users.items() if x is not None}


def encoders(config: EvalConfig) -> dict[str, str]:
    """Returns the fingerprint of the encoder of each REPLUG method, for `Store.check_inputs`.

    Raises:
      InputError: An encoder does not exist; raised before models are loaded and trained.
    """
    opened = {m.name: m.replug.opened_encoder for m in config.methods if m.replug is not None}
    return {
        f"encoder of method {name}": encoder.fingerprint
        for name, encoder in opened.items()
        if encoder is not None
    }


def _weights_of(section: ModelSection) -> str:
    encoder = section.memory and section.memory.encoder
    parts = [] if section.path is None else [identity(section.path, section.base)]
    if encoder is not None and encoder not in PRESETS:
        parts.append(identity(encoder))
    return "+".join(parts) or "random"


def tokenizer_of(section: ModelSection) -> Any:
    """Loads the tokenizer of a model section."""
    path = section.tokenizer or section.path
    if path is not None:
        return load_tokenizer(path)
    if section.preset is not None:
        return ByteTokenizer()
    raise InputError("model.path is not set; its tokenizer is needed to measure prompts")


def split_of(method: Method, model) -> Split | None:
    """Returns how `method` splits windows; None if the decoder reads whole windows."""
    if method.retriever is not None:
        return None
    has_memory = model.config.memory is not None
    return method.context or method.replug or (ContextSplit() if has_memory else None)


def apply_method(model, method: Method, length: int, *, prompts: bool = False):
    """Returns `model` with the settings of `method`, for windows of `length` tokens.

    A length-dependent rotation is the same in every window: that of `length`, or of the tokens of
    one decoder pass if a pass reads only a part of the window. With `prompts`, which have up to
    `length` tokens, it is that of each prompt with its answer, unless documents are read before.
    """
    reader = {"unseen": QueryAgnostic, "window": QueryAware}.get(method.question)
    source = method.retriever or split_of(method, model)
    choices = _choices(method)
    if source is None:
        length = None if prompts and reader is None else length
        model = model.with_method(**choices, length=length)
        return model if reader is None else reader(model)
    model = model.with_method(**choices)
    return source.reader(model, length, prompts=prompts)


def by_section(config: EvalConfig) -> list[tuple[ModelSection, list[Method]]]:
    """Returns the methods of each model section, in the order in which models are loaded."""
    groups: list[tuple[ModelSection, list[Method]]] = []
    for method, section in zip(config.methods, sections(config), strict=True):
        for other, methods in groups:
            if other == section:
                methods.append(method)
                break
        else:
            groups.append((section, [method]))
    return groups


def check_methods(methods: Sequence[Method], config: ModelConfig, length: int) -> None:
    """Checks the settings of methods before their model is loaded.

    Args:
      methods: the methods.
      config: the config of their model (`planned_config`).
      length: the longest context length.

    Raises:
      InputError: a setting does not fit the model, or a file of a setting is missing or damaged.
    """
    for method in methods:
        choices = _choices(method)
        if method.pattern is not None:
            choices["pattern"] = method.pattern.for_inference()
        with _naming(method):
            changed = model_config(ModelSection(**choices), config.for_inference())
            _check_cache(changed, method, length)


def method_settings(model, method: Method, length: int) -> Any:
    """Returns the config of `model` with the settings of `method`, as plain values.

    Raises:
      InputError: a setting does not fit the model.
    """
    with _naming(method):
        config = model.with_method(**_choices(method)).config
        if not dataclasses.is_dataclass(config):
            return None
        _check_cache(config, method, length)
    return draccus.encode(config)


def _choices(method: Method) -> dict[str, Any]:
    """Returns the settings of `method` that replace those of its model; None: the model's."""
    return {"rope": method.rope, "pattern": method.pattern, "cache": method.cache}


@contextlib.contextmanager
def _naming(method: Method) -> Iterator[None]:
    """Adds the name of `method` to an InputError of the block."""
    try:
        yield
    except InputError as error:
        raise InputError(f"methods: {method.name}: {error}") from error


def _check_cache(config: ModelConfig, method: Method, length: int) -> None:
    """Raises an InputError if a model with `config` has no cache as `method` says.

    `config` has the settings of `method`, and a row at most `length` tokens.
    """
    if method.cache is not None:
        abstract_cache(config, 1, length)
        if config.evicts and all(x.for_inference().is_bounded for x in config.patterns):
            raise InputError(
                "cache evicts tokens of layers that see whole texts, and all layers of this"
                " model have windows; leave cache out"
            )
    if method.question != "seen":
        check_compresses_prefix(config)
    if method.question == "window":
        config.cache.check_question(1)
