"""The command line of the pictures."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from lcjax import config as config_lib
from lcjax.attention import Causal, Pattern
from lcjax.checkpoints.build import ModelSection
from lcjax.config.help import print_help
from lcjax.errors import InputError, PositiveInt, check_fields, check_integer, suggestion
from lcjax.evaluation.plots import check_picture
from lcjax.files import read_input
from lcjax.generation.language_model import LanguageModel
from lcjax.models import LayerKind, preset
from lcjax.pictures.draw import (
    attention_picture,
    mask_picture,
    positions_picture,
    rope_picture,
)
from lcjax.pictures.recall import attention_recall
from lcjax.rope import (
    E2LLM,
    NTK,
    Default,
    E2Positions,
    Linear,
    PlainPositions,
    Positions,
    Rope,
    Yarn,
)
from lcjax.storage import to_path

_MAX_LAYER = 999
USAGE = """\
python -m lcjax.pictures mask --pattern.type=self_extend --pattern.window=32 --pattern.group=4
    who sees whom, and at which distance
python -m lcjax.pictures rope --length=32768
    wavelengths and agreement of position methods (--config FILE with `ropes:` for others)
python -m lcjax.pictures positions --rows=400
    positions that training rows visit, with E2-LLM, PI and others (--config FILE with `methods:`)
python -m lcjax.pictures attention --model.path=smollm2-135m-instruct --prompt_file=prompt.txt
    what each token of an answer looks at
python -m lcjax.pictures recall --model.path=smollm2-135m-instruct --model.pattern.type=moba \\
        --model.pattern.block=128 --model.pattern.top_k=8 --text_file=text.txt
    the share of full attention that a pattern keeps, and the share of keys that it reads
