"""Compares how inference engines read a checkpoint (`engines`) with what lcjax computes."""

import dataclasses
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lcjax.attention import Causal, DualChunk
from lcjax.checkpoints.engines import (
    ENGINES,
    REFUSED,
    RIGHT,
    UNKNOWN,
    WRONG,
    Engine,
    Family,
    Reading,
    Settings,
)
from lcjax.checkpoints.families import FAMILIES, FULL, SLIDING, windows
from lcjax.checkpoints.gguf_file import GGUFFile
from lcjax.checkpoints.hf_config import announced_length, decoder_from_hf, text_model
from lcjax.checkpoints.hf_files import check_types, read_hf_json
from lcjax.checkpoints.hf_save import config_to_hf
from lcjax.checkpoints.hub import find_checkpoint, is_run
from lcjax.checkpoints.load import is_gguf, load_config, model_file
from lcjax.errors import InputError, one_line
from lcjax.memory import Memory
from lcjax.models.config import ModelConfig
from lcjax.rope import E2LLM, NTK, DynamicNTK, Linear, NoRotation, Rope, Yarn
from lcjax.storage import URLPath

NAMES = tuple(engine.name for engine in ENGINES)
_TOLERANCE = 1e-6  # relative, of frequencies and of the scale: float32 rounds by 6e-8
_SAME_LOGITS = 1e-4  # relative to the largest: float32 in two programs
_SAME = "position and pattern are as in lcjax"


@dataclasses.dataclass(frozen=True)
class Row:
    """The verdict on one engine."""

    engine: str
    version: str  # version of the sources that were read
    verdict: str  # right, wrong, refused or not known
    reason: str
    advice: str = ""  # what to do
    difference: float | None = None  # largest relative difference of frequencies and scale
    sources: tuple[str, ...] = ()  # files of the engine that were read


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of `check`: a description of the model, and one row for each engine."""

    model: str
    position: str
    pattern: str
    lengths: tuple[int, ...]  # at which frequencies were compared
    rows: tuple[Row, ...]

    @property
    def is_right(self) -> bool:
        return all(row.verdict == RIGHT for row in self.rows)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __str__(self) -> str:
        """Returns an aligned table, then a line for each row with a problem or advice."""
        lines = [f"{self.model}: {self.position}, {self.pattern}"]
        cells = [("engine", "source read", "verdict", "largest difference")]
        for row in self.rows:
            difference = "" if row.difference is None else f"{row.difference:.2g}"
            cells.append((row.engine, row.version, row.verdict, difference))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
        for row in self.rows:
            if row.verdict != RIGHT or row.advice or row.reason != _SAME:
                notes = filter(None, (row.reason, row.advice))
                lines.append(f"{row.engine} ({row.verdict}): {'; '.join(notes)}")
        return "\n".join(lines)


def check(path_or_name: str | Path, engines: Collection[str] = NAMES) -> Check:
    """Returns whether each engine computes the model that this checkpoint describes.

    Reads configs and no weights.

    Args:
      path_or_name: a Hugging Face folder, a run folder, a `.gguf` file or a hub id.
      engines: names of engines, from `NAMES`.

    Raises:
      InputError: the path is no checkpoint, or describes no model that lcjax reads.
    """
    name, path = str(path_or_name), find_checkpoint(path_or_name, weights=False)
    chosen = [engine for engine in ENGINES if engine.name in engines]
    if is_gguf(path):
        return _check_gguf(name, GGUFFile(path).hf_config, chosen)
    if not is_run(path):
        file = model_file(path)
        return check_config(read_hf_json(file), name, engines, where=str(file))
    config = load_config(path)
    try:
        hf = config_to_hf(config)
    except InputError as error:
        rows = (_row(e, [_Problem(REFUSED, f"there is nothing to read: {error}")]) for e in chosen)
        patterns = " and ".join(map(str, config.patterns))
        return Check(name, _position(config), patterns, (), tuple(rows))
    return check_config(hf, name, engines, where=name)


def check_config(
    hf: dict[str, Any], name: str, engines: Collection[str] = NAMES, where: str = "config.json"
) -> Check:
    """Checks the contents of a `config.json` as `check` does; `where` names it in errors."""
    check_types(hf, where)
    hf = text_model(hf, where)
    model = _Model.read(hf, where)
    by_name: dict[str, Row] = {}
    for engine in ENGINES:
        row = _row(engine, *_compare(engine, model))
        if engine.fallback and row.verdict in (WRONG, REFUSED):
            other, advice = engine.fallback
            if by_name[other].verdict == RIGHT:
                row = dataclasses.replace(row, advice=advice)
        by_name[engine.name] = row
    advice = _another_way(model, [n for n, row in by_name.items() if row.verdict == RIGHT])
    rows = tuple(
        row if row.advice or row.verdict == RIGHT else dataclasses.replace(row, advice=advice)
        for row in by_name.values()
        if row.engine in engines
    )
    return Check(name, _position(model.config), model.pattern, model.lengths, rows)


def run(result: Check, length: int, load: Callable[..., Any]) -> Check:
    """Compares the logits of lcjax and transformers on texts of 32 and of `length` random tokens.

    Args:
      result: the result of `check`.
      length: number of tokens of the longer text.
      load: `LanguageModel.load`.

    Returns:
      `result`, in which the row of transformers is replaced by the measured one.

    Raises:
      InputError: a package is missing, or the model is no folder that transformers opens.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise InputError(
            f"--run={length} needs {error.name}: pip install torch transformers"
        ) from None
    path = find_checkpoint(result.model)
    path = path / "model" if is_run(path) else path
    if isinstance(path, URLPath):
        raise InputError(f"--run={length}: transformers opens local folders; copy {path} to a disk")
    if not path.is_dir():
        raise InputError(f"--run={length}: {path} is no folder that transformers opens")
    model = load(str(path), param_dtype="float32", dtype="float32")
    transformers.utils.logging.disable_progress_bar()
    try:
        reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (KeyError, OSError, ValueError) as error:
        reason = f"in a run it stops: {one_line(error)[:200]}"
        return _with_run(result, transformers.__version__, REFUSED, reason)
    reference.eval()
    largest = 0.0
    for n in sorted({32, length}):
        tokens = np.random.default_rng(n).integers(model.config.vocab_size, size=(1, n))
        logits = model.logits(tokens)
        with torch.no_grad():
            difference = np.abs(logits - reference(torch.from_numpy(tokens)).logits.numpy())
        largest = max(largest, float(difference.max() / np.abs(logits).max()))
    reason = f"in a run, logits of texts of 32 and {length} tokens differ by {largest:.2g} of the"
    verdict = RIGHT if largest <= _SAME_LOGITS else WRONG
    return _with_run(result, transformers.__version__, verdict, f"{reason} largest", largest)


