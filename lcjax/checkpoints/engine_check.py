"""Compares how inference engines read a checkpoint with what lcjax computes.

`engines.yaml` holds the facts about the engines and explains their keys. The RoPE method that an
engine computes follows from them, so that frequencies are compared and not names.
"""

import dataclasses
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from lcjax.attention import Causal, Chunked, DualChunk
from lcjax.checkpoints.families import FAMILIES, FULL, SLIDING, windows
from lcjax.checkpoints.gguf_file import GGUFFile
from lcjax.checkpoints.hf_config import announced_length, decoder_from_hf, text_model
from lcjax.checkpoints.hf_files import check_types, read_hf_json
from lcjax.checkpoints.hf_save import config_to_hf
from lcjax.checkpoints.hub import find_checkpoint, is_run
from lcjax.checkpoints.load import is_gguf, load_config, model_file
from lcjax.errors import InputError
from lcjax.memory import Memory
from lcjax.models.mixer import Mixer
from lcjax.models.model_config import ModelConfig
from lcjax.rope import E2LLM, NTK, DynamicNTK, Linear, NoRotation, Rope, Yarn, from_hf

RIGHT, WRONG, REFUSED, UNKNOWN = "right", "wrong", "refused", "not known"
SAME = "position and pattern are as in lcjax"
Facts = dict[str, Any]
Problem = tuple[str, str, str]  # a verdict, its reason, and advice; with `RIGHT`, a remark
_FILE = Path(__file__).with_name("engines.yaml")
ENGINES: list[Facts] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))["engines"]
NAMES = tuple(engine["name"] for engine in ENGINES)
_TOLERANCE = 1e-6  # relative, of frequencies and of the scale: float32 rounds by 6e-8


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
    date: str = ""  # on which they were read


class Check(NamedTuple):
    """The result of `check`: a description of the model, and one row for each engine."""

    model: str
    position: str
    pattern: str
    lengths: tuple[int, ...]  # at which frequencies were compared
    rows: tuple[Row, ...]


class _Model(NamedTuple):
    """The model of a `config.json` under the rules of transformers and lcjax."""

    hf: dict[str, Any]
    config: ModelConfig
    trained: int  # the trained length
    target: int  # the longest length that its method is for


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
    if is_gguf(path):
        return check_config(GGUFFile(path).hf_config, name, engines, where=name, is_gguf_file=True)
    if not is_run(path):
        file = model_file(path)
        return check_config(read_hf_json(file), name, engines, where=str(file))
    config = load_config(path)
    try:
        hf = config_to_hf(config)
    except InputError as error:
        nothing = [(REFUSED, f"there is nothing to read: {error}", "")]
        rows = tuple(_row(engine, nothing, None) for engine in ENGINES if engine["name"] in engines)
        layers = " and ".join([*map(str, config.patterns), *_mixers(config)])
        return Check(name, _position(config), layers, (), rows)
    return check_config(hf, name, engines, where=name)


def check_config(
    hf: dict[str, Any],
    name: str,
    engines: Collection[str] = NAMES,
    where: str = "config.json",
    *,
    is_gguf_file: bool = False,
) -> Check:
    """Checks the contents of a `config.json` as `check` does.

    Args:
      hf: the contents, or those that lcjax reads in a GGUF file.
      name: the model's name in the result.
      engines: names of engines, from `NAMES`.
      where: names the config in errors.
      is_gguf_file: whether engines read a GGUF file.
    """
    check_types(hf, where)
    hf = text_model(hf, where)
    config = decoder_from_hf({k: v for k, v in hf.items() if k != "quantization_config"}, where)
    kinds = Memory.get_known_choices().values()
    has_memory = any(kind.from_hf(hf, where, decoder_from_hf) is not None for kind in kinds)
    target = announced_length(config)
    trained = getattr(config.rope, "original_length", None) or config.max_length
    if config.rope.depends_on_length and target <= trained:
        target = 2 * trained
    model, rows = _Model(hf, config, min(trained, target), target), {}
    for engine in ENGINES:
        if is_gguf_file:
            row = _row(engine, *_of_gguf(engine, model, name))
        else:
            row = _row(engine, *_of_config(engine, model, has_memory))
        other, advice = engine.get("fallback", (None, ""))
        if other and row.verdict in (WRONG, REFUSED) and rows[other].verdict == RIGHT:
            row = dataclasses.replace(row, advice=advice)
        rows[row.engine] = row
    advice = _another_way(model, [name for name, row in rows.items() if row.verdict == RIGHT])
    judged = tuple(
        row if row.advice or row.verdict == RIGHT else dataclasses.replace(row, advice=advice)
        for row in rows.values()
        if row.engine in engines
    )
    local = "chunks" if any(isinstance(x, Chunked) for x in config.patterns) else "a window"
    seen = {w for i, w in enumerate(windows(config)) if config.layer(i).mixer is None}
    seen = sorted(f"{local} of {w}" if w else "full attention" for w in seen)
    pattern = " and ".join([*seen, *_mixers(config)])
    pattern = pattern if hf["model_type"] in FAMILIES else "landmark attention"
    pattern = "dual chunk attention" if isinstance(config.pattern, DualChunk) else pattern
    pattern += ", with a memory" if has_memory else ""
    return Check(name, _position(config), pattern, (model.trained, target), judged)