python -m lcjax.pictures mask --help: every key; --out names the PNG, an SVG lies beside it"""


@dataclasses.dataclass(frozen=True)
class MaskPicture:
    """Which keys each query sees."""

    pattern: Pattern = dataclasses.field(default_factory=Causal)
    layers: tuple[LayerKind, ...] = ()  # as model.layers
    layer: int = 0  # the layer that is drawn, counted from 0
    length: int = 128  # tokens of the text
    heads: int = 1  # heads with equal masks share a panel
    seed: int = 0  # of random queries and keys, for patterns whose mask depends on them
    out: str = "mask.png"


@dataclasses.dataclass(frozen=True)
class NamedRope:
    """A RoPE method, drawn as one line of the picture."""

    name: str
    rope: Rope


@dataclasses.dataclass(frozen=True)
class RopePicture:
    """Frequencies of RoPE methods."""

    ropes: tuple[NamedRope, ...] = (
        NamedRope("RoPE", Default()),
        NamedRope("PI, factor 4", Linear(factor=4.0)),
        NamedRope("NTK, strength 4", NTK(alpha=4.0)),
        NamedRope("YaRN, factor 4", Yarn(factor=4.0)),
    )
    head_dim: int = 128  # number of rotary channels
    theta: float = 10_000.0
    trained: int = 4096
    length: int = 16_384
    out: str = "rope.png"


@dataclasses.dataclass(frozen=True)
class NamedPositions:
    """A method of training positions, drawn as one column of the picture."""

    name: str
    positions: Positions
    rope: Rope = dataclasses.field(default_factory=E2LLM)


@dataclasses.dataclass(frozen=True)
class PositionsPicture:
    """Positions that training rows visit."""

    methods: tuple[NamedPositions, ...] = (
        NamedPositions("E2-LLM", E2Positions()),
        NamedPositions("g = 2", E2Positions(min_scale=2, max_scale=2)),
        NamedPositions("without offsets", E2Positions(offsets=False)),
        NamedPositions("PI, factor 8", PlainPositions(), Linear(factor=8.0)),
    )
    theta: float = 10_000.0
    trained: int = 4096
    length: int = 4096  # tokens of a training row
    rows: int = 400
    out: str = "positions.png"


@dataclasses.dataclass(frozen=True)
class AttentionPicture:
    """Attention of an answer."""

    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    prompt: str | None = None
    prompt_file: str | None = None  # instead of prompt: a text file
    answer: str | None = None  # null: the model generates one
    layers: tuple[int, ...] | None = None  # from 0; null: first, middle and last
    head: int | None = None  # null: the mean of all heads
    max_new_tokens: int = 16
    out: str = "attention.png"


@dataclasses.dataclass(frozen=True)
class RecallNumbers:
    """The share of full attention that a pattern keeps."""

    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    text_file: str | None = None
    tokens: PositiveInt = 4096  # first tokens of the text
    queries: PositiveInt = 64  # last tokens of these, whose attention counts

    def __post_init__(self):
        check_fields("", self)


def _mask(config: MaskPicture) -> None:
    check_integer("layer", config.layer, 0, most=_MAX_LAYER)
    model = preset("tiny").replace(num_layers=config.layer + 1, layers=config.layers)
    pattern = model.replace(pattern=config.pattern).layer(config.layer).pattern
    options = {"heads": config.heads, "seed": config.seed}
    _print_paths(mask_picture(pattern, config.length, config.out, **options))


def _rope(config: RopePicture) -> None:
    ropes = {entry.name: entry.rope for entry in config.ropes}
    fixed = {name: getattr(config, name) for name in ("head_dim", "theta", "trained", "length")}
    _print_paths(rope_picture(ropes, config.out, **fixed))


def _positions(config: PositionsPicture) -> None:
    methods = {entry.name: (entry.positions, entry.rope) for entry in config.methods}
    fixed = {name: getattr(config, name) for name in ("trained", "length", "theta", "rows")}
    _print_paths(positions_picture(methods, config.out, **fixed))


def _attention(config: AttentionPicture) -> None:
    if (config.prompt is None) == (config.prompt_file is None):
        raise InputError("prompt: give either --prompt=TEXT or --prompt_file=FILE")
    prompt = config.prompt
    if config.prompt_file is not None:
        prompt = read_input("prompt_file", config.prompt_file)
    check_picture(to_path(config.out))  # before the model is loaded
    attention = attention_picture(
        LanguageModel.load(config.model), prompt, config.out, answer=config.answer,
        layers=config.layers, head=config.head, max_new_tokens=config.max_new_tokens,
    )  # fmt: skip
    print(f"answer: {attention.answer!r}")
    _print_paths(to_path(config.out))


def _recall(config: RecallNumbers) -> None:
    text = read_input("text_file", config.text_file)
    lm = LanguageModel.load(config.model)
    ids = lm.encode(text)[: config.tokens]
    recall = attention_recall(lm, ids, queries=config.queries)
    print(f"the last {recall.queries} of {len(ids):,} tokens, mean of the heads of each layer")
    print("layer  attention kept  keys read")
    for number, (mass, keys) in enumerate(zip(recall.mass.mean(1), recall.keys.mean(1))):
        print(f"{number:5}  {100 * mass:12.1f} %  {100 * keys:7.1f} %")
    print(f"  all  {100 * recall.mass.mean():12.1f} %  {100 * recall.keys.mean():7.1f} %")


def _print_paths(path: Path) -> None:
    print(f"Written:\n  {path}\n  {path.with_suffix('.svg')}")


_PICTURES = {
    "mask": (MaskPicture, _mask),
    "rope": (RopePicture, _rope),
    "positions": (PositionsPicture, _positions),
    "attention": (AttentionPicture, _attention),
    "recall": (RecallNumbers, _recall),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Draws one picture; returns the exit code: 2 with a one-line error for wrong arguments."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print_help(USAGE)
        return 0 if words else 2
    if words[0] not in _PICTURES:
        known = suggestion(words[0], _PICTURES)
        print(f"error: {words[0]} is no picture; {known}", file=sys.stderr)
        return 2
    return config_lib.main(*_PICTURES[words[0]], words[1:])