def _with_run(
    result: Check, version: str, verdict: str, reason: str, difference: float | None = None
) -> Check:
    row = Row("transformers", f"{version} (run)", verdict, reason, difference=difference)
    others = (row for row in result.rows if row.engine != "transformers")
    return dataclasses.replace(result, rows=(row, *others))


class _Model(NamedTuple):
    """The model that a `config.json` describes under the rules of transformers and lcjax."""

    hf: dict[str, Any]
    config: ModelConfig
    windows: list[int | None]  # of each layer; None: full attention
    lengths: tuple[int, int]  # the trained length, and the longest length that its method is for
    has_memory: bool

    @classmethod
    def read(cls, hf: dict[str, Any], where: str) -> "_Model":
        plain = {k: v for k, v in hf.items() if k != "quantization_config"}  # not needed here
        config = decoder_from_hf(plain, where)
        readings = (
            kind.from_hf(hf, where, decoder_from_hf) for kind in Memory.get_known_choices().values()
        )
        has_memory = any(with_memory is not None for with_memory in readings)
        return cls(hf, config, windows(config), _lengths(config), has_memory)

    @property
    def rope(self) -> Rope:
        return self.config.rope

    @property
    def target(self) -> int:
        return self.lengths[-1]

    @property
    def pattern(self) -> str:
        kinds = sorted({f"a window of {w}" if w else "full attention" for w in self.windows})
        words = " and ".join(kinds) if self.hf["model_type"] in FAMILIES else "landmark attention"
        if isinstance(self.config.pattern, DualChunk):
            words = "dual chunk attention"
        return words + (", with a memory" if self.has_memory else "")


def _lengths(config: ModelConfig) -> tuple[int, int]:
    target = announced_length(config)
    trained = getattr(config.rope, "original_length", None) or config.max_length
    if config.rope.depends_on_length and target <= trained:
        target = 2 * trained
    return min(trained, target), target


class _Problem(NamedTuple):
    """A reason for a verdict; with `RIGHT`, a remark."""

    verdict: str
    reason: str
    advice: str = ""


def _row(engine: Engine, problems: list[_Problem], difference: float | None = None) -> Row:
    """Joins the problems with the worst verdict into a row; without any, the engine is right."""
    for verdict in (REFUSED, WRONG, UNKNOWN, RIGHT):
        if worst := [p for p in problems if p.verdict == verdict]:
            break
    else:
        worst, verdict = [_Problem(RIGHT, _SAME)], RIGHT
    reason = "; ".join(dict.fromkeys(p.reason for p in worst))
    # Advice on one of several problems does not make the engine right.
    advice = "; ".join(p.advice for p in worst) if all(p.advice for p in worst) else ""
    return Row(engine.name, engine.version, verdict, reason, advice, difference, engine.sources)


