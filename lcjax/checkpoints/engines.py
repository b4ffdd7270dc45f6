"""Which inference engines read the position method and attention pattern of a checkpoint right.

`ENGINES` is a table of facts that were read in the engines' sources, at the versions named there.
What an engine makes of a `config.json` is written as a method of `lcjax.rope`, so whether it is
right follows from numbers: its frequencies are compared with those of the model at two lengths. For
a new release of an engine, read its files and edit its entry.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lcjax.checkpoints.gguf_file import GGUFFile
from lcjax.checkpoints.hf_config import DEFAULT_WINDOW, SUPPORTED, config_from_hf
from lcjax.checkpoints.hf_files import check_types, read_hf_json
from lcjax.checkpoints.hf_save import config_to_hf
from lcjax.checkpoints.hub import is_run, resolve
from lcjax.checkpoints.load import is_gguf, load_config, model_file
from lcjax.errors import InputError
from lcjax.memory import Memory
from lcjax.rope import (
    NTK,
    Default,
    DynamicNTK,
    E2LLM,
    Linear,
    Llama3,
    LongRope,
    Rope,
    Yarn,
    from_hf,
)

RIGHT, WRONG, REFUSED, UNKNOWN = "right", "wrong", "refused", "not known"
_TOLERANCE = 1e-6  # relative, of frequencies and of the scale: about float32's precision
_ORIGINAL = "original_max_position_embeddings"
_THETA = 10_000.0  # what every engine takes for these families when the config has none
_CLASSES = {kind: f"{kind.capitalize()}ForCausalLM" for kind in SUPPORTED}
_HF_ROPE = ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", _ORIGINAL)


@dataclasses.dataclass(frozen=True)
class Row:
    """The verdict on one engine."""

    engine: str
    version: str  # that the facts were read from
    verdict: str  # right, wrong, refused or not known
    reason: str
    advice: str  # what to do; empty if it is right
    difference: float | None = None  # largest relative one of frequencies and scale
    sources: tuple[str, ...] = ()  # files of the engine


class Settings(NamedTuple):
    """A `config.json` as one engine sees it."""

    hf: dict[str, Any]
    rope: dict[str, Any]  # the dictionary that this engine takes, with `rope_type`
    theta: float
    trained: int  # tokens
    target: int  # longest text that the method is for

    @property
    def kind(self) -> str:
        return self.rope["rope_type"]

    @property
    def max_length(self) -> int:
        return self.hf["max_position_embeddings"]

    def original(self) -> int:
        """The trained length under transformers' rules for a missing one."""
        return self.hf.get(_ORIGINAL) or self.rope.get(_ORIGINAL) or self.max_length


@dataclasses.dataclass(frozen=True)
class Reading:
    """What an engine makes of one type of rope.

    `compute` is None where the engine refuses the type, or where its source does not tell
    (`verdict`). `advice` is formatted with the names of `_advice_values`.
    """

    compute: Callable[[Settings], Rope] | None
    reason: str = ""
    advice: str = ""
    verdict: str = REFUSED
    note: str = ""  # said although it is right


@dataclasses.dataclass(frozen=True)
class Family:
    """How an engine reads one family of models.

    `ropes` maps rope types to readings; the key "*" is for every other type. `windows` is config
    (those of the config), none (ignored), or uniform (refused if layers differ).
    """

    ropes: Mapping[str, Reading]
    windows: str = "config"
    biases: Mapping[str, str] = dataclasses.field(default_factory=dict)  # key that fails -> verdict
    head_dim: bool = True  # whether num_heads * head_dim may differ from the width


@dataclasses.dataclass(frozen=True)
class Engine:
    """One engine; `families` is by model type, and None under a type stands for a refusal.

    `foreign` is what happens to a class of models that the engine lacks, `memory` what happens to a
    memory beside a class that it has: a verdict and the reason.
    """

    name: str
    version: str
    sources: tuple[str, ...]
    keys: tuple[str, ...]  # of config.json that hold the rope; the first one wins
    families: Mapping[str, Family | None]
    foreign: tuple[str, str]
    memory: tuple[str, str]
    landmark: tuple[str, str]
    missing: str = ""  # why a family is refused
    limit: str = ""  # said of texts that are longer than `max_position_embeddings`
    fallback: tuple[str, str] | None = None  # an engine whose reading it can take, and how