def _mixers(config: ModelConfig) -> list[str]:
    """Returns the types of the mixers of layers without attention."""
    return sorted({Mixer.get_choice_name(type(mixer)) for mixer in config.mixers})


def _row(engine: Facts, problems: list[Problem], difference: float | None) -> Row:
    """Joins the problems with the worst verdict into a row; without any, the engine is right."""
    problems = problems or [(RIGHT, SAME, "")]
    verdict = min((p[0] for p in problems), key=(REFUSED, WRONG, UNKNOWN, RIGHT).index)
    _, reasons, advice = zip(*(p for p in problems if p[0] == verdict), strict=True)
    reason = "; ".join(dict.fromkeys(reasons))
    advice = "; ".join(advice) if all(advice) else ""  # advice on one of several does not suffice
    head, sources = (engine["name"], engine["version"]), tuple(engine["sources"])
    return Row(*head, verdict, reason, advice, difference, sources, str(engine["date"]))


def _of_gguf(engine: Facts, model: _Model, name: str) -> tuple[list[Problem], float | None]:
    """Returns what the engine makes of the metadata of a GGUF file, as lcjax reads it."""
    family = engine["families"].get(model.hf["model_type"])
    if "gguf" not in engine or family is None:
        convert = f"run python -m lcjax.convert {name} DST, and check DST"
        return [(UNKNOWN, "how it reads GGUF is not known", convert)], None
    problems, difference = _rope_problems(engine["gguf"], model, _section(engine, model))
    return problems + _window_problems(family, model), difference


def _of_config(
    engine: Facts, model: _Model, has_memory: bool
) -> tuple[list[Problem], float | None]:
    """Returns the engine's problems, and the largest relative difference of the rotation."""
    hf, config, kind = model.hf, model.config, model.hf["model_type"]
    if kind not in FAMILIES:
        return [(*engine["landmark"], "")], None
    architecture = (hf.get("architectures") or [FAMILIES[kind].architecture])[0]
    if architecture != FAMILIES[kind].architecture:
        verdict, reason = engine["foreign"]
        return [(verdict, reason.format(architecture=architecture), "")], None
    if (family := engine["families"].get(kind)) is None:
        unknown = UNKNOWN, f"how it reads {architecture} is not known", ""
        refused = REFUSED, f"it has no model class {architecture}", ""
        return [refused if kind in engine["families"] else unknown], None
    problems = [(*engine["memory"], "")] if has_memory else []
    if isinstance(config.pattern, DualChunk):
        problems.append((*engine["dual_chunk"], ""))
    if not family.get("head_dim", True) and config.head_dim * config.num_heads != config.width:
        problems.append((REFUSED, f"it reads no head_dim={config.head_dim}", ""))
    for key, verdict in family.get("biases", {}).items():
        if hf.get(key):
            problems.append((verdict, f"its class has no biases for {key}=true", ""))
    problems += _window_problems(family, model)
    # Layers with a window may have a rope of their own.
    parts, differences, full = {FULL: model}, [], config.rope
    local = next((layer.rope for layer, _ in config.layer_counts if layer.rope != full), None)
    if FAMILIES[kind].local_theta is not None and local is not None:
        alike = config.replace(layers=(), pattern=Causal(), rope=local)
        parts[SLIDING] = model._replace(config=alike)
    for layers, part in parts.items():
        rope = _section(engine, part, layers)
        facts = family["ropes"].get(rope["rope_type"], family["ropes"].get("*"))
        of_rope, difference = _rope_problems(facts, part, rope)
        problems += of_rope
        differences += [] if difference is None else [difference]
    rope, limit = _section(engine, model), hf["max_position_embeddings"]
    types = () if family.get("keeps_length") else engine.get("multiplies_length", ())
    if rope["rope_type"] in types:
        limit = _original(model, rope) if rope["rope_type"] == "yarn" else limit
        limit *= rope.get("factor") or 1
    if "multiplies_length" in engine and limit < model.target:
        override = f"'{{\"max_position_embeddings\": {model.target}}}'"
        advice = (
            f"serves at most {limit:g} tokens; for {model.target} add --hf-overrides {override}"
        )
        problems.append((RIGHT, SAME, advice))
    return problems, max(differences, default=None)