def _check_gguf(name: str, hf: dict[str, Any], engines: list[Engine]) -> Check:
    """Checks the metadata of a GGUF file, as lcjax reads it."""
    model = _Model.read(hf, name)
    convert = f"run python -m lcjax.convert {name} DST, and check DST"
    rows = []
    for engine in engines:
        problems, difference = [_Problem(UNKNOWN, "how it reads GGUF is not known", convert)], None
        if engine.gguf is not None and model.hf["model_type"] in engine.families:
            problems, difference = _rope_problems(engine.gguf, _settings(engine, model), model)
            problems += _window_problems(engine.families[model.hf["model_type"]], model)
        rows.append(_row(engine, problems, difference))
    return Check(name, _position(model.config), model.pattern, model.lengths, tuple(rows))


def _compare(engine: Engine, model: _Model) -> tuple[list[_Problem], float | None]:
    """Returns the engine's problems, and the largest relative difference of the rotation."""
    hf, config = model.hf, model.config
    kind = hf["model_type"]
    if kind not in FAMILIES:
        return [_Problem(*engine.landmark)], None
    architecture = (hf.get("architectures") or [FAMILIES[kind].architecture])[0]
    if architecture != FAMILIES[kind].architecture:
        verdict, reason = engine.foreign
        return [_Problem(verdict, reason.format(architecture=architecture))], None
    if kind not in engine.families:
        return [_Problem(UNKNOWN, f"how it reads {architecture} is not known")], None
    family = engine.families[kind]
    if family is None:
        return [_Problem(REFUSED, f"it has no model class {architecture}")], None
    problems = [_Problem(*engine.memory)] if model.has_memory else []
    if isinstance(config.pattern, DualChunk):
        problems.append(_Problem(*engine.dual_chunk))
    if not family.head_dim and config.head_dim * config.num_heads != config.width:
        problems.append(_Problem(REFUSED, f"it reads no head_dim={config.head_dim}"))
    for key, verdict in family.biases.items():
        if hf.get(key):
            problems.append(_Problem(verdict, f"its class has no biases for {key}=true"))
    problems += _window_problems(family, model)
    differences = []
    for section, part in _by_layer_type(model):
        settings = _settings(engine, part, section)
        reading = family.ropes.get(settings.kind) or family.ropes["*"]
        rope_problems, difference = _rope_problems(reading, settings, part)
        problems += rope_problems
        differences += [] if difference is None else [difference]
    difference, settings = max(differences, default=None), _settings(engine, model)
    if engine.limit is not None and (limit := engine.limit(settings)):
        problems.append(_Problem(RIGHT, _SAME, limit))
    return problems, difference


def _by_layer_type(model: _Model) -> list[tuple[str, _Model]]:
    """Returns a model with the rope of each type of layers; a single one if all ropes are equal."""
    config = model.config
    local = next((kind.rope for kind, _ in config.layer_counts if kind.rope != model.rope), None)
    if FAMILIES[model.hf["model_type"]].local_theta is None or local is None:
        return [(FULL, model)]
    alike = config.replace(layers=(), pattern=Causal(), rope=local)
    return [(FULL, model), (SLIDING, model._replace(config=alike))]


def _settings(engine: Engine, model: _Model, section: str = FULL) -> Settings:
    """Returns the settings that the engine reads for layers of a type.

    Older configs have one rope for all layers.
    """
    hf = model.hf
    rope = dict(next((hf[key] for key in engine.keys if hf.get(key)), {}))
    if FULL in rope or SLIDING in rope:
        rope = dict(rope.get(section) or {})
    elif section == SLIDING:
        theta = hf.get("rope_local_base_freq") or FAMILIES[hf["model_type"]].local_theta
        rope = {"rope_theta": theta}
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or hf.get("rope_theta") or FAMILIES[hf["model_type"]].theta
    return Settings(hf, rope, float(theta), *model.lengths)


def _window_problems(family: Family, model: _Model) -> list[_Problem]:
    if family.windows == "uniform" and len(set(model.windows)) > 1:
        return [_Problem(REFUSED, "it refuses layers with and without a sliding window")]
    window = min((w for w in model.windows if w is not None), default=model.target)
    if family.windows != "none" or window >= model.target:
        return []
    reason = f"it ignores the sliding window of {window} tokens: every layer sees the whole text"
    return [_Problem(WRONG, reason, f"keep texts within {window} tokens")]