def _standard(s: Settings) -> Rope:
    """As transformers, whose rules `lcjax.rope.from_hf` follows."""
    hf = {k: v for k, v in s.hf.items() if k == _ORIGINAL or k not in (*_HF_ROPE, "lcjax_rope")}
    rope = from_hf(hf | {"rope_parameters": s.rope | {"rope_theta": s.theta}})
    return rope.resolve(theta=s.theta, length=s.max_length)


def _plain(s: Settings) -> Rope:
    return Default(theta=s.theta)


def _plain_10000(s: Settings) -> Rope:
    return Default(theta=10_000.0)


def _vllm_dynamic(s: Settings) -> Rope:
    """One base for all lengths: that of `max_position_embeddings` tokens."""
    trained = s.rope.get("max_trained_positions") or s.max_length
    alpha = s.rope.get("alpha") or s.rope["factor"] * s.max_length / trained - s.rope["factor"] + 1
    return NTK(theta=s.theta, alpha=float(alpha))


def _vllm_longrope(s: Settings) -> Rope:
    """One set of divisors for all texts: long where the server reads more than L tokens."""
    original = s.original()
    long = s.target > original
    scale = s.max_length / original
    attention = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    divisors = tuple(s.rope["long_factor" if long else "short_factor"])
    return LongRope(
        theta=s.theta,
        short_factor=divisors,
        long_factor=divisors,
        original_length=original,
        attention_factor=s.rope.get("long_mscale" if long else "short_mscale") or attention,
    )