def _section(engine: Facts, model: _Model, layers: str = FULL) -> dict[str, Any]:
    """Returns the rope that the engine reads for layers of a type; older configs have one rope."""
    hf, family = model.hf, FAMILIES[model.hf["model_type"]]
    stated = (hf[key] for key in engine["keys"] if hf.get(key))
    rope = dict(next(stated, family.default_rope or {}))
    if FULL in rope or SLIDING in rope:
        rope = dict(rope.get(layers) or {})
    elif layers == SLIDING:
        rope = {"rope_theta": hf.get("rope_local_base_freq") or family.local_theta}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or hf.get("rope_theta") or family.theta
    return rope | {"rope_type": kind, "rope_theta": float(theta)}


def _window_problems(family: Facts, model: _Model) -> list[Problem]:
    reading, layers = family.get("windows"), windows(model.config)
    if reading == "uniform" and len(set(layers)) > 1:
        return [(REFUSED, "it refuses layers with and without a sliding window", "")]
    window = min((w for w in layers if w is not None), default=model.target)
    if reading != "none" or window >= model.target:
        return []
    reason = f"it ignores the sliding window of {window} tokens: every layer sees the whole text"
    return [(WRONG, reason, f"keep texts within {window} tokens")]


def _rope_problems(
    facts: Facts, model: _Model, section: dict[str, Any]
) -> tuple[list[Problem], float | None]:
    rope, dim = model.config.rope, model.config.rotary_dim
    if isinstance(rope, NoRotation):  # `no_rope_layers` is 0 for all: the rope is not used
        return [], None
    reason, kind = facts.get("reason", ""), section["rope_type"]
    advice, note = (facts.get(key, "").format(**_values(model)) for key in ("advice", "note"))
    if "verdict" in facts:
        return [(facts["verdict"], f"rope type {kind}: {reason}", advice)], None
    try:
        theirs = _engine_rope(facts, model, section)
    except KeyError as error:
        return [(REFUSED, f"rope type {kind} lacks the key {error}", "")], None
    except (TypeError, ValueError) as error:  # a value that the engine's formula does not take
        return [(WRONG, f"{reason}; with these values: {error}", advice)], None
    if rope.learned:
        reason = f"it reads rope {rope.type} as {theirs.describe()}"
        reason += f", equal up to {rope.hf_limit} tokens" if rope.hf_limit else ""
        return [(WRONG, reason, "")], None
    differences = {}
    for length in (model.trained, model.target):
        (f, scale), (their_f, their_scale) = (r.frequencies(dim, length) for r in (rope, theirs))
        largest = max(np.abs(their_f / f - 1).max(), abs(their_scale / scale - 1))
        differences[length] = float(largest)
    unequal = [length for length, x in differences.items() if not x <= _TOLERANCE]
    if not unequal:
        return [(RIGHT, SAME, note)] if note else [], max(differences.values())
    at = "" if len(unequal) == len(differences) else f"for texts of {unequal[0]} tokens "
    reason += f"{'; ' if reason else ''}{at}it computes {theirs.describe()}"
    return [(WRONG, reason, advice)], max(differences.values())


def _engine_rope(facts: Facts, model: _Model, section: dict[str, Any]) -> Rope:
    """Returns the rope that an engine computes; `from_hf` follows the rules of transformers."""
    hf, keys = model.hf, set(facts.get("reads", section)) | {"rope_theta"}
    rope = {k: v for k, v in section.items() if k in keys.difference(facts.get("ignores", ()))}
    rope = facts.get("defaults", {}) | rope | facts.get("sets", {})
    if missing := [key for key in facts.get("needs", ()) if key not in rope]:
        raise KeyError(*missing)
    if "formula" in facts:
        rope |= _FORMULAS[facts["formula"]](model, rope)
    # Without the keys besides `rope_parameters` that hold a rope.
    hf = {k: v for k, v in hf.items() if k not in ("rope_scaling", "rope_theta", "lcjax_rope")}
    length = hf["max_position_embeddings"]
    return from_hf(hf | {"rope_parameters": rope}).resolve(theta=rope["rope_theta"], length=length)