def _rope_problems(
    reading: Reading, settings: Settings, model: _Model
) -> tuple[list[_Problem], float | None]:
    kind, rope = settings.kind, model.rope
    if isinstance(rope, NoRotation):  # `no_rope_layers` is 0 for all: the rope is not used
        return [], None
    values = _values(settings, model)
    advice, note = reading.advice.format(**values), reading.note.format(**values)
    if reading.compute is None:
        return [_Problem(reading.verdict, f"rope type {kind}: {reading.reason}", advice)], None
    try:
        engine_rope = reading.compute(settings)
    except KeyError as error:
        return [_Problem(REFUSED, f"rope type {kind} lacks the key {error}")], None
    except (TypeError, ValueError) as error:  # a value that the engine's formula does not take
        return [_Problem(WRONG, f"{reading.reason}; with these values: {error}", advice)], None
    if rope.learned:
        reason, limit = f"it reads rope {rope.type} as {_describe(engine_rope)}", rope.hf_limit
        return [_Problem(WRONG, reason + (f", equal up to {limit} tokens" if limit else ""))], None
    differences = [_difference(rope, engine_rope, model.config, n) for n in model.lengths]
    unequal = [n for n, x in zip(model.lengths, differences, strict=True) if not x <= _TOLERANCE]
    if not unequal:
        return [_Problem(RIGHT, _SAME, note)] if note else [], max(differences)
    at = "" if len(unequal) == len(differences) else f"for texts of {unequal[0]} tokens "
    reason = "; ".join(filter(None, (reading.reason, f"{at}it computes {_describe(engine_rope)}")))
    return [_Problem(WRONG, reason, advice)], max(differences)


def _difference(rope: Rope, engine_rope: Rope, config: ModelConfig, length: int) -> float:
    """Returns the largest relative difference of frequencies and scale for `length` tokens."""
    f, scale = rope.frequencies(config.rotary_dim, length)
    engine_f, engine_scale = engine_rope.frequencies(config.rotary_dim, length)
    return float(max(np.max(np.abs(engine_f / f - 1.0)), abs(engine_scale / scale - 1.0)))


def _values(settings: Settings, model: _Model) -> dict[str, Any]:
    """Returns the values with which the sentences of the table are formatted."""
    rope, dim, target = model.rope, model.config.rotary_dim, model.target
    base, flags, betas = rope.theta, "", ""
    if isinstance(rope, DynamicNTK):
        base = NTK(theta=base, alpha=rope.alpha(target)).hf_rope(dim)[0]["rope_theta"]
    if isinstance(rope, Linear):
        flags = f" --rope-scaling linear --rope-scale {rope.factor:g}"
    if isinstance(rope, Yarn):
        flags = f" --rope-scaling yarn --rope-scale {rope.factor:g}"
        flags += f" --yarn-orig-ctx {rope.original_length}"
        if _has_only_betas(rope):
            betas = f"--yarn-beta-fast {rope.beta_fast:g} --yarn-beta-slow {rope.beta_slow:g}"
            flags += f" {betas}"
    return {
        "trained": settings.trained,
        "target": target,
        "max_length": settings.max_length,
        "scale": 1.0 if rope.learned else rope.frequencies(dim, target)[1],
        "base": base,
        "flags": f"start it with --rope-freq-base {base:.8g}{flags}",
        "betas": f"start it with {betas}" if betas else "",
    }


def _has_only_betas(rope: Yarn) -> bool:
    """Returns whether flags for beta_fast and beta_slow make llama.cpp's YaRN equal to this."""
    plain = Yarn(
        theta=rope.theta, factor=rope.factor, original_length=rope.original_length,
        beta_fast=rope.beta_fast, beta_slow=rope.beta_slow,
    )  # fmt: skip
    return rope == plain


def _another_way(model: _Model, rights: list[str]) -> str:
    """Returns advice for engines that have none of their own."""
    rope, target = model.rope, model.target
    same = f"for texts of {target} tokens alone, python -m lcjax.convert SRC DST"
    if isinstance(rope, DynamicNTK):
        return f"{same} --rope.type=ntk --rope.alpha={rope.alpha(target):g} writes an equal one"
    if isinstance(rope, E2LLM) and rope.factor is None:
        return f"{same} --rope.type=linear --rope.factor={rope.scale(target):g} writes an equal one"
    return f"use {' or '.join(rights)}" if rights else "read it with lcjax"


def _position(config: ModelConfig) -> str:
    """Describes the distinct RoPE methods of all layers."""
    return " and ".join(dict.fromkeys(_describe(layer.rope) for layer, _ in config.layer_counts))


def _describe(rope: Rope) -> str:
    """Describes a rope by its type and the fields that differ from their defaults."""
    words = []
    for field in dataclasses.fields(rope):
        value = getattr(rope, field.name)
        if value is None or (value == field.default and field.name != "factor"):
            continue
        if isinstance(value, tuple):
            value = f"[{value[0]:g} ... {value[-1]:g}]"
        words.append(
            f"{field.name}={value:g}" if isinstance(value, float) else f"{field.name}={value}"
        )
    return f"rope {rope.type}" + (f" ({', '.join(words)})" if words else "")