def _tpu_llama3(s: Settings) -> Rope:
    """`apply_rope_scaling`: Llama 3's formula over whatever keys there are, and no scale."""
    has_length = s.kind in ("llama3", "yarn", "longrope", "su")  # transformers fills it for them
    return Llama3(
        theta=s.theta,
        factor=float(s.rope.get("factor") or 8.0),
        low_freq_factor=float(s.rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(s.rope.get("high_freq_factor", 4.0)),
        original_length=s.original() if has_length else int(s.rope.get(_ORIGINAL, 8192)),
    )


def _sglang_yarn(s: Settings) -> Rope:
    """Reads no `attention_factor` and no `truncate`; `mscale` counts alone."""
    factor = float(s.rope["factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return Yarn(
        theta=s.theta,
        factor=factor,
        original_length=s.original(),
        beta_fast=float(s.rope.get("beta_fast", 32.0)),
        beta_slow=float(s.rope.get("beta_slow", 1.0)),
        attention_factor=mscale(s.rope.get("mscale", 1.0))
        / mscale(s.rope.get("mscale_all_dim", 0.0)),
    )


def _llama_cpp_yarn(s: Settings) -> Rope:
    """The factor and the trained length; all else is the default."""
    return Yarn(theta=s.theta, factor=float(s.rope["factor"]), original_length=s.original())


_LIMIT = (
    "serves at most max_position_embeddings={max_length} tokens; for {target} add --hf-overrides"
    " '{{\"max_position_embeddings\": {target}}}'"
)
_STATIC = ("default", "linear", "yarn", "llama3")
_TRANSFORMERS_ROPES = {
    "*": Reading(_standard),
    **dict.fromkeys(
        ("dynamic", "longrope", "su"),
        Reading(
            _standard,
            note="while it writes past the trained length, cached keys keep the frequencies of the"
            " length at which they were read",
        ),
    ),
}
_VLLM_ROPES = {
    "*": Reading(_standard),
    "dynamic": Reading(
        _vllm_dynamic,
        "its dynamic rope has one base for all texts, that of max_position_embeddings tokens"
        " (dynamic_ntk_scaling_rope.py), and tables of so many positions",
    ),
    **dict.fromkeys(
        ("longrope", "su"),
        Reading(
            _vllm_longrope,
            "its longrope takes long_factor for every text where --max-model-len is above the"
            " trained length, else short_factor, and derives the scale from"
            " max_position_embeddings (phi3_long_rope_scaled_rope.py)",
            "for the scale add short_mscale and long_mscale (here {scale:.6g}) to rope_parameters"
            " in config.json; short texts need a server with --max-model-len {trained}",
        ),
    ),
}
_VLLM_BACKEND_ROPES = {
    **dict.fromkeys(_STATIC, Reading(_standard)),
    "*": Reading(
        None,
        "runs transformers' own module in batches (models/transformers), whose lengths its source"
        " does not tell apart",
        verdict=UNKNOWN,
    ),
}
_TPU_ROPES = {
    "default": Reading(_plain),
    "*": Reading(
        _tpu_llama3,
        "its JAX models send every type but default, proportional and mrope through Llama 3's"
        " formula, without a scale (layers/jax/rope_interface.py)",
    ),
}
_LLAMA_CPP_ROPES = {
    "default": Reading(_plain),
    "linear": Reading(_standard),
    "llama3": Reading(_standard),
    "yarn": Reading(
        _llama_cpp_yarn,
        "for this architecture it reads no beta_fast and beta_slow (32 and 1), no truncate and no"
        " attention_factor (the scale is 0.1 ln(factor) + 1)",
        "{betas}",
    ),
    "dynamic": Reading(
        _plain,
        "the conversion writes no scaling for dynamic, and it has no such rope",
        "for texts of {target} tokens start it with --rope-freq-base {ntk_theta:.8g}",
    ),
    **dict.fromkeys(
        ("longrope", "su"),
        Reading(_plain, "the conversion writes the factors of longrope for Phi-3 only"),
    ),
}
_PHI2_ROPE = Reading(
    _plain_10000,
    "the conversion of Phi writes neither rope_theta nor a scaling (conversion/phi.py)",
    "start it with {flags}",
)
_SGLANG_ROPES = {
    "default": Reading(_plain),
    "llama3": Reading(
        _plain,
        "its class for llama3 overrides _compute_inv_freq, which the rotation does not call, so the"
        " scaling is lost (layers/embeddings.py)",
    ),
    "yarn": Reading(
        _sglang_yarn,
        "its yarn reads neither attention_factor nor truncate, and mscale without mscale_all_dim",
    ),
    "*": Reading(None, "raises 'Unknown RoPE scaling type' (layers/embeddings.py)"),
}
_SGLANG_QWEN2 = Reading(
    _plain, "its Qwen2 ignores rope_scaling: the rotation is plain (models/qwen2.py)"
)

ENGINES = (
    Engine(
        name="transformers",
        version="5.23.0",
        sources=("modeling_rope_utils.py", "models/*/modeling_*.py", "models/*/configuration_*.py"),
        keys=("rope_scaling", "rope_parameters"),
        families={
            "llama": Family(_TRANSFORMERS_ROPES),
            "mistral": Family(_TRANSFORMERS_ROPES),
            "qwen2": Family(_TRANSFORMERS_ROPES),
            "phi": Family(_TRANSFORMERS_ROPES),
        },
        foreign=(WRONG, "it picks the class by model_type and leaves the memory's weights out"),
        memory=(WRONG, "it leaves the memory's weights out, with a warning"),
        landmark=(REFUSED, "it does not know model_type llama_with_landmark"),
    ),
    Engine(
        name="vllm",
        version="0.33.0",
        sources=(
            "vllm/model_executor/layers/rotary_embedding/",
            "vllm/model_executor/models/{llama,mistral,qwen2,registry}.py",
            "vllm/config/model.py",
            "vllm/engine/arg_utils.py",
        ),
        keys=("rope_scaling", "rope_parameters"),
        families={
            "llama": Family(_VLLM_ROPES),
            "mistral": Family(_VLLM_ROPES),
            "qwen2": Family(_VLLM_ROPES, windows="uniform", head_dim=False),
            "phi": Family(_VLLM_BACKEND_ROPES),
        },
        foreign=(REFUSED, "it has no model class {architecture}"),
        memory=(REFUSED, "its loader stops at weights that the model class lacks"),
        landmark=(REFUSED, "transformers, which reads the config, does not know the model type"),
        limit=_LIMIT,
    ),
    Engine(
        name="tpu-inference",
        version="0.32.0, b8692ff01",
        sources=(
            "tpu_inference/layers/jax/rope_interface.py",
            "tpu_inference/models/jax/{llama3,qwen2}.py",
            "tpu_inference/models/common/model_loader.py",
        ),
        keys=("rope_scaling", "rope_parameters"),
        families={
            "llama": Family(_TPU_ROPES, biases={"attention_bias": REFUSED, "mlp_bias": REFUSED}),
            "qwen2": Family(_TPU_ROPES, windows="none"),
            # Not among its JAX models: it runs vLLM's own.
            "mistral": Family(_VLLM_ROPES),
            "phi": Family(
                {"*": Reading(None, "vLLM's Transformers backend on TPUs", verdict=UNKNOWN)}
            ),
        },
        foreign=(REFUSED, "vLLM, which reads the config, has no model class {architecture}"),
        memory=(REFUSED, "its loader stops at weights that the model class lacks"),
        landmark=(REFUSED, "transformers, which reads the config, does not know the model type"),
        limit=_LIMIT,
        fallback=("vllm", "set MODEL_IMPL_TYPE=vllm, which runs vLLM's own model"),
    ),
    Engine(
        name="sglang-jax",
        version="cddbf6f1c",
        sources=(
            "python/sgl_jax/srt/layers/embeddings.py",
            "python/sgl_jax/srt/models/{llama,qwen2,registry}.py",
        ),
        keys=("rope_scaling",),  # with transformers 4.57, which it requires
        families={
            "llama": Family(_SGLANG_ROPES, biases={"mlp_bias": WRONG}),
            "qwen2": Family({"*": _SGLANG_QWEN2}, windows="none"),
            "mistral": None,
            "phi": None,
        },
        foreign=(REFUSED, "it has no model class {architecture}"),
        memory=(WRONG, "it loads the weights that its model class has and leaves the others out"),
        landmark=(REFUSED, "transformers, which reads the config, does not know the model type"),
        missing="its registry has no such class",
    ),
    Engine(
        name="llama.cpp",
        version="0c1e57098",
        sources=(
            "conversion/{base,llama,qwen,phi}.py",
            "src/llama-context.cpp",
            "src/llama-model.cpp",
            "src/models/{llama,qwen2,phi2}.cpp",
        ),
        keys=("rope_parameters", "rope_scaling"),
        families={
            "llama": Family(_LLAMA_CPP_ROPES),
            "mistral": Family(_LLAMA_CPP_ROPES, windows="none"),
            "qwen2": Family(
                _LLAMA_CPP_ROPES
                | {
                    "llama3": Reading(_plain, "its conversion of Qwen2 writes no factors of llama3")
                },
                windows="none",
                head_dim=False,
            ),
            "phi": Family({"*": _PHI2_ROPE}),
        },
        foreign=(REFUSED, "its conversion does not know the class {architecture}"),
        memory=(REFUSED, "its conversion stops at weights that it cannot map"),
        landmark=(
            WRONG,
            "its conversion looks at the class alone, LlamaForCausalLM: all tokens are seen and"
            " landmarks are ordinary tokens",
        ),
    ),
)
NAMES = tuple(engine.name for engine in ENGINES)


class _Problem(NamedTuple):
    verdict: str
    reason: str
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class Check:
    """What `check` returns: the model in words, and one row for each engine."""

    model: str
    position: str
    pattern: str
    lengths: tuple[int, ...]  # at which frequencies were compared
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __str__(self) -> str:
        """An aligned table, then the reason and the way out of every row that is not right."""
        lines = [f"{self.model}: {self.position}, {self.pattern}"]
        cells = [("engine", "source read", "verdict", "largest difference")]
        for row in self.rows:
            difference = "" if row.difference is None else f"{row.difference:.2g}"
            cells.append((row.engine, row.version, row.verdict, difference))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for line in cells:
            lines.append("  ".join(map(str.ljust, line, widths)).rstrip())
        for row in self.rows:
            if row.verdict != RIGHT or row.advice:
                lines.append(
                    f"{row.engine}: {row.reason}" + (f"; {row.advice}" if row.advice else "")
                )
        return "\n".join(lines)


def check(path_or_name: str | Path, engines: tuple[str, ...] = NAMES) -> Check:
    """Says for each engine whether it computes what this checkpoint describes.

    It reads configs, no weights.

    Args:
      path_or_name: a Hugging Face folder, a run folder, a `.gguf` file or a hub id.
      engines: names out of `NAMES`.

    Raises:
      InputError: the path is no checkpoint, or describes no model that lcjax reads.
    """
    name, path = str(path_or_name), resolve(path_or_name, weights=False)
    chosen = [engine for engine in ENGINES if engine.name in engines]
    if is_gguf(path):
        return _check_gguf(name, path, chosen)
    if not is_run(path):
        file = model_file(path)
        return check_config(read_hf_json(file), name, engines, where=str(file))
    config = load_config(path)
    try:
        hf = config_to_hf(config)
    except InputError as error:
        rows = (_row(e, _Problem(REFUSED, f"there is nothing to read: {error}")) for e in chosen)
        return Check(name, f"rope {config.rope.type}", f"{config.pattern}", (), tuple(rows))
    return check_config(hf, name, engines, where=name)


def check_config(
    hf: dict[str, Any], name: str, engines: tuple[str, ...] = NAMES, where: str = "config.json"
) -> Check:
    """`check` for the contents of a `config.json`; `where` is its name in messages."""
    check_types(hf, where)
    config = config_from_hf(_readable(hf), where)
    windows = _windows(hf)
    lengths = _lengths(config.rope, config.max_length)
    has_memory = any(
        kind.from_hf(hf, where, config_from_hf) is not None
        for kind in Memory.get_known_choices().values()
    )
    verdicts: dict[str, Row] = {}
    for engine in ENGINES:
        problems, difference = _problems(engine, hf, config, windows, lengths, has_memory)
        row = _row(engine, *problems, difference=difference)
        if (
            engine.fallback
            and row.verdict != RIGHT
            and verdicts[engine.fallback[0]].verdict == RIGHT
        ):
            row = dataclasses.replace(row, advice=engine.fallback[1])
        verdicts[engine.name] = row
    rights = [row.engine for row in verdicts.values() if row.verdict == RIGHT]
    rows = tuple(
        row if row.advice or row.verdict == RIGHT else dataclasses.replace(row, advice=advice)
        for row in verdicts.values()
        if row.engine in engines
        for advice in [_another_way(config.rope, lengths[-1], rights)]
    )
    return Check(name, _describe(config.rope), _pattern(hf, windows, has_memory), lengths, rows)


def _check_gguf(name: str, path: Path, engines: list[Engine]) -> Check:
    """Of a GGUF file only llama.cpp is known: lcjax reads its metadata as llama.cpp means it."""
    config = GGUFFile(path).config()
    convert = f"convert it (python -m lcjax.convert {name} DST) and check DST"
    rows = [
        Row(e.name, e.version, RIGHT, "the file is in its own format", "", sources=e.sources)
        if e.name == "llama.cpp"
        else _row(e, _Problem(UNKNOWN, "how it reads GGUF was not looked at", convert))
        for e in engines
    ]
    return Check(name, _describe(config.rope), f"{config.pattern}", (), tuple(rows))


def _row(engine: Engine, *problems: _Problem, difference: float | None = None) -> Row:
    """The gravest problems together; without any, the engine is right."""
    for verdict in (REFUSED, WRONG, UNKNOWN, RIGHT):
        if these := [p for p in problems if p.verdict == verdict]:
            reason = "; ".join(p.reason for p in these)
            advice = "; ".join(p.advice for p in these if p.advice)
            break
    else:
        verdict, reason, advice = RIGHT, "position and pattern are as in lcjax", ""
    return Row(
        engine.name, engine.version, verdict, reason, advice, difference, sources=engine.sources
    )


def _problems(
    engine: Engine,
    hf: dict[str, Any],
    config: Any,
    windows: list[int | None],
    lengths: tuple[int, int],
    has_memory: bool,
) -> tuple[list[_Problem], float | None]:
    """What is not as in the model, and the largest relative difference of the rotation."""
    kind = hf["model_type"]
    if kind not in engine.families:
        return [_Problem(*engine.landmark)], None
    architecture = (hf.get("architectures") or [_CLASSES[kind]])[0]
    if architecture != _CLASSES[kind]:
        verdict, reason = engine.foreign
        return [_Problem(verdict, reason.format(architecture=architecture))], None
    family = engine.families[kind]
    if family is None:
        return [_Problem(REFUSED, f"{architecture}: {engine.missing}")], None
    problems = [_Problem(*engine.memory)] if has_memory else []
    if not family.head_dim and config.head_dim * config.num_heads != config.width:
        reason = (
            "it takes head_dim = hidden_size / num_attention_heads, which the weights do not fit"
        )
        problems.append(_Problem(REFUSED, reason))
    for key, verdict in family.biases.items():
        if hf.get(key):
            problems.append(_Problem(verdict, f"its class has no biases for {key}=true"))
    problems += _window_problems(family, windows, lengths[-1])
    settings = _settings(engine, hf, config, lengths[-1])
    reading = family.ropes.get(settings.kind) or family.ropes["*"]
    found, difference = _rope_problems(reading, settings, config, lengths)
    problems += found
    if not problems and engine.limit and settings.max_length < lengths[-1]:
        if settings.kind not in ("linear", "dynamic"):  # their limit is multiplied by the factor
            note = engine.limit.format(max_length=settings.max_length, target=lengths[-1])
            problems.append(_Problem(RIGHT, "position and pattern are as in lcjax", note))
    return problems, difference


def _window_problems(family: Family, windows: list[int | None], target: int) -> list[_Problem]:
    if family.windows == "uniform" and len(set(windows)) > 1:
        return [_Problem(REFUSED, "it refuses layers with and without a sliding window")]
    window = min((w for w in windows if w is not None), default=target)
    if family.windows != "none" or window >= target:
        return []
    reason = f"it ignores the sliding window of {window} tokens: every layer sees the whole text"
    return [_Problem(WRONG, reason, f"keep texts within {window} tokens")]


def _rope_problems(
    reading: Reading, settings: Settings, config: Any, lengths: tuple[int, int]
) -> tuple[list[_Problem], float | None]:
    values = _advice_values(settings, config)
    advice = reading.advice.format(**values)
    if reading.compute is None:
        reason = f"rope type {settings.kind}: {reading.reason}"
        return [_Problem(reading.verdict, reason, advice)], None
    try:
        theirs = reading.compute(settings)
        if config.rope.learned:
            limit = config.rope.hf_limit
            reason = f"it reads rope {config.rope.type} as {_describe(theirs)}"
            reason += f", which is equal up to {limit} tokens" if limit else ""
            return [_Problem(WRONG, reason)], None
        differences = [
            _difference(config.rope, theirs, config.rotary_dim, length) for length in lengths
        ]
    except KeyError as error:
        return [_Problem(REFUSED, f"rope type {settings.kind} lacks the key {error}")], None
    wrong = [n for n, x in zip(lengths, differences, strict=True) if not x <= _TOLERANCE]
    if not wrong:
        return [], max(differences)
    reason = f"{reading.reason}; " if reading.reason else ""
    reason += f"for texts of {wrong[0]} tokens it computes rope {_describe(theirs)}"
    return [_Problem(WRONG, reason, advice)], max(differences)


def _difference(ours: Rope, theirs: Rope, rotary_dim: int, length: int) -> float:
    """The largest relative difference of frequencies and scale for a text of `length` tokens."""
    (f, scale), (f_theirs, scale_theirs) = (
        rope.frequencies(rotary_dim, length) for rope in (ours, theirs)
    )
    return float(max(np.max(np.abs(f_theirs / f - 1.0)), abs(scale_theirs / scale - 1.0)))


def _settings(engine: Engine, hf: dict[str, Any], config: Any, target: int) -> Settings:
    rope = dict(next((hf[key] for key in engine.keys if hf.get(key)), {}))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or hf.get("rope_theta") or _THETA
    trained = getattr(config.rope, "original_length", None) or config.max_length
    return Settings(hf, rope, float(theta), trained, target)


def _lengths(rope: Rope, max_length: int) -> tuple[int, int]:
    """A length for which the checkpoint was trained, and one for which the method extends it."""
    if (trained := getattr(rope, "original_length", None)) is None:
        return max_length, max_length
    target = max(max_length, math.ceil(trained * (getattr(rope, "factor", None) or 1)))
    if rope.depends_on_length and target <= trained:
        target = 2 * trained
    return min(trained, target), target


def _advice_values(settings: Settings, config: Any) -> dict[str, Any]:
    """What the sentences of `Reading.advice` may name."""
    rope, base = config.rope, settings.theta
    scale = 1.0 if rope.learned else rope.frequencies(config.rotary_dim, settings.target)[1]
    if isinstance(rope, DynamicNTK):
        base = NTK(theta=rope.theta, alpha=rope.alpha(settings.target)).hf_rope(config.rotary_dim)
        base = base[0]["rope_theta"]
    flags = f"--rope-freq-base {base:.8g}"
    betas = ""
    if isinstance(rope, Linear):
        flags += f" --rope-scaling linear --rope-scale {rope.factor:g}"
    if isinstance(rope, Yarn):
        flags += f" --rope-scaling yarn --rope-scale {rope.factor:g}"
        flags += f" --yarn-orig-ctx {rope.original_length}"
        default = (rope.beta_fast, rope.beta_slow) == (32.0, 1.0)
        if not default:
            betas = f"--yarn-beta-fast {rope.beta_fast:g} --yarn-beta-slow {rope.beta_slow:g}"
            flags, betas = f"{flags} {betas}", f"start it with {betas}"
    return settings._asdict() | {
        "scale": scale, "ntk_theta": base, "flags": flags, "betas": betas
    }  # fmt: skip


def _another_way(rope: Rope, target: int, rights: list[str]) -> str:
    """What to do where the engine itself has no way out."""
    same = (
        f"for texts of {target} tokens alone the same is written by python -m lcjax.convert with "
    )
    if isinstance(rope, DynamicNTK):
        return f"{same}--rope.type=ntk --rope.alpha={rope.alpha(target):g}"
    if isinstance(rope, E2LLM) and rope.factor is None:
        return f"{same}--rope.type=linear --rope.factor={rope.scale(target):g}"
    if rights:
        return f"use {' or '.join(rights)}, or a form that all engines read (a plain rope: ntk)"
    return "read it with lcjax"


def _describe(rope: Rope) -> str:
    """The type and the fields that say something."""
    values = {
        f.name: getattr(rope, f.name)
        for f in dataclasses.fields(rope)
        if getattr(rope, f.name) not in (None, f.default)
    }
    shown = [
        f"{k}={v:g}" if isinstance(v, float) else f"{k}=[{v[0]:g} ... {v[-1]:g}]"
        if isinstance(v, tuple) else f"{k}={v}"
        for k, v in values.items()
    ]  # fmt: skip
    return f"{rope.type} ({', '.join(shown)})"


def _pattern(hf: dict[str, Any], windows: list[int | None], has_memory: bool) -> str:
    kinds = sorted({"full attention" if w is None else f"a window of {w}" for w in windows})
    if hf["model_type"] not in _CLASSES:
        kinds = ["landmark attention"]
    return " and ".join(kinds) + (", with a memory" if has_memory else "")


def _windows(hf: dict[str, Any]) -> list[int | None]:
    """The sliding window of each layer under transformers' rules; None: full attention."""
    layers, window = hf["num_hidden_layers"], hf.get("sliding_window", DEFAULT_WINDOW)
    if hf["model_type"] == "mistral":
        return [window] * layers
    if hf["model_type"] != "qwen2" or not hf.get("use_sliding_window"):
        return [None] * layers
    kinds = hf.get("layer_types") or [
        "full_attention" if i < hf.get("max_window_layers", 28) else "sliding_attention"
        for i in range(layers)
    ]
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _readable(hf: dict[str, Any]) -> dict[str, Any]:
    """The config without what no position method depends on and lcjax cannot load."""
    plain = {k: v for k, v in hf.items() if k != "quantization_config"}
    return plain | {"use_sliding_window": False}