def _vllm_dynamic(model: _Model, rope: dict[str, Any]) -> dict[str, Any]:
    """Returns plain rope of one base for all lengths: that of `max_position_embeddings` tokens."""
    length, factor = model.hf["max_position_embeddings"], rope["factor"]
    growth = length / (rope.get("max_trained_positions") or length) - 1
    ntk = NTK(theta=rope["rope_theta"], alpha=float(rope.get("alpha") or factor * growth + 1))
    return {"rope_type": "default"} | ntk.hf_rope(model.config.rotary_dim)[0]


def _vllm_longrope(model: _Model, rope: dict[str, Any]) -> dict[str, Any]:
    """Returns one set of divisors for all texts: long if the target exceeds the trained length."""
    original = _original(model, rope)
    kind = "long" if model.target > original else "short"
    ratio = max(1.0, model.hf["max_position_embeddings"] / original)
    scale = rope.get(f"{kind}_mscale") or math.sqrt(1 + math.log(ratio) / math.log(original))
    divisors = dict.fromkeys(("short_factor", "long_factor"), rope[f"{kind}_factor"])
    return divisors | {"attention_factor": scale}


def _sglang_yarn(model: _Model, rope: dict[str, Any]) -> dict[str, Any]:
    """Uses `mscale` even without `mscale_all_dim`."""
    log = 0.1 * math.log(max(float(rope["factor"]), 1.0))
    scale = (rope.get("mscale", 1.0) * log + 1) / (rope.get("mscale_all_dim", 0.0) * log + 1)
    return {"attention_factor": scale, "mscale": None, "mscale_all_dim": None}


_FORMULAS = {f.__name__[1:]: f for f in (_vllm_dynamic, _vllm_longrope, _sglang_yarn)}


def _original(model: _Model, rope: dict[str, Any]) -> int:
    """Returns the trained length in the config; a missing one defaults as in transformers."""
    key, hf = "original_max_position_embeddings", model.hf
    return hf.get(key) or rope.get(key) or hf["max_position_embeddings"]


def _values(model: _Model) -> dict[str, Any]:
    """Returns the values with which the sentences of the facts are formatted."""
    rope, dim, target = model.config.rope, model.config.rotary_dim, model.target
    base, flags, betas = rope.theta, "", ""
    if isinstance(rope, DynamicNTK):
        base = NTK(theta=base, alpha=rope.alpha(target)).hf_rope(dim)[0]["rope_theta"]
    if isinstance(rope, Linear | Yarn):
        flags = f" --rope-scaling {rope.type} --rope-scale {rope.factor:g}"
    if isinstance(rope, Yarn):
        names = ("theta", "factor", "original_length", "beta_fast", "beta_slow")
        flags += f" --yarn-orig-ctx {rope.original_length}"
        if rope == Yarn(**{name: getattr(rope, name) for name in names}):
            betas = f"--yarn-beta-fast {rope.beta_fast:g} --yarn-beta-slow {rope.beta_slow:g}"
            flags += f" {betas}"
    return {
        "trained": model.trained,
        "target": target,
        "scale": 1.0 if rope.learned else rope.frequencies(dim, target)[1],
        "base": base,
        "flags": f"start it with --rope-freq-base {base:.8g}{flags}",
        "betas": f"start it with {betas}" if betas else "",
    }


def _another_way(model: _Model, rights: list[str]) -> str:
    """Returns advice for engines that have none of their own."""
    rope, target = model.config.rope, model.target
    same = f"for texts of {target} tokens alone, python -m lcjax.convert SRC DST"
    if isinstance(rope, DynamicNTK):
        return f"{same} --rope.type=ntk --rope.alpha={rope.alpha(target):g} writes an equal one"
    if isinstance(rope, E2LLM) and rope.factor is None:
        return f"{same} --rope.type=linear --rope.factor={rope.scale(target):g} writes an equal one"
    return f"use {' or '.join(rights)}" if rights else "read it with lcjax"


def _position(config: ModelConfig) -> str:
    """Describes the distinct RoPE methods of all layers."""
    return " and ".join(dict.fromkeys(layer.rope.describe() for layer, _ in config.layer_counts))
